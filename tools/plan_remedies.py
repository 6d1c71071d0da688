"""What would make a plan fit that does not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from tools.plan_machine import Machine, choose, gib
from tools.plan_result import Plan, make_plan
from train.config import Config, RLAlg, TRPOAlg, load_config

ENOUGH = 4
"""Ways that are listed."""


@dataclass(frozen=True)
class Change:
    """what: as the command line says it. why: what it costs. overrides: keys. options: of the launch."""

    what: str
    why: str
    overrides: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def remedies(argv: Sequence[str], machine: Machine, plan: Plan, console: Console) -> list[dict[str, Any]]:
    """The first changes, in order of what they cost, each of which makes it fit; or else several together that do."""
    config, found, helping = load_config(argv), [], list[Change]()
    with console.status("looking for what would make it fit"):
        for kind in changes(config, machine, plan):
            for change in kind:
                if (other := _try(argv, machine, plan, [change])) is None:
                    continue
                if other.fits:
                    found.append(_described([change], other))
                    break
                if other.worst.peak < 0.97 * plan.worst.peak:
                    helping.append(change)
            if len(found) == ENOUGH:
                return found
        if found:
            return found
        return _together(argv, machine, plan, helping)


def _together(argv: Sequence[str], machine: Machine, plan: Plan, helping: list[Change]) -> list[dict[str, Any]]:
    taken: list[Change] = []
    for change in helping:
        keys = {word.partition("=")[0] for word in change.overrides} | change.options.keys()
        taken = [it for it in taken if not keys & ({w.partition("=")[0] for w in it.overrides} | it.options.keys())]
        taken.append(change)
        other = _try(argv, machine, plan, taken)
        if other is not None and other.fits:
            return [_described(taken, other)]
    return []


def _try(argv: Sequence[str], machine: Machine, plan: Plan, taken: Sequence[Change]) -> Plan | None:
    options: dict[str, Any] = {
        "strategy": plan.setting.strategy,
        "processes": plan.setting.processes,
        "bf16": plan.setting.bf16,
    }
    words = list(argv)
    for change in taken:
        words += change.overrides
        options |= change.options
    try:
        config = load_config(words)
        return make_plan(config, choose(config, machine, **options), machine)
    except ValueError:  # not for this algorithm, model or strategy
        return None


def _described(taken: Sequence[Change], plan: Plan) -> dict[str, Any]:
    return {
        "changes": [change.what for change in taken],
        "why": "; ".join(change.why for change in taken),
        "peak": plan.worst.peak,
        "capacity": plan.worst.capacity,
    }


def say(cure: dict[str, Any]) -> str:
    """A line for people."""
    words = " ".join(cure["changes"])
    return f"would fit with {words}  ({gib(cure['peak'])} of {gib(cure['capacity'])}; {cure['why']})"


def changes(config: Config, machine: Machine, plan: Plan) -> Iterator[list[Change]]:
    """By kind, the mildest of a kind first. First those that change nothing of what is learnt, then those that do."""
    yield from _smaller_steps(config, plan)
    yield list(_other_strategies(machine, plan))
    if isinstance(config.alg, RLAlg):
        for change in _smaller_models(config, plan):
            yield [change]


def _smaller_steps(config: Config, plan: Plan) -> Iterator[list[Change]]:
    if not isinstance(config.alg, RLAlg):
        rows = int(config.alg.training_args.get("per_device_train_batch_size", 8))
        if rows > 1:
            key = "alg.training_args.per_device_train_batch_size=1"
            more = f"--alg.training_args.gradient_accumulation_steps={rows}"
            yield [Change(f"--{key} {more}", "slower", (f"--{key}", more))]
        return
    args = config.alg.policy.args
    if not args.gradient_checkpointing and not isinstance(config.alg, TRPOAlg):
        yield [_key("alg.policy.args.gradient_checkpointing", "true", "a third more time in the update")]
    smaller = [rows for i in range(1, 7) if (rows := config.alg.args.micro_batch_size // 2**i) > 0]
    yield [_key("alg.args.micro_batch_size", str(rows), "the same gradient, in more passes") for rows in smaller]
    if plan.worst.peak_phase in ("generate", "score"):
        yield list(_fewer_environments(config))
    if plan.worst.peak_phase == "evaluate":
        rows = max(1, config.env.n_envs // 2)
        yield [_key("train_evaluation.eval_batch_size", str(rows), "evaluation in more batches")]


def _fewer_environments(config: Config) -> Iterator[Change]:
    assert isinstance(config.alg, RLAlg)
    n, steps, group = config.env.n_envs, config.alg.args.n_steps, getattr(config.alg.args, "num_generations", 1)
    for part in (2, 4, 8, 16):
        if n % part == 0 and (n // part) % group == 0:
            words = (f"--env.n_envs={n // part}", f"--alg.args.n_steps={steps * part}")
            yield Change(" ".join(words), "the same batch, in more waves", words)


def _other_strategies(machine: Machine, plan: Plan) -> Iterator[Change]:
    setting = plan.setting
    if machine.n_gpus < 2:
        return
    order = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "tensor_parallel", "zero3_offload", "zero3_offload_params")
    why = {"tensor_parallel": "all GPUs work on one batch", "zero3_offload": "slow steps", "ddp": "copies on all GPUs"}
    start = order.index(setting.strategy) + 1 if setting.strategy in order else 0
    for name in order[start:]:
        options = {"strategy": name, "processes": None}
        cost = why.get(name, "much slower" if "params" in name else "shares instead of copies")
        yield Change(f"--strategy {name}", cost, (), options)


def _smaller_models(config: Config, plan: Plan) -> Iterator[Change]:
    assert isinstance(config.alg, RLAlg)
    args, setting = config.alg.policy.args, plan.setting
    if args.lora is None and args.reference_device is None and setting.on_gpu:
        yield _key("alg.policy.args.reference_device", "cpu", "exact; the reference's weights come layer by layer")
    if not setting.bf16:
        yield Change("--mixed_precision bf16", "rounds activations", (), {"bf16": True})
    if args.value_model == "separate" and config.alg.id != "grpo":
        yield _key("alg.policy.args.value_model", "shared", "another critic: a head on the policy")
    if args.lora is None:
        yield _key("alg.policy.args.lora", "{r: 16}", "trains adapters instead of all weights")


def _key(path: str, value: str, why: str) -> Change:
    word = f"--{path}={value}"
    return Change(word if " " not in word else f"'{word}'", why, (word,))
