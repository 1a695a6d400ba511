"""The command `python -m jformer.sweep`, and what an experiment file imports."""

import sys

from jformer.tools.sweep import Trial, chain, product, sample, zipped
from jformer.tools.sweep.__main__ import main

__all__ = ["Trial", "chain", "product", "sample", "zipped"]

if __name__ == "__main__":
    sys.exit(main())
