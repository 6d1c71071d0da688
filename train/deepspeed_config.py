"""DeepSpeed's configuration: what the accelerate config says, what the run decides, and what is refused."""

import copy
import logging
import os
import warnings
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin

from train.launching import has_accelerator

# What the run decides; a DeepSpeed file of the user's must not say it.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

EACH_NUMBER_BY_ITSELF = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)


def make_plugin() -> DeepSpeedPlugin:
    """What the accelerate config says of DeepSpeed, for Accelerator(). Raises ValueError for what cannot work here."""
    if not has_accelerator():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Its own kernel for CPUs would be compiled at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"  # models are looked at before they are taken apart
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    config = plugin.deepspeed_config
    for key in BATCH_KEYS:
        if str(config.get(key, "auto")) not in ("auto", "1"):
            raise ValueError(
                f"the DeepSpeed configuration sets {key} to {config[key]}: leave it out; the run's own file says it "
                "(alg.args.batch_size, alg.args.micro_batch_size)"
            )
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise ValueError(
                f"the DeepSpeed configuration has a section {key}: leave it out; the run's own file says it "
                "(alg.policy.args.optimizer_class, alg.args.learning_rate)"
            )
    return plugin


def engine_config(
    config: dict[str, Any], n_weights: int, *, max_grad_norm: float = 0.0, train: bool = True
) -> dict[str, Any]:
    """The configuration of one engine, for a module of n_weights. train: with an optimizer, whose joint gradient is
    clipped to max_grad_norm."""
    config = copy.deepcopy(config)
    config.pop("train_batch_size", None)
    config |= dict.fromkeys(BATCH_KEYS[1:], 1) | {"gradient_clipping": max_grad_norm}
    config["zero_force_ds_cpu_optimizer"] = False  # torch's own optimizers run on the CPU as well
    config["zero_allow_untested_optimizer"] = True  # `check_optimizer` says which
    zero = config["zero_optimization"]
    # DeepSpeed's default is half a billion: a buffer of 2 GB, also for a small model.
    zero["reduce_bucket_size"] = min(int(zero.get("reduce_bucket_size", 5e8)), max(n_weights, 1000))
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") in (None, "none"):
            zero.pop(part, None)
    if not train:
        zero.pop("offload_optimizer", None)
    if config.get("bf16", {}).get("enabled"):
        config["bf16"]["check_grad_overflow"] = True  # else a gradient that is not finite is stepped on
    return config


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for one that ZeRO makes another algorithm of."""
    if not isinstance(optimizer, EACH_NUMBER_BY_ITSELF):
        known = ", ".join(kind.__name__ for kind in EACH_NUMBER_BY_ITSELF)
        raise ValueError(
            f"alg.policy.args.optimizer_class {type(optimizer).__name__}: ZeRO steps on slices across weights, so an "
            f"optimizer has to treat each number by itself, as {known} do; use one of them, or DDP"
        )
