"""The searches of `generation` as compiled programs. Who asks for an equal one again gets the same.

Programs hold no parameters; those that were asked for longest ago are forgotten, with all that was compiled for them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PyTree

from jformer.data.tokenizers import Symbols
from jformer.decoding.decode_config import DEFAULTS, DecodeConfig
from jformer.decoding.search import Decoded
from jformer.inference.generation import SearchBatch, Setup, record, search
from jformer.inference.head_answers import HEADS, one_pass
from jformer.models.model import Model
from jformer.parallel.backend import target
from jformer.parallel.sharding import over_rows

KEPT = 16  # programs of each kind
STEPS = 2  # tokens between two looks at a search: each look costs a fraction of a step of a small model
# Options that no program reads: those of files and shapes, and those that its models and its vocabulary tell.
UNREAD = ("forbid", "only", "ensemble", "inputs", "outputs", "scores", "alignments", "overlong", "batch_size")


class ProgramKey(NamedTuple):
    """All that a program depends on beside the shapes of its arguments: a `generation.Setup`, and where it runs."""

    models: tuple[Model, ...]
    options: DecodeConfig  # without those in UNREAD
    vocabulary: bytes  # of a mask: an array cannot be a key
    symbols: Symbols
    mesh: Mesh | None  # over whose data and fsdp the rows are split
    platform: str  # that it is traced for

    @property
    def setup(self) -> Setup:
        """What decides on the search."""
        return Setup(self.models, self.options, np.frombuffer(self.vocabulary, bool), self.symbols)


def make_key(
    models: Sequence[Model],
    options: DecodeConfig,
    vocabulary: Bool[np.ndarray, " v"],
    symbols: Symbols,
    mesh: Mesh | None = None,
) -> ProgramKey:
    """Return the key of the programs of a search.

    Args:
        models, options, vocabulary, symbols: those of `generation.Setup`.
        mesh: over whose data and fsdp the rows are split.
    """
    unread: dict[str, Any] = {name: DEFAULTS[name] for name in UNREAD}
    read = dataclasses.replace(options, **unread)
    return ProgramKey(
        models=tuple(models),
        options=read,
        vocabulary=vocabulary.tobytes(),
        symbols=symbols,
        mesh=mesh,
        platform=target(),
    )


@functools.lru_cache(KEPT)
def make_answer(key: ProgramKey, answer: str) -> jax.stages.Wrapped:
    """Return the compiled (parameters of every model, batch, room) → Decoded that a task's answers are read from.

    Those of `heads.HEADS` are read from one pass of the first model, the others are searched for.
    """
    if answer in HEADS:
        return _compiled(functools.partial(one_pass, key.models[0], HEADS[answer], key.options), key.mesh)

    def respond(params: Sequence[PyTree], batch: SearchBatch, room: int) -> Decoded:
        return search(key.setup, params, batch, room).run()

    return _compiled(respond, key.mesh)


@functools.lru_cache(KEPT)
def make_recorder(key: ProgramKey) -> jax.stages.Wrapped:
    """Return the compiled (parameters of every model, batch, room) → (Decoded, Trace) of a beam search.

    It decodes what `make_answer` does, and tells all that was weighed on the way.
    """
    return _compiled(functools.partial(record, key.setup), key.mesh)


def _compiled(respond: Callable[..., PyTree], mesh: Mesh | None) -> jax.stages.Wrapped:
    """Return (parameters, batch, room) → what `respond` makes of them, compiled, with the rows split over a mesh."""

    def on_mesh(params: Sequence[PyTree], batch: SearchBatch, room: int) -> PyTree:
        return over_rows(functools.partial(respond, room=room), mesh)(params, batch)

    return jax.jit(on_mesh, static_argnums=2)


@functools.lru_cache(KEPT)
def make_stream(key: ProgramKey) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """Return a search as two compiled programs: one that makes the first state, one that goes on from a state.

    They are (parameters, batch, room) → state, and (parameters, batch, room, state, which rows were left [b]) → state
    after STEPS more tokens, (tokens [b t], lengths [b]) that outputs begin with, and what is decoded. The state that is
    given is used up.
    """

    def begin(params: Sequence[PyTree], batch: SearchBatch, room: int) -> Any:
        return search(key.setup, params, batch, room).init

    def advance(
        params: Sequence[PyTree], batch: SearchBatch, room: int, state: PyTree, left: Bool[Array, " b"]
    ) -> tuple[Any, tuple[Int[Array, "b t"], Int[Array, " b"]], Decoded]:
        searching = search(key.setup, params, batch, room)
        left = jnp.repeat(left, state.done.shape[0] // left.shape[0])  # [b] → [b], or [rows]
        state = searching.advance(state._replace(done=state.done | left), jnp.int32(STEPS))
        return state, searching.stable_prefix(state), searching.result(state)

    return jax.jit(begin, static_argnums=2), jax.jit(advance, static_argnums=2, donate_argnums=3)
