"""A task that a tiny model learns in seconds, and supervised runs on it."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_model import main as make_tiny_model
from train.config import load_config
from train.supervised import train

LENGTHS = (1, 2, 3)
TOKENS = torch.arange(4, 20).view(2, 8)  # for a model's logits


def counting(start: int) -> dict[str, Any]:
    """Prompt "7", reference "8", "8 9" or "8 9 10": the length depends on the start."""
    return {"prompt": str(start), "reference": " ".join(str(start + i + 1) for i in range(LENGTHS[start % 3]))}


def make_world(folder: Path) -> Path:
    """The folder, with models (gpt2, t5, bart, and dropout: a gpt2 with dropout), data and config.yml."""
    for family in ("gpt2", "t5", "bart"):
        size = ["--max_number", "20", "--layers", "1", "--hidden", "32"]
        make_tiny_model(["--out", str(folder / family), "--family", family, *size])
    rates = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    AutoModelForCausalLM.from_pretrained(folder / "gpt2", **rates).save_pretrained(folder / "dropout")
    AutoTokenizer.from_pretrained(folder / "gpt2").save_pretrained(folder / "dropout")
    for split in ("train", "val", "test"):
        rows = [counting(i % 15) for i in range(240 if split == "train" else 15)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "tokenizer": {"model_name": str(folder / "gpt2")},
        "datapool": {"id": "jsonl", "args": {"path": str(folder)}},
        "alg": {
            "id": "supervised",
            "model_type": "causal",
            "model_name": str(folder / "gpt2"),
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


def seq2seq(world: Path, family: str) -> list[str]:
    """Arguments for a run with the t5 or the bart."""
    model = str(world / family)
    return ["--alg.model_type=seq2seq", f"--alg.model_name={model}", f"--tokenizer.model_name={model}"]


def run(world: Path, name: str, *args: str) -> Path:
    """A supervised run; returns its folder."""
    train(load_config(["--config", str(world / "config.yml"), "--experiment_name", name, *args]))
    return world / "runs" / "p" / name


def predictions(folder: Path, split: str, epoch: float) -> list[dict[str, Any]]:
    return json.loads((folder / f"epoch_{epoch}_{split}_split_predictions.json").read_text())
