"""A training run, assembled: text, task, model, optimizer, state, update, validation, loop. Reads from top to bottom.

The test sets are scored afterwards by `evaluation.evaluate`; `main` calls both.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils.epath import Path
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import checks, load_config, resolve, save_config
from jformer.config.options import TEXT_SCORES, Config, score_commands
from jformer.config.resume import resume_config
from jformer.data.pipeline import Batches, prefetch
from jformer.data.progress import show_progress
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import directed
from jformer.decoding.decode_config import NO_GREEDY_ANSWER_READS
from jformer.errors import BrokenRunError, UserError
from jformer.inference.inputs import writable
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained, member_config
from jformer.models.flops import update_flops
from jformer.models.parts import count_params
from jformer.parallel import processes
from jformer.parallel.backend import target
from jformer.parallel.devices import find_peak
from jformer.parallel.mesh import SEQUENCE
from jformer.parallel.sharding import row_shards
from jformer.plugins import is_own
from jformer.tasks.batch_arrays import abstract_batch, source_is_prefix
from jformer.tasks.build import build_scoring_task, build_sized, build_task, choose_dtype, choose_lengths, open_mesh
from jformer.tasks.metrics import Scores, tokenization
from jformer.tasks.scoring_command import check_commands
from jformer.tasks.split_loss import EvalStep, make_eval_step, split_sums
from jformer.tasks.sums import Sums
from jformer.tasks.tag import refuse_scores_of_spans
from jformer.tasks.task import CLASSES, Task, make_loss
from jformer.training.clock import has_ended
from jformer.training.corpora import Data, fingerprints, open_data, with_vocabulary_of_parent
from jformer.training.feed import make_feed
from jformer.training.finiteness import Examination
from jformer.training.forecast import memory_lines
from jformer.training.initial_state import inherit, open_state
from jformer.training.introduction import introduction, kernel_line
from jformer.training.lock import sole_trainer
from jformer.training.log import Cost, TrainingLog
from jformer.training.loop import loop
from jformer.training.memory import evaluation_memory, update_memory
from jformer.training.optim import build_optimizer
from jformer.training.state import Progress, TrainState, create_state
from jformer.training.step import make_train_step
from jformer.training.validation import Validation, answered_examples, forget_best, validate

ONES = ("beam_size", "beam_groups", "n_best")
GREEDY: dict[str, Any] = {"search": "beam", "alignments": False, "rerank": "", **dict.fromkeys(ONES, 1)}


def train(config: Config, workdir: Path, run_loop: Callable[..., TrainState] = loop) -> bool:
    """Train, or resume the run in `workdir`; return False if a signal stopped it early.

    `run_loop` gets the arguments of `training.loop.loop` by name. Saves in progress are finished even if it raises.
    """
    quiet = not processes.is_main_process()
    with (
        contextlib.nullcontext() if quiet else sole_trainer(workdir),
        open_checkpoints(config, workdir) as checkpoints,
        processes.readers_may_leave(),
    ):
        processes.refuse_unshared(workdir)
        saved = saved_config(workdir, checkpoints)
        config, mesh, choices = settle(config, saved)

        # The task and its text.
        task = build_task(config)
        # Process 0 writes what the others then read. Its worker processes tokenize, or another run that began before.
        with processes.main_process_first(), processes.working_elsewhere():
            data = open_data(config.data, config.train, config.seed, task, workdir, bool(saved) or quiet)
        processes.check_same(fingerprints(data))
        config = checks.count_epochs(config, len(data.batches))
        refuse_later_mistakes(config, task, data)

        # The model, its optimizer, and the state: restored from the newest checkpoint, or new.
        model = build_sized(config, task, data.tokenizers)
        prefix = source_is_prefix(model.config, task.answer)
        shapes, sequence = data.batches.plan.shapes, mesh.shape[SEQUENCE]
        split = mesh.size * config.train.accumulation
        choices.append(kernel_line(model.config, target(), shapes, prefix, sequence, split))
        optimizer = build_optimizer(model, config.optim, config.train.num_steps, config.train.freeze)
        ema, base = bool(config.train.ema_decay), optimizer.base
        create = functools.partial(create_state, tx=optimizer.transform, ema=ema, base=base)
        start = functools.partial(inherit, config, data.tokenizers, mesh, new=not checkpoints.steps())
        with show_progress("loading the parameters", quiet=quiet):
            state, progress, origin = open_state(create, model, mesh, config.seed, checkpoints, start)
        refuse_other_text(data, progress, workdir)
        origin += forget_best(progress, best_measured_with(config), best_measured_with(saved or config))
        progress.config = dataclasses.asdict(config)
        progress.tokenizers = [tokenizer.fingerprint for tokenizer in data.tokenizers]

        # The update, its batches, the examination of updates that are not finite, and the validation.
        loss, tx, frozen = make_loss(model, task.loss, config.optim.r_drop), optimizer.transform, optimizer.frozen
        update = make_train_step(loss, tx, mesh, config.seed, config.train.ema_decay, frozen, optimizer.keeps_finite)
        feed = make_feed(data.batches, model.config, mesh, config.train.accumulation)
        examine = Examination(model, loss, tx, mesh, config.seed, config.optim.passes, frozen)
        eval_step = make_eval_step(loss, mesh)
        trained = Trained(config=config, task=task, tokenizers=data.tokenizers, model=model, params=state.params)
        validation = make_validation(trained, data.valid, eval_step, mesh)

        # The log, and its first lines.
        own, dtype, precision = mesh.local_devices[0], model.config.dtype, model.config.precision
        peak = find_peak(own, mesh.size, dtype, config.train.peak_flops, precision)
        parts = optimizer.frozen_parts
        cost = Cost(lambda work: config.optim.passes * update_flops(model.config, work, parts), peak.flops)

        def explain(state: TrainState, number: int) -> str:
            return examine(state, feed(number - 1)[0], number - 1)

        def longest(batches: Batches) -> dict[str, jax.ShapeDtypeStruct]:
            shape = batches.plan.shapes[-1]
            others = batches.first_row(shape) if is_own(config.task) else {}
            return abstract_batch(model.config, task.answer, shape, mesh, config.train.accumulation, others)

        with TrainingLog(workdir, config, progress, optimizer.schedule, cost, explain) as log:
            parameters, notes = count_params(state.params), [*choices, *origin]
            log.show_start()
            log.show(introduction(config, data, notes, parameters, mesh, peak))
            if has_ended(config.train, progress):
                log.show(f"already trained to update {progress.step}")
            else:
                needed = update_memory(update, state, frozen, longest(data.batches))
                beside = [evaluation_memory(eval_step, state.params, longest(each)) for each in data.valid.values()]
                log.show(memory_lines(config, model.config, mesh, needed, max(beside, default=0)))
                if progress.step:
                    log.show(f"resuming at update {progress.step} of {config.train.num_steps}")
            if processes.is_main_process():
                save_config(config, workdir / "config.json")  # last, so that a refused run leaves no files

            # The loop.
            with contextlib.closing(prefetch(map(feed, itertools.count(progress.step)))) as batches:
                run_loop(
                    train=config.train,
                    state=state,
                    progress=progress,
                    batches=batches,
                    update=update,
                    validate=lambda state: validate(validation, config.train, state, progress, log),
                    checkpoints=checkpoints,
                    log=log,
                )
            processes.enter_phase("the last save")
    return has_ended(config.train, progress)


def settle(config: Config, saved: Config | None) -> tuple[Config, Mesh, list[str]]:
    """Return the config with the choices that depend on the devices, their mesh, and a line for each choice.

    A resumed run has its saved config, with those changes of the new one that are allowed.
    """
    config, taken = (resume_config(saved, config), []) if saved else with_vocabulary_of_parent(config)
    mesh = open_mesh(config)
    config, choices = choose_dtype(config, "model", mesh)
    choices += taken
    config = checks.divide_rows(config, row_shards(mesh), fixed=bool(saved))
    if not saved:
        checks.refuse_unread(config)
        config, lengths = choose_lengths(config, target())
        choices += lengths
    if not saved or config.model.lora.rank:
        config = checks.name_parent(config)
    return config, mesh, choices


def open_checkpoints(config: Config, workdir: Path) -> Checkpoints:
    """Open the checkpoints of a run, keeping train.keep_last of them, or as many as evaluation averages, if more."""
    averaged = config.evaluate.average_last if config.evaluate.weights == "average" else 1
    keep = max(config.train.keep_last, averaged)
    return Checkpoints(workdir / "checkpoints", config.train.checkpoint_every, keep)


def saved_config(workdir: Path, checkpoints: Checkpoints) -> Config | None:
    """Return the config of the run in a workdir, or None for a new one.

    If config.json is missing, the checkpoints have a copy: a run never resumes under another config. Raises UserError
    for imported parameters, which no run trained.
    """
    if checkpoints.steps() == [0]:  # written by import, prune and extend: parameters without an optimizer state
        raise UserError(
            f"{workdir} holds imported parameters, without an optimizer state: train them in a new --workdir with "
            f"--config.train.init_from={workdir}"
        )
    if (workdir / "config.json").exists():
        return load_config(workdir / "config.json")
    return resolve(checkpoints.newest_manifest().progress["config"]) if checkpoints.steps() else None


def make_validation(trained: Trained, valid: Mapping[str, Batches], eval_step: EvalStep, mesh: Mesh) -> Validation:
    """Return the validation: losses of the sets `valid`, greedy answers to their first texts, and their scores.

    `trained` is the run in training; its parameters are replaced at each validation.
    """
    config, task = trained.config, trained.task
    during, scored = config.evaluate.during, config.evaluate.during_examples if config.evaluate.during else 0
    parts, examples = config.data.validation_sets(), dict[str, list[Pair]]()
    for name in valid:
        some = answered_examples(task.answer, config.train.samples, scored, open_split(parts[name], parts[name].valid))
        examples[name] = [pair._replace(languages=config.data.languages(parts[name])) for pair in some]
    most = max(map(len, examples.values()), default=0)
    predictor = greedy_predictor(trained, min(max(1, most), config.decode.batch_size), mesh)
    own = {name: dataclasses.replace(config, data=config.data.of(parts[name])) for name in valid}
    score_texts = {name: build_task(scored_during(each)).score for name, each in own.items()}

    def losses(params: PyTree) -> dict[str, Sums]:
        model, accumulation = trained.model.config, config.train.accumulation
        return {name: split_sums(eval_step, params, each, mesh, model, accumulation) for name, each in valid.items()}

    def answer(params: PyTree) -> dict[str, list[str]]:
        predictor.params = params
        return {name: predictor.answers_to(some) for name, some in examples.items()}

    def score(name: str, answers: Sequence[str], sums: Sums) -> Scores:
        found = score_texts[name](answers[:scored], examples[name][:scored], sums) if during else {}
        if missing := [name for name in during if name not in found]:
            raise BrokenRunError(f"evaluate.during={missing[0]!r}: task={config.task!r} has only {', '.join(found)}")
        return {name: found[name] for name in during}

    return Validation(losses, examples, answer, score)


def greedy_predictor(trained: Trained, batch_size: int, mesh: Mesh) -> Predictor:
    """Return a Predictor that answers with one beam, `batch_size` texts at a time."""
    decode = dataclasses.replace(trained.config.decode, **GREEDY, batch_size=batch_size)
    config = dataclasses.replace(trained.config, decode=decode)
    return Predictor(dataclasses.replace(trained, config=config), mesh=mesh, prepare=False)


def best_measured_with(config: Config) -> dict[str, Any]:
    """Return the options that the value of train.best_by depends on, among those that a resumed run may change.

    Losses depend on none of them; scores depend on the examples, on their own options and on those of greedy decoding.
    """
    name, evaluate = config.train.best_by, config.evaluate
    if name not in evaluate.during:
        return {}
    found: dict[str, Any] = {"evaluate.during_examples": evaluate.during_examples}
    if name in ("bleu", "ter"):
        sets = [
            dataclasses.replace(config, data=config.data.of(part)) for part in config.data.validation_sets().values()
        ]
        found["evaluate.tokenize"] = ", ".join(dict.fromkeys(map(tokenization, sets)))
    if name in ("bleu", "chrf"):
        found["evaluate.lowercase"] = evaluate.lowercase
    if config.task == "embed":
        found["decode.pooling"] = config.decode.pooling
    if command := score_commands(evaluate).get(name):
        found["evaluate.command"] = command
    decode = dataclasses.asdict(config.decode)
    read = {key: value for key, value in decode.items() if key not in (*GREEDY, *NO_GREEDY_ANSWER_READS)}
    return found | {f"decode.{key}": [*value] if isinstance(value, tuple) else value for key, value in read.items()}


def scored_during(config: Config) -> Config:
    """Return the config with the scores of evaluate.during in place of evaluate.scores."""
    names = tuple(name for name in config.evaluate.during if name in TEXT_SCORES or is_own(name))
    own = "; ".join(each for name, each in score_commands(config.evaluate).items() if name in config.evaluate.during)
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, scores=names, command=own))


def refuse_later_mistakes(config: Config, task: Task, data: Data) -> None:
    """Raise UserError for errors that would otherwise appear only when the trained run is scored."""
    check_commands(config)
    for other in config.decode.ensemble:
        member_config(other, config, data.tokenizers)
    if task.answer == "tags":
        refuse_scores_of_spans(config.evaluate.during, data.tokenizers[1])
    if task.answer in CLASSES:
        for key, (part, name) in config.data.test_sets().items():
            refuse_unknown_labels(key, open_split(part, name), data.tokenizers[1])
    refuse_unusable(config, data.tokenizers)
    if task.answer in ("text", "continuation"):
        writable(data.tokenizers[1], config.decode)  # refuses what scoring would refuse: beams and words


def refuse_unusable(config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """Raise UserError for a test set without any example that can be scored, such as one with a blank side."""
    task = build_scoring_task(config)
    for key, (part, name) in config.data.test_sets().items():
        sides = directed(tokenizers, config.data, config.data.languages(part))
        encoder, examples = task.encoder(*sides, evaluating=True), open_split(part, name).read(Counter())
        if not any(encoder.encode([pair], Counter()) for pair in examples):
            raise UserError(f"data.test: all examples of the set {key!r} ({name}) are blank: fill them or leave it out")


def refuse_unknown_labels(key: str, test: Split, labels: Tokenizer) -> None:
    """Raise UserError for a label of a test set that is not in the training text."""
    found = {pair.target: None for pair in test.read(Counter())}
    try:
        labels.encode(list(found))
    except UserError as error:
        raise UserError(f"data.test: the set {key!r}: {error}") from error


def refuse_other_text(data: Data, progress: Progress, workdir: Path) -> None:
    """Store the fingerprints of the texts in the progress; raise UserError if they have changed."""
    texts = [corpus.fingerprint for corpus in data.texts.values()]
    trained, valid = texts[: len(data.corpora)], texts[len(data.corpora) :]
    for what, before, now in (("training", progress.data, trained), ("validation", progress.valid, valid)):
        if before and now and before != now:
            raise UserError(
                f"{workdir}: its {what} text or tokenizer has changed since update {progress.step}: restore it"
            )
    progress.data, progress.valid = trained, valid or progress.valid
