"""How a script ends: a user's mistake is one clear line, anything else a traceback."""

import os
import sys
from collections.abc import Callable

from envs.pool import EnvError, WorkerError

# EnvError and WorkerError come from a user's reward or task; their message holds the worker's own traceback. A
# FloatingPointError names the samples or the gradient that is not finite.
MENDABLE = (ValueError, FileNotFoundError, FloatingPointError, EnvError, WorkerError)


def expect_algorithm(given: str, *own: str) -> None:
    """Raises ValueError if alg.id is none of the script's own, naming the script for it."""
    if given not in own:
        raise ValueError(f"alg.id is {given}, and this script is for {' and '.join(own)}: use train/{given}.py")


def run_script(main: Callable[[], None]) -> None:
    """Runs `main`; what a user can mend becomes its message and exit code 2 (with DEBUG=1 the traceback)."""
    try:
        main()
    except MENDABLE as error:
        if os.environ.get("DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint", file=sys.stderr, flush=True)
        sys.exit(130)
