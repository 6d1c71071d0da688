"""The frozen reference in less memory: weights that wait on the CPU or on disk (exact), or in 8 or 4 bits (not exact).

Neither is for LoRA, whose reference is the policy's own base.
"""

import contextlib
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from algorithms.policy import LanguageModel
from train.config_policy import PolicyArgs

_BLOCK = 64  # inputs that share a scale in NF4
_QUANTIZED = ("Int8Params", "Params4bit")  # classes of bitsandbytes, which may not be there


def check_frozen(args: PolicyArgs, strategy: str) -> None:
    """Raises ValueError for keys of the reference that contradict each other or the strategy, or lack a package."""
    device, bits = args.reference_device, args.reference_quantization
    given = "alg.policy.args.reference_" + ("device" if device is not None else "quantization")
    if args.lora is not None and (device is not None or bits is not None):
        raise ValueError(f"{given}: with lora the reference is the policy's own base and takes no memory; leave it out")
    if device is not None and bits is not None:
        raise ValueError(
            "alg.policy.args.reference_quantization: quantised weights cannot wait elsewhere; leave out "
            "reference_device, or, to be exact, reference_quantization"
        )
    if bits is None:
        return
    if strategy not in ("single", "ddp"):
        raise ValueError(
            f"alg.policy.args.reference_quantization: {strategy} cuts or casts the reference's weights, and quantised "
            "ones bear neither; leave it out, or take reference_device"
        )
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "alg.policy.args.reference_quantization needs bitsandbytes: pip install 'rl4lms-scale[quantization]'"
        )


@contextlib.contextmanager
def _out_of_space(folder: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise ValueError(f"alg.policy.args.reference_device disk: {folder} cannot be written: {error}") from error


def offload(
    reference: LanguageModel,
    where: Literal["cpu", "disk"],
    device: torch.device,
    folder: Path,
    stack: contextlib.ExitStack,
) -> None:
    """Lets the weights wait on the CPU or on disk; each layer fetches its own to `device` for the time of its forward.

    The reference is never moved or wrapped afterwards. folder: made for this process, which alone uses it, and removed
    when the stack closes. Raises ValueError if the disk has no room.
    """
    lm: Any = reference.lm
    if device.type == "cpu":
        device = torch.device("cpu")  # a rank's is called cpu:0, which the loading of weights does not know
    if where == "cpu":
        cpu_offload(lm, execution_device=device)
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed: accelerate would take its weights for ours
    stack.callback(_remove, folder)
    needed = sum(x.nbytes for x in lm.state_dict().values())
    with _out_of_space(folder):
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if needed > free:  # mapped files would not say so: the process would be killed by SIGBUS
            raise ValueError(
                f"alg.policy.args.reference_device disk: the reference takes {needed / 2**30:.2f} GiB, and "
                f"{folder} has {free / 2**30:.2f} GiB free; set tracking.output_dir to another disk, or "
                "reference_device to cpu"
            )
        disk_offload(lm, folder, execution_device=device)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # that of all ranks, if it is empty
        folder.parent.rmdir()


def is_quantized(model: nn.Module) -> bool:
    """Whether `shrink` was here."""
    return any(type(parameter).__name__ in _QUANTIZED for parameter in model.parameters())


@torch.no_grad()
def shrink(reference: LanguageModel, bits: Literal["int8", "int4"], device: torch.device | str = "cpu") -> None:
    """Quantises the weights of linear layers, in place and layer by layer on the way to `device`.

    int8: LLM.int8() (Dettmers et al. 2022); int4: NF4 (Dettmers et al. 2023). The head, embeddings, what transformers
    keeps in float32 (T5's wo) and layers with an input width that is no multiple of 64 stay as they are. Raises
    ValueError for a model with little to quantise, or one that needs its weights for more than calling the layer.
    """
    lm, key, kind = reference.lm, "alg.policy.args.reference_quantization", type(reference.lm).__name__
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line at each product
    before, layers = _probe(reference), _quantizable(lm)
    tables = [module.weight for module in lm.modules() if isinstance(module, nn.Embedding)]
    outside = {id(weight) for weight in [*tables, lm.get_output_embeddings().weight]}
    inside = sum(weight.numel() for weight in lm.parameters() if id(weight) not in outside)
    if 2 * sum(layer.weight.numel() for layer in layers.values()) < inside:
        raise ValueError(
            f"{key}: most weights of {kind} are not in linear layers whose input width is a multiple of {_BLOCK}; "
            "leave it out, or take reference_device"
        )
    for name, layer in layers.items():
        lm.set_submodule(name, _quantized(layer, bits, device))
    lm.to(device)
    try:
        distance = float((_probe(reference) - before).norm() / before.norm())
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"{key}: {kind} does not run with quantised layers ({error}); leave it out") from error
    if not distance < 1:
        raise ValueError(f"{key}: {kind} computes something else with quantised layers; leave it out")


def _quantizable(lm: PreTrainedModel) -> dict[str, Any]:
    spared, head = set(lm._keep_in_fp32_modules or ()), lm.get_output_embeddings()
    found: dict[str, Any] = {}
    for name, layer in lm.named_modules():
        # Not subclasses, whose weight is used by others (that of nn.MultiheadAttention).
        if type(layer) in (nn.Linear, Conv1D) and layer is not head and not spared & set(name.split(".")):
            width = layer.weight.shape[0 if type(layer) is Conv1D else 1]
            if width % _BLOCK == 0:
                found[name] = layer
    return found


def _quantized(layer: Any, bits: str, device: torch.device | str) -> nn.Module:
    """A layer of bitsandbytes in place of a Linear or a Conv1D (GPT-2's, which holds its weight transposed)."""
    import bitsandbytes as bnb

    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    n_out, n_in = weight.shape
    new: Any
    if bits == "int8":
        new = bnb.nn.Linear8bitLt(n_in, n_out, layer.bias is not None, has_fp16_weights=False, threshold=6.0)
        new.weight = bnb.nn.Int8Params(weight.cpu().contiguous(), requires_grad=False, has_fp16_weights=False)
    else:
        new = bnb.nn.Linear4bit(n_in, n_out, layer.bias is not None, compute_dtype=weight.dtype, quant_type="nf4")
        new.weight = bnb.nn.Params4bit(weight.cpu().contiguous(), requires_grad=False, quant_type="nf4")
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.clone(), requires_grad=False)
    new.requires_grad_(False).eval()
    moved: nn.Module = new.to(device)
    return moved


def _probe(reference: LanguageModel) -> Tensor:
    """Log-probabilities, less their mean, of what follows eight tokens: float32 [8, V] on the CPU."""
    device = reference.lm.get_input_embeddings().weight.device
    ids = torch.arange(8, device=device).remainder(reference.vocab_size)[None]
    everything = torch.ones_like(ids)
    logits = reference.token_logits(ids, everything, ids, everything.bool()).log_softmax(1).cpu()
    return logits - logits.mean(1, keepdim=True)
