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

import contextlib
import difflib
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer, TrainingArguments, set_seed

from envs.registry import build
from envs.tasks import TASKS
from train.claim import is_run, locked
from train.config import Config, SupervisedAlg, load_config
from train.loading import check_model_name, load_tokenizer
from train.script import run_script
from train.setup import run_folder
from train.supervised_data import Row, RowBuilder
from train.supervised_trainer import evaluate, make_trainer
from train.tracking import forget_after

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
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run_folder(config) / "tensorboard")
    ours = {
        "output_dir": str(run_folder(config) / "checkpoints"),
        "per_device_eval_batch_size": config.train_evaluation.eval_batch_size,
        "report_to": list(config.tracking.trackers) or "none",
        "save_strategy": "steps" if "save_steps" in given else "epoch",
        "save_total_limit": config.train_evaluation.keep_last,
        "seed": 0,
        "ddp_timeout": int(config.distributed.timeout_s),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    # YAML reads `no` as false.
    given |= {name: "no" for name, value in given.items() if name.endswith("_strategy") and value is False}
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


def check_folder(config: Config) -> Path | None:
    """The checkpoint to go on from, or None for a new run. Changes nothing.

    Raises ValueError if the folder holds another run and neither --resume nor --overwrite says what to do with it, or
    if what --resume asks for is not there.
    """
    folder, resume = run_folder(config), config.run.resume
    saved, in_use = folder / "config.json", folder.exists() and any(folder.iterdir())
    if resume not in (None, "never"):
        if config.run.overwrite:
            raise ValueError("--resume goes on with the run in the folder, --overwrite deletes it: give one of them")
        checkpoint = find_checkpoint(folder / "checkpoints", str(resume))
        if saved.is_file() and (differing := config.differences(json.loads(saved.read_text(encoding="utf-8")))):
            raise ValueError(f"{folder} was made with another configuration; these keys differ: {', '.join(differing)}")
        return checkpoint
    if in_use and not config.run.overwrite:
        raise ValueError(
            f"{folder} holds a run already; give --resume to go on with it, --overwrite to replace it, "
            "or another --tracking.experiment_name"
        )
    if in_use and not is_run(folder):
        raise ValueError(f"{folder} is no run's folder, so --overwrite leaves it alone")
    return None


def find_checkpoint(checkpoints: Path, resume: str) -> Path:
    """The newest complete checkpoint for "auto", else the one at that path. Raises ValueError if there is none."""
    if resume == "auto":
        # The trainer writes trainer_state.json last.
        found = [path.parent for path in checkpoints.glob("checkpoint-*/trainer_state.json")]
        if not found:
            raise ValueError(f"--resume: there is no checkpoint in {checkpoints}; leave --resume out to start anew")
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]))
    if not (Path(resume) / "trainer_state.json").is_file():
        raise ValueError(f"--resume {resume}: there is no checkpoint (a folder checkpoint-N with trainer_state.json)")
    return Path(resume)


def claim_folder(config: Config, args: TrainingArguments, checkpoint: Path | None, stack: contextlib.ExitStack) -> None:
    """Makes the folder this run's: empty for a new one, as it was at the checkpoint for one that goes on.

    It is locked until `stack` closes. Raises ValueError if another process is running in it.
    """
    folder = run_folder(config)
    barrier()  # until all ranks have looked at the folder, none may change it
    if args.process_index == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if checkpoint is None:
            with locked(folder):
                shutil.rmtree(folder)
            folder.mkdir()
        stack.enter_context(locked(folder))
        if checkpoint is not None:
            state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            forget_after(folder, state["global_step"])
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
    barrier()


def longest_input(model: Any, tokenizer: Any) -> int:
    """Tokens that model and tokenizer take at once; 1024 if neither says."""
    # T5's n_positions is no limit: it has relative positions.
    positions = None if model.config.is_encoder_decoder else getattr(model.config, "max_position_embeddings", None)
    known = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < 10**9]
    return min(known, default=1024)


def make_rows(config: Config, alg: SupervisedAlg, builder: RowBuilder, say: bool) -> dict[str, list[Row]]:
    """Rows of each split. Raises ValueError for a split without samples, or a sample without references."""
    task = build(config.datapool.id, config.datapool.args, TASKS, "task", given=["split"])
    rows = {}
    for split in SPLITS:
        samples = task(split=split)
        if not samples:
            raise ValueError(f"datapool {config.datapool.id}: its {split} split is empty")
        training = split == "train"
        samples = samples[: None if training else config.train_evaluation.max_eval_samples]
        bar = tqdm(samples, f"tokenizing {split}", unit=" samples", disable=None if say else True)
        rows[split] = builder(bar, loss_on_prompt=alg.loss_on_prompt and training)
        if say:
            print(f"{split}: {len(rows[split])} references of {len(samples)} samples")
    if say and builder.n_cut:
        print(f"{builder.n_cut} references are longer than {builder.max_length} tokens with their prompts and were cut")
    return rows


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
    checkpoint = check_folder(config)
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
    )
    rows = make_rows(config, alg, builder, say=args.process_index == 0)
    if config.train_evaluation.metrics and args.process_index == 0:
        print("note: train_evaluation.metrics need generated responses and are not measured by this script", flush=True)
    with contextlib.ExitStack() as stack:
        claim_folder(config, args, checkpoint, stack)
        trainer = make_trainer(run_folder(config), args, model, tokenizer, rows)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        evaluate(trainer, rows["test"])
        save_model(trainer, run_folder(config))


def main() -> None:
    train(load_config())


if __name__ == "__main__":
    run_script(main)
