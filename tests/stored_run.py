"""Directories like those of scored runs, written in milliseconds, for what reads finished runs."""

import json
from collections import Counter

from jformer.config import save_config
from jformer.config.config_files import with_keys
from jformer.data.sources import open_split
from jformer.tasks.metrics import exact_match, text_scores, tokenization
from tests import small_run

STEPS = (10, 20, 30, 40)


def store_run(folder, overrides=None, *, wrong=100, losses=(4.0, 3.0, 2.5, 2.2), scored=True):
    """Write a run of tests/small_run.py whose first `wrong` answers to the test set are wrong."""
    config = with_keys(small_run.get_config(), overrides or {})
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    rows = [{"step": s, "split": "valid", "loss": loss, "nll": loss / 2} for s, loss in zip(STEPS, losses, strict=True)]
    rows.insert(0, {"step": 10, "split": "train", "loss": 5.0, "grad_norm": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if scored:
        score(folder, config, wrong)
    return folder


def score(folder, config, wrong):
    split = open_split(config.data, "test")
    references = [pair.target for pair in split.read(Counter())]
    outputs = ["?" + text[1:] if i < wrong else text for i, text in enumerate(references)]
    (folder / "outputs").mkdir()
    (folder / "outputs" / "test.txt").write_text("".join(line + "\n" for line in outputs))
    names = config.evaluate.scores
    scores = text_scores(outputs, [references], tokenize=tokenization(config), names=names)
    scores["exact_match"] = exact_match(outputs, references)
    entry = {**scores, "examples": len(outputs), "counts": {}, "checksum": split.fingerprint}
    updates, tokens = config.train.num_steps, config.data.tokens_per_update
    facts = {"seed": config.seed, "parameters": 1234, "updates": updates, "tokens_per_update": tokens}
    results = {"schema": 2, "test": entry, "run": {**facts, "wall_seconds": 2.5}}
    (folder / "results.json").write_text(json.dumps(results))
