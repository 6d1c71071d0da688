"""Supervised training under the parallel strategies: two ranks do what one process does, and their files are whole."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import lines
from peft import AutoPeftModelForSeq2SeqLM
from safetensors.torch import load_file
from strategy_runs import run_script
from supervised_world import TOKENS, make_world, predictions
from transformers import AutoModelForCausalLM

from train.supervised_strategy import joining

SCRIPT = Path(__file__).with_name("supervised_jobs.py")
JOBS = {
    "single": ("whole", "best"),
    "ddp": ("whole",),
    "zero2": ("whole", "accumulated", "resumed", "refused"),
    "zero3": ("whole", "resumed", "best"),
    "fsdp2": ("whole", "accumulated", "resumed", "best"),
}


def having(job: str) -> Any:
    """Parametrises a test with the strategies that do the job on two ranks."""
    return pytest.mark.parametrize(
        "strategy", [name for name, jobs in JOBS.items() if job in jobs and name != "single"]
    )


class World:
    """One launch for each strategy, when a test first asks for it."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, make_world(root / "world")
        self.launch = functools.cache(self._launch)

    def _launch(self, strategy: str) -> str:
        processes = "1" if strategy == "single" else "2"
        done = run_script(SCRIPT, self.root / strategy, strategy, self.data, processes, *JOBS[strategy])
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, strategy: str, name: str) -> Path:
        self.launch(strategy)
        return self.root / strategy / "p" / name


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("supervised_strategies")
    (root / "world").mkdir()
    return World(root)


def assert_same(ours: Path, theirs: Path) -> None:
    """The same losses, gradient norms, answers and metrics, though ranks' shares of a batch differ in tokens."""
    rows, others = (lines(path / "training_info.jsonl") for path in (ours, theirs))
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    weights, expected = (load_file(path / "model" / "model.safetensors") for path in (ours, theirs))
    assert weights.keys() == expected.keys(), "tied weights once"
    assert all(torch.allclose(weights[name], expected[name], rtol=0, atol=1e-4) for name in expected)
    for split in ("val", "test"):
        rows, others = (lines(path / f"{split}_split_metrics.jsonl") for path in (ours, theirs))
        for row, other in zip(rows, others, strict=True):
            assert row["metrics"] == pytest.approx(other["metrics"], abs=1e-4)
        for epoch in (0, 0.333):
            texts, expected = (
                [(row["sample_id"], row["generated_text"]) for row in predictions(path, split, epoch)]
                for path in (ours, theirs)
            )
            assert texts == expected and len(texts) == 15


@having("whole")
def test_two_ranks_train_and_evaluate_as_one_does(strategy: str, world: World) -> None:
    assert_same(world.run(strategy, "whole"), world.run("single", "whole"))


@having("accumulated")
def test_accumulated_gradients_are_those_of_the_whole_batch(strategy: str, world: World) -> None:
    assert_same(world.run(strategy, "accumulated"), world.run("single", "whole"))


@having("whole")
def test_model_and_checkpoint_are_whole_and_give_the_logits_of_the_run(strategy: str, world: World) -> None:
    folder = world.run(strategy, "whole")
    expected = torch.load(folder / "logits.pt")
    for saved in (folder / "model", folder / "checkpoints" / "checkpoint-5"):
        model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(TOKENS).logits, expected, rtol=0, atol=1e-6)


@having("resumed")
def test_an_interrupted_run_ends_where_the_other_did(strategy: str, world: World) -> None:
    ours, theirs = world.run(strategy, "resumed"), world.run(strategy, "uninterrupted")
    weights, expected = (load_file(path / "model" / "model.safetensors") for path in (ours, theirs))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for name in ("val_split_metrics.jsonl", "test_split_metrics.jsonl", "training_info.jsonl"):
        assert (ours / name).read_text() == (theirs / name).read_text()


@having("best")
def test_the_best_checkpoint_of_an_adapter_is_the_result(strategy: str, world: World) -> None:
    folder = world.run(strategy, "best")
    rows, expected = (lines(world.run(name, "best") / "val_split_metrics.jsonl") for name in (strategy, "single"))
    found = [row["metrics"]["length"] for row in rows]
    assert found == [row["metrics"]["length"] for row in expected]
    assert found[-1] == max(found[1:]) and rows[-1]["metrics"] in [row["metrics"] for row in rows[1:-1]]
    model = AutoPeftModelForSeq2SeqLM.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        logits = model(input_ids=TOKENS, decoder_input_ids=TOKENS).logits
    torch.testing.assert_close(logits, torch.load(folder / "logits.pt"), rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused_with_what_can(world: World) -> None:
    output = world.launch("zero2")
    assert "refused: alg.training_args.optim adafactor: ZeRO steps on slices" in output and "use adamw_torch" in output
    ranks: Any = SimpleNamespace(strategy=SimpleNamespace(name="tensor_parallel"))
    with pytest.raises(ValueError, match=r"not available with tensor parallel .*fsdp2.yaml and zero3.yaml"):
        joining(ranks)
