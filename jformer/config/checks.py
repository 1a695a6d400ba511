"""Checks of a config: values that cannot work, alone or together.

Sections that are defined in another room check their own values there. `check` runs before a config is used;
`divide_rows` needs the number of devices and runs once a mesh is open.
"""

import dataclasses
import math
import operator
import re
from collections import Counter

import numpy as np

from jformer.config.options import (
    ENDING_SCHEDULES,
    OF_IMAGES,
    OF_TOKENS,
    ONE_PASS,
    OPEN_SCHEDULES,
    OPTIMIZERS,
    READERS,
    SCHEDULES,
    TASKS,
    TEST_SCORES,
    TEXT_SCORES,
    TRACKERS,
    WEIGHTS,
    Config,
    OptimConfig,
    changed,
    score_commands,
    scores_during,
)
from jformer.data.progress import counted
from jformer.decoding.decode_config import DEFAULTS, SEARCHES_ALONE_READ, UTILITIES, DecodeConfig
from jformer.errors import UserError, check_choice, check_least, check_range, refuse_unknown
from jformer.models import ModelConfig
from jformer.plugins import check_part, is_own
from jformer.storage import in_bucket, run_path


def check(config: Config) -> None:
    """Raise UserError for the first combination of options that cannot work."""
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed={config.seed} must be 0 to {2**32 - 1}")
    check_part("task", config.task, tuple(TASKS))
    (config.model.with_vectors() if config.task == "embed" else config.model).check()
    config.data.check()
    if "://" in config.data.cache_dir:
        raise UserError(
            f"data.cache_dir={config.data.cache_dir!r} must be a folder on disk: corpora are memory-mapped from it"
        )
    if config.model.execution.rows == "one_text" and config.data.batching == "packed":
        raise UserError("model.execution.rows='one_text' needs data.batching='buckets', not 'packed': use 'auto'")
    if config.model.execution.rows == "one_text" and config.task == "embed":
        raise UserError("model.execution.rows='one_text': a row of task='embed' holds a pair of texts; use 'auto'")
    _check_train(config)
    _check_optim(config)
    _check_evaluate(config)
    config.decode.check(searched=config.task not in ONE_PASS)
    _check_decode(config)
    _check_task(config)
    _check_mesh(config)


def _check_train(config: Config) -> None:
    train = config.train
    counts = ("num_steps", "log_every", "checkpoint_every", "keep_last", "accumulation", "max_skipped")
    check_least("train", train, counts, 1)
    check_least("train", train, ("eval_every", "patience", "samples", "stall_seconds", "peak_flops"), 0)
    check_least("train", train, ("num_epochs", "max_minutes", "checkpoint_minutes"), 0)
    check_range("train", train, ("ema_decay",), 0, 1)
    if train.eval_every % train.checkpoint_every:
        fitting = math.gcd(train.checkpoint_every, train.eval_every)
        raise UserError(
            f"train.checkpoint_every={train.checkpoint_every} must divide train.eval_every={train.eval_every}, "
            f"so that the best evaluation has a checkpoint: set it to {fitting}"
        )
    if train.eval_every and not config.data.validation_sets():
        raise UserError(f"train.eval_every={train.eval_every} needs data.valid: name a split, or set it to 0")
    if train.patience and not train.eval_every:
        raise UserError(f"train.patience={train.patience} needs evaluations: set train.eval_every")
    if train.max_minutes and config.optim.schedule not in OPEN_SCHEDULES:
        raise UserError(
            f"train.max_minutes={train.max_minutes:g} may end the run before optim.schedule={config.optim.schedule!r}, "
            f"which ends at train.num_steps, has decayed: leave it out, or use {', '.join(OPEN_SCHEDULES)}"
        )
    without = config.task == "classify" and config.data.labels == "number"  # a predicted number is not right or wrong
    check_choice("train.best_by", train.best_by, ("loss", *["accuracy"] * (not without), *config.evaluate.during))
    if train.profile_steps and not _are_updates(train.profile_steps, train.num_steps):
        raise UserError(
            f"train.profile_steps={train.profile_steps!r} must be FIRST:LAST, two updates from 1 to "
            f"train.num_steps={train.num_steps}, such as 10:13"
        )
    for name in train.trackers:
        check_choice("train.trackers", name, TRACKERS)
    for pattern in train.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"train.freeze={pattern!r} is not a regular expression: {error}") from error
    if config.model.lora.rank and not train.init_from:
        raise UserError(f"model.lora.rank={config.model.lora.rank} adapts a trained model: name it in train.init_from")
    for key in ("source_vectors", "target_vectors"):
        if config.model.lora.rank and getattr(train, key):
            raise UserError(f"train.{key} would replace a table that model.lora keeps frozen: leave it out")
    if config.data.row_multiple % train.accumulation:
        raise UserError(
            f"train.accumulation={train.accumulation} must divide data.row_multiple={config.data.row_multiple}, "
            "or set data.row_multiple=0 to derive it"
        )


def _are_updates(steps: str, count: int) -> bool:
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", steps)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= count


def _check_r_drop(config: Config) -> None:
    compares = f"optim.r_drop={config.optim.r_drop} compares"
    if config.optim.r_drop and (config.task in ("qa", "embed") or config.data.labels != "one" or config.model.head.crf):
        raise UserError(f"{compares} one prediction per token or text, which this task does not make: set it to 0.0")
    model = config.model
    rates = model.dropout, model.attention_dropout, model.activation_dropout, model.lora.dropout
    if config.optim.r_drop and not any(rates):
        raise UserError(
            f"{compares} two passes with dropout, and this model has none: set model.dropout, or optim.r_drop=0.0"
        )


def _check_optim(config: Config) -> None:
    optim, steps = config.optim, config.train.num_steps
    check_part("optim.loss", optim.loss, ("task",))
    check_part("optim.optimizer", optim.optimizer, OPTIMIZERS)
    check_part("optim.schedule", optim.schedule, SCHEDULES)
    check_range("optim", optim, ("b1", "b2", "label_smoothing"), 0, 1)
    least = ("warmup", "decay", "weight_decay", "clip_norm", "learning_rate", "epsilon", "r_drop")
    check_least("optim", optim, least, 0)
    _check_r_drop(config)
    for key in ("b1", "b2"):
        value = getattr(optim, key)
        if np.float32(value) == 1:
            raise UserError(f"optim.{key}={value} is 1 in float32: its average would never move; use 0.9999999 or less")
    if optim.epsilon < np.finfo(np.float32).tiny and optim.optimizer != "adafactor":  # XLA flushes it to 0
        raise UserError(f"optim.epsilon={optim.epsilon} divides 0 by 0 where a gradient is 0: use 1e-9")
    if not 0 <= optim.final_rate <= 1:
        raise UserError(f"optim.final_rate={optim.final_rate} must be 0 to 1: it is a share of the peak")
    for key in ("warmup", "decay"):
        count = getattr(optim, key)
        if count >= 1 and (count != round(count) or count >= 2**31):
            raise UserError(f"optim.{key}={count} must be whole updates (2147483647 at most), or a share below 1")
    if optim.schedule in ENDING_SCHEDULES:
        if (ramp := optim.ramp_steps(steps)) > steps:
            decay = f" and optim.decay={optim.decay}" if ramp > optim.warmup_steps(steps) else ""
            raise UserError(
                f"optim.warmup={optim.warmup}{decay} take more updates than train.num_steps={steps}, when "
                f"optim.schedule={optim.schedule!r} ends: give shares of them, such as 0.08"
            )
    elif optim.final_rate and optim.schedule in OPEN_SCHEDULES:
        raise UserError(
            f"optim.final_rate={optim.final_rate} is read by optim.schedule={' or '.join(map(repr, ENDING_SCHEDULES))}"
        )
    if optim.optimizer == "adafactor" and config.model.parametrization == "mup":
        raise UserError("model.parametrization='mup' divides the rates of Adam: use optim.optimizer='adam' or 'adamw'")
    if optim.weight_decay and optim.optimizer in ("adam", "adafactor"):
        raise UserError(f"optim.weight_decay={optim.weight_decay} is read by optim.optimizer='adamw' only")


def _check_evaluate(config: Config) -> None:
    evaluate = config.evaluate
    check_choice("evaluate.weights", evaluate.weights, WEIGHTS)
    for name in evaluate.scores:
        check_part("evaluate.scores", name, TEXT_SCORES)
    check_least("evaluate", evaluate, ("average_last", "during_examples"), 1)
    check_least("evaluate", evaluate, ("command_seconds",), 0)
    try:
        commands = score_commands(evaluate)
    except ValueError as error:
        raise UserError(f"evaluate.command={evaluate.command!r}: {error}") from error
    keys = config.data.test_splits()
    files = Counter([*keys, *(f"{key}.{name}" for key in keys for name in commands)])
    if clash := next((name for name, count in files.items() if count > 1), ""):
        raise UserError(f"data.test={(*keys,)} with evaluate.command={evaluate.command!r}: both write "
                        f"outputs/{clash}.txt: rename the set")  # fmt: skip
    for name in evaluate.during:
        if not scores_during(config):
            raise UserError(f"evaluate.during={evaluate.during}: task={config.task!r} has no answers to score")
        allow = check_part if {*TEXT_SCORES} & {*scores_during(config)} else check_choice
        if not is_own(config.task):  # its scores are known only at the first validation
            allow("evaluate.during", name, (*scores_during(config), *commands))
    if evaluate.during and not config.train.eval_every:
        raise UserError(f"evaluate.during={evaluate.during} needs evaluations: set train.eval_every")
    if evaluate.weights == "ema" and not config.train.ema_decay:
        raise UserError("evaluate.weights='ema' needs train.ema_decay above 0")
    if evaluate.weights == "best" and not config.train.eval_every:
        raise UserError("evaluate.weights='best' needs evaluations: set train.eval_every")


def _check_decode(config: Config) -> None:
    if config.decode.outputs == "conll" and config.task != "tag":
        raise UserError(f"decode.outputs='conll' has a line for each word and its tag: task={config.task!r} has none")
    commands = score_commands(config.evaluate)
    check_choice("decode.mbr_utility", config.decode.mbr_utility, (*UTILITIES, *commands))
    if config.decode.mbr_utility != DEFAULTS["mbr_utility"] and config.decode.search != "mbr":
        key, instead = f"decode.mbr_utility={config.decode.mbr_utility!r}", ", or decode.rerank instead"
        remedy = f"set that{instead if config.decode.mbr_utility in commands else ''}"
        raise UserError(f"{key} is read by decode.search='mbr' only: {remedy}")
    if config.decode.rerank not in ("", *commands):
        names = ", ".join(commands) or "there is none"
        raise UserError(f"decode.rerank={config.decode.rerank!r} names no evaluate.command: {names}")
    if config.decode.n_best > 1 and config.task in ("classify", "tag", "embed"):
        given = f"decode.n_best={config.decode.n_best}"
        raise UserError(f"{given}: task={config.task!r} has one answer to an input: leave it out")
    for key in SEARCHES_ALONE_READ if config.task in ONE_PASS else ():
        if getattr(config.decode, key) != DEFAULTS[key]:
            given = f"decode.{key}={getattr(config.decode, key)!r}"
            raise UserError(f"{given} is read by searches, but task={config.task!r} answers in one pass: leave it out")
    if config.decode.alignments and config.model.vision.source:
        raise UserError("decode.alignments=True links words of two texts: an image has none; --mode=explore shows it")
    refuse_without_attention(config.decode, config.model)


def refuse_without_attention(decode: DecodeConfig, model: ModelConfig) -> None:
    """Raise UserError for a decoding option that reads attention to a source if the model has none."""
    for key in ("coverage_penalty", "alignments"):
        if getattr(decode, key) and model.family != "encdec":
            raise UserError(
                f"decode.{key}={getattr(decode, key)} reads attention to a source: model.family={model.family!r} has "
                "none"
            )
        if getattr(decode, key) and model.recurrent.cell and model.recurrent.attention == "none":
            raise UserError(f"decode.{key}={getattr(decode, key)} needs model.recurrent.attention")


def _check_task(config: Config) -> None:
    model, data, train = config.model, config.data, config.train
    if not is_own(config.task) and model.family not in TASKS[config.task]:
        able = ", ".join(task for task, families in TASKS.items() if model.family in families)
        known = f"model.family={model.family!r}, which learns {able}"
        raise UserError(f"task={config.task!r} is not for {known}: set one of these, or another family")
    for key, (value, _) in changed(config).items():
        if (tasks := READERS.get(key)) and not may_be(config, *tasks):
            readers = " or ".join(map(repr, tasks))
            raise UserError(f"{key}={value!r} is read by task={readers} only, not by {config.task!r}: leave it out")
    sources = [part.source for part in (data, *data.mixture)]
    if not may_be(config, "tag", "translate") and "conll" in sources:
        raise UserError(f"data.source='conll' has words and their tags: task='tag' learns them, not {config.task!r}")
    if not may_be(config, "qa") and "squad" in sources:
        raise UserError(f"data.source='squad' is for task='qa', not {config.task!r}: set the task, or another source")
    if config.task == "classify" and model.head.pooling == "none":
        raise UserError(
            "model.head.pooling='none' classifies each token: task='classify' needs one vector for each text"
        )
    _check_pooling(config)
    if data.piece_start == "previous" and (not may_be(config, "lm") or data.overlong != "split"):
        raise UserError(
            f"data.piece_start='previous' is about the pieces of long texts: it needs task='lm' and data.overlong="
            f"'split', not {config.task!r} and {data.overlong!r}"
        )
    if model.vision.source and not may_be(config, *OF_IMAGES):
        raise UserError(
            f"model.vision.source=True: the source of task={config.task!r} is a text, not an image; use False"
        )
    if not model.reads_images:
        for key in ("augment", "image_size"):
            if value := getattr(data, key):
                raise UserError(f"data.{key}={value!r} is about images: task={config.task!r} reads texts here")
        refuse_unknown("model.vision", model.vision, (), f"task={config.task!r}, which reads texts here,")
    _check_languages(config)
    _check_vectors(config)
    if model.recurrent.cell and data.batching == "packed":
        raise UserError(
            "data.batching='packed' puts several texts in a row, where a recurrent state would leak: use 'buckets'"
        )
    if model.recurrent.cell and config.task == "prefix_lm":
        raise UserError(
            "task='prefix_lm': a recurrent state (model.recurrent.cell) cannot see a whole prefix: use task='lm'"
        )
    refuse_longer_texts(config, model)
    if config.task == "translate" and model.shared_embedding and not data.vocab_shared:
        raise UserError("model.shared_embedding=True needs data.vocab_shared=True: two vocabularies need two tables")
    for side in ("source", "target"):
        if getattr(train, f"{side}_vectors") and side not in _embedded(config):
            raise UserError(f"train.{side}_vectors: model.family={model.family!r} embeds no {side} tokens")
    if train.source_vectors and train.target_vectors and (model.shared_embedding or config.task == "embed"):
        raise UserError(
            "train.source_vectors and train.target_vectors: one table, as shared by both sides or of task='embed', can "
            "start from one of them only"
        )


def may_be(config: Config, *tasks: str) -> bool:
    """Return whether the task is one of these, or a user-defined one, which may build on one of them."""
    return config.task in tasks or is_own(config.task)


def _embedded(config: Config) -> tuple[str, ...]:
    """Return the sides whose tokens the model embeds."""
    if config.task == "embed":
        return ("source", "target")
    if config.model.vision.source:
        return ("target",)
    return {"encoder": ("source",), "decoder": ("target",), "vit": ()}.get(config.model.family, ("source", "target"))


def refuse_longer_texts(config: Config, model: ModelConfig) -> None:
    """Raise UserError if the config allows texts longer than a model's learned positions.

    The model is that of the config, or of another run that reads the same texts.
    """
    data = config.data
    limited = ("target",) if config.task == "denoise" else _embedded(config)  # its source is made from its target
    longest = max((getattr(data, f"max_{side}_length") for side in limited), default=0)
    longest += data.max_source_length if config.task == "prefix_lm" else 0  # which comes before the target
    if model.positions == "learned" and longest > model.max_length:
        raise UserError(
            f"model.max_length={model.max_length} is below the {longest} tokens that data allows: raise it or lower "
            "data.max_source_length and data.max_target_length"
        )


def _check_pooling(config: Config) -> None:
    """Raise UserError where a classifier would pool a recurrent state that has not read the whole text."""
    model, pooling = config.model, config.model.head.pooling
    two = model.recurrent.bidirectional
    if config.task == "classify" and model.recurrent.cell and (pooling == "first" or (pooling == "last" and two)):
        which = "of a direction that has read one token" if two else "that has read one token"
        raise UserError(f"model.head.pooling={pooling!r} reads a recurrent state {which}: use 'final', or 'mean'")
    if pooling == "final" and not model.recurrent.cell:
        raise UserError("model.head.pooling='final' is for recurrent models: set model.recurrent.cell, or use 'last'")


def _check_languages(config: Config) -> None:
    """Raise UserError for language symbols that a vocabulary cannot have, or for corpora without languages."""
    data, place = config.data, f"data.language_symbols={config.data.language_symbols!r}"
    if data.language_symbols and data.tokenizer not in ("bpe", "unigram") and not config.train.init_from:
        raise UserError(f"{place} needs data.tokenizer='bpe' or 'unigram', not {data.tokenizer!r}")
    if data.language_symbols and not all(all(data.languages(part)) for part in data.parts()):
        raise UserError(f"{place} needs a source_language and a target_language of every corpus")


def _check_vectors(config: Config) -> None:
    """Raise UserError for models that give no vectors, and for a model of vectors in a run of another task."""
    model, optim, task = config.model, config.optim, config.task
    if task != "embed":
        if model.head.vectors:
            raise UserError(f"model.head.vectors=True is for task='embed', not {task!r}: set it to False")
        return
    if not optim.temperature > 0:
        raise UserError(f"optim.temperature={optim.temperature} must be above 0: cosines are divided by it")
    if model.head.pooling in ("none", *["first"] * (model.family == "decoder")):
        why = "gives no single vector" if model.head.pooling == "none" else "takes BOS in a decoder"
        raise UserError(f"model.head.pooling={model.head.pooling!r} {why}: task='embed' needs 'last' or 'mean'")
    if model.recurrent.cell or model.vision.source:
        key = "recurrent.cell" if model.recurrent.cell else "vision.source"
        raise UserError(f"model.{key}={operator.attrgetter(key)(model)!r}: task='embed' trains Transformers of texts")


def _check_mesh(config: Config) -> None:
    sizes = dataclasses.asdict(config.mesh)
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise UserError(f"mesh.{axis}={size} must be at least 1, or -1 for as many as there are devices")
    open_ended = [f"mesh.{axis}=-1" for axis, size in sizes.items() if size == -1]
    if len(open_ended) > 1:
        raise UserError(f"{open_ended[-1]} and {open_ended[0]}: only one axis can be -1, all remaining devices")
    option = config.model.needs_whole_rows
    option = f"optim.loss={config.optim.loss!r}" if config.optim.loss != "task" else option
    option = option if config.task in OF_TOKENS else f"task={config.task!r}"
    if config.mesh.sequence != 1 and option:
        raise UserError(f"mesh.sequence={config.mesh.sequence}: {option} needs whole rows: set mesh.sequence=1")


def refuse_unread(config: Config) -> None:
    """Raise UserError for options that a new run would ignore; saved runs may have them.

    These are options that others leave without effect, and the source of a recurrent encoder–decoder whose decoder gets
    nothing from its encoder.
    """
    config.data.refuse_unread()
    config.decode.refuse_unread()
    scorers = [name for name in config.evaluate.scores if is_own(name)]
    if scorers and not is_own(config.task) and not {*TEXT_SCORES} & {*TEST_SCORES.get(config.task, ())}:
        raise UserError(f"evaluate.scores={scorers[0]!r} scores texts, and task={config.task!r} is not scored by them: "
                        "leave it out")  # fmt: skip
    optim, train = config.optim, config.train
    if optim.decay != OptimConfig.decay and optim.schedule in SCHEDULES and optim.schedule != "warmup_stable_decay":
        raise UserError(f"optim.decay={optim.decay} is read by optim.schedule='warmup_stable_decay' only: leave it out")
    of_adam = [key for key in ("b1", "b2", "epsilon") if getattr(optim, key) != getattr(OptimConfig, key)]
    if optim.optimizer == "adafactor" and of_adam:
        raise UserError(f"optim.{of_adam[0]}={getattr(optim, of_adam[0])} is not read by optim.optimizer='adafactor': "
                        "leave it out")  # fmt: skip
    if train.best_by != "loss" and not train.eval_every:
        raise UserError(f"train.best_by={train.best_by!r} needs evaluations: set train.eval_every")
    if config.model.lora.rank and not config.model.lora.alpha:
        raise UserError("model.lora.alpha=0 multiplies the adapters by 0, so they would learn nothing: raise it")
    _refuse_unread_of_model(config.model)


def _refuse_unread_of_model(model: ModelConfig) -> None:
    """Raise UserError for options that a new model would ignore or be harmed by, and for a source it never reads."""
    recurrent = model.recurrent
    if recurrent.cell:
        refuse_unknown("model.execution", model.execution, ("rows",), "a recurrent model")
    if model.positions != "relative":
        refuse_unknown("model.relative", model.relative, (), f"model.positions={model.positions!r}")
    if model.family == "vit" and model.embedding_scale != "none":
        raise UserError(
            f"model.embedding_scale={model.embedding_scale!r} is for embedded tokens; it would drown out patches or "
            "positions: family='vit' needs 'none'"
        )
    if model.family == "encdec" and recurrent.cell and (recurrent.attention, recurrent.bridge) == ("none", "zeros"):
        raise UserError(
            f"model.recurrent.cell={recurrent.cell!r} without attention or bridge never reads the source: set "
            "model.recurrent.attention, or model.recurrent.bridge='copy' or 'dense'"
        )


def divide_rows(config: Config, shards: int, fixed: bool = False) -> Config:
    """Return the config with data.row_multiple set for a mesh that splits rows into `shards`.

    `fixed`: a saved run determines the multiple, so that the message does not propose to raise it.
    Raises UserError if the given multiple does not divide evenly among devices and microbatches.
    """
    multiple, parts = config.data.row_multiple, shards * config.train.accumulation
    if not multiple:
        data = dataclasses.replace(config.data, row_multiple=math.lcm(config.data.rows_divide_by(), parts))
        return dataclasses.replace(config, data=data)
    if multiple % parts:
        raise UserError(
            f"data.row_multiple={multiple} must be a multiple of {parts}: mesh.data x mesh.fsdp = "
            f"{shards} times train.accumulation={config.train.accumulation}; "
            + ("choose others, or a new --workdir" if fixed else "raise it, or lower one of them")
        )
    return config


def count_epochs(config: Config, updates: int) -> Config:
    """Return the config with train.num_steps set from train.num_epochs, if given; an epoch has `updates` updates.

    Raises UserError if they exceed train.num_steps or conflict with other options.
    """
    epochs, most = config.train.num_epochs, config.train.num_steps
    if not epochs:
        return config
    steps = max(1, round(epochs * updates))
    if steps > most:
        raise UserError(
            f"train.num_epochs={epochs:g} takes {counted(steps, 'updates')} ({updates} an epoch), more than "
            f"train.num_steps={most}: raise train.num_steps or lower train.num_epochs"
        )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=steps))
    check(config)
    return config


def name_parent(config: Config) -> Config:
    """Return the config with the absolute path of the run that it starts from, to find it from any directory."""
    if not config.train.init_from or in_bucket(run_path(config.train.init_from)):
        return config
    base = str(run_path(config.train.init_from).absolute())
    return dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=base))
