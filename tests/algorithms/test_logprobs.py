"""Selective log-softmax against the plain formulas, and its chunked use."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from algorithms.logprobs import selective_log_softmax, token_logprobs

N, V, H = 7, 19, 5
# Of float32 results of order 1 to 10, against float64.
TIGHT = {"rtol": 1e-6, "atol": 1e-6}


def example(scale: float = 3.0, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, V], ids [N], mask [N, V] that allows each id; one row allows nothing else."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator) * scale + offset
    ids = torch.randint(V, (N,), generator=generator)
    mask = torch.rand(N, V, generator=generator) < 0.4
    mask[0] = False
    mask[torch.arange(N), ids] = True
    return logits, ids, mask


def plain(logits: Tensor, ids: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same by the textbook, differentiable, in float64."""
    z = logits.double() / temperature
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf)
    logp = z.log_softmax(1)
    entropy = -(logp.exp() * torch.where(logp.isfinite(), logp, 0)).sum(1)
    return logp.gather(1, ids[:, None]).squeeze(1), entropy


def values_and_gradient(
    function: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, weights: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    logp, entropy = function(leaf)
    each = torch.linspace(-1, 2, len(logits))
    (weights[0] * (each * logp).sum() + weights[1] * (each.flip(0) * entropy).sum()).backward()
    return logp.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)], ids=["logp", "entropy", "both"])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_and_gradients_equal_the_plain_formula(
    temperature: float, restricted: bool, weights: tuple[float, float]
) -> None:
    logits, ids, mask = example()
    allowed = mask if restricted else None
    got = values_and_gradient(
        lambda z: selective_log_softmax(z, ids, temperature=temperature, mask=allowed), logits, weights
    )
    expected = values_and_gradient(lambda z: plain(z, ids, temperature, allowed), logits, weights)
    torch.testing.assert_close(got, tuple(x.float() for x in expected), **TIGHT)
    if restricted:
        assert got[0][0] == 0 and got[1][0] == 0, "a single allowed token is certain"
        assert not got[2][~mask].any()


def test_log_probabilities_are_torchs_own() -> None:
    logits, ids, _ = example()
    logp, entropy = selective_log_softmax(logits, ids)
    torch.testing.assert_close(logp, logits.log_softmax(1)[torch.arange(N), ids], **TIGHT)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy(), **TIGHT)


@pytest.mark.parametrize("offset", [-100.0, 1000.0])
def test_large_logits_cost_no_digits(offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 20_000, generator=generator) * 3 + offset
    ids = torch.arange(4)
    torch.testing.assert_close(
        selective_log_softmax(logits, ids),
        tuple(x.float() for x in plain(logits, ids, 1.0, None)),
        rtol=1e-6,
        atol=2e-6,
    )


@pytest.mark.parametrize("banned", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("restricted", [False, True])
def test_tokens_that_the_model_bans_give_no_nan(restricted: bool, temperature: float, banned: float) -> None:
    logits, ids, mask = example()
    out = torch.zeros(V, dtype=torch.bool)
    out[:4] = True
    ids = ids.clamp(min=4)
    mask[torch.arange(N), ids] = True
    allowed = mask if restricted else None
    got = values_and_gradient(
        lambda z: selective_log_softmax(z, ids, temperature=temperature, mask=allowed),
        logits.masked_fill(out, banned),
        (1.0, 1.0),
    )
    both = ~out.expand(N, V) if allowed is None else mask & ~out
    expected = values_and_gradient(lambda z: plain(z, ids, temperature, both), logits, (1.0, 1.0))
    torch.testing.assert_close(got, tuple(x.float() for x in expected), **TIGHT)


def test_excluded_nan_logits_do_not_spread_but_allowed_ones_show() -> None:
    logits, ids, mask = example()
    dirty = logits.masked_fill(~mask, torch.nan)
    assert torch.equal(
        torch.stack(selective_log_softmax(dirty, ids, mask=mask)),
        torch.stack(selective_log_softmax(logits, ids, mask=mask)),
    )
    logp, entropy = selective_log_softmax(dirty, ids)
    assert logp.isnan().all() and entropy.isnan().all()


def test_half_precision_logits_give_float32_results() -> None:
    logits, ids, mask = example()
    low = logits.bfloat16()
    leaf = low.clone().requires_grad_()
    logp, entropy = selective_log_softmax(leaf, ids, temperature=0.7, mask=mask)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logp, entropy), tuple(x.float() for x in plain(low, ids, 0.7, mask)), **TIGHT)
    logp.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16 and leaf.grad.any()


def test_autocast_changes_nothing() -> None:
    logits, ids, mask = example()
    expected = values_and_gradient(lambda z: selective_log_softmax(z, ids, mask=mask), logits, (1.0, 1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = values_and_gradient(lambda z: selective_log_softmax(z, ids, mask=mask), logits, (1.0, 1.0))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_logits_are_left_as_they_were() -> None:
    logits, ids, mask = example()
    leaf = logits.clone().requires_grad_()
    torch.stack(selective_log_softmax(leaf, ids, mask=mask)).sum().backward()
    assert torch.equal(leaf.detach(), logits)


def test_a_second_backward_is_refused() -> None:
    logits, ids, _ = example()
    logp, entropy = selective_log_softmax(logits.requires_grad_(), ids)
    loss = (logp + entropy).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused() -> None:
    logits, ids, _ = example()
    logp, _ = selective_log_softmax(logits.requires_grad_(), ids)
    (gradient,) = torch.autograd.grad((logp**2).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class Spy(torch.nn.Linear):
    """A head that notes how many rows each call gets."""

    def __init__(self) -> None:
        super().__init__(H, V)
        self.rows: list[int] = []

    def forward(self, states: Tensor) -> Tensor:
        self.rows.append(len(states))
        return super().forward(states)


def run_chunks(
    chunk: int, *, restricted: bool, unrestricted: bool, n: int = N, calls: int = 1
) -> tuple[list[Tensor], list[int]]:
    """Results and gradients (states, head weight, head bias) of token_logprobs, and the rows of each head call."""
    torch.manual_seed(3)
    head, states = Spy(), torch.randn(n, H, requires_grad=True)
    with torch.no_grad():
        head.weight.mul_(8)
    _, ids, mask = example()
    results = token_logprobs(
        states,
        ids[:n],
        head,
        temperature=0.7,
        mask=(lambda rows: mask[:n][rows]) if restricted else None,
        chunk=chunk,
        calls=calls,
        unrestricted=unrestricted,
    )
    sum((k + 1) / 20 * (x * torch.arange(1, n + 1)).sum() for k, x in enumerate(results)).backward()
    return [*(x.detach() for x in results), states.grad, head.weight.grad, head.bias.grad], head.rows


@pytest.mark.parametrize("restricted, unrestricted", [(False, False), (True, False), (True, True), (False, True)])
@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_chunks_give_the_same_results_and_gradients(chunk: int, restricted: bool, unrestricted: bool) -> None:
    whole, calls = run_chunks(N, restricted=restricted, unrestricted=unrestricted)
    assert calls == [N], "one chunk is not computed twice"
    parts, _ = run_chunks(chunk, restricted=restricted, unrestricted=unrestricted)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-5)  # values up to 35: a few units in the last place


def test_no_more_than_a_chunk_of_logits_exists_and_each_is_computed_again_in_the_backward_pass() -> None:
    _, rows = run_chunks(3, restricted=True, unrestricted=True)
    assert rows[:3] == [3, 3, 1] and sorted(rows[3:]) == [1, 3, 3]


@pytest.mark.parametrize("chunk, kept", [(N, True), (3, False)])
def test_chunks_keep_no_logits_for_the_backward_pass(chunk: int, kept: bool) -> None:
    shapes: list[torch.Size] = []
    head, states, ids = Spy(), torch.randn(N, H, requires_grad=True), torch.zeros(N, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        token_logprobs(states, ids, head, temperature=1.0, mask=None, chunk=chunk)
    assert any(shape[-1:] == (V,) for shape in shapes) is kept


def test_without_gradients_each_chunk_is_computed_once() -> None:
    head, states = Spy(), torch.randn(N, H)
    with torch.no_grad():
        token_logprobs(states, torch.zeros(N, dtype=torch.int64), head, temperature=1.0, mask=None, chunk=3)
    assert head.rows == [3, 3, 1]


def test_raw_log_probabilities_ignore_the_mask() -> None:
    _, ids, mask = example()
    head, states = Spy(), torch.randn(N, H)
    logp, _, raw = token_logprobs(
        states, ids, head, temperature=0.7, mask=lambda rows: mask[rows], chunk=3, unrestricted=True
    )
    torch.testing.assert_close(raw, plain(head(states), ids, 0.7, None)[0].float(), **TIGHT)
    torch.testing.assert_close(logp, plain(head(states), ids, 0.7, mask)[0].float(), **TIGHT)
    assert (raw < logp).all()


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    results, _ = run_chunks(3, restricted=False, unrestricted=True, n=0)
    assert [x.shape for x in results[:3]] == [(0,)] * 3
    assert all(x is not None and not x.any() for x in results[3:])


@pytest.mark.parametrize("n", [0, 1, N])
@pytest.mark.parametrize("chunk, calls, expected", [(3, 5, 10), (3, 1, 6), (N, 2, 4)])
def test_a_head_in_parts_is_called_so_often_whatever_counts_here(n: int, chunk: int, calls: int, expected: int) -> None:
    alone, _ = run_chunks(chunk, restricted=True, unrestricted=True, n=n)
    got, rows = run_chunks(chunk, restricted=True, unrestricted=True, n=n, calls=max(calls, -(-N // chunk)))
    assert len(rows) == expected and sum(rows) == 2 * n, "each is called again in the backward pass"
    assert all(torch.equal(x, y) for x, y in zip(got[:4], alone[:4], strict=True))
    torch.testing.assert_close(got, alone, rtol=1e-6, atol=1e-5)
