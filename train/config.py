"""The configuration of a run: one tree of frozen dataclasses, loaded from a YAML file and the command line.

The schema is RL4LMs': its files load unchanged. `load_config` is strict: an unknown key, a wrong type, a value out of
range or two keys that contradict each other is a `ValueError` that names file, line and dotted path. The dotted path
of a key is its attribute path: `alg.args.n_steps` in YAML is `config.alg.args.n_steps` here. The docstring below a
field is its help text; its type carries the range.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from train.config_alg import A2CAlg, Algorithm, GRPOAlg, NLPOAlg, PPOAlg, RLAlg, SupervisedAlg, TRPOAlg
from train.config_cli import apply_overrides, help_text, parse_args
from train.config_loader import build, read_yaml
from train.config_sections import (
    Component,
    Distributed,
    Env,
    Generation,
    Reward,
    RunArgs,
    Tokenizer,
    Tracking,
    TrainEvaluation,
)
from train.config_types import flatten

__all__ = ["A2CAlg", "Config", "GRPOAlg", "NLPOAlg", "PPOAlg", "RLAlg", "SupervisedAlg", "TRPOAlg", "load_config"]

# What a reinforcement learning run needs and a supervised one does not.
RL_REQUIRED = ("reward_fn.id", "train_evaluation.n_iters", "train_evaluation.eval_every")
# May differ between a checkpoint and the run that resumes it: they change how long, how often and where, not what is
# learnt. Each is a prefix of dotted paths.
FREE_ON_RESUME: tuple[str, ...] = (
    "train_evaluation.n_iters",
    "train_evaluation.save_every",
    "train_evaluation.eval_every",
    "train_evaluation.keep_last",
    "train_evaluation.n_logged_samples",
    "env.n_workers",
    "env.timeout",
    "env.max_worker_failures",
    "alg.args.verbose",
    "alg.policy.args.apply_model_parallel",
    "alg.policy.args.device_map",
    "alg.policy.args.max_memory",
    "alg.policy.args.reference_device",
    "tracking.",
    "distributed.",
    "generation.",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    tokenizer: Tokenizer
    """Text to tokens."""
    datapool: Component
    """The task: prompts and references."""
    reward_fn: Reward | None = None
    """The reward. Required but in supervised training."""
    env: Env = field(default_factory=Env)
    """Environments and the processes that host them."""
    alg: Algorithm
    """The algorithm; its keys depend on alg.id."""
    train_evaluation: TrainEvaluation
    """Length of the run, evaluation and checkpoints."""
    tracking: Tracking = field(default_factory=Tracking)
    """Where results go."""
    distributed: Distributed = field(default_factory=Distributed)
    """Ranks."""
    generation: Generation = field(default_factory=Generation)
    """How sharded weights come together to generate."""
    run: RunArgs = field(default_factory=RunArgs, metadata={"cli_only": True})
    """The command line."""

    def __post_init__(self) -> None:
        if isinstance(self.alg, RLAlg):
            if self.reward_fn is None:
                raise ValueError("reward_fn is required")
            self._check_rollouts(self.alg)
            self._check_batch()

    def _check_rollouts(self, alg: RLAlg) -> None:
        limits, policy, generation = self.env.args, alg.policy.args, alg.policy.args.generation_kwargs
        if generation.max_new_tokens not in (None, limits.max_episode_length):
            raise ValueError(
                f"alg.policy.args.generation_kwargs.max_new_tokens ({generation.max_new_tokens}) must equal "
                f"env.args.max_episode_length ({limits.max_episode_length}): only the end of an episode is rewarded"
            )
        if generation.min_new_tokens > limits.max_episode_length:
            raise ValueError(
                f"alg.policy.args.generation_kwargs.min_new_tokens ({generation.min_new_tokens}) exceeds "
                f"env.args.max_episode_length ({limits.max_episode_length})"
            )
        if policy.prompt_truncation_side not in (None, limits.prompt_truncation_side):
            raise ValueError(
                f"alg.policy.args.prompt_truncation_side ({policy.prompt_truncation_side}) contradicts "
                f"env.args.prompt_truncation_side ({limits.prompt_truncation_side}); leave the former out"
            )

        if not limits.terminate_on_eos:
            for key, given in (
                ("env.args.mask_truncated", limits.mask_truncated),
                ("reward_fn.missing_eos_penalty", self.reward_fn and self.reward_fn.missing_eos_penalty),
            ):
                if given:
                    raise ValueError(f"{key} needs env.args.terminate_on_eos: without it no response ends with EOS")
        if alg.kl_div.target_kl is not None and alg.kl_div.coeff == 0:
            raise ValueError(
                "alg.kl_div.target_kl multiplies alg.kl_div.coeff, which is 0 and stays so; give a first one"
            )

    def _check_batch(self) -> None:
        alg = self.alg
        if isinstance(alg, GRPOAlg):
            if self.env.args.bootstrap_truncated:
                raise ValueError(
                    "env.args.bootstrap_truncated: GRPO has no critic whose value could follow; leave it out"
                )
            if self.env.n_envs % alg.args.num_generations:
                raise ValueError(
                    f"env.n_envs ({self.env.n_envs}) must be a multiple of alg.args.num_generations "
                    f"({alg.args.num_generations}): each prompt is answered so many times at once"
                )
            if alg.args.num_generations == 1 and alg.args.advantage_estimator != "reinforce_plus_plus":
                raise ValueError(f"alg.args.num_generations 1 makes no group for {alg.args.advantage_estimator}")
            return
        if isinstance(alg, PPOAlg | NLPOAlg) and 0 < self.train_evaluation.n_iters <= alg.args.critic_warmup_iterations:
            raise ValueError(
                f"alg.args.critic_warmup_iterations ({alg.args.critic_warmup_iterations}) leaves none of "
                f"train_evaluation.n_iters ({self.train_evaluation.n_iters}) for the policy"
            )
        if isinstance(alg, SupervisedAlg) or not getattr(alg.args, "normalize_advantage", False):
            return
        if isinstance(alg, PPOAlg | NLPOAlg) and alg.args.advantage_scope == "minibatch" and alg.args.batch_size == 1:
            raise ValueError(
                "alg.args.batch_size 1 leaves nothing of an advantage that is normalised over its minibatch; make it "
                "larger, or set alg.args.advantage_scope to batch or alg.args.normalize_advantage to false"
            )
        if self.env.n_envs * alg.args.n_steps == 1:
            raise ValueError("alg.args.normalize_advantage needs env.n_envs * alg.args.n_steps > 1: one has no spread")

    def to_dict(self) -> dict[str, Any]:
        """The resolved tree as plain values, without the command line: to save with the run."""
        tree = asdict(self)
        del tree["run"]
        plain: dict[str, Any] = json.loads(json.dumps(tree, default=str))
        return plain

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Dotted paths of the keys that differ from a saved `to_dict`, but for those in FREE_ON_RESUME.

        n_iters counts where the learning rate's schedule depends on it.
        """
        ours, theirs = flatten(self.to_dict()), flatten(other)
        free = FREE_ON_RESUME
        if isinstance(self.alg, RLAlg) and self.alg.args.lr_schedule != "constant":
            free = tuple(path for path in free if path != "train_evaluation.n_iters")
        same = {path for path in ours.keys() & theirs.keys() if ours[path] == theirs[path]}
        return sorted(path for path in (ours.keys() | theirs.keys()) - same if not path.startswith(free))


def load_config(argv: Sequence[str] | None = None, algorithm: str | None = None) -> Config:
    """The configuration that a command line (default: this process') asks for. algorithm: alg.id of the script, whose
    keys alone its --help shows.

    Raises ValueError that names every fault found. Prints the help and raises SystemExit for --help.
    """
    args = parse_args(sys.argv[1:] if argv is None else argv, Config)
    if args.help:
        print(help_text(Config, algorithm))
        raise SystemExit(0)
    if not args.config:
        raise ValueError("--config FILE is required; --help lists all options")
    document = read_yaml(args.config)
    apply_overrides(document, args.overrides)
    alg = document.data.get("alg")
    supervised = isinstance(alg, dict) and alg.get("id") == "supervised"
    config = build(Config, document, () if supervised else RL_REQUIRED)
    run = RunArgs(config_path=args.config, resume=args.resume, overwrite=args.overwrite, init_from=args.init_from)
    return replace(config, run=run)
