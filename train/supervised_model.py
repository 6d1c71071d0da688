"""The model of supervised training: where it comes from, and where it goes."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Trainer

from algorithms import adapters
from algorithms.models import load_pretrained
from algorithms.policy import LanguageModel
from train.config import Config
from train.distributed import Ranks
from train.finish import command
from train.loading import check_model_name
from train.tracking import results_table


def load_model(config: Config, model_name: str) -> LanguageModel:
    """The model to train, in float32 and with the dropout of its configuration. Raises ValueError for another kind.

    model_name may be an adapter's folder: with alg.lora it is trained further, without it is merged into its base.
    """
    alg, seq2seq = config.alg, config.alg.model_type == "seq2seq"
    check_model_name(model_name, ("config.json", adapters.CONFIG_FILE))
    base = adapters.base_of(model_name)
    check_model_name(base)
    architecture = AutoConfig.from_pretrained(base)
    if architecture.is_encoder_decoder != seq2seq:
        kind = "causal" if seq2seq else "seq2seq"
        raise ValueError(f"alg.model_type is {alg.model_type}, but {model_name} is a {kind} model")
    lm = load_pretrained(model_name, architecture, dtype=torch.float32, lora=alg.lora)
    model = LanguageModel(lm, decoder_start_token_id=config.env.args.context_start_token if seq2seq else None)
    if seq2seq:
        lm.config.decoder_start_token_id = model.start_token_id  # whoever loads the result needs to know
    return model


def longest_input(model: Any, tokenizer: Any) -> int:
    """Tokens that model and tokenizer take at once; 1024 if neither says."""
    positions = getattr(model.config, "max_position_embeddings", None)
    known = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < 10**9]
    return min(known, default=1024)


def save_model(trainer: Trainer, model: LanguageModel, config: Config, ranks: Ranks, folder: Path) -> None:
    """Model (or adapter), tokenizer and card in folder/model, which appears complete or not at all; prints the results.

    Every rank calls it.
    """
    aside, final, lora = folder / ".writing_model", folder / "model", config.alg.lora
    state = adapters.lm_state(model, ranks.strategy.whole)
    if ranks.is_main:
        (adapters.save_merged if lora and lora.save_merged else adapters.save_pretrained)(model, aside, state)
        trainer.processing_class.save_pretrained(aside)
        table = results_table(folder)
        (aside / "README.md").write_text(model_card(config, ranks, trainer, table), "utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
        print(f"{table}\nmodel: {final}\nmetrics: {folder / 'val_split_metrics.jsonl'}", flush=True)
    ranks.barrier()


def model_card(config: Config, ranks: Ranks, trainer: Trainer, table: str) -> str:
    """What was trained, how to repeat it, and what came out."""
    return f"""---
base_model: {adapters.base_of(config.alg.model_name)}
library_name: {"peft" if config.alg.lora and not config.alg.lora.save_merged else "transformers"}
tags: [supervised, rl4lms-scale]
---
# {config.tracking.experiment_name}

`{config.alg.model_name}` trained on the references of the task `{config.datapool.id}` for {trainer.state.global_step} \
optimizer steps (seed {trainer.args.seed}, {ranks.world_size} process(es)).

Command, in the folder {Path.cwd()}:

    {command("supervised")}

The full configuration is in the run's config.json.

```
{table.strip()}
```
"""
