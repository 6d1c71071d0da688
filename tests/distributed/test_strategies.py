"""The same PPO under every parallel strategy: DDP, ZeRO-0 to 3 and FSDP2 on two ranks, and tensor parallel, are one
process with all environments; saved, resumed, stopped, killed. One launch of a strategy does most of it."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from algorithm_runs import ALGORITHMS
from helpers import command, lines
from peft import PeftModel
from safetensors.torch import load_file
from strategy_runs import (
    EOS,
    SHARDED,
    STRATEGIES,
    WHOLE,
    a_run,
    differing,
    families_of,
    family_of,
    fixed_scores,
    n_shares,
    reference_of,
    relative,
    saved_logprobs,
    starts_from,
)
from strategy_world import FIRST, SECOND, World, assert_same_training, episodes, weights
from transformers import AutoModelForCausalLM

from tools.strategy_table import README, render, section
from train.checkpoint import saved_iterations
from train.ppo import main

Results = dict[str, dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("strategies"))


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, world: World) -> str:
    """A strategy whose first launch is over."""
    world.run(request.param, "whole")
    return str(request.param)


@pytest.fixture(scope="module")
def results() -> Results:
    """{algorithm: {strategy: {family: outcome}}}, filled by the tests."""
    return {name: {} for name in (*ALGORITHMS, "supervised")}


def test_five_iterations_are_those_of_one_process(strategy: str, world: World) -> None:
    ours, theirs = world.run(strategy, "whole"), world.alone(strategy, "whole")
    assert_same_training(ours, theirs, 5)
    rows = lines(ours / "metrics.jsonl")
    assert [row["policy/optimizer_steps"] for row in rows] == [2.0] * 5
    assert [row["rollout/tokens"] for row in rows] == [128.0] * 5
    ranks = episodes(ours, 1)
    ended = [sum(response[-1] == EOS for _, response in rank) for rank in ranks]  # only these count in the losses
    assert [len(rank) for rank in ranks] == [16 // len(ranks)] * len(ranks) and len(ended) == n_shares(strategy)
    assert len(set(ended)) == len(ended) and min(ended) > 0


def test_accumulation_does_not_change_the_step(strategy: str, world: World) -> None:
    """8 micro-batches of 1 episode, 2 of 4, 1 of 8 (of a rank)."""
    whole = world.run(strategy, "whole")
    for size in (1, 8):
        run = world.run(strategy, f"micro_{size}")
        assert differing(lines(run / "metrics.jsonl"), lines(whole / "metrics.jsonl")[:2], 1e-4) == []
        assert relative(weights(run, 2), weights(whole, 2)) < 1e-5


def test_ranks_that_differ_go_on_together_however_weights_are_gathered(strategy: str, world: World) -> None:
    always = world.run(strategy, "always")
    for how in ("auto", "never") if strategy in SHARDED else ():
        run = world.run(strategy, how)
        assert_same_training(run, always, 2)
        for split in ("val", "test"):
            rows, others = (lines(path / f"{split}_split_metrics.jsonl") for path in (run, always))
            assert [row["metrics"] for row in rows] == [pytest.approx(row["metrics"], rel=1e-4) for row in others]
    if strategy != "ddp":
        assert_same_training(always, world.run(reference_of(strategy), "always"), 2)
    if n_shares(strategy) == 2:
        one, two = episodes(always, 1)
        assert len(one) != len(two) and -(-len(one) // 4) != -(-len(two) // 4)  # episodes, waves of 4


def test_critic_warm_up_and_a_stop_by_kl_leave_nothing_behind(strategy: str, world: World) -> None:
    run = world.run(strategy, "stopping")
    rows = lines(run / "metrics.jsonl")
    steps = [row["policy/optimizer_steps"] for row in rows]
    n_steps = 3 * 4 // n_shares(strategy)  # epochs × minibatches
    assert steps[0] == n_steps and 0 < steps[1] < n_steps and 0 < steps[2] < n_steps, steps
    assert rows[0]["policy/learning_rate"] == 0 and rows[0]["policy/approx_kl"] < 1e-6
    start, warm, later = (
        AutoModelForCausalLM.from_pretrained(world.models / f"{family_of(strategy)}_wide"),
        *(weights(run, iteration) for iteration in (1, 2)),
    )
    for name, value in start.named_parameters():
        assert torch.equal(warm[f"policy.lm.{name}"], value), name
    assert not torch.equal(later["value_head.weight"], warm["value_head.weight"])
    if strategy != "ddp":
        assert_same_training(run, world.run(reference_of(strategy), "stopping"), 3)


def test_a_gradient_that_is_not_finite_stops_all_ranks_before_a_step(strategy: str, world: World) -> None:
    run = world.run(strategy, "poisoned")
    output, _ = world.launch(strategy, FIRST)
    for rank in (0, 1):
        assert f"rank {rank} says: the gradient's norm is" in output
    before, after = weights(run, 1), weights(run, 2)
    assert all(torch.equal(after[name], before[name]) for name in before) and before.keys() == after.keys()


def test_saved_models_give_the_logits_of_the_run(strategy: str, world: World) -> None:
    for name in ("whole", "merged", "adapter"):
        run = world.run(strategy, name)
        expected, folder = torch.load(run / "scores.pt")["logprobs"], run / "model"
        if name == "adapter":
            base = AutoModelForCausalLM.from_pretrained(world.models / family_of(strategy))
            model = PeftModel.from_pretrained(base, folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.allclose(saved_logprobs(model), expected, atol=1e-5), name
        if name != "whole":
            assert relative(weights(run, 1), weights(world.alone(strategy, name), 1)) < 1e-4


def test_another_world_is_refused_and_starts_from_the_weights(strategy: str, world: World, tmp_path: Path) -> None:
    run, model = world.run(strategy, "whole"), world.models / family_of(strategy)
    last = run / "checkpoints/checkpoint_5"
    words = command(tmp_path, model, **WHOLE, env__n_envs=8 // n_shares(strategy))
    with pytest.raises(ValueError, match="--init_from"):
        main([*words, f"--resume={last}"])
    expected = torch.load(run / "scores.pt")
    with a_run(tmp_path, model, f"--init_from={last}", **WHOLE) as fresh:
        assert fresh.state.iteration == 0 and not fresh.optimizer.state_dict()["state"]
        for name, value in fixed_scores(fresh).items():
            assert torch.allclose(value, expected[name], atol=1e-5), name
    with a_run(tmp_path, model, "--overwrite", f"--init_from={run}", **WHOLE) as fresh:
        assert torch.allclose(fixed_scores(fresh)["logprobs"], expected["logprobs"], atol=1e-5)


def test_killed_in_an_update_then_resumed_is_the_run_that_was_not(strategy: str, world: World) -> None:
    world.run(reference_of(strategy), "whole")  # from which it is to refuse to go on
    _, seconds = world.launch(strategy, FIRST)
    assert seconds < 20
    interrupted = world.root / strategy / "tests/interrupted"
    assert saved_iterations(interrupted / "checkpoints") == [1, 2]
    output, seconds = world.launch(strategy, SECOND)
    assert seconds < 20
    whole, ours = weights(world.run(strategy, "whole"), 5), weights(interrupted, 5)
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)
    runs = [interrupted, interrupted.with_name("whole")]
    assert differing(*(lines(run / "metrics.jsonl") for run in runs), tolerance=0.0) == []
    model, other = (load_file(run / "model/model.safetensors") for run in runs)
    assert all(torch.equal(model[name], other[name]) for name in other)
    assert re.search("^refused: .*--init_from", output, re.MULTILINE), output


def test_killed_in_a_save_leaves_the_checkpoint_before(strategy: str, world: World, tmp_path: Path) -> None:
    world.launch(strategy, SECOND)
    run = world.root / strategy / "tests/half_saved"
    assert saved_iterations(run / "checkpoints") == [1] and (run / "checkpoints/.writing_2").exists()
    first, expected = run / "checkpoints/checkpoint_1", weights(world.run(strategy, "whole"), 1)
    assert json.loads((first / "state.json").read_text())["state"]["iteration"] == 1
    assert all(torch.equal(value, expected[name]) for name, value in weights(run, 1).items())
    assert starts_from(first, tmp_path, world.models / family_of(strategy), **WHOLE)


def test_every_algorithm_agrees_with_one_process_or_refuses(strategy: str, world: World, results: Results) -> None:
    for algorithm, by_strategy in results.items():
        outcomes = {family: world.outcome(strategy, algorithm, family) for family in families_of(strategy)}
        by_strategy[strategy] = outcomes
        assert all(outcome == "agrees" or len(outcome) > 40 for outcome in outcomes.values()), outcomes
        if strategy != "tensor_parallel":
            assert set(outcomes.values()) == {"agrees"}, (algorithm, outcomes)


def test_the_readme_has_these_results(results: Results) -> None:
    if not all(by_strategy.keys() == set(STRATEGIES) for by_strategy in results.values()):
        pytest.skip("not all strategies were tried, or some failed")
    if path := os.environ.get("STRATEGY_RESULTS"):
        Path(path).write_text(json.dumps(results, indent=1))
    assert section(README.read_text("utf-8")) == render(results), "see tools/strategy_table.py"


def test_four_ranks_are_one_process(world: World) -> None:
    _, seconds = world.launch("zero3", ("whole", "killed_in_rollout"), 4)
    assert seconds < 20
    assert_same_training(world.root / "zero3_on_4/tests/whole", world.run("single", "whole"), 5)
