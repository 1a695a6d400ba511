"""Export a run as a model's directory that transformers loads. `convert` imports."""

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from etils.epath import Path as AnyPath
from jaxtyping import PyTree

from jformer.checkpoints.untie_layers import own_layers
from jformer.checkpoints.weights import load_weights
from jformer.config import load_config
from jformer.config.options import Config
from jformer.data.tokenizers import NUM_SYMBOLS, ImageTokenizer, NumberTokenizer, Symbols, Tokenizer
from jformer.data.vocabularies import directed, load_tokenizers
from jformer.errors import UserError, check_choice
from jformer.inference.inputs import writable
from jformer.integrity import parse_object
from jformer.models import ModelConfig, build_model
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_names
from jformer.storage import filling, new_disk_directory, replace_content, run_path
from jformer.tools.hf import generation_config as generation
from jformer.tools.hf import learned, tensors, vocabulary
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf.convert import BIAS, FAMILIES, FIELDS, LABELLED, ORIGIN, PIXELS, SETTINGS, not_carried, sized
from jformer.tools.hf.families import LOGITS_BIAS, HfFamily, architecture, config_fields, is_bare, table_of
from jformer.tools.hf.sentence_modules import pooling_of, write_modules
from jformer.tools.hf.vit import PIXEL_SCALE, VIT, pixel_fields, pixel_scale

OUTPUT_BIAS = "classifier/bias"
OF_OUTPUT = ("classifier/kernel", "classifier/lora_b/kernel", OUTPUT_BIAS)  # what a classifier's output is linear in


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """A run to export or to change."""

    path: AnyPath
    config: Config
    tokenizers: tuple[Tokenizer, Tokenizer]

    @property
    def model(self) -> ModelConfig:
        """Its model with the numbers of rows and classes, and without adapters."""
        return sized(self.config, self.tokenizers).merged

    @property
    def text(self) -> Tokenizer:
        """The tokenizer of the texts that it writes or, if a classifier, reads: its other one is for labels."""
        return self.tokenizers[self.config.task not in LABELLED]

    @property
    def origin(self) -> dict[str, Any]:
        """What import recorded about it, or about the run that it started from, and so on; {} if none was imported."""
        place, _ = self._beginning()
        return vocabulary.read_json(place / ORIGIN, {})

    @property
    def lost(self) -> str:
        """The run that it, or one of its ancestors, started from, if that no longer exists."""
        return self._beginning()[1]

    def _beginning(self) -> tuple[AnyPath, str]:
        """Return the directory of the imported ancestor, or else of the first one, and a missing run before it."""
        place, seen, start = self.path, set[str](), self.config.train.init_from
        while start and start not in seen and not (place / ORIGIN).is_file():
            if not (run_path(start) / "config.json").is_file():
                return place, start
            seen.add(start)
            place = run_path(start)
            start = load_config(place / "config.json").train.init_from
        return place, ""

    def copy_origin(self, target: AnyPath) -> None:
        """Write the file of its origin, if it has one, into the directory of a run made from it."""
        if (self.path / ORIGIN).exists():
            replace_content(target / ORIGIN, (self.path / ORIGIN).read_bytes())


def read_run(workdir: str) -> StoredRun:
    """Return a run, whose parameters are not read yet."""
    path = run_path(workdir)
    return StoredRun(path, load_config(path / "config.json"), load_tokenizers(path / "tokenizer"))


def export_model(
    workdir: str, output: str | os.PathLike[str], model_type: str = "", shard_bytes: int = tensors.SHARD_BYTES
) -> str:
    """Write a run as a directory that transformers loads, and return a summary.

    The family is `model_type` or, by default, the one the run was imported from or another that fits. Raises UserError
    for a run that no family can express, and a directory that is not empty.
    """
    run = read_run(workdir)
    if run.config.task == "denoise" and run.text.symbols.noise:  # a translation model, with its own sentinels
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, task="translate"))
    config, origin = run.config, run.origin
    target = new_disk_directory(output, "--output=")
    languages = config.decode.source_language, config.decode.target_language
    run = dataclasses.replace(run, tokenizers=directed(run.tokenizers, config.data, languages))
    tokenizers, text, model = run.tokenizers, run.text, run.model
    task = "mlm" if config.task == "embed" else config.task  # of the class that has no head
    family, fields = express(task, model, workdir, model_type, origin.get("model_type", ""))
    symbols = symbol_fields(run)
    for key, value in family.theirs.items():
        if symbols.get(key, value) != value:
            raise UserError(f"{workdir}: {key}={symbols[key]} in its vocabulary, and {family.model_type} needs {value}")
    model, params = own_layers(model, load_weights(run.path, config, build_model(model), make_mesh(1)).params)
    params = in_units(params, tokenizers[1])
    if config.task == "embed":
        pooling_of(config)
    if config.task in ("translate", "lm"):
        writable(text, config.decode)  # refuses words that are not in the vocabulary
    mask = config.task == "mlm" and not text.symbols.noise
    same = origin.get("tokenizer") == text.fingerprint and origin["model_type"] == family.model_type
    kept: dict[str, str] = origin["files"] if same else {}
    files = {name: kept[name] for name in (vocabulary.CONFIG, vocabulary.SPECIALS) if name in kept}
    facts, sides = tokenizer_facts(config, model), (tokenizers[0], text)
    if (places := fields.get("max_position_embeddings")) and model.positions != "learned":  # no table of them
        fields["max_position_embeddings"] = max(places, config.data.max_source_length, config.data.max_target_length)
    logits_bias, _ = fields.pop(LOGITS_BIAS, None), fields.pop(PIXEL_SCALE, None)
    fields |= symbols | {"architectures": [architecture(family, task, model)]}
    written = tables.to_tensors(table_of(family, model, task), params)
    if logits_bias is False:
        written = itertools.chain(written, [(BIAS, np.zeros((1, model.target_vocab_size), np.float32))])
    with filling(target):
        named = vocabulary.write(target, family.model_type, sides, model.family, mask, facts, files)
        size = tensors.write(target, written, shard_bytes)
        (target / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        notes = [*write_settings(target, family, run, kept, fields), *learned.differences(text)]
        if config.task == "embed":
            write_modules(target, config)
    notes += [f"the files of {run.lost}, which it began with and which is not there"] if run.lost else []
    notes += ["the projection to the vocabulary"] if is_bare(model, config.task) else []
    notes += [f"the prefix {prefix!r} of a text"] if (prefix := getattr(tokenizers[0], "prefix", "")) else []
    without = "" if named or family is VIT else "; without a tokenizer, as transformers has no equivalent"
    return f"{target}: {family.model_type}, {size / 1e6:,.1f} MB{without}{not_carried(notes)}"


def in_units(params: PyTree, answers: Tokenizer) -> PyTree:
    """Return parameters, whole or factors, whose regression output, if there is one, has the units of the labels."""
    if not isinstance(answers, NumberTokenizer):
        return params
    return _output_times(params, answers.deviation, answers.mean)


def standardized(params: PyTree, answers: Tokenizer) -> PyTree:
    """Return parameters whose regression output, in the units of the labels before, is standardized as in training."""
    if not isinstance(answers, NumberTokenizer):
        return params
    return _output_times(params, 1 / answers.deviation, -answers.mean / answers.deviation)


def _output_times(params: PyTree, scale: float, shift: float) -> PyTree:
    """Return parameters whose classifier gives `scale` times its output, plus `shift`."""

    def changed(name: str, leaf: Any) -> Any:
        if name not in OF_OUTPUT:
            return leaf
        scaled = np.asarray(leaf) * np.float32(scale)
        return scaled + np.float32(shift) if name == OUTPUT_BIAS else scaled

    return jax.tree.map(changed, parameter_names(params), params)


def tokenizer_facts(config: Config, model: ModelConfig) -> dict[str, Any]:
    """Return fields of tokenizer_config.json: the maximum length of texts, and the arrays that the model reads."""
    longest = config.data.max_source_length if model.family != "decoder" else config.data.max_target_length
    segments = ["token_type_ids"] if model.head.num_segments > 1 else []
    return {
        "model_max_length": min(longest, model.max_length) if model.positions == "learned" else longest,
        "model_input_names": ["input_ids", *segments, "attention_mask"],
    }


def express(
    task: str, model: ModelConfig, workdir: str, model_type: str = "", origin: str = ""
) -> tuple[HfFamily, dict[str, Any]]:
    """Return a family that can express a model, and its config.json. Raise UserError with the reasons if none can.

    Args:
        task: that it does.
        model: with its numbers of rows and classes.
        workdir: named in errors.
        model_type: the only family to try.
        origin: the family that it was imported from, which is tried first.
    """
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != origin)
    misses = []
    if model_type:
        check_choice("--family", model_type, FAMILIES)
    for family in [FAMILIES[model_type]] if model_type else order:
        if task in family.classes.values() and family.ours.get("family", "encdec") == model.family:
            try:
                return family, config_fields(family, model, task)
            except UserError as error:
                misses.append(f"{family.model_type}: {error}")
    raise UserError(
        f"{workdir}: no architecture of transformers fits this model; {' | '.join(misses) or f'none does {task!r}'}"
    )


def symbol_fields(run: StoredRun) -> dict[str, Any]:
    """Return the ids and labels for config.json."""
    config, (text, answer) = run.config, run.tokenizers
    fields: dict[str, Any] = {}
    if config.task in LABELLED:
        labels = ["LABEL_0"] if config.data.labels == "number" else answer.tokens[NUM_SYMBOLS:]
        fields = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    if config.task == "classify":
        fields |= {"problem_type": vocabulary.PROBLEMS[config.data.labels]}
    symbols = getattr(answer if config.task in ("translate", "lm") else text, "symbols", Symbols())
    if config.model.family == "vit":
        return fields
    fields |= {"bos_token_id": symbols.bos, "eos_token_id": symbols.eos}
    if config.model.family == "encdec":
        fields |= {"decoder_start_token_id": symbols.bos, "bos_token_id": None, "forced_eos_token_id": None}
    pad = text.symbols.pad
    return fields | ({"pad_token_id": pad} if pad < text.vocab_size else {})


def write_settings(
    target: Path, family: HfFamily, run: StoredRun, kept: Mapping[str, str], model: Mapping[str, Any]
) -> list[str]:
    """Write generation_config.json or preprocessor_config.json; return notes on options without a counterpart.

    Args:
        target: the directory.
        family: of the exported model.
        run: that is exported.
        kept: files of the imported model, written back unchanged if they still give the same options.
        model: the content of config.json.
    """
    config, (images, written) = run.config, run.tokenizers
    if config.task in ("translate", "lm"):
        language = family.model_type in vocabulary.LANGUAGES
        if SETTINGS in kept:
            fields, own = (parse_object(kept[file]) for file in (FIELDS, SETTINGS))
            if generation.read(fields, own, written.symbols, written.tokens, language)[0] == config.decode:
                (target / SETTINGS).write_text(kept[SETTINGS], "utf-8")
                return []
        ids = {token: i for i, token in enumerate(written.tokens)}
        longest, places = (config.data.max_source_length, model.get("max_position_embeddings", 0))
        sizes = (longest, places) if config.task == "translate" else (0, 0)
        settings, notes = generation.write(config.decode, written.symbols, ids, *sizes)
        settings = {**symbol_fields(run), **settings}
        (target / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        return notes
    if config.model.family == "vit":
        vision = config.model.vision
        came = kept.get(PIXELS, "")
        if not came or pixel_scale(parse_object(came)) != (vision.mean, vision.deviation):
            came = json.dumps(pixel_fields(config.model, cast(ImageTokenizer, images)), indent=2) + "\n"
        (target / PIXELS).write_text(came, "utf-8")
    return []
