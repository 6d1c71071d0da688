"""Data parallel between processes whose models are spread over several devices each."""

from collections.abc import Callable
from pathlib import Path

from helpers import DDP_CPU, launch

SCRIPT = Path(__file__).with_name("device_map_checks.py")


def test_spread_models_on_two_ranks_train_as_whole_ones(models: Callable[..., Path], tmp_path: Path) -> None:
    # MKL_CBWR: products that do not depend on where in memory a matrix happens to begin.
    words = ["--config_file", DDP_CPU, SCRIPT, tmp_path, models("gpt2"), models("t5")]
    done = launch(*words, timeout=240, MKL_CBWR="COMPATIBLE")
    assert done.returncode == 0, done.stdout
    for algorithm in ("ppo", "trpo"):
        assert done.stdout.count(f"{algorithm} spread is plain") == 2, done.stdout
    assert done.stdout.count("device map of the policy") == 2  # the first rank says it
