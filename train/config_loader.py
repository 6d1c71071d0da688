"""YAML to frozen dataclasses, strictly: all faults of a file are found at once, each with its line and dotted path.

Knows nothing of the keys themselves: a tree of dataclasses says them by its annotations. Understood are bool, int,
float, str, Any, Literal, `X | None`, tuple[X, ...], dict[str, Any] (free keys), nested dataclasses, unions of
dataclasses that a field `id: Literal[...]` tells apart, and Annotated[number, Range].
"""

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from train.config_types import config_fields, describe, field_docs, ids, is_required, join, keys, sections

T = TypeVar("T")
_FAILED = object()


@dataclass
class Document:
    """A tree of plain values, with the place and the literal text of each by dotted path."""

    source: str
    data: Any = None
    places: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def fail(self, path: str, message: str) -> object:
        """Note the first fault at `path`, placed where the text has its nearest ancestor; returns the failure mark."""
        at = path
        while at and at not in self.places:
            at = at[: max(at.rfind("."), at.rfind("["), 0)]
        place = self.places[at] if at else self.source
        self.problems.setdefault(path, f"{place}: {path + ': ' if path else ''}{message}")
        return _FAILED


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 1e-5 is a number, as in YAML 1.2, and not a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: str) -> Document:
    """Read a YAML file; its top level must be a mapping."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    document = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    if not isinstance(document.data, dict):
        raise ValueError(f"{path}: expected sections such as 'tokenizer:' and 'alg:' at the top level")
    return document


def parse_yaml(text: str, source: str, path: str = "", lines: bool = True) -> Document:
    """Parse YAML text that stands at `path` of a tree. Raises ValueError for text that is no YAML."""
    document = Document(source)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            document.data = _read(loader, node, path, document, lines)
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return document


def _read(loader: _Loader, node: yaml.Node, path: str, document: Document, lines: bool) -> Any:
    document.places[path] = f"{document.source}:{node.start_mark.line + 1}" if lines else document.source
    if isinstance(node, yaml.MappingNode):
        _check_duplicates(node, path, document)
        loader.flatten_mapping(node)  # merges `<<: *anchor`, before the mapping's own keys, which win
        pairs = {str(loader.construct_object(key, deep=True)): (key, value) for key, value in node.value}
        node.value = list(pairs.values())  # an alias may bring us here again: no key is there twice now
        return {key: _read(loader, value, join(path, key), document, lines) for key, (_, value) in pairs.items()}
    if isinstance(node, yaml.SequenceNode):
        return [_read(loader, item, f"{path}[{i}]", document, lines) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    value = loader.construct_object(node)
    document.texts[path] = node.value
    # `apply_best: True,` is the string "True,": truthy, and so is "False,".
    if node.style is None and isinstance(value, str) and value.endswith(","):
        without = yaml.load(value[:-1], _Loader)
        if not isinstance(without, str):
            document.fail(path, f"{value!r} is a string that looks like a stray comma after {without!r}")
    return value


def _check_duplicates(node: yaml.MappingNode, path: str, document: Document) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:  # PyYAML would silently keep the last one
            document.fail(join(path, key), f"given twice, in lines {seen[key]} and {line}")
        seen[key] = line


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that is none of the known ones, with the nearest of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown {what} {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def build(cls: type[T], document: Document, required: Sequence[str] = ()) -> T:
    """Make `cls` of a document; `required` are keys without which it is incomplete although they have defaults.

    Raises ValueError with every fault found, one line each.
    """
    builder = _Builder(document, [key.path for key in keys(cls)])
    result = builder.section(document.data, cls, "")
    missing = builder.missing + [path for path in required if not _present(document.data, path)]
    if missing:
        document.fail("", f"required but missing: {', '.join(missing)}")
    problems = list(document.problems.values())
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problems:", *problems]) if problems[1:] else problems[0])
    assert isinstance(result, cls)
    return result


def _present(tree: Any, path: str) -> bool:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree is not None


class _Builder:
    """Converts values to the types of a tree of dataclasses; notes faults in the document and goes on."""

    def __init__(self, document: Document, known: Sequence[str]) -> None:
        self.document = document
        self.known = known
        self.missing: list[str] = []

    def section(self, value: Any, cls: type, path: str) -> Any:
        """An instance of the dataclass `cls`."""
        value = {} if value is None else value
        if not isinstance(value, dict):
            return self.document.fail(path, f"expected a section with keys, got {value!r}")
        specs = {f.name: (f, kind) for f, kind in config_fields(cls)}
        for key in value:
            if key not in specs:
                self.document.fail(join(path, key), f"unknown key; {self._nearest(path, key, list(specs))}")
        arguments = {}
        for name, (f, kind) in specs.items():
            at = join(path, name)
            if name in value:
                arguments[name] = self.convert(value[name], kind, at, field_docs(cls).get(name, ""))
            elif is_required(f):
                arguments[name] = self._absent(kind, at)
        if any(argument is _FAILED for argument in arguments.values()):
            return _FAILED
        try:
            return cls(**arguments)
        except ValueError as error:  # keys that contradict each other
            return self.document.fail(path, str(error))

    def convert(self, value: Any, kind: Any, path: str, doc: str) -> Any:
        """`value` as a `kind`, or the mark of a failure; `doc` explains the key to who got it wrong."""
        options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        if value is None and type(None) in options:
            return None
        if sections(kind):
            return self._section_of(value, sections(kind), path)
        dicts, lists = ([option for option in options if get_origin(option) is origin] for origin in (dict, tuple))
        options = tuple(option for option in options if option not in dicts + lists)
        if dicts and (isinstance(value, dict) or options in ((), (type(None),))):
            return self._free(value, path)
        if lists and (isinstance(value, list) or options in ((), (type(None),))):
            return self._list(value, get_args(lists[0])[0], path)
        result = _scalar(value, options[0], self.document.texts.get(path, str(value)))
        if result is _FAILED:
            got = "nothing (null)" if value is None else repr(value)
            self.document.fail(path, f"expected {describe(kind)}, got {got}. {doc}".rstrip())
        return result

    def _section_of(self, value: Any, options: Sequence[type], path: str) -> Any:
        if len(options) == 1:
            return self.section(value, options[0], path)
        tags = {tag: cls for cls in options for tag in ids(cls)}
        tag = value.get("id") if isinstance(value, dict) else None
        if tag is None:
            return self._absent(str, join(path, "id"))
        if tag in list(tags):
            return self.section(value, tags[tag], path)
        return self.document.fail(join(path, "id"), unknown("id", str(tag), tags))

    def _free(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, dict):
            return value or {}
        return self.document.fail(path, f"expected a section with any keys, got {value!r}")

    def _list(self, value: Any, kind: Any, path: str) -> Any:
        if value is None or not isinstance(value, list):
            return self.document.fail(path, f"expected a list, got {value!r}")
        items = [self.convert(item, kind, f"{path}[{i}]", "") for i, item in enumerate(value)]
        return _FAILED if any(item is _FAILED for item in items) else tuple(items)

    def _absent(self, kind: Any, path: str) -> object:
        if sections(kind):
            return self._section_of({}, sections(kind), path)  # names the keys that are missing inside
        self.missing.append(path)
        return _FAILED

    def _nearest(self, path: str, key: str, siblings: list[str]) -> str:
        if join(path, key) in self.known:
            return f"only another alg.id has it; known here: {', '.join(siblings)}"
        near = [join(path, name) for name in difflib.get_close_matches(key, siblings, 1)]
        near += [known for known in self.known if known.endswith("." + key)]
        return f"did you mean {near[0]}?" if near else f"known here: {', '.join(siblings)}"


def accepts(kind: Any, value: Any) -> bool:
    """Whether a value can stand where a `kind` is asked: bool, int, float or str, with or without a range."""
    return _scalar(value, kind, str(value)) is not _FAILED


def _scalar(value: Any, kind: Any, text: str) -> Any:
    """`value` as bool, int, float, str or Literal, or the mark of a failure; `text` is how it was written."""
    if get_origin(kind) is Annotated:
        base, limits = get_args(kind)
        number = _scalar(value, base, text)
        return number if number is not _FAILED and number in limits else _FAILED
    if get_origin(kind) is Literal:
        return value if any(value == arg and type(value) is type(arg) for arg in get_args(kind)) else _FAILED
    number_like = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and (number_like or isinstance(value, str)):  # also "1e-5" in quotes
        try:
            return float(value) if math.isfinite(float(value)) else _FAILED
        except ValueError:
            return _FAILED
    if kind is str and number_like:  # a name that consists of digits
        return text
    return value if kind is Any or type(value) is kind else _FAILED
