"""What each strategy keeps of weights, gradients and optimizer on a rank, and what it brings together for a while."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tools.plan_models import bytes_of, count
from train.config import Config, RLAlg, TRPOAlg
from train.gathering import SHARE
from train.models import Models
from train.strategy_fsdp import blocks

# DeepSpeed's defaults, in parameters.
BUCKET, LIVE, PERSISTENT = 5e8, 1e9, 1e5
DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero3_offload", "zero3_offload_params")
DDP_BUCKETS, GATHERED, COPY = "DDP's buckets", "weights brought together", "fp32 copy for the step"
BITS = {"int8": 8.1, "int4": 4.5}  # with the scales
Parts = dict[str, Any]
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
    def offloads(self) -> bool:
        """Whether the optimizer is in the machine's memory, and not on the GPU."""
        return self.on_gpu and "offload" in self.strategy

    @property
    def computes_in_bf16(self) -> bool:
        """Whether the weights that compute are in bf16, and not cast where they are used."""
        return self.bf16 and (self.stage is not None or self.strategy == "fsdp2")

    @property
    def shares(self) -> int:
        """Ranks that train on batches of their own."""
        return 1 if self.strategy == "tensor_parallel" else self.processes


@dataclass(kw_only=True)
class Layout:
    """Bytes on a rank's device, by purpose. held: always. brought: in a phase ("generate", "score", "update").
    host: in the machine's memory instead, per rank. step: in the optimizer's step alone.

    keeps_gradients: whole and until the step; else each goes once it is there, into what `brought` has for it.
    in_heap: what is held lies in the CPU allocator's blocks, not in pages of the model's file. gathers: whether weights
    are whole to generate; None where they always are.
    """

    held: Bytes = field(default_factory=Counter)
    brought: dict[str, Bytes] = field(default_factory=dict)
    host: Bytes = field(default_factory=Counter)
    step: int = 0
    keeps_gradients: bool = True
    in_heap: bool = False
    gathers: bool | None = None

    def is_in_heap(self, row: str) -> bool:
        """Whether what is held for this lies in the CPU allocator's blocks."""
        return self.in_heap or row == DDP_BUCKETS


def lay_out(models: Models, config: Config, setting: Setting) -> Layout:
    """The layout of the models of a run."""
    parts = {"policy": models.actor_critic.policy, "critic": critic_of(models.actor_critic), **models.frozen}
    trained = {name: parts[name] for name in ("policy", "critic")}
    if isinstance(config.alg, TRPOAlg):
        del trained["policy"]  # has no optimizer
    if setting.stage is not None:
        layout = _deepspeed(parts, trained, setting)
    elif setting.strategy == "fsdp2":
        layout = _fsdp2(parts, trained, setting)
    else:
        layout = _whole(parts, trained, setting)
    if setting.stage == 3 or setting.strategy == "fsdp2":
        _decide_gathering(layout, parts, config, setting)
    if setting.stage == 3 and "policy" not in trained:
        layout.brought["update"][GATHERED] += (2 if setting.bf16 else 4) * count(parts["policy"])
    if setting.on_gpu and isinstance(config.alg, RLAlg) and "reference" in parts:
        _set_aside(layout, parts["reference"], config.alg.policy.args)
    return layout


def critic_of(actor_critic: Any) -> nn.ModuleList:
    """The critic's trunk and the value head, as far as they are there."""
    return nn.ModuleList(part for part in (actor_critic.critic, actor_critic.value_head) if part is not None)


def weights_row(name: str) -> str:
    """The table's name of a model's weights."""
    return f"weights of the {name.replace('_model', ' policy')}"


def tables(module: nn.Module) -> dict[int, Tensor]:
    """Embeddings and heads: what a tensor parallel process computes with as a whole and holds a part of."""
    found = {id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    for lm in [m for m in module.modules() if isinstance(m, PreTrainedModel)]:
        if (head := lm.get_output_embeddings()) is not None:
            found[id(head.weight)] = head.weight
    return found


def _whole(parts: Parts, trained: Parts, setting: Setting) -> Layout:
    layout = Layout(held=Counter({weights_row(name): bytes_of(part) for name, part in parts.items()}))
    if setting.strategy == "tensor_parallel":
        n = setting.processes
        for name, part in parts.items():
            layout.held[weights_row(name)] -= sum(x.nbytes - x.nbytes // n for x in tables(part).values())
        cut = [x for part in trained.values() for x in tables(part).values() if x.requires_grad]
        layout.brought["update"] = Counter({"gradients": sum(x.nbytes // n for x in cut)})
        layout.in_heap = True
    elif setting.processes > 1:
        layout.held[DDP_BUCKETS] = sum(bytes_of(part, trained=True) for part in trained.values())
    return layout


def _deepspeed(parts: Parts, trained: Parts, setting: Setting) -> Layout:
    n, size, sharded = setting.processes, 2 if setting.bf16 else 4, setting.stage == 3
    numbers = {name: count(part) for name, part in parts.items()}
    own = numbers["policy"] + numbers["critic"]
    share = math.ceil(sum(count(part, trained=True) for part in trained.values()) / n)
    layout = Layout(in_heap=True, keeps_gradients=setting.stage in (0, 1))
    for name, part in parts.items():
        small = sum(p.numel() for p in part.parameters() if p.numel() <= PERSISTENT)
        layout.held[weights_row(name)] = size * (math.ceil(numbers[name] / n) + small if sharded else numbers[name])
    bucket = int(size * min(BUCKET, own))
    layout.brought["update"] = Counter()
    if not sharded:
        layout.brought["update"]["gradient bucket"] = bucket
        if setting.stage:
            layout.held[COPY] = layout.step = 4 * share
        if setting.stage == 2:
            layout.brought["update"]["gradients"] = size * share
        return layout
    layout.held |= {"gradient bucket": bucket, "gradients": size * share}
    if setting.bf16:
        layout.held[COPY] = 4 * share
    layout.step = 4 * math.ceil(min(share, LIVE))
    layout.brought["update"][GATHERED] = int(size * min(own, LIVE))
    layout.brought["score"] = Counter({GATHERED: int(size * min(max(own, numbers.get("reference", 0)), LIVE))})
    if setting.offloads:
        layout.host |= {"gradients": layout.held.pop("gradients"), COPY: 4 * share, "fp32 gradients": layout.step}
        layout.held.pop(COPY, None)
        layout.step = 0
        for row in [row for row in layout.held if row.startswith("weights") and setting.strategy.endswith("params")]:
            layout.host[row] = layout.held.pop(row)
    return layout


def _fsdp2(parts: Parts, trained: Parts, setting: Setting) -> Layout:
    n, layout = setting.processes, Layout(in_heap=True, keeps_gradients=False)
    for name, part in parts.items():
        whole = name == "policy" and "policy" not in trained
        layout.held[weights_row(name)] = bytes_of(part) if whole else math.ceil(bytes_of(part) / n)
    at_once = [_at_once(part, setting) for part in trained.values()]
    update = Counter({"gradients": sum(math.ceil(bytes_of(part, trained=True) / n) for part in trained.values())})
    update |= {GATHERED: max(w for w, _ in at_once), "gradient bucket": max(g for _, g in at_once)}
    score = max(_at_once(part, setting)[0] for name, part in parts.items() if name != "policy" or name in trained)
    layout.brought = {"update": update, "score": Counter({GATHERED: score})}
    return layout


def _at_once(part: nn.Module, setting: Setting) -> tuple[int, int]:
    """(weights that are whole at a time: what is in no block, a block and the next; whole gradients: of what is in no
    block and of a block, and the copy of the latter that is sent)."""

    def size(parameters: Any) -> int:
        return sum(p.numel() * (2 if setting.bf16 else p.element_size()) for p in parameters)

    inside = [block for lm in part.modules() if isinstance(lm, PreTrainedModel) for block in blocks(lm)]
    in_blocks = {id(p) for block in inside for p in block.parameters()}
    rest = size(p for p in part.parameters() if id(p) not in in_blocks)
    largest = max((size(block.parameters()) for block in inside), default=0)
    return rest + 2 * largest, rest + 3 * largest


def _set_aside(layout: Layout, reference: Any, args: Any) -> None:
    """For alg.policy.args.reference_device and reference_quantization."""
    row = weights_row("reference")
    if args.reference_device is not None:
        whole = layout.held.pop(row, 0) or layout.host.pop(row, 0)
        layout.held["layer of the reference"] = max(
            sum(p.nbytes for p in part.parameters(recurse=False)) for part in reference.modules()
        )
        if args.reference_device == "cpu":
            layout.host[row] = whole
    elif args.reference_quantization is not None:
        head = reference.lm.get_output_embeddings().weight
        linear = [m.weight for m in reference.lm.modules() if type(m).__name__ in ("Linear", "Conv1D")]
        spared = sum(x.nbytes - x.numel() * BITS[args.reference_quantization] / 8 for x in linear if x is not head)
        layout.held[row] -= int(spared)


def _decide_gathering(layout: Layout, parts: Parts, config: Config, setting: Setting) -> None:
    """As train.gathering does, from what is planned."""
    size = 2 if setting.bf16 else 4
    generating = [part for name, part in parts.items() if name in ("policy", "mask_model")]
    needed = sum(size * count(part) for part in generating)
    if setting.strategy == "fsdp2" and config.alg.id == "trpo":
        needed = 0
    free, wanted = setting.capacity - sum(layout.held.values()), config.generation.gather
    layout.gathers = wanted == "always" or (wanted == "auto" and needed <= SHARE * free)
    brought = needed
    if not layout.gathers:
        in_parts = [_at_once(part, setting)[0] for part in generating]
        brought = sum(in_parts) if setting.strategy == "fsdp2" else int(min(needed, size * LIVE))
    layout.brought["generate"] = Counter({GATHERED: brought})


def own_shares(optimizer: torch.optim.Optimizer, module: nn.Module, setting: Setting) -> None:
    """Leaves an optimizer of a module's parameters what a rank steps on: slices of each group, or of each weight."""
    n, cut = setting.processes, tables(module) if setting.strategy == "tensor_parallel" else {}

    def part(p: Tensor) -> Tensor:
        is_cut = id(p) in cut or setting.strategy == "fsdp2"
        dtype = torch.float32 if setting.computes_in_bf16 else p.dtype
        return nn.Parameter(torch.empty(math.ceil(p.numel() / n), dtype=dtype)) if is_cut else p

    for group in optimizer.param_groups:
        if setting.stage:
            group["params"] = [nn.Parameter(torch.empty(math.ceil(sum(p.numel() for p in group["params"]) / n)))]
        else:
            group["params"] = [part(p) for p in group["params"]]
        if group.get("foreach", 0) is None and setting.on_gpu and setting.strategy != "tensor_parallel":
            group["foreach"] = True  # torch's choice on GPUs
