"""Joins the other ranks and says who is there; with the argument `raise`, rank 1 then fails while rank 0 waits."""

import contextlib
import sys

from train.distributed import Ranks

with contextlib.ExitStack() as stack:
    ranks = Ranks(timeout_s=600)
    stack.callback(ranks.finish)
    print(f"rank {ranks.rank} of {ranks.world_size}", flush=True)
    if "raise" in sys.argv and ranks.rank == 1:
        raise ArithmeticError("rank 1 fails")
    ranks.barrier()
