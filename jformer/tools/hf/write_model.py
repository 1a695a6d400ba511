"""Export a run as a model's directory that transformers loads. `convert` imports."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils.epath import Path as AnyPath

from jformer.checkpoints.untie_layers import own_layers
from jformer.checkpoints.weights import load_weights
from jformer.config import load_config
from jformer.config.options import Config
from jformer.data.tokenizers import NUM_SYMBOLS, NumberTokenizer, Symbols, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.parallel.mesh import make_mesh
from jformer.storage import run_path
from jformer.tools.hf import generation_config as generation
from jformer.tools.hf import learned, tensors, vocabulary
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf.convert import BIAS, FAMILIES, LABELLED, ORIGIN, find_family, not_carried, sized
from jformer.tools.hf.families import LOGITS_BIAS, HfFamily, architecture, config_fields, is_bare, table_of
from jformer.tools.hf.vit import VIT, pixel_fields


def export_model(workdir: str, target: Path, model_type: str = "", shard_bytes: int = tensors.SHARD_BYTES) -> str:
    """Write a run as a directory that transformers loads, and return a summary.

    The family is `model_type` or, by default, the one the run was imported from or another that fits. Raises UserError
    for a run that no family can express, and a directory that is not empty.
    """
    path = run_path(workdir)
    config = load_config(path / "config.json")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--output={target} exists and is not empty: name a new directory")
    tokenizers = load_tokenizers(path / "tokenizer")
    model = sized(config, tokenizers).merged
    family, fields = express(config.task, model, path, model_type)
    symbols = symbol_fields(config, tokenizers)
    for key, value in family.theirs.items():
        if symbols.get(key, value) != value:
            raise UserError(f"{workdir}: {key}={symbols[key]} in its vocabulary, and {family.model_type} needs {value}")
    model, params = own_layers(model, load_weights(path, config, build_model(model), make_mesh(1)).params)
    if isinstance(tokenizers[1], NumberTokenizer):
        params = {**params, "classifier": in_units(params["classifier"], tokenizers[1])}
    target.mkdir(parents=True, exist_ok=True)
    text = tokenizers[0] if config.task in LABELLED else tokenizers[1]  # a classifier's other one is of labels
    mask = config.task == "mlm" and not text.symbols.noise
    named = vocabulary.write(target, family.model_type, (tokenizers[0], text), model.family, mask)
    logits_bias = fields.pop(LOGITS_BIAS, None)
    fields |= symbols | {"architectures": [architecture(family, config.task, model)]}
    written = tables.to_tensors(table_of(family, model, config.task), params)
    if logits_bias is False:
        written = itertools.chain(written, [(BIAS, np.zeros((1, model.vocab_size), np.float32))])
    size = tensors.write(target, written, shard_bytes)
    (target / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    notes = [*write_settings(target, config, tokenizers), *learned.differences(text)]
    notes += ["the projection to the vocabulary"] if is_bare(model, config.task) else []
    without = "" if named or family is VIT else "; without a tokenizer, as transformers has no equivalent"
    return f"{target}: {family.model_type}, {size / 1e6:,.1f} MB{without}{not_carried(notes)}"


def in_units(classifier: Mapping[str, Any], numbers: NumberTokenizer) -> dict[str, Any]:
    """Return a projection to a number as one to that number in the unit of its texts."""
    scaled = {name: np.asarray(leaf) * np.float32(numbers.deviation) for name, leaf in classifier.items()}
    return scaled | {"bias": scaled["bias"] + np.float32(numbers.mean)}


def express(task: str, model: ModelConfig, workdir: AnyPath, model_type: str = "") -> tuple[HfFamily, dict[str, Any]]:
    """Return a family that can express a model, and its config.json. Raise UserError with the reasons if none can.

    The family it was imported from is tried first; with `model_type` only that one.
    """
    origin = vocabulary.read_json(Path(workdir) / ORIGIN, {}).get("model_type", "")
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != origin)
    misses = []
    for family in [find_family(model_type)] if model_type else order:
        if task in family.classes.values() and family.ours.get("family", "encdec") == model.family:
            try:
                return family, config_fields(family, model, task)
            except UserError as error:
                misses.append(f"{family.model_type}: {error}")
    raise UserError(
        f"{workdir}: no architecture of transformers fits this model; {' | '.join(misses) or f'none does {task!r}'}"
    )


def symbol_fields(config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, Any]:
    """Return the ids and labels for config.json."""
    text, answer = tokenizers
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
    return fields | ({"pad_token_id": symbols.pad} if symbols.pad < text.vocab_size else {})


def write_settings(target: Path, config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> list[str]:
    """Write generation_config.json or preprocessor_config.json; return notes on options without a counterpart."""
    written, notes = tokenizers[1], list[str]()
    if config.task in ("translate", "lm"):
        ids = {token: i for i, token in enumerate(written.tokens)}
        settings, notes = generation.write(config.decode, written.symbols, ids)
        settings = {**symbol_fields(config, tokenizers), **settings}
        (target / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if config.model.family == "vit":
        text = json.dumps(pixel_fields(config.model), indent=2)
        (target / "preprocessor_config.json").write_text(text + "\n")
    return notes
