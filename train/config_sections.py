"""The sections of a configuration beside `alg`.

As in train.config, the docstring below a field is its help text and its type carries the range.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from train.config_policy import generate_kwargs
from train.config_types import Count, Natural, NonNegative, Positive, Side


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
    gpus_per_process: Count = 1
    """GPUs that belong to each process, next to each other, for alg.policy.args.device_map."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    gather: Literal["auto", "always", "never"] = "auto"
    """The policy's weights during rollouts and evaluation under ZeRO-3 and FSDP2: always = whole on every rank,
    gathered once; never = layer by layer at each token, all ranks in step; auto = whole if free memory allows it."""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """What only the command line says; no part of the YAML file, nor compared on resume."""

    config_path: str = ""
    """The YAML file."""
    resume: str | None = None
    """auto (newest checkpoint of the run folder), never, a checkpoint's path, or None if not given."""
    overwrite: bool = False
    """Start anew in a run folder that holds another run."""
    init_from: str | None = None
    """A checkpoint or model folder whose weights the run starts from, or None if not given."""
