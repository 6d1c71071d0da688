"""Goes through the phases of an iteration on fake tensors with the run's own code, and notes what each takes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from algorithms.decoding import Decoding
from algorithms.sampling import choose, nlpo_mask
from tools.plan_attention import fused_attention
from tools.plan_layout import Layout, Setting, lay_out, own_shares, tables
from tools.plan_memory import Heap, Ledger, Peak, aten
from tools.plan_models import make_models, to_fake
from tools.plan_trpo import trpo_update
from tools.plan_work import Work
from train.config import Config, RLAlg, TRPOAlg
from train.models import make_optimizer

MOST = 8
"""Micro-batches of a step, and steps of an iteration, that are gone through for a CPU's allocator."""
VECTORS, MASKS = "TRPO's vectors", "action masks"


@dataclass(kw_only=True)
class Profile:
    """Peaks by phase, on a rank's device; layout: how its models lie; optimizer: bytes of its state. grown: bytes that
    the CPU's allocator grew by in all, None where it is not asked."""

    layout: Layout
    phases: dict[str, Peak] = field(default_factory=dict)
    optimizer: int = 0
    grown: int | None = None


class DryRun:
    """A run as one rank sees it: one iteration on a GPU, two on a CPU, whose allocator is gone through as well."""

    def __init__(self, config: Config, setting: Setting) -> None:
        self.config, self.setting = config, setting
        self.models = make_models(config, setting.processes if setting.strategy == "tensor_parallel" else 1)
        self.actor_critic: Any = self.models.actor_critic
        self.policy = self.actor_critic.policy
        self.reference = self.models.frozen.get("reference", self.policy)
        self.work = Work.of(config, self.policy, setting.shares)
        self.layout = lay_out(self.models, config, setting)
        if setting.computes_in_bf16:
            for module in (self.actor_critic, *self.models.frozen.values()):
                module.to(torch.bfloat16)
        self.ledger = Ledger(self._kind, Heap() if not setting.on_gpu and Heap.is_there() else None)
        self.profile = Profile(layout=self.layout)
        self.kept: list[Tensor] = []
        self.cut: dict[int, Tensor] = {}

    def __call__(self) -> Profile:
        """The peaks."""
        attention = fused_attention() if self.setting.on_gpu else contextlib.nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), self.ledger, attention, contextlib.ExitStack() as stack:
            with self.ledger.unseen():
                self._prepare()
            for row, n in self.layout.held.items():
                stack.enter_context(self.ledger.holding(row, n, in_heap=self.layout.is_in_heap(row)))
            if self.setting.on_gpu:
                self._backward()
                self._step()  # so that there is a state of the optimizer
            for _ in range(1 if self.setting.on_gpu else 2):
                self._iterate()
        if self.ledger.heap is not None:
            self.profile.grown = self.ledger.heap.grown
        return self.profile

    def _prepare(self) -> None:
        to_fake(self.models)
        for model in (self.policy, *self.models.frozen.values()):
            if self.setting.on_gpu:  # where the head's chunks are not made smaller in scoring
                rows = max(1, model.logits_chunk_bytes // (4 * model.vocab_size))
                model.chunk_rows = lambda rows=rows: rows
        for p in self.actor_critic.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._has_gradient)
        if self.setting.strategy == "tensor_parallel":
            self.cut = tables(self.actor_critic)
        if isinstance(self.config.alg, RLAlg):
            self.optimizer = make_optimizer(self.config, self.actor_critic)
        else:
            self.optimizer = torch.optim.AdamW([p for p in self.actor_critic.parameters() if p.requires_grad])
        own_shares(self.optimizer, self.actor_critic, self.setting)

    def _iterate(self) -> None:
        work, on_gpu = self.work, self.setting.on_gpu
        masks = work.masks(self.policy)
        if work.rollout:
            with self._phase("generate", masks):
                self._generate(work.n_envs)
            with self._phase("score", 2 * masks):  # those of the waves, and of the batch that they make up
                self._forward(work.micro_rows)
        with self._phase("update", masks):
            if isinstance(self.config.alg, TRPOAlg):
                with self.ledger.during("activations"):
                    trpo_update(self.policy, work, self._precision)
            for _ in range(1 if on_gpu else min(work.steps, MOST)):
                for _ in range(min(work.micro_batches, 2 if on_gpu else MOST)):
                    self._backward()
                self._step()
        self.kept.clear()
        if work.eval_rows:
            with self._phase("evaluate", 0):
                self._generate(work.eval_rows)
                self._forward(work.eval_rows, reference_alone=True)

    @contextlib.contextmanager
    def _phase(self, name: str, masks: int) -> Iterator[None]:
        brought = self.layout.brought.get("generate" if name == "evaluate" else name, {})
        with self.ledger.phase() as peaks, contextlib.ExitStack() as stack:
            for row, n in {**brought, MASKS: masks}.items():
                stack.enter_context(self.ledger.holding(row, n))
            yield
        self.profile.phases[name] = peaks[0]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        casts = self.setting.bf16 and not self.setting.computes_in_bf16
        return torch.autocast("cpu", torch.bfloat16, enabled=casts)

    @torch.no_grad()
    def _generate(self, rows: int) -> None:
        """The first step, with the prompt, and the last, with a full cache."""
        work, ids = self.work, torch.ones(rows, max(self.work.prompt, self.work.response), dtype=torch.int64)
        models = [self.policy, *(model for name, model in self.models.frozen.items() if name == "mask_model")]
        with self.ledger.during("activations"), self._precision():
            prompt = ids[:, : work.prompt]
            decodings = [Decoding(model, prompt, prompt, work.response) for model in models]
            self._sample([decoding.advance() for decoding in decodings], rows)
            if work.response == 1:
                return
            with self.ledger.unseen():  # fills the cache, in one go that no run makes
                for decoding in decodings if work.response > 2 else ():
                    decoding.next = ids[:, : work.response - 2]
                    decoding.advance()
            self._sample([decoding.advance(ids[:, 0]) for decoding in decodings], rows)

    def _sample(self, logits: list[Tensor], rows: int) -> None:
        spec, mask = self.work.spec, None
        if spec.mask is not None:
            mask = nlpo_mask(logits[0], logits[1] if len(logits) > 1 else None, spec.min_new_tokens, spec, [0])
        choose(logits[0], torch.rand(rows), spec.min_new_tokens, spec, [0], mask)

    @torch.no_grad()
    def _forward(self, rows: int, *, reference_alone: bool = False) -> None:
        inputs = self.work.inputs(rows, self.policy)
        with self.ledger.during("activations"), self._precision():
            if not reference_alone:
                self.actor_critic(**inputs, unrestricted=True)
            self.reference(**{**inputs, "action_mask": None})

    def _backward(self) -> None:
        with self.ledger.during("activations"), self._recomputing():
            with self._precision():
                loss = self._loss()
            loss.backward()

    def _recomputing(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.config.alg, RLAlg):
            context: contextlib.AbstractContextManager[Any] = self.actor_critic.recomputing(
                self.config.alg.policy.args.gradient_checkpointing
            )
            return context
        return contextlib.nullcontext()

    def _loss(self) -> Tensor:
        if not self.work.rollout:
            return self.work.supervised_loss(self.policy)
        only = {"critic_only": True} if isinstance(self.config.alg, TRPOAlg) else {}
        scores = self.actor_critic(
            **self.work.inputs(self.work.step_rows, self.policy), unrestricted=self.work.kl_in_loss, **only
        )
        parts = [x.float() for x in ((None if only else scores.logprobs), scores.values) if x is not None]
        # Statistics, which stay until the iteration's end, in the middle of what is about to be freed.
        self.kept += [x.detach().sum() for x in parts for _ in range(6)]
        return torch.stack([x.sum() for x in parts]).sum()

    def _has_gradient(self, parameter: Tensor) -> None:
        if self.layout.keeps_gradients and id(parameter) not in self.cut:
            assert parameter.grad is not None
            self.ledger.rename(parameter.grad, "gradients")
        else:
            parameter.grad = None

    def _step(self) -> None:
        own = [p for group in self.optimizer.param_groups for p in group["params"]]
        aside = self.ledger.unseen() if self.setting.offloads else contextlib.nullcontext()
        with self.ledger.holding("step", self.layout.step), self.ledger.during("step"):
            with self.ledger.unseen():
                for p in [p for p in own if p.grad is None]:
                    p.grad = torch.empty_like(p)
            with aside:
                self.optimizer.step()
            state = [x for entry in self.optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
            for x in state:
                self.ledger.rename(x, "optimizer")
        self.profile.optimizer = sum(x.nbytes for x in state)
        for p in [*own, *self.actor_critic.parameters()]:
            p.grad = None

    def _kind(self, func: Any, args: Any, x: Tensor) -> str | None:
        if x.dim() >= 2 and x.shape[-1] == self.policy.vocab_size:
            return "logits"
        if x.dtype == torch.uint8:
            return MASKS
        if func is aten.new_empty.default and x.dim() == 4:
            return "key-value cache"
        if func is aten._to_copy.default and isinstance(args[0], nn.Parameter):
            return "bf16 copies of weights"
        if x.dim() == 1 and x.numel() == self.work.policy_numbers:
            return VECTORS
        return None
