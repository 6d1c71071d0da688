"""The planner's word against real processes: two runs of models large enough that tensors are most of the memory."""

from pathlib import Path

import pytest

from benchmarks.plan_accuracy import FEW, RECOMPUTED, planned
from benchmarks.plan_runs import Case, measure

SHAPE = (4, 384, 6)


@pytest.mark.parametrize(
    "case",
    [Case("gpt2"), Case("llama", keys={**RECOMPUTED, **FEW, "alg.policy.args.value_model": "shared"})],
    ids=lambda case: case.name,
)
def test_a_process_takes_what_was_planned(case: Case, tmp_path: Path) -> None:
    (measured,) = measure(case, tmp_path, shape=SHAPE)
    _, expected = planned(case, tmp_path, SHAPE)
    assert expected == pytest.approx(measured, rel=0.15)


def test_two_processes_take_what_was_planned(tmp_path: Path) -> None:
    case = Case("gpt2", "ddp", keys={**FEW, "alg.policy.args.lora": {"r": 16}})
    expected, _ = planned(case, tmp_path, SHAPE)
    assert expected == pytest.approx(max(measure(case, tmp_path, shape=SHAPE, returning=True)), rel=0.15)
