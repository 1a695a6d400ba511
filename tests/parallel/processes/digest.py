"""Open a run as some processes, without training, and print what its state holds: the SHA-256 of every leaf's bytes.

python -m tests.parallel.processes.digest ARGUMENTS OF jformer.main
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from jformer import main
from jformer.parallel import processes
from tests.opening import opened

options, overrides = main.read_flags(sys.argv)
with processes.join_run(main.coordinates(options)):
    from jax.experimental import multihost_utils

    state = opened(main.configure(options, overrides), Path(options.workdir)).state
    import jax

    whole = [multihost_utils.process_allgather(leaf, tiled=True) for leaf in jax.tree.leaves(state)]
    if processes.is_main_process():
        print(json.dumps([hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in whole]))
