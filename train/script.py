"""How a script ends: a user's mistake is one clear line, anything else a traceback."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from envs.pool import EnvError, WorkerError
from envs.rewards.contract import RewardError
from train.launching import LaunchError

# EnvError and WorkerError come from a user's reward or task; their message holds the worker's own traceback. A
# FloatingPointError names the samples or the gradient that is not finite.
MENDABLE = (ValueError, FileNotFoundError, FloatingPointError, EnvError, WorkerError, RewardError, LaunchError)


def expect_algorithm(given: str, *own: str) -> None:
    """Raises ValueError if alg.id is none of the script's own, naming the script for it."""
    if given not in own:
        raise ValueError(
            f"alg.id is {given}, and this script is for {' and '.join(own)}: use train/{given}.py, or another file, or "
            f"--alg.id={own[0]} with keys that it has"
        )


def expect_own_package() -> None:
    """Raises LaunchError if this script runs with the code of another copy of the repository: `accelerate launch
    train/x.py` imports the package from where it is installed, not from beside the script."""
    script, package = Path(getattr(sys.modules["__main__"], "__file__", None) or "x").resolve(), Path(__file__).parent
    if script.parent.name == "train" and script.parent != package.resolve():
        raise LaunchError(
            f"{script} would run with the code in {package}, where this Python environment has it installed: "
            "use an environment of this folder (make test makes one), or accelerate launch --module train.…"
        )


def run_script(main: Callable[[], None]) -> None:
    """Runs `main`; what a user can mend becomes its message and exit code 2 (with DEBUG=1 the traceback)."""
    try:
        expect_own_package()
        main()
    except MENDABLE as error:
        if os.environ.get("DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint", file=sys.stderr, flush=True)
        sys.exit(130)
