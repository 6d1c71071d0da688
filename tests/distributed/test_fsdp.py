"""FSDP2 on two ranks is one process with all the data; what is looked at stands in fsdp_checks.py."""

import re
from pathlib import Path

import pytest
from helpers import ROOT, launch
from sharded_cases import load, make_models
from torch import nn

from tools.make_tiny_model import FAMILIES, SEQ2SEQ_FAMILIES
from train.strategy_fsdp import blocks

CHECKS = Path(__file__).with_name("fsdp_checks.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def test_models_in_parts_do_what_plain_ones_do(models: Path, tmp_path: Path) -> None:
    config = ROOT / "accelerate_configs" / "fsdp2.yaml"
    done = launch("--config_file", config, "--num_processes", "2", CHECKS, tmp_path, models, timeout=280)
    assert done.returncode == 0 and done.stdout.count(": done") == 2, done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_the_layers_of_each_family(family: str, models: Path) -> None:
    model = load(models, family)
    for part in (model.policy, model.critic):
        found = blocks(part)
        assert len(found) == (4 if family in SEQ2SEQ_FAMILIES else 2)
        inside = {id(parameter) for block in found for parameter in block.parameters()}
        outside = [name for name, parameter in part.named_parameters() if id(parameter) not in inside]
        assert outside and all(re.search("embed|shared|norm|wte|wpe|ln_f", name) for name in outside), outside


def test_a_block_that_shares_a_weight_stays_with_those_that_it_shares_it_with(models: Path) -> None:
    policy = load(models, "gpt2").policy
    first, second = blocks(policy)
    policy.other = nn.Linear(1, 1)
    policy.other.weight = first.mlp.c_fc.weight
    assert blocks(policy) == [second]
