"""Data parallel between processes whose models are spread over several devices each."""

from collections.abc import Callable
from pathlib import Path

from helpers import DDP_CPU, launch

SCRIPT = Path(__file__).with_name("device_map_checks.py")


def test_spread_models_on_two_ranks_train_as_whole_ones(models: Callable[..., Path], tmp_path: Path) -> None:
    done = launch("--config_file", DDP_CPU, SCRIPT, tmp_path, models("gpt2"), models("t5"), timeout=240)
    assert done.returncode == 0, done.stdout
    for algorithm in ("ppo", "nlpo", "trpo"):
        assert done.stdout.count(f"{algorithm} spread is plain") == 2, done.stdout
    assert done.stdout.count("device map of the policy") == 3  # the first rank says it
