"""Evaluation: the same whatever the batch size and the number of ranks, and what it says is right."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import changed, command, lines, small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.evaluation import evaluate
from train.ppo import main
from train.setup import Run

EOS = 1
Models = Callable[..., Path]


def predictions(run: Run, split: str = "val", iteration: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """What an evaluation under a changed train_evaluation writes."""
    if changes:
        run = replace(run, config=changed(run.config, **{f"train_evaluation__{k}": v for k, v in changes.items()}))
    evaluate(run, split, iteration)
    return json.loads((run.folder / f"epoch_{iteration}_{split}_split_predictions.json").read_text())


class OneOf:
    """One of several ranks: `others` collects what the ranks before it have gathered, rank 0 comes last."""

    def __init__(self, ranks: Any, rank: int, world_size: int, others: list[Any]) -> None:
        self.ranks, self.rank, self.world_size, self.others = ranks, rank, world_size, others
        self.is_main = rank == 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ranks, name)

    def gather(self, items: list[Any]) -> list[Any]:
        self.others += items
        return list(self.others)


@pytest.mark.parametrize(
    "generation", [None, {"do_sample": False}, {"do_sample": True, "top_k": 9, "temperature": 0.5}, {"num_beams": 2}]
)
def test_neither_batch_size_nor_ranks_change_an_evaluation(generation: Any, models: Models, tmp_path: Path) -> None:
    options = {"train_evaluation__generation_kwargs": generation, "datapool__args": {"n": 5}}
    with small_run(tmp_path, models(), **options) as run:
        once = predictions(run, eval_batch_size=100)
        assert [row["sample_id"] for row in once] == [f"val-{i}" for i in range(5)]
        same(predictions(run, eval_batch_size=1), once)
        same(predictions(run, eval_batch_size=2), once)
        for world_size in (2, 7):  # with seven, two ranks have no sample
            others: list[Any] = []
            for rank in reversed(range(world_size)):
                evaluate(replace(run, ranks=OneOf(run.ranks, rank, world_size, others)), "val", 1)
            assert len(others) == 5
            same(json.loads((run.folder / "epoch_1_val_split_predictions.json").read_text()), once)


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row == {k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v for k, v in other.items()}


def test_generation_as_it_is_asked_for(models: Models, tmp_path: Path) -> None:
    tokenizer, lm = (auto.from_pretrained(models()) for auto in (AutoTokenizer, AutoModelForCausalLM))

    def expected(text: str, **kwargs: Any) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0, **kwargs)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    with small_run(tmp_path, models()) as run:
        rollout_like = [row["generated_text"] for row in predictions(run)]
        asked: dict[str, dict[str, Any]] = {
            "greedy": {"do_sample": False, "min_new_tokens": 3},
            "beams": {"do_sample": False, "num_beams": 2, "min_new_tokens": 3},
        }
        found = {}
        for name, kwargs in asked.items():
            rows = predictions(run, generation_kwargs=kwargs)
            found[name] = [row["generated_text"] for row in rows]
            assert found[name] == [expected(row["prompt_text"], **kwargs) for row in rows]
            assert all(row["length"] >= 4 or row["length"] == 8 for row in rows)
        sampled = predictions(run, generation_kwargs={"do_sample": True, "temperature": 1.0})
        assert [row["generated_text"] for row in sampled] == rollout_like  # that is how rollouts sample
        short = predictions(run, generation_kwargs={"max_new_tokens": 2})
        assert all(row["length"] <= 2 for row in short)
    assert len({str(texts) for texts in (rollout_like, *found.values())}) == 3


def test_perplexity_under_the_reference(models: Models, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(models()).eval()
    seen: list[list[int]] = []
    with small_run(tmp_path, models()) as run:
        with torch.no_grad():  # the policy has gone elsewhere
            for parameter in run.ranks.unwrap(run.model).policy.lm.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        score = run.sampler.envs.score
        run.sampler.envs.score = lambda split, indices, ids: seen.extend(ids) or score(split, indices, ids)
        metrics = evaluate(run, "val", 0)
        rows = json.loads((run.folder / "epoch_0_val_split_predictions.json").read_text())
        prompts = [run.sampler.envs.sample("val", i).prompt for i in range(12)]
    tokenizer = AutoTokenizer.from_pretrained(models())
    total = 0.0
    for prompt, response, row in zip(prompts, seen, rows, strict=True):
        start = tokenizer(prompt).input_ids
        with torch.no_grad():
            logp = lm(torch.tensor([start + response])).logits[0].log_softmax(-1)
        nll = -sum(float(logp[len(start) - 1 + i, token]) for i, token in enumerate(response))
        assert row["fluency_metrics/reference_perplexity"] == pytest.approx(math.exp(nll / len(response)), rel=1e-4)
        assert row["length"] == len(response)
        total += nll
    n_tokens = sum(map(len, seen))
    assert metrics["fluency_metrics/reference_perplexity"] == pytest.approx(math.exp(total / n_tokens), rel=1e-4)
    assert metrics["length"] == n_tokens / 12
    assert any(response[-1] == EOS for response in seen) and any(response[-1] != EOS for response in seen)
    assert metrics["truncated"] == sum(EOS not in response for response in seen) / 12


def test_rewards_and_metrics_of_users(models: Models, tmp_path: Path) -> None:
    metrics = [{"id": "user_code:lengths"}, {"id": "diversity"}]
    reward = {"id": "user_code:OnDevice", "args": {"scale": 10.0}}
    options = {"train_evaluation__max_eval_samples": 7, "train_evaluation__metrics": metrics, "reward_fn": reward}
    with small_run(tmp_path, models(), **options) as run:
        rows = predictions(run)
        (logged,) = lines(run.folder / "val_split_metrics.jsonl")
    assert len(rows) == 7
    for i, row in enumerate(rows):
        assert row["user/longest"] == row["length"] and row["diversity_metrics/distinct-1"] == "n/a"
        assert row["reward"] == 10 * row["length"] + i
    values = logged["metrics"]
    assert values["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 7)
    assert values["user/longest"] == max(row["length"] for row in rows)
    assert 0 < values["diversity_metrics/distinct-1"] <= 1


def test_a_metric_that_fails_stops_every_rank(models: Models, tmp_path: Path) -> None:
    with small_run(tmp_path, models(), train_evaluation__metrics=[{"id": "diversity"}]) as run:
        run.metrics[:] = [lambda episodes: 1 / 0]
        with pytest.raises(RuntimeError, match="metric diversity on the val split: ZeroDivisionError"):
            evaluate(run, "val", 0)
        other = OneOf(run.ranks, 1, 2, [])
        other.broadcast = lambda item: ({}, True)  # what rank 0 says
        with pytest.raises(RuntimeError, match="rank 0 failed"):
            evaluate(replace(run, ranks=other), "val", 0)


def test_the_files_of_a_run(models: Models, tmp_path: Path) -> None:
    options = {"train_evaluation__metrics": [{"id": "diversity"}], "tracking__trackers": ["tensorboard"]}
    main(command(tmp_path, models(), train_evaluation__n_iters=3, train_evaluation__eval_every=2, **options))
    folder = tmp_path / "tests/run"
    for split, epochs in (("val", [0, 2, 3]), ("test", [0, 3])):
        rows = lines(folder / f"{split}_split_metrics.jsonl")
        assert [row["epoch"] for row in rows] == [row["iteration"] for row in rows] == epochs
        names = {"reward", "length", "truncated", "fluency_metrics/reference_perplexity"}
        distinct = {f"diversity_metrics/distinct-{n}" for n in (1, 2, 3)}
        assert all(row["metrics"].keys() == names | distinct for row in rows)
        written = json.loads((folder / f"epoch_3_{split}_split_predictions.json").read_text())
        assert [row["sample_id"] for row in written] == [f"{split}-{i}" for i in range(12)]
        keys = {"split_name", "sample_id", "prompt_text", "generated_text", "ref_text"}
        assert all(row.keys() == keys | distinct | names - {"truncated"} for row in written)
        assert {row["split_name"] for row in written} == {split}
        assert written[4]["ref_text"] == "<START-1>4 4<END-1><START-2>1<END-2>"
    rollout, training = (lines(folder / f"{name}_info.jsonl") for name in ("rollout", "training"))
    means = ("ep_rew", "kl_div_mean", "ep_lens", "ep_kl_rew", "log_prob", "ref_log_prob", "values")
    expected = {f"rollout_info/{name}{end}" for name in means for end in ("", "_std")} | {"rollout_info/kl_coeff"}
    assert [row.keys() for row in rollout] == [expected | {"iteration"}] * 3
    losses = ("entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "explained_variance")
    assert [row.keys() for row in training] == [{f"ppo/{name}" for name in losses} | {"iteration"}] * 3
    assert all(-math.log(33) <= row["ppo/entropy_loss"] < 0 for row in training)
    assert json.loads((folder / "config.json").read_text())["train_evaluation"]["n_iters"] == 3
    AutoTokenizer.from_pretrained(folder / "model"), AutoModelForCausalLM.from_pretrained(folder / "model")
    assert "trained with PPO for 3 iterations" in (folder / "model/README.md").read_text()
    assert list((folder / "tensorboard").rglob("events.*"))


def test_no_iterations_is_an_evaluation_only(models: Models, tmp_path: Path) -> None:
    main(command(tmp_path, models(), train_evaluation__n_iters=0))
    folder = tmp_path / "tests/run"
    assert [len(lines(folder / f"{split}_split_metrics.jsonl")) for split in ("val", "test")] == [1, 1]
    assert not (folder / "metrics.jsonl").exists()
