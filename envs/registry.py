"""From a name in a config to a Python object: a short name out of a table, or a dotted path "module:attribute"."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any


def resolve(name: str, table: Mapping[str, str], kind: str) -> Any:
    """The object behind `name`: a key of `table` or "module:attribute" (the working directory is searched last).

    kind: what it is ("reward", "task", ...), for messages. Raises ValueError if name, module or attribute do not exist.
    """
    path = table.get(name, name)
    if ":" not in path:
        nearest = difflib.get_close_matches(name, table, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else f"known are {sorted(table)}"
        raise ValueError(f'unknown {kind} {name!r}: {hint} (or give a path "module:attribute")')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, attribute = path.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except AttributeError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports is not
        raise ValueError(f"{kind} {name!r}: there is no module {error.name!r} on the Python path") from error


def build(
    name: str, args: Mapping[str, Any] | None, table: Mapping[str, str], kind: str, given: Collection[str] = ()
) -> Any:
    """Resolves `name` and gives it its arguments: a class is built, another callable becomes a partial if it has some.

    given: names of the parameters that a function gets later, when it is called; with it, other parameters that are
    required and missing are found here (without it, only keyword-only ones, as positional ones may come with the call).
    Raises ValueError naming arguments that are unknown or missing.
    """
    target = resolve(name, table, kind)
    if not callable(target):
        raise ValueError(f"{kind} {name!r} is a {type(target).__name__}, not a class or a function")
    args = dict(args or {})
    is_class = inspect.isclass(target)
    later = set() if is_class else set(given)
    _check_arguments(f"{kind} {name!r}", target, args, later, strict=is_class or bool(later))
    if is_class:
        return target(**args)
    return functools.partial(target, **args) if args else target


def _check_arguments(what: str, target: Any, args: dict[str, Any], given: set[str], strict: bool) -> None:
    parameters = inspect.signature(target).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = {p.name for p in named} - given
    unknown = sorted(args.keys() - known)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(f"{what} has no argument {', '.join(map(repr, unknown))}; it has {sorted(known)}")
    required = {p.name for p in named if p.default is p.empty and (strict or p.kind is p.KEYWORD_ONLY)}
    missing = sorted(required - given - args.keys())
    if missing:
        raise ValueError(f"{what} needs the argument {', '.join(map(repr, missing))}")
