"""A plan as tables to read and as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.plan_machine import Machine, config_file, gib
from tools.plan_result import Device, Plan, Rows


def show(plan: Plan, machine: Machine, console: Console) -> None:
    """Prints devices, main memory, verdict and notes."""
    setting = plan.setting
    precision = "bf16" if setting.bf16 else "no mixed precision"
    console.print(
        f"{setting.strategy}, {setting.processes} process{'es' if setting.processes > 1 else ''}, {precision}, on "
        f"{machine.name}",
        style="bold",
        highlight=False,
    )
    for device in plan.devices:
        console.print(device_table(device))
    console.print(host_table(plan))
    for line in verdict(plan):
        console.print(line, highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False)


def device_table(device: Device) -> Table:
    """Purposes by phases, in GiB."""
    table = Table(title=f"{device.name}, GiB of {gib(device.capacity).removesuffix(' GiB')}", title_justify="left")
    table.add_column("")
    for phase in device.phases:
        table.add_column(phase, justify="right", style="bold" if phase == device.peak_phase else "")
    for row in _rows([*device.phases.values(), device.beside]):
        table.add_row(row, *(_cell(rows.get(row, 0) + device.beside.get(row, 0)) for rows in device.phases.values()))
    table.add_section()
    table.add_row("together", *(_cell(device.total(phase)) for phase in device.phases), style="bold")
    return table


def host_table(plan: Plan) -> Table:
    """The machine's memory, all ranks together."""
    of = "" if plan.host_capacity is None else f" of {gib(plan.host_capacity).removesuffix(' GiB')}"
    table = Table(title=f"main memory of the machine, all ranks together, GiB{of}", title_justify="left")
    table.add_column("")
    for phase in plan.host:
        table.add_column(f"while {phase}", justify="right")
    for row in _rows(plan.host.values()):
        table.add_row(row, *(_cell(rows.get(row, 0)) for rows in plan.host.values()))
    table.add_section()
    table.add_row("together", *(_cell(sum(rows.values())) for rows in plan.host.values()), style="bold")
    return table


def verdict(plan: Plan) -> list[str]:
    """Whether it fits, and where the peak is."""
    device = plan.worst
    share = f"{gib(device.peak)} of {gib(device.capacity)} ({device.peak / device.capacity:.0%})"
    lines = [
        f"{'fits' if device.fits else 'DOES NOT FIT'}: {device.name} needs {share}, most of it to {device.peak_phase}"
    ]
    if plan.host_capacity is not None and plan.host_peak > plan.host_capacity:
        lines.append(f"DOES NOT FIT: main memory needs {gib(plan.host_peak)} of {gib(plan.host_capacity)}")
    return lines


def as_json(plan: Plan, machine: Machine, remedies: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """All numbers, in bytes."""
    setting = plan.setting
    return {
        "strategy": setting.strategy,
        "accelerate_config": config_file(setting),
        "processes": setting.processes,
        "mixed_precision": "bf16" if setting.bf16 else "no",
        "gpus": machine.n_gpus,
        "fits": plan.fits,
        "devices": [
            {
                "name": device.name,
                "capacity": device.capacity,
                "peak": device.peak,
                "peak_phase": device.peak_phase,
                "fits": device.fits,
                "phases": {phase: dict(rows) for phase, rows in device.phases.items()},
                "beside": dict(device.beside),
            }
            for device in plan.devices
        ],
        "host": {phase: dict(rows) for phase, rows in plan.host.items()},
        "host_capacity": plan.host_capacity,
        "notes": list(plan.notes),
        "would_fit": list(remedies),
    }


def _rows(tables: Iterable[Rows]) -> list[str]:
    return list(dict.fromkeys(row for rows in tables for row in sorted(rows, key=_order)))


_ORDER = ("weights", "layer", "fp32", "DDP", "gradient", "optimizer", "step", "TRPO", "activations", "bf16", "logits")


def _order(row: str) -> int:
    return next((i for i, word in enumerate(_ORDER) if row.startswith(word)), len(_ORDER))


def _cell(n: float) -> str:
    return f"{n / 2**30:,.2f}" if n >= 0.005 * 2**30 else "–" if n == 0 else "<0.01"
