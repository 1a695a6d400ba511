"""The command `python -m jformer.sweep`."""

import sys

from jformer.tools.sweep.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
