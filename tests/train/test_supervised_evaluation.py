"""Evaluation in supervised training: the files and values of the reinforcement learning scripts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import lines
from supervised_world import counting, make_world, predictions, run, seq2seq
from transformers import AutoModelForCausalLM, AutoTokenizer

from train import ppo
from train.config import load_config
from train.supervised import training_arguments
from train.supervised_data import RowBuilder
from train.supervised_evaluation import generation_kwargs, lengths, prompt_limit

SHORT = "--alg.training_args.max_steps=3"
METRICS = "--train_evaluation.metrics=[{id: diversity}, {id: length}]"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("supervised"))


def test_the_files_of_a_run(world: Path) -> None:
    each_half = ["--alg.training_args.eval_strategy=steps", "--alg.training_args.eval_steps=0.25"]
    two_epochs = ["--alg.training_args.num_train_epochs=2", "--tracking.trackers=[tensorboard]"]
    folder = run(world, "files", METRICS, *each_half, *two_epochs)
    names = {"supervised/loss", "supervised/perplexity", "length", "truncated"}
    distinct = {f"diversity_metrics/distinct-{n}" for n in (1, 2, 3)}
    for split, epochs in (("val", [0, 0.533, 1.067, 1.6, 2]), ("test", [0, 2])):
        rows = lines(folder / f"{split}_split_metrics.jsonl")
        assert [row["epoch"] for row in rows] == epochs
        assert all(row["metrics"].keys() == names | distinct for row in rows)
        for row in rows:
            written = predictions(folder, split, row["epoch"])
            assert [line["sample_id"] for line in written] == [f"{split}_{i}" for i in range(15)]
            assert row["metrics"]["length"] == sum(line["length"] for line in written) / 15
            texts = {"split_name", "sample_id", "prompt_text", "generated_text", "ref_text"}
            assert all(line.keys() == texts | distinct | {"length"} for line in written)
    assert not list(folder.glob("epoch_1_*"))
    assert list((folder / "tensorboard").rglob("events.*"))
    card = (folder / "model" / "README.md").read_text()
    assert "task `jsonl` for 30 optimizer steps" in card and "diversity_metrics/distinct-1" in card


SAMPLED = {"do_sample": True, "top_k": 5, "min_length": 2}
LORA = {"r": 4, "alpha": 32.0, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("family", "kwargs", "lora"),
    [
        ("gpt2", SAMPLED, None),
        ("gpt2", {"num_beams": 3}, LORA),
        ("t5", SAMPLED, LORA),
        ("t5", {"num_beams": 3}, None),
        ("bart", SAMPLED, None),
        ("bart", {"num_beams": 3}, None),
    ],
)
def test_reinforcement_learning_starts_where_supervised_training_ended(
    family: str, kwargs: dict[str, Any], lora: Any, world: Path
) -> None:
    """The same responses, rewards and metrics from train/ppo.py on the saved model, before its first iteration."""
    name = f"warm_{family}_{len(kwargs)}"
    reward = "--reward_fn={id: 'user_code:small_numbers', args: {below: 5}}"
    options = [METRICS, reward, f"--alg.generation_kwargs={json.dumps(kwargs)}", f"--alg.lora={json.dumps(lora)}"]
    kind = [] if family == "gpt2" else seq2seq(world, family)
    folder = run(world, name, "--alg.training_args.num_train_epochs=2", *kind, *options)
    config = yaml.safe_load((world / "config.yml").read_text())
    config["env"] = {"args": {"max_episode_length": 4, "max_prompt_length": 60, "terminate_on_eos": True}}
    policy = "causal_lm_actor_critic_policy" if family == "gpt2" else "seq2seq_lm_actor_critic_policy"
    config["alg"] = {
        "id": "ppo",
        "args": {"seed": 3, "n_steps": 8, "n_epochs": 1},
        "kl_div": {"coeff": 0.1},
        "policy": {"id": policy, "args": {"model_name": str(folder / "model"), "lora": lora}},
    }
    config["tokenizer"]["model_name"] = str(folder / "model")
    config["train_evaluation"] |= {"n_iters": 1, "eval_every": 1, "generation_kwargs": kwargs}
    (world / "ppo.yml").write_text(yaml.safe_dump(config))
    ppo.main(["--config", str(world / "ppo.yml"), "--experiment_name", f"{name}_ppo", METRICS, reward])
    started = folder.with_name(f"{name}_ppo")
    perplexity = "fluency_metrics/reference_perplexity"
    for split in ("val", "test"):
        ours, theirs = predictions(folder, split, 2), predictions(started, split, 0)
        assert ours == [{key: value for key, value in row.items() if key != perplexity} for row in theirs]
        assert any(row["generated_text"] != ours[0]["generated_text"] for row in ours)
        first, _ = (row["metrics"] for row in lines(started / f"{split}_split_metrics.jsonl"))
        supervised = lines(folder / f"{split}_split_metrics.jsonl")[-1]["metrics"]
        del supervised["supervised/loss"], supervised["supervised/perplexity"], first[perplexity]
        assert supervised == pytest.approx(first)
    # The reference is the warm-started policy, with its adapter where it has one.
    assert abs(lines(started / "metrics.jsonl")[0]["kl/ref"]) < 1e-6


def test_a_reward_that_runs_on_the_device(world: Path) -> None:
    for split in ("val", "test"):
        rows = [{**counting(i), "meta": {"number": i}} for i in range(4)]
        (world / "numbered").mkdir(exist_ok=True)
        for name in (split, "train"):
            (world / "numbered" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "--reward_fn={id: 'user_code:OnDevice', args: {scale: 10}}"
    folder = run(world, "device", SHORT, reward, f"--datapool.args.path={world / 'numbered'}")
    rows = predictions(folder, "val", 3)
    assert [row["reward"] for row in rows] == [10 * row["length"] + i for i, row in enumerate(rows)]


def test_dropout_is_off_in_evaluation_and_greedy_is_the_default(world: Path) -> None:
    folder = run(world, "dropped", SHORT, f"--alg.model_name={world / 'dropout'}")
    for where, epoch in ((world / "dropout", 0), (folder / "model", 0.2)):
        tokenizer, lm = (kind.from_pretrained(where) for kind in (AutoTokenizer, AutoModelForCausalLM))
        for row in predictions(folder, "val", epoch):
            prompt = tokenizer(row["prompt_text"], return_tensors="pt")
            out = lm.generate(**prompt, max_new_tokens=4, do_sample=False)[0, 1:]
            assert tokenizer.decode(out, skip_special_tokens=True) == row["generated_text"]
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.resid_pdrop == 0.1


@pytest.mark.parametrize(("side", "kept"), [("left", "2 3"), ("right", "1 2")])
def test_long_prompts_are_cut_as_in_training(side: str, kept: str, world: Path) -> None:
    (world / "long").mkdir(exist_ok=True)
    for split in ("train", "val", "test"):
        (world / "long" / f"{split}.jsonl").write_text(json.dumps({"prompt": "1 2 3", "reference": "4"}) + "\n")
    args = [f"--datapool.args.path={world / 'long'}", "--tokenizer.max_length=2", f"--tokenizer.truncation_side={side}"]
    folder = run(world, f"cut_{side}", "--alg.training_args.num_train_epochs=1", *args)
    assert [row["prompt_text"] for row in predictions(folder, "val", 1)] == [kept]


def test_any_metric_chooses_the_best_model(world: Path) -> None:
    best = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "length"}
    options = {**best, "greater_is_better": False, "num_train_epochs": 3}
    folder = run(world, "best", *(f"--alg.training_args.{name}={value}" for name, value in options.items()))
    *during, end = (row["metrics"] for row in lines(folder / "val_split_metrics.jsonl"))
    assert len(during) == 3 and end in during[1:]  # of the last step: that of the model which is saved
    shortest = min(row["length"] for row in during[1:])
    assert end["length"] == shortest < during[0]["length"]


def test_the_best_perplexity_is_the_lowest(world: Path) -> None:
    best = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "supervised/perplexity"}
    options = {**best, "num_train_epochs": 3}
    folder = run(world, "lowest", *(f"--alg.training_args.{name}={value}" for name, value in options.items()))
    *during, end = (row["metrics"]["supervised/perplexity"] for row in lines(folder / "val_split_metrics.jsonl"))
    assert len(during) == 3 and end <= min(during)


def config_of(world: Path, *args: str) -> Any:
    return load_config(["--config", str(world / "config.yml"), *args])


def test_generation_kwargs_have_two_places(world: Path) -> None:
    theirs, ours = "--alg.generation_kwargs={num_beams: 2}", "--train_evaluation.generation_kwargs={num_beams: 2}"
    assert generation_kwargs(config_of(world)) == {}
    for given in ([theirs], [ours], [theirs, ours]):
        assert generation_kwargs(config_of(world, *given)) == {"num_beams": 2}
    with pytest.raises(ValueError, match="alg.generation_kwargs and train_evaluation.generation_kwargs differ"):
        generation_kwargs(config_of(world, theirs, "--train_evaluation.generation_kwargs={num_beams: 3}"))
    for name in ("alg", "train_evaluation"):
        with pytest.raises(ValueError, match=f"{name}.generation_kwargs: unknown keyword 'num_beems'.*num_beams"):
            generation_kwargs(config_of(world, f"--{name}.generation_kwargs={{num_beems: 2}}"))


def test_longest_prompt_has_two_places(world: Path) -> None:
    assert prompt_limit(config_of(world)) is None
    for given in (["tokenizer.max_length"], ["env.args.max_prompt_length"]):
        assert prompt_limit(config_of(world, *(f"--{key}=7" for key in given))) == 7
    with pytest.raises(ValueError, match=r"tokenizer.max_length \(7\) and env.args.max_prompt_length \(8\)"):
        prompt_limit(config_of(world, "--tokenizer.max_length=7", "--env.args.max_prompt_length=8"))


@pytest.mark.parametrize(
    ("options", "asked", "longest", "expected"),
    [
        ({}, None, 512, (15, 5)),  # as long as the longest reference
        ({}, None, 3, (17, 3)),
        ({}, 12, 3, (8, 12)),
        ({"max_prompt_length": 6}, 12, 3, (6, 12)),
        ({"max_length": 8}, None, 512, (4, 4)),  # half of what the model takes
        ({"seq2seq": True}, None, 512, (20, 5)),
        ({"seq2seq": True}, 40, 512, (20, 40)),
        ({"context_start_token": 3}, None, 512, (14, 5)),
    ],
)
def test_lengths(world: Path, options: Any, asked: int | None, longest: int, expected: tuple[int, int]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "gpt2")
    builder = RowBuilder(**{"tokenizer": tokenizer, "vocab_size": 24, "max_length": 20, **options})
    row = {"input_ids": [1] * 9, "labels": [-100] * 4 + [1] * 5}
    rows = {"train": [], "val": [{"input_ids": [1], "labels": [1]}], "test": [row]}
    assert lengths(builder, rows, asked, longest, None) == expected
    with pytest.raises(ValueError, match=r"max_new_tokens \(20\) is too much for the model, which takes"):
        lengths(builder, rows, 20, longest, 19)


RL4LMS = {
    "common_gen/t5": ("seq2seq", "t5-base", 5000, {"num_beams": 5, "min_length": 5, "max_new_tokens": 20}),
    "dialog/gpt2": ("causal", "gpt2", 300, {"do_sample": True, "top_k": 20, "min_length": 2, "max_new_tokens": 20}),
    "imdb/gpt2": ("causal", "lvwerra/gpt2-imdb", 200, {"do_sample": True, "min_length": 48, "max_new_tokens": 48}),
    "iwslt2017/t5": ("seq2seq", "t5-base", 1000, {"num_beams": 4, "length_penalty": 0.6, "max_new_tokens": 128}),
    "summarization/t5": (
        "seq2seq",
        "t5-base",
        5000,
        {"do_sample": True, "top_k": 0, "temperature": 0.7, "min_length": 50, "max_new_tokens": 100},
    ),
    "totto/t5": (
        "seq2seq",
        "t5-base",
        20000,
        {"do_sample": True, "num_beams": 10, "min_length": 10, "max_new_tokens": 50},
    ),
}
"""The supervised files of RL4LMs: kind, model, logging_steps and generation_kwargs."""


@pytest.mark.parametrize("name", RL4LMS)
def test_supervised_files_of_rl4lms(name: str, tmp_path: Path) -> None:
    kind, model_name, logging_steps, kwargs = RL4LMS[name]
    training_args = {
        "per_device_train_batch_size": 8,
        "logging_steps": logging_steps,
        "num_train_epochs": 4,
        "weight_decay": 0.01,
        "lr_scheduler_type": "constant_with_warmup" if name.startswith("totto") else "cosine",
        "learning_rate": "1e-4",
        "save_total_limit": 1,
    }
    document = {
        "tokenizer": {"model_name": model_name, "padding_side": "left", "truncation_side": "right", "max_length": 128},
        "datapool": {"id": "some_task", "args": {}},
        "alg": {
            "id": "supervised",
            "training_args": training_args,
            "model_type": kind,
            "model_name": model_name,
            "generation_kwargs": {**kwargs, "post_processing_fn": None},
        },
        "train_evaluation": {"eval_batch_size": 100, "metrics": [{"id": "meteor", "args": {}}]},
        "tracking": {"output_dir": str(tmp_path)},
    }
    (tmp_path / "file.yml").write_text(yaml.safe_dump(document))
    config = load_config(["--config", str(tmp_path / "file.yml")])
    args = training_arguments(config)
    assert args.learning_rate == 1e-4 and args.save_total_limit == 1 and args.seed == 0
    found = generation_kwargs(config)
    assert found.pop("min_new_tokens", None) == kwargs.pop("min_length", None) and found == kwargs
