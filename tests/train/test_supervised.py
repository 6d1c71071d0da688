"""Supervised runs on a tiny model: it learns, it ends, it resumes, and mistakes are named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from tools.make_tiny_model import main as make_tiny_model
from train.claim import locked
from train.config import load_config
from train.supervised import train

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 2, 3)


def counting(start: int) -> dict[str, Any]:
    """Prompt "7", reference "8", "8 9" or "8 9 10": the length depends on the start."""
    return {"prompt": str(start), "reference": " ".join(str(start + i + 1) for i in range(LENGTHS[start % 3]))}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and config.yml."""
    folder = tmp_path_factory.mktemp("supervised")
    make_tiny_model(["--out", str(folder / "tiny"), "--max_number", "20", "--layers", "1", "--hidden", "32"])
    for split in ("train", "val", "test"):
        rows = [counting(i % 15) for i in range(240 if split == "train" else 15)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "tokenizer": {"model_name": str(folder / "tiny")},
        "datapool": {"id": "jsonl", "args": {"path": str(folder)}},
        "alg": {
            "id": "supervised",
            "model_type": "causal",
            "model_name": str(folder / "tiny"),
            "training_args": {
                "per_device_train_batch_size": 16,
                "num_train_epochs": 6,
                "learning_rate": 0.01,
                "logging_steps": 15,
                "disable_tqdm": True,
                "seed": 3,
            },
        },
        "train_evaluation": {"eval_batch_size": 4},
        "tracking": {"output_dir": str(folder / "runs"), "project_name": "p", "trackers": []},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    return folder


def run(world: Path, name: str, *args: str) -> Path:
    train(load_config(["--config", str(world / "config.yml"), "--experiment_name", name, *args]))
    return world / "runs" / "p" / name


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    tokenizer, model = (kind.from_pretrained(world / "tiny") for kind in (AutoTokenizer, AutoModelForCausalLM))
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


def test_resuming_ends_where_an_uninterrupted_run_does(world: Path, trained: Path) -> None:
    folder = world / "runs" / "p" / "interrupted"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "checkpoint-90")
    run(world, "interrupted", "--alg.training_args.eval_strategy=epoch", "--resume")
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for split in ("val", "test"):
        name = f"{split}_split_metrics.jsonl"
        assert lines(folder / name) == lines(trained / name)
    with pytest.raises(ValueError, match="differ: alg.training_args.eval_strategy"):
        run(world, "interrupted", "--resume")


def test_two_ranks_train_as_one_does(world: Path) -> None:
    """The same batches, gradients and metrics, though each rank sees half a batch and halves differ in tokens."""
    short = ["--alg.training_args.max_steps=5", "--train_evaluation.eval_batch_size=2"]
    alone = run(world, "one_rank", *short)
    launch = [
        str(Path(sys.executable).with_name("accelerate")),
        "launch",
        "--config_file",
        "accelerate_configs/ddp_cpu.yaml",
    ]
    script = ["train/supervised.py", "--config", str(world / "config.yml"), "--experiment_name", "two_ranks"]
    subprocess.run(
        [*launch, *script, *short, "--alg.training_args.per_device_train_batch_size=8"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=120,
    )
    together = alone.with_name("two_ranks")
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (alone, together))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    for split in ("val", "test"):  # 15 samples: the ranks' shares are unequal
        rows, others = (lines(path / f"{split}_split_metrics.jsonl") for path in (alone, together))
        assert [row["iteration"] for row in rows] == [row["iteration"] for row in others] == [0, 5]
        for row, other in zip(rows, others, strict=True):
            assert other["metrics"] == pytest.approx(row["metrics"], rel=1e-4)


def test_a_folder_in_use_is_left_alone(world: Path, trained: Path) -> None:
    weights = (trained / "model" / "model.safetensors").read_bytes()
    for args in ([], ["--resume=never"]):
        with pytest.raises(ValueError, match="holds a run already; give --resume .* --overwrite"):
            run(world, "trained", *args)
    with pytest.raises(ValueError, match="unknown; did you mean learning_rate"):
        run(world, "trained", "--overwrite", "--alg.training_args.learnin_rate=1")
    with pytest.raises(ValueError, match="there is no file"):  # found before anything is deleted
        run(world, "trained", "--overwrite", "--datapool.args.path=nowhere")
    assert (trained / "model" / "model.safetensors").read_bytes() == weights
    other = world / "runs" / "p" / "not_a_run"
    other.mkdir()
    (other / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="no run's folder"):
        run(world, "not_a_run", "--overwrite")
    (other / "config.json").write_text('{"model_type": "gpt2"}')  # a model has one as well
    with pytest.raises(ValueError, match="no run's folder"):
        run(world, "not_a_run", "--overwrite")
    assert (other / "thesis.txt").exists()
    with locked(trained), pytest.raises(ValueError, match="another process is running in"):
        run(world, "trained", "--overwrite")
    assert (trained / "model" / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="give one of them"):
        run(world, "trained", "--overwrite", "--resume")


def test_resuming_what_is_not_there_is_an_error(world: Path) -> None:
    for args in (["--resume"], ["--resume", str(world)]):
        with pytest.raises(ValueError, match="there is no checkpoint"):
            run(world, "new", *args)
    assert not (world / "runs" / "p" / "new").exists()


def test_overwrite_starts_anew_and_the_seed_decides(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [
        "--overwrite",
        "--train_evaluation.metrics=[{id: diversity}]",
        "--alg.training_args.max_steps=3",
        "--alg.training_args.eval_strategy=no",
    ]
    results = []
    for seed in (1, 1, 2):
        folder = run(world, "seeds", *short, f"--alg.training_args.seed={seed}")
        assert len(lines(folder / "val_split_metrics.jsonl")) == 2
        results.append(load_file(folder / "model" / "model.safetensors")["transformer.wte.weight"])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert capsys.readouterr().out.count("train_evaluation.metrics need generated responses") == 3


def test_padding_may_be_eos(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "tiny")
    tokenizer.pad_token = None
    shutil.copytree(world / "tiny", world / "no_pad")
    tokenizer.save_pretrained(world / "no_pad")
    folder = run(world, "pad_is_eos", f"--tokenizer.model_name={world / 'no_pad'}")
    assert lines(folder / "val_split_metrics.jsonl")[-1]["metrics"]["supervised/loss"] < 0.1
    assert AutoTokenizer.from_pretrained(folder / "model").pad_token == tokenizer.eos_token


def test_seq2seq(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "tiny")
    tokenizer.save_pretrained(world / "t5")
    torch.manual_seed(0)
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": 0,
    }
    T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **size, **tokens)).save_pretrained(world / "t5")
    folder = run(world, "t5", "--alg.model_type=seq2seq", f"--alg.model_name={world / 't5'}")
    rows = lines(folder / "val_split_metrics.jsonl")
    assert rows[-1]["metrics"]["supervised/loss"] < 0.2 < 2 < rows[0]["metrics"]["supervised/loss"]
    model = T5ForConditionalGeneration.from_pretrained(folder / "model")
    out = model.generate(**tokenizer("5", return_tensors="pt"), max_new_tokens=6)[0]
    assert tokenizer.decode(out, skip_special_tokens=True) == counting(5)["reference"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--alg.training_args.output_dir=x"], "results go to tracking.output_dir"),
        (["--alg.model_name=./none"], "there is no folder ./none"),
        (["--datapool.id=dummy_pool", "--datapool.args={prompt: '1'}"], "no references"),
        (["--datapool.id=jsnl"], "unknown task 'jsnl'"),
    ],
)
def test_mistakes_are_named(world: Path, args: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(world, "mistaken", *args)
    assert not (world / "runs" / "p" / "mistaken").exists()
