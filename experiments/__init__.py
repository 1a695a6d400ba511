"""One file per question, and the lab book of what they found."""

from jformer.parallel.libtpu import silence_libtpu

silence_libtpu()  # before any of them looks for devices
