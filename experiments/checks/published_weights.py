"""Run the directories of published models through the documented commands: import, logits beside transformers, export.

python -m experiments.checks.published_weights MODEL_DIR … [--texts=FILE] [--more="--model_type=bert"]

With --smoke, the directories are those of small models with random weights. Prints a table row for a copy of each:
whether `jformer.hf import`, with the options of --more, accepts it as it is, or after the `jformer.hf unpickle` that it
asks for, or why not; the largest difference of logits from transformers, relative to the largest logit, and the
positions whose likeliest token or class is the same; the lines of --texts (default: README.md) with the ids of
AutoTokenizer; the tensors that an export has bit for bit; seconds and peak memory of the import and of the export.
Needs pip install -e ".[parity]".
"""

import argparse
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jformer.config import load_config
from jformer.inference.predict import load
from jformer.inference.verify import Subject
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf.against import both_logits
from jformer.tools.hf.tensors import Tensors

HEADER = ("model", "as it lies there", "logits", "likeliest", "ids", "export equal", "import; export")
UNPICKLE = "jformer.hf unpickle"


class Done(NamedTuple):
    """A finished command."""

    code: int
    error: str  # the last line of standard error
    seconds: float
    peak: float  # MiB

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.peak:,.0f} MiB"


def call(*arguments: str) -> Done:
    """Run `python -m jformer.hf` in a process of its own."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "jformer.hf", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        errors.seek(0)
        lines = errors.read().strip().splitlines() or [""]
    code = process.returncode = os.waitstatus_to_exitcode(status)
    return Done(code, lines[-1], time.monotonic() - began, usage.ru_maxrss / 1024)


def row_of(directory: Path, folder: Path, texts: list[str], more: list[str]) -> tuple[str, ...]:
    """Return the cells of a model; a folder takes a copy, its run and its export."""
    origin, workdir, exported = folder / directory.name, folder / "run", folder / "export"
    shutil.copytree(directory, origin)
    size = sum(path.stat().st_size for path in origin.rglob("*") if path.is_file()) / 1e6
    taken, verdict = call("import", str(origin), f"--workdir={workdir}", *more), "yes"
    if taken.code and UNPICKLE in taken.error:
        converted = call("unpickle", str(origin))
        verdict = f"yes, after `{UNPICKLE}`" if not converted.code else converted.error
        taken = call("import", str(origin), f"--workdir={workdir}", *more)
    verdict += f", with {' '.join(f'`{option}`' for option in more)}" if more else ""
    name = f"{directory.name}, {size:,.0f} MB"
    if taken.code:
        error = taken.error.replace(str(origin), "DIR").removeprefix("jformer: ").replace("|", "/")
        return (name, f"no: {error}", *[""] * 4, f"{taken}")
    out = call("export", str(workdir), f"--output={exported}")
    equal = "/".join(map(str, equal_tensors(origin, exported))) if not out.code else out.error
    run = load(workdir, load_config(workdir / "config.json"), make_mesh(1))
    ours, theirs = both_logits(origin, workdir, Subject(run, run.config.decode))
    apart = np.abs(ours - theirs).max() / np.abs(theirs).max()
    likeliest = (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).tolist()
    ids = ""
    if not run.inputs.of_images:
        theirs_ids = their_ids(origin, dict(option.removeprefix("--").split("=", 1) for option in more), texts)
        ids = f"{sum([*a] == b for a, b in zip(run.inputs.side.encode(texts), theirs_ids, strict=True))}/{len(texts)}"
    return name, verdict, f"{apart:.1e}", f"{sum(likeliest)}/{len(likeliest)}", ids, equal, f"{taken}; {out}"


def their_ids(origin: Path, given: dict[str, str], texts: list[str]) -> list[list[int]]:
    """Return the ids of texts by AutoTokenizer, given the same facts as the options of the import."""
    import transformers

    elsewhere = {"model_type", "tokenizer"} & given.keys()  # no config.json with a model_type stands beside the files
    facts: dict[str, Any] = {"tokenizer_type": given.get("model_type", "bert")} if elsewhere else {}
    facts |= {"do_lower_case": given["do_lower_case"] == "true"} if "do_lower_case" in given else {}
    ids: list[list[int]] = transformers.AutoTokenizer.from_pretrained(given.get("tokenizer", origin), **facts)(texts)[
        "input_ids"
    ]
    return ids


def equal_tensors(origin: Path, exported: Path) -> tuple[int, int]:
    """Return how many tensors of an export have the bits of the origin's, and of how many."""
    before, after = Tensors(origin), Tensors(exported)
    theirs = {name: name if name in before.found else name.partition(".")[2] for name in after.found}  # a bare model's
    same = [old in before.found and np.array_equal(before.read(old), after.read(new)) for new, old in theirs.items()]
    return sum(same), len(same)


def small_models(folder: Path) -> Iterator[Path]:
    """Yield a model of random weights, for --smoke."""
    import tokenizers
    import transformers

    fast = tokenizers.BertWordPieceTokenizer()
    fast.train_from_iterator(["a small text of few words"] * 4, vocab_size=60, show_progress=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=fast.get_vocab_size(), **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "bert")
    fast.save(str(folder / "bert" / "tokenizer.json"))
    yield folder / "bert"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--texts", type=Path, default=Path("README.md"))
    parser.add_argument("--more", default="", help="options of the import")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    texts = [line for line in options.texts.read_text().splitlines() if line.strip()]
    for line in (HEADER, ["---"] * len(HEADER)):
        print(f"| {' | '.join(line)} |")
    # Each row in a process of its own: peaks of memory include that of the process which starts a command.
    fresh = multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1)
    with tempfile.TemporaryDirectory() as small, fresh as pool:
        models = small_models(Path(small)) if options.smoke else options.models
        for directory in models:
            with tempfile.TemporaryDirectory() as folder:
                row = pool.apply(row_of, (directory, Path(folder), texts, shlex.split(options.more)))
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
