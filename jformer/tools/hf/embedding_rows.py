"""Prune the vocabulary of a run to the tokens of some texts, or extend it: fewer or further rows in tables of tokens.

A pruned tokenizer cuts texts as before; tokens that were dropped become the unknown token, and are counted as such. A
further row starts as the mean of the rows of the tokens that its text was cut into.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jformer.checkpoints.weights import TABLES, load_weights, write_run
from jformer.config import resolve
from jformer.data.aligned import encode_words
from jformer.data.spans import words_of
from jformer.data.text import read_lines
from jformer.data.tokenizers import FastTokenizer, PiecesTokenizer, Tokenizer
from jformer.errors import UserError
from jformer.models import build_model
from jformer.models.parts import count_params
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_names
from jformer.storage import new_directory, run_path
from jformer.tools.hf import write_model
from jformer.tools.hf.convert import LABELLED
from jformer.tools.hf.write_model import StoredRun

Changeable = FastTokenizer | PiecesTokenizer
# Tasks whose texts are cut into words before they are cut into tokens.
WORDS: dict[str, Callable[[str], list[str]]] = {"tag": str.split, "qa": words_of}


def prune(workdir: str, new: str, texts: Sequence[Path], targets: Sequence[Path] = ()) -> str:
    """Write a run with only the special tokens and those of some texts, and return a summary.

    `texts` are files of what the run reads, `targets` of what it writes, one text a line. Raises UserError for a
    vocabulary that cannot be pruned, files that cannot be read, and a directory that is not empty.
    """
    run, source, answer = read_run(workdir, new, "pruned")
    task = run.config.task
    if min(source.symbols.unk, answer.symbols.unk) < 0:
        raise UserError(f"{workdir}: has no unknown token to replace dropped tokens; it cannot be pruned")
    if task == "translate" and not targets:
        raise UserError("--target is missing: name files of texts like those that the run should still write")
    if task != "translate" and targets:
        raise UserError(f"--target is for task='translate', and {workdir} has task={task!r}: leave it out")
    used = {*_used(task, source, texts), *_used(task, answer, targets or texts)}
    used |= {i for i, token in enumerate(answer.tokens) if token in run.config.decode.only}  # () would allow all
    kept = sorted({i for i in (*used, *_special(source), *_special(answer)) if 0 <= i < source.vocab_size})
    written = {answer.tokens[i] for i in kept}
    decode = {key: [word for word in getattr(run.config.decode, key) if word in written] for key in ("forbid", "only")}
    sides = (source.pruned(kept), answer.pruned(kept))
    before, after = write_changed(run, new, sides, len(kept), lambda table, axis: np.take(table, kept, axis), decode)
    return f"{new}: keeps {len(kept):,} of {run.model.vocab_size:,} tokens, {after:,} of {before:,} parameters"


def _used(task: str, tokenizer: Tokenizer, paths: Sequence[Path]) -> Iterator[int]:
    """Yield the tokens of files of texts, whose parts are separated by TABs."""
    for path in paths:
        for line in read_lines(path, Counter()):
            parts = line.split("\t")
            if task in WORDS:
                for ids, _ in encode_words(tokenizer, [WORDS[task](part) for part in parts]):
                    yield from ids
            else:
                for ids in tokenizer.encode(parts):
                    yield from ids


def _special(tokenizer: Changeable) -> set[int]:
    """Return the ids of tokens that are not text."""
    listed = [tokenizer.ids[token] for token in tokenizer.specials] if isinstance(tokenizer, PiecesTokenizer) else (
        tokenizer.specials
    )  # fmt: skip
    return {*listed, *tokenizer.symbols.ids}


def extend(workdir: str, new: str, files: Sequence[Path]) -> str:
    """Write a run with further tokens, listed one a line in files, and return a summary.

    Raises UserError for a vocabulary that cannot be extended, a token that it has already, files that cannot be read,
    and a directory that is not empty.
    """
    run, source, answer = read_run(workdir, new, "extended")
    tokens = _new_tokens(files, answer)
    size, held = answer.vocab_size, run.model.vocab_size
    rows = max(held, size + len(tokens))  # published tables may have spare rows
    cuts = zip(source.cut(tokens), answer.cut(tokens), strict=True)
    known = [[i for i in (*read, *written) if i != answer.symbols.unk] for read, written in cuts]

    def extended(table: np.ndarray, axis: int) -> np.ndarray:
        old = np.moveaxis(table, axis, 0)
        # Text of unknown tokens alone starts as the mean of all rows (Hewitt 2021).
        means = [old[ids or slice(size)].mean(axis=0, dtype=np.float32).astype(old.dtype) for ids in known]
        return np.moveaxis(np.concatenate([old[:size], np.stack(means), old[size + len(tokens) :]]), 0, axis)

    sides = (source.extended(tokens, held, rows), answer.extended(tokens, held, rows))
    before, after = write_changed(run, new, sides, rows, extended, {})
    grown = f"{after - before:,} parameters more"
    return f"{new}: {len(tokens):,} tokens more than {size:,}, {grown}; train it to learn them"


def _new_tokens(files: Sequence[Path], tokenizer: Changeable) -> list[str]:
    """Return the tokens listed in files; raise UserError for one that is not new."""
    found: dict[str, None] = {}
    old = {*tokenizer.tokens}
    for file in files:
        for number, token in enumerate(read_lines(file, Counter()), start=1):
            if not token or token != token.strip():
                raise UserError(
                    f"{file}:{number}: {token!r} is not a token: write one a line, without spaces around it"
                )
            (ids,) = tokenizer.cut([token])
            if token in old or token in found or (len(ids) == 1 and ids[0] != tokenizer.symbols.unk):
                raise UserError(f"{file}:{number}: {token!r} is a token already: leave it out")
            found[token] = None
    if not found:
        raise UserError(f"--tokens={' '.join(map(str, files))}: has no tokens; write one a line")
    return list(found)


def read_run(workdir: str, new: str, changed: str) -> tuple[StoredRun, Changeable, Changeable]:
    """Return a run to be `changed` ("pruned" or "extended") and written to `new`, and its tokenizers of texts.

    The first is for texts that it reads, the second for those it writes; a classifier writes none, so both are the
    same. Raises UserError for a vocabulary that was not imported or differs between the two sides, and for a directory
    that is not empty.
    """
    new_directory(new, "--workdir=")
    run = write_model.read_run(workdir)
    if run.config.model.lora.rank:
        raise UserError(
            f"{workdir}: holds adapters of {run.config.train.init_from}; only the vocabulary of that run can be "
            f"{changed}"
        )
    source, answer = run.tokenizers[0], run.text
    if not isinstance(source, Changeable) or not isinstance(answer, Changeable):
        raise UserError(
            f"{workdir}: only vocabularies of imported runs can be {changed}; train with another data.vocab_size"
        )
    if source.tokens != answer.tokens:
        raise UserError(f"{workdir}: has two vocabularies, and only one for both sides can be {changed}")
    if run.config.task in ("mlm", "denoise") and not answer.symbols.noise:
        raise UserError(f"{workdir}: its masks are not tokens of the vocabulary; it cannot be {changed}")
    return run, source, answer


def write_changed(
    run: StoredRun,
    new: str,
    sides: tuple[Changeable, Changeable],
    rows: int,
    change: Callable[[np.ndarray, int], np.ndarray],
    decode: Mapping[str, object],
) -> tuple[int, int]:
    """Write the changed run, and return the numbers of parameters before and after.

    Args:
        run: the original, whose config is kept except for what the other arguments change.
        new: the empty workdir to write to.
        sides: the new tokenizers of source and target.
        rows: the new number of entries in the tables of tokens.
        change: (a table of tokens, the axis of its tokens) → the new table.
        decode: changed options of `config.decode`.
    """

    def changed(name: str, leaf: jax.Array) -> np.ndarray:
        return change(np.asarray(leaf), TABLES[name]) if name in TABLES else np.asarray(leaf)

    # Read after all checks, because this takes long for a large model.
    before = load_weights(run.path, run.config, build_model(run.model), make_mesh(1)).params
    params = jax.tree.map(changed, parameter_names(before), before)
    tokenizers = (sides[0], run.tokenizers[1] if run.config.task in LABELLED else sides[1])
    plain = dataclasses.asdict(run.config)
    plain["model"] |= {"vocab_size": rows, "target_vocab_size": rows if run.config.model.family == "encdec" else 0}
    plain["evaluate"]["weights"] = "last"  # there are no others
    plain["decode"] |= decode
    target = run_path(new)
    write_run(target, resolve(plain), tokenizers, params)
    run.copy_origin(target)
    return count_params(before), count_params(params)
