"""transformers' Trainer under the parallel strategies: it joins the run's processes and takes its DeepSpeed
configuration or its sharded model, and what its checkpoints hold is whole."""

import contextlib
import copy
import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from algorithms import adapters
from algorithms.lora import lora_layers
from algorithms.models import load_pretrained
from algorithms.policy import LanguageModel
from train import strategy_dtensor
from train.deepspeed_config import BATCH_KEYS, EACH_NUMBER_BY_ITSELF, engine_config
from train.distributed import Ranks
from train.launching import LaunchError, has_accelerator

SCHEDULER = "scheduler.pt"  # as the trainer calls it


def is_deepspeed(ranks: Ranks) -> bool:
    """Whether the trainer's model becomes a DeepSpeed engine."""
    return ranks.strategy.name.startswith("zero")


def joining(ranks: Ranks) -> dict[str, Any]:
    """Arguments with which TrainingArguments join the run's processes. Raises ValueError where they cannot."""
    if ranks.strategy.name == "tensor_parallel":
        raise ValueError(
            "supervised training is not available with tensor parallel layers, since transformers' Trainer cannot save "
            "their optimizer's state: accelerate_configs/fsdp2.yaml and zero3.yaml spread any model over several GPUs"
        )
    return {"ddp_backend": "gloo"} if is_deepspeed(ranks) and not has_accelerator() else {}


def spread(args: TrainingArguments, model: LanguageModel, ranks: Ranks) -> None:
    """Cuts the model up where the strategy does so, and tells the trainer, which is yet to be made, of DeepSpeed."""
    args._n_gpu = min(args.n_gpu, 1)  # else a process that sees several GPUs would spread its batches over them
    if ranks.strategy.name == "fsdp2":
        ranks.strategy.place(model.lm)
    if is_deepspeed(ranks):
        config = engine_config(
            ranks.strategy.config, sum(p.numel() for p in model.parameters()), max_grad_norm=args.max_grad_norm
        )
        if ranks.strategy.stage == 3:
            _partition(model.lm, config, ranks)
        theirs = args.deepspeed_plugin.deepspeed_config
        theirs.clear()
        theirs.update(config | dict.fromkeys(BATCH_KEYS, "auto"))  # that is, as the trainer's own arguments say
        args.bf16 = args.bf16 or ranks.strategy.bf16


def _partition(lm: Any, config: dict[str, Any], ranks: Ranks) -> None:
    """One parameter after another: the engine itself would first move all of them to the GPU."""
    import deepspeed

    if ranks.strategy.bf16:
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    remote = (config["zero_optimization"].get("offload_param") or {}).get("device")
    deepspeed.zero.Init(module=lm, config_dict_or_path=config, remote_device=remote)
    for buffer in lm.buffers():
        buffer.data = buffer.data.to(ranks.device)


class SupervisedTrainer(Trainer):  # type: ignore[misc]
    """Its checkpoints hold the model (or, with LoRA, the adapter) as `from_pretrained` takes it."""

    def __init__(self, *, policy: LanguageModel, ranks: Ranks, **kwargs: Any) -> None:
        self.policy, self.ranks = policy, ranks
        super().__init__(model=policy.lm, **kwargs)
        unset_hf_deepspeed_config()  # by which transformers would load other models in parts
        kind, _ = self.get_optimizer_cls_and_kwargs(self.args, policy.lm)
        if is_deepspeed(ranks) and ranks.strategy.stage > 0 and not issubclass(kind, EACH_NUMBER_BY_ITSELF):
            raise ValueError(
                f"alg.training_args.optim {self.args.optim.value}: ZeRO steps on slices across weights, so an "
                "optimizer has to treat each number by itself, as AdamW does; use adamw_torch, or DDP"
            )
        if self.args.world_size != ranks.num_processes or self.is_deepspeed_enabled != is_deepspeed(ranks):
            raise LaunchError(
                f"transformers' Trainer believes that it is one of {self.args.world_size} processes under "
                f"{self.accelerator.distributed_type.value}, and the run has {ranks.num_processes} under "
                f"{ranks.strategy.name}: leave what the accelerate config decides out of alg.training_args"
            )

    def begin(self) -> None:
        """Lets the run's strategy gather the weights of the trainer's engine, once there is one."""
        if self.ranks.strategy.name == "zero3":
            optimizer = self.deepspeed.optimizer
            self.ranks.strategy.offloads.append(getattr(optimizer, "parameter_offload", optimizer))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Model or adapter, and tokenizer, in a folder that is a model_name. All ranks call it."""
        state = adapters.lm_state(self.policy, self.ranks.strategy.whole)
        if self.ranks.is_main:
            adapters.save_pretrained(self.policy, output_dir or self.args.output_dir, state)
            self.processing_class.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._put_back(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._put_back(self.state.best_model_checkpoint)

    def _put_back(self, folder: str) -> None:
        lm, strategy = self.policy.lm, self.ranks.strategy
        if lora_layers(lm):
            with strategy.gathered(self.policy, write=True):
                adapters.load_weights(lm, folder)
        else:
            saved = load_pretrained(folder, copy.deepcopy(lm.config)).state_dict()
            strategy.put(lm.state_dict(keep_vars=True), saved)


class ShardedTrainer(SupervisedTrainer):
    """With a model that is in parts already (FSDP2): accelerate leaves it alone, files are written part by part."""

    def __init__(self, **kwargs: Any) -> None:
        asked = os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate would shard once more, and on GPUs only
        try:
            super().__init__(**kwargs)
        finally:
            if asked is not None:
                os.environ["ACCELERATE_USE_FSDP"] = asked
        self.is_distributed_loading_by_transformers = True  # as if so, it is wrapped and cut up by nobody

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """It is where it runs."""

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return contextlib.nullcontext()  # gradients are reduced at once: whole ones would need the memory of a model

    def _clip_grad_norm(self, model: Any, limit: float | None = None) -> float:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = strategy_dtensor.joint_norm(gradients, self.ranks.device)
        factor = min(1.0, (self.args.max_grad_norm if limit is None else limit) / (norm + 1e-6))
        for gradient in gradients:
            strategy_dtensor.local(gradient).mul_(factor)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self._clip_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        self.ranks.strategy.save_optimizer(self.model, self.optimizer.optimizer, folder)
        if self.ranks.is_main:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.ranks.strategy.load_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
