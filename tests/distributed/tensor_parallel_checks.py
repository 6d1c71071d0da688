"""Checks of the tensor parallel strategy on two processes, run by test_tensor_parallel.py through `accelerate launch`:
what the models do is compared with plain copies of them in the same process.

usage: tensor_parallel_checks.py FOLDER MODELS
"""

import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from sharded_cases import EVERYTHING, RATES, distance, episodes, gradients, load, loss_of, weights
from torch import Tensor
from torch.distributed.tensor import DTensor

from algorithms.models import parameter_groups
from algorithms.nlpo import copy_weights
from algorithms.policy import ActorCritic
from algorithms.sampling import MaskSpec, SamplingSpec, sample_responses
from train.strategy_tensor_parallel import TensorParallel, no_parallelism

CASES = ("llama", "llama_shared", "llama_none", "llama_recomputed", "llama_lora", "qwen2", "qwen2_lora")


class Checks:
    def __init__(self, folder: Path, models: Path) -> None:
        self.accelerator = Accelerator(parallelism_config=no_parallelism())
        self.rank = self.accelerator.process_index
        self.folder, self.models = folder, models
        self.strategy = TensorParallel(self.accelerator)

    def prepare(self, case: str, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, ActorCritic, Any]:
        plain, model = load(self.models, case), load(self.models, case)
        plain_optimizer, optimizer = (kind(parameter_groups(m, **RATES), **options) for m in (plain, model))
        return *self.strategy.prepare(model, optimizer, 1.0), plain, plain_optimizer

    def compare(self, ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> float:
        for name, value in ours.items():
            if not isinstance(value, DTensor):
                one, other = gather_object([value.detach()])
                assert torch.equal(one, other), (what, name)
        whole = self.strategy.whole(ours)
        if self.rank:
            assert whole == {}
            return 0.0
        error = distance(whole, theirs)
        assert error < 1e-5, (what, error)
        return error

    def train(self, case: str) -> None:
        model, optimizer, plain, plain_optimizer = self.prepare(case, eps=1e-3)
        assert list(weights(model)) == list(weights(plain))
        for name, parameter in model.named_parameters():
            is_whole = re.search(r"norm|value_head|(q|k|v|gate|up)_proj.lora_A|(o|down)_proj.lora_B", name)
            assert isinstance(parameter, DTensor) == (not is_whole), (case, name)
        for step in range(5):
            for rows in (range(2), range(2, 4)):
                *inputs, mask = episodes(rows)
                loss, theirs = (loss_of(m(*inputs, mask, temperature=0.7), mask) / 17 for m in (model, plain))
                self.strategy.backward(model, loss, last=rows[0] > 0)
                theirs.backward()
            if step == 0:
                error = self.compare(gradients(model), gradients(plain), f"{case} gradients")
            norm = self.strategy.step(model, optimizer, 0.5)
            expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            assert abs(norm - expected) < 1e-5 * expected, (case, norm, expected)
            plain_optimizer.step(), plain_optimizer.zero_grad()
        error = max(error, self.compare(weights(model), weights(plain), f"{case} weights"))
        print(f"process {self.rank} {case}: {error:.1e}", flush=True)

    def generation(self) -> None:
        """With NLPO's masks, by a mask policy that was copied from a trained policy: the tokens of plain models."""
        model, optimizer, plain, plain_optimizer = self.prepare("llama", torch.optim.SGD)
        mask, plain_mask = (load(self.models, "llama").policy.requires_grad_(False) for _ in range(2))
        mask = self.strategy.place(mask)
        copy_weights(plain.policy, plain_mask)
        with self.strategy.gathered(model.policy), self.strategy.gathered(mask, write=True):
            copy_weights(model.policy, mask)
        loss_of(model(*EVERYTHING), EVERYTHING[3]).backward(), loss_of(plain(*EVERYTHING), EVERYTHING[3]).backward()
        self.strategy.step(model, optimizer, 0.5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.step()
        spec = SamplingSpec(max_new_tokens=9, mask=MaskSpec(mask_type="learned_top_p", size=0.6), temperature=0.8)
        uniforms = torch.rand(4, 9, generator=torch.Generator().manual_seed(7))
        found = []
        for policy, masking in ((model.policy, mask), (plain.policy, plain_mask)):
            with self.strategy.gathered(policy, masking):
                options = {"eos_token_ids": [*range(4, 12)], "pad_token_id": 0, "mask_model": masking}
                found.append(sample_responses(policy, *EVERYTHING[:2], uniforms, spec, **options))
        ours, theirs = found
        assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.action_mask, theirs.action_mask)
        assert len(set(ours.lengths.tolist())) > 1, ours.lengths

    def files(self) -> None:
        """What is written and read again is the same to the bit, and so is what follows."""
        model, optimizer, *_ = self.prepare("qwen2")
        self.some_steps(model, optimizer)
        named = weights(model)
        (state,) = broadcast_object_list([self.strategy.whole(named)])
        self.folder.mkdir(exist_ok=True, parents=True)
        self.strategy.save_optimizer(model, optimizer, self.folder)
        other, other_optimizer, *_ = self.prepare("qwen2")
        self.strategy.put(weights(other), state)
        self.strategy.load_optimizer(other, other_optimizer, self.folder)
        self.some_steps(model, optimizer), self.some_steps(other, other_optimizer)
        for name, ours in other.named_parameters():
            theirs, before = named[name], state[name]
            if isinstance(ours, DTensor):
                assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
                assert not torch.equal(ours.full_tensor(), before), name
            else:
                assert torch.equal(ours, theirs) and not torch.equal(ours, before), name

    def some_steps(self, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            self.strategy.backward(model, loss_of(model(*EVERYTHING), EVERYTHING[3]), last=True)
            self.strategy.step(model, optimizer, 1.0)

    def drift(self) -> None:
        """A difference in the last bits of what every process holds whole does not stay; nor does a NaN get in."""
        model, optimizer, *_ = self.prepare("llama_shared", torch.optim.SGD)
        loss_of(model(*EVERYTHING), EVERYTHING[3]).backward()
        model.value_head.weight.grad *= 1 + 1e-6 * self.rank
        self.strategy.step(model, optimizer, 1.0)
        one, other = gather_object([model.value_head.weight.detach()])
        assert torch.equal(one, other)
        before = self.strategy.whole(weights(model))
        loss_of(model(*EVERYTHING), EVERYTHING[3]).backward()
        model.policy.lm.model.layers[0].mlp.up_proj.weight.grad.to_local()[0] = torch.nan if self.rank else 1.0
        assert not math.isfinite(self.strategy.step(model, optimizer, 1.0))
        after = self.strategy.whole(weights(model))
        assert all(torch.equal(before[name], x) for name, x in after.items())

    def mixed_precision(self) -> None:
        accelerator = SimpleNamespace(device=self.accelerator.device, num_processes=2, mixed_precision="bf16")
        accelerator.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
        default, self.strategy = self.strategy, TensorParallel(accelerator)
        model, optimizer, plain, _ = self.prepare("qwen2")
        reference = self.strategy.place(load(self.models, "qwen2").policy.requires_grad_(False))
        ours, theirs = model(*EVERYTHING), plain(*EVERYTHING)
        with self.strategy.precision(), torch.no_grad():
            assert torch.equal(reference(*EVERYTHING).logprobs, model(*EVERYTHING).logprobs)
            assert 1e-5 < float((ours.logprobs - theirs.logprobs).abs().max()) < 0.05
        self.strategy.backward(model, loss_of(ours, EVERYTHING[3]), last=True)
        self.strategy.step(model, optimizer, 1.0)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        self.strategy = default

    def refusals(self) -> None:
        frozen = load(self.models, "llama")
        frozen.policy.requires_grad_(False)
        odd = load(self.models, "llama")
        odd.policy.lm.config.num_key_value_heads = 3
        for model, expected in (
            (load(self.models, "gpt2"), "GPT2LMHeadModel cannot be tensor parallel: transformers has no plan for gpt2"),
            (load(self.models, "t5"), "no plan for t5"),
            (frozen, "TRPO's step needs the policy's weights whole"),
            (odd, "num_key_value_heads 3, which 2 tensor parallel processes cannot share"),
        ):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.refuses(expected, self.strategy.prepare, model, optimizer, 1.0)
        self.refuses("no plan for bart", self.strategy.place, load(self.models, "bart").policy)
        os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "4"
        self.refuses("parallelism_config_tp_size is 4 with 2 processes", TensorParallel, self.accelerator)
        os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "2"

    def refuses(self, expected: str, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except ValueError as error:
            assert expected in str(error), error
        else:
            raise AssertionError(f"no error: {expected}")


def main(folder: str, models: str) -> None:
    checks = Checks(Path(folder), Path(models))
    checks.refusals()
    for case in CASES:
        checks.train(case)
    checks.generation()
    checks.files()
    checks.drift()
    checks.mixed_precision()
    print(f"process {checks.rank}: done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
