"""``python -m stratarec``, and with several processes ``torchrun -m stratarec``."""

from __future__ import annotations

import sys

from stratarec.cli import main

if __name__ == "__main__":
    sys.exit(main())
