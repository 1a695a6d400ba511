"""Score a run: the loss of a split, and generated text against references, into results.json."""

import dataclasses
import hashlib
import json
import platform
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jformer import checkpoint, metrics
from jformer.config import Config
from jformer.data.corpus import Encoder, open_corpus
from jformer.data.pipeline import Batches, make_batches
from jformer.data.sources import Split, open_split
from jformer.data.tokenizers import Tokenizer
from jformer.predict import Predictor, load
from jformer.sharding import make_mesh, put_batch, replicated
from jformer.step import make_eval_step, make_loss
from jformer.tasks import TASKS, Task

SCHEMA = 1
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "sacrebleu", "sentencepiece", "numpy")


def build_task(config: Config) -> Task:
    """Return the task the config names."""
    scores = dataclasses.asdict(config.evaluate)
    return TASKS[config.task](
        label_smoothing=config.optim.label_smoothing,
        **{key: scores[key] for key in ("scores", "tokenize", "lowercase")},
    )


def make_encoder(config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> Encoder:
    """Return how this run turns pairs of texts into tokens."""
    data = config.data
    return Encoder(*tokenizers, data.max_source_length, data.max_target_length, data.overlong)


def evaluation_batches(
    config: Config, tokenizers: tuple[Tokenizer, Tokenizer], split: Split
) -> tuple[Batches, dict[str, int]]:
    """Return batches that hold every usable pair of a split once, and what became of its pairs.

    They have two shapes, whatever training uses, and room for any pair the limits let through.
    """
    corpus = open_corpus(split, make_encoder(config, tokenizers), config.data.cache_dir)
    data = config.data
    tokens = max(data.tokens_per_update, data.row_multiple * max(data.max_source_length, data.max_target_length))
    data = dataclasses.replace(data, batching="buckets", num_buckets=2, tokens_per_update=tokens)
    return make_batches([corpus], [1.0], data, seed=0), corpus.counts


def split_means(eval_step: Any, params: Any, batches: Batches, mesh: Mesh) -> dict[str, float]:
    """Return the mean loss, nll, perplexity and accuracy over one pass of the batches."""
    rows = [
        eval_step(params, put_batch(mesh, {k: v[None] for k, v in batches[i].items()})) for i in range(len(batches))
    ]
    totals: dict[str, tuple[float, float]] = {}
    for sums in jax.device_get(rows):
        for name, (total, count) in sums.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(count))
    return metrics.summarize(totals)


def evaluate(config: Config, workdir: Path) -> dict[str, Any]:
    """Score every test set with the run's weights, write results.json and the outputs, and return the results."""
    predictor = load(workdir, config)
    mesh = make_mesh(config.mesh.data)
    task = build_task(config)
    eval_step = make_eval_step(make_loss(predictor.model, task), mesh)
    params = jax.device_put(predictor.params, replicated(mesh))
    results: dict[str, Any] = {"schema": SCHEMA}
    for key, name in config.data.test_splits().items():
        split = open_split(config.data, name)
        pairs = list(split.read(Counter()))
        outputs = predictor.predict([pair.source for pair in pairs])
        (workdir / "outputs").mkdir(exist_ok=True)
        (workdir / "outputs" / f"{key}.txt").write_text("".join(line + "\n" for line in outputs), newline="\n")
        scores = task.score(outputs, [pair.target for pair in pairs], [pair.group for pair in pairs])
        batches, counts = evaluation_batches(config, predictor.tokenizers, split)
        means = split_means(eval_step, params, batches, mesh)
        scores |= {"perplexity": {"score": means["perplexity"]}, "token_accuracy": {"score": means["accuracy"]}}
        results[key] = {**scores, "pairs": len(pairs), "counts": counts, "checksum": split.fingerprint}
    results["run"] = provenance(config, workdir, predictor)
    (workdir / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return results


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
        "sources_cut": predictor.cut,
        "hardware": f"{jax.device_count()} x {device.device_kind} ({platform.machine()})",
        "wall_seconds": round(progress["seconds"], 1),
        "libraries": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }


def report_scores(results: dict[str, Any], config: Config, workdir: Path) -> str:
    """Return the table of scores and what to try next, as commands to copy."""
    command = f"python -m jformer.main --workdir={workdir}"
    return f"""
{metrics.score_table(results)}

scores and their provenance: {workdir}/results.json; the translations: {workdir}/outputs/
Try next:
  {command} --mode=predict < TEXT                      # translate lines of your own
  {command} --mode=evaluate --config.decode.beam_size={config.decode.beam_size + 4}   # a wider beam
  tensorboard --logdir={workdir}                       # the curves (pip install tensorboard)"""
