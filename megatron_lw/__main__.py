"""`python -m megatron_lw` is `megatron-lw`."""

from __future__ import annotations

import sys

from megatron_lw.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
