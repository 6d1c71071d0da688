"""TRL's PPO on the work of benchmarks/ppo_speed.py: prints CPU-seconds per iteration and memory.

In an environment of its own, since TRL 1.12 was the last version with PPO:

    pip install torch "trl==1.12.*"
    OMP_NUM_THREADS=1 python benchmarks/versus_trl.py 20 50        # prompt and response length in tokens

10 episodes, one epoch, one minibatch, policy, separate critic and reference; the reward model is as small as can be.
"""

import resource
import statistics
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

EPISODES, VOCAB_SIZE, ITERATIONS = 10, 50257, 5
SIZE = {"n_layer": 4, "n_embd": 256, "n_head": 4}


class Clock(TrainerCallback):
    """CPU-seconds between the ends of two iterations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last: float | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.process_time()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now


def main() -> None:
    """Trains for a few iterations and prints what each took."""
    prompt, response = (int(word) for word in sys.argv[1:3])
    torch.set_num_threads(1)
    end = VOCAB_SIZE - 1
    words = Tokenizer(models.WordLevel({**{str(i): i for i in range(end)}, "<end>": end}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    common = {"vocab_size": VOCAB_SIZE, "pad_token_id": end, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
    policy, reference = (AutoModelForCausalLM.from_config(GPT2Config(**common, **SIZE)) for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    critic = AutoModelForSequenceClassification.from_config(GPT2Config(num_labels=1, **common, **SIZE))
    tiny = GPT2Config(num_labels=1, n_layer=1, n_embd=8, n_head=1, **common)
    prompts = Dataset.from_dict({"input_ids": [[(7 * i + j) % end for j in range(prompt)] for i in range(200)]})
    arguments = PPOConfig(
        output_dir="/tmp/versus_trl",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=EPISODES,
        local_rollout_forward_batch_size=EPISODES,
        num_mini_batches=1,
        num_ppo_epochs=1,
        num_sample_generations=0,
        response_length=response,
        total_episodes=EPISODES * ITERATIONS,
    )
    clock = Clock()
    PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=AutoModelForSequenceClassification.from_config(tiny),
        value_model=critic,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(4)),
        callbacks=[clock],
    ).train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{statistics.median(clock.seconds):.2f} CPU-seconds per iteration, {memory:.2f} GiB at the peak")


if __name__ == "__main__":
    main()
