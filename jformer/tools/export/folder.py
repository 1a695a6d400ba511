"""A trained translator as a directory to be served without jformer: for CTranslate2, or as a StableHLO program.

The files are written here; docs/serving.md shows how to use them, and the tests run its loaders.
"""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jformer.config.options import Config
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.data.vocabularies import directed
from jformer.errors import UserError
from jformer.inference.inputs import writable
from jformer.inference.predict import load
from jformer.parallel.mesh import make_mesh
from jformer.storage import filling, new_disk_directory, writing
from jformer.tools.export.ctranslate2 import build_spec
from jformer.tools.export.stablehlo import build_program

NEEDS = {"ctranslate2": "ctranslate2", "stablehlo": "flatbuffers"}  # format → the package that writes it
# Options of searches that serving.json does not hold; a StableHLO program has them all.
NOT_CARRIED = ("search", "coverage_penalty", "beam_groups", "patience", "n_best", "max_length", "no_repeat_ngram",
               "repetition_penalty", "forced_end", "renormalize")  # fmt: skip
README = """A translator exported by jformer for {format}; docs/serving.md of jformer has a loader without jformer.

{model}
tokenizer/    one file for both sides, or source and target: a sentencepiece model, or a JSON list
serving.json  the most tokens of a source (with the end symbol </s>, id 2), and how jformer would have decoded
"""
IMPORTED = """
The vocabulary is an imported one, or has symbols of languages: a source is source_before, its tokens and source_after
of serving.json, where other exports have </s> alone, and CTranslate2 adds nothing; the target begins with target_prefix
(give it to CTranslate2, whose answers repeat it; the program has it). tokenizer/*.json holds a tokenizer.json as
"content", or a sentencepiece model in base64 as "model" with the ids of its pieces, and a prefix of every text. The
languages are those that it was exported with; the vocabulary has others, such as __de__.
"""
MODELS = {
    "ctranslate2": """model.bin     what ctranslate2.Translator loads from here, with config.json and *vocabulary.json
              Give it the tokens of a text without </s>, which it adds, and min_length of serving.json as
              min_decoding_length, the tokens of a prefix counted: it writes one token or more otherwise.""",
    "stablehlo": """program.bin   what jax.export.deserialize reads: encoder, search and all, for cpu, cuda and tpu
              (parameters, tokens i32 [b s] with </s>, lengths i32 [b]) to (tokens [b n t], scores [b n], lengths [b n])
params.npz    its parameters by name""",
}


def export(
    config: Config,
    workdir: Path,
    format: str,  # noqa: A002
    output: str | os.PathLike[str],
) -> str:
    """Write the model of a run, with its tokenizers, into a new directory and return a summary.

    `format` is "ctranslate2", weights for any search of CTranslate2, or "stablehlo", a
    program with the search of `config.decode` in it. The weights are those that `evaluate.weights` names.

    Raises UserError for another format, a directory that is not empty, a package that is missing, a run without
    translations or checkpoints, and a model or search that the format cannot express.
    """
    target = _check(config, format, output)
    predictor = load(workdir, config, make_mesh(1))
    languages = config.decode.source_language, config.decode.target_language
    model, (source, target_side) = predictor.model, directed(predictor.tokenizers, config.data, languages)
    params = jax.tree.map(np.asarray, predictor.params)
    longest = config.data.max_source_length + config.decode.max_extra_length
    mask = writable(target_side, config.decode)
    imported = (source.symbols, target_side.symbols) != (Symbols(), Symbols())
    if format == "ctranslate2":
        words, never = (source.tokens, target_side.tokens), np.flatnonzero(~mask).tolist()
        # At least as many positions as CTranslate2 allows in a source by default.
        spec = build_spec(model.config, params, words, max(longest, 1_024), predictor.inputs.symbols, never)
        spec.config.add_source_eos, save = not imported, spec.save
    else:
        save = build_program(config, model, params, longest, mask, predictor.inputs.symbols)
    around = _around(source, target_side, predictor.inputs.symbols.before) if imported else {}
    readme = README.format(format=format, model=MODELS[format]) + (IMPORTED if imported else "")
    _write(config, workdir, save, target, readme, around)
    options, usual = config.decode, Config().decode
    keys = NOT_CARRIED if format == "ctranslate2" else ()
    lost = [f"decode.{key}={getattr(options, key)!r}" for key in keys if getattr(options, key) != getattr(usual, key)]
    size = sum(path.stat().st_size for path in target.rglob("*")) / 1e6
    return f"{target}: {format}, {size:.1f} MB; jformer's docs/serving.md has a loader" + (
        f"; give these to CTranslate2 yourself, if it has them: {', '.join(lost)}" if lost else ""
    )


def _check(config: Config, format: str, output: str | os.PathLike[str]) -> Path:  # noqa: A002
    """Return the path of the directory; raise UserError for what cannot be exported."""
    if format not in NEEDS:
        raise UserError(f"--format={format}; choose one of: {', '.join(NEEDS)}")
    if config.task != "translate":
        raise UserError(f"task={config.task!r} cannot be exported: only translate can")
    if config.decode.ensemble:
        raise UserError("decode.ensemble cannot be exported, only a single model: leave it empty")
    if config.decode.rerank:
        raise UserError("decode.rerank cannot be exported: it starts a command; leave it empty")
    try:
        importlib.import_module(NEEDS[format])
    except ImportError as error:
        raise UserError(f"--format={format} needs a package: pip install {NEEDS[format]}") from error
    return new_disk_directory(output, "--output=")


def _around(source: Tokenizer, target: Tokenizer, written: tuple[int, ...]) -> dict[str, Any]:
    """Return the symbols around texts of an imported vocabulary, which a loader could not know."""
    symbols = source.symbols
    before, after = symbols.before, (symbols.eos, *symbols.after)
    return {
        "source_before": {"ids": before, "tokens": [source.tokens[i] for i in before]},
        "source_after": {"ids": after, "tokens": [source.tokens[i] for i in after]},
        "target_prefix": {"ids": written, "tokens": [target.tokens[i] for i in written]},
    }


def _write(
    config: Config, workdir: Path, save: Callable[[str], Any], target: Path, readme: str, around: dict[str, Any]
) -> None:
    """Write the model, the tokenizers and what a loader must know into the directory."""
    with writing(f"--output={target}"), filling(target):
        save(str(target))
        (target / "tokenizer").mkdir()
        for file in (workdir / "tokenizer").iterdir():
            (target / "tokenizer" / file.name).write_bytes(file.read_bytes())
        limits = {
            "max_source_length": config.data.max_source_length,  # tokens, the end symbol included
            "max_extra_length": config.decode.max_extra_length,
            "beam_size": config.decode.beam_size,
            "length_penalty": config.decode.length_penalty,
            "length_offset": config.decode.length_offset,
            "min_length": config.decode.min_length,  # without it, CTranslate2 writes at least one token
            **around,
        }
        (target / "README").write_text(readme)
        (target / "serving.json").write_text(json.dumps(limits, indent=2) + "\n")
