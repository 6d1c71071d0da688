"""The comparison of parallel strategies: its cases are the jobs they claim to be, its numbers those of the runs."""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import parallel_runs
from benchmarks.parallel_cases import QUICK, ROOT, STRATEGIES, STUDIES, Case, Study, command, model_folder
from benchmarks.parallel_report import efficiency, table, write
from benchmarks.parallel_runs import Row, environment, measured, reason, run_case
from benchmarks.parallel_strategies import main, parser, studies_of
from train.config import Config, load_config
from train.tracking import append_line

TINY = Case(strategy="single", ranks=1, model="tiny", n_envs=2, response=4, iterations=2)


def config_of(case: Case, folder: Path) -> Config:
    words = command(case, folder, gpu=False)
    return load_config(words[words.index("train/ppo.py") + 1 :])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_changes_the_topology_and_not_the_job(strategy: str, tmp_path: Path) -> None:
    case = Case(strategy=strategy, model="tiny", n_envs=4, waves=3, response=8, accumulation=2)
    words = command(case, tmp_path, gpu=False, options=["--dynamo_backend", "no"])
    processes = "1" if strategy == "device_map" else "2"
    assert words[words.index("--num_processes") + 1] == processes and "--dynamo_backend" in words
    for gpu in (False, True):
        file = Path(command(case, tmp_path, gpu=gpu)[4])
        assert file.parent == ROOT / "accelerate_configs" and (strategy == "device_map" or file.is_file())
    config = config_of(case, tmp_path)
    args, shares = config.alg.args, 1 if strategy in ("tensor_parallel", "device_map") else 2
    assert config.env.n_envs * shares == 8  # of all ranks
    assert args.n_steps == 24 and args.batch_size == 24 * config.env.n_envs  # one optimizer step
    assert args.micro_batch_size * 2 == config.env.n_envs * 3  # in two parts
    assert config.generation.gather == ("never" if strategy.endswith("_synced") else "auto")
    mapped = (config.alg.policy.args.device_map, config.distributed.gpus_per_process)
    assert mapped == (("balanced", 2) if strategy == "device_map" else (None, 1))
    on_cpu = environment(case, gpu=False).get("ACCELERATE_USE_CPU")
    assert on_cpu == (None if strategy.startswith("zero") else "true")
    assert "ACCELERATE_USE_CPU" not in environment(case, gpu=True)


def test_cases_have_names_of_their_own_and_a_process_each() -> None:
    cases = {case for study in (*STUDIES.values(), QUICK) for case in study.cases}
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.ranks == 1 for case in cases if case.strategy == "single")
    sizes = {case.n_envs * case.waves for case in STUDIES["accumulation"].cases if case.strategy == "single"}
    assert sizes == {16}


def test_accumulation_divides_the_batch(tmp_path: Path) -> None:
    row = run_case(replace(TINY, accumulation=3), tmp_path)
    assert row["failed"] == "accumulation 3 does not divide the 2 episodes of a rank"


def test_ragged_responses_end_before_and_at_the_limit(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    case = Case(ragged=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder(case, tmp_path)).eval()
    torch.manual_seed(0)
    prompts = torch.randint(3, 8000, (64, 4))
    out = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=case.response, min_new_tokens=1)
    ended = (out[:, 4:] == model.config.eos_token_id).any(1).float().mean()
    assert 0.5 < ended < 0.9
    assert config_of(case, tmp_path).env.args.terminate_on_eos


def iteration(seconds: float, tokens: int = 100) -> Row:
    phases = {f"perf/seconds_{phase}": seconds / 10 for phase in (*parallel_runs.PHASES, "checkpoint", "wait_max")}
    rest = {"perf/rank_cpu_cores": 0.75, "perf/workers_cpu_cores": 0.25, "perf/workers_memory_gb": 0.1}
    return {"rollout/tokens": tokens, "perf/seconds_working": seconds, **phases, **rest}


def test_the_first_iteration_does_not_count() -> None:
    numbers = measured([iteration(50.0), iteration(1.0), iteration(2.0), iteration(2.4)])
    assert numbers["tokens_per_s"] == 50 and numbers["tokens_per_s_update"] == 500
    assert numbers["seconds_other"] == pytest.approx(2.0 - 6 * 0.2) and numbers["cores_per_rank"] == 1.0
    assert numbers["scatter"] == pytest.approx(0.7)


def fake(monkeypatch: pytest.MonkeyPatch, script: Callable[[Case, Path], str]) -> None:
    """Cases run a script of ours instead of the launch."""
    monkeypatch.setattr(
        parallel_runs, "command", lambda case, folder, **_: [sys.executable, "-c", script(case, folder)]
    )


def test_a_run_that_fails_or_hangs_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases").mkdir()
    fake(monkeypatch, lambda *_: "import sys; print('error: no such stage', file=sys.stderr); sys.exit(2)")
    assert run_case(TINY, tmp_path)["failed"] == "no such stage"
    fake(monkeypatch, lambda *_: "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    assert run_case(TINY, tmp_path, timeout=2)["failed"] == "not done after 2 s"
    assert not psutil.pid_exists(int((tmp_path / "cases" / f"{TINY.name}.log").read_text()))
    assert reason("x\n[rank1]: RuntimeError: here\nE1201 api.py\nelastic.ChildFailedError: \nend") == (
        "[rank1]: RuntimeError: here"
    )


def test_what_is_done_is_not_done_again_and_what_scatters_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cases" / TINY.name
    folder.mkdir(parents=True)

    def script(case: Case, _: Path) -> str:
        runs = tmp_path / "runs"
        runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
        for seconds in (9.0, 1.0, 1.0 + 2.0 / len(runs.read_text())):
            append_line(tmp_path / "rows", iteration(seconds))
        (tmp_path / "rows").rename(tmp_path / "ready")
        return f"import os; os.rename({str(tmp_path / 'ready')!r}, {str(folder / 'metrics.jsonl')!r})"

    fake(monkeypatch, script)
    first = run_case(TINY, tmp_path, most_scatter=0.2)
    assert (tmp_path / "runs").read_text() == "xx" and first["scatter"] == pytest.approx(2 / 3)  # the calmer of two
    assert run_case(TINY, tmp_path, most_scatter=0.2) == json.loads(json.dumps(first))
    assert (tmp_path / "runs").read_text() == "xx"
    run_case(replace(TINY, epochs=1), tmp_path, most_scatter=9)
    run_case(TINY, tmp_path, most_scatter=9, again=True)
    assert (tmp_path / "runs").read_text() == "xxxx"


def row_of(case: Case, seconds: float, **more: Any) -> Row:
    numbers = measured([iteration(seconds, 100 * case.ranks)] * 3)
    return {**asdict(case), "failed": None, **numbers, "memory_gb": 0.5, "others_cores": 0.1, **more}


def test_tables_files_and_pictures(tmp_path: Path) -> None:
    ddp, broken = Case(), Case(strategy="zero3")
    rows = {ddp.baseline: row_of(ddp.baseline, 1.0), ddp: row_of(ddp, 1.25)}
    rows[broken] = {**asdict(broken), "failed": "no memory | at all"}
    assert efficiency(rows[ddp], rows) == pytest.approx(0.8) and efficiency(rows[broken], rows) is None
    study = Study("A study", (ddp.baseline, ddp, broken, Case(strategy="zero2")))
    text = write({"study": study}, rows, {}, tmp_path)
    header, single, two, failed = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:] if "---" not in line and line
    )
    assert header[:4] == ["strategy", "ranks", "tokens/s", "efficiency"] and single[:4] == ["single", "1", "100", ""]
    assert two[:4] == ["ddp", "2", "160", "80%"] and failed[2] == "failed: no memory / at all"
    assert (tmp_path / "table.md").read_text() == text == table(study, rows)
    with (tmp_path / "results.csv").open() as file:
        assert [line["tokens_per_s"] for line in csv.DictReader(file)] == ["100", "160", ""]
    assert json.loads((tmp_path / "results.json").read_text())["rows"][1]["efficiency"] == pytest.approx(0.8)
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_the_command_line_says_which_cases() -> None:
    assert list(studies_of(parser().parse_args([]))) == list(STUDIES)
    assert list(studies_of(parser().parse_args(["--quick"]))) == ["quick"]
    words = ["--strategies", "single", "ddp", "--ranks", "2", "4", "--n_envs", "8", "--ragged"]
    (study,) = studies_of(parser().parse_args(words)).values()
    assert [(case.strategy, case.ranks) for case in study.cases] == [("single", 1), ("ddp", 2), ("ddp", 4)]
    assert all(case.n_envs == 8 and case.ragged for case in study.cases)
    with pytest.raises(SystemExit, match="zero9"):
        studies_of(parser().parse_args(["--strategies", "zero9"]))


def test_two_real_ranks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--models", "tiny", "--n_envs", "2", "--response", "4", "--iterations", "3"]
    words = ["--strategies", "ddp", *shape, "--most_scatter", "99", "--runs", str(tmp_path)]
    main(words)
    (row,) = json.loads((tmp_path / "results" / "results.json").read_text())["rows"]
    assert row["failed"] is None and row["tokens"] == 2 * 2 * 4
    assert 0 <= row["others_cores"] < psutil.cpu_count()
    assert len(row["memory_gb_by_rank"]) == 2 and min(row["memory_gb_by_rank"]) > 0.1
    assert all(row[f"seconds_{phase}"] > 0 for phase in ("generate", "env", "reward", "score", "update", "checkpoint"))
    assert "ddp |" in capsys.readouterr().out
