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
from typing import Any, Literal

from train.config_alg import A2CAlg, Algorithm, GRPOAlg, NLPOAlg, PPOAlg, RLAlg, SupervisedAlg, TRPOAlg
from train.config_cli import apply_overrides, help_text, parse_args
from train.config_loader import build, read_yaml
from train.config_policy import generate_kwargs
from train.config_types import Count, Natural, NonNegative, Positive, Side, flatten

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
    "tracking.",
    "distributed.",
)


@dataclass(frozen=True, kw_only=True)
class Component:
    """Something that users can bring themselves: a task, a reward or a metric."""

    id: str
    """Registered name, or the path `module:attr` of your own."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of it; any key, `args.KEY` on the command line."""


@dataclass(frozen=True, kw_only=True)
class Reward(Component):
    scale: Positive = 1.0
    """Multiplies the rewards that training sees; those that are logged stay as they are."""
    clip: Positive | None = None
    """Then each is limited to [-clip, clip]; null = no limit."""
    missing_eos_penalty: NonNegative = 0.0
    """Then taken off the last reward of a response that ended without EOS."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    model_name: str
    """Hub name or folder of the tokenizer."""
    padding_side: Literal["left"] = "left"
    """Prompts are always padded on the left; kept for RL4LMs' files."""
    truncation_side: Side = "left"
    """Side on which texts are cut in supervised training; prompts in RL: env.args.prompt_truncation_side."""
    pad_token_as_eos_token: bool = True
    """Use EOS as padding token if the tokenizer has none of its own."""
    max_length: Count | None = None
    """Longest prompt in supervised training, in tokens; null = the tokenizer's limit."""


@dataclass(frozen=True, kw_only=True)
class EnvArgs:
    max_prompt_length: Count | None = None
    """Longest prompt, in tokens; longer ones are cut. null = the tokenizer's limit."""
    max_episode_length: Count = 512
    """Longest response, in tokens: an episode is truncated there."""
    priority_scale: NonNegative = 0.0
    """Exponent of the samples' priorities when prompts are drawn; 0 = uniformly."""
    terminate_on_eos: bool = False
    """End an episode at EOS."""
    context_start_token: Natural | None = None
    """Causal models: token id put after the prompt. Seq2seq: first input of the decoder; null = the model's own."""
    prompt_truncation_side: Side = "left"
    """Side on which a prompt that is too long is cut."""
    bootstrap_truncated: bool = False
    """Value the state after a truncated episode with the critic instead of with 0."""
    mask_truncated: bool = False
    """Leave the tokens of truncated episodes out of the losses."""


@dataclass(frozen=True, kw_only=True)
class Env:
    n_envs: Count = 1
    """Environments per rank: episodes sampled side by side."""
    n_workers: Count | None = None
    """Worker processes per rank that host them; null = one per environment, at most the rank's CPU cores."""
    timeout: Positive = 120.0
    """Longest wait for an answer of a worker, in seconds; then it is replaced."""
    max_worker_failures: Count = 3
    """Failures in a row after which the run stops."""
    args: EnvArgs = field(default_factory=EnvArgs)
    """The token-level environment."""

    def __post_init__(self) -> None:
        if self.n_workers is not None and self.n_workers > self.n_envs:
            raise ValueError(f"n_workers ({self.n_workers}) must not exceed n_envs ({self.n_envs})")


@dataclass(frozen=True, kw_only=True)
class TrainEvaluation:
    eval_batch_size: Count
    """Samples per call of `generate` and rank."""
    n_iters: Natural = 0
    """Iterations of the run; 0 = evaluate only. Required but in supervised training."""
    eval_every: Natural = 0
    """Iterations between evaluations; 0 = only before and after. Required but in supervised training."""
    save_every: Natural = 20
    """Iterations between checkpoints; 0 = only at the end."""
    keep_last: Count = 2
    """Checkpoints kept beside the best one."""
    best_metric: str = "reward"
    """Metric on the val split that decides which checkpoint is the best."""
    higher_is_better: bool = True
    """Whether more of it is better."""
    max_eval_samples: Count | None = None
    """Samples evaluated per split; null = all."""
    n_logged_samples: Natural = 10
    """Samples per evaluation that are logged with their responses."""
    metrics: tuple[Component, ...] = ()
    """List of {id, args}: what to measure."""
    generation_kwargs: dict[str, Any] | None = None
    """Keyword arguments of `generate` in evaluation; any key; null = as in rollouts. min_length counts new tokens."""

    def __post_init__(self) -> None:
        if self.generation_kwargs is not None:
            object.__setattr__(self, "generation_kwargs", generate_kwargs(self.generation_kwargs))


@dataclass(frozen=True, kw_only=True)
class Tracking:
    output_dir: str = "runs"
    """Folder of all runs; this one's is output_dir/project_name/experiment_name."""
    project_name: str = "rl4lm_exps"
    """Group of runs."""
    experiment_name: str = "rl4lm_experiment"
    """Name of this run."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go beside the run folder's files: names of accelerate's trackers."""


@dataclass(frozen=True, kw_only=True)
class Distributed:
    timeout_s: Positive = 1800.0
    """Longest wait of a rank for the others, in seconds."""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """What only the command line says; no part of the YAML file, nor compared on resume."""

    config_path: str = ""
    """The YAML file."""
    resume: str | None = None
    """auto (newest checkpoint of the run folder), never, a checkpoint's path, or None if not given."""
    overwrite: bool = False
    """Start anew in a run folder that holds another run."""


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

    def _check_batch(self) -> None:
        alg = self.alg
        if isinstance(alg, GRPOAlg):
            if self.env.n_envs % alg.args.num_generations:
                raise ValueError(
                    f"env.n_envs ({self.env.n_envs}) must be a multiple of alg.args.num_generations "
                    f"({alg.args.num_generations}): each prompt is answered so many times at once"
                )
            if alg.args.num_generations == 1 and alg.args.advantage_estimator != "reinforce_plus_plus":
                raise ValueError(f"alg.args.num_generations 1 makes no group for {alg.args.advantage_estimator}")
            return
        assert not isinstance(alg, SupervisedAlg)
        if not alg.args.normalize_advantage:
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


def load_config(argv: Sequence[str] | None = None) -> Config:
    """The configuration that a command line (default: this process') asks for.

    Raises ValueError that names every fault found. Prints the help and raises SystemExit for --help.
    """
    args = parse_args(sys.argv[1:] if argv is None else argv, Config)
    if args.help:
        print(help_text(Config))
        raise SystemExit(0)
    if not args.config:
        raise ValueError("--config FILE is required; --help lists all options")
    document = read_yaml(args.config)
    apply_overrides(document, args.overrides)
    alg = document.data.get("alg")
    supervised = isinstance(alg, dict) and alg.get("id") == "supervised"
    config = build(Config, document, () if supervised else RL_REQUIRED)
    return replace(config, run=RunArgs(config_path=args.config, resume=args.resume, overwrite=args.overwrite))
