"""What the annotations of a config dataclass can say, how to read them, and dotted paths."""

import ast
import dataclasses
import functools
import inspect
import json
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Range:
    """Numbers a field may hold: low <= x <= high, or low < x with open_low."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        lower = f"> {self.low:g}" if self.open_low else f">= {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and <= {self.high:g}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open_low=True)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, open_low=True)]
Side = Literal["left", "right"]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:-1]):
        docs |= field_docs(base)
    for this, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name) and isinstance(following, ast.Expr):
            docs[this.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs


@functools.cache
def config_fields(cls: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Fields of a dataclass that a file may set, with their types."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple((f, hints[f.name]) for f in dataclasses.fields(cls) if not f.metadata.get("cli_only"))


def is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def sections(kind: Any) -> list[type]:
    """The dataclasses that a value of this type can be."""
    if get_origin(kind) in (Union, types.UnionType):
        return [cls for member in get_args(kind) for cls in sections(member)]
    return [kind] if dataclasses.is_dataclass(kind) and isinstance(kind, type) else []


def ids(cls: type) -> tuple[str, ...]:
    """The values of the field `id: Literal[...]` by which a dataclass is told from others of its union."""
    return next(get_args(kind) for f, kind in config_fields(cls) if f.name == "id")


def describe(kind: Any) -> str:
    """A type as users read it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{describe(args[0])} {args[1]}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join("true" if arg is True else str(arg) for arg in args)
    if origin is tuple:
        return "list"
    if origin is dict:
        return "any keys"
    return {type(None): "null", bool: "true or false", Any: "anything"}.get(kind) or str(kind.__name__)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted path; lists and empty mappings are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        at = join(path, str(key))
        leaves |= flatten(value, at) if isinstance(value, Mapping) and value else {at: value}
    return leaves


@dataclass(frozen=True)
class Key:
    """A leaf of a tree of dataclasses, as the help shows it."""

    path: str
    kind: str
    default: str
    doc: str
    section: str
    section_doc: str


def keys(cls: type, path: str = "", section: str = "", section_doc: str = "", only: str | None = None) -> Iterator[Key]:
    """All leaves below `cls`, section by section, in the order of the fields. only: of the dataclass with this id."""
    nested = [(f, kind) for f, kind in config_fields(cls) if sections(kind)]
    for f, kind in config_fields(cls):
        if not sections(kind):
            at, doc = f"{path}{f.name}", field_docs(cls).get(f.name, "")
            yield Key(at, describe(kind), _default(f), doc, section, section_doc)
    for f, kind in nested:
        options = sections(kind)
        if len(options) > 1 and only is not None:
            options = [option for option in options if only in ids(option)]
        for option in options:
            title = f"{path}{f.name}"
            if len(options) > 1:
                title += f" with id {' or '.join(ids(option))}"
            yield from keys(option, f"{path}{f.name}.", title, field_docs(cls).get(f.name, ""), only)


def _default(f: dataclasses.Field[Any]) -> str:
    if is_required(f):
        return "required"
    value = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    return f"default {value if isinstance(value, str) else json.dumps(value)}"
