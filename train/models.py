"""The models of a run: loaded, put where they run, and the optimizer of those that are trained."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from algorithms import adapters
from algorithms.models import load_actor_critic, load_language_model, load_reference, parameter_groups
from algorithms.nlpo import copy_weights
from algorithms.policy import ActorCritic, LanguageModel
from envs import registry
from envs.streams import generator
from train import checkpoint, frozen, placement
from train.config import A2CAlg, Config, GRPOAlg, NLPOAlg, TRPOAlg
from train.config_args import CriticArgs
from train.distributed import Ranks
from train.loading import check_model_name


@dataclass(kw_only=True)
class Models:
    """actor_critic: what is trained. frozen: the "reference", but for LoRA, and NLPO's "mask_model" if it has one."""

    actor_critic: ActorCritic
    frozen: dict[str, LanguageModel] = field(default_factory=dict)


def load_models(config: Config, ranks: Ranks) -> Models:
    """All models of a run on the CPU, as they are before training. Raises ValueError for a model that does not fit."""
    args = config.alg.policy.args
    check_model_name(args.model_name, ("config.json", adapters.CONFIG_FILE))
    check_model_name(adapters.base_of(args.model_name))
    torch.manual_seed(int(generator(config.alg.args.seed, "model").integers(2**62)))
    options = model_options(config)
    models = Models(
        actor_critic=load_actor_critic(
            args.model_name,
            value_model="none" if isinstance(config.alg, GRPOAlg) else args.value_model,
            gradient_checkpointing=args.gradient_checkpointing,
            **options,
        )
    )
    if not args.lora:
        models.frozen["reference"] = load_reference(args.model_name, **options)
    if isinstance(config.alg, NLPOAlg) and args.mask_type != "topk":
        mask_model = load_language_model(args.model_name, **options).requires_grad_(False)
        copy_weights(models.actor_critic.policy, mask_model)
        models.frozen["mask_model"] = mask_model
    return models


def model_options(config: Config) -> dict[str, Any]:
    """Keyword arguments with which policy, critic, reference and mask policy are all loaded."""
    policy = config.alg.policy
    return {
        "seq2seq": policy.is_seq2seq,
        "decoder_start_token_id": config.env.args.context_start_token if policy.is_seq2seq else None,
        "dtype": getattr(torch, policy.args.dtype),
        "logits_chunk_mb": policy.args.logits_chunk_mb,
        "lora": policy.args.lora,
    }


def start_from(models: Models, folder: Path) -> None:
    """--init_from: puts the weights of a checkpoint into models that were just loaded; the reference stays.

    folder: a checkpoint, or a run's folder, whose newest one is taken. Raises FileNotFoundError if there is none,
    ValueError if it is one of other models.
    """
    path = folder
    if not (path / "state.json").is_file():
        saved = checkpoint.saved_iterations(folder / "checkpoints")
        if not saved:
            raise FileNotFoundError(
                f"--init_from {folder}: neither a checkpoint nor the folder of a run with one; for the weights of a "
                "model's folder set alg.policy.args.model_name"
            )
        path = checkpoint.folder_of(folder / "checkpoints", saved[-1])
    modules: dict[str, torch.nn.Module] = {"model": models.actor_critic, **models.frozen}
    modules.pop("reference", None)
    for name, module in modules.items():
        file = path / f"{name}.safetensors"
        if file.is_file():
            try:
                adapters.load_trainable_state(module, load_file(str(file)))
            except ValueError as error:
                raise ValueError(f"--init_from {path}: {error}") from error
        elif isinstance(module, LanguageModel):  # a mask policy, after an algorithm that has none
            copy_weights(models.actor_critic.policy, module)


def place_models(
    config: Config,
    ranks: Ranks,
    models: Models,
    gpus: Sequence[torch.device],
    folder: Path,
    stack: contextlib.ExitStack,
) -> None:
    """Puts models where they run, but for what `Ranks.prepare` will wrap. Comes before the optimizer is made."""
    args, kept = config.alg.policy.args, dict(models.frozen)
    if args.reference_quantization is not None:
        frozen.shrink(models.frozen["reference"], args.reference_quantization, ranks.device)
    if args.reference_device is not None:
        ranks.strategy.cast(models.frozen["reference"])
        aside = folder / "offload" / f"rank_{ranks.process_index}"
        frozen.offload(kept.pop("reference"), args.reference_device, ranks.device, aside, stack)
    if not placement.spread(config, models.actor_critic, kept, gpus, ranks.broadcast):
        for name, module in kept.items():
            models.frozen[name] = ranks.strategy.place(module)  # type: ignore[assignment]


def make_optimizer(config: Config, model: ActorCritic) -> torch.optim.Optimizer:
    """The optimizer of policy and critic, with a learning rate for each; TRPO's is of the critic alone."""
    alg, policy = config.alg, config.alg.policy.args
    critic_rate = alg.args.critic_learning_rate if isinstance(alg.args, CriticArgs) else None
    groups = parameter_groups(
        model,
        learning_rate=alg.args.learning_rate,
        critic_learning_rate=alg.args.learning_rate if critic_rate is None else critic_rate,
        weight_decay=policy.weight_decay,
    )
    if isinstance(alg, TRPOAlg):
        groups = [group for group in groups if group["name"].startswith("critic")]
    name, kwargs = policy.optimizer_class or "AdamW", policy.optimizer_kwargs
    if policy.optimizer_class is None and isinstance(alg, A2CAlg) and alg.args.use_rms_prop:
        name, kwargs = "RMSprop", {"alpha": 0.99, "eps": alg.args.rms_prop_eps, **kwargs}
    optimizers = {name: f"torch.optim:{name}" for name in ("AdamW", "Adam", "RMSprop", "SGD", "Adagrad", "Adadelta")}
    for key, place in (("lr", "alg.args.learning_rate"), ("weight_decay", "alg.policy.args.weight_decay")):
        if key in kwargs:
            raise ValueError(f"alg.policy.args.optimizer_kwargs.{key}: the place for it is {place}")
    kind = registry.resolve(name, optimizers, "alg.policy.args.optimizer_class")
    try:
        optimizer: torch.optim.Optimizer = kind(groups, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"alg.policy.args.optimizer_kwargs {policy.optimizer_kwargs}: {error}") from error
    return optimizer


@contextlib.contextmanager
def without_gradient(module: torch.nn.Module) -> Any:
    """What is wrapped in here is wrapped as if these weights were not trained: by no optimizer they are."""
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
