"""The command: `bonsai`, and `python -m bonsai` for when it is not on PATH.

Imports nothing at first, so that an interrupt during the imports is as quiet as any later one.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the exit code."""
    try:
        from bonsai.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
