"""Finding and checking what a configuration names: model, tokenizer, lengths. An error names the fix."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlparse

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from algorithms.policy import LanguageModel
from train.config import Config

# One of them has to be there: without any, transformers makes a tokenizer of one token, and every text is empty.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model_name(name: str, files: Sequence[str] = ("config.json",)) -> None:
    """Raises ValueError at once for a folder that is not there, or a hub name that can be neither found nor fetched.

    `files`: at least one of them has to be there. Without this check, a mistyped folder is looked for on the hub, with
    retries of most of a minute.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            raise ValueError(f"{name} is a folder without {' or '.join(files)}: save_pretrained writes it")
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/"):
        raise ValueError(f"there is no folder {name} (looked for it in {Path.cwd()})")
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    cached = any(cached_file(name, file, local_files_only=True, **quietly) for file in files)
    if not cached and not _hub_answers():
        raise ValueError(
            f"{name} is neither a folder here nor in the local hub cache, and the hub cannot be reached: "
            "give a folder, or download it first where there is a network"
        )


def _hub_answers() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    hub = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((hub.hostname, hub.port or 443), timeout=1.0):
            return True
    except OSError:
        return False


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token. Raises ValueError if it lacks what the run needs."""
    spec = config.tokenizer
    check_model_name(spec.model_name, TOKENIZER_FILES)
    tokenizer = AutoTokenizer.from_pretrained(
        spec.model_name, padding_side=spec.padding_side, truncation_side=spec.truncation_side
    )
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer.model_name: {spec.model_name} has no fast tokenizer (tokenizer.json), which workers need"
        )
    if tokenizer.eos_token_id is None and config.env.args.terminate_on_eos:
        raise ValueError(
            f"tokenizer.model_name: {spec.model_name} has no EOS token, but env.args.terminate_on_eos is true; "
            "set tokenizer.eos_token and save it, or set terminate_on_eos to false"
        )
    if tokenizer.pad_token_id is None:
        if not spec.pad_token_as_eos_token or tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer.model_name: {spec.model_name} has no padding token; set tokenizer.pad_token_as_eos_token "
                "to true (the tokenizer needs an EOS token for that), or save the tokenizer with one"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def prompt_limit(config: Config, tokenizer: PreTrainedTokenizerBase, policy: LanguageModel) -> int:
    """Longest prompt in tokens. Raises ValueError if prompt and response do not fit into the model.

    In a causal model they share its positions; of a sequence-to-sequence model encoder and decoder have their own.
    """
    args, is_seq2seq = config.env.args, policy.start_token_id is not None
    positions = getattr(policy.lm.config.get_text_config(), "max_position_embeddings", None)
    evaluated = (config.train_evaluation.generation_kwargs or {}).get("max_new_tokens") or 0
    name, longest = "env.args.max_episode_length", args.max_episode_length
    if evaluated > longest:
        name, longest = "train_evaluation.generation_kwargs.max_new_tokens", evaluated
    # A decoder is given its start token before the response.
    taken = 0 if is_seq2seq else longest + (args.context_start_token is not None)
    if is_seq2seq and positions is not None and longest + 1 > positions:
        raise ValueError(f"{name} ({longest}) and the start token exceed the decoder's {positions} positions")
    room = None if positions is None else positions - taken
    if args.max_prompt_length is None:
        known = [limit for limit in (tokenizer.model_max_length, room) if limit is not None and limit < 10**9]
        if not known or min(known) < 1:
            fault = f"{name} ({longest}) leaves no room for a prompt in the model's {positions} positions"
            raise ValueError(fault if known else "env.args.max_prompt_length is needed: nothing else limits prompts")
        return min(known)
    if room is not None and args.max_prompt_length > room:
        response = "" if is_seq2seq else f" + {name} ({longest})"
        raise ValueError(
            f"env.args.max_prompt_length ({args.max_prompt_length}){response} exceed the model's "
            f"{positions} positions; shorten one of them"
        )
    return args.max_prompt_length
