"""The command `python -m jformer.supervise`."""

import sys

from jformer.tools.supervise import main

if __name__ == "__main__":
    sys.exit(main())
