"""Score a run: the loss of a split, and generated text against references, into results.json."""

import dataclasses
import hashlib
import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
from etils.epath import Path
from jax.sharding import Mesh

from jformer import checkpoint, hosts, metrics
from jformer.config import Config
from jformer.data.corpus import Corpus, open_corpus
from jformer.data.pipeline import Batches, make_batches
from jformer.data.sources import Split, open_split
from jformer.data.tokenizers import Tokenizer
from jformer.predict import Predictor, load
from jformer.restore import build_sized, build_task, open_mesh
from jformer.sharding import local_rows, put_batch, row_shards
from jformer.step import make_eval_step, make_loss
from jformer.tasks import Task

SCHEMA = 1
COMPARED = ("text", "label")  # answers that have a reference to be compared with
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "sacrebleu", "sentencepiece", "numpy")


def evaluation_batches(
    config: Config, task: Task, tokenizers: tuple[Tokenizer, Tokenizer], split: Split, shards: int = 1
) -> tuple[Batches, Corpus]:
    """Return batches that hold every usable example of a split once, and its tokens.

    They have two shapes, whatever training uses, room for any example the limits let through, and rows that divide
    among so many shards, be they other ones than training had.
    """
    corpus = open_corpus(split, task.encoder(*tokenizers, evaluating=True), config.data.cache_dir)
    features, data = task.features(*tokenizers), config.data
    longest = max(int(sizes.max()) for sizes in features.lengths(corpus.source.lengths, corpus.target.lengths))
    rows = math.lcm(data.row_multiple, shards)
    tokens = max(data.tokens_per_update, rows * longest)
    data = dataclasses.replace(data, batching="buckets", num_buckets=2, tokens_per_update=tokens, row_multiple=rows)
    return make_batches([corpus], [1.0], data, 0, features), corpus


def split_totals(eval_step: Any, params: Any, batches: Batches, mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Return (sum, count) of the loss, nll and correct guesses over one pass of the batches."""

    def put(number: int) -> dict[str, jax.Array]:
        rows = batches.plan.batch(number).shape.rows
        arrays = batches.rows(number, local_rows(mesh, rows))
        return put_batch(mesh, {name: x[None] for name, x in arrays.items()}, rows)

    rows = [eval_step(params, put(number)) for number in range(len(batches))]
    totals: dict[str, tuple[float, float]] = {}
    for sums in jax.device_get(rows):
        for name, (total, count) in sums.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(count))
    return totals


def evaluate(config: Config, workdir: Path) -> dict[str, Any]:
    """Score every test set with the run's weights, write results.json and the outputs, and return the results.

    Of several processes each gets the results, and the first one writes them.
    """
    hosts.reach("opening the trained run")
    mesh = open_mesh(config)
    predictor = load(workdir, config, mesh)
    task = predictor.task
    model = build_sized(config, task, predictor.tokenizers)  # decode.dtype is for answers alone
    eval_step = make_eval_step(make_loss(model, task), mesh)
    results: dict[str, Any] = {"schema": SCHEMA}
    for key, name in config.data.test_splits().items():
        split = open_split(config.data, name)
        hosts.same({f"the text of {name}": split.fingerprint})
        hosts.reach(f"answering {key}")
        examples = list(split.read(Counter()))
        outputs: list[str] = []
        if task.answer in COMPARED:
            outputs = predictor.predict([pair.source for pair in examples])
            if hosts.first():
                write_outputs(workdir / "outputs" / f"{key}.txt", outputs)
        hosts.reach(f"scoring {key}")
        with hosts.in_turn():
            batches, corpus = evaluation_batches(config, task, predictor.tokenizers, split, row_shards(mesh))
        scores = task.score(outputs, examples, split_totals(eval_step, predictor.params, batches, mesh))
        results[key] = {**scores, "examples": len(examples), "counts": corpus.counts, "checksum": split.fingerprint}
    results["run"] = provenance(config, workdir, predictor)
    if hosts.first():
        (workdir / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return results


def write_outputs(path: Path, outputs: Sequence[str]) -> None:
    """Write the answers to a test set, a line for a line."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in outputs).encode())


def provenance(config: Config, workdir: Path, predictor: Predictor) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat the scores."""
    saved = checkpoint.open_run(workdir)
    progress = saved.progress(saved.steps()[-1])
    saved.close()
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)
    device = jax.devices()[0]
    return {
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "data": progress["data"],
        "seed": config.seed,
        "weights": config.evaluate.weights,
        "tokens_per_update": config.data.tokens_per_update,
        "updates": progress["step"],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(predictor.params)),
        "inputs_cut": predictor.cut,
        "hardware": f"{jax.device_count()} x {device.device_kind} ({platform.machine()})",
        "wall_seconds": round(progress["seconds"], 1),
        "libraries": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }


PREDICT = {  # answer → what --mode=predict is for
    "text": "translate lines of your own",
    "continuation": "let the model go on from lines of your own",
    "label": "label lines of your own (images by their paths)",
}


def report_scores(results: dict[str, Any], config: Config, workdir: Path) -> str:
    """Return the table of scores and what to try next, as commands to copy."""
    answer = build_task(config).answer
    tries = [("--mode=predict < TEXT", PREDICT[answer])] if answer else []
    if answer == "text":
        tries += [(f"--mode=evaluate --config.decode.beam_size={config.decode.beam_size + 4}", "a wider beam")]
    lines = [f"  python -m jformer.main --workdir={workdir} {flags}   # {purpose}" for flags, purpose in tries]
    lines += [f"  tensorboard --logdir={workdir}   # the curves (pip install tensorboard)"]
    outputs = f"; the outputs: {workdir}/outputs/" if answer in COMPARED else ""
    return f"""
{metrics.score_table(results)}

scores and their provenance: {workdir}/results.json{outputs}
Try next:
{chr(10).join(lines)}"""
