"""The command line: ``python -m cutjax info | run | tune | bench``."""

from __future__ import annotations

import sys

from cutjax.tuning.command import main

if __name__ == "__main__":
    sys.exit(main())
