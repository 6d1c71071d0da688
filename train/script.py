"""How a script ends: a user's mistake is one clear line, anything else a traceback."""

import os
import sys
from collections.abc import Callable


def run_script(main: Callable[[], None]) -> None:
    """Runs `main`; a ValueError or FileNotFoundError becomes its message and exit code 2 (DEBUG=1: traceback)."""
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
