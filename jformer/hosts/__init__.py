"""Several processes that are one run: they find each other, start JAX, must be alike, and end together.

Rooms outside import this, and need not know whether there is more than one process.
"""

from jformer.hosts.coordinates import Coordinates, from_flags
from jformer.hosts.group import (
    agree,
    alone,
    first,
    in_turn,
    index,
    joined,
    limit,
    reach,
    refuse_unshared,
    same,
    stopping,
    took,
    wait,
)
from jformer.hosts.handshake import saved_run
from jformer.hosts.meeting import AbsentError
from jformer.hosts.peers import LOST

__all__ = [
    "LOST", "AbsentError", "Coordinates", "agree", "alone", "first", "from_flags", "in_turn", "index", "joined",
    "limit", "reach", "refuse_unshared", "same", "saved_run", "stopping", "took", "wait",
]  # fmt: skip
