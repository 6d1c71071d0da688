"""Two tensor parallel processes are one; what is looked at stands in tensor_parallel_checks.py."""

from pathlib import Path

from helpers import ROOT, launch
from sharded_cases import make_models

CHECKS = Path(__file__).with_name("tensor_parallel_checks.py")


def test_two_processes_with_parts_of_each_matrix_are_one(tmp_path: Path) -> None:
    config = ROOT / "accelerate_configs" / "tensor_parallel.yaml"
    done = launch("--config_file", config, CHECKS, tmp_path, make_models(tmp_path / "models"), timeout=280)
    assert done.returncode == 0 and done.stdout.count(": done") == 2, done.stdout
