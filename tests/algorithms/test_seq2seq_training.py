"""Training of sequence-to-sequence policies: gradients, and the memory that they take."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, counting_calls, make_prompts
from tiny_seq2seq import FAMILIES, FAST, T, actor_critic, episodes, first_block, make_seq2seq
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForSeq2SeqLM

from algorithms.policy import ActorCritic, LanguageModel

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
SIDES = ("encoder", "decoder")
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])


def first_norm(stack: nn.Module) -> nn.Module:
    """Inside the first layer, whose own hooks do not see that it is computed again."""
    return next(m for m in first_block(stack).modules() if "Norm" in type(m).__name__)


def loss_of(model: ActorCritic, inputs: dict[str, Any]) -> Tensor:
    """A sum over counted tokens to which log-probabilities, entropies and values all contribute."""
    scores = model(**inputs)
    each = torch.linspace(-1, 2, scores.logprobs[0].numel()) * inputs["response_mask"]
    return (each * (scores.logprobs + 0.1 * scores.entropy + (scores.values[:, :-1] - 1) ** 2)).sum()


def gradients(model: ActorCritic, batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Summed over the batches, of every trained parameter; one without a gradient fails the test that asks."""
    model.zero_grad()
    for inputs in batches:
        loss_of(model, inputs).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trained.items() if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: p.grad.clone() for name, p in trained.items()}


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6 * scale)


class LargestLogits(TorchDispatchMode):
    """Elements of the largest array over the vocabulary that any operation in the context makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[-1] == VOCAB:
                self.largest = max(self.largest, x.numel())
        return out


@EVERY_FAMILY
def test_no_array_over_all_tokens_and_the_vocabulary_exists(family: str) -> None:
    model = ActorCritic(LanguageModel(make_seq2seq(family)))
    prompt_ids, prompt_mask = make_prompts([3] * 10)
    response_ids, _ = make_prompts([T] * 10, seed=3)
    inputs = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids, "temperature": 0.7}
    model.policy.logits_chunk_bytes = 4 * VOCAB * 5
    with LargestLogits() as seen:
        loss_of(model, {**inputs, "response_mask": torch.ones_like(response_ids, dtype=torch.bool)}).backward()
    # Transposed weights are 32 rows over the vocabulary.
    assert seen.largest == (32 * VOCAB if family in FAST else 10 * (T + 1) * VOCAB)


@SHARED
@EVERY_FAMILY
def test_gradients_are_those_of_micro_batches_and_of_chunks(family: str, shared: bool) -> None:
    model, inputs = actor_critic(family, shared=shared), episodes(restricted=True, temperature=0.7)
    whole = gradients(model, [inputs])

    def rows(some: slice) -> dict[str, Any]:
        return {name: x[some] if isinstance(x, Tensor) else x for name, x in inputs.items()}

    assert_same_gradients(gradients(model, [rows(slice(0, 1)), rows(slice(1, 4))]), whole)
    model.policy.logits_chunk_bytes = 4 * VOCAB * 3
    assert_same_gradients(gradients(model, [inputs]), whole)


@EVERY_FAMILY
def test_every_parameter_is_trained_and_by_nothing_where_nothing_counts(family: str) -> None:
    model, inputs = actor_critic(family), episodes()
    zero = {name for name, gradient in gradients(model, [inputs]).items() if not gradient.any()}
    assert all(name.endswith("k_proj.bias") for name in zero), "only a bias of keys cancels in the softmax"
    nothing = {**inputs, "response_mask": torch.zeros_like(inputs["response_mask"])}
    assert not any(gradient.any() for gradient in gradients(model, [nothing]).values())


@EVERY_FAMILY
def test_recomputation_gives_the_same_gradients(family: str) -> None:
    model, inputs = actor_critic(family), episodes()
    expected = gradients(model, [inputs])
    for trunk in (model.policy.lm, model.critic):
        trunk.activation_checkpointing_enable({"use_reentrant": False})
    stacks = [getattr(trunk, f"get_{side}")() for trunk in (model.policy.lm, model.critic) for side in SIDES]
    for enabled, calls_each in ((True, 2), (False, 1)):
        with contextlib.ExitStack() as context:
            counts = [context.enter_context(counting_calls(first_norm(stack))) for stack in stacks]
            context.enter_context(model.recomputing(enabled))
            got = gradients(model, [inputs])
        assert [len(calls) for calls in counts] == [calls_each] * 4
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_sinusoidal_positions_are_not_trained(tmp_path: Path) -> None:
    make_seq2seq("pegasus").save_pretrained(tmp_path)
    policy = LanguageModel(AutoModelForSeq2SeqLM.from_pretrained(tmp_path))
    model = ActorCritic(policy, AutoModel.from_pretrained(tmp_path))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    ends = [f"{side}.embed_positions.weight" for side in SIDES]
    assert frozen == {f"{trunk}.{end}" for trunk in ("policy.lm.model", "critic") for end in ends}
