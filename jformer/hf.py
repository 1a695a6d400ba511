"""The command `python -m jformer.hf`."""

import sys

from jformer.tools.hf.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
