"""transformers' Trainer as supervised training uses it: token means over all ranks, and the run folder's files."""

import math
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from algorithms.policy import LanguageModel
from train.distributed import Ranks
from train.evaluation import Evaluation, evaluate_split
from train.supervised_data import Collator, Row, token_losses
from train.supervised_strategy import ShardedTrainer, SupervisedTrainer, spread
from train.tracking import append_line, plain

TRAINING_INFO = {
    "loss": "supervised/train_loss",
    "learning_rate": "supervised/learning_rate",
    "grad_norm": "supervised/grad_norm",
}


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Generates responses whenever the trainer has measured the loss, and writes the run's files.

    done: splits and optimizer steps that were evaluated
    """

    def __init__(self, evaluation: Evaluation, test_rows: list[Row]) -> None:
        self.evaluation, self.test_rows, self.done = evaluation, test_rows, set[tuple[str, int]]()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """One line and one file of predictions for each evaluation; `metrics` gets the new values as well."""
        split, prefix = ("test", "test") if "test_nll" in metrics else ("val", "eval")
        if (split, state.global_step) in self.done:
            return
        self.done.add((split, state.global_step))
        epoch = round(state.epoch or 0, 3)
        known = {"supervised/loss": metrics[f"{prefix}_nll"], "supervised/perplexity": metrics[f"{prefix}_perplexity"]}
        # The trainer has put the model into eval mode, and puts it back before the next step.
        values = evaluate_split(self.evaluation, split, state.global_step, epoch=epoch, known=known)
        # For training_args.metric_for_best_model.
        metrics |= {f"{prefix}_{name}": value for name, value in values.items()}
        loss, perplexity = known.values()
        self.evaluation.tracker.say(f"epoch {epoch:g}, {split}: loss {loss:.3f}, perplexity {perplexity:.1f}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            values = plain({ours: float(logs[theirs]) for theirs, ours in TRAINING_INFO.items() if theirs in logs})
            row = {"epoch": round(state.epoch or 0, 3), "iteration": state.global_step, **values}
            append_line(self.evaluation.tracker.folder / "training_info.jsonl", row)
            self.evaluation.ranks.accelerator.log(values, step=state.global_step)
            if args.disable_tqdm:
                print(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.3f}", flush=True)


class EvaluateAtStart(TrainerCallback):  # type: ignore[misc]
    """Evaluates before the first step, but inside `train`: a model that was evaluated earlier is never wrapped for DDP,
    so each rank would train alone (transformers 5.24, accelerate 1.15)."""

    def __init__(self, trainer: SupervisedTrainer, recorder: Recorder) -> None:
        self.trainer, self.recorder = trainer, recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.begin()
        if state.global_step == 0:
            evaluate(self.trainer, self.recorder)


def record(trainer: SupervisedTrainer, evaluation: Evaluation, test_rows: list[Row]) -> Recorder:
    """Makes the trainer evaluate val and test before its first step, and record that and whatever follows."""
    recorder = Recorder(evaluation, test_rows)
    trainer.add_callback(recorder)
    trainer.add_callback(EvaluateAtStart(trainer, recorder))
    return recorder


def evaluate(trainer: SupervisedTrainer, recorder: Recorder) -> None:
    """Val and test, unless they were evaluated at this step."""
    step = trainer.state.global_step
    if ("val", step) not in recorder.done:
        trainer.evaluate()
    if ("test", step) not in recorder.done:
        trainer.evaluate(recorder.test_rows, metric_key_prefix="test")


def evaluate_at_end(trainer: SupervisedTrainer, recorder: Recorder) -> None:
    """Evaluates the model that will be saved: with load_best_model_at_end it is not the one of the last step."""
    if trainer.args.load_best_model_at_end:
        recorder.done.clear()
    evaluate(trainer, recorder)


def make_trainer(
    args: TrainingArguments, model: LanguageModel, tokenizer: Any, rows: dict[str, list[Row]], ranks: Ranks
) -> SupervisedTrainer:
    """A trainer whose loss is the mean over the labels of all ranks and micro-batches of a step."""
    seq2seq = model.start_token_id is not None

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

    spread(args, model, ranks)
    trainer = (ShardedTrainer if ranks.strategy.name == "fsdp2" else SupervisedTrainer)(
        policy=model,
        ranks=ranks,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["val"],
        processing_class=tokenizer,
        data_collator=Collator(tokenizer.pad_token_id, model.start_token_id),
        compute_loss_func=loss,
        preprocess_logits_for_metrics=sums,
        compute_metrics=metrics,
    )
    trainer.remove_callback(PrinterCallback)  # we say what there is to say
    return trainer
