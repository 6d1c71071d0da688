"""The learned reward: a sequence classifier judges whole episodes, each as if it were alone."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    XLNetConfig,
)

from algorithms.reward_model import LearnedReward

WORDS = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *"abcdefghijklm"])}
POSITIONS = 12
CONFIGS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=POSITIONS,
    ),
    "gpt2": GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=POSITIONS),
    "llama": LlamaConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=POSITIONS,
    ),
    "xlnet": XLNetConfig(vocab_size=16, d_model=16, n_layer=2, n_head=2, d_inner=32),
}  # fmt: skip
EVERY_FAMILY = pytest.mark.parametrize("family", CONFIGS)
Make = Callable[..., str]

EPISODES = [
    SimpleNamespace(prompt_text=prompt, response_text=response)
    for prompt, response in [("a b c", " d e f g"), ("h", ""), ("i j", " k l m a b c d"), ("c", " b"), ("m m", " a")]
]


@pytest.fixture
def classifier(tmp_path: Path) -> Make:
    """classifier(family, n_labels, side, pad, eos): the folder of a sharp random classifier whose words are letters."""

    def make(
        family: str, n_labels: int = 3, *, side: str = "right", pad: str | None = "<pad>", eos: str | None = "<eos>"
    ) -> str:
        tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", pad_token=pad, eos_token=eos, padding_side=side
        ).save_pretrained(tmp_path)
        config = CONFIGS[family].__class__(**{**CONFIGS[family].to_dict(), "num_labels": n_labels})
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.ndim > 1 else 1)
        model.save_pretrained(tmp_path)
        return str(tmp_path)

    return make


def alone(folder: str, *texts: str) -> torch.Tensor:
    """Probabilities [texts, labels], one text at a time: no batch, no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [model(torch.tensor([[WORDS[word] for word in text.split()]])).logits[0] for text in texts]
    return torch.stack(rows).double().softmax(1)


# XLNet's head reads the last column: its tokenizer always pads on the left.
@pytest.mark.parametrize(
    "family, side",
    [*((family, side) for family in ("bert", "gpt2", "llama") for side in ("left", "right")), ("xlnet", "left")],
)
def test_each_episode_is_judged_as_if_it_were_alone(classifier: Make, family: str, side: str) -> None:
    folder = classifier(family, side=side)
    expected = alone(folder, *(e.prompt_text + e.response_text for e in EPISODES))
    for label, batch_size in ((0, 1), (1, 2), (2, 32)):
        got = LearnedReward(folder, label, batch_size=batch_size)(EPISODES)
        assert got == pytest.approx(expected[:, label].tolist(), abs=2e-6)
    assert expected.std(0).min() > 0.01


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_response_can_be_judged_alone(classifier: Make, family: str) -> None:
    folder = classifier(family)
    got = LearnedReward(folder, 1, include_prompt_for_eval=False)([EPISODES[0], EPISODES[2]])
    assert got == pytest.approx(alone(folder, "d e f g", "k l m a b c d")[:, 1].tolist(), abs=2e-6)


@EVERY_FAMILY
def test_an_empty_response_gets_the_same_reward_in_every_batch(classifier: Make, family: str) -> None:
    reward = LearnedReward(classifier(family, side="left"), 1, include_prompt_for_eval=False)
    empty = SimpleNamespace(prompt_text="a", response_text="")
    (single,) = reward([empty])
    assert 0 <= single <= 1
    assert reward([EPISODES[2], empty, EPISODES[0]])[1] == pytest.approx(single, abs=2e-6)
    assert reward([empty, empty]) == pytest.approx([single] * 2, abs=2e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_texts_that_are_too_long_lose_their_beginning(classifier: Make, family: str) -> None:
    folder = classifier(family)
    words = list("abcdefghijklm" * 2)
    long = SimpleNamespace(prompt_text=" ".join(words), response_text="")
    expected = float(alone(folder, " ".join(words[-POSITIONS:]))[0, 2])
    assert LearnedReward(folder, 2)([EPISODES[3], long])[1] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_without_a_padding_token_the_end_of_sequence_pads(classifier: Make, family: str) -> None:
    folder = classifier(family, pad=None)
    expected = alone(folder, *(e.prompt_text + e.response_text for e in EPISODES))[:, 0]
    assert LearnedReward(folder, 0)(EPISODES) == pytest.approx(expected.tolist(), abs=2e-6)


def test_a_tokenizer_that_cannot_pad_is_refused(classifier: Make) -> None:
    folder = classifier("gpt2", pad=None, eos=None)
    with pytest.raises(ValueError, match=f"learned_reward: .*{folder}.* padding token"):
        LearnedReward(folder, 0)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_does_not_exist_is_refused(classifier: Make, label: int) -> None:
    folder = classifier("bert")
    with pytest.raises(ValueError, match=f"label_ix {label}, but {folder} has 3 labels"):
        LearnedReward(folder, label)


def test_a_regression_head_is_refused_for_its_probability_is_always_one(classifier: Make) -> None:
    with pytest.raises(ValueError, match="1 label"):
        LearnedReward(classifier("bert", 1), 0)


def test_the_reward_is_for_the_device_and_takes_no_episodes(classifier: Make) -> None:
    reward = LearnedReward(classifier("gpt2"), 0, device="cpu")
    assert LearnedReward.on_device is True and reward([]) == [] and not reward.model.training
