"""GPUs of a process, keys that contradict each other, and runs whose models are spread over devices."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithm_runs import options_of, script_of
from helpers import command, distance, flat, small_run

from train import placement
from train.config import load_config
from train.placement import environment, own_gpus

Models = Callable[..., Path]
MIB = {"0": "100MiB", "1": "100MiB"}
MAP = {"alg__policy__args__device_map": "balanced", "alg__policy__args__max_memory": MIB}


class FakeCuda:
    """A machine with GPUs that are not there."""

    def __init__(self, n_gpus: int) -> None:
        self.n_gpus, self.current = n_gpus, None

    def device_count(self) -> int:
        return self.n_gpus

    def set_device(self, device: torch.device) -> None:
        self.current = device


def numbers(gpus: list[torch.device]) -> list[int]:
    assert all(gpu.type == "cuda" for gpu in gpus)
    return [gpu.index for gpu in gpus]


def test_each_process_has_its_own_slice_of_gpus() -> None:
    slices = [numbers(own_gpus(2, local_rank=rank, local_world_size=4, n_gpus=8)) for rank in range(4)]
    assert slices == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [numbers(own_gpus(1, local_rank=rank, local_world_size=2, n_gpus=8)) for rank in range(2)] == [[0], [1]]
    assert numbers(own_gpus(1, local_rank=1, local_world_size=2, n_gpus=1)) == [0]  # each process sees its own only
    assert numbers(own_gpus(1, n_gpus=3)) == [0, 1, 2] and numbers(own_gpus(2, n_gpus=3)) == [0, 1]
    assert own_gpus(2, n_gpus=0) == [] == own_gpus(2)
    with pytest.raises(
        ValueError, match="gpus_per_process: 2 processes with 2 GPUs each need 4, and each of them sees"
    ):
        own_gpus(2, local_world_size=2, n_gpus=3)


def test_accelerate_and_nccl_are_told_the_first_gpu_of_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    world = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environ, cuda = dict(world), FakeCuda(4)
    environment(2, environ=environ, cuda=cuda)
    assert environ["ACCELERATE_TORCH_DEVICE"] == "cuda:2" and cuda.current == torch.device("cuda:2")
    for each, n_gpus in ((1, 4), (2, 0)):
        environ, cuda = dict(world), FakeCuda(n_gpus)
        environment(each, environ=environ, cuda=cuda)
        assert environ == world and cuda.current is None
    with pytest.raises(ValueError, match="distributed.gpus_per_process"):
        environment(4, environ=dict(world), cuda=FakeCuda(4))


LORA = {"alg__policy__args__lora": {"r": 2}}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("zero3", MAP, "device_map: zero3 spreads the weights by itself"),
    ("fsdp2", {"distributed__gpus_per_process": 2}, "gpus_per_process: fsdp2 spreads the weights by itself"),
    ("ddp", {"distributed__gpus_per_process": 2}, "nothing says how to use them"),
    ("single", {"alg__policy__args__device_map": {"": 0}}, "this process runs on the CPU"),
    ("single", {"alg__policy__args__max_memory": MIB}, "max_memory is for .* auto, balanced or sequential"),
    ("single", {**LORA, "alg__policy__args__reference_device": "cpu"}, "reference_device: with lora"),
    ("single", {**LORA, "alg__policy__args__reference_quantization": "int8"}, "reference_quantization: with lora"),
    (
        "single",
        {"alg__policy__args__reference_device": "disk", "alg__policy__args__reference_quantization": "int8"},
        "quantised weights cannot wait elsewhere",
    ),
    ("zero2", {"alg__policy__args__reference_quantization": "int8"}, "zero2 cuts or casts the reference's weights"),
]


@pytest.mark.parametrize(("strategy", "changes", "fault"), WRONG)
def test_keys_that_make_no_sense_together(strategy: str, changes: Any, fault: str, tmp_path: Path) -> None:
    config = load_config(command(tmp_path, Path("model"), **changes))
    with pytest.raises(ValueError, match=fault):
        placement.check(config, strategy, [])


def test_a_quantised_reference_needs_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("train.frozen.find_spec", lambda name: None)
    config = load_config(command(tmp_path, Path("model"), alg__policy__args__reference_quantization="int4"))
    with pytest.raises(ValueError, match=r"pip install 'rl4lms-scale\[quantization\]'"):
        placement.check(config, "single", [])


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with two devices, both of them its CPU."""
    monkeypatch.setattr("train.setup.own_gpus", lambda *_, **__: [torch.device("cpu")] * 2)


def trained(run: Any, algorithm: str) -> torch.Tensor:
    script_of(algorithm).train(run)
    return flat(run.ranks.unwrap(run.model))


@pytest.mark.parametrize(("algorithm", "family"), [("ppo", "t5"), ("nlpo", "gpt2"), ("trpo", "llama")])
def test_a_spread_run_is_the_plain_one_and_can_go_on_as_one(
    algorithm: str, family: str, models: Models, tmp_path: Path, two_devices: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(algorithm, family)
    with small_run(tmp_path, models(family), **options) as run:
        plain = trained(run, algorithm)
        assert not placement.is_spread(run.model)
    spread, few = tmp_path / "spread", {"train_evaluation__n_iters": 1}
    spread.mkdir()
    with small_run(spread, models(family), **options, **MAP, **few) as run:
        placed = [run.ranks.unwrap(run.model).policy, run.ranks.unwrap(run.model).critic, run.reference]
        assert all(map(placement.is_spread, placed if run.mask_model is None else [*placed, run.mask_model]))
        trained(run, algorithm)
    assert "device map of the policy: GPU 0" in capsys.readouterr().out
    with small_run(spread, models(family), resume=True, **options) as run:  # without the map
        assert run.state.iteration == 1
        before = flat(run.ranks.unwrap(run.model))
        after = trained(run, algorithm)
    # Not to the bit: MKL's products depend on where in memory a matrix happens to begin.
    assert distance(after - before, plain - before) < 1e-4 < distance(before, plain)


def test_on_one_gpu_rl4lms_model_parallelism_is_a_line_in_the_log(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(command(tmp_path, models(), alg__policy__args__apply_model_parallel=True))
    for gpus, where in (([torch.device("cuda:0")], "one GPU"), ([], "the CPU")):
        placement.check(config, "single", gpus)
        assert not placement.spread(config, SimpleNamespace(), {}, gpus)  # type: ignore[arg-type]
        assert f"device_map balanced: this process has {where}" in capsys.readouterr().out
