"""The frozen reference aside (exact) and in few bits (not exact)."""

import contextlib
import copy
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import options_of
from helpers import flat, lines, small_run
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "algorithms"))
from tiny_models import make_lm
from tiny_seq2seq import episodes, make_seq2seq

from algorithms.policy import LanguageModel
from tools.make_tiny_model import build_model, numbers_tokenizer, save, wrap
from train import frozen
from train.ppo import train

Models = Callable[..., Path]
FAMILIES = ["gpt2", "llama", "gemma2", "t5", "bart"]
CPU = torch.device("cpu")
needs_bits = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (extra quantization)"
)


def reference(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LanguageModel:
    make = make_seq2seq if family in ("t5", "bart") else make_lm
    return LanguageModel(make(family, **changes).to(dtype)).requires_grad_(False)


@torch.no_grad()
def scores(model: LanguageModel) -> Tensor:
    return model(**episodes()).raw_logprobs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_wait_aside_score_the_same_bits(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = reference(family, dtype)
    expected, names = scores(plain), set(plain.state_dict())
    for where in ("cpu", "disk"):
        aside, folder = copy.deepcopy(plain), tmp_path / "offload" / "rank_0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.json").write_text("{}")  # of a run that was killed
        with contextlib.ExitStack() as stack:
            frozen.offload(aside, where, CPU, folder, stack)  # type: ignore[arg-type]
            assert all(weight.device.type == "meta" for weight in aside.parameters())
            assert torch.equal(scores(aside), expected) and torch.equal(scores(aside), expected)
            assert all(weight.device.type == "meta" for weight in aside.parameters())
            if where == "disk":
                assert {path.stem for path in folder.glob("*.dat")} == {name.removeprefix("lm.") for name in names}
        assert folder.exists() == (where == "cpu")
    assert not (tmp_path / "offload").exists()


def test_a_disk_without_room_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "offload" / "rank_0", reference("gpt2")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    full = pytest.raises(ValueError, match="reference_device disk: the reference takes .* GiB, and .* GiB free")
    with full, contextlib.ExitStack() as stack:
        frozen.offload(model, "disk", CPU, folder, stack)
    assert not folder.parent.exists() and all(weight.device.type == "cpu" for weight in model.parameters())
    (tmp_path / "file").touch()
    no_folder = pytest.raises(ValueError, match="reference_device disk: .*file/rank_0 cannot be written")
    with no_folder, contextlib.ExitStack() as stack:
        frozen.offload(model, "disk", CPU, tmp_path / "file" / "rank_0", stack)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_run_with_its_reference_aside_is_the_plain_run(where: str, models: Models, tmp_path: Path) -> None:
    family = "gpt2" if where == "cpu" else "t5"
    options, weights = {**options_of("ppo", family), "train_evaluation__n_iters": 1}, []
    for device in (None, where):
        with small_run(tmp_path, models(family), **options, alg__policy__args__reference_device=device) as run:
            aside = run.folder / "offload" / "rank_0"
            assert aside.exists() == (device == "disk")
            train(run)
            weights.append(flat(run.ranks.unwrap(run.model)))
        assert not aside.parent.exists()
    assert torch.equal(*weights)


WIDE: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 64},
    "llama": {"hidden_size": 64, "intermediate_size": 128},
    "gemma2": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 64},
    "bart": {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
}


@needs_bits
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bits", "kl", "size"), [("int8", 2e-3, 0.45), ("int4", 0.1, 0.35)])
def test_a_reference_in_few_bits_is_near_the_exact_one(family: str, bits: Any, kl: float, size: float) -> None:
    exact = reference(family, **WIDE[family])
    small = copy.deepcopy(exact)
    frozen.shrink(small, bits)
    assert frozen.is_quantized(small) and not frozen.is_quantized(exact)
    assert torch.equal(small.lm.get_output_embeddings().weight, exact.lm.get_output_embeddings().weight)
    given = [episodes()[name] for name in ("prompt_ids", "prompt_mask", "response_ids", "response_mask")]
    with torch.no_grad():
        p, q = (model.token_logits(*given).log_softmax(1) for model in (exact, small))
    assert 0 < float((p.exp() * (p - q)).sum(1).mean()) < kl
    bytes_of = [sum(weight.nbytes for weight in model.parameters()) for model in (small, exact)]
    assert bytes_of[0] < size * bytes_of[1]


@needs_bits
def test_a_model_that_cannot_be_quantised_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="most weights of GPT2LMHeadModel are not in linear layers .* multiple of 64"):
        frozen.shrink(reference("gpt2"), "int4")
    model = reference("llama", **WIDE["llama"])
    mlp = model.lm.model.layers[0].mlp
    mlp.forward = lambda x: x @ mlp.gate_proj.weight.T @ mlp.down_proj.weight.T  # its layers are not called
    with pytest.raises(
        ValueError, match="LlamaForCausalLM (does not run|computes something else) with quantised layers"
    ):
        frozen.shrink(model, "int4")


@needs_bits
def test_a_run_with_a_quantised_reference_measures_the_kl_of_the_rounding(tmp_path: Path) -> None:
    tokenizer = wrap(numbers_tokenizer(29), 32, "gpt2")
    model = build_model("gpt2", tokenizer, layers=1, hidden=64, heads=2, positions=32, seed=0)
    save(tmp_path / "wide", model, tokenizer)
    options = {**options_of("ppo", "gpt2"), "train_evaluation__n_iters": 1}
    with small_run(tmp_path, tmp_path / "wide", **options, alg__policy__args__reference_quantization="int8") as run:
        assert frozen.is_quantized(run.reference) and not frozen.is_quantized(run.model)
        train(run)
    (row,) = lines(run.folder / "metrics.jsonl")  # of a policy that was sampled before its first step
    assert 0 < abs(row["kl/ref"]) < 1e-3
