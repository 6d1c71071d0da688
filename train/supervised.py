"""Supervised training on a task's references: the warm start of reinforcement learning.

    accelerate launch train/supervised.py --config configs/quickstart/supervised.yml
    python -m train.supervised --config …

A causal model learns to continue each prompt with its references, which do not repeat the prompt, and to end with EOS;
a seq2seq model to answer it. Loss and perplexity are per reference token, EOS included. The run folder gets

    model/                        model and tokenizer: a model_name for every other script
    config.json                   the resolved configuration
    val_split_metrics.jsonl       loss and perplexity before, (as training_args says) during, and after training
    test_split_metrics.jsonl      the same before and after
    training_info.jsonl           training loss and learning rate
    checkpoints/                  what --resume starts from
"""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from envs.registry import build
from envs.tasks import TASKS
from train.config import Config, SupervisedAlg, load_config
from train.loading import check_model_name, load_tokenizer
from train.setup import run_folder
from train.supervised_data import Collator, Row, RowBuilder, token_losses
from train.tracking import append_line, plain, read_lines

SPLITS = ("train", "val", "test")


def training_arguments(config: Config, alg: SupervisedAlg) -> TrainingArguments:
    """alg.training_args with this run's folders. Raises ValueError for an argument that there is not."""
    given = dict(alg.training_args)
    known = {field.name for field in fields(TrainingArguments)}
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"alg.training_args.{name}: unknown" + (f"; did you mean {near[0]}?" if near else ""))
    if "output_dir" in given:
        raise ValueError("alg.training_args.output_dir: results go to tracking.output_dir/project_name/experiment_name")
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_folder(config) / "tensorboard"))
    ours = {
        "output_dir": str(run_folder(config) / "checkpoints"),
        "per_device_eval_batch_size": config.train_evaluation.eval_batch_size,
        "report_to": list(config.tracking.trackers) or "none",
        "save_strategy": "steps" if "save_steps" in given else "epoch",
        "save_total_limit": config.train_evaluation.keep_last,
        "seed": 0,
        "ddp_timeout": int(config.distributed.timeout_s),
    }
    # Rows are made here as the model takes them.
    return TrainingArguments(**{**ours, **given, "remove_unused_columns": False})


def check_world(args: TrainingArguments) -> None:
    """Raises RuntimeError if each process would train alone."""
    if args.world_size != (wanted := int(os.environ.get("WORLD_SIZE", 1))):
        raise RuntimeError(
            f"WORLD_SIZE is {wanted}, but this process believes that it is one of {args.world_size}. "
            "On CPU set ACCELERATE_USE_CPU=true (see accelerate_configs/)"
        )


def barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def prepare_folder(config: Config, args: TrainingArguments) -> str | None:
    """Makes the run folder; returns the checkpoint to go on from, or None. Every rank calls it.

    Raises ValueError if the folder holds another run and neither --resume nor --overwrite says what to do with it.
    """
    folder, resume = run_folder(config), config.run.resume
    saved, in_use = folder / "config.json", folder.exists() and any(folder.iterdir())
    checkpoint = None
    if config.run.overwrite and in_use and not saved.is_file():
        raise ValueError(
            f"{folder} has files but no config.json: it is no run's folder, so --overwrite leaves it alone"
        )
    if not config.run.overwrite and resume not in (None, "never"):
        checkpoint = find_checkpoint(folder / "checkpoints", resume)
        if checkpoint and saved.is_file() and (differing := config.differences(json.loads(saved.read_text()))):
            raise ValueError(f"{folder} was made with another configuration; these keys differ: {', '.join(differing)}")
    elif in_use and not config.run.overwrite:
        raise ValueError(
            f"{folder} holds a run already; give --resume to go on with it, --overwrite to replace it, "
            "or another --tracking.experiment_name"
        )
    barrier()  # until all ranks have looked, none may change anything
    if args.process_index == 0:
        if in_use and checkpoint is None:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
    barrier()
    return checkpoint


def find_checkpoint(checkpoints: Path, resume: str | None) -> str | None:
    """The newest complete checkpoint for "auto" (None if there is none yet), else the one at that path."""
    if resume != "auto":
        if not (Path(str(resume)) / "trainer_state.json").is_file():
            raise ValueError(
                f"--resume {resume}: there is no checkpoint (a folder checkpoint-N with trainer_state.json)"
            )
        return resume
    # The trainer writes trainer_state.json last.
    found = [path.parent for path in checkpoints.glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


def longest_input(model: Any, tokenizer: Any) -> int:
    """Tokens that model and tokenizer take at once; 1024 if neither says."""
    # T5's n_positions is no limit: it has relative positions.
    positions = None if model.config.is_encoder_decoder else getattr(model.config, "max_position_embeddings", None)
    known = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < 10**9]
    return min(known, default=1024)


def make_rows(config: Config, builder: RowBuilder, say: bool) -> dict[str, list[Row]]:
    """Rows of each split. Raises ValueError for a split without samples, or a sample without references."""
    task, limit = build(config.datapool.id, config.datapool.args, TASKS, "task", given=["split"]), None
    rows = {}
    for split in SPLITS:
        samples = task(split=split)
        if not samples:
            raise ValueError(f"datapool {config.datapool.id}: its {split} split is empty")
        limit = None if split == "train" else config.train_evaluation.max_eval_samples
        rows[split] = builder(
            tqdm(samples[:limit], f"tokenizing {split}", unit=" samples", disable=None if say else True)
        )
        if say:
            print(f"{split}: {len(rows[split])} references of {len(samples[:limit])} samples")
    if say and builder.n_cut:
        print(f"{builder.n_cut} references are longer than {builder.max_length} tokens with their prompts and were cut")
    return rows


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes the run's files of metrics while the trainer goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Each evaluation, once per step and split: after training, val may have been evaluated at the last step."""
        split = "test" if "test_loss" in metrics else "val"
        path = self.folder / f"{split}_split_metrics.jsonl"
        if not state.is_world_process_zero or any(row["iteration"] == state.global_step for row in read_lines(path)):
            return
        values = {name: metrics[f"{'test' if split == 'test' else 'eval'}_{name}"] for name in ("nll", "perplexity")}
        named = {"supervised/loss": values["nll"], "supervised/perplexity": values["perplexity"]}
        row = {"epoch": round(state.epoch or 0, 3), "iteration": state.global_step, "metrics": plain(named)}
        append_line(path, row)
        print(
            f"epoch {row['epoch']:g}, {split}: loss {values['nll']:.3f}, perplexity {values['perplexity']:.1f}",
            flush=True,
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            names = {
                "loss": "supervised/train_loss",
                "learning_rate": "supervised/learning_rate",
                "grad_norm": "supervised/grad_norm",
            }
            values = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
            row = {"epoch": round(state.epoch or 0, 3), "iteration": state.global_step, **values}
            append_line(self.folder / "training_info.jsonl", plain(row))


def make_trainer(
    config: Config, args: TrainingArguments, model: Any, tokenizer: Any, rows: dict[str, list[Row]]
) -> Trainer:
    seq2seq = model.config.is_encoder_decoder

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        """Mean over the labels of all ranks and micro-batches."""
        losses, mask = token_losses(outputs["logits"], labels, seq2seq=seq2seq)
        return losses.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)

    def sums(logits: Any, labels: Any) -> Any:
        """Loss and number of labels of each row [B, 2]: what evaluation keeps instead of the logits."""
        losses, mask = token_losses(logits[0] if isinstance(logits, tuple) else logits, labels, seq2seq=seq2seq)
        return torch.stack([losses.sum(1), mask.sum(1).to(losses.dtype)], dim=1)

    def metrics(prediction: Any) -> dict[str, float]:
        total, count = prediction.predictions.astype(float).sum(0)
        return {"nll": total / count, "perplexity": math.exp(min(total / count, 700))}

    return Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["val"],
        processing_class=tokenizer,
        data_collator=Collator(tokenizer.pad_token_id, model.config.decoder_start_token_id if seq2seq else None),
        compute_loss_func=loss,
        preprocess_logits_for_metrics=sums,
        compute_metrics=metrics,
        callbacks=[Recorder(run_folder(config))],
    )


def evaluate(trainer: Trainer, rows: dict[str, list[Row]]) -> None:
    trainer.evaluate(rows["val"])
    trainer.evaluate(rows["test"], metric_key_prefix="test")


def save_model(trainer: Trainer, folder: Path) -> None:
    """Model and tokenizer in folder/model, which appears complete or not at all."""
    aside, final = folder / ".writing_model", folder / "model"
    trainer.save_model(str(aside))
    barrier()
    if trainer.args.process_index == 0:
        (aside / "training_args.bin").unlink(missing_ok=True)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
        print(f"saved {final}")


def train(config: Config) -> None:
    """One supervised run. Raises ValueError for a configuration or data that do not fit."""
    alg = config.alg
    if not isinstance(alg, SupervisedAlg):
        raise ValueError(f"alg.id is {alg.id}: this script is for supervised; use train/{alg.id}.py")
    args = training_arguments(config, alg)
    check_world(args)
    checkpoint = prepare_folder(config, args)
    set_seed(args.seed)
    tokenizer = load_tokenizer(config)
    check_model_name(alg.model_name)
    auto = AutoModelForSeq2SeqLM if alg.model_type == "seq2seq" else AutoModelForCausalLM
    model = auto.from_pretrained(alg.model_name, dtype=torch.float32)
    builder = RowBuilder(
        tokenizer=tokenizer,
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_length=longest_input(model, tokenizer),
        seq2seq=model.config.is_encoder_decoder,
        max_prompt_length=config.tokenizer.max_length,
        separator=alg.separator,
        loss_on_prompt=alg.loss_on_prompt,
    )
    rows = make_rows(config, builder, say=args.process_index == 0)
    trainer = make_trainer(config, args, model, tokenizer, rows)
    if checkpoint is None:
        evaluate(trainer, rows)
    trainer.train(resume_from_checkpoint=checkpoint)
    evaluate(trainer, rows)
    save_model(trainer, run_folder(config))


def main(argv: list[str] | None = None) -> None:
    try:
        train(load_config(argv))
    except ValueError as error:
        # What a user can mend needs no traceback.
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
