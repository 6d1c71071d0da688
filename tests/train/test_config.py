"""Loading of YAML files: what RL4LMs' users bring loads, and each fault is an error that names it."""

from pathlib import Path
from typing import Any

import pytest

from train.config import A2CAlg, Config, GRPOAlg, NLPOAlg, PPOAlg, SupervisedAlg, TRPOAlg, load_config

ROOT = Path(__file__).parents[2]
RL4LMS = Path(__file__).parent / "rl4lms"

MINIMAL = """\
tokenizer: {model_name: gpt2}
reward_fn: {id: increasing_numbers}
datapool: {id: dummy_pool}
alg:
  id: ppo
  kl_div: {coeff: 0.1}
  policy: {args: {model_name: gpt2}}
train_evaluation: {eval_batch_size: 8, n_iters: 2, eval_every: 1}
"""
MASK = ["--alg.policy.args.mask_type=learned_top_p"]
GRPO = ["--env.n_envs=8"]
SUPERVISED = """\
tokenizer: {model_name: gpt2}
datapool: {id: dummy_pool}
alg: {id: supervised, model_type: causal, model_name: gpt2}
train_evaluation: {eval_batch_size: 8}
"""


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.yml"
    path.write_text(text)
    return load_config(["--config", str(path), *overrides])


def fault(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_causal_ppo_of_rl4lms_loads() -> None:
    config = load_config(["--config_path", str(RL4LMS / "causal_ppo.yml")])
    assert isinstance(config.alg, PPOAlg)
    assert (config.env.n_envs, config.env.args.max_episode_length, config.env.args.terminate_on_eos) == (10, 48, True)
    assert (config.alg.args.n_steps, config.alg.args.learning_rate, config.alg.args.gamma) == (128, 1e-6, 0.99)
    assert (config.alg.kl_div.coeff, config.alg.kl_div.target_kl) == (0.1, 0.1)
    assert config.datapool.args == {"seed": 42}
    assert [metric.id for metric in config.train_evaluation.metrics] == [
        "learned_reward",
        "causal_perplexity",
        "diversity",
    ]
    assert config.train_evaluation.metrics[2].args == {}


def test_seq2seq_ppo_of_rl4lms_loads() -> None:
    config = load_config(["--config", str(RL4LMS / "seq2seq_ppo.yml")])
    assert isinstance(config.alg, PPOAlg)
    assert config.alg.args.learning_rate == 5e-7
    assert config.alg.policy.id == "seq2seq_lm_actor_critic_policy"
    assert config.train_evaluation.generation_kwargs == {"num_beams": 4, "length_penalty": 0.6, "max_new_tokens": 128}


def test_integer_where_a_float_is_expected_loads() -> None:
    config = load_config(["--config", str(RL4LMS / "synthetic_ppo.yml")])
    assert isinstance(config.alg, PPOAlg) and config.alg.kl_div.target_kl == 2.0
    assert config.datapool.args["prompt"] == "<|endoftext|>"


@pytest.mark.parametrize("name", ["causal_supervised.yml", "seq2seq_supervised.yml"])
def test_supervised_files_of_rl4lms_load(name: str) -> None:
    config = load_config(["--config", str(RL4LMS / name)])
    assert isinstance(config.alg, SupervisedAlg)
    assert config.reward_fn is None
    # 1e-4 is a string to YAML 1.1, also in the free keys of training_args
    assert config.alg.training_args["learning_rate"] in (1e-4, 1e-5)
    assert "post_processing_fn" not in config.alg.generation_kwargs


def test_nlpo_a2c_and_trpo_of_rl4lms_load() -> None:
    nlpo, a2c, trpo = (
        load_config(["--config", str(RL4LMS / name)]).alg
        for name in ("seq2seq_nlpo.yml", "causal_a2c.yml", "causal_trpo.yml")
    )
    assert isinstance(nlpo, NLPOAlg) and isinstance(a2c, A2CAlg) and isinstance(trpo, TRPOAlg)
    assert nlpo.policy.is_seq2seq and nlpo.policy.args.mask_type == "learned_top_p"
    assert nlpo.policy.args.top_mask in (0.5, 0.9) and nlpo.policy.args.target_update_iterations == 20
    assert (a2c.args.gae_lambda, a2c.args.normalize_advantage, a2c.args.use_rms_prop) == (1.0, False, True)
    assert (trpo.args.target_kl, trpo.args.cg_max_steps, trpo.args.n_critic_updates) == (0.01, 15, 10)


def test_stray_comma_of_rl4lms_narrative_qa_is_named() -> None:
    with pytest.raises(ValueError, match=r"yml:68: train_evaluation.metrics\[1\].args.apply_best: .*stray comma"):
        load_config(["--config", str(RL4LMS / "narrative_qa_ppo.yml")])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.y*ml")), ids=lambda path: path.name)
def test_every_file_in_configs_loads(path: Path) -> None:
    assert load_config(["--config", str(path)]).run.config_path == str(path)


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert isinstance(config.alg, PPOAlg)
    assert config.alg.policy.args.generation_kwargs.top_k is None
    assert config.tracking.trackers == ("tensorboard",)
    assert config.run.config_path.endswith("run.yml")


def test_min_length_counts_new_tokens_everywhere(tmp_path: Path) -> None:
    generation = "--alg.policy.args.generation_kwargs"
    config = load(tmp_path, MINIMAL, f"{generation}.min_length=5", "--train_evaluation.generation_kwargs.min_length=4")
    assert isinstance(config.alg, PPOAlg)
    assert config.alg.policy.args.generation_kwargs.min_new_tokens == 5
    assert config.train_evaluation.generation_kwargs == {"min_new_tokens": 4}
    assert "contradict" in fault(tmp_path, MINIMAL, f"{generation}.min_length=5", f"{generation}.min_new_tokens=6")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "n_iters",
            "n_itres",
            "run.yml:8: train_evaluation.n_itres: unknown key; did you mean train_evaluation.n_iters?",
        ),
        ("id: ppo", "id: ppo\n  gamma: 1", "run.yml:6: alg.gamma: unknown key; did you mean alg.args.gamma?"),
        ("coeff: 0.1", "coeff: 0.1, xyz: 1", "alg.kl_div.xyz: unknown key; known here: coeff, target_kl, norm_reward"),
        ("tokenizer", "tokeniser", "run.yml:1: tokeniser: unknown key; did you mean tokenizer?"),
        ("id: ppo", "id: pppo", "run.yml:5: alg.id: unknown id 'pppo'; did you mean 'ppo'?"),
        ("n_iters: 2", "n_iters: 2.5", "train_evaluation.n_iters: expected int >= 0, got 2.5."),
        ("n_iters: 2", "n_iters: '2'", "train_evaluation.n_iters: expected int >= 0, got '2'."),
        ("n_iters: 2", "n_iters: true", "train_evaluation.n_iters: expected int >= 0, got True."),
        ("n_iters: 2", "n_iters: -1", "train_evaluation.n_iters: expected int >= 0, got -1."),
        ("n_iters: 2", "n_iters: ", "train_evaluation.n_iters: expected int >= 0, got nothing (null)."),
        ("coeff: 0.1", "coeff: .nan", "alg.kl_div.coeff: expected float >= 0, got nan."),
        ("coeff: 0.1", "coeff: small", "alg.kl_div.coeff: expected float >= 0, got 'small'."),
        ("coeff: 0.1", "coeff: 0.1, norm_reward: 1", "alg.kl_div.norm_reward: expected true or false, got 1."),
        ("{model_name: gpt2}\nreward", "[gpt2]\nreward", "run.yml:1: tokenizer: expected a section with keys"),
        ("id: ppo", "id: ppo\n  args: {gamma: 1.5}", "alg.args.gamma: expected float > 0 and <= 1, got 1.5."),
        ("id: ppo", "id: ppo\n  args: {normalize_advantage: True,,}", "not valid YAML"),
        ("id: ppo", "id: ppo\n  args: 5", "run.yml:6: alg.args: expected a section with keys, got 5"),
        ("id: dummy_pool", "id: a\n  args: 5", "not valid YAML"),
        ("{id: dummy_pool}", "{id: a, args: 5}", "datapool.args: expected a section with any keys, got 5"),
        ("eval_every: 1", "eval_every: 1, metrics: dates", "train_evaluation.metrics: expected a list, got 'dates'"),
        (
            "eval_every: 1",
            "eval_every: 1, metrics: [{args: {}}]",
            "required but missing: train_evaluation.metrics[0].id",
        ),
        ("eval_every: 1", "eval_every: 1, metrics: [{id: a, arg: {}}]", "metrics[0].arg: unknown key; did you mean"),
    ],
)
def test_faults_name_file_line_path_and_reason(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINIMAL
    assert message in fault(tmp_path, MINIMAL.replace(old, new, 1))


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    assert fault(tmp_path, "alg: {id: ppo}") == (
        "run.yml: required but missing: tokenizer.model_name, datapool.id, alg.kl_div.coeff, "
        "alg.policy.args.model_name, train_evaluation.eval_batch_size, reward_fn.id, train_evaluation.n_iters, "
        "train_evaluation.eval_every"
    )
    assert "alg.model_type, alg.model_name" in fault(tmp_path, "alg: {id: supervised}")
    assert "alg.id" in fault(tmp_path, "tokenizer: {model_name: gpt2}")


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("n_iters", "n_itres").replace("coeff: 0.1", "coeff: -1")
    lines = fault(tmp_path, text).splitlines()
    assert lines[0] == "3 problems:" and len(lines) == 4


def test_same_key_twice(tmp_path: Path) -> None:
    text = MINIMAL.replace("  id: ppo\n", "  id: ppo\n  id: ppo\n")
    assert fault(tmp_path, text) == "run.yml:5: alg.id: given twice, in lines 5 and 6"
    assert "run.yml: reward_fn: given twice, in lines 2 and 9" in fault(tmp_path, MINIMAL + "reward_fn: {id: a}\n")
    text = MINIMAL.replace("numbers}", "numbers, args: {a: 1, a: 2}}")
    assert fault(tmp_path, text) == "run.yml:2: reward_fn.args.a: given twice, in lines 2 and 2"
    text = MINIMAL + "tracking: {a: 1, a: 2, b: 1, b: 1}\n"  # beside other faults
    assert [line.count("given twice") for line in fault(tmp_path, text).splitlines()] == [0, 1, 1]


def test_stray_comma(tmp_path: Path) -> None:
    text = MINIMAL.replace("  id: ppo\n", "  id: ppo\n  args:\n    normalize_advantage: True,\n")
    message = "run.yml:7: alg.args.normalize_advantage: 'True,' is a string that looks like a stray comma after True"
    assert fault(tmp_path, text) == message
    text = MINIMAL + "env: {args: {}}\ntracking:\n  project_name: a,\n"  # no number or truth value without the comma
    assert load(tmp_path, text).tracking.project_name == "a,"
    quoted = MINIMAL.replace("datapool: {id: dummy_pool}", "datapool: {id: dummy_pool, args: {prompt: '1,'}}")
    assert load(tmp_path, quoted).datapool.args == {"prompt": "1,"}


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "1.0e-5", "0.00001", "1E-05"])
def test_spellings_of_a_small_number(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, MINIMAL.replace("id: ppo", f"id: ppo\n  args: {{learning_rate: {text}}}"))
    assert isinstance(config.alg, PPOAlg) and config.alg.args.learning_rate == 1e-5


def test_anchors_and_merges_are_understood(tmp_path: Path) -> None:
    text = MINIMAL.replace("datapool: {id: dummy_pool}", "datapool:\n  id: a\n  args: {<<: {x: 1, y: 1}, y: 2}")
    assert load(tmp_path, text).datapool.args == {"x": 1, "y": 2}
    text = MINIMAL.replace("{id: dummy_pool}", "{id: a, args: {a: &a {x: 1}, b: &b {<<: *a, x: 2}, c: *b, d: *b}}")
    assert load(tmp_path, text).datapool.args["d"] == {"x": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--alg.policy.args.generation_kwargs.num_beams=4"],
            "num_beams: expected 1, got 4. Rollouts have no beam search",
        ),
        (
            ["--alg.policy.args.generation_kwargs.do_sample=false"],
            "do_sample: expected true, got False. Rollouts always",
        ),
        (["--alg.policy.args.generation_kwargs.max_new_tokens=20"], "max_new_tokens (20) must equal env.args.max_ep"),
        (["--alg.policy.args.generation_kwargs.min_new_tokens=600"], "min_new_tokens (600) exceeds env.args.max_epis"),
        (["--alg.policy.args.prompt_truncation_side=right"], "contradicts env.args.prompt_truncation_side (left)"),
        (["--alg.policy.args.top_mask=0.9"], "alg: policy.args.top_mask: PPO has no action mask; use train/nlpo.py"),
        (["--alg.policy.id=maskable_causal_lm_actor_critic_policy"], "PPO has no action mask; use train/nlpo.py"),
        (["--alg.policy.id=casual_lm_actor_critic_policy"], "did you mean 'causal_lm_actor_critic_policy'?"),
        (["--alg.args.n_steps=1"], "one has no spread"),
        (["--alg.id=nlpo"], "alg: policy.args.top_mask is required"),
        (["--alg.id=nlpo", *MASK, "--alg.policy.args.top_mask=2"], "top_mask 2: a probability, at most 1"),
        (["--alg.id=nlpo", "--alg.policy.args.top_mask=0.9"], "top_mask 0.9: a number of tokens, 1 or more"),
        (["--alg.id=a2c", "--alg.policy.args.top_mask=5"], "policy.args.top_mask: A2C has no action mask"),
        (["--alg.id=a2c", "--alg.kl_div.in_loss=true"], "kl_div.in_loss: A2C takes the KL off the reward only"),
        (["--alg.kl_div={coeff: 1, in_loss: true, estimator: k1}"], "its gradient is zero on average; take k2 or k3"),
        (["--alg.kl_div={coeff: 1, in_loss: true, norm_reward: true}"], "with in_loss there is none in them"),
        (["--alg.id=trpo", "--alg.policy.args.gradient_checkpointing=true"], "TRPO differentiates twice"),
        (["--alg.id=grpo", "--env.n_envs=12"], "env.n_envs (12) must be a multiple of alg.args.num_generations (8)"),
        (["--alg.id=grpo", "--alg.args.num_generations=1"], "num_generations 1 makes no group for grpo"),
        (["--alg.id=grpo", *GRPO, "--alg.kl_div.norm_reward=true"], "GRPO are normalised already"),
        (["--alg.id=grpo", *GRPO, "--alg.args.gamma=0.9"], "args.gamma: grpo does not discount"),
        (["--alg.id=grpo", *GRPO, "--alg.policy.args.value_model=shared"], "value_model: GRPO has no critic"),
        (["--alg.id=grpo", *GRPO, "--env.args.bootstrap_truncated=true"], "bootstrap_truncated: GRPO has no critic"),
        (
            ["--alg.id=grpo", *GRPO, "--alg.args={advantage_estimator: rloo, scale_rewards: false}"],
            "scale_rewards: rloo never divides",
        ),
        (["--env.args.mask_truncated=true"], "env.args.mask_truncated needs env.args.terminate_on_eos"),
        (["--reward_fn.missing_eos_penalty=1"], "missing_eos_penalty needs env.args.terminate_on_eos"),
        (["--alg.kl_div={coeff: 0, target_kl: 0.1}"], "coeff, which is 0 and stays so"),
        (["--alg.args.clip_vf_max=true"], "clip_vf_max needs clip_range_vf"),
        (["--alg.args.critic_warmup_iterations=2"], "leaves none of train_evaluation.n_iters (2) for the policy"),
        (["--alg.args.dual_clip=1"], "alg.args.dual_clip: expected float > 1 or null, got 1."),
        (["--alg.policy.args.lora.target_modules=attention"], "target_modules: expected list or all-linear"),
        (["--reward_fn.clip=0"], "reward_fn.clip: expected float > 0 or null, got 0."),
        (
            ["--alg.id=a2c", "--alg.args.n_epochs=2"],
            "alg.args.n_epochs: unknown key; only another alg.id has it; known",
        ),
        (["--env.n_workers=2"], "env: n_workers (2) must not exceed n_envs (1)"),
        (["--train_evaluation.generation_kwargs={post_processing_fn: {id: a}}"], "post_processing_fn is not available"),
        (["--train_evaluation.generation_kwargs={min_length: 1, min_new_tokens: 2}"], "mean the same"),
    ],
)
def test_contradictions(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in fault(tmp_path, MINIMAL, *overrides)


def test_lists_and_words_for_lora(tmp_path: Path) -> None:
    for given, read in (("[q, v]", ("q", "v")), ("all-linear", "all-linear"), ("null", None)):
        alg = load(tmp_path, MINIMAL, f"--alg.policy.args.lora.target_modules={given}").alg
        assert isinstance(alg, PPOAlg) and alg.policy.args.lora is not None
        assert alg.policy.args.lora.target_modules == read
    alg = load(tmp_path, MINIMAL, "--alg.policy.args.lora={r: 4}").alg
    assert isinstance(alg, PPOAlg) and alg.policy.args.lora is not None and alg.policy.args.lora.r == 4


def test_the_estimator_of_the_kl_depends_on_where_it_is(tmp_path: Path) -> None:
    for options, estimator in ((["--alg.id=ppo"], "k1"), (["--alg.id=grpo", *GRPO], "k3")):
        alg = load(tmp_path, MINIMAL, *options).alg
        assert isinstance(alg, PPOAlg | GRPOAlg) and alg.kl_div.estimator == estimator
        assert alg.kl_div.in_loss == (estimator == "k3")
    alg = load(tmp_path, MINIMAL, "--alg.id=grpo", *GRPO, "--alg.args.advantage_estimator=rloo").alg
    assert isinstance(alg, GRPOAlg) and not alg.kl_div.in_loss


def test_supervised_needs_no_reward_but_takes_no_ppo_keys(tmp_path: Path) -> None:
    assert load(tmp_path, SUPERVISED).reward_fn is None
    assert "alg.kl_div: unknown key" in fault(tmp_path, SUPERVISED, "--alg.kl_div.coeff=1")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "ppo"])
def test_a_file_without_sections(tmp_path: Path, text: str) -> None:
    assert "expected sections such as" in fault(tmp_path, text)


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config: Any = load(tmp_path, MINIMAL)
    with pytest.raises(AttributeError):
        config.env.n_envs = 2
