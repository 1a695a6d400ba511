"""What pruning and extending a vocabulary share: read a run, and write a copy with other rows for its tokens."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from etils.epath import Path as AnyPath
from jaxtyping import PyTree

from jformer.checkpoints.weights import load_weights, write_run
from jformer.config import load_config, resolve
from jformer.config.options import Config
from jformer.data.tokenizers import FastTokenizer, PiecesTokenizer, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_names
from jformer.storage import new_directory, replace_content, run_path
from jformer.tools.hf.convert import LABELLED, ORIGIN, sized

# The parameters with an entry for each token → the axis of the tokens.
TABLES = {
    "embedding/embedding": 0, "source_embedding/embedding": 0, "target_embedding/embedding": 0, "head/output/kernel": 1,
    "head/bias": 0,
}  # fmt: skip
Changeable = FastTokenizer | PiecesTokenizer


@dataclasses.dataclass(frozen=True)
class ChangeableRun:
    """A run whose vocabulary will change."""

    path: AnyPath
    config: Config
    tokenizers: tuple[Tokenizer, Tokenizer]
    source: Changeable  # the tokenizer of the texts it reads
    answer: Changeable  # of the texts it writes; a classifier writes none and has the source's
    model: ModelConfig  # with the number of rows that its parameters have

    def read_params(self) -> PyTree:
        """Return its parameters; call it after all checks, as it takes long for a large model."""
        return load_weights(self.path, self.config, build_model(self.model), make_mesh(1)).params


def read_run(workdir: str, new: str, changed: str) -> ChangeableRun:
    """Read a run that will be `changed` ("pruned" or "extended") and written to `new`.

    Raises UserError for a vocabulary that was not imported or differs between the two sides, and for a directory that
    is not empty.
    """
    path = run_path(workdir)
    new_directory(new, "--workdir=")
    config, tokenizers = load_config(path / "config.json"), load_tokenizers(path / "tokenizer")
    if config.model.lora.rank:
        raise UserError(
            f"{workdir}: holds adapters of {config.train.init_from}; only the vocabulary of that run can be {changed}"
        )
    source, answer = tokenizers[0], tokenizers[0] if config.task in LABELLED else tokenizers[1]
    if not isinstance(source, Changeable) or not isinstance(answer, Changeable):
        raise UserError(
            f"{workdir}: only vocabularies of imported runs can be {changed}; train with another data.vocab_size"
        )
    if source.tokens != answer.tokens:
        raise UserError(f"{workdir}: has two vocabularies, and only one for both sides can be {changed}")
    if config.task in ("mlm", "denoise") and not answer.symbols.noise:
        raise UserError(f"{workdir}: its masks are not tokens of the vocabulary; it cannot be {changed}")
    return ChangeableRun(
        path=path, config=config, tokenizers=tokenizers, source=source, answer=answer, model=sized(config, tokenizers)
    )


def with_rows(params: PyTree, change: Callable[[np.ndarray, int], np.ndarray]) -> PyTree:
    """Return parameters with every table of tokens replaced by change(table, axis of its tokens)."""

    def changed(name: str, leaf: jax.Array) -> np.ndarray:
        return change(np.asarray(leaf), TABLES[name]) if name in TABLES else np.asarray(leaf)

    return jax.tree.map(changed, parameter_names(params), params)


def write_changed(
    run: ChangeableRun,
    new: str,
    sides: tuple[Changeable, Changeable],
    rows: int,
    params: PyTree,
    decode: Mapping[str, object],
) -> None:
    """Write the changed run.

    Args:
        run: the original, whose config is kept except for what the other arguments change.
        new: the empty workdir to write to.
        sides: the new tokenizers of source and target.
        rows: the new number of entries in the tables of tokens.
        params: the new parameters.
        decode: changed options of `config.decode`.
    """
    tokenizers = (sides[0], run.tokenizers[1] if run.config.task in LABELLED else sides[1])
    plain = json.loads(json.dumps(dataclasses.asdict(run.config)))
    plain["model"] |= {"vocab_size": rows, "target_vocab_size": rows if run.config.model.family == "encdec" else 0}
    plain["evaluate"]["weights"] = "last"  # there are no others
    plain["decode"] |= decode
    target = run_path(new)
    write_run(target, resolve(plain), tokenizers, params)
    if (run.path / ORIGIN).exists():
        replace_content(Path(target) / ORIGIN, (run.path / ORIGIN).read_bytes())
