"""What models answer to a batch of inputs: tokens by a search, or a class. Arrays in, arrays out; no text here."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from jformer.data.tokenizers import BOS, EOS, NUM_SYMBOLS, PAD
from jformer.decoding.beam import beam_search
from jformer.decoding.cache import Cache, Step, spread
from jformer.decoding.config import DecodeConfig
from jformer.decoding.rules import Rules
from jformer.decoding.sample import sample
from jformer.decoding.tokens import Decoded
from jformer.placement import place
from jformer.sharding import over_rows

Batch = dict[str, Any]
FOLLOW_BEAMS = ("position", "self")  # the parts of a model's cache that do


def make_answer(
    models: Sequence[Any],
    answer: str,
    options: DecodeConfig,
    vocabulary: Bool[np.ndarray, "v"],
    mesh: Mesh | None = None,
) -> Any:
    """Return the compiled (parameters of every model, batch, room) → Decoded that a task's answers are read from.

    A label is one token with its log-probability. `vocabulary` tells of every id whether it may be written. On a mesh,
    rows are split over data and fsdp.
    """
    respond = functools.partial(_choose, models[0])
    if answer != "label":
        respond = functools.partial(generate, tuple(models), options, vocabulary)

    def on_mesh(params: Sequence[Any], batch: Batch, room: int) -> Decoded:
        return over_rows(functools.partial(respond, room=room), mesh)(params, batch)

    return jax.jit(on_mesh, static_argnums=2)


def generate(
    models: Sequence[Any],
    options: DecodeConfig,
    vocabulary: Bool[np.ndarray, "v"],
    params: Sequence[Any],
    batch: Batch,
    room: int,
) -> Decoded:
    """Return the outputs for every row of a batch, at most `room` tokens; rows whose limit is 0 give none.

    The batch holds, beside what the models encode, `prompt` [b p], `prompt_length` [b] (at least 1: BOS) and `limit`
    [b], the most tokens to add; samples are drawn from its `line` [b]. Where inputs ask for it, it also holds `prefix`
    [b p] with `prefix_length` [b], the beginning of the output, and `constraints` [b c l], phrases in it. A row whose
    limit is above `room` may be left undone, and so are the last `spare` rows to end, if the batch has that number.
    """
    params = [_in_compute_dtype(tree, model.config.dtype) for model, tree in zip(models, params, strict=True)]
    prompt, sizes, beams = batch["prompt"], batch["prompt_length"], options.hypotheses
    cache = _prefill(models, params, batch, prompt.shape[1] - 1 + room * beams, bool(options.coverage_penalty))
    search: dict[str, Any] = {
        "first": jnp.take_along_axis(prompt, sizes[:, None] - 1, axis=1)[:, 0],
        "max_lengths": batch["limit"],
        "length": room,
        "eos": EOS,
        "pad": PAD,
        "spare": batch.get("spare", 0),
        "rules": _rules(options, vocabulary, models, batch),
    }
    step, cache = _make_step(models, params, options.ensemble_average), spread(cache, beams)
    if options.search == "beam":
        coverage = functools.partial(_coverage, options.coverage_penalty) if options.coverage_penalty else None
        keys = ("beam_size", "n_best", "patience", "length_penalty", "diversity")
        penalties = {key: getattr(options, key) for key in keys}
        penalties |= {"groups": options.beam_groups, "coverage": coverage, "constraints": batch.get("constraints")}
        return beam_search(step, cache, **search, **penalties)
    filters = {key: getattr(options, key) for key in ("temperature", "top_k", "top_p", "min_p", "epsilon", "typical")}
    return sample(step, cache, **search, **filters, keys=_keys(options.seed, batch["line"], beams))


def prompts(sequences: Sequence[Sequence[int]], rows: int, width: int) -> dict[str, np.ndarray]:
    """Return `prompt` and `prompt_length` of `rows` rows: BOS, then the given ids."""
    prompt = np.full((rows, width), PAD, np.int32)
    prompt[:, 0] = BOS
    for row, sequence in enumerate(sequences):
        prompt[row, 1 : 1 + len(sequence)] = sequence
    sizes = np.array([1 + len(sequence) for sequence in sequences] + [1] * (rows - len(sequences)), np.int32)
    return {"prompt": prompt, "prompt_length": sizes}


def _choose(model: Any, params: Sequence[Any], batch: Batch, room: int) -> Decoded:
    log_probs = jax.nn.log_softmax(model.apply({"params": params[0]}, batch).astype(jnp.float32))
    ids = jnp.argmax(log_probs, axis=-1) + NUM_SYMBOLS
    return Decoded(ids[:, None], log_probs.max(axis=-1), jnp.ones_like(ids), jnp.ones(len(ids), bool))


def _in_compute_dtype(params: Any, dtype: str) -> Any:
    """Round what is multiplied or looked up to the compute dtype, once instead of in every step."""

    def cast(path: Any, leaf: Array) -> Array:
        return leaf.astype(dtype) if path[-1].key in ("kernel", "embedding") else leaf

    return params if dtype == "float32" else jax.tree_util.tree_map_with_path(cast, params)


def _prefill(models: Sequence[Any], params: Sequence[Any], batch: Batch, entries: int, coverage: bool) -> Cache:
    """Return the joint cache of all models, one row a sentence, with all of the prompts but their last tokens."""
    caches, width = [], batch["prompt"].shape[1] - 1
    for model, tree in zip(models, params, strict=True):
        apply = functools.partial(model.apply, {"params": tree})
        cache = apply(apply(batch, method="encode"), batch["prompt"].shape[0], entries, method="start")
        if coverage:
            cache["self"]["coverage"] = jnp.zeros(cache["memory"]["mask"].shape)
        if width:
            before = jnp.arange(width) < batch["prompt_length"][:, None] - 1
            _, cache = apply(cache, batch["prompt"][:, :-1], before, method="extend")
        caches.append(cache)
    return _join(caches)


def _join(caches: Sequence[Cache]) -> Cache:
    """Lay the caches of several models side by side, so that a search sees one."""
    own = tuple({key: cache[key] for key in FOLLOW_BEAMS} for cache in caches)
    rest = tuple({key: cache[key] for key in cache if key not in FOLLOW_BEAMS} for cache in caches)
    return {"position": caches[0]["position"], "self": own, "shared": rest}


def _make_step(models: Sequence[Any], params: Sequence[Any], average: str) -> Step:
    """Return the step of all models together: the logits of one, or the mean of several."""

    def step(cache: Cache, tokens: Int[Array, "rows"]) -> tuple[Float[Array, "rows v"], Cache]:
        valid, logits, caches = jnp.ones((tokens.shape[0], 1), bool), [], []
        for model, tree, own, shared in zip(models, params, cache["self"], cache["shared"], strict=True):
            apply = functools.partial(model.apply, {"params": tree})
            hidden, after = apply({**own, **shared}, tokens[:, None], valid, method="extend")
            # Whole on every device: searches look tokens up, which XLA cannot do in a vocabulary that devices share.
            logits.append(place(apply(hidden, method="logits")[:, 0].astype(jnp.float32)))
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


def _rules(options: DecodeConfig, vocabulary: Bool[np.ndarray, "v"], models: Sequence[Any], batch: Batch) -> Rules:
    """Return what may be written. Rows of a model past the vocabulary never are."""
    width = max(model.config.target_vocab_size or model.config.vocab_size for model in models)
    return Rules(
        allowed=np.pad(vocabulary, (0, width - len(vocabulary))),
        min_length=options.min_length,
        no_repeat_ngram=options.no_repeat_ngram,
        repetition_penalty=options.repetition_penalty,
        prefix=batch.get("prefix"),
        prefix_length=batch.get("prefix_length"),
        prompt=batch["prompt"],
        prompt_length=batch["prompt_length"],
    )


def _coverage(weight: float, cache: Cache) -> Float[Array, "rows"]:
    """Return the coverage penalty of every row (Wu et al. 2016, equation 14): 0 where all of the source was looked at.

    What a source token got is the attention of the decoder's last layer, averaged over heads and models, summed over
    the output so far.
    """
    looked = sum(own["self"]["coverage"] for own in cache["self"]) / len(cache["self"])
    mask = cache["shared"][0]["memory"]["mask"]
    real = jnp.repeat(mask, looked.shape[0] // mask.shape[0], axis=0)
    return weight * jnp.where(real, jnp.log(jnp.clip(looked, 1e-9, 1.0)), 0).sum(axis=1)


def _keys(seed: int, lines: Int[Array, "b"], samples: int) -> Key[Array, "rows"]:
    """Return a key for every sample, of nothing but the seed, the number of its input line and its own number."""

    def of_line(line: Int[Array, ""]) -> Key[Array, "n"]:
        key = jax.random.fold_in(jax.random.key(seed), line)
        return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(samples))

    return jax.vmap(of_line)(lines).reshape(-1)
