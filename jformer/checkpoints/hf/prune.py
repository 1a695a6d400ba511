"""A run whose vocabulary keeps only what some texts need: fewer rows in every table that has one for each token.

The tokenizer cuts texts as before. What it cuts and the run no longer knows is the unknown token, and counted as such.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jformer.checkpoints.hf.convert import LABELLED, ORIGIN, save, sized
from jformer.checkpoints.weights import load_weights
from jformer.config import load_config, resolve
from jformer.config.options import Config
from jformer.data.aligned import encode_words
from jformer.data.spans import words_of
from jformer.data.text import read_lines
from jformer.data.tokenizers import FastTokenizer, PiecesTokenizer, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import build_model
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_names
from jformer.storage import run_path

# The tables with an entry for each token, and which of their axes has it.
TABLES = {
    "embedding/embedding": 0, "source_embedding/embedding": 0, "target_embedding/embedding": 0, "head/output/kernel": 1,
    "head/bias": 0,
}  # fmt: skip
WORDS: dict[str, Callable[[str], list[str]]] = {
    "tag": str.split,
    "qa": words_of,
}  # tasks whose texts are cut into words before they are cut into tokens
Prunable = FastTokenizer | PiecesTokenizer


def prune(workdir: str, new: str, texts: Sequence[Path], targets: Sequence[Path] = ()) -> str:
    """Write a run that knows only the special tokens and those of some texts, and return what to tell the user.

    `texts` are what the run reads, `targets` what it is to write, one a line. Raises UserError for a vocabulary that
    cannot be pruned, files that cannot be read, and a directory that is not empty.
    """
    path, target = run_path(workdir), run_path(new)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"--workdir={new} is not empty: name a new directory")
    config, tokenizers = load_config(path / "config.json"), load_tokenizers(path / "tokenizer")
    source, answer = _prunable(workdir, config, tokenizers)
    if config.task == "translate" and not targets:
        raise UserError("--target is missing: name files with what the run is to write, or it could write none of it")
    if config.task != "translate" and targets:
        raise UserError(f"--target is for task='translate', and {workdir} has task={config.task!r}: leave it out")
    used = {*_used(config.task, source, texts), *_used(config.task, answer, targets or texts)}
    kept = sorted({i for i in (*used, *_special(source), *_special(answer)) if 0 <= i < source.vocab_size})
    model = sized(config, tokenizers)
    params = load_weights(path, config, build_model(model), make_mesh(1)).params
    pruned = _pruned_params(params, kept)
    sides: dict[str, Tokenizer] = {"source": source.pruned(kept), "target": answer.pruned(kept)}
    if config.task in LABELLED:
        sides["target"] = tokenizers[1]
    elif source.fingerprint == answer.fingerprint:
        sides = {"shared": sides["target"]}
    save(target, _pruned_config(config, kept, answer), sides, pruned)
    if (path / ORIGIN).exists():
        (target / ORIGIN).write_text((path / ORIGIN).read_text())
    before, after = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, pruned))
    return f"{target}: keeps {len(kept):,} of {model.vocab_size:,} tokens, {after:,} of {before:,} parameters"


def _prunable(workdir: str, config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> tuple[Prunable, Prunable]:
    """Return the tokenizers of texts read and written, one and the same for a classifier, or say why neither is."""
    source, answer = tokenizers[0], tokenizers[0] if config.task in LABELLED else tokenizers[1]
    if not isinstance(source, Prunable) or not isinstance(answer, Prunable):
        raise UserError(
            f"{workdir}: only vocabularies of imported runs can be pruned; train with a smaller data.vocab_size"
        )
    if source.tokens != answer.tokens:
        raise UserError(f"{workdir}: has two vocabularies, and only one for both sides can be pruned")
    if min(source.symbols.unk, answer.symbols.unk) < 0:
        raise UserError(f"{workdir}: has no unknown token, which what is dropped would become; it cannot be pruned")
    if config.task in ("mlm", "denoise") and not answer.symbols.noise:
        raise UserError(f"{workdir}: its masks are no tokens of the vocabulary; it cannot be pruned")
    return source, answer


def _used(task: str, tokenizer: Tokenizer, paths: Sequence[Path]) -> Iterator[int]:
    """Yield the tokens of files of texts; TABs stand between the parts of a text."""
    for path in paths:
        for line in read_lines(path, Counter()):
            parts = line.split("\t")
            if task in WORDS:
                for ids, _ in encode_words(tokenizer, [WORDS[task](part) for part in parts]):
                    yield from ids
            else:
                for ids in tokenizer.encode(parts):
                    yield from ids


def _special(tokenizer: Prunable) -> set[int]:
    """Return the ids that stand for no text."""
    listed = [tokenizer.ids[token] for token in tokenizer.specials] if isinstance(tokenizer, PiecesTokenizer) else (
        tokenizer.specials
    )  # fmt: skip
    symbols = [i for each in tokenizer.symbols for i in (each if isinstance(each, tuple) else (each,))]
    return {*listed, *symbols}


def _pruned_params(params: Any, kept: Sequence[int]) -> Any:
    """Return parameters with the entries of some tokens."""

    def take(name: str, leaf: jax.Array) -> np.ndarray:
        array = np.asarray(leaf)
        return np.take(array, kept, axis=TABLES[name]) if name in TABLES else array

    return jax.tree.map(take, parameter_names(params), params)


def _pruned_config(config: Config, kept: Sequence[int], tokenizer: Tokenizer) -> Config:
    """Return the config of a run with fewer rows, whose parameters are its only ones."""
    written = {tokenizer.tokens[i] for i in kept}
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    plain["model"]["vocab_size"] = len(kept)
    plain["model"]["target_vocab_size"] = len(kept) if config.model.family == "encdec" else 0
    plain["evaluate"]["weights"] = "last"
    for key in ("forbid", "only"):
        plain["decode"][key] = [word for word in plain["decode"][key] if word in written]
    return resolve(plain)
