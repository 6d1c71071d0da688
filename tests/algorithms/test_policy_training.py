"""The policy as a module to train: loading, gradients, recomputation, dropout, optimizer groups, saving."""

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, counting_calls, first_layer, length_mask, make_lm, make_prompts, naive_logits
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from algorithms.models import load_actor_critic, load_language_model, load_reference, parameter_groups
from algorithms.policy import ActorCritic, LanguageModel, Scores
from algorithms.ppo import ppo_loss

DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"),
    "llama": ("attention_dropout",),
    "qwen2": ("attention_dropout",),
    "mistral": ("attention_dropout",),
    "gemma2": ("attention_dropout",),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "opt": ("dropout", "attention_dropout", "layerdrop"),
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
VALUE_MODELS = pytest.mark.parametrize("value_model", ["shared", "separate"])


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    """A saved model of the family whose config asks for dropout."""
    make_lm(family, **dict.fromkeys(DROPOUT[family], 0.5)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def family() -> str:
    """The one that tests use which are not about families."""
    return "gpt2"


def episodes() -> dict[str, Tensor]:
    prompt_ids, prompt_mask = make_prompts([5, 2, 3])
    response_ids, _ = make_prompts([6, 6, 6], seed=7)
    mask = length_mask(torch.tensor([6, 1, 4]), 6)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "response_ids": response_ids,
        "response_mask": mask,
    }


def with_values(model: ActorCritic) -> ActorCritic:
    """A value head that passes gradients on: the one that starts at zero does not."""
    with torch.no_grad():
        model.value_head.weight.copy_(torch.linspace(-0.3, 0.5, model.value_head.in_features))
    return model


def first_norm(trunk: torch.nn.Module) -> torch.nn.Module:
    """Inside the first layer, whose own hooks do not see that it is computed again."""
    return next(m for m in first_layer(trunk).modules() if "Norm" in type(m).__name__)


def loss_of(scores: Scores, mask: Tensor) -> Tensor:
    """A PPO loss to which log-probabilities, entropies and values all contribute."""
    advantages = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
    loss, _ = ppo_loss(
        logprobs=scores.logprobs,
        old_logprobs=scores.logprobs.detach() - 0.05,
        entropy=scores.entropy,
        values=scores.values[:, :-1],
        old_values=torch.zeros_like(advantages),
        advantages=advantages,
        returns=advantages,
        response_mask=mask,
        clip_range=0.2,
        clip_range_vf=None,
        vf_coef=0.5,
        ent_coef=0.01,
    )
    return loss


def gradients(model: ActorCritic, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of every trainable parameter; one without a gradient fails the test that asks."""
    model.zero_grad()
    loss_of(model(**inputs), inputs["response_mask"]).backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@VALUE_MODELS
def test_values_start_at_zero(folder: Path, value_model: str) -> None:
    model = load_actor_critic(str(folder), value_model=value_model)
    values = model(**episodes()).values
    assert values.shape == (3, 7) and values.dtype == torch.float32 and not values.any()
    assert (model.critic is None) is (value_model == "shared")


@EVERY_FAMILY
def test_every_dropout_is_off_even_in_train_mode(folder: Path) -> None:
    model, inputs = with_values(load_actor_critic(str(folder))), episodes()
    expected = model(**inputs)
    model.train()
    for _ in range(2):
        again = model(**inputs)
        assert torch.equal(again.logprobs, expected.logprobs) and torch.equal(again.values, expected.values)
    assert model.policy.lm.training and model.critic.training


@EVERY_FAMILY
def test_dropout_would_have_changed_the_scores(folder: Path) -> None:
    noisy = LanguageModel(AutoModelForCausalLM.from_pretrained(folder)).train()
    with torch.no_grad():
        one, two = noisy(**episodes()), noisy(**episodes())
    assert not torch.equal(one.logprobs, two.logprobs)


@EVERY_FAMILY
def test_a_saved_policy_gives_the_same_logits_and_keeps_its_dropout(folder: Path, family: str, tmp_path: Path) -> None:
    model = load_actor_critic(str(folder))
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.01)
    ours = model.policy.lm.config
    model.policy.save_pretrained(tmp_path / "saved")
    assert model.policy.lm.config is ours, "saving changes nothing"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = list(range(5, 14))
    assert torch.equal(naive_logits(again.eval(), ids), naive_logits(model.policy.lm, ids))
    saved, original = (AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path / "saved", folder))
    assert {name: saved[name] for name in DROPOUT[family]} == dict.fromkeys(DROPOUT[family], 0.5)
    assert {**saved, "_name_or_path": ""} == {**original, "_name_or_path": ""}


def test_a_half_precision_policy_is_saved_as_such(folder: Path, tmp_path: Path) -> None:
    model = load_language_model(str(folder), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert torch.equal(naive_logits(again.eval(), [4, 5, 6]), naive_logits(model.lm, [4, 5, 6]))


def test_the_reference_is_the_policy_at_the_start_frozen_and_its_own(folder: Path) -> None:
    model, reference, inputs = load_actor_critic(str(folder)), load_reference(str(folder)), episodes()
    assert torch.equal(reference(**inputs).logprobs, model(**inputs).logprobs)
    assert not any(p.requires_grad for p in reference.parameters()) and not reference.lm.training
    before = reference(**inputs).logprobs
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(reference(**inputs).logprobs, before)


@VALUE_MODELS
@EVERY_FAMILY
def test_a_micro_batch_in_which_nothing_counts_gives_zero_gradients_to_every_parameter(
    folder: Path, value_model: str
) -> None:
    model, inputs = with_values(load_actor_critic(str(folder), value_model=value_model)), episodes()
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    scores = model(**inputs)
    assert not scores.logprobs.any() and not scores.entropy.any()
    assert not any(gradient.any() for gradient in gradients(model, inputs).values())


@VALUE_MODELS
def test_values_alone_are_those_of_the_whole_forward_and_train_the_critic_alone(folder: Path, value_model: str) -> None:
    model, inputs = with_values(load_actor_critic(str(folder), value_model=value_model)), episodes()
    whole = model(**inputs)
    head = model.policy.lm.get_output_embeddings()
    with counting_calls(head) as heads, counting_calls(first_layer(model.policy.lm)) as blocks:
        alone = model(**inputs, critic_only=True, temperature=0.7)
    assert torch.equal(alone.values, whole.values) and alone.logprobs.shape == whole.logprobs.shape
    assert not any(x.any() for x in (alone.logprobs, alone.entropy, alone.raw_logprobs))
    assert not heads and len(blocks) == (value_model == "shared")
    alone.values.sum().backward()
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert trained == ({"value_head"} if value_model == "shared" else {"value_head", "critic"})


@EVERY_FAMILY
def test_every_parameter_is_trained(folder: Path) -> None:
    model = with_values(load_actor_critic(str(folder)))
    zero = {name for name, gradient in gradients(model, episodes()).items() if not gradient.any()}
    assert all(name.endswith("k_proj.bias") for name in zero), "only a bias of keys cancels in the softmax"


@EVERY_FAMILY
def test_recomputation_gives_the_same_gradients(folder: Path) -> None:
    plain = with_values(load_actor_critic(str(folder)))
    saving = with_values(load_actor_critic(str(folder), gradient_checkpointing=True))
    inputs = episodes()
    expected = gradients(plain, inputs)
    norms = first_norm(saving.policy.lm), first_norm(saving.critic)
    for enabled, calls_each in ((True, 2), (False, 1)):
        with counting_calls(norms[0]) as of_policy, counting_calls(norms[1]) as of_critic, saving.recomputing(enabled):
            got = gradients(saving, inputs)
        assert len(of_policy) == len(of_critic) == calls_each
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not any(module.training for module in saving.modules())


def test_recomputation_ends_after_an_error(folder: Path) -> None:
    model = load_actor_critic(str(folder), gradient_checkpointing=True)
    with pytest.raises(KeyError), model.recomputing(True):
        assert model.policy.lm.training
        raise KeyError
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("restricted", [False, True])
def test_chunks_of_logits_give_the_same_gradients(folder: Path, restricted: bool) -> None:
    model, inputs = with_values(load_actor_critic(str(folder))), episodes()
    if restricted:
        inputs["action_mask"] = torch.full((3, 6, -(-VOCAB // 8)), 255, dtype=torch.uint8)
        inputs["action_mask"][..., 0] = 0b00001111
    expected = gradients(model, inputs)
    model.policy.logits_chunk_bytes = 4 * VOCAB * 3
    with counting_calls(model.policy.lm.get_output_embeddings()) as calls:
        got = gradients(model, inputs)
    assert max(shape[0] for shape in calls) == 3 and len(calls) == 8, "4 chunks, each computed twice"
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * scale)


@EVERY_FAMILY
def test_each_trainable_parameter_is_in_exactly_one_optimizer_group(folder: Path) -> None:
    model = load_actor_critic(str(folder))
    next(model.policy.parameters()).requires_grad_(False)
    groups = parameter_groups(model, learning_rate=1e-3, critic_learning_rate=2e-3, weight_decay=0.1)
    grouped = [p for group in groups for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(grouped) == len(trainable) and {id(p) for p in grouped} == {id(p) for p in trainable}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        of_policy = group["name"].startswith("policy")
        assert group["lr"] == group["base_lr"] == (1e-3 if of_policy else 2e-3)
        assert group["weight_decay"] == (0.0 if group["name"].endswith("no_decay") else 0.1)
        for p in group["params"]:
            name = names[id(p)]
            assert of_policy is name.startswith("policy.")
            is_bias_or_norm = name.endswith("bias") or "norm" in name or ".ln_" in name
            assert is_bias_or_norm is (group["weight_decay"] == 0.0), name
    assert len({group["name"] for group in groups}) == len(groups)
    torch.optim.AdamW(groups)
    assert sum(p.numel() for p in grouped) == sum(p.numel() for p in trainable)
