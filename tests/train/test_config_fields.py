"""No key without a meaning: each is explained, and read by something."""

import ast
import dataclasses
import functools
from pathlib import Path

import pytest

from train.config import Config
from train.config_types import Key, config_fields, field_docs, keys, sections

ROOT = Path(__file__).parents[2]
KEYS = {key.path: key for key in keys(Config)}

# Keys of RL4LMs' files that nothing reads, each with its reason. Their help says so, too.
UNREAD = {
    "tokenizer.padding_side": "left is the only value: prompts are always padded on the left",
    "alg.args.verbose": "what is printed does not depend on it",
    "alg.policy.args.generation_kwargs.do_sample": "true is the only value: rollouts always sample",
    "alg.policy.args.generation_kwargs.num_beams": "1 is the only value: rollouts have no beam search",
    "alg.policy.args.generation_kwargs.length_penalty": "1 is the only value: it belongs to beam search",
    # Read when the file is loaded, nowhere else.
    "alg.policy.args.generation_kwargs.min_length": "fills in min_new_tokens",
    "alg.policy.args.prompt_truncation_side": "must equal env.args.prompt_truncation_side, which is read",
}


@functools.cache
def attributes_read() -> set[str]:
    """Names of all attributes that the product reads outside the configuration itself."""
    names: set[str] = set()
    for folder in ("train", "algorithms", "envs", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if not (folder == "train" and path.name.startswith("config")):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.path)
def test_every_key_is_read(key: Key) -> None:
    if key.path not in UNREAD:
        assert key.path.rpartition(".")[2] in attributes_read()


def test_excuses_are_of_keys_that_exist() -> None:
    assert UNREAD.keys() <= KEYS.keys()


def dataclasses_of(cls: type) -> set[type]:
    nested = {inner for _, kind in config_fields(cls) for option in sections(kind) for inner in dataclasses_of(option)}
    return {cls} | nested


@pytest.mark.parametrize("cls", sorted(dataclasses_of(Config), key=lambda cls: cls.__name__))
def test_every_field_is_explained_and_every_class_is_frozen(cls: type) -> None:
    assert set(field_docs(cls)) == {f.name for f in dataclasses.fields(cls)}
    assert all(doc.endswith((".", "?")) for doc in field_docs(cls).values())
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(f.kw_only for f in dataclasses.fields(cls))
