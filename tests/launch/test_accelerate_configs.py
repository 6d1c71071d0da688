"""The files of accelerate_configs/: accelerate reads them as they are meant, and their comments say what users need."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from helpers import ROOT

from train.launching import LaunchError, requested

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": "1"},
    "zero2": {"stage": "2"},
    "zero3": {"stage": "3"},
    "zero3_offload": {"stage": "3", "optimizer": "cpu"},
    "zero3_offload_params": {"stage": "3", "optimizer": "cpu", "params": "cpu"},
}
MACHINES = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1")


def launched(name: str, *options: str) -> tuple[Any, dict[str, str]]:
    """What `accelerate launch --config_file … OPTIONS script.py` would start with: (arguments, what it would set)."""
    path = ROOT / "accelerate_configs" / f"{name}.yaml"
    words = ["--config_file", str(path), *options, "script.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, env = prepare_deepspeed_cmd_env(args)
        assert command is None, "DeepSpeed's own launcher is not to be used"
    elif args.multi_gpu or args.use_fsdp:
        env = prepare_multi_gpu_env(args)
    else:
        _, env = prepare_simple_launcher_cmd_env(args)
    return args, {key: value for key, value in env.items() if os.environ.get(key) != value}


def head(path: Path) -> str:
    """The comment that a file begins with, as one line."""
    lines = path.read_text().splitlines()
    comment = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return re.sub(r"\\? *\n# *", " ", "\n".join(comment))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_when_what_it_takes_and_how_and_its_command_is_right(path: Path) -> None:
    text = head(path)
    places = [text.find(label) for label in (" When: ", " Memory per trained parameter", " Needs: ", " Run: ")]
    assert -1 not in places and places == sorted(places), text
    memory = text[places[1] : places[2]]
    assert "bytes" in memory and "frozen reference: " in memory
    assert "cpu" in path.stem or " Not run: " in text
    if path.stem in ("single_gpu", "ddp", "multi_node", "fsdp2", *ZERO):
        assert "bf16" in text and "--mixed_precision bf16" in text
    command = re.search(r"accelerate launch (.+? train/ppo\.py)", text[places[3] :])
    assert command, text
    args = launch_command_parser().parse_args(shlex.split(command[1]))
    assert args.config_file == f"accelerate_configs/{path.name}" and args.training_script == "train/ppo.py"
    _validate_launch_command(args)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_holds_topology_and_precision_only(path: Path) -> None:
    load_config_from_file(str(path))
    keys = {key for key, _ in items(yaml.safe_load(path.read_text()))}
    assert not [key for key in keys if re.search("batch|accumulation|clipping|learning|optimizer$|scheduler", key)]


def items(tree: Any) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield key, value
        if isinstance(value, dict):
            yield from items(value)


@pytest.mark.parametrize("name", ["ddp", "multi_node", *ZERO])
def test_the_number_of_processes_is_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match="--num_processes"):
        launched(name)


def test_one_process_and_copies_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched("cpu")[1]["ACCELERATE_USE_CPU"] == "True"
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    assert launched("single_gpu")[1]["ACCELERATE_USE_CPU"] == "False"
    assert launched("ddp_cpu")[0].nproc_per_node == "2"
    args, env = launched("ddp", "--num_processes", "8", "--mixed_precision", "bf16")
    assert args.nproc_per_node == "8" and int(args.master_port) > 0 and env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launched("ddp", "--num_processes", "8")[1]["ACCELERATE_MIXED_PRECISION"] == "no"
    monkeypatch.setattr(os, "environ", env)
    assert requested() == "replicated"


@pytest.mark.parametrize("name", ZERO)
def test_deepspeed_is_asked_for_the_stage_and_the_offload(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, env = launched(name, "--num_processes", "4")
    assert args.nproc_per_node == "4" and int(args.master_port) > 0
    prefix, wanted = "ACCELERATE_DEEPSPEED_", ZERO[name]
    assert env[f"{prefix}ZERO_STAGE"] == wanted["stage"] and env[f"{prefix}ZERO3_INIT"] == "false"
    assert env.get(f"{prefix}OFFLOAD_OPTIMIZER_DEVICE", "none") == wanted.get("optimizer", "none")
    assert env.get(f"{prefix}OFFLOAD_PARAM_DEVICE", "none") == wanted.get("params", "none")
    assert launched(name, "--num_processes", "4", "--zero_stage", "0")[1][f"{prefix}ZERO_STAGE"] == "0"
    monkeypatch.setattr(os, "environ", env)
    assert requested() == "deepspeed"
    env["ACCELERATE_USE_CPU"] = "true"
    with pytest.raises(LaunchError, match="unset it"):
        requested()


@pytest.mark.parametrize("name, strategy", [("fsdp2", "fsdp"), ("tensor_parallel", "tensor_parallel")])
def test_torch_s_own_strategies_are_asked_for(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, env = launched(name, "--num_processes", "2")
    assert args.nproc_per_node == "2" and env.get("PARALLELISM_CONFIG_TP_SIZE", "2") == "2"
    monkeypatch.setattr(os, "environ", env)
    assert requested() == strategy


@pytest.mark.parametrize("name", ["multi_node", *ZERO])
def test_machines_meet_where_the_command_line_says(name: str) -> None:
    args, _ = launched(name, "--num_processes", "16", "--main_process_port", "29501", *MACHINES)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("8", "2", 1)
    assert args.rdzv_backend == "static" and args.rdzv_endpoint == "10.0.0.1:29501"
    if name == "multi_node":
        assert launched(name, "--num_processes", "16", *MACHINES)[0].rdzv_endpoint == "10.0.0.1:29500"


def test_two_launches_are_one_run_over_two_machines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(*(os.environ[x] for x in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for machine in ("0", "1"):
        words = ["--config_file", ROOT / "accelerate_configs" / "multi_node.yaml", "--num_processes", "2"]
        words += ["--num_machines", "2", "--machine_rank", machine, "--main_process_ip", "127.0.0.1"]
        accelerate = [sys.executable, Path(sys.executable).with_name("accelerate"), "launch"]
        words = [str(word) for word in (*accelerate, *words, "--main_process_port", port, script)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
    with contextlib.ExitStack() as stack:
        for process in started:
            stack.callback(process.kill)
        said = [process.communicate(timeout=120)[0].strip() for process in started]
    assert said == ["0 0 2 0", "1 0 2 1"]
