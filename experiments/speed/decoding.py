"""How fast is decoding beside transformers and CTranslate2? The same weights, in turns, each side a process of its own.

Command:  python -m experiments.speed.decoding --size=base --peer_python=PYTHON_WITH_TORCH
          python -m experiments.speed.decoding --workdir=RUN --source=FILE [--reference=FILE] --peer_python=...
          python -m experiments.speed.decoding --smoke

Without a run the weights are random, the vocabulary has 10,000 entries, sources have 8 to 22 tokens and every output
exactly 15. With one, it must be what Marian's architecture can express. Each side decodes at the batch size, of
--batches, at which it is quickest, sorted by length, on two cores, in float32 unless its name says otherwise. jformer
goes from text to text, the peers from tokens to tokens. The floor is the time of the matrix products alone for the
tokens read and written, in full batches without padding.

--one times a base model on one sentence at a time, an output of 32 and one of 512 tokens; --long 64 sentences.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sacrebleu
from absl import app, flags, logging

from experiments.measure import commit, processor_name, smoke_sizes
from experiments.speed.decoding_worker import THREADS
from experiments.untrained import write_untrained
from experiments.worker import Worker
from jformer.checkpoints.weights import load_weights
from jformer.config import load_config
from jformer.data.tokenizers import Tokenizer
from jformer.data.tokenizers.symbols import BOS, EOS, NUM_SYMBOLS, PAD
from jformer.data.vocabularies import load_tokenizers
from jformer.models import ModelConfig
from jformer.parallel.mesh import make_mesh
from jformer.tasks.build import build_sized, build_task
from jformer.tools.export.folder import export
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf.families import LOGITS_BIAS, config_fields
from jformer.tools.hf.marian import MARIAN

SIZE = flags.DEFINE_enum("size", "tiny", ["tiny", "base"], "The model, if there is no run.")
WORKDIR = flags.DEFINE_string("workdir", None, "A trained run.")
SOURCE = flags.DEFINE_string("source", None, "A text file to translate, a sentence a line.")
REFERENCE = flags.DEFINE_string("reference", None, "Its translation, for BLEU (without tokenization).")
PYTHON = flags.DEFINE_string("python", sys.executable, "Runs jformer.")
PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "Runs transformers; CTranslate2 runs with --python.")
SIDES = flags.DEFINE_list(
    "sides",
    ["jformer", "jformer bfloat16", "transformers", "ctranslate2", "ctranslate2 int8"],
    "Sides that decode.",
)
BEAMS = flags.DEFINE_list("beams", ["1", "5"], "Beam sizes; 1 is greedy.")
BATCHES = flags.DEFINE_list("batches", ["32", "64", "128", "256"], "Batch sizes to choose from.")
COUNT = flags.DEFINE_integer("count", 1_000, "Sentences.")
PATIENCE = flags.DEFINE_float("patience", 0.0, "decode.patience of jformer; the peers stop about as 1 does.")
PASSES = flags.DEFINE_integer("passes", 5, "Timed passes of each side.")
ONE = flags.DEFINE_bool("one", False, "Time one sentence at a time instead.")
LONG = flags.DEFINE_bool("long", False, "Time 64 sentences with long outputs instead.")

VOCABULARY, TOKENS = 10_000, 15
MUST = {  # the least times a peer's speed, by size, beam and peer
    ("tiny", 1): {"transformers": 3.0, "ctranslate2": 1.0},
    ("tiny", 5): {"transformers": 6.0, "ctranslate2": 1.0},
    ("base", 1): {"transformers": 1.3, "ctranslate2": 1.0},
    ("base", 5): {"transformers": 1.5, "ctranslate2": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work given to all sides."""

    model: ModelConfig
    tokenizers: tuple[Tokenizer, Tokenizer]
    told: dict[str, Any]  # paths and numbers
    count: int
    tokens: int  # of every output; 0 = until its end
    source_tokens: int
    size: str


class Side(Worker):
    """A worker that runs passes when asked."""

    def __init__(self, name: str, python: str, told: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[:THREADS]
        worker = [python, "-m", "experiments.speed.decoding_worker", name.partition(" ")[0]]
        super().__init__(["taskset", "-c", ",".join(map(str, cores)), *worker])
        self.versions = self.ask(told)


def main(argv: list[str]) -> None:
    """Prepare, start the sides, time them and print."""
    del argv
    smoke_sizes(sides=["jformer", "ctranslate2"], beams=["2"], batches=["4"], count=4, passes=1)
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        work = prepare(Path(folder))
        if ONE.value or LONG.value:
            time_long(work)
            return
        sides = {name: open_side(name, work) for name in SIDES.value}
        versions = {name: text for side in sides.values() for name, text in side.versions.items() if name != "python"}
        print(describe(work), *(f"{name} {text}" for name, text in versions.items()), sep=", ")
        floor = open_floor(work)
        for beam in map(int, BEAMS.value):
            report(work, beam, *race(sides, work, beam), floor)


def prepare(folder: Path) -> Work:
    """Write a run if there is none, its weights for the peers, and what is to be translated."""
    size = "base" if ONE.value or LONG.value else SIZE.value
    workdir = Path(WORKDIR.value) if WORKDIR.value else write_untrained(folder / "run", size, VOCABULARY)
    settings, tokenizers = load_config(workdir / "config.json"), load_tokenizers(workdir / "tokenizer")
    model = build_sized(settings, build_task(settings), tokenizers)
    params = jax.tree.map(np.asarray, load_weights(workdir, settings, model, make_mesh(1)).params)
    if SOURCE.value:
        lines = Path(SOURCE.value).read_text(encoding="utf-8").splitlines()[: COUNT.value]
    else:
        rng = np.random.default_rng(0)
        ids = [rng.integers(NUM_SYMBOLS, VOCABULARY, rng.integers(7, 22)).tolist() for _ in range(COUNT.value)]
        lines = [tokenizers[0].decode(one) for one in ids]
    sources = [[*one, EOS] for one in tokenizers[0].encode(lines)]
    words = {"source": tokenizers[0].tokens, "target": tokenizers[1].tokens}
    # Marian's norms have one epsilon, which its config.json does not state; the peers get ours.
    fields = config_fields(MARIAN, dataclasses.replace(model.config, norm_epsilon=1e-5), "translate")
    fields |= {"pad_token_id": PAD, "decoder_start_token_id": BOS, "eos_token_id": EOS, "forced_eos_token_id": None}
    stated = {key: value for key, value in fields.items() if key != LOGITS_BIAS}
    options = {"config": stated, "epsilon": model.config.norm_epsilon}
    state = dict(tables.to_tensors(MARIAN.table(model.config), params))
    state["final_logits_bias"] = np.zeros((1, model.config.vocab_size), np.float32)
    np.savez(folder / "state.npz", **state)  # type: ignore[arg-type]
    (folder / "lines").write_text("\n".join(lines), encoding="utf-8")
    for name, value in (("ids", sources), ("words", words), ("options", options)):
        (folder / name).write_text(json.dumps(value))
    export(settings, workdir, "ctranslate2", folder / "exported")
    places = {"workdir": workdir, "state": folder / "state.npz", "directory": folder / "exported"}
    places |= {name: folder / name for name in ("lines", "ids", "words", "options")}
    told: dict[str, Any] = {name: str(path) for name, path in places.items()}
    size = "base" if model.config.d_model >= 512 else "tiny"
    told |= {"extra": settings.decode.max_extra_length, "patience": PATIENCE.value}
    total = sum(map(len, sources))
    return Work(
        model=model.config,
        tokenizers=tokenizers,
        told=told,
        count=len(lines),
        tokens=0 if SOURCE.value else TOKENS,
        source_tokens=total,
        size=size,
    )


def open_side(name: str, work: Work) -> Side:
    """Start the worker of a side."""
    kind, _, dtype = name.partition(" ")
    told = {**work.told, "dtype": dtype or "float32", "compute_type": dtype or "float32"}
    return Side(name, PEER_PYTHON.value if kind == "transformers" else PYTHON.value, told)


def open_floor(work: Work) -> Side:
    """Start the worker that times the matrix products."""
    c = work.model
    sizes = {
        "d_model": c.d_model,
        "d_ff": c.d_ff,
        "layers": c.decoder_layers,
        "encoder_layers": c.num_layers,
        "vocabulary": c.target_vocab_size,
    }
    return Side("floor", PYTHON.value, {**sizes, "dtype": "float32", "seconds": 2.0})


def race(
    sides: dict[str, Side], work: Work, beam: int
) -> tuple[dict[str, int], dict[str, list[float]], dict[str, Any]]:
    """Return each side's best batch size, its seconds for each pass, and its outputs."""
    asked = {"beam": beam, "tokens": work.tokens, "count": work.count}
    best, outputs = {}, {}
    for name, side in sides.items():
        found = {}
        for batch in map(int, BATCHES.value):
            side.ask({**asked, "batch": batch})  # compiles, and fills caches
            found[batch] = side.ask({**asked, "batch": batch})["seconds"]
        best[name] = min(found, key=lambda batch: found[batch])
        outputs[name] = side.ask({**asked, "batch": best[name], "show": True})["outputs"]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(PASSES.value):
        for name, side in sides.items():
            time.sleep(0.5)  # lets threads stop that spin after their work
            times[name].append(side.ask({**asked, "batch": best[name]})["seconds"])
    return best, times, outputs


def report(
    work: Work, beam: int, best: dict[str, int], times: dict[str, list[float]], outputs: dict[str, Any], floor: Side
) -> None:
    """Print the table of one beam size."""
    speeds = {name: [work.count / seconds for seconds in passes] for name, passes in times.items()}
    middle = {name: statistics.median(passes) for name, passes in speeds.items()}
    ours = middle.get("jformer", float("nan"))
    print(f"\n{'greedy' if beam == 1 else f'beam {beam}'}: sentences/s, median of {PASSES.value} (lowest to highest)")
    for name, passes in speeds.items():
        line = f"  {name:18} batch {best[name]:3}  {middle[name]:8.1f} ({min(passes):.1f} to {max(passes):.1f})"
        must = MUST.get((work.size, beam), {}).get(name)
        line += f"  jformer is {ours / middle[name]:.2f} times as fast" if name != "jformer" else ""
        print(line + (f", must {must}" if must else "") + bleu(work, outputs[name]))
    written = sum(len(encoded(work, one)) for one in next(iter(outputs.values())))
    batch = best.get("jformer", 64)
    step = floor.ask({"what": "step", "rows": batch * beam})["seconds"]
    encode = floor.ask({"what": "encode", "rows": 1_024})["seconds"]
    seconds = step * written / batch + encode * work.source_tokens / 1_024
    print(
        f"  {'floor':18} batch {batch:3}  {work.count / seconds:8.1f}  "
        f"jformer takes {work.count / seconds / ours:.2f} times as long; a step's products {1e3 * step:.2f} ms"
    )


def bleu(work: Work, outputs: Sequence[Any]) -> str:
    """Return the BLEU of a side's outputs, if there is a reference."""
    if not REFERENCE.value:
        return ""
    references = Path(REFERENCE.value).read_text(encoding="utf-8").splitlines()[: work.count]
    texts = [one if isinstance(one, str) else work.tokenizers[1].decode(one) for one in outputs]
    return f", BLEU {sacrebleu.corpus_bleu(texts, [references], tokenize='none', force=True).score:.2f}"


def encoded(work: Work, output: Any) -> list[int]:
    """Return the tokens of an output, its end among them."""
    if not isinstance(output, str):
        return [i for i in output if i != PAD]
    return [*work.tokenizers[1].encode([output])[0], *([] if work.tokens else [EOS])]


def time_long(work: Work) -> None:
    """Print what a token costs in short and in long outputs, and how long reading the cache takes."""
    side, floor, c = open_side("jformer", work), open_floor(work), work.model
    print(describe(work), *(f"{name} {text}" for name, text in side.versions.items()), sep=", ")
    batch, per = (64 if LONG.value else 1), {}
    bandwidth = 2**28 / floor.ask({"read": 2**28})["seconds"]
    for tokens in (32, 512):
        asked = {"beam": 1, "batch": batch, "tokens": tokens, "count": batch}
        side.ask(asked)
        per[tokens] = [side.ask(asked)["seconds"] / tokens for _ in range(PASSES.value)]
        middle = statistics.median(per[tokens])
        entries = tokens / 2 + work.source_tokens / work.count  # of a sentence: written so far on average, and read
        size = 4 * batch * c.decoder_layers * entries * 2 * c.d_model
        spread = f"{1e3 * min(per[tokens]):.2f} to {1e3 * max(per[tokens]):.2f}"
        print(
            f"  batch {batch}, outputs of {tokens} tokens: {1e3 * middle:.2f} ms a step ({spread}); reading its cache, "
            f"{size / 1e6:.1f} MB on average, takes {1e3 * size / bandwidth:.2f} ms at {bandwidth / 1e9:.1f} GB/s"
        )
    ratio = statistics.median(per[512]) / statistics.median(per[32])
    print(f"  a token of the longer costs {ratio:.2f} times as much" + (", must 2" if batch == 1 else ""))


def describe(work: Work) -> str:
    """Return the model, the machine and the commit."""
    c = work.model
    return (
        f"{c.num_layers}+{c.decoder_layers} layers, d_model {c.d_model}, vocabulary {c.vocab_size}, {work.count} "
        f"sentences; {processor_name()}, {THREADS} cores, load {os.getloadavg()[0]:.1f}, {commit()}"
    )


if __name__ == "__main__":
    app.run(main)
