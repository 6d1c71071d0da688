"""Rewards that are models: they run on the rank's device, on whole episodes."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class LearnedReward:
    """RL4LMs' `learned_reward`: the probability that a sequence classifier gives to one label of prompt + response.

    model_name: folder or hub name of a sequence classifier with its tokenizer. label_ix: index of the label.
    include_prompt_for_eval: judge prompt and response together, or the response alone. batch_size: texts per forward.
    Texts that are too long lose their beginning.
    """

    on_device = True

    def __init__(
        self,
        model_name: str,
        label_ix: int,
        *,
        device: torch.device | str = "cpu",
        include_prompt_for_eval: bool = True,
        batch_size: int = 32,
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.tokenizer.truncation_side = "left"
        self.model = AutoModelForSequenceClassification.from_pretrained(model_name).to(device).eval()
        if not 0 <= label_ix < self.model.config.num_labels:
            raise ValueError(
                f"learned_reward: label_ix {label_ix}, but {model_name} has {self.model.config.num_labels} labels"
            )
        self.label_ix, self.with_prompt, self.batch_size, self.device = (
            label_ix,
            include_prompt_for_eval,
            batch_size,
            device,
        )

    @torch.no_grad()
    def __call__(self, episodes: Sequence[Any]) -> list[float]:
        """One probability per finished episode (anything with prompt_text and response_text)."""
        texts = [(e.prompt_text if self.with_prompt else "") + e.response_text for e in episodes]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(
                texts[start : start + self.batch_size], padding=True, truncation=True, return_tensors="pt"
            ).to(self.device)
            probabilities = self.model(**batch).logits.float().softmax(-1)
            scores += probabilities[:, self.label_ix].tolist()
        return scores
