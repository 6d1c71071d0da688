"""What each strategy keeps of weights, gradients and optimizer on a rank, and what it brings together for a while."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tools.plan_models import bytes_of, count
from train.config import Config, RLAlg, TRPOAlg
from train.models import Models
from train.strategy_fsdp import blocks

# DeepSpeed's defaults, in parameters.
BUCKET, LIVE, PERSISTENT = 5e8, 1e9, 1e5
DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero3_offload", "zero3_offload_params")
SHARDED = ("zero3", "zero3_offload", "zero3_offload_params", "fsdp2")
Bytes = Counter[str]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned for. processes: of the launch. on_gpu: else on the CPUs of one machine. bf16: mixed precision.
    capacity: bytes of each process' device."""

    strategy: str
    processes: int
    on_gpu: bool
    bf16: bool
    capacity: float

    @property
    def stage(self) -> int | None:
        """Of ZeRO."""
        return int(self.strategy[4]) if self.strategy in DEEPSPEED else None

    @property
    def shares(self) -> int:
        """Ranks that train on batches of their own."""
        return 1 if self.strategy == "tensor_parallel" else self.processes


@dataclass(kw_only=True)
class Layout:
    """Bytes on a rank's device, by purpose. held: always. brought: in a phase ("generate", "score", "update").
    host: in the machine's memory instead, per rank. step: in the optimizer's step alone.

    keeps_gradients: until the step and whole, as the weights have them; else each goes once it is there, into what
    `brought["update"]` has for it. in_heap: what is held lies in the allocator's blocks, not in the file's pages.
    """

    held: Bytes = field(default_factory=Counter)
    brought: dict[str, Bytes] = field(default_factory=dict)
    host: Bytes = field(default_factory=Counter)
    step: int = 0
    keeps_gradients: bool = True
    in_heap: bool = False
    gathers: bool | None = None  # for generation: whole; None where weights are so anyway


def lay_out(models: Models, config: Config, setting: Setting) -> Layout:
    """The layout of the models of a run."""
    parts = {"policy": models.actor_critic.policy, "critic": critic_of(models.actor_critic), **models.frozen}
    if setting.stage is not None:
        layout = _deepspeed(parts, models, setting)
    elif setting.strategy == "fsdp2":
        layout = _fsdp2(parts, models, config, setting)
    else:
        layout = _whole(parts, models, config, setting)
    _set_reference_aside(layout, models, config, setting)
    if setting.strategy in SHARDED:
        _decide_gathering(layout, models, config, setting)
    return layout


def critic_of(actor_critic: Any) -> nn.ModuleList:
    """The critic's trunk and the value head, as far as they are there."""
    return nn.ModuleList(part for part in (actor_critic.critic, actor_critic.value_head) if part is not None)


def weights_row(name: str) -> str:
    """The table's name of a model's weights."""
    return f"weights of the {name.replace('_model', ' policy')}"


def trained_numbers(models: Models, config: Config) -> int:
    """Parameters that the optimizer has: TRPO's has none of the policy."""
    module = critic_of(models.actor_critic) if isinstance(config.alg, TRPOAlg) else models.actor_critic
    return count(module, trained=True)


def _whole(parts: dict[str, Any], models: Models, config: Config, setting: Setting) -> Layout:
    held = Counter({weights_row(name): bytes_of(part) for name, part in parts.items()})
    if setting.strategy == "tensor_parallel":
        held = Counter({weights_row(name): _cut_bytes(part, setting.processes) for name, part in parts.items()})
    elif setting.processes > 1:
        module = critic_of(models.actor_critic) if isinstance(config.alg, TRPOAlg) else models.actor_critic
        held["DDP's buckets"] = bytes_of(module, trained=True)
    return Layout(held=held)


def _cut_bytes(part: nn.Module, n: int) -> int:
    """Of what one of n processes has: models are made with its share of each layer, but whole embeddings and head."""
    tables = {id(m.weight): m.weight for m in part.modules() if isinstance(m, nn.Embedding)}
    for lm in [m for m in part.modules() if isinstance(m, PreTrainedModel)]:
        if (head := lm.get_output_embeddings()) is not None:
            tables[id(head.weight)] = head.weight
    return bytes_of(part) - sum(int(x.nbytes * (1 - 1 / n)) for x in tables.values())


def _deepspeed(parts: dict[str, Any], models: Models, setting: Setting) -> Layout:
    n, stage = setting.processes, setting.stage
    size = 2 if setting.bf16 else 4
    sharded = stage == 3
    numbers = {name: count(part) for name, part in parts.items()}
    own, trained = numbers["policy"] + numbers["critic"], count(models.actor_critic, trained=True)
    small = {name: sum(p.numel() for p in part.parameters() if p.numel() <= PERSISTENT) for name, part in parts.items()}
    layout = Layout(in_heap=True, keeps_gradients=stage is not None and stage < 2)
    for name, k in numbers.items():
        layout.held[weights_row(name)] = size * (math.ceil(k / n) + small[name] if sharded else k)
    bucket = size * min(BUCKET, own)
    if not sharded:
        layout.brought["update"] = Counter({"gradient bucket": int(bucket)})
        if stage:
            layout.held["fp32 copy for the step"] = 4 * math.ceil(trained / n)
        if stage == 2:
            layout.brought["update"]["gradients"] = size * math.ceil(trained / n)
        layout.step = 4 * math.ceil(trained / n)
        return layout
    layout.held["gradient bucket"] = int(bucket)
    layout.held["gradients"] = size * math.ceil(trained / n)
    if setting.bf16:
        layout.held["fp32 copy for the step"] = 4 * math.ceil(trained / n)
    layout.step = 4 * math.ceil(min(trained / n, LIVE))
    gathered = {name: int(size * min(own, LIVE)) for name in ("score", "update")}
    gathered["score"] = max(gathered["score"], int(size * min(numbers.get("reference", 0), LIVE)))
    layout.brought |= {phase: Counter({"weights brought together": k}) for phase, k in gathered.items()}
    _offload(layout, setting, trained)
    return layout


def _offload(layout: Layout, setting: Setting, trained: int) -> None:
    if "offload" not in setting.strategy or not setting.on_gpu:
        return
    for row in ("gradients", "fp32 copy for the step"):
        layout.host[row] = layout.held.pop(row, 0)
    layout.host["fp32 copy for the step"] = 4 * math.ceil(trained / setting.processes)
    layout.host["fp32 gradients for the step"] = layout.step
    layout.step = 0
    if setting.strategy == "zero3_offload_params":
        for row in [row for row in layout.held if row.startswith("weights")]:
            layout.host[row] = layout.held.pop(row)


def _fsdp2(parts: dict[str, Any], models: Models, config: Config, setting: Setting) -> Layout:
    n = setting.processes
    layout = Layout(in_heap=True, keeps_gradients=False)
    stays = "policy" if isinstance(config.alg, TRPOAlg) else None
    for name, part in parts.items():
        layout.held[weights_row(name)] = bytes_of(part) if name == stays else math.ceil(bytes_of(part) / n)
    trained = [part for name, part in parts.items() if name in ("policy", "critic") and name != stays]
    update = Counter({"gradients": sum(math.ceil(bytes_of(part, trained=True) / n) for part in trained)})
    at_once = [_at_once(part, setting) for part in trained]
    update["weights brought together"] = max(weights for weights, _ in at_once)
    update["gradient bucket"] = max(gradients for _, gradients in at_once)
    score = max(_at_once(part, setting)[0] for name, part in parts.items() if name != stays)
    layout.brought = {"update": update, "score": Counter({"weights brought together": score})}
    return layout


def _at_once(part: nn.Module, setting: Setting) -> tuple[int, int]:
    """(weights that are whole at a time: what is in no block, a block and the next; whole gradients: of what is in no
    block and of a block, and of the latter the copy that is sent)."""
    size = 2 if setting.bf16 else None
    lms = [m for m in part.modules() if isinstance(m, PreTrainedModel)][:1]
    inside = [block for lm in lms for block in blocks(lm)]
    shared = {id(p) for block in inside for p in block.parameters()}
    root = sum(p.numel() * (size or p.element_size()) for p in part.parameters() if id(p) not in shared)
    largest = max((sum(p.numel() * (size or p.element_size()) for p in block.parameters()) for block in inside), default=0)
    return root + 2 * largest, root + 3 * largest


def _set_reference_aside(layout: Layout, models: Models, config: Config, setting: Setting) -> None:
    """For alg.policy.args.reference_device and reference_quantization."""
    row = weights_row("reference")
    if not isinstance(config.alg, RLAlg) or "reference" not in models.frozen or not setting.on_gpu:
        return
    args, reference = config.alg.policy.args, models.frozen["reference"]
    if args.reference_device is not None:
        whole = layout.held.pop(row, 0) or layout.host.pop(row, 0)
        biggest = max(bytes_of(part) for part in reference.modules() if not list(part.children()))
        layout.held["layer of the reference"] = biggest
        if args.reference_device == "cpu":
            layout.host[row] = whole
    elif args.reference_quantization is not None:
        linear = [m.weight for m in reference.lm.modules() if type(m).__name__ in ("Linear", "Conv1D")]
        head = reference.lm.get_output_embeddings().weight
        saved = sum(x.nbytes - x.numel() * _BITS[args.reference_quantization] / 8 for x in linear if x is not head)
        layout.held[row] -= int(saved)


_BITS = {"int8": 8.1, "int4": 4.5}  # with the scales


def _decide_gathering(layout: Layout, models: Models, config: Config, setting: Setting) -> None:
    """As train.gathering does, from what is planned."""
    from train.gathering import SHARE

    size = 2 if setting.bf16 else 4
    gathered = [models.actor_critic.policy, *(m for name, m in models.frozen.items() if name == "mask_model")]
    needed = sum(size * count(module) for module in gathered)
    free = setting.capacity - sum(layout.held.values())
    wanted = config.generation.gather
    layout.gathers = wanted == "always" or (wanted == "auto" and needed <= SHARE * free)
    if layout.gathers:
        layout.brought["generate"] = Counter({"weights brought together": needed})
    elif setting.strategy == "fsdp2":
        layout.brought["generate"] = Counter({"weights brought together": sum(_at_once(m, setting)[0] for m in gathered)})
    else:
        layout.brought["generate"] = Counter({"weights brought together": int(min(needed, size * LIVE))})


def own_shares(optimizer: torch.optim.Optimizer, setting: Setting, layout: Layout) -> None:
    """Leaves the optimizer what a rank of the strategy steps on, with gradients: slices of each group or weight."""
    n, flat = setting.processes, setting.stage is not None and setting.stage > 0
    for group in optimizer.param_groups:
        if flat:
            numbers = sum(p.numel() for p in group["params"])
            group["params"] = [nn.Parameter(torch.empty(math.ceil(numbers / n)))]
        elif setting.strategy == "fsdp2":
            group["params"] = [nn.Parameter(torch.empty(math.ceil(p.numel() / n), dtype=p.dtype)) for p in group["params"]]
        if group.get("foreach", 0) is None and setting.on_gpu and setting.strategy != "tensor_parallel":
            group["foreach"] = True  # torch's choice on GPUs
