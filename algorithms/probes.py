"""What a language model does, found out by running it once on two tokens rather than by a list of families."""

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def check_causal(lm: PreTrainedModel) -> None:
    """Raises ValueError if a later token changes what an earlier one predicts, as in BERT without is_decoder."""
    ids = torch.tensor([[0, 1], [0, 0]], device=lm.device)
    was_training = lm.training
    first = lm.eval()(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, 0]
    lm.train(was_training)
    rounding = 1e-5 if first.dtype == torch.float32 else 1e-2
    if (first[0] - first[1]).abs().max() > rounding * first.abs().max():
        raise ValueError(f"{type(lm).__name__} is not causal: its tokens attend to later ones")


@torch.no_grad()
def head_is_plain(lm: PreTrainedModel) -> bool:
    """Whether logits are exactly head(trunk(ids)), seen by running both on two tokens.

    The head gets states a thousand times too large: soft-capping hardly changes the small logits of a fresh model.
    """
    head = lm.get_output_embeddings()
    if head is None or lm.base_model is lm:
        return False
    ids = torch.arange(2, device=lm.device)[None]
    was_training = lm.training
    lm.eval()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    hook = head.register_forward_pre_hook(lambda module, args: (args[0] * 1000, *args[1:]))
    try:
        whole = lm(**inputs).logits
    finally:
        hook.remove()
    parts = head(lm.base_model(**inputs).last_hidden_state * 1000)
    lm.train(was_training)
    return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-4, atol=1e-5)
