"""``python -m lightning_oom``: the command line without its entry point."""

from __future__ import annotations

import sys

from lightning_oom.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
