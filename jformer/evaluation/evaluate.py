"""Score a run: losses of the test sets, and answers against references, written to results.json."""

import dataclasses
import hashlib
import json
import os
import platform
import shlex
from collections import Counter
from typing import Any

import jax
from etils.epath import Path

from jformer import plugins
from jformer.checkpoints import checkpoint
from jformer.config import load_config
from jformer.config.options import Config, flatten, own_parts
from jformer.config.resume import with_saved_config
from jformer.data.progress import show_progress
from jformer.data.sources import open_split
from jformer.data.vocabularies import directed
from jformer.errors import UserError
from jformer.evaluation import records, results
from jformer.evaluation.score_tables import score_table, scored_sets
from jformer.inference.answers import CUT
from jformer.inference.formats import one_line
from jformer.inference.predict import Predictor, load
from jformer.models.parts import count_params, parameter_rows
from jformer.parallel import processes
from jformer.parallel.backend import target_of
from jformer.parallel.devices import arithmetic
from jformer.parallel.sharding import row_shards
from jformer.tasks.build import build_scoring_task, build_sized, build_task, choose_decoding_dtype, open_mesh
from jformer.tasks.scoring_command import check_commands
from jformer.tasks.split_loss import evaluation_batches, make_eval_step, split_sums
from jformer.tasks.task import CLASSES, SPAN, VECTOR, make_loss

ANSWERS_WITH_REFERENCES = ("text", SPAN, VECTOR, *CLASSES)


def evaluate(config: Config, workdir: Path, folder: Path | None = None) -> dict[str, Any]:
    """Score every test set with the run's weights, write results.json and the outputs, and return the new results.

    They go into the run's directory, or into `folder`. All processes return the results; the main one writes them and
    shows the progress. Raises UserError for the directory of another run, and for results of a newer version.
    """
    folder = folder or workdir
    if (folder / "config.json").exists() and os.path.realpath(folder) != os.path.realpath(workdir):
        raise UserError(
            f"--output={folder} is the directory of another run, whose scores it holds: name another folder"
        )
    results.read(folder)  # refuses results of a newer version now, not after hours
    processes.enter_phase("opening the trained run")
    saved = load_config(workdir / "config.json")
    config = with_saved_config(config, saved)
    refuse_other_languages(config, saved)
    check_commands(config)
    mesh = open_mesh(config)
    quiet = not processes.is_main_process()
    config = choose_decoding_dtype(config, mesh)
    with show_progress("opening the trained run", quiet=quiet):
        predictor = load(workdir, config, mesh)
    computing = dataclasses.replace(config, model=config.model.merged)  # decode.dtype applies to answers only
    model = build_sized(computing, predictor.task, predictor.tokenizers)
    eval_step = make_eval_step(make_loss(model, predictor.task.loss), mesh)
    has_references = predictor.task.answer in ANSWERS_WITH_REFERENCES
    scored: dict[str, Any] = {"schema": records.SCHEMA}
    for key, (part, name) in config.data.test_sets().items():
        split, languages = open_split(part, name), config.data.languages(part)
        processes.check_same({f"the text of {name}": split.fingerprint})
        processes.enter_phase(f"answering {key}")
        examples = [pair._replace(languages=languages) for pair in split.read(Counter())]
        with show_progress(f"answering {key}", len(examples), quiet) as done:
            predictor.on_answered = done.count
            outputs = [one_line(text) for text in predictor.answers_to(examples)] if has_references else []
        if outputs and not quiet:
            results.save_outputs(folder, key, outputs)
        processes.enter_phase(f"scoring {key}")
        with processes.main_process_first():
            divisor = row_shards(mesh) * config.train.accumulation
            asked = languages[0] or config.decode.source_language, languages[1] or config.decode.target_language
            tokenizers = directed(predictor.tokenizers, config.data, asked)
            own = config.of_test_set(key)
            task = build_scoring_task(own)
            batches, corpus = evaluation_batches(config.data, task, tokenizers, split, divisor)
        with show_progress(f"scoring {key}", quiet=quiet):
            sums = split_sums(eval_step, predictor.params, batches, mesh, model.config, config.train.accumulation)
            scores = task.score(outputs, examples, sums)
        for name, entry in scores.items():
            if (each := entry.pop("segments", None)) and not quiet:
                results.save_outputs(folder, f"{key}.{name}", [*map(str, each)])
        counts: dict[str, Any] = {"examples": len(examples), "counts": corpus.counts, "checksum": split.fingerprint}
        if any(languages):
            trained = languages in map(config.data.languages, config.data.trained())
            counts |= {"languages": [*languages], "trained": trained}
        scored[key] = {**scores, **counts, results.SETTINGS: results.settings_of(own, predictor.steps)}
    scored["run"] = provenance(config, workdir, predictor)
    if not quiet:
        results.save(folder, scored)
    return scored


def refuse_other_languages(config: Config, saved: Config) -> None:
    """Raise UserError for decode.*_language if test sets have their own languages, unless the run was saved with it."""
    for side, key in enumerate(("source_language", "target_language")):
        asked = getattr(config.decode, key)
        own = {config.data.languages(part)[side] for part, _ in config.data.test_sets().values()} - {"", asked}
        if own and asked not in ("", getattr(saved.decode, key)):
            raise UserError(f"decode.{key}={asked!r}: test sets have languages of their own ({min(own)}): leave it out")


def provenance(config: Config, workdir: Path, predictor: Predictor) -> dict[str, Any]:
    """Return what a reader needs to interpret or reproduce the scores."""
    with checkpoint.open_run(workdir) as saved:
        progress = saved.newest_manifest().progress
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)
    device = jax.devices()[0]
    parts = plugins.digests_of_imported(own_parts(flatten(dataclasses.asdict(config))))
    return {
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "data": progress["data"],
        "seed": config.seed,
        "weights": config.evaluate.weights,
        "training_dtype": config.model.dtype,
        "decoding_dtype": config.decode.dtype or config.model.dtype,
        "precision": config.model.precision,
        "arithmetic": arithmetic(config.model.dtype, target_of(device), config.model.precision),
        "tokens_per_update": config.data.tokens_per_update,
        "updates": progress["step"],
        "parameters": count_params(predictor.params),
        "parameters_by_part": {part: count for part, _, count in parameter_rows(predictor.params)},
        "inputs_cut": predictor.counts[CUT],
        "hardware": f"{jax.device_count()} x {device.device_kind} ({platform.machine()})",
        "wall_seconds": round(progress["seconds"], 1),
        "libraries": processes.library_versions(),
        "code": processes.code_version(),
        **({"parts": parts} if parts else {}),
    }


PREDICT = {  # task → the purpose of --mode=predict
    "translate": "translate lines of your own",
    "lm": "continue lines of your own",
    "prefix_lm": "answer lines of your own",
    "classify": "label lines of your own (images by their paths)",
    "caption": "describe images of your own, by their paths",
    "tag": "tag the words of lines of your own",
    "qa": "answer questions of your own, each with a TAB and its context",
    "embed": "write the vectors of lines of your own",
    "mlm": "fill in the masks of lines of your own",
}


def report_scores(
    scored: dict[str, Any], config: Config, workdir: Path, folder: Path | None = None, page: str = ""
) -> str:
    """Return the table of scores, where they and the run's page were written, and commands to try next.

    Args:
        scored: the content of results.json, as `evaluate` returns it.
        config: of the run, with the decoding options used.
        workdir: of the run, for the commands to try next.
        folder: where the scores were written; None = the workdir.
        page: the line with the path of the page; "" = none was written.
    """
    answer = build_task(config).answer
    mode = "embed" if answer == VECTOR else "predict"
    tries = [(f"--mode={mode} < TEXT", PREDICT.get(config.task, "answer lines of your own"))] if answer else []
    sets = scored_sets(scored)
    if sets and answer == "text" and config.decode.search == "beam":
        wider = config.decode.beam_size + 4 * config.decode.beam_groups
        tries += [(f"--mode=evaluate --config.decode.beam_size={wider}", "a wider beam")]
    quoted = shlex.quote(str(workdir))
    own = f" --config.evaluate.command={shlex.quote(config.evaluate.command)}" if config.evaluate.command else ""
    lines = [f"  python -m jformer.main --workdir={quoted}{own} {flags}   # {purpose}" for flags, purpose in tries]
    lines += [f"  tensorboard --logdir={quoted}   # the curves (pip install tensorboard)"]
    outputs = f"; the outputs: {folder or workdir}/outputs/" if sets and answer in ANSWERS_WITH_REFERENCES else ""
    shown = f"\n{page}" if page else ""
    return f"""
{score_table(scored) if sets else "no test set: name one in data.test to have it scored"}

scores and their provenance: {folder or workdir}/results.json{outputs}{shown}
Try next:
{chr(10).join(lines)}"""
