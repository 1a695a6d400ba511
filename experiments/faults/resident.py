"""Does the memory that a run forecasts agree with the peak of its process?

Said: the line "memory of the run" of `jformer.training.forecast`, before anything is compiled. Held: the largest
resident size of the process (ru_maxrss) over a few updates, a validation and two saves. Letters to copy, on the CPU.

Command:  python -m experiments.faults.resident [--presets=transformer_tiny,transformer_base,transformer_big]
          [--tokens=2048] [--steps=6] [--smoke]
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.measure import ROOT, commit, processor_name, smoke_sizes
from experiments.runs import small_run
from jformer.config.config_files import as_flags

PRESETS = flags.DEFINE_list(
    "presets", ["transformer_tiny", "transformer_base", "transformer_big"], "Models, each in its own process."
)
TOKENS = flags.DEFINE_integer("tokens", 2_048, "Tokens of an update.")
STEPS = flags.DEFINE_integer("steps", 6, "Updates; half of them before the first save.")
CONFIG = """
from jformer.config import default_config


def get_config():
    config = default_config("{preset}")
    config.data.update(source="generated")
    return config
"""


def trained(preset: str, folder: Path, small: bool) -> tuple[float, float]:
    """Train a preset for some updates; return the MiB that it forecast and the MiB that it held."""
    (folder / "config.py").write_text(CONFIG.format(preset=preset))
    steps = STEPS.value
    options = small_run(steps) if small else {**small_run(steps), "data.tokens_per_update": TOKENS.value}
    options = {key: value for key, value in options.items() if small or not key.startswith("model.")}
    options |= {"train.checkpoint_every": steps // 2, "train.eval_every": steps, "data.cache_dir": folder / "cache"}
    command = [sys.executable, "-m", "jformer.main", f"--config={folder}/config.py", f"--workdir={folder}/run"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *as_flags(options)], cwd=ROOT, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    said = re.search(r"memory of the run: up to ([\d,]+) MiB", (folder / "log").read_text())
    if status or not said:
        raise RuntimeError((folder / "log").read_text())
    return float(said[1].replace(",", "")), usage.ru_maxrss / 1024


def main(argv: Sequence[str]) -> None:
    """Print a row for each preset."""
    del argv
    small = smoke_sizes(presets=["transformer_tiny"], steps=2)
    print(f"{commit()}, {processor_name()}, {STEPS.value} updates of {TOKENS.value:,} tokens")
    print(f"{'preset':<20}{'said':>12}{'held':>12}{'said / held':>14}")
    for preset in PRESETS.value:
        with tempfile.TemporaryDirectory() as folder:
            said, held = trained(preset, Path(folder), small)
        print(f"{preset:<20}{said:>8,.0f} MiB{held:>8,.0f} MiB{said / held:>14.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
