"""Supervised runs on a tiny model: it learns, it ends, and mistakes are named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import lines
from safetensors.torch import load_file
from supervised_world import counting, make_world, predictions, run, seq2seq
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from train.config import load_config


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("supervised"))


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    return run(world, "trained", "--alg.training_args.eval_strategy=epoch")


def test_the_loss_falls(trained: Path) -> None:
    for split, epochs in (("val", [0, 1, 2, 3, 4, 5, 6]), ("test", [0, 6])):
        rows = lines(trained / f"{split}_split_metrics.jsonl")
        assert [row["epoch"] for row in rows] == epochs
        assert [row["iteration"] for row in rows] == [15 * epoch for epoch in epochs]
        first, last = rows[0]["metrics"], rows[-1]["metrics"]
        assert first["supervised/loss"] > 2.5 and last["supervised/loss"] < 0.1
        assert last["supervised/perplexity"] == pytest.approx(torch.tensor(last["supervised/loss"]).exp().item())
    info = lines(trained / "training_info.jsonl")
    assert [row["iteration"] for row in info] == [15, 30, 45, 60, 75, 90]
    assert info[-1]["supervised/train_loss"] < info[0]["supervised/train_loss"] / 5


def test_the_model_answers_and_ends(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    for start in range(15):
        prompt = tokenizer(str(start), return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, 1:]
        assert tokenizer.decode(out) == f"{counting(start)['reference']} <|endoftext|>"


def test_loss_is_the_mean_over_reference_tokens(world: Path, trained: Path) -> None:
    """Not the mean of batches' means: references differ in length and the last batch is short."""
    tokenizer, model = (kind.from_pretrained(world / "gpt2") for kind in (AutoTokenizer, AutoModelForCausalLM))
    total, count = 0.0, 0
    for row in lines(world / "val.jsonl"):
        ids = tokenizer(f"{row['prompt']} {row['reference']}").input_ids + [tokenizer.eos_token_id]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        total -= sum(float(logprobs[i, ids[i + 1]]) for i in range(len(ids) - 1))
        count += len(ids) - 1
    assert lines(trained / "val_split_metrics.jsonl")[0]["metrics"]["supervised/loss"] == pytest.approx(total / count)


def test_the_configuration_is_saved(world: Path, trained: Path) -> None:
    config = load_config(["--config", str(world / "config.yml")])
    differing = config.differences(json.loads((trained / "config.json").read_text()))
    assert differing == ["alg.training_args.eval_strategy"]


def test_the_seed_decides(world: Path) -> None:
    short = ["--overwrite", "--alg.training_args.max_steps=3", "--alg.training_args.eval_strategy=no"]
    results = []
    for seed in (1, 1, 2):
        folder = run(world, "seeds", *short, f"--alg.training_args.seed={seed}")
        assert len(lines(folder / "val_split_metrics.jsonl")) == 2
        results.append(load_file(folder / "model" / "model.safetensors")["transformer.wte.weight"])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_padding_may_be_eos(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "gpt2")
    tokenizer.pad_token = None
    shutil.copytree(world / "gpt2", world / "no_pad")
    tokenizer.save_pretrained(world / "no_pad")
    folder = run(world, "pad_is_eos", f"--tokenizer.model_name={world / 'no_pad'}")
    assert lines(folder / "val_split_metrics.jsonl")[-1]["metrics"]["supervised/loss"] < 0.1
    assert AutoTokenizer.from_pretrained(folder / "model").pad_token == tokenizer.eos_token


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_seq2seq(family: str, world: Path) -> None:
    folder = run(world, family, *seq2seq(world, family), "--alg.generation_kwargs={num_beams: 2}")
    rows = lines(folder / "val_split_metrics.jsonl")
    assert rows[-1]["metrics"]["supervised/loss"] < 0.2 < 2 < rows[0]["metrics"]["supervised/loss"]
    tokenizer, model = (kind.from_pretrained(folder / "model") for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
    for row in predictions(folder, "test", 6):
        out = model.generate(**tokenizer(row["prompt_text"], return_tensors="pt"), max_new_tokens=6, num_beams=2)[0]
        assert tokenizer.decode(out, skip_special_tokens=True) == row["generated_text"]
        assert out[-1] == tokenizer.eos_token_id
        assert f"<START-1>{row['generated_text']}<END-1>" == row["ref_text"]


def test_seq2seq_loss_is_the_mean_over_reference_tokens(world: Path) -> None:
    """EOS included, the decoder's start excluded, with the start that the configuration gives."""
    start = 7
    short = ["--alg.training_args.max_steps=1", f"--env.args.context_start_token={start}"]
    folder = run(world, "t5_loss", *seq2seq(world, "t5"), *short)
    tokenizer, model = (kind.from_pretrained(world / "t5") for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
    total, count = 0.0, 0
    for row in lines(world / "val.jsonl"):
        prompt, target = (tokenizer(row[name]).input_ids for name in ("prompt", "reference"))
        assert prompt[-1] == target[-1] == tokenizer.eos_token_id
        out = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *target[:-1]]]))
        logprobs = out.logits[0].log_softmax(-1).detach()
        total -= sum(float(logprobs[i, token]) for i, token in enumerate(target))
        count += len(target)
    assert lines(folder / "val_split_metrics.jsonl")[0]["metrics"]["supervised/loss"] == pytest.approx(total / count)
    assert AutoConfig.from_pretrained(folder / "model").decoder_start_token_id == start


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("save_merged", [False, True])
def test_adapters(family: str, save_merged: bool, world: Path) -> None:
    """Trained on a frozen base; the result is a model_name, to train further and for reinforcement learning."""
    kind = [] if family == "gpt2" else seq2seq(world, family)
    lora = f"--alg.lora={{r: 8, alpha: 64, target_modules: all-linear, save_merged: {save_merged}}}"
    name = f"lora_{family}_{save_merged}"
    epochs = ["--alg.training_args.eval_strategy=no", "--alg.training_args.num_train_epochs=2"]
    folder = run(world, name, *kind, lora, *epochs)
    first, last = (row["metrics"]["supervised/loss"] for row in lines(folder / "val_split_metrics.jsonl"))
    assert last < 0.9 * first
    assert (folder / "model" / "adapter_config.json").exists() != save_merged
    again = [*kind, f"--alg.model_name={folder / 'model'}", f"--tokenizer.model_name={folder / 'model'}"]
    again += ["--alg.training_args.max_steps=1"] + ([] if save_merged else [lora])
    further = run(world, f"{name}_further", *again)
    (start, _) = (row["metrics"]["supervised/loss"] for row in lines(further / "val_split_metrics.jsonl"))
    assert start == pytest.approx(last, rel=1e-4)
    before = {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}
    held = folder / "checkpoints" / "checkpoint-15"
    assert (held / "adapter_model.safetensors").is_file() and not (held / "model.safetensors").exists()
    if not save_merged:
        last_one = folder / "checkpoints" / "checkpoint-30" / "adapter_model.safetensors"
        assert before["adapter_model.safetensors"] == last_one.read_bytes()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-30")
    run(world, name, *kind, lora, *epochs, "--resume")
    assert before == {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--alg.training_args.output_dir=x"], "results go to tracking.output_dir"),
        (["--alg.training_args.label_smoothing_factor=0.1"], "the loss is the plain mean over tokens"),
        (["--alg.training_args.learning_rate=abc"], "alg.training_args.learning_rate: expected a number, got 'abc'"),
        (["--alg.training_args.deepspeed=ds.json"], "training_args.deepspeed: the accelerate config decides"),
        (["--distributed.gpus_per_process=2"], "device maps, which supervised training does not have"),
        (["--alg.model_name=./none"], "there is no folder ./none"),
        (["--datapool.id=dummy_pool", "--datapool.args={prompt: '1'}"], "no references"),
        (["--alg.model_type=seq2seq"], "alg.model_type is seq2seq, but .* is a causal model"),
        (["--datapool.id=jsnl"], "unknown task 'jsnl'"),
    ],
)
def test_mistakes_are_named(world: Path, args: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(world, "mistaken", *args)
    assert not (world / "runs" / "p" / "mistaken" / "config.json").exists()
