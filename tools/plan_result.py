"""From a dry run to what each device and the machine's memory have to hold."""

import multiprocessing
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
from transformers import PreTrainedModel

from tools.plan_dry_run import MASKS, VECTORS, DryRun, Profile
from tools.plan_layout import DDP_BUCKETS, Setting, critic_of, weights_row
from tools.plan_machine import Machine, gpus_of_each
from tools.plan_memory import Heap
from tools.plan_models import architecture, bytes_of, count, make_models
from train import device_maps
from train.config import Config, RLAlg
from train.models import Models
from train.placement import wanted
from train.setup import reuse_freed_memory

AFTER_IMPORTS = 55e6
"""What a rank's process takes beside tensors once it runs: tokenizer, samples, workers' ends (measured)."""
WORKER = 45e6
"""A worker process, what it shares counted once (benchmarks/env_workers.py)."""
CUDA, CACHED = 0.75 * 2**30, 0.05
"""On a GPU: CUDA's context and libraries; the share of tensors that lies fallow in torch's allocator. Assumed."""
CUDA_HOST = 2 * 2**30
"""Main memory of a process that uses a GPU, without models. Assumed."""
LIBRARIES, HOLES = "Python and its libraries", "holes between the allocator's blocks"
Rows = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one device holds. phases: bytes by phase and purpose, at each phase's worst moment. beside: bytes that do
    not depend on the phase."""

    name: str
    capacity: float
    phases: Mapping[str, Rows]
    beside: Rows

    def total(self, phase: str) -> float:
        """Bytes of a phase."""
        return sum(self.phases[phase].values()) + sum(self.beside.values())

    @property
    def peak_phase(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.peak_phase)

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity


@dataclass(frozen=True, kw_only=True)
class Plan:
    """setting: what was planned for. devices: those of one rank; all ranks are alike. host: bytes of the machine's main
    memory by purpose, while loading and while training; host_capacity: None if not known. notes: for the reader."""

    setting: Setting
    devices: list[Device]
    host: Mapping[str, Rows]
    host_capacity: float | None
    notes: list[str] = field(default_factory=list)

    @property
    def host_peak(self) -> float:
        return max(sum(rows.values()) for rows in self.host.values())

    @property
    def fits(self) -> bool:
        """Whether devices and main memory have room."""
        host = self.host_capacity is None or self.host_peak <= self.host_capacity
        return host and all(device.fits for device in self.devices)

    @property
    def worst(self) -> Device:
        """The device that is fullest."""
        return max(self.devices, key=lambda device: device.peak)


def make_plan(config: Config, setting: Setting, machine: Machine) -> Plan:
    """Plans a run by a dry run. Raises ValueError where models cannot be made or spread as the configuration says."""
    if setting.on_gpu or not Heap.is_there():
        return _make_plan(config, setting, machine)
    # The allocator of this process has to stay as it is after the imports, for this plan and for others.
    with warnings.catch_warnings(), multiprocessing.get_context("fork").Pool(1) as process:
        warnings.filterwarnings("ignore", ".*use of fork.*", DeprecationWarning)
        return process.apply(_make_plan, (config, setting, machine))


def _make_plan(config: Config, setting: Setting, machine: Machine) -> Plan:
    imports = float(psutil.Process().memory_info().rss)
    if not setting.on_gpu:
        reuse_freed_memory()
    run = DryRun(config, setting)
    profile = run()
    phases: dict[str, Rows] = {name: tidy(peak.parts) for name, peak in profile.phases.items()}
    notes = _notes(config, run)
    if setting.strategy == "device_map":
        devices = _spread(config, setting, machine, phases, notes)
    elif setting.on_gpu:
        devices = [_on_gpu("each GPU" if setting.processes > 1 else "the GPU", setting.capacity, phases)]
    else:
        devices = [_on_cpu(setting, profile, phases, imports)]
    return Plan(
        setting=setting,
        devices=devices,
        host=_host(config, setting, run.models, profile, devices),
        host_capacity=machine.host_bytes,
        notes=notes,
    )


def tidy(parts: Mapping[str, int]) -> Rows:
    """Without what is nothing."""
    return {row: float(n) for row, n in parts.items() if n > 0}


def _on_gpu(name: str, capacity: float, phases: Mapping[str, Rows]) -> Device:
    most = max(sum(rows.values()) for rows in phases.values())
    beside = {"CUDA (assumed)": CUDA, "left over by the allocator (assumed)": CACHED * most}
    return Device(name=name, capacity=capacity, phases=phases, beside=beside)


def _on_cpu(setting: Setting, profile: Profile, phases: Mapping[str, Rows], imports: float) -> Device:
    beside = {LIBRARIES: imports, "tokenizer, samples, workers' ends": AFTER_IMPORTS}
    most = max(sum(rows.values()) for rows in phases.values())
    if profile.grown is not None:
        mapped = sum(n for row, n in profile.layout.held.items() if not profile.layout.is_in_heap(row))
        beside[HOLES] = max(0.0, mapped + profile.grown - most)
    name = "each process" if setting.processes > 1 else "the process"
    return Device(name=name, capacity=setting.capacity, phases=phases, beside=beside)


def _notes(config: Config, run: DryRun) -> list[str]:
    notes = [
        f"planned for prompts of {run.work.prompt} and responses of {run.work.response} tokens, all of the longest kind"
    ]
    if run.work.rollout and run.work.step_rows < config.alg.args.micro_batch_size:
        few, size = run.work.step_rows, config.alg.args.micro_batch_size
        notes.append(f"an optimizer step has {few} full-length episodes, fewer than alg.args.micro_batch_size ({size})")
    if run.layout.gathers is not None and run.work.rollout:
        how = "are gathered whole to generate" if run.layout.gathers else "stay in parts, all ranks in step"
        notes.append(f"generation.gather {config.generation.gather}: the policy's weights {how}")
    return notes


def _spread(
    config: Config, setting: Setting, machine: Machine, phases: Mapping[str, Rows], notes: list[str]
) -> list[Device]:
    n, asked = gpus_of_each(config, machine), wanted(config)
    if asked is None:
        notes.append("add --alg.policy.args.device_map=balanced: without it nothing is spread")
        asked = "balanced"
    models = make_models(config)
    lms = {name: model.lm for name, model in models.frozen.items()}
    if models.actor_critic.critic is not None:
        lms["critic"] = models.actor_critic.critic
    policy = models.actor_critic.policy.lm
    limits = config.alg.policy.args.max_memory
    capacity = [int(device_maps.FREE_SHARE * setting.capacity)] * n
    if limits is not None:
        capacity = device_maps.budgets(limits, n)
    maps = device_maps.plan(asked, policy, lms, capacity)
    shares = {name: _shares(model, maps[name], n) for name, model in {"policy": policy, **lms}.items()}
    weight = {name: bytes_of(model, trained=True) for name, model in {"policy": policy, **lms}.items()}
    total = max(1, sum(weight.values()))
    both = [sum(weight[name] * share[gpu] for name, share in shares.items()) / total for gpu in range(n)]
    first = [1.0, *[0.0] * (n - 1)]
    own = {"gradients": both, "optimizer": both, "step": both, DDP_BUCKETS: first, "logits": first}
    own |= {MASKS: first, VECTORS: first}
    own |= {weights_row(name): share for name, share in shares.items()}
    devices = []
    for gpu in range(n):
        part = {
            phase: tidy({row: int(x * own.get(row, shares["policy"])[gpu]) for row, x in rows.items()})
            for phase, rows in phases.items()
        }
        devices.append(_on_gpu(f"GPU {gpu} of each process", setting.capacity, part))
    return devices


def _shares(model: PreTrainedModel, device_map: device_maps.DeviceMap, n: int) -> list[float]:
    """Of a model's weights, by GPU."""
    spent, seen = [0.0] * n, set[int]()
    for name, x in device_maps.tensors_of(model).items():
        if id(x) not in seen:
            seen.add(id(x))
            spent[device_maps.device_of(name, device_map)] += x.nbytes
    return [x / max(1.0, sum(spent)) for x in spent]


def _host(config: Config, setting: Setting, models: Models, profile: Profile, devices: list[Device]) -> dict[str, Rows]:
    """Of one machine, all its ranks together."""
    n = setting.processes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = config.env.n_workers or min(config.env.n_envs, max(1, cores // n))
    beside = {"environment workers": n * workers * WORKER} if isinstance(config.alg, RLAlg) else {}
    if not setting.on_gpu:
        device = devices[0]
        running = {f"{n} process{'es' if n > 1 else ''}": n * device.peak, **beside}
        beside[LIBRARIES] = n * device.beside[LIBRARIES]
        return {"loading": {**_loaded(config, setting, models), **beside}, "training": running}
    beside["processes that use GPUs (assumed)"] = n * CUDA_HOST
    aside: Rows = {row: float(n * x) for row, x in profile.layout.host.items() if x}
    if setting.offloads:
        aside["optimizer"] = float(n * profile.optimizer)
    saved = bytes_of(models.actor_critic, trained=True)
    return {
        "loading": {**_loaded(config, setting, models), **beside},
        "training": {**aside, "a checkpoint on its way to the disk": float(saved), **beside},
    }


def _loaded(config: Config, setting: Setting, models: Models) -> Rows:
    """Every rank loads all models on the CPU before anything is sharded. What is of the file's dtype is mapped: all
    models and ranks share the file's pages, until they are written to."""
    whole = [models.actor_critic.policy, critic_of(models.actor_critic), *models.frozen.values()]
    total, one = sum(bytes_of(m) for m in whole), bytes_of(whole[0])
    rows: Rows = {"models, mapped from their file": float(one)}
    asked = config.alg.policy.args.dtype if isinstance(config.alg, RLAlg) else "float32"
    if str(getattr(architecture(config), "dtype", None)).removeprefix("torch.") not in (asked, "None"):
        rows = {"models, on each rank": float(setting.processes * total)}
    elif setting.stage is not None and setting.bf16:
        rows["models in bf16, on each rank"] = 2.0 * setting.processes * sum(count(m) for m in whole)
    return rows
