"""transformers' Trainer as supervised training uses it: token means over all ranks, and the run folder's files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from train.supervised_data import Collator, Row, token_losses
from train.tracking import append_line, plain, read_lines


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


class EvaluateAtStart(TrainerCallback):  # type: ignore[misc]
    """Evaluates before the first step, but inside `train`: a model that was evaluated earlier is never wrapped for DDP,
    so each rank would train alone (transformers 5.24, accelerate 1.15)."""

    def __init__(self, trainer: Trainer, test_rows: list[Row]) -> None:
        self.trainer, self.test_rows = trainer, test_rows

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            evaluate(self.trainer, self.test_rows)


def evaluate(trainer: Trainer, test_rows: list[Row]) -> None:
    """Loss and perplexity on val and test, into the run's files."""
    trainer.evaluate()
    trainer.evaluate(test_rows, metric_key_prefix="test")


def make_trainer(
    folder: Path, args: TrainingArguments, model: Any, tokenizer: Any, rows: dict[str, list[Row]]
) -> Trainer:
    """A trainer whose loss is the mean over the labels of all ranks and micro-batches of a step."""
    seq2seq = model.config.is_encoder_decoder

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        losses, mask = token_losses(outputs["logits"], labels, seq2seq=seq2seq)
        return losses.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)

    def sums(logits: Any, labels: Any) -> Any:
        """Loss and number of labels of each row [B, 2]: what evaluation keeps instead of the logits."""
        losses, mask = token_losses(logits[0] if isinstance(logits, tuple) else logits, labels, seq2seq=seq2seq)
        return torch.stack([losses.sum(1), mask.sum(1).to(losses.dtype)], dim=1)

    def metrics(prediction: Any) -> dict[str, float]:
        total, count = prediction.predictions.astype(float).sum(0)
        return {"nll": total / count, "perplexity": math.exp(min(total / count, 700))}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["val"],
        processing_class=tokenizer,
        data_collator=Collator(tokenizer.pad_token_id, model.config.decoder_start_token_id if seq2seq else None),
        compute_loss_func=loss,
        preprocess_logits_for_metrics=sums,
        compute_metrics=metrics,
        callbacks=[Recorder(folder)],
    )
    trainer.add_callback(EvaluateAtStart(trainer, rows["test"]))
    return trainer
