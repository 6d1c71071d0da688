"""What users get wrong: a message that names it, exit code 2, soon."""

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, command
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.vector import EnvError, WorkerError
from train.ppo import main
from train.script import run_script

Models = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


def message(arguments: list[str], capsys: Capture) -> str:
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: main(arguments))
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert found.startswith("error: ") and "Traceback" not in found
    return found


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("reward_fn", {"id": "increasing_number"}, ["unknown reward 'increasing_number'", "increasing_numbers"]),
        ("reward_fn", {"id": "user_code:small_numberz"}, ["reward 'user_code:small_numberz'", "small_numberz"]),
        ("reward_fn", {"id": "no_such_module:reward"}, ["no module 'no_such_module'"]),
        ("datapool", {"id": "dummy_pol"}, ["unknown task 'dummy_pol'", "dummy_pool"]),
        ("datapool", {"id": "dummy_pool"}, ["task 'dummy_pool' needs the argument 'prompt'"]),
        ("datapool", {"id": "user_code:prompts", "args": {"m": 3}}, ["has no argument 'm'"]),
        ("datapool", {"id": "user_code:nothing"}, ["the task's split is empty", "train"]),
        ("train_evaluation__metrics", [{"id": "divresity"}], ["unknown metric 'divresity'", "diversity"]),
        ("train_evaluation__best_metric", "rewad", ["best_metric", "unknown metric 'rewad'", "'reward'"]),
        ("env__args__max_prompt_length", 25, ["max_prompt_length (25)", "max_episode_length (8)", "32 positions"]),
        ("env__args__max_episode_length", 32, ["exceed the model's 32 positions"]),
        ("train_evaluation__generation_kwargs", {"do_sampel": True}, ["unknown keyword 'do_sampel'", "do_sample"]),
        ("train_evaluation__generation_kwargs", {"temperature": 0}, ["temperature: expected float > 0, got 0"]),
        ("train_evaluation__generation_kwargs", {"max_new_tokens": 27}, ["max_new_tokens (27)", "32 positions"]),
        ("alg__policy__args__optimizer_class", "AdamV", ["optimizer_class 'AdamV'", "AdamW"]),
        ("alg__policy__args__optimizer_kwargs", {"beta": 1}, ["optimizer_kwargs", "beta"]),
    ],
)
def test_a_fault_is_named(
    option: str, value: Any, words: list[str], models: Models, tmp_path: Path, capsys: Capture
) -> None:
    found = message(command(tmp_path, models(), **{option: value}), capsys)
    for word in words:
        assert word in found, found


def test_the_next_try_needs_no_overwrite(models: Models, tmp_path: Path, capsys: Capture) -> None:
    assert "dummy_pool" in message(command(tmp_path, models(), datapool={"id": "dummy_pol"}), capsys)
    main(command(tmp_path, models(), train_evaluation__n_iters=0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no/such/folder", "there is no folder ./no/such/folder"),
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("a/b/c", "there is no folder a/b/c"),
        ("some-user/some-model", "some-user/some-model is neither a folder here nor in the local hub cache"),
        ("no-such-model", "no-such-model is neither a folder here nor in the local hub cache"),
    ],
)
@pytest.mark.parametrize("option", ["tokenizer__model_name", "alg__policy__args__model_name"])
def test_a_model_that_is_not_there_is_noticed_at_once(
    option: str, name: str, words: str, models: Models, tmp_path: Path, capsys: Capture
) -> None:
    start = time.monotonic()
    assert words in message(command(tmp_path, models(), **{option: name}), capsys)
    assert time.monotonic() - start < 10


def test_the_hub_is_not_waited_for(models: Models, tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers
    start = time.monotonic()
    found = message(command(tmp_path, models(), tokenizer__model_name="some-user/some-model"), capsys)
    assert "the hub cannot be reached" in found and time.monotonic() - start < 10


def test_a_folder_that_is_no_model(models: Models, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    found = message(command(tmp_path, models(), tokenizer__model_name=str(tmp_path / "empty")), capsys)
    assert "is a folder without tokenizer.json or tokenizer_config.json or" in found


def test_a_tokenizer_without_padding_or_end(models: Models, tmp_path: Path, capsys: Capture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models())
    tokenizer.pad_token = None
    for folder, name in ((tmp_path / "no_pad", None), (tmp_path / "neither", "eos_token")):
        if name:
            setattr(tokenizer, name, None)
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text((models() / "config.json").read_text())
    no_pad, neither = str(tmp_path / "no_pad"), str(tmp_path / "neither")
    found = message(
        command(tmp_path, models(), tokenizer__model_name=no_pad, tokenizer__pad_token_as_eos_token=False), capsys
    )
    assert "has no padding token; set tokenizer.pad_token_as_eos_token" in found
    found = message(command(tmp_path, models(), tokenizer__model_name=neither), capsys)
    assert "has no EOS token, but env.args.terminate_on_eos is true" in found
    options = {"tokenizer__model_name": neither, "env__args__terminate_on_eos": False}
    assert "has no padding token" in message(command(tmp_path, models(), **options), capsys)
    # EOS stands in for the padding: masks come from lengths, so the run is none the worse for it.
    main(command(tmp_path, models(), tokenizer__model_name=no_pad, train_evaluation__n_iters=1))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan", "returned nan, which is not a finite number"),
        ("string", "returned 'good', which is not a finite number"),
        ("count", "returned 2 values for 1 episodes"),
    ],
)
def test_a_reward_that_is_no_number_names_the_sample(how: str, words: str, models: Models, tmp_path: Path) -> None:
    args = {"how": how}
    options = {"reward_fn": {"id": "user_code:Broken", "args": args}, "datapool__args": {"n": 2}}
    with pytest.raises(EnvError) as caught:
        main(command(tmp_path, models(), **options))
    assert "reward Broken on sample 'val-1'" in str(caught.value) and words in str(caught.value)
    args["sample_id"] = "train-1"  # not noticed before the first rollout
    with pytest.raises(EnvError, match=f"environment [0-3], sample 'train-1': .*{words}"):
        main([*command(tmp_path, models(), **options), "--overwrite"])


def test_a_reward_that_cannot_be_built(models: Models, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="reward 'user_code:Broken' needs the argument 'how'"):
        main(command(tmp_path, models(), reward_fn={"id": "user_code:Broken"}))


SUPERVISED = {"id": "supervised", "model_type": "causal"}


@pytest.mark.parametrize("script", ["ppo", "supervised"])
def test_a_script_for_another_algorithm(script: str, models: Models, tmp_path: Path, capsys: Capture) -> None:
    arguments = command(tmp_path, models())
    if script == "ppo":
        path = tmp_path / "base.json"
        base = json.loads(path.read_text())
        base["alg"] = {**SUPERVISED, "model_name": str(models())}
        path.write_text(json.dumps(base))
        arguments = [word for word in arguments if "alg.policy" not in word]
    other = {"ppo": "supervised", "supervised": "ppo"}[script]
    before, sys.argv = sys.argv, [f"train/{script}.py", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "train" / f"{script}.py"), run_name="__main__")
    finally:
        sys.argv = before
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert f"alg.id is {other}" in found and f"use train/{other}.py" in found
    assert not (tmp_path / "tests").exists()


def test_a_model_without_a_tokenizer_is_refused(models: Models, tmp_path: Path, capsys: Capture) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(models()).save_pretrained(bare)
    found = message(command(tmp_path, models(), tokenizer__model_name=str(bare)), capsys)
    assert "is a folder without tokenizer.json or tokenizer_config.json" in found


def test_a_policy_of_the_other_kind(models: Models, tmp_path: Path, capsys: Capture) -> None:
    found = message(command(tmp_path, models(), alg__policy__id="seq2seq_lm_actor_critic_policy"), capsys)
    assert "is a causal model (of type gpt2); set alg.policy.id to causal_lm_actor_critic_policy" in found


def test_minibatches_of_one_token_are_not_normalised(models: Models, tmp_path: Path, capsys: Capture) -> None:
    assert "alg.args.batch_size 1 leaves nothing" in message(
        command(tmp_path, models(), alg__args__batch_size=1), capsys
    )


def test_a_tracker_that_is_not_installed(models: Models, tmp_path: Path, capsys: Capture) -> None:
    assert "tracking.trackers: wandb cannot be used here" in message(
        command(tmp_path, models(), tracking__trackers=["wandb"]), capsys
    )


def test_a_forced_token_that_there_is_not(models: Models, tmp_path: Path, capsys: Capture) -> None:
    generation = {"forced_eos_token_id": 500}
    found = message(command(tmp_path, models(), alg__policy__args__generation_kwargs=generation), capsys)
    assert "generation_kwargs.forced_eos_token_id 500 is outside the model's vocabulary of 33" in found


def test_rates_have_their_own_places(models: Models, tmp_path: Path, capsys: Capture) -> None:
    kwargs = {"lr": 5.0}
    found = message(command(tmp_path, models(), alg__policy__args__optimizer_kwargs=kwargs), capsys)
    assert "optimizer_kwargs.lr: the place for it is alg.args.learning_rate" in found


def test_a_model_that_lacks_weights(models: Models, tmp_path: Path, capsys: Capture) -> None:
    """transformers would draw them at random, others for the policy than for the reference."""
    model = AutoModelForCausalLM.from_pretrained(models("llama"))
    state = {name: x for name, x in model.state_dict().items() if "layers.0.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path / "model", state_dict=state)
    AutoTokenizer.from_pretrained(models("llama")).save_pretrained(tmp_path / "model")
    found = message(command(tmp_path, tmp_path / "model"), capsys)
    assert "is no complete model: 1 weights are missing, as model.layers.0.mlp.up_proj.weight" in found
