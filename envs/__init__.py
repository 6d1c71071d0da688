"""Token-level text environments, their workers, and the tasks, rewards and metrics that plug into them.

Nothing in this package imports torch, transformers or accelerate when it is loaded: environments run in small worker
processes that have to start in a fraction of a second.
"""
