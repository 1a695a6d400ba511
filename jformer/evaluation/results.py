"""results.json: the newest scores of every test set, and earlier ones that were computed with other settings.

Imports no JAX.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UnavailableError, UserError
from jformer.evaluation import records
from jformer.integrity import NewerError, with_digest
from jformer.storage import replace_content
from jformer.tasks.metrics import tokenization

WITHOUT_EFFECT = {  # options that change no score, by section
    "decode": ("batch_size", "inputs", "outputs", "scores", "alignments"),
    "evaluate": ("during", "during_examples", "command_seconds"),
}
SETTINGS = "settings"  # key of an entry: everything its scores depend on except the test set and the run


def settings_of(config: Config, steps: Sequence[int]) -> dict[str, Any]:
    """Return the options that affect scores and may change after training, and the steps of the checkpoints.

    Options that do not change scores, such as the batch size, are left out.
    """
    evaluate = dataclasses.asdict(config.evaluate) | {"tokenize": tokenization(config)}
    return {
        "steps": list(steps),
        "evaluate": _with_effect("evaluate", evaluate),
        "decode": _with_effect("decode", dataclasses.asdict(config.decode)),
        "data": {key: getattr(config.data, key) for key in ("max_source_length", "max_target_length")},
    }


def _with_effect(section: str, options: Any) -> Any:
    """Return a section of settings without the options that change no score, some of which older versions recorded."""
    if not isinstance(options, Mapping):
        return options
    return {key: value for key, value in options.items() if key not in WITHOUT_EFFECT.get(section, ())}


def merge(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new results, with the old ones of other test sets and of the same sets under other settings.

    The newest entry of a test set has its key; older ones are in the list `earlier`, each with its key as `set`.
    `run` is that of the newest scoring; the checkpoints and options of older entries are in their settings.
    """
    earlier = list(before.get("earlier", []))
    kept = {key: entry for key, entry in before.items() if isinstance(entry, Mapping) and key != "run"}
    for key in [key for key in kept if key in now]:
        earlier.append({"set": key, **kept.pop(key)})
    earlier = [entry for entry in earlier if not _is_replaced(entry, now.get(entry["set"]))]
    return {"schema": records.SCHEMA, **kept, **now, "earlier": earlier}


def _is_replaced(entry: Mapping[str, Any], now: Any) -> bool:
    """Return whether new scores have the settings of an entry; unrecorded ones count as equal."""
    if not isinstance(now, Mapping):
        return False
    settings, new = entry.get(SETTINGS, {}), now.get(SETTINGS, {})
    return all(_with_effect(key, value) == new.get(key) for key, value in settings.items())


def read(folder: Path) -> dict[str, Any] | None:
    """Return a folder's results.json, {} if it has none, or None if it cannot be read as results.

    Raises UserError for what must not be replaced: that of a newer version, or one whose storage is unavailable.
    """
    try:
        return records.results(folder)
    except (NewerError, UnavailableError):
        raise
    except UserError:
        return None


def save(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Merge new results, test sets and `run`, into a folder's results.json, and return its new content.

    Numbers that are not finite become null. A file that cannot be read as results is replaced, which is reported on
    standard error. Raises UserError as `read` does.
    """
    before = read(folder)
    if before is None:
        print(f"{folder / 'results.json'}: cannot be read; its content is replaced by the new scores", file=sys.stderr)
    # Tuples become lists, so that settings equal those of the file.
    as_read_again = json.loads(json.dumps(now), parse_constant=lambda _: None)
    results = merge(before or {}, as_read_again)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(with_digest(results), indent=2, ensure_ascii=False) + "\n"
    replace_content(folder / "results.json", text.encode())
    return results


def save_outputs(folder: Path, key: str, outputs: Sequence[str]) -> None:
    """Write the answers to a test set, or their scores by a command, into a folder, one line each."""
    (folder / "outputs").mkdir(parents=True, exist_ok=True)
    replace_content(folder / "outputs" / f"{key}.txt", "".join(line + "\n" for line in outputs).encode())
