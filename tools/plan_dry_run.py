"""Goes through the phases of an iteration on fake tensors with the run's own code, and notes what each takes."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from algorithms.decoding import Decoding
from algorithms.policy import LanguageModel
from algorithms.sampling import MaskSpec, SamplingSpec, choose, nlpo_mask
from tools.plan_attention import fused_attention
from tools.plan_layout import Layout, Setting, lay_out, own_shares
from tools.plan_memory import Heap, Ledger, Peak, aten
from tools.plan_models import make_models, to_fake
from tools.plan_trpo import trpo_update
from tools.plan_work import Work
from train.config import Config, NLPOAlg, RLAlg, TRPOAlg
from train.models import make_optimizer

SEVERAL = 8
"""Micro-batches of a step, and steps of an iteration, that are gone through on the CPU's allocator, at most."""


@dataclass(kw_only=True)
class Profile:
    """Peaks by phase, on a rank's device; layout: how its models lie; optimizer: bytes of its state. grown: bytes that
    the CPU's allocator grew by in all, None where it is not asked."""

    layout: Layout
    phases: dict[str, Peak] = field(default_factory=dict)
    optimizer: int = 0
    grown: int | None = None


class DryRun:
    """A run of `config` under a setting, as one rank sees it, between its start and the end of its second iteration."""

    def __init__(self, config: Config, setting: Setting) -> None:
        self.config, self.setting = config, setting
        parts = setting.processes if setting.strategy == "tensor_parallel" else 1
        self.models = make_models(config, parts)
        self.actor_critic = self.models.actor_critic
        self.policy: LanguageModel = self.actor_critic.policy
        self.reference = self.models.frozen.get("reference")
        self.work = Work.of(config, self.policy, setting.shares)
        if setting.stage is not None and setting.bf16:
            for module in (self.models.actor_critic, *self.models.frozen.values()):
                module.to(torch.bfloat16)
        if setting.strategy == "fsdp2" and setting.bf16:
            for module in (self.models.actor_critic, *self.models.frozen.values()):
                module.to(torch.bfloat16)
        self.layout = lay_out(self.models, config, setting)
        heap = Heap() if not setting.on_gpu and Heap.is_there() else None
        self.ledger = Ledger(self._kind, heap)
        self.profile = Profile(layout=self.layout)

    def __call__(self) -> Profile:
        """The peaks. Some minutes at most for the largest models."""
        attention = fused_attention() if self.setting.on_gpu else contextlib.nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), self.ledger, attention, contextlib.ExitStack() as stack:
            with self.ledger.unseen():
                self._prepare()
            for row, n in self.layout.held.items():
                in_heap = self.layout.in_heap or row == "DDP's buckets"
                stack.enter_context(self.ledger.holding(row, n, in_heap=in_heap))
            if self.setting.on_gpu:
                self._update(1, 1)  # so that there is a state of the optimizer
            for _ in range(1 if self.setting.on_gpu else 2):
                self._iterate()
        if self.ledger.heap is not None:
            self.profile.grown = self.ledger.heap.grown
        return self.profile

    def _prepare(self) -> None:
        to_fake(self.models)
        for model in (self.policy, *self.models.frozen.values()):
            if self.setting.on_gpu:
                rows = max(1, model.logits_chunk_bytes // (4 * model.vocab_size))
                model.chunk_rows = lambda rows=rows: rows
        for p in self.actor_critic.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._has_gradient)
        self.optimizer = make_optimizer(self.config, self.actor_critic) if isinstance(self.config.alg, RLAlg) else (
            torch.optim.AdamW([p for p in self.actor_critic.parameters() if p.requires_grad])
        )
        own_shares(self.optimizer, self.setting, self.layout)

    def _iterate(self) -> None:
        work = self.work
        if work.rollout:
            with self._phase("generate"), self.ledger.holding("action masks", work.masks(self.policy)):
                self._generate(work.n_envs)
            with self._phase("score"), self.ledger.holding("action masks", 2 * work.masks(self.policy)):
                self._score()
        with self._phase("update"), self.ledger.holding("action masks", work.masks(self.policy)):
            self._update(min(work.micro_batches, SEVERAL), 1 if self.setting.on_gpu else min(work.steps, SEVERAL))
        if work.eval_rows:
            with self._phase("evaluate"):
                self._evaluate()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.ledger.phase() as peaks, contextlib.ExitStack() as stack:
            for row, n in self.layout.brought.get("generate" if name == "evaluate" else name, {}).items():
                stack.enter_context(self.ledger.holding(row, n))
            yield
        self.profile.phases[name] = peaks[0]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        own = self.setting.bf16 and self.setting.stage is None and self.setting.strategy != "fsdp2"
        return torch.autocast("cpu", torch.bfloat16, enabled=own)

    @torch.no_grad()
    def _generate(self, rows: int) -> None:
        work, spec = self.work, self.work.spec
        models = [self.policy, *(m for name, m in self.models.frozen.items() if name == "mask_model")]
        with self.ledger.during("activations"), self._precision():
            prompt = ones(rows, work.prompt)
            decodings = [Decoding(model, prompt, prompt, work.response) for model in models]
            for step, n in enumerate((None, work.response - 2, 1)):
                if n is not None:
                    for decoding in decodings:
                        decoding.next = ones(rows, max(n, 1))
                if step == 1:  # fills the cache, in one go that no run makes
                    with self.ledger.unseen():
                        for decoding in decodings:
                            decoding.advance()
                    continue
                own, *masking = [decoding.advance() for decoding in decodings]
                mask = None
                if spec.mask is not None:
                    mask = nlpo_mask(own, masking[0] if masking else None, step, spec, [0])
                choose(own, torch.rand(rows), step, spec, [0], mask)
                del own, masking, mask

    @torch.no_grad()
    def _score(self) -> None:
        inputs = self.work.inputs(self.work.micro_rows, self.policy)
        with self.ledger.during("activations"), self._precision():
            self.actor_critic(**inputs, unrestricted=True)
        with self.ledger.during("activations"), self._precision():
            (self.reference or self.policy)(**{**inputs, "action_mask": None})

    @torch.no_grad()
    def _evaluate(self) -> None:
        self._generate(self.work.eval_rows)
        with self.ledger.during("activations"), self._precision():
            inputs = self.work.inputs(self.work.eval_rows, self.policy)
            (self.reference or self.policy)(**{**inputs, "action_mask": None})

    def _update(self, micro_batches: int, steps: int) -> None:
        if isinstance(self.config.alg, TRPOAlg):
            with self.ledger.during("activations"):
                trpo_update(self.config, self.actor_critic, self.work, self._precision, micro_batches)
        self.kept: list[Tensor] = []
        for _ in range(steps):
            for _ in range(micro_batches):
                self._backward()
            self._step()

    def _backward(self) -> None:
        inputs = self.work.inputs(self.work.step_rows, self.policy)
        with self.ledger.during("activations"):
            if not self.work.rollout:
                with self._precision():
                    loss = self.work.supervised_loss(self.policy)
            else:
                only = {"critic_only": True} if isinstance(self.config.alg, TRPOAlg) else {}
                recompute = self.config.alg.policy.args.gradient_checkpointing
                with self.actor_critic.recomputing(recompute):
                    with self._precision():
                        scores = self.actor_critic(**inputs, unrestricted=self.work.kl_in_loss, **only)
                    parts = [scores.values] if only else [scores.logprobs, scores.values]
                    loss = torch.stack([x.float().sum() for x in parts if x is not None]).sum()
                    self.kept += [x.float().sum().detach() for x in parts if x is not None for _ in range(6)]
                    del scores, parts
            with self.actor_critic.recomputing(True) if self.work.recomputes else contextlib.nullcontext():
                loss.backward()

    def _has_gradient(self, parameter: Tensor) -> None:
        if self.layout.keeps_gradients:
            self.ledger.rename(parameter.grad, "gradients")
        else:
            parameter.grad = None

    def _step(self) -> None:
        aside = "host" if "offload" in self.setting.strategy and self.setting.on_gpu else "optimizer"
        own = [p for group in self.optimizer.param_groups for p in group["params"]]
        with self.ledger.holding("step", self.layout.step), self.ledger.during("step"):
            with self.ledger.unseen():
                for p in own:
                    if p.grad is None:
                        p.grad = torch.empty_like(p)
            with self.ledger.unseen() if aside == "host" else contextlib.nullcontext():
                self.optimizer.step()
            state = [x for entry in self.optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
            for x in state:
                self.ledger.rename(x, "optimizer")
        self.profile.optimizer = sum(x.nbytes for x in state)
        self.optimizer.zero_grad()
        for p in self.actor_critic.parameters():
            p.grad = None

    def _kind(self, func: Any, args: Any, x: Tensor) -> str | None:
        if x.dim() >= 2 and x.shape[-1] == self.policy.vocab_size:
            return "logits"
        if x.dtype == torch.uint8:
            return "action masks"
        if func is aten.new_empty.default and x.dim() == 4:
            return "key-value cache"
        if func is aten._to_copy.default and isinstance(args[0], nn.Parameter):
            return "bf16 copies of weights"
        if x.dim() == 1 and x.numel() == self.work.policy_numbers:
            return "TRPO's vectors"
        return None


def ones(*shape: int) -> Tensor:
    """Token ids, or a mask of them."""
    return torch.ones(*shape, dtype=torch.int64)
