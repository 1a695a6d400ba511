"""The command `python -m jformer.skipgram`."""

import sys

from jformer.tools.skipgram import main

if __name__ == "__main__":
    sys.exit(main())
