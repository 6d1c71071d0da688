"""Rewards that are models: they run on the rank's device, on whole episodes."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class LearnedReward:
    """RL4LMs' `learned_reward`: the probability that a sequence classifier gives to one label of prompt + response.

    model_name: folder or hub name of a sequence classifier with its tokenizer. label_ix: index of the label.
    include_prompt_for_eval: judge prompt and response together, or the response alone. batch_size: texts per forward.
    Texts that are too long lose their beginning. Raises ValueError for a label or a tokenizer that cannot be used.
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
        self.model = AutoModelForSequenceClassification.from_pretrained(model_name).to(device).eval()
        n_labels = self.model.config.num_labels
        if n_labels < 2:
            raise ValueError(f"learned_reward: {model_name} has 1 label, whose probability is always 1")
        if not 0 <= label_ix < n_labels:
            raise ValueError(f"learned_reward: label_ix {label_ix}, but {model_name} has {n_labels} labels")
        self.label_ix, self.with_prompt = label_ix, include_prompt_for_eval
        self.batch_size, self.device = batch_size, device
        self._arrange_padding(model_name)

    def _arrange_padding(self, model_name: str) -> None:
        """Make the score of a text independent of its batch, and texts no longer than the model's positions."""
        tokenizer, config = self.tokenizer, self.model.config.get_text_config()
        tokenizer.truncation_side = "left"
        n_positions = getattr(config, "max_position_embeddings", 0)
        if 0 < n_positions < tokenizer.model_max_length:
            tokenizer.model_max_length = n_positions
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            tokenizer.padding_side = "right"  # positions are counted from the first column
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise ValueError(f"learned_reward: the tokenizer of {model_name} has neither a padding token nor EOS")
        config.pad_token_id = tokenizer.pad_token_id  # decoders judge at the last token that is not this one
        self.blank = "" if tokenizer("")["input_ids"] else tokenizer.pad_token

    @torch.no_grad()
    def __call__(self, episodes: Sequence[Any]) -> list[float]:
        """One probability per finished episode (anything with prompt_text and response_text)."""
        texts = [(e.prompt_text if self.with_prompt else "") + e.response_text for e in episodes]
        texts = [text if text.strip() else self.blank for text in texts]  # no text without a token
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(
                texts[start : start + self.batch_size], padding=True, truncation=True, return_tensors="pt"
            ).to(self.device)
            probabilities = self.model(**batch).logits.float().softmax(-1)
            scores += probabilities[:, self.label_ix].tolist()
        return scores
