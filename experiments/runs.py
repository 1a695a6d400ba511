"""Runs of the real command that are started as processes: options that make one take seconds, and where it runs."""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jformer.config import resolve
from jformer.config.config_files import as_flags, override, run_config_file
from jformer.config.options import Config
from jformer.config.resume import differences, with_saved_config
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.evaluation import records
from jformer.storage import run_path

# Where a run is and what it runs on.
PLACES = ("data.dir", "data.cache_dir", "data.mixture", "mesh.", "model.execution.")


def processes_with(*words: str, within: str = "") -> list[int]:
    """Return the processes that have all these words in their command, and one that begins with `within`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if set(words) <= set(command) and any(word.startswith(within) for word in command):
                found.append(int(entry.name))
    return found


def results_of(config: ModuleType, workdir: Path, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the results of a config's run, training it by its own command if needed.

    Exits if there are results of a run with other options, such as --smoke or another seed.
    """
    from jformer import main as front

    path = workdir / "results.json"
    if path.exists():
        saved = records.saved_config(run_path(workdir))
        for key, (old, new) in differences(saved, with_saved_config(_resolved(config, options), saved)).items():
            if not key.startswith(PLACES):
                raise SystemExit(f"{workdir} holds results of {key}={old!r}, not {new!r}: name another --workdir")
    else:
        code = front.main(["jformer", f"--config={config.__file__}", f"--workdir={workdir}", *as_flags(options)])
        if code:
            raise SystemExit(code)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def read_split(config: ModuleType, split: str, options: Mapping[str, object] | None = None) -> list[Pair]:
    """Return the examples of a split, or of the test set of that key, as a config's run with options reads them.

    Allows the import of the parts that the config names, its source above all, as the run itself does.
    """
    data = _resolved(config, options or {}).data
    return list(open_split(data, data.test_splits().get(split, split)).read(Counter()))


def _resolved(config: ModuleType, options: Mapping[str, object]) -> Config:
    return resolve(override(run_config_file(Path(str(config.__file__))), as_flags(options)))


def small_training(*sections: str) -> dict[str, object]:
    """Return the options of `small_run` in some sections, by default those of model, optimizer and training."""
    kept = tuple(f"{section}." for section in sections or ("model", "optim", "train"))
    return {key: value for key, value in small_run(2).items() if key.startswith(kept)}


def small_run(steps: int) -> dict[str, object]:
    """Return the options of a run of seconds over configs/quickstart.py: few short updates of a tiny model."""
    sections: dict[str, dict[str, object]] = {
        "model": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "execution.unroll": 1},
        "data": {"name": "copy", "num_pairs": 500, "num_buckets": 1, "tokens_per_update": 512, "tokenizer": "char"},
        "optim": {"schedule": "constant", "warmup": 1},
        "train": {"num_steps": steps, "log_every": 1, "eval_every": 0, "checkpoint_every": steps, "samples": 0},
    }
    small = {f"{name}.{key}": value for name, fields in sections.items() for key, value in fields.items()}
    return {**small, "data.test": "()", "evaluate.scores": "()"}
