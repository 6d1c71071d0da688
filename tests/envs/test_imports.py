"""The package must be quick to load: workers do it often, and there are many of them."""

import json
import pkgutil
import subprocess
import sys

import envs

HEAVY = {"torch", "transformers", "accelerate", "datasets", "train", "algorithms"}
CODE = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(names: list[str]) -> set[str]:
    return set(json.loads(subprocess.check_output([sys.executable, "-c", CODE, json.dumps(names)], text=True)))


def test_nothing_heavy_is_imported() -> None:
    names = [module.name for module in pkgutil.walk_packages(envs.__path__, "envs.")]
    assert {"envs.worker", "envs.vector", "envs.rewards.contract"} <= set(names)
    assert not loaded(names) & HEAVY


def test_the_test_would_notice() -> None:
    assert loaded(["algorithms", "envs.worker"]) & HEAVY == {"algorithms"}
