"""The program that answers a batch: a search over models, compiled and cached by everything that it depends on.

Arrays in, arrays out; no text here. Programs hold no parameters. `make_answer` compiles one, `begin_search` chooses the
search, `_begin` presents the models to it as one step over one cache.

Letters in shapes: b inputs, p tokens of a prompt or prefix, c phrases, s spellings of a phrase, l tokens of a spelling,
n beams or samples of an input, rows = b·n, v entries of the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jformer import plugins
from jformer.config import build_section
from jformer.config.checks import refuse_without_attention
from jformer.data.tokenizers import Symbols
from jformer.decoding.beam import beam_search
from jformer.decoding.constraints import has_phrases
from jformer.decoding.decode_config import (
    DEFAULTS,
    NO_PROGRAM_READS,
    NO_SEARCH_OF_IDS_READS,
    DecodeConfig,
    DecodeOptions,
)
from jformer.decoding.rules import Rules
from jformer.decoding.sample import sample
from jformer.decoding.search import FOLLOW_BEAMS, Cache, Decoded, SearchLoop, Start, Step, repeat_rows
from jformer.errors import UserError
from jformer.inference.one_pass import HEADS
from jformer.models.batch import Batch
from jformer.models.layers.transformer import LATER_KEYS
from jformer.models.lora_config import LARGE
from jformer.models.model import Model
from jformer.parallel.activations import constrain_sharding
from jformer.parallel.backend import Target, target, xla_options
from jformer.parallel.sharding import over_rows
from jformer.plugins import is_own
from jformer.tasks.task import MASKS

AFTER_SAMPLES = np.uint32(2**31)  # beyond the numbers of samples
KEPT = 16  # programs of each kind that are cached
TOKENS = 1_024  # projected to the vocabulary at a time: logits of a whole batch would be the largest array by far
# Compiler options, by platform. XLA:GPU of JAX 0.12 fails at slices fused into products: "Slice not assigned".
XLA_OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_enable_dynamic_slice_fusion": False}}


class SearchBatch(Batch, total=False):
    """The inputs of a search beside the encoded sources; prefixes and constraints are optional."""

    prompt: Int[Array, "b p"]  # tokens before the search; the first is BOS
    prompt_length: Int[Array, " b"]  # at least 1
    limit: Int[Array, " b"]  # the most tokens to add; 0 for a row that only fills the batch
    line: Int[Array, " b"]  # the number of the input line, from which samples are drawn
    part: Int[Array, " b"]  # the number of the piece of a split line; 0 if missing
    max_unfinished: int | Int[Array, ""]  # how many of the last rows may be left unfinished; 0 if missing
    prefix: Int[Array, "b p"]  # the beginning of the output
    prefix_length: Int[Array, " b"]
    constraints: Int[Array, "b c s l"]  # phrases in the output, each in one of its spellings


class SearchSetup(NamedTuple):
    """All that a search depends on besides parameters and batch, made by `make_setup`; programs are cached by it.

    The models decide what a token may attend to: a search passes them tokens and gets logits.
    """

    models: tuple[Model, ...]  # an ensemble, whose probabilities are averaged
    options: DecodeConfig  # those that no program reads are at their defaults
    vocabulary: bytes  # of the mask `writable`, because arrays are not hashable
    symbols: Symbols  # BOS, EOS and PAD of outputs
    mesh: Mesh | None  # its data and fsdp axes split the rows
    traced_for: Target

    @property
    def writable(self) -> Bool[np.ndarray, " v"]:
        """Whether each id of the vocabulary may be written."""
        return np.frombuffer(self.vocabulary, bool)


def make_setup(
    models: Sequence[Model],
    options: DecodeConfig,
    vocabulary: Bool[np.ndarray, " v"],
    symbols: Symbols,
    mesh: Mesh | None = None,
) -> SearchSetup:
    """Return the setup of a search; equal arguments give equal setups.

    Args:
        models: one, or an ensemble of the same vocabulary.
        options: how to search; those that do not affect the program are reset to their defaults.
        vocabulary: whether each id may be written, from `writable`.
        symbols: BOS, EOS and PAD of outputs.
        mesh: its data and fsdp axes split the rows.
    """
    unread: dict[str, Any] = {name: DEFAULTS[name] for name in NO_PROGRAM_READS}
    if options.rerank:  # of all candidates
        unread |= {"rerank": "", "n_best": options.hypotheses}
    return SearchSetup(
        models=tuple(models),
        options=dataclasses.replace(options, **unread),
        vocabulary=vocabulary.tobytes(),
        symbols=symbols._replace(before=(), after=()),
        mesh=mesh,
        traced_for=target(),
    )


@plugins.cached(KEPT)
def make_answer(setup: SearchSetup, answer: str) -> jax.stages.Wrapped:
    """Return the compiled (parameters of every model, batch, room) → arrays that a task's answers are read from.

    Answers in `HEADS` are what the head computes from one pass of the first model; others are a search's `Decoded`.
    """
    if answer not in HEADS:
        return compile_over_rows(lambda params, batch, room: begin_search(setup, params, batch, room).run(), setup.mesh)

    def one_pass(params: Sequence[PyTree], batch: Batch, room: int) -> PyTree:
        logits = setup.models[0].apply({"params": stack_layers(params[0])}, batch).astype(jnp.float32)
        return HEADS[answer].respond(logits, batch, setup.options)

    def one_pass_of_tokens(params: Sequence[PyTree], batch: Batch, room: int) -> PyTree:
        apply = functools.partial(setup.models[0].apply, {"params": stack_layers(params[0])})
        hidden = apply(batch, method="hidden")

        def row(states: Float[Array, "s d"]) -> PyTree:
            logits = constrain_sharding(apply(states[None], method="logits").astype(jnp.float32))  # as in `_make_step`
            log_probs = jax.nn.log_softmax(logits)
            allowed = np.pad(setup.writable, (0, log_probs.shape[-1] - len(setup.writable)))
            found = HEADS[answer].respond(jnp.where(allowed, log_probs, -jnp.inf), batch, setup.options)
            return jax.tree.map(lambda leaf: leaf[0], found)

        return jax.lax.map(row, hidden, batch_size=max(1, TOKENS // hidden.shape[1]))

    return compile_over_rows(one_pass_of_tokens if answer == MASKS else one_pass, setup.mesh)


def compile_over_rows(respond: Callable[..., PyTree], mesh: Mesh | None) -> jax.stages.Wrapped:
    """Compile (parameters, batch, room) → arrays, with the rows split over a mesh."""

    def on_mesh(params: Sequence[PyTree], batch: SearchBatch, room: int) -> PyTree:
        return over_rows(functools.partial(respond, room=room), mesh)(params, batch)

    return jax.jit(on_mesh, static_argnums=2, compiler_options=xla_options(XLA_OPTIONS))


class OwnSearch(Protocol):
    """What decode.search names as `package.module:function`; docs/parts.md has an example."""

    def __call__(self, step: Step, cache: Cache, start: Start, rules: Rules, options: DecodeConfig) -> SearchLoop:
        """Return a search with decode.samples rows per input, which share no entries of the cache.

        Of its outputs, best first, a run returns decode.n_best.
        """


def begin_search(setup: SearchSetup, params: Sequence[PyTree], batch: SearchBatch, room: int) -> SearchLoop:
    """Return the search for the outputs of every row of a batch, at most `room` tokens; a row of limit 0 has none.

    For use inside jit. `params` are those of every model; the cache has entries for `room` tokens. A row whose limit
    exceeds that may be left unfinished, and so may the last `max_unfinished` rows.
    """
    options, begun = setup.options, _begin(setup, params, batch, room)
    if options.search == "beam":
        coverage = functools.partial(_coverage, options.coverage_penalty) if options.coverage_penalty else None
        return beam_search(*begun, batch.get("constraints"), coverage)
    if is_own(options.search):
        own: OwnSearch = plugins.find("decode.search", options.search, {})
        return own(*begun)
    return sample(*begun, _keys(options.seed, batch["line"], batch.get("part"), options.hypotheses))


def search_ids(
    model: Model,
    params: PyTree,
    batch: Batch,
    max_tokens: int,
    prompt: Int[Array, "b p"] | Sequence[Sequence[int]] | None = None,
    symbols: Symbols = Symbols(),  # noqa: B008  # it is immutable
    **options: Unpack[DecodeOptions],
) -> Decoded:
    """Return the outputs of a model for every row of a batch of ids. It needs no run, and may be called inside jit.

    `lambda params, batch: search_ids(model, params, batch, 20, beam_size=4)` is what `jax.jit` takes; keyword arguments
    are the options of decode that decide on a search.

    Args:
        model: one that generates text.
        params: its parameters.
        batch: the arrays of the source, as `tasks.batch_arrays.make_batch` makes them; empty for a language model,
            which has a row for each prompt, or one. A `target_prefix` ends before the last token of the prompt, which
            the first step of the search reads.
        max_tokens: the maximum number of tokens of an output.
        prompt: the tokens that outputs continue, of any lengths if they are lists; an array has PAD before or after
            them. None = BOS alone.
        symbols: the special ids; by default those of vocabularies learned here (PAD 0, BOS 1, EOS 2). Those of a run,
            which an imported one has from its vocabulary, are `run.tokenizers[1].symbols`.

    Raises:
        UserError: for a model that writes no text, options that cannot work together, and those of texts and files.
    """
    if not model.config.decodes:
        kind = "head.vectors=True" if model.config.head.vectors else f"family={model.config.family!r}"
        raise UserError(f"jformer.search writes text, which model.{kind} does not")
    if max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens} must be at least 1: it is the maximum number of tokens of an output")
    settings = _search_options(options, model)
    vocabulary = model.config.target_vocab_size or model.config.vocab_size
    prompt, lengths = _prompts(prompt, batch, vocabulary, symbols)
    _refuse_prefix(model, batch, lengths)
    rows, width = prompt.shape
    last = width - 1 + max_tokens
    if model.config.positions == "learned" and last > model.config.max_length:
        raise UserError(
            f"a prompt of {width} tokens and max_tokens={max_tokens} take {last} positions, and model.max_length="
            f"{model.config.max_length}: lower max_tokens"
        )
    asked: SearchBatch = {
        **batch,
        "prompt": prompt,
        "prompt_length": lengths,
        "limit": jnp.full(rows, max_tokens),
        "line": jnp.arange(rows),
    }
    ids: np.ndarray = np.arange(vocabulary)
    may_write = ~np.isin(ids, (symbols.pad, symbols.bos, *symbols.noise)) | (ids == symbols.eos)
    return begin_search(make_setup([model], settings, may_write, symbols), [params], asked, max_tokens).run()


def _search_options(options: DecodeOptions, model: Model) -> DecodeConfig:
    """Return the options of a search of ids. Raise UserError for those that it does not read or the model cannot do."""
    settings: DecodeConfig = build_section(DecodeConfig, options, "decode.")
    settings.check()
    unread = sorted({*options} & {*NO_SEARCH_OF_IDS_READS})
    if unread:
        names = ", ".join(unread)
        raise UserError(f"jformer.search does not use {names}: leave them out; max_tokens limits an output's length")
    if settings.search == "mbr":
        raise UserError("decode.search='mbr' compares texts, which jformer.search does not write: use 'sample'")
    refuse_without_attention(settings, model.config)
    return settings


def _refuse_prefix(model: Model, batch: Batch, lengths: Int[Array, " b"]) -> None:
    """Raise UserError for a prefix that a cache cannot hold."""
    if "target_prefix" not in batch:
        return
    if model.config.positions == "transformer_xl":
        raise UserError(LATER_KEYS)
    prefix = jnp.asarray(batch["target_prefix"])
    if any(isinstance(each, jax.core.Tracer) or not each.is_fully_addressable for each in (prefix, lengths)):
        return
    long = np.flatnonzero(np.asarray(prefix).sum(axis=1) >= np.asarray(lengths))
    if len(long):
        raise UserError(f"target_prefix: that of row {long[0]} has the last token of the prompt: end it before")


def _prompts(
    prompt: Int[Array, "b p"] | Sequence[Sequence[int]] | None, batch: Batch, vocabulary: int, symbols: Symbols
) -> tuple[Int[Array, "b p"], Int[Array, " b"]]:
    """Return a prompt for each row of a batch, padded at its end, and its length: BOS alone if none are given."""
    arrays: Any = batch.values()
    if prompt is None:
        rows = max(map(len, arrays), default=1)
        return jnp.full((rows, 1), symbols.bos, jnp.int32), jnp.ones(rows, jnp.int32)
    if hasattr(prompt, "shape") and symbols.pad == symbols.bos:
        raise UserError(f"prompt: padding is bos={symbols.bos}, too: give a list of token ids for each row")
    tokens, lengths = padded_behind(prompt, None if symbols.pad == symbols.bos else symbols.pad)
    rows = max(map(len, arrays), default=len(tokens))
    if len(tokens) != rows:
        raise UserError(f"a prompt of {len(tokens)} rows for a batch of {rows}: give one to each row")
    if not isinstance(tokens, jax.core.Tracer) and tokens.is_fully_addressable:
        _refuse_prompt(np.asarray(tokens), np.asarray(lengths), symbols.bos, vocabulary)
    return tokens, lengths


def _refuse_prompt(prompt: np.ndarray, lengths: np.ndarray, bos: int, vocabulary: int) -> None:
    """Raise UserError for a row that holds no token, or one outside the vocabulary."""
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        raise UserError(f"prompt: row {empty[0]} has no token; begin it with bos={bos}")
    foreign = prompt[(prompt < 0) | (prompt >= vocabulary)]
    if foreign.size:
        raise UserError(f"prompt: the token id {foreign[0]} is outside the model's vocabulary, 0 to {vocabulary - 1}")


def padded_behind(
    rows: Int[Array, "b p"] | Sequence[Sequence[int]], pad: int | None
) -> tuple[Int[Array, "b p"], Int[Array, " b"]]:
    """Return sequences of tokens, without `pad`, as an array with 0 after them, and their lengths.

    >>> [each.tolist() for each in padded_behind(jnp.array([[3, 3, 7], [8, 9, 3]]), pad=3)]
    [[[7, 0, 0], [8, 9, 0]], [1, 2]]
    >>> [each.tolist() for each in padded_behind([[3], [8, 3]], pad=None)]
    [[[3, 0], [8, 3]], [1, 2]]

    Raises UserError for other shapes, and where there is no row.
    """
    shape = getattr(rows, "shape", None)
    fits = all(hasattr(row, "__len__") for row in rows) if shape is None else len(shape) == 2
    if not fits or not len(rows):
        raise UserError("prompt: give a list of token ids for each row, or an array [b p] of them")
    if shape is None:
        given = cast(Sequence[Sequence[int]], rows)
        width = max(map(len, given))
        padded = [[*row, *[pad or 0] * (width - len(row))] for row in given]
        if pad is None:
            return jnp.array(padded, jnp.int32), jnp.array([*map(len, given)], jnp.int32)
        rows = jnp.array(padded, jnp.int32)
    tokens = jnp.asarray(rows)
    gone = jnp.equal(tokens, -1 if pad is None else pad)
    order = jnp.argsort(gone, axis=1, stable=True)
    return jnp.take_along_axis(jnp.where(gone, 0, tokens), order, axis=1), (~gone).sum(axis=1)


def _begin(
    setup: SearchSetup, params: Sequence[PyTree], batch: SearchBatch, room: int
) -> tuple[Step, Cache, Start, Rules, DecodeConfig]:
    """Return the arguments that all searches share: the models as one step over one cache, limits, rules, options."""
    models, options = setup.models, setup.options
    each = zip(models, params, strict=True)
    params = [in_compute_dtype(stack_layers(tree), model.config.dtype) for model, tree in each]
    prompt, sizes, rows = batch["prompt"], batch["prompt_length"], options.hypotheses
    together = rows if options.search == "beam" else 1  # rows that share their entries
    entries = prompt.shape[1] - 1 + room * together
    if target().platform != "cpu":  # GPUs multiply bfloat16 in multiples of 8: XLA would copy the cache in every step
        entries += -entries % 8
    coverage = bool(options.coverage_penalty)
    caches = [_prefill(model, tree, batch, entries, coverage) for model, tree in zip(models, params, strict=True)]
    cache = repeat_rows(_side_by_side([_separate(cache, rows // together) for cache in caches]), rows)
    step = _make_step(models, params, options.ensemble_average)
    start = Start(
        token=jnp.take_along_axis(prompt, sizes[:, None] - 1, axis=1)[:, 0],
        limits=batch["limit"],
        room=room,
        max_unfinished=batch.get("max_unfinished", 0),
    )
    return step, cache, start, _rules(setup, batch), options


def start_cache(apply: Callable[..., Any], batch: Batch, rows: int, entries: int) -> Cache:
    """Encode the sources of a batch with a model's `apply`; return the cache of a decoder that has read nothing yet."""
    cache: Cache = apply(apply(batch, method="encode"), rows, entries, method="start")
    if "target_prefix" in batch and "entries" in cache:  # a recurrent state has no later positions to see
        cache["self"]["prefix"] = batch["target_prefix"].sum(axis=1, dtype=jnp.int32)
    return cache


def _prefill(model: Model, params: PyTree, batch: SearchBatch, entries: int, coverage: bool) -> Cache:
    """Return the cache of a model, one row per sentence, after all tokens of the prompts but the last."""
    prompt, apply = batch["prompt"], functools.partial(model.apply, {"params": params})
    cache = start_cache(apply, batch, prompt.shape[0], entries)
    if coverage:
        cache["self"]["coverage"] = jnp.zeros(cache["memory"]["mask"].shape)
    if width := prompt.shape[1] - 1:
        before = jnp.arange(width) < batch["prompt_length"][:, None] - 1
        _, cache = apply(cache, prompt[:, :-1], before, method="extend")
    return cache


def _separate(cache: Cache, copies: int) -> Cache:
    """Give each of `copies` rows of a sentence its own cache entries, copied from those so far.

    What belongs to a row, or is read by all rows of a sentence, is not repeated. A recurrent cache has no entries.
    """
    if "entries" not in cache:
        return cache
    used, kept = cache["entries"]["used"], {key: cache["entries"][key] for key in ("layers", "position")}
    return {**cache, "entries": {"used": used, **jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=0), kept)}}


def _side_by_side(caches: Sequence[Cache]) -> Cache:
    """Combine the caches of several models into one for the search."""
    own = tuple({key: cache[key] for key in FOLLOW_BEAMS} for cache in caches)
    rest = tuple({key: cache[key] for key in cache if key not in FOLLOW_BEAMS} for cache in caches)
    return {"position": caches[0]["position"], "self": own, "shared": rest}


def _make_step(models: Sequence[Model], params: Sequence[PyTree], average: str) -> Step:
    """Return the step of all models together: the logits of one, or the mean of several."""

    def step(cache: Cache, tokens: Int[Array, " rows"]) -> tuple[Float[Array, "rows v"], Cache]:
        valid, logits, caches = jnp.ones((tokens.shape[0], 1), bool), [], []
        for model, tree, own, shared in zip(models, params, cache["self"], cache["shared"], strict=True):
            apply = functools.partial(model.apply, {"params": tree})
            hidden, after = apply({**own, **shared}, tokens[:, None], valid, method="extend")
            # Whole on every device: searches gather tokens, which XLA cannot do where devices share the vocabulary.
            logits.append(constrain_sharding(apply(hidden, method="logits")[:, 0].astype(jnp.float32)))
            caches.append(after)
        return mean_logits(logits, average), _side_by_side(caches)

    return step


def mean_logits(logits: Sequence[Float[Array, "rows _"]], average: str) -> Float[Array, "rows v"]:
    """Return logits of the mean of the models' probabilities, or of their log-probabilities.

    The models have one vocabulary; some may have further rows, which are unused.
    """
    if len(logits) == 1:
        return logits[0]
    width = max(one.shape[1] for one in logits)
    each = [jnp.pad(jax.nn.log_softmax(x), ((0, 0), (0, width - x.shape[1])), constant_values=-jnp.inf) for x in logits]
    if average == "log_probability":
        return sum(each[1:], each[0]) / len(each)
    return functools.reduce(jnp.logaddexp, each)


def _rules(setup: SearchSetup, batch: SearchBatch) -> Rules:
    """Return what may be written. Rows of a model past the vocabulary never are."""
    models, options, symbols, vocabulary = setup.models, setup.options, setup.symbols, setup.writable
    width = max(model.config.target_vocab_size or model.config.vocab_size for model in models)
    is_cut = has_phrases(batch["constraints"], symbols.pad) if "constraints" in batch else 0  # instead of a forced end
    return Rules(
        eos=symbols.eos,
        pad=symbols.pad,
        allowed=np.pad(vocabulary, (0, width - len(vocabulary))),
        min_length=options.min_length,
        no_repeat_ngram=options.no_repeat_ngram,
        repetition_penalty=options.repetition_penalty,
        prefix=batch.get("prefix"),
        prefix_length=batch.get("prefix_length"),
        prompt=batch["prompt"],
        prompt_length=batch["prompt_length"],
        of_text=models[0].config.family == "decoder",
        last=batch["limit"] - 1 + is_cut if options.forced_end else None,
        renormalize=options.renormalize,
    )


def _coverage(weight: float, cache: Cache) -> Float[Array, " rows"]:
    """Return the coverage penalty of every row (Wu et al. 2016, equation 14): 0 if all of the source was attended to.

    A source token is attended to by the decoder's last layer, averaged over heads and models and summed over the output
    so far.
    """
    attended = sum(own["self"]["coverage"] for own in cache["self"]) / len(cache["self"])
    mask = cache["shared"][0]["memory"]["mask"]
    real = jnp.repeat(mask, attended.shape[0] // mask.shape[0], axis=0)
    return weight * jnp.where(real, jnp.log(jnp.clip(attended, 1e-9, 1.0)), 0).sum(axis=1)


def _keys(seed: int, lines: Int[Array, " b"], parts: Int[Array, " b"] | None, samples: int) -> Key[Array, " rows"]:
    """Return a key for every sample, derived from the seed, the number of its input line and its own number alone.

    Later pieces of a split line have keys that also depend on the piece; a line that is not split has those of a first
    piece.
    """
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(lines)
    if parts is not None:
        further = jax.vmap(jax.random.fold_in)(keys, parts.astype(jnp.uint32) + AFTER_SAMPLES)
        keys = jnp.where(parts > 0, further, keys)
    of_samples = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(of_samples, in_axes=(0, None))(keys, jnp.arange(samples)).reshape(-1)


def stack_layers(params: PyTree) -> PyTree:
    """Return parameters, prepared or not, as models take them. For use inside jit, where it compiles to nothing."""
    return jax.tree.map(
        lambda leaf: jnp.stack(leaf) if isinstance(leaf, tuple) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def in_compute_dtype(params: PyTree, dtype: str) -> PyTree:
    """Round kernels and token tables to the compute dtype, once instead of in every step."""

    def cast(path: Any, leaf: Array) -> Array:
        return leaf.astype(dtype) if LARGE.search("/".join(each.key for each in path)) else leaf

    return params if dtype == "float32" else jax.tree_util.tree_map_with_path(cast, params)
