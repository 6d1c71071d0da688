"""Losses, advantages, sampling, the policy: torch and transformers, nothing of ranks, configs or environments."""
