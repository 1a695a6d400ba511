"""What models write for a batch of inputs, by a search. Arrays in, arrays out; `programs` compiles it.

Letters in shapes: b inputs, p tokens of a prompt or prefix, c phrases, l tokens of a phrase, n beams or samples of an
input, rows = b·n, v entries of the vocabulary.
"""

import difflib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jformer import plugins
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.decoding.beam import Coverage, beam_search, record_beams
from jformer.decoding.cache_rows import FOLLOW_BEAMS, Cache, Step, repeat_rows
from jformer.decoding.constraints import has_phrases
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.rules import Rules
from jformer.decoding.sample import sample
from jformer.decoding.search import Decoded, SearchLoop, Start, Trace
from jformer.errors import UserError
from jformer.inference.unstacked_params import in_compute_dtype, joined
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.parallel.activations import constrain_sharding
from jformer.plugins import is_own


class SearchBatch(Batch, total=False):
    """What a search reads beside what the models encode. Inputs that ask for them bring prefixes and constraints."""

    prompt: Int[Array, "b p"]  # tokens that are there before the search; the first is BOS
    prompt_length: Int[Array, " b"]  # at least 1
    limit: Int[Array, " b"]  # the most tokens to add; 0 for a row that only fills the batch
    line: Int[Array, " b"]  # the number of the input line, from which samples are drawn
    max_unfinished: int | Int[Array, ""]  # so many rows, the last ones, may be left unfinished; 0 where it is missing
    prefix: Int[Array, "b p"]  # the beginning of the output
    prefix_length: Int[Array, " b"]
    constraints: Int[Array, "b p l"]  # phrases in the output


class Setup(NamedTuple):
    """What decides on a search, beside the parameters and the batch."""

    models: Sequence[Model]  # an ensemble, whose probabilities are averaged
    options: DecodeConfig
    vocabulary: Bool[np.ndarray, " v"]  # of every id, whether it may be written
    symbols: Symbols  # what begins, ends and fills an output


class OwnSearch(Protocol):
    """What decode.search names as `package.module:function`, such as `jformer.decoding.sample.sample`."""

    def __call__(self, step: Step, cache: Cache, start: Start, rules: Rules, options: DecodeConfig) -> SearchLoop:
        """Return the search over decode.samples rows of every input, which share no entries of the cache."""


def search(setup: Setup, params: Sequence[PyTree], batch: SearchBatch, room: int) -> SearchLoop:
    """Return the search for the outputs of every row of a batch, at most `room` tokens; a row of limit 0 has none.

    `params` are those of every model, and the cache has entries for `room` tokens. A row whose limit is above it may be
    left unfinished, and so may the last `max_unfinished` rows.
    """
    begun, options = _begin(setup, params, batch, room), setup.options
    if options.search == "beam":
        return beam_search(*begun, options.beams, batch.get("constraints"), _coverage_of(options))
    if is_own(options.search):
        own: OwnSearch = plugins.find("decode.search", options.search, {})
        return own(*begun, options)
    return sample(*begun, options.filters, _keys(options.seed, batch["line"], options.hypotheses))


def record(setup: Setup, params: Sequence[PyTree], batch: SearchBatch, room: int) -> tuple[Decoded, Trace]:
    """Return what a beam search finds, and all that was weighed on the way; its arguments are those of `search`."""
    begun, options = _begin(setup, params, batch, room), setup.options
    return record_beams(*begun, options.beams, batch.get("constraints"), _coverage_of(options))


def _begin(setup: Setup, params: Sequence[PyTree], batch: SearchBatch, room: int) -> tuple[Step, Cache, Start, Rules]:
    """Return what every search begins with."""
    models, options, vocabulary, symbols = setup
    params = [in_compute_dtype(joined(tree), model.config.dtype) for model, tree in zip(models, params, strict=True)]
    prompt, sizes, rows = batch["prompt"], batch["prompt_length"], options.hypotheses
    together = rows if options.search == "beam" else 1  # which share their entries
    entries = prompt.shape[1] - 1 + room * together
    caches = _prefill(models, params, batch, entries, bool(options.coverage_penalty))
    cache = repeat_rows(_join([_separate(cache, rows // together) for cache in caches]), rows)
    step = _make_step(models, params, options.ensemble_average)
    start = Start(
        token=jnp.take_along_axis(prompt, sizes[:, None] - 1, axis=1)[:, 0],
        limits=batch["limit"],
        room=room,
        max_unfinished=batch.get("max_unfinished", 0),
    )
    return step, cache, start, _rules(options, vocabulary, symbols, models, batch)


def writable(tokenizer: Tokenizer, options: DecodeConfig) -> Bool[np.ndarray, " v"]:
    """Return, for every entry of the vocabulary, whether a search may write it.

    Raises UserError for words of decode.forbid and decode.only that are no entries, and where too few remain.
    """
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    for key in ("forbid", "only"):
        for word in getattr(options, key):
            if word not in ids:
                close = difflib.get_close_matches(word, ids, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "name entries as the vocabulary writes them"
                raise UserError(f"decode.{key}: {word!r} is no entry of the vocabulary; {hint}")
    mask = np.full(tokenizer.vocab_size, not options.only)
    mask[[ids[word] for word in options.only]] = True
    symbols = tokenizer.symbols
    mask[[symbol for symbol in (symbols.pad, symbols.bos) if symbol < len(mask)]] = False
    mask[symbols.eos] = True
    mask[[ids[word] for word in options.forbid]] = False
    if options.search == "beam" and options.beam_size > mask.sum():
        raise UserError(
            f"decode.beam_size={options.beam_size} is more than the {mask.sum()} entries that may be written: lower it"
        )
    return mask


def _prefill(
    models: Sequence[Model], params: Sequence[PyTree], batch: SearchBatch, entries: int, coverage: bool
) -> list[Any]:
    """Return the cache of every model, one row a sentence, with all of the prompts but their last tokens."""
    caches, width = [], batch["prompt"].shape[1] - 1
    for model, tree in zip(models, params, strict=True):
        apply = functools.partial(model.apply, {"params": tree})
        cache = apply(apply(batch, method="encode"), batch["prompt"].shape[0], entries, method="start")
        if coverage:
            cache["self"]["coverage"] = jnp.zeros(cache["memory"]["mask"].shape)
        if "target_prefix" in batch:
            cache["self"]["prefix"] = batch["target_prefix"].sum(axis=1, dtype=jnp.int32)
        if width:
            before = jnp.arange(width) < batch["prompt_length"][:, None] - 1
            _, cache = apply(cache, batch["prompt"][:, :-1], before, method="extend")
        caches.append(cache)
    return caches


def _separate(cache: Cache, copies: int) -> Cache:
    """Let each of so many rows of a sentence have entries of its own, copies of those so far.

    What follows a row is not repeated here, nor what all rows of a sentence read. A recurrent cache has no entries.
    """
    if "entries" not in cache:
        return cache
    used, kept = cache["entries"]["used"], {key: cache["entries"][key] for key in ("layers", "position")}
    return {**cache, "entries": {"used": used, **jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=0), kept)}}


def _join(caches: Sequence[Cache]) -> Cache:
    """Lay the caches of several models side by side, so that a search sees one."""
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
        return _mean(logits, average), _join(caches)

    return step


def _mean(logits: Sequence[Float[Array, "rows _"]], average: str) -> Float[Array, "rows v"]:
    """Average probabilities, or log-probabilities, of models with one vocabulary; some may have more unused rows."""
    if len(logits) == 1:
        return logits[0]
    width = max(one.shape[1] for one in logits)
    each = [jnp.pad(jax.nn.log_softmax(x), ((0, 0), (0, width - x.shape[1])), constant_values=-jnp.inf) for x in logits]
    if average == "log_probability":
        return sum(each[1:], each[0]) / len(each)
    return functools.reduce(jnp.logaddexp, each)


def _rules(
    options: DecodeConfig,
    vocabulary: Bool[np.ndarray, " v"],
    symbols: Symbols,
    models: Sequence[Model],
    batch: SearchBatch,
) -> Rules:
    """Return what may be written. Rows of a model past the vocabulary never are."""
    width = max(model.config.target_vocab_size or model.config.vocab_size for model in models)
    is_cut = has_phrases(batch["constraints"], symbols.pad) if "constraints" in batch else 0  # in place of a forced end
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
        last=batch["limit"] - 1 + is_cut if options.forced_end else None,
        renormalize=options.renormalize,
    )


def _coverage_of(options: DecodeConfig) -> Coverage | None:
    return functools.partial(_coverage, options.coverage_penalty) if options.coverage_penalty else None


def _coverage(weight: float, cache: Cache) -> Float[Array, " rows"]:
    """Return the coverage penalty of every row (Wu et al. 2016, equation 14): 0 if all of the source was attended to.

    What a source token got is the attention of the decoder's last layer, averaged over heads and models, summed over
    the output so far.
    """
    attended = sum(own["self"]["coverage"] for own in cache["self"]) / len(cache["self"])
    mask = cache["shared"][0]["memory"]["mask"]
    real = jnp.repeat(mask, attended.shape[0] // mask.shape[0], axis=0)
    return weight * jnp.where(real, jnp.log(jnp.clip(attended, 1e-9, 1.0)), 0).sum(axis=1)


def _keys(seed: int, lines: Int[Array, " b"], samples: int) -> Key[Array, " rows"]:
    """Return a key for every sample, of nothing but the seed, the number of its input line and its own number."""

    def of_line(line: Int[Array, ""]) -> Key[Array, " n"]:
        key = jax.random.fold_in(jax.random.key(seed), line)
        return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(samples))

    return jax.vmap(of_line)(lines).reshape(-1)
