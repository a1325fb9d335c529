"""`python -m bonsai`: the command, for when it is not on PATH."""

from __future__ import annotations

import sys

from bonsai.cli import main

if __name__ == "__main__":
    sys.exit(main())
