"""What one PPO iteration costs, phase by phase: the real script on a GPT-2 of 4 layers × 256 with 50,257 tokens.

    python benchmarks/ppo_speed.py --out benchmarks/results/ppo_speed.json

10 environments, one episode each per iteration, one epoch of one minibatch: policy, separate critic and reference, at
several prompt and response lengths. Prints CPU-seconds per iteration, tokens/s of every phase and memory. One thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

N_ENVS, VOCAB_SIZE, ITERATIONS = 10, 50257, 5
LENGTHS = [(20, 50), (20, 100), (20, 200), (100, 100)]  # prompt, response
PHASES = ("generate", "env", "score", "update")


def make_model(folder: Path) -> None:
    """A random GPT-2 whose tokens are the words "0", "1", …"""
    vocabulary = {str(i): i for i in range(VOCAB_SIZE - 1)} | {"<|endoftext|>": VOCAB_SIZE - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=VOCAB_SIZE)).save_pretrained(folder)


def config(folder: Path, prompt: int, response: int) -> dict[str, Any]:
    """A run of a few iterations of exactly one episode per environment."""
    policy = {"model_name": str(folder / "model")}
    args = {"n_steps": response, "batch_size": N_ENVS * response, "n_epochs": 1, "learning_rate": 1e-6}
    return {
        "tokenizer": {"model_name": str(folder / "model")},
        "datapool": {"id": "dummy_pool", "args": {"prompt": " ".join(map(str, range(prompt))), "n_samples": 4}},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": response}},
        "env": {"n_envs": N_ENVS, "args": {"max_prompt_length": prompt, "max_episode_length": response}},
        "alg": {"id": "ppo", "args": args, "kl_div": {"coeff": 0.01}, "policy": {"args": policy}},
        "train_evaluation": {"eval_batch_size": 4, "n_iters": ITERATIONS, "eval_every": 0, "save_every": 0},
        "tracking": {"output_dir": str(folder / "runs"), "experiment_name": f"{prompt}_{response}", "trackers": []},
    }


def measure(folder: Path, prompt: int, response: int) -> dict[str, float]:
    """Medians over the iterations after the first."""
    file = folder / f"{prompt}_{response}.yml"
    file.write_text(yaml.safe_dump(config(folder, prompt, response)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "train.ppo", "--config", str(file)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = (folder / f"runs/rl4lm_exps/{prompt}_{response}/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1:-1]  # the first warms up, the last saves and evaluates
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    cores = median["perf/rank_cpu_cores"] + median["perf/workers_cpu_cores"]
    return {
        "prompt": prompt,
        "response": response,
        "cpu_seconds": cores * median["perf/seconds_total"],
        "memory_gb": median["perf/rank_memory_gb"],
        **{f"seconds_{phase}": median[f"perf/seconds_{phase}"] for phase in PHASES},
        **{f"tokens_per_s_{phase}": median[f"perf/tokens_per_s_{phase}"] for phase in PHASES},
        "tokens_per_s": median["perf/tokens_per_s"],
    }


def main() -> None:
    """Runs all lengths, prints the table, writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name) / "model")
        results = [measure(Path(name), *lengths) for lengths in LENGTHS]
    table = Table(title=f"PPO, GPT-2 4 × 256, {N_ENVS} environments, one thread", title_justify="left")
    for column in ("prompt", "response", "CPU-s", "memory GB", *(f"{phase} tok/s" for phase in (*PHASES, "all"))):
        table.add_column(column, justify="right")
    for row in results:
        speeds = [row[f"tokens_per_s_{phase}"] for phase in PHASES] + [row["tokens_per_s"]]
        lengths = [str(row["prompt"]), str(row["response"])]
        table.add_row(*lengths, f"{row['cpu_seconds']:.2f}", f"{row['memory_gb']:.2f}", *(f"{x:.0f}" for x in speeds))
    Console(width=120).print(table)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
