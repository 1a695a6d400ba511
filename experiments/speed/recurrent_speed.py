"""How long do an update and greedy decoding of a recurrent language model take beside torch.nn's layers? In turns.

Command:  python -m experiments.speed.recurrent_speed --peer_python=PYTHON_WITH_TORCH [--cell=lstm] [--smoke]

Both sides have the same shape (the default is the medium model of Zaremba et al. 2014, section 4.1), the same batch of
random tokens and the cores that this command may use; each is a process of its own that works when asked and otherwise
waits. An update is a forward and backward pass in float32, with dropout between layers and of the last one's outputs,
and Adam; jformer's has its metrics and its guard, too. Decoding begins with a word a row and takes the likeliest token,
so many times; jformer's is `predict`, from text to text, PyTorch's a loop over its layers.
"""

import os
import statistics
import sys
import time
from typing import Any

from absl import app, flags

from experiments.measure import commit, processor_name, quartiles, smoke_sizes
from experiments.speed.steps_race import REST, UNTIMED
from experiments.worker import Worker
from jformer.evaluation.score_tables import aligned

CELL = flags.DEFINE_enum("cell", "lstm", ["rnn", "lstm", "gru"], "Which cell.")
LAYERS = flags.DEFINE_integer("layers", 2, "Layers.")
D_MODEL = flags.DEFINE_integer("d_model", 650, "Features of a state and of an embedded token.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 10_000, "Tokens that there are.")
ROWS = flags.DEFINE_integer("rows", 20, "Rows of a batch.")
LENGTH = flags.DEFINE_integer("length", 35, "Tokens of a row in an update.")
NEW_TOKENS = flags.DEFINE_integer("new_tokens", 32, "Tokens that decoding adds to each row.")
STEPS = flags.DEFINE_integer("steps", 9, "Timed turns.")
SIDES = flags.DEFINE_list("sides", ["jformer", "torch"], "Who works.")
PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "Runs PyTorch.")


def main(_: list[str]) -> None:
    """Print the table."""
    smoke_sizes(d_model=16, vocabulary=60, rows=4, length=8, new_tokens=4, steps=2, sides=["jformer"])
    told = {
        "cell": CELL.value,
        "num_layers": LAYERS.value,
        "d_model": D_MODEL.value,
        "vocabulary": VOCABULARY.value,
        "rows": ROWS.value,
        "length": LENGTH.value,
        "new_tokens": NEW_TOKENS.value,
        "dropout": 0.5,
        "warmup": 100,
        "threads": len(os.sched_getaffinity(0)),
    }
    sides = {name: Worker([python(name), "-m", "experiments.speed.recurrent_worker", name]) for name in SIDES.value}
    facts = {name: side.ask(told) for name, side in sides.items()}
    versions = ", ".join(f"{key} {text}" for each in facts.values() for key, text in each["versions"].items())
    print(f"{processor_name()}, {told['threads']} cores; {versions}; {commit()}")
    print(", ".join(f"{key} {value}" for key, value in told.items()))
    heads = ["", "side", "ms", "quartiles", "jformer takes", "loss, or tokens", "parameters"]
    print(*aligned([heads, *rows("update", sides, facts), *rows("decode", sides, facts)], len(heads)), sep="\n")
    for side in sides.values():
        side.close()


def python(side: str) -> str:
    """Return who runs a side."""
    return PEER_PYTHON.value if side == "torch" else sys.executable


def rows(what: str, sides: dict[str, Worker], facts: dict[str, Any]) -> list[list[str]]:
    """Let every side do it in turns and return a row of the table for each."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(UNTIMED + STEPS.value):
        for name, side in sides.items():
            time.sleep(REST)
            found[name].append(side.ask({"do": what}))
    seconds = {name: [each["seconds"] for each in turns[UNTIMED:]] for name, turns in found.items()}
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    cells = []
    for name, turns in found.items():
        last = turns[-1]["result"]
        result = f"{turns[0]['result']:,.2f} to {last:,.2f}" if what == "update" else f"{last:,.0f}"
        ratio = f"{medians['jformer'] / medians[name]:.2f}" if name != "jformer" else ""
        figures = [f"{1e3 * medians[name]:,.1f}", quartiles(seconds[name]), ratio, result]
        cells.append([what, name, *figures, f"{facts[name]['parameters']:,}"])
    return cells


if __name__ == "__main__":
    app.run(main)
