"""How fast environment workers start, what memory they take, and how many messages they answer.

    python benchmarks/env_workers.py --workers 1 2 4 --out benchmarks/results/env_workers.json

The reward counts a token, so that the numbers are those of the environment itself. Memory is RSS (everything mapped)
and PSS (what is shared is divided among those who share it), in MiB per worker.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from envs.episode import Episode
from envs.samples import Sample, write_samples
from envs.vector import TextVectorEnv


def count_token(episode: Episode, t: int) -> float:
    """A step-wise reward that costs next to nothing."""
    return float(episode.response_ids[t] == 5)


def make_init(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The workers' `init` message, with a tokenizer of one word per token unless a real one is given."""
    tokenizer_file = args.tokenizer or folder / "tokenizer.json"
    if not args.tokenizer:
        vocabulary = {f"w{i}": i for i in range(args.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tokenizer_file))
    write_samples(folder / "train.jsonl", [Sample(str(i), f"w{i} w{i + 1} w{i + 2}") for i in range(1000)])
    sys.path.append(str(Path(__file__).parent))  # workers inherit it
    return {
        "tokenizer": str(tokenizer_file),
        "splits": {"train": str(folder / "train.jsonl")},
        "reward": {"id": f"{Path(__file__).stem}:count_token", "args": {}},
        "env": {
            "vocab_size": args.vocab_size,
            "eos_token_ids": [1],
            "pad_token_id": 0,
            "max_prompt_length": 64,
            "max_episode_length": args.length,
        },
    }


def memory(pid: int) -> dict[str, float]:
    """MiB of a process; nothing where the system does not tell."""
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if not rollup.exists():
        return {}
    lines = (line.split() for line in rollup.read_text().splitlines())
    return {words[0][:-1].lower(): int(words[1]) / 1024 for words in lines if words[0] in ("Rss:", "Pss:")}


def rate(call: Callable[[], object], seconds: float) -> float:
    """Calls per second."""
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        n += 1
    return n / (time.perf_counter() - start)


def measure(n_workers: int, init: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """One row of the table: n_workers with envs_per_worker environments each."""
    n_envs = n_workers * args.envs_per_worker
    start = time.perf_counter()
    with TextVectorEnv(n_envs, n_workers, init=init, seed=0) as vector:
        row: dict[str, float] = {"workers": n_workers, "envs": n_envs, "start_s": time.perf_counter() - start}
        responses = list(np.random.default_rng(0).integers(2, args.vocab_size, (n_envs, args.length)))
        actions = np.full(n_envs, 5)

        def step() -> None:
            *_, truncated, _ = vector.step(actions)
            if truncated.any():
                vector.reset()

        def play() -> None:
            vector.reset()
            vector.play(responses)

        vector.reset()
        row["steps_per_s"] = rate(step, args.seconds)
        row["plays_per_s"] = rate(play, args.seconds)
        row["play_tokens_per_s"] = row["plays_per_s"] * n_envs * args.length
        used = [memory(pid) for pid in vector.worker_pids]
        for key in used[0]:
            row[f"{key}_mib"] = sum(worker[key] for worker in used) / n_workers
        start = time.perf_counter()
    return {**row, "close_s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--envs-per-worker", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a response")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of the made-up one")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        init = make_init(Path(folder), args)
        rows = [measure(n_workers, init, args) for n_workers in args.workers]
    columns = list(rows[0])
    print(" ".join(f"{column:>18}" for column in columns))
    for row in rows:
        print(" ".join(f"{row[column]:>18.6g}" for column in columns))
    if args.out:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        system = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"settings": settings, "system": system, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
