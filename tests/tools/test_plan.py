"""The planner: what it counts, what it refuses, what it proposes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, command
from transformers import LlamaConfig

from tools.plan import main, plan
from tools.plan_machine import Machine, parse_machine
from tools.plan_result import Plan

GIB = 2**30
EIGHT = Machine(n_gpus=8, gpu_bytes=80e9)
LAYERS, WIDTH, MLP, VOCABULARY = 4, 512, 1376, 8000
# q, k, v, o, the MLP's three and two norms; embeddings, head and last norm
TRUNK = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * WIDTH) + WIDTH
TABLE = VOCABULARY * WIDTH
POLICY, CRITIC = TRUNK + 2 * TABLE, TRUNK + TABLE + WIDTH  # the critic has a value head instead of the other


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of which there is nothing but config.json."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
    LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=512).save_pretrained(folder)
    return folder


def words(folder: Path, model: Path, **changes: Any) -> list[str]:
    limits = {"env__args": {"max_prompt_length": 192, "max_episode_length": 192}, "env__n_workers": 1}
    args = {"n_steps": 192, "micro_batch_size": 1}  # four episodes, in one optimizer step unless batch_size is given
    return command(folder, model, **{**limits, "alg__args": args, **changes})


def rows(found: Plan, phase: str = "update") -> dict[str, float]:
    return dict(found.worst.phases[phase])


def test_counts_every_weight_once_and_what_belongs_to_it(llama: Path, tmp_path: Path) -> None:
    one = Machine(n_gpus=1, gpu_bytes=80e9)
    found = rows(plan(words(tmp_path, llama), one))
    assert found["weights of the policy"] == found["weights of the reference"]
    # 32 more: the rotary embedding's table
    assert found["weights of the policy"] == pytest.approx(4 * POLICY, abs=4 * 64)
    assert found["weights of the critic"] == pytest.approx(4 * CRITIC, abs=4 * 64)
    assert found["optimizer"] == pytest.approx(8 * (POLICY + CRITIC), rel=1e-4)
    shared = rows(plan(words(tmp_path, llama, alg__policy__args__value_model="shared"), one))
    assert shared["weights of the critic"] == 4 * WIDTH
    assert shared["optimizer"] == pytest.approx(8 * (POLICY + WIDTH), rel=1e-4)


@pytest.mark.parametrize("optimizer, moments", [("AdamW", 2), ("RMSprop", 1), ("SGD", 0)])
def test_the_optimizer_s_state_is_that_of_its_class(optimizer: str, moments: int, llama: Path, tmp_path: Path) -> None:
    changes = {"alg__policy__args__optimizer_class": optimizer}
    found = rows(plan(words(tmp_path, llama, **changes), Machine(n_gpus=1, gpu_bytes=80e9)), "score")
    assert found.get("optimizer", 0) == pytest.approx(4 * moments * (POLICY + CRITIC), rel=1e-4)


def test_what_each_strategy_shares_out(llama: Path, tmp_path: Path) -> None:
    trained = POLICY + CRITIC
    found = {
        name: plan(words(tmp_path, llama), EIGHT, name, bf16=name.startswith("zero"))
        for name in ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2")
    }
    assert rows(found["ddp"])["DDP's buckets"] == 4 * trained
    for name in ("zero1", "zero2", "zero3"):
        assert rows(found[name])["fp32 copy for the step"] == pytest.approx(4 * trained / 8, abs=8)
        assert rows(found[name])["optimizer"] == pytest.approx(8 * trained / 8, rel=1e-3)
    assert rows(found["zero2"])["gradients"] == pytest.approx(2 * trained / 8, abs=8)
    assert rows(found["zero2"])["weights of the reference"] == 2 * POLICY
    assert rows(found["zero3"])["weights of the reference"] < 2 * POLICY / 7
    assert "optimizer" not in rows(found["zero3_offload"])
    assert found["zero3_offload"].host["training"]["optimizer"] == pytest.approx(8 * trained, rel=1e-3)
    assert rows(found["fsdp2"])["optimizer"] == pytest.approx(8 * trained / 8, rel=1e-3)
    assert rows(found["fsdp2"], "generate")["weights brought together"] == 4 * POLICY
    peaks = [found[name].worst.peak for name in ("ddp", "zero1", "zero2", "zero3", "zero3_offload")]
    assert peaks == sorted(peaks, reverse=True)


def test_gathering_follows_the_configuration(llama: Path, tmp_path: Path) -> None:
    brought = {}
    for how in ("always", "never", "auto"):
        machine = Machine(n_gpus=8, gpu_bytes=0.1e9) if how == "auto" else EIGHT
        found = plan(words(tmp_path, llama, generation__gather=how), machine, "fsdp2")
        brought[how] = rows(found, "generate")["weights brought together"]
    assert brought["always"] == 4 * POLICY > brought["never"] == brought["auto"]  # there is no room on small ones


def test_checkpointing_chunks_micro_batches_and_adapters_take_less(llama: Path, tmp_path: Path) -> None:
    def peak(**changes: Any) -> float:
        args = {"n_steps": 192, "batch_size": 4 * 192, "micro_batch_size": 4}
        return plan(words(tmp_path, llama, **{"alg__args": args, **changes}), EIGHT, "ddp").worst.peak

    full = peak()
    assert peak(alg__policy__args__gradient_checkpointing=True) < full - 300e6
    assert peak(alg__args__micro_batch_size=1) < full - 300e6
    assert peak(alg__args__batch_size=192) < full - 300e6  # one episode in a step
    assert peak(alg__policy__args__lora={"r": 8}) < full - 16 * POLICY / 2
    assert peak(alg__args__micro_batch_size=64) == full  # the rollout has four episodes


def test_tensor_parallel_and_device_maps(llama: Path, tmp_path: Path) -> None:
    whole = plan(words(tmp_path, llama), Machine(n_gpus=2, gpu_bytes=80e9), "ddp")
    cut = plan(words(tmp_path, llama), Machine(n_gpus=2, gpu_bytes=80e9), "tensor_parallel")
    assert rows(cut)["weights of the policy"] == pytest.approx(2 * POLICY, rel=1e-3)
    assert rows(cut)["optimizer"] == pytest.approx(rows(whole)["optimizer"] / 2, rel=1e-3)
    balanced = words(tmp_path, llama, alg__policy__args__device_map="balanced")
    spread = plan(balanced, Machine(n_gpus=2, gpu_bytes=80e9))
    assert spread.setting.strategy == "device_map" and len(spread.devices) == 2
    on_each = [device.phases["update"]["weights of the policy"] for device in spread.devices]
    assert sum(on_each) == pytest.approx(4 * POLICY, rel=1e-3) and min(on_each) > 4 * POLICY / 4
    assert sum(device.phases["update"].get("logits", 0) > 0 for device in spread.devices) <= 1


@pytest.mark.parametrize("algorithm", ["nlpo", "a2c", "trpo", "grpo"])
def test_every_algorithm_has_its_own_needs(algorithm: str, llama: Path, tmp_path: Path) -> None:
    masked = {"alg__policy__args__mask_type": "learned_top_p", "alg__policy__args__top_mask": 0.9}
    args = {"micro_batch_size": 1, "n_steps": 192} | ({"num_generations": 2} if algorithm == "grpo" else {})
    changes = {"alg__id": algorithm, "alg__args": args, **(masked if algorithm == "nlpo" else {})}
    found = rows(plan(words(tmp_path, llama, **changes), Machine(n_gpus=1, gpu_bytes=80e9)))
    assert ("weights of the critic" in found) == (algorithm != "grpo")
    assert ("weights of the mask policy" in found) == ("action masks" in found) == (algorithm == "nlpo")
    moments = {"a2c": 4 * (POLICY + CRITIC), "trpo": 8 * CRITIC, "grpo": 8 * POLICY}  # RMSprop; the critic alone
    assert found["optimizer"] == pytest.approx(moments.get(algorithm, 8 * (POLICY + CRITIC)), rel=1e-3)
    if algorithm == "trpo":  # at least gradient, direction, residual and parameters
        assert found["TRPO's vectors"] >= 4 * 4 * POLICY


def test_supervised_training_and_sequence_to_sequence(models: Callable[..., Path], tmp_path: Path) -> None:
    short = {"alg__policy__id": "seq2seq_lm_actor_critic_policy", "env__args__max_episode_length": 8}
    found = plan(words(tmp_path, models("t5"), **short), EIGHT, "zero2")
    assert found.fits and list(found.worst.phases) == ["generate", "score", "update", "evaluate"]
    path = tmp_path / "supervised.json"
    keys = {"alg": {"id": "supervised", "model_type": "causal", "model_name": str(models("gpt2"))}}
    keys |= {"tokenizer": {"model_name": str(models("gpt2"))}, "datapool": {"id": "dummy_pool"}}
    path.write_text(json.dumps({**keys, "train_evaluation": {"eval_batch_size": 2}}))
    found = plan(["--config", str(path), "--env.args.max_episode_length=8", "--env.args.max_prompt_length=8"], EIGHT)
    assert list(found.worst.phases) == ["update"] and rows(found)["optimizer"] > 0


@pytest.mark.parametrize(
    "text, expected", [("8x80GB", (8, 80e9)), ("24GiB", (1, 24 * GIB)), ("2 × 500 MB", (2, 5e8)), ("cpu", (0, 0))]
)
def test_machines(text: str, expected: tuple[int, float]) -> None:
    machine = parse_machine(text)
    assert (machine.n_gpus, machine.gpu_bytes) == expected


@pytest.mark.parametrize("text", ["8x80", "x80GB", "0x80GB", "8x80PB", "8x1.2.3GB", ""])
def test_what_is_no_machine(text: str) -> None:
    with pytest.raises(ValueError, match="write how many GPUs of which size, as 8x80GB"):
        parse_machine(text)


@pytest.mark.parametrize(
    "options, changes, message",
    [
        ({"strategy": "zero33"}, {}, "did you mean 'zero3'"),
        ({"strategy": "single", "processes": 2}, {}, "single is one process"),
        ({"processes": 9}, {}, "--gpus gives 8"),
        ({"strategy": "device_map", "processes": 3}, {"distributed__gpus_per_process": 4}, "3 processes with 4 GPUs"),
        ({"strategy": "zero2"}, {"alg__policy__args__device_map": "auto"}, "spreads the weights by itself"),
        ({"strategy": "zero2"}, {"alg__policy__args__dtype": "bfloat16"}, "must be float32 under DeepSpeed"),
        ({"strategy": "tensor_parallel", "processes": 3}, {}, "num_attention_heads is 8, which 3"),
        ({"strategy": "tensor_parallel"}, {"alg__id": "trpo", "alg__args": {}}, "weights whole in each process"),
        ({"strategy": "zero0", "bf16": True}, {}, "drifts"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(words(tmp_path, llama, **{"alg__policy__args__device_map": None, **changes}), EIGHT, **options)


def test_models_that_are_not_there_or_have_no_plan(models: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="a folder without config.json"):
        plan(words(tmp_path, tmp_path / "empty"), EIGHT)
    with pytest.raises(ValueError, match="transformers has no plan for gpt2"):
        plan(words(tmp_path, models("gpt2")), EIGHT, "tensor_parallel")


def test_what_would_make_it_fit(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    args = {"n_steps": 192, "batch_size": 4 * 192}
    given = words(tmp_path, llama, alg__args={**args, "micro_batch_size": 4})
    need = plan(given, Machine(n_gpus=2, gpu_bytes=80e9), "ddp").worst.peak
    assert main([*given, "--gpus", f"2x{need * 0.93 / 1e6:.0f}MB", "--json", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed and "most of it to update" in printed
    cures = json.loads(out.read_text())["would_fit"]
    assert ["--alg.args.micro_batch_size=2"] in [cure["changes"] for cure in cures]
    assert any(cure["changes"][0].startswith("--strategy") for cure in cures)
    assert all(cure["peak"] <= cure["capacity"] for cure in cures)
    # and so it is
    fewer = words(tmp_path, llama, alg__args={**args, "micro_batch_size": 2})
    assert plan(fewer, Machine(n_gpus=2, gpu_bytes=need * 0.93), "ddp").fits


def test_the_command_line(llama: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "tools.plan", *words(tmp_path, llama)]
    done = subprocess.run([*start, "--strategy", "zero4"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean 'zero" in done.stderr and "Traceback" not in done.stderr
