"""Import a model's directory as a run; the table of families. `write_model` exports."""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.reading import first_line
from jformer.checkpoints.weights import abstract_params, write_run
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.tokenizers import NUM_SYMBOLS, ImageTokenizer, LabelTokenizer, NumberTokenizer, Symbols, Tokenizer
from jformer.data.tokenizers.lists import label_set
from jformer.errors import UserError, check_choice
from jformer.models import ModelConfig, build_model
from jformer.parallel import processes
from jformer.parallel.mesh import make_mesh
from jformer.storage import new_directory, replace_content
from jformer.tools.hf import generation_config as generation
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf import tensors, vocabulary
from jformer.tools.hf.bart import BART, M2M100, MBART
from jformer.tools.hf.bert import BERT, DISTILBERT, ROBERTA
from jformer.tools.hf.families import LOGITS_BIAS, Fields, HfFamily, is_bare, model_config, table_of
from jformer.tools.hf.gpt2 import GPT2
from jformer.tools.hf.llama import LLAMA
from jformer.tools.hf.marian import MARIAN
from jformer.tools.hf.sentence_modules import SentenceModules, read_modules
from jformer.tools.hf.t5 import MT5, T5
from jformer.tools.hf.vit import PIXEL_SCALE, VIT, image_steps, pixel_scale

FAMILIES: dict[str, HfFamily] = {
    family.model_type: family
    for family in (GPT2, BERT, ROBERTA, DISTILBERT, LLAMA, T5, MT5, BART, MBART, MARIAN, M2M100, VIT)
}
# In a workdir: the family it was imported from, and the files that an export writes as they came.
ORIGIN = "imported.json"
FIELDS, SETTINGS, PIXELS = "config.json", "generation_config.json", "preprocessor_config.json"
LABELLED = ("classify", "tag")  # tasks whose classes have names
ENDS = 2  # classes of task qa: the first token of an answer, and the last one
BIAS = "final_logits_bias"
TENSORFLOW = {"gamma": "weight", "beta": "bias"}
LONGEST = 512  # tokens of a text where no table of learned positions limits it; answering may raise it
# Defaults for fine-tuning; a config of your own with train.init_from overrides them.
TRAINING = {
    "optim.optimizer": "adamw", "optim.schedule": "linear", "optim.learning_rate": 5e-5, "optim.label_smoothing": 0.0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Texts:
    """Facts about texts that a model's directory may not contain."""

    source_language: str = ""  # as the tokenizer writes it, such as eng_Latn
    target_language: str = ""
    prefix: str = ""  # prepended to every source text, such as "translate English to German: "
    tokenizer: Path | None = None  # the directory of the tokenizer's files; None = the model's
    do_lower_case: bool | None = None  # whether WordPiece lowercases texts; None = as the files say


@dataclasses.dataclass(frozen=True)
class ForeignModel:
    """A model of theirs, as its files describe it."""

    family: HfFamily
    fields: Fields  # of config.json
    task: str
    model: ModelConfig  # its options, as ours
    source: tensors.Tensors

    @property
    def table(self) -> tables.Table:
        """The names of its tensors."""
        return table_of(self.family, self.model, self.task)


def import_model(directory: Path, workdir: str, texts: Texts, model_type: str = "") -> str:
    """Import a model's directory into a workdir and return a summary.

    All processes call it; each reads and holds only its part of every tensor. `model_type` is the family where
    config.json names none that is known. Raises UserError for a family or a field that is not implemented, files that
    contradict each other, and a workdir that is not empty.
    """
    target = new_directory(workdir, "--workdir=")
    with explained(directory):
        fields = vocabulary.read_json(directory / FIELDS)
        architectures = fields.get("architectures") or []
        family = find_family(fields.get("model_type"), architectures, model_type)
        task = find_task(family, architectures)
        source = tensors.Tensors(directory, functools.partial(renamed, family))
        if BIAS in source.found:
            fields[LOGITS_BIAS] = bool(source.read(BIAS).any())
        if family is VIT:
            fields[PIXEL_SCALE] = pixel_scale(vocabulary.read_json(directory / PIXELS, {}))
        found = read_model(family, fields, task, source)
        modules = read_modules(directory) if task == "mlm" else None
        if modules:
            found = dataclasses.replace(found, task="embed", model=found.model.with_vectors(modules.pooling))
        layers, count = max(found.model.num_layers, found.model.num_decoder_layers), len(source.found)
        if layers > count:  # refused before any layer is built
            raise UserError(
                f"config.json asks for {layers:,} layers, and there are {count:,} tensors: fetch both again"
            )
        answers = read_answers(found)
        tokenizers, notes = read_tokenizers(found, answers, texts)
        processes.check_same({"config.json": fields, "the shapes of the tensors": source.shapes()})
        mesh = make_mesh(1, -1) if processes.process_count() > 1 else make_mesh(1)
        with read_as(family, architectures) as unknown:
            params = read_params(found, mesh)
        notes += unknown + without_place(found)
        config, settings = make_config(found, tokenizers)
        config, notes = (config, notes) if modules is None else (embedding(config, modules), notes + modules.notes)
        notes += settings
    write_run(target, config, tokenizers, params)
    if processes.is_main_process():
        text = tokenizers[0 if answers else 1]
        files = kept_files(directory, texts)
        origin = {"model_type": family.model_type, "tokenizer": text.fingerprint, "files": files}
        replace_content(target / ORIGIN, json.dumps(origin).encode() + b"\n")
    size = sum(int(np.prod(shape)) for shape in source.shapes().values())
    return f"{target}: {family.model_type}, {size:,} numbers, task {found.task}{not_carried(notes)}"


@contextlib.contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn errors caused in our code by a wrong type in a foreign file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{directory}: one of its JSON files holds a value of the wrong type "
            f"({type(error).__name__}: {first_line(error)}); fetch it again"
        ) from error


def kept_files(directory: Path, texts: Texts) -> dict[str, str]:
    """Return the content of the files that an export writes back unchanged, unless an option overrode them."""
    places = dict.fromkeys((FIELDS, SETTINGS, PIXELS), directory)
    if texts.do_lower_case is None:
        places |= dict.fromkeys((vocabulary.CONFIG, vocabulary.SPECIALS), texts.tokenizer or directory)
    return {name: (place / name).read_text("utf-8") for name, place in places.items() if (place / name).is_file()}


def not_carried(notes: list[str]) -> str:
    """Return a note on settings for which the other side has no option."""
    return f"; not carried over: {', '.join(notes)}" if notes else ""


def find_family(model_type: object, architectures: Sequence[str] = (), given: str = "") -> HfFamily:
    """Return the family that config.json names by its model_type or, without one, by an architecture.

    `given` replaces a model_type that is missing or unknown. Raises UserError if it contradicts config.json, and if
    there is neither.
    """
    if given:
        check_choice("--model_type", given, FAMILIES)
    if isinstance(model_type, str) and model_type in FAMILIES:
        if given not in ("", model_type):
            raise UserError(
                f"--model_type={given}, and config.json has model_type={model_type!r}: leave the option out"
            )
        return FAMILIES[model_type]
    if given:
        return FAMILIES[given]
    for family in FAMILIES.values() if model_type is None else ():
        if {*architectures} & {*family.classes}:
            return family
    named = "no model_type" if model_type is None else f"model_type={model_type!r}"
    raise UserError(
        f"config.json: {named}; there are: {', '.join(FAMILIES)}; import it as one of them with --model_type"
    )


def find_task(family: HfFamily, architectures: Sequence[str]) -> str:
    """Return the task of a model: that of its architecture, or the first of the family for an unknown one."""
    return next(family.classes[name] for name in (*architectures, *family.classes) if name in family.classes)


@contextlib.contextmanager
def read_as(family: HfFamily, architectures: Sequence[str]) -> Iterator[list[str]]:
    """Yield a note on an unknown architecture, and name the known ones if its weights do not fit."""
    known = not architectures or {*architectures} & {*family.classes}
    try:
        yield [] if known else [f"architectures={architectures}"]
    except UserError as error:
        if known:
            raise
        raise UserError(
            f"config.json: architectures={architectures} of {family.model_type}; these can be imported: "
            f"{', '.join(family.classes)}; as {next(iter(family.classes))}, {error}"
        ) from error


def renamed(family: HfFamily, names: Collection[str]) -> dict[str, str]:
    """Return the current name of each tensor of a model.

    Older files have the names of TensorFlow, and files of a model without a head leave out the prefix.
    """
    bare = not any(name.startswith(family.prefix) for name in names)
    current = {}
    for name in names:
        new = re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda found: TENSORFLOW[found[0]], name)
        current[name] = family.prefix + new if bare and new not in family.copies else new
    return current


def read_model(family: HfFamily, fields: Fields, task: str, source: tensors.Tensors) -> ForeignModel:
    """Return a model with its options; its tensors give the number of classes and show whether it has an LM head.

    Raises UserError for a field that is not implemented, and for a classifier without its last tensor.
    """
    classes = ENDS if task == "qa" else 0
    if task in LABELLED:
        name = table_of(family, model_config(family, fields, task, 1), task)["classifier/kernel"].theirs
        if name not in source.found:
            raise UserError(
                f"the weights have no {name}: a model without its head gives no labels; name one that has it"
            )
        classes = source.found[name].shape[0]
    model = model_config(family, fields, task, classes)
    found = ForeignModel(family=family, fields=fields, task=task, model=model, source=source)
    heads = [entry.theirs for path, entry in found.table.items() if path.startswith("head/")]
    if task == "mlm" and not {*heads} & {*source.found}:
        head = dataclasses.replace(model.head, transform=False)
        return dataclasses.replace(found, model=dataclasses.replace(model, head=head))
    return found


def read_answers(found: ForeignModel) -> Tokenizer | None:
    """Return the tokenizer of labels, whose kind is that of `data.labels`; None for a model that gives no labels."""
    if found.task not in LABELLED:
        return None
    fields, classes = found.fields, found.model.head.num_classes
    kind = vocabulary.read_kind(fields, classes) if found.task == "classify" else "tag"
    if kind == "number":
        return NumberTokenizer(0.0, 1.0)
    labels = vocabulary.read_labels(fields, classes)
    if kind == "several" and any(label_set(label) != [label] for label in labels):
        raise UserError("config.json: id2label names a class with a comma, which separates labels: rename it")
    if kind == "tag" and len(labels) < 2:
        raise UserError(
            "config.json has a single label, so every word of every text would get it: name a model with more"
        )
    return LabelTokenizer({"one": "label", "several": "labels"}.get(kind, kind), "identity", labels)


def without_place(found: ForeignModel) -> list[str]:
    """Return notes on their heads that are left out, and on a head of ours that they lack."""
    family, read = found.family, {entry.theirs for entry in found.table.values()}
    left = {".".join(name.split(".")[:2]) for name in found.source.found
            if name not in (*read, *family.copies, BIAS) and (family.is_head(name) or ".pooler." in name)}  # fmt: skip
    lacks = ["a head for masked tokens (train it)"] if is_bare(found.model, found.task) else []
    return [*(f"{name}.*" for name in sorted(left)[: tables.SHOWN]), *lacks]


def read_tokenizers(
    found: ForeignModel, answers: Tokenizer | None, texts: Texts
) -> tuple[tuple[Tokenizer, Tokenizer], list[str]]:
    """Return the tokenizers of source and target, and notes; `answers`, of labels or numbers, replace the target's.

    Raises UserError if files do not match the model, lack a language, or prepare images differently from ours.
    """
    directory, family, fields, model = found.source.directory, found.family, found.fields, found.model
    refuse_unread(texts, family)
    if family is VIT:
        assert answers is not None
        size = model.vision.image_size
        steps = image_steps(vocabulary.read_json(directory / PIXELS, {}), size)
        return (ImageTokenizer((size, size, model.vision.channels), steps=steps), answers), []
    settings = {**fields, **vocabulary.read_json(directory / SETTINGS, {})}
    directory = texts.tokenizer or directory
    read = vocabulary.TokenizerFiles(directory, family.model_type, fields, lowercase=texts.do_lower_case)
    files = {"source": read, "target": read.of_target()}
    rows = {"source": model.vocab_size, "target": model.target_vocab_size or model.vocab_size}
    start = settings.get("decoder_start_token_id") if model.family == "encdec" else None
    start = family.start if start is None else start
    if model.family == "encdec" and start < 0:
        start = read.special("pad_token") if fields.get("pad_token_id") is None else fields["pad_token_id"]
    sides: dict[str, Tokenizer] = {}
    for side, language, prefix in (
        ("source", texts.source_language, texts.prefix),
        ("target", texts.target_language, "" if model.family == "encdec" else texts.prefix),
    ):
        symbols = files[side].symbols(side, language, start)
        refuse_foreign_symbols(directory, symbols, rows[side])
        sides[side] = files[side].tokenizer(side, symbols, prefix)
        if sides[side].vocab_size > rows[side]:
            raise UserError(
                f"{directory}: the tokenizer has {sides[side].vocab_size} ids and config.json vocab_size="
                f"{rows[side]}: they belong to different models"
            )
    notes = [f"the token {token!r}, which has no row" for token in read.without_row]
    return (sides["source"], answers or sides["target"]), notes


def refuse_unread(texts: Texts, family: HfFamily) -> None:
    """Raise UserError for an option about texts that a family does not read."""
    languages, all_texts = vocabulary.LANGUAGES, tuple(name for name in FAMILIES if name != VIT.model_type)
    readers = {"source_language": languages, "target_language": languages, "do_lower_case": vocabulary.WORDPIECE}
    for option, value in dataclasses.asdict(texts).items():
        if value not in ("", None) and family.model_type not in (known := readers.get(option, all_texts)):
            raise UserError(f"--{option}={value} is for {', '.join(known)}, not {family.model_type}: leave it out")


def refuse_foreign_symbols(directory: Path, symbols: Symbols, rows: int) -> None:
    """Raise UserError for a symbol without a row in the model's table; padding and the unknown token may have none."""
    for role, ids in symbols._asdict().items():
        for i in ids if isinstance(ids, tuple) else [ids]:
            if role != "pad" and not (role == "unk" and i < 0) and not 0 <= i < rows:
                raise UserError(
                    f"{directory}: the id {i} ({role}) is not below vocab_size={rows} of config.json: they belong to "
                    "different models"
                )


def read_params(found: ForeignModel, mesh: Mesh) -> PyTree:
    """Return the parameters; each process reads what its own devices hold, and a copy whose original is missing.

    Raises UserError for a tensor that is missing, has another shape, is unknown, or differs from the original it should
    copy.
    """
    source, table = found.source, found.table
    for copy, original in found.family.copies.items():
        if copy in source.found and copy not in {entry.theirs for entry in table.values()}:
            if original in source.found and not np.array_equal(source.read(copy), source.read(original)):
                raise UserError(f"{copy} differs from {original}, to which config.json ties it")
            if original not in source.found:
                source.found[original] = source.found[copy]
    abstract = abstract_params(build_model(found.model), mesh, whole=())
    return tables.from_source(table, abstract, source, found.family.is_unread)


def make_config(found: ForeignModel, tokenizers: tuple[Tokenizer, Tokenizer]) -> tuple[Config, list[str]]:
    """Return the config of the run, and notes on settings that have no option here; fields name tokens by their ids."""
    task, model = found.task, found.model
    longest = model.max_length if model.positions == "learned" else min(model.max_length, LONGEST)
    one = task != "translate" or tokenizers[0].tokens == tokenizers[1].tokens
    data = {"max_source_length": longest, "max_target_length": longest, "vocab_shared": one, "source": "files"}
    data |= {"lm": {"source": "text", "overlong": "split"}, "mlm": {"source": "text"}, "tag": {"source": "conll"},
             "qa": {"source": "squad"}}.get(task, {})  # fmt: skip
    if task == "classify":
        data |= {"source": "images", "tokenizer": "image"} if model.family == "vit" else {"source": "labelled"}
        kinds = {"labels": "several", "number": "number"}
        data["labels"] = kinds.get(getattr(tokenizers[1], "kind", "number"), "one")
    values = default_config()
    values.update_from_flattened_dict(TRAINING)
    values.data.update(data)
    plain = {**values.to_dict(), "task": task, "model": dataclasses.asdict(model)}
    notes: list[str] = []
    if task in ("translate", "lm"):
        own = vocabulary.read_json(found.source.directory / SETTINGS, {})
        written, language = tokenizers[1], found.family.model_type in vocabulary.LANGUAGES
        decode, notes = generation.read(
            found.fields, own, written.symbols, written.tokens, language, continues=task == "lm"
        )
        plain["decode"] = dataclasses.asdict(decode)
    return resolve(plain), notes


def embedding(config: Config, modules: SentenceModules) -> Config:
    """Return the config of a run of task embed that truncates and pools texts as the files specify."""
    longest = min(modules.max_length or LONGEST, config.data.max_source_length)
    data = dataclasses.replace(config.data, max_source_length=longest, max_target_length=longest)
    return dataclasses.replace(
        config, data=data, decode=dataclasses.replace(config.decode, normalize=modules.normalize)
    )


def sized(config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> ModelConfig:
    """Return the model of a run with its numbers of rows and classes."""
    source, target = (tokenizer.vocab_size for tokenizer in tokenizers)
    if config.task in LABELLED:
        model = config.model.with_vocabulary(source, source)
        classes = 1 if config.data.labels == "number" else target - NUM_SYMBOLS
        return model.with_classes(classes, each=config.task == "tag")
    if config.task == "qa":
        return config.model.with_vocabulary(source, source).with_classes(ENDS, each=True)
    if config.task == "embed":
        return config.model.with_vocabulary(source, source).with_vectors()
    noise = 1 if config.task == "mlm" and not tokenizers[1].symbols.noise else 0
    return config.model.with_vocabulary(source + noise, target + noise)
