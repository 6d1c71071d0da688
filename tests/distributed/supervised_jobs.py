"""Supervised runs in one launch; started by test_supervised_strategies.py under every strategy.

usage: supervised_jobs.py FOLDER STRATEGY WORLD PROCESSES JOB …
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from strategy_runs import several_runs_in_one_launch
from supervised_world import TOKENS

import train.supervised as script
from train.config import load_config
from train.supervised_model import save_model


class Jobs:
    """A method each."""

    def __init__(self, folder: Path, world: Path, processes: int) -> None:
        self.folder, self.world, self.rows = folder, world, 16 // processes

    def run(self, name: str, *words: str, resume: bool = False, **training: Any) -> Path:
        """A run of five steps on 16 rows each."""
        training = {"per_device_train_batch_size": self.rows, "max_steps": 5, "logging_steps": 1, **training}
        options = [f"--alg.training_args.{name}={value}" for name, value in training.items()]
        options += [f"--tracking.output_dir={self.folder}", "--train_evaluation.eval_batch_size=2"]
        options += ["--train_evaluation.metrics=[{id: diversity}]", "--resume" if resume else "--overwrite"]
        path = str(self.world / "config.yml")
        script.train(load_config(["--config", path, "--experiment_name", name, *options, *words]))
        return self.folder / "p" / name

    def whole(self) -> None:
        """Sampled answers to val and test, of which the ranks have unequal shares."""
        self.run("whole", "--alg.generation_kwargs={do_sample: true}")

    def accumulated(self) -> None:
        halves = {"per_device_train_batch_size": self.rows // 2, "gradient_accumulation_steps": 2}
        self.run("accumulated", "--alg.generation_kwargs={do_sample: true}", **halves)

    def resumed(self) -> None:
        """Interrupted after the second step; with dropout, and weights that are never gathered."""
        words = [f"--alg.model_name={self.world / 'dropout'}", "--generation.gather=never"]
        words += ["--train_evaluation.keep_last=9", "--train_evaluation.max_eval_samples=5"]
        folder = self.run("uninterrupted", *words, max_steps=3, save_steps=2)
        if os.environ.get("RANK", "0") == "0":
            shutil.copytree(folder, folder.with_name("resumed"))
            shutil.rmtree(folder.with_name("resumed") / "checkpoints" / "checkpoint-3")
        self.run("resumed", *words, resume=True, max_steps=3, save_steps=2)

    def best(self) -> None:
        """An adapter of a seq2seq model, of which an earlier checkpoint is the result."""
        model = self.world / "t5"
        words = ["--alg.model_type=seq2seq", f"--alg.model_name={model}", f"--tokenizer.model_name={model}"]
        words += ["--alg.lora={r: 4, target_modules: all-linear}", "--train_evaluation.keep_last=9"]
        each_step = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": "true"}
        self.run("best", *words, **each_step, learning_rate=0.1, metric_for_best_model="eval_length")

    def refused(self) -> None:
        """What cannot be is said before a run's folder is lost."""
        try:
            self.run("whole", optim="adafactor")
        except ValueError as error:
            print(f"refused: {error}", flush=True)


def save_with_logits(trainer: Any, model: Any, config: Any, ranks: Any, folder: Path) -> None:
    """As the script saves; with the logits that the model in training gives for TOKENS."""
    inputs = {"decoder_input_ids": TOKENS} if config.alg.model_type == "seq2seq" else {}
    with torch.no_grad():
        logits = trainer.model(input_ids=TOKENS, **inputs).logits
    save_model(trainer, model, config, ranks, folder)
    if ranks.is_main:
        torch.save(logits, folder / "logits.pt")


if __name__ == "__main__":
    several_runs_in_one_launch()
    script.save_model = save_with_logits  # type: ignore[attr-defined]
    jobs = Jobs(Path(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4]))
    for job in sys.argv[5:]:
        getattr(jobs, job)()
