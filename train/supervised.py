"""Supervised training on a task's references: the warm start of reinforcement learning.

    accelerate launch train/supervised.py --config configs/quickstart/supervised.yml
    python -m train.supervised --config …

A causal model learns to continue each prompt with its references, which do not repeat the prompt, and to end with EOS;
a seq2seq model to answer it. Before training, during it (as training_args says: eval_strategy, eval_steps) and after it
loss and perplexity per reference token are measured on val, EOS included, and the model answers the prompts: with the
metrics, the reward if there is one, and the files of the reinforcement learning scripts. On test before and after.
fluency_metrics/reference_perplexity is not measured: the reference would be a second model in memory.

alg.generation_kwargs (or train_evaluation.generation_kwargs) say how it answers; without them greedily, and without
max_new_tokens as long as the longest reference of val and test, at most env.args.max_episode_length and half of what a
causal model takes.

Any accelerate config will do but that of tensor parallel layers. --resume needs the same strategy and number of
ranks, and ends bit by bit where an uninterrupted run would; --init_from FOLDER begins anew with the weights of a
checkpoint or of a run, from whatever strategy. The run folder gets

    model/                        model and tokenizer: a model_name for every other script
    config.json                   the resolved configuration
    {split}_split_metrics.jsonl   a line per evaluation, by optimizer step (iteration) and epoch
    epoch_{epoch}_{split}_split_predictions.json
    training_info.jsonl           training loss and learning rate
    checkpoints/                  what --resume starts from
"""

import contextlib
import difflib
import os
import sys
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from envs.samples import SampleFile
from train import checkpoint
from train.claim import claimed
from train.config import Config, load_config
from train.config_loader import accepts
from train.config_types import flatten
from train.distributed import Ranks
from train.environments import make_metrics, write_data
from train.evaluation import Evaluation
from train.loading import load_tokenizer
from train.script import expect_algorithm, run_script
from train.setup import run_folder
from train.supervised_data import RowBuilder, make_rows
from train.supervised_evaluation import generation_kwargs, lengths, make_sampler, prompt_limit
from train.supervised_model import load_model, longest_input, save_model
from train.supervised_resume import describe, find_checkpoint, first_weights, go_back
from train.supervised_strategy import SupervisedTrainer, joining
from train.supervised_trainer import Recorder, evaluate_at_end, make_trainer, record
from train.tracking import Tracker

# What the run decides itself, or the trainer would ignore or stumble over.
DECIDED = {
    "output_dir": "results go to tracking.output_dir/project_name/experiment_name",
    "resume_from_checkpoint": "give --resume on the command line",
    "label_smoothing_factor": "the loss is the plain mean over tokens; leave it out",
    "prediction_loss_only": "loss and perplexity are measured per token; leave it out",
    "label_names": "rows are made here; leave it out",
    "eval_do_concat_batches": "evaluation is the run's own; leave it out",
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "ddp_backend", "use_cpu"),
        "the accelerate config decides on devices and strategy; leave it out",
    ),
    "push_to_hub": "compute nodes have no network; upload the folder model afterwards",
}


def training_arguments(config: Config, **joining: Any) -> TrainingArguments:
    """alg.training_args with this run's folders. Raises ValueError for an argument that there is not.

    joining: see `train.supervised_strategy`.
    """
    given = dict(config.alg.training_args)
    known = {field.name for field in fields(TrainingArguments)}
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"alg.training_args.{name}: unknown" + (f"; did you mean {near[0]}?" if near else ""))
    numbers = {field.name for field in fields(TrainingArguments) if field.type in ("float", "int", float, int)}
    for name in given.keys() & numbers:
        if not accepts(float, given[name]):
            raise ValueError(f"alg.training_args.{name}: expected a number, got {given[name]!r}")
    for name in given.keys() & DECIDED.keys():
        raise ValueError(f"alg.training_args.{name}: {DECIDED[name]}")
    if str(given.get("metric_for_best_model", "")).endswith(("perplexity", "nll")):
        given.setdefault("greater_is_better", False)
    ours = {
        "output_dir": str(run_folder(config) / "checkpoints"),
        "per_device_eval_batch_size": config.train_evaluation.eval_batch_size,
        "report_to": "none",  # tracking.trackers get their values from us, under the names of all scripts
        "save_strategy": "steps" if "save_steps" in given else "epoch",
        "save_total_limit": config.train_evaluation.keep_last,
        "seed": 0,
        "disable_tqdm": not sys.stderr.isatty(),
        "ddp_timeout": int(config.distributed.timeout_s),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    # YAML reads `no` as false.
    given |= {name: "no" for name, value in given.items() if name.endswith("_strategy") and value is False}
    # Rows are made here as the model takes them.
    try:
        args = TrainingArguments(**{**ours, **given, **joining, "remove_unused_columns": False})
    except TypeError as error:
        raise ValueError(f"alg.training_args: {error}") from error
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.dschf = None  # by which transformers would load models in parts
    return args


def build(
    config: Config, args: TrainingArguments, ranks: Ranks, stack: contextlib.ExitStack
) -> tuple[SupervisedTrainer, Recorder]:
    """The trainer, and what evaluates its model as it goes. Raises ValueError for parts that do not fit."""
    kwargs, max_prompt_length, metrics = generation_kwargs(config), prompt_limit(config), make_metrics(config)
    set_seed(args.seed)
    tokenizer = load_tokenizer(config)
    model = load_model(config, first_weights(config))
    seq2seq = config.alg.model_type == "seq2seq"
    builder = RowBuilder(
        tokenizer=tokenizer,
        vocab_size=model.vocab_size,
        max_length=longest_input(model.lm, tokenizer),
        seq2seq=seq2seq,
        max_prompt_length=max_prompt_length,
        context_start_token=None if seq2seq else config.env.args.context_start_token,
        separator=config.alg.separator,
    )
    data = write_data(config, ranks, run_folder(config), tokenizer)
    samples = {split: SampleFile(path) for split, path in data[0]["splits"].items()}
    spec = replace(config.train_evaluation, generation_kwargs=kwargs)
    options = {"loss_on_prompt": config.alg.loss_on_prompt, "max_eval_samples": spec.max_eval_samples}
    rows = make_rows(builder, samples, **options, say=ranks.is_main)
    positions = getattr(model.lm.config, "max_position_embeddings", None)
    limits = lengths(builder, rows, kwargs.get("max_new_tokens"), config.env.args.max_episode_length, positions)
    sampler = make_sampler(config, ranks, builder, data, limits, args.seed)
    stack.callback(sampler.envs.close)
    trainer = make_trainer(args, model, tokenizer, rows, ranks)
    evaluation = Evaluation(
        spec=spec,
        ranks=ranks,
        model=model,
        sampler=sampler,
        metrics=metrics,
        tracker=Tracker(run_folder(config), ranks, n_iters=0),
        precision=trainer.accelerator.autocast,
        gather=config.generation.gather,
    )
    return trainer, record(trainer, evaluation, rows["test"])


def train(config: Config) -> None:
    """One supervised run. Raises ValueError for a configuration or data that do not fit."""
    expect_algorithm(config.alg.id, "supervised")
    if config.distributed.gpus_per_process > 1:
        raise ValueError(
            "distributed.gpus_per_process belongs to device maps, which supervised training does not have: leave it "
            "out, and launch with accelerate_configs/zero3.yaml or fsdp2.yaml for a model larger than one GPU"
        )
    disable_progress_bar()  # of transformers, which shows the loading of each small model
    folder = run_folder(config)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")  # for a report_to in training_args
    with contextlib.ExitStack() as stack:
        ranks = Ranks(
            timeout_s=config.distributed.timeout_s, trackers=config.tracking.trackers, logging_dir=str(folder)
        )
        stack.callback(ranks.finish)
        args = training_arguments(config, **joining(ranks))
        with claimed(folder, config, ranks, stack, find_checkpoint) as found:
            trainer, recorder = build(config, args, ranks, stack)
            ranks.start_trackers(config.tracking.project_name, flatten(config.to_dict()))
            if found is not None:
                checkpoint.check(found.parent, config, ranks, recorder.evaluation.sampler.data)
        if ranks.is_main:
            if found is not None:
                go_back(folder, found)
            describe(folder, config, ranks, recorder.evaluation.sampler.data)
        ranks.barrier()
        trainer.train(resume_from_checkpoint=None if found is None else str(found))
        evaluate_at_end(trainer, recorder)
        save_model(trainer, recorder.evaluation.model, config, ranks, folder)


def main() -> None:
    train(load_config(algorithm="supervised"))


if __name__ == "__main__":
    run_script(main)
