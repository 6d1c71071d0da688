"""What a run does that its user may not expect, said once at its start."""

from typing import Any

from transformers import GenerationConfig

from algorithms.policy import LanguageModel
from train.config import Config, NLPOAlg

# Settings of a checkpoint's generation_config.json that change which tokens `generate` samples.
SAMPLING = (
    "top_k", "top_p", "temperature", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_beams",
)  # fmt: skip


def notices(config: Config, policy: LanguageModel) -> list[str]:
    """One sentence for each."""
    args = config.alg.policy.args
    found = []
    if ignored := _own_settings(policy, args.generation_kwargs):
        found.append(
            f"the generation settings of {args.model_name} do not apply ({ignored}); rollouts sample as "
            "alg.policy.args.generation_kwargs says"
        )
    top_k = args.generation_kwargs.top_k or 0
    if isinstance(config.alg, NLPOAlg) and 0 < top_k <= args.min_tokens_to_keep:
        found.append(
            f"alg.policy.args.min_tokens_to_keep ({args.min_tokens_to_keep}) is not below top_k ({top_k}): the mask "
            "excludes nothing that top_k does not, unless the mask policy has moved away from the policy"
        )
    if isinstance(config.alg, NLPOAlg) and args.mask_type != "topk":
        interval, n_iters = args.target_update_iterations, config.train_evaluation.n_iters
        if 0 < n_iters <= interval:
            found.append(
                f"alg.policy.args.target_update_iterations ({interval}) is not below n_iters ({n_iters}): the mask "
                "policy stays what the policy was at the start"
            )
    if isinstance(config.alg, NLPOAlg) and args.mask_type != "learned_top_p" and args.top_mask == 1:
        found.append(f"a mask of {args.mask_type} with top_mask 1 holds one token beside EOS: little is left to choose")
    return found


def _own_settings(policy: LanguageModel, given: Any) -> str:
    """Sampling settings that the checkpoint brings and that the run does not share, as text."""
    own, plain = getattr(policy.lm, "generation_config", None), GenerationConfig()
    settings = {name: getattr(own, name, None) for name in SAMPLING}
    return ", ".join(
        f"{name} {value}"
        for name, value in settings.items()
        if value not in (None, getattr(plain, name, None), getattr(given, name, None))
    )
