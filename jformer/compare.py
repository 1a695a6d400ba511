"""The command `python -m jformer.compare`."""

import sys

from jformer.tools.compare.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
