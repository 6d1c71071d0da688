"""Checks of the FSDP2 strategy on two ranks, run by test_fsdp.py through `accelerate launch`: what the sharded models
do is compared with plain copies of them, which every rank trains on everything.

usage: fsdp_checks.py FOLDER MODELS
"""

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sharded_cases import EVERYTHING, RATES, distance, episodes, gradients, load, loss_of, weights
from torch import Tensor
from torch.distributed.tensor import DTensor

from algorithms.adapters import reference_of
from algorithms.models import load_reference, parameter_groups
from algorithms.policy import ActorCritic
from algorithms.sampling import SamplingSpec, sample_responses
from train.strategy_fsdp import FSDP2, blocks

SHARES = (range(3), range(3, 4))  # of four episodes: 15 and 2 counted tokens
TRAINED = ("gpt2", "gpt2_lora", "llama", "llama_none", "llama_lora", "qwen2", "t5_shared", "t5_recomputed", "bart")
TRAINED += ("blenderbot",)


class Checks:
    def __init__(self, folder: Path, models: Path) -> None:
        self.accelerator = Accelerator()
        self.rank = self.accelerator.process_index
        self.folder, self.models = folder, models
        self.strategy = FSDP2(self.accelerator)

    def prepare(
        self, case: str, kind: Any = torch.optim.AdamW, frozen: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        plain, model = load(self.models, case), load(self.models, case)
        for m in (plain, model) if frozen else ():
            m.policy.requires_grad_(False)
        plain_optimizer, optimizer = (kind(parameter_groups(m, **RATES), **options) for m in (plain, model))
        return *self.strategy.prepare(model, optimizer, 1.0), plain, plain_optimizer

    def backward(self, model: Any, plain: ActorCritic) -> None:
        """Two micro-batches a rank, of which the second rank's second counts nothing."""
        rows = list(SHARES[self.rank])
        for i, part in enumerate((rows[:2], rows[2:] or rows[:1])):
            *inputs, mask = episodes(part)
            mask = mask & (i == 0 or len(rows) > 2)
            loss = loss_of(model(*inputs, mask, temperature=0.7), mask) / 17
            self.strategy.backward(model, loss * 2, last=i == 1)
        (loss_of(plain(*EVERYTHING, temperature=0.7), EVERYTHING[3]) / 17).backward()

    def train(self, case: str) -> None:
        model, optimizer, plain, plain_optimizer = self.prepare(case, eps=1e-3)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert list(weights(model)) == list(weights(plain))
        n_here, n_all = (
            sum(x.numel() for x in xs) for xs in ([p.to_local() for p in model.parameters()], plain.parameters())
        )
        assert 0.45 < n_here / n_all < 0.55
        for step in range(5):
            self.backward(model, plain)
            if step == 0:
                error = self.compare(gradients(model), gradients(plain), f"{case} gradients")
            norm = self.strategy.step(model, optimizer, 0.5)
            expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            assert abs(norm - expected) < 1e-5 * expected, (case, norm, expected)
            plain_optimizer.step(), plain_optimizer.zero_grad()
        error = max(error, self.compare(weights(model), weights(plain), f"{case} weights"))
        print(f"rank {self.rank} {case}: {error:.1e}", flush=True)

    def compare(self, ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str, limit: float = 1e-5) -> float:
        whole = self.strategy.whole(ours)
        if self.rank:
            assert whole == {}
            return 0.0
        error = distance(whole, theirs)
        assert error < limit, (what, error)
        return error

    def generate(self, policy: Any, steps: int) -> Tensor:
        prompt_ids, prompt_mask, *_ = episodes(SHARES[self.rank])
        uniforms = torch.rand(len(prompt_ids), 9, generator=torch.Generator().manual_seed(7))[:, :steps]
        options = {"eos_token_ids": [1], "pad_token_id": 0, "stop_on_eos": False}
        return sample_responses(
            policy, prompt_ids, prompt_mask, uniforms, SamplingSpec(max_new_tokens=steps), **options
        ).ids

    def generation(self, case: str) -> None:
        """Before any forward. Gathered, ranks make different numbers of steps; in parts, the same one."""
        model, _, plain, _ = self.prepare(case)
        mask = self.strategy.place(load(self.models, case).policy.requires_grad_(False))
        n_steps = (5, 9)[self.rank]
        for policy in (model.policy, mask):
            with self.strategy.gathered(model.policy, mask), self.strategy.gathered(policy):
                assert torch.equal(self.generate(policy, n_steps), self.generate(plain.policy, n_steps))
            with self.strategy.in_parts(policy):
                assert all(isinstance(p, DTensor) for block in blocks(policy) for p in block.parameters())
                assert torch.equal(self.generate(policy, 7), self.generate(plain.policy, 7))
        assert all(isinstance(p, DTensor) for part in (model, mask) for p in part.parameters())
        with torch.no_grad():
            expected = plain(*EVERYTHING)
            for scores in (model(*EVERYTHING), mask(*EVERYTHING)):
                assert torch.allclose(scores.logprobs, expected.logprobs, atol=1e-5)
        self.backward(model, plain)
        self.compare(gradients(model), gradients(plain), f"{case} gradients after generation")

    def frozen_policy(self) -> None:
        """TRPO's: whole and plain on every rank, written to in place; the critic alone is sharded and trained."""
        for case in ("gpt2", "gpt2_shared"):
            options = {"frozen": True, "initial_accumulator_value": 0.1}
            model, optimizer, plain, plain_optimizer = self.prepare(case, torch.optim.Adagrad, **options)
            with self.strategy.gathered(model.policy, write=True), torch.no_grad():
                assert not any(isinstance(p, DTensor) for p in model.policy.parameters())
                for parameter in (*plain.policy.parameters(), *model.policy.parameters()):
                    parameter.mul_(1.1)
            for _ in range(2):
                *inputs, mask = episodes(SHARES[self.rank])
                values = model(*inputs, mask, critic_only=True).values
                self.strategy.backward(model, (values[:, :-1] ** 2)[mask].sum() * 2, last=True)
                self.strategy.step(model, optimizer, 0.5)
                (plain.values(*EVERYTHING[:3])[:, :-1] ** 2)[EVERYTHING[3]].sum().backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                plain_optimizer.step(), plain_optimizer.zero_grad()
            self.compare(weights(model), weights(plain), f"{case} with a frozen policy")

    def files(self) -> None:
        """What is written and read again is the same to the bit, and so is what follows."""
        for kind, options in (("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})):
            (model, optimizer, *_), (other, other_optimizer, *_) = (
                self.prepare("t5_shared", getattr(torch.optim, kind), **options) for _ in range(2)
            )
            self.some_steps(model, optimizer)
            folder = self.folder / kind
            if self.rank == 0:
                folder.mkdir()
            (state,) = broadcast_object_list([self.strategy.whole(weights(model))])
            self.strategy.save_optimizer(model, optimizer, folder)
            self.strategy.put(weights(other), state)
            self.strategy.load_optimizer(other, other_optimizer, folder)
            assert set(other_optimizer.param_groups[0]) == set(optimizer.param_groups[0]) >= {"name", "base_lr"}
            self.some_steps(model, optimizer), self.some_steps(other, other_optimizer)
            for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(ours.to_local(), theirs.to_local()), (kind, name)
                assert not torch.equal(ours.full_tensor(), state[name]), (kind, name)

    def some_steps(self, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            *inputs, mask = episodes(SHARES[self.rank])
            self.strategy.backward(model, loss_of(model(*inputs, mask), mask), last=True)
            self.strategy.step(model, optimizer, 1.0)

    def mask_policy(self) -> None:
        """What is written to a placed model stays, and a model that shares the policy's base scores without it."""
        for family in ("gpt2", "llama"):
            copied = self.strategy.place(load_reference(str(self.models / family)))
            with self.strategy.gathered(copied, write=True), torch.no_grad():
                for n, parameter in enumerate(copied.parameters()):
                    parameter.fill_(n)
            whole = self.strategy.whole(dict(copied.named_parameters()))
            assert all(bool((x == n).all()) for n, x in enumerate(whole.values())), "writes are lost"
        model, _, plain, _ = self.prepare("gpt2_lora")
        for _ in range(2):
            theirs, ours = reference_of(plain.policy)(*EVERYTHING), reference_of(model.policy)(*EVERYTHING)
            assert torch.allclose(theirs.logprobs, ours.logprobs, atol=1e-5)
            assert not torch.allclose(ours.logprobs, model(*EVERYTHING).logprobs, atol=1e-3)

    def discarded(self) -> None:
        """Forwards without a backward, gradients thrown away, one that is not finite: nothing is left of them."""
        model, optimizer, plain, _ = self.prepare("gpt2")
        before = self.strategy.whole(weights(model))
        model(*EVERYTHING)
        self.backward(model, plain)
        model(*EVERYTHING)
        optimizer.zero_grad(), plain.zero_grad()
        scores = model(*episodes(SHARES[self.rank]))
        self.strategy.backward(model, scores.values.sum() * (math.nan if self.rank else 1.0), last=True)
        assert not math.isfinite(self.strategy.step(model, optimizer, 1.0))
        optimizer.zero_grad()
        after = self.strategy.whole(weights(model))
        assert all(torch.equal(before[name], x) for name, x in after.items())
        self.backward(model, plain)
        self.compare(gradients(model), gradients(plain), "gradients after discarded ones")

    def kept_whole(self) -> None:
        """fsdp_reshard_after_forward: false."""
        os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
        default, self.strategy = self.strategy, FSDP2(self.accelerator)
        self.train("t5"), self.generation("gpt2"), self.frozen_policy()
        self.strategy = default

    def mixed_precision(self) -> None:
        """bf16: scores as under autocast; the reference's are the policy's to the bit; weights stay float32."""

        accelerator = SimpleNamespace(device=self.accelerator.device, num_processes=2, mixed_precision="bf16")
        accelerator.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
        self.strategy, default = FSDP2(accelerator), self.strategy
        autocasts: list[bool] = []
        for case in ("gpt2", "llama_lora", "t5"):
            model, optimizer, plain, _ = self.prepare(case)
            reference = self.strategy.place(load(self.models, case).policy.requires_grad_(False))
            model.value_head.register_forward_pre_hook(lambda *_: autocasts.append(torch.is_autocast_enabled("cpu")))
            with torch.no_grad():
                ours, theirs = model(*EVERYTHING), plain(*EVERYTHING)
                with self.strategy.precision():
                    assert torch.equal(reference(*EVERYTHING).logprobs, ours.logprobs)
            assert 1e-5 < float((ours.logprobs - theirs.logprobs).abs().max()) < 0.05, case
            assert float((ours.values - theirs.values).norm() / theirs.values.norm()) < 0.05, case
            with self.strategy.gathered(model.policy), self.strategy.precision():
                self.generate(model.policy, 4)
            self.backward(model, plain)
            self.compare(gradients(model), gradients(plain), f"{case} gradients in bf16", limit=0.05)
            self.strategy.step(model, optimizer, 1.0)
            assert all(p.dtype == torch.float32 for p in model.parameters())
        assert len(autocasts) > 3 and all(autocasts)
        self.strategy = default


def main(folder: str, models: str) -> None:
    checks = Checks(Path(folder), Path(models))
    for case in TRAINED:
        checks.train(case)
    for case in ("gpt2", "llama_lora", "t5", "bart"):
        checks.generation(case)
    checks.frozen_policy()
    checks.files()
    checks.mask_policy()
    checks.discarded()
    checks.kept_whole()
    checks.mixed_precision()
    print(f"rank {checks.rank}: done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
