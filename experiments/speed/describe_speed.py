"""How long does it take to describe each preset? Imports not counted; nothing is allocated, whatever the size.

Command:  python -m experiments.speed.describe_speed [--smoke]
"""

import time

from absl import app

from experiments.measure import smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.presets import PRESETS
from jformer.tools.forecast.describe import describe


def main(argv: list[str]) -> None:
    """Print the table, slowest last."""
    del argv
    found = []
    for name in ("transformer_tiny",) if smoke_sizes() else PRESETS:
        began = time.perf_counter()
        text = describe(resolve(default_config(name)))
        seconds = time.perf_counter() - began
        parameters = next(line.split()[1] for line in text.splitlines() if line.startswith("total"))
        found.append((seconds, name, parameters))
    for seconds, name, parameters in sorted(found):
        print(f"{name:<24}{seconds:>8.3f} s{parameters:>20}")


if __name__ == "__main__":
    app.run(main)
