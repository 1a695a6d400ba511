"""results.json: the newest scores of every test set, and beside them those that were made under other settings.

Imports no JAX.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.integrity import with_digest
from jformer.storage import replace_content

SCHEMA = 2
WITHOUT_EFFECT = ("batch_size", "inputs", "outputs", "scores", "alignments")  # options of decoding
SETTINGS = "settings"  # of an entry: all that its scores depend on beside the test set and the run


def settings_of(config: Config, steps: Sequence[int]) -> dict[str, Any]:
    """Return the options of decoding and evaluation that scores are made with, and the checkpoints of the weights.

    Options that change no score, such as the number of inputs that are answered together, are not among them.
    """
    decode = {key: value for key, value in dataclasses.asdict(config.decode).items() if key not in WITHOUT_EFFECT}
    return {"steps": list(steps), "evaluate": dataclasses.asdict(config.evaluate), "decode": decode}


def merge(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new results with the old ones of other test sets, and of the same ones under other settings.

    The newest entry of a test set has its key; older ones are in the list `earlier`, each with its key as `set`.
    `run` is that of the newest scoring. What an older entry was made with, such as the checkpoints of its weights,
    is in its own settings.
    """
    earlier = list(before.get("earlier", []))
    kept = {key: entry for key, entry in before.items() if isinstance(entry, Mapping) and key != "run"}
    for key in [key for key in kept if key in now]:
        earlier.append({"set": key, **kept.pop(key)})
    made = [(key, entry.get(SETTINGS)) for key, entry in now.items() if isinstance(entry, Mapping)]
    earlier = [entry for entry in earlier if (entry["set"], entry.get(SETTINGS)) not in made]
    return {"schema": SCHEMA, **kept, **now, "earlier": earlier}


def save(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Merge new results, test sets and `run`, into a folder's results.json, and return what it holds now.

    A file that cannot be read as results is replaced, and standard error says so.
    """
    try:
        before = records.results(folder)
    except UserError:
        print(f"{folder / 'results.json'}: cannot be read; the new scores replace all that it held", file=sys.stderr)
        before = {}
    as_read_again = json.loads(json.dumps(now))  # tuples become lists, so that settings equal those of the file
    results = merge(before, as_read_again)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(with_digest(results), indent=2, ensure_ascii=False) + "\n"
    replace_content(folder / "results.json", text.encode())
    return results


def save_outputs(folder: Path, key: str, outputs: Sequence[str]) -> None:
    """Write the answers to a test set into a folder, a line for a line."""
    (folder / "outputs").mkdir(parents=True, exist_ok=True)
    replace_content(folder / "outputs" / f"{key}.txt", "".join(line + "\n" for line in outputs).encode())
