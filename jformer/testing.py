"""Checks of user-defined parts, to run before a run depends on them; each raises AssertionError on failure.

They make the contracts of docs/parts.md executable; the built-in parts are tested with them.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax.errors import AssignSubModuleError, InvalidRngError

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.checkpoints.manifest import entries
from jformer.config.options import OptimConfig
from jformer.data.corpus import open_corpus
from jformer.data.data_config import DataConfig, SourceConfig
from jformer.data.pipeline import make_batches
from jformer.data.sources import OpenSplit
from jformer.data.sources.split import Pair, Split, fingerprint
from jformer.data.tokenizers import Tokenizer, load
from jformer.data.vocabularies import learn_tokenizers
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.rules import Rules
from jformer.decoding.search import Decoded, Start
from jformer.inference.generation import OwnSearch
from jformer.inference.verify import stepwise_logits
from jformer.models import ModelConfig, build_model, init_params
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import abstract_like, replicated
from jformer.tasks.batch_arrays import make_batch
from jformer.tasks.build import MakeTask
from jformer.tasks.metrics import OwnScore
from jformer.tasks.task import TaskLoss, make_loss, sized, token_loss
from jformer.training.optim import ScheduleParams

VOCABULARY = 23
REMEDIES = {  # what Flax raises in a layer → what to do instead
    InvalidRngError: (
        "Flax's own dropout has no random numbers in layers: use dropout(x, rate, dropout_key, site) of "
        "jformer.models.layers.dropout"
    ),
    AssignSubModuleError: "make sublayers in setup(), after super().setup()",
}
TEXTS = ("a rose is a rose", "é ü 漢字 🙂", "x", "  two  spaces ", "1 2 34 567")


def check_source(open_split: OpenSplit, config: SourceConfig, split: str = "train") -> None:
    """Check that reading a split is repeatable, and that its size, fingerprint and pairs are valid."""
    first, again = open_split(config, split), open_split(config, split)
    assert first.name == split, f"the split is named {first.name!r}, not {split!r}"
    assert first.fingerprint == again.fingerprint, "opened twice, a split has two fingerprints: runs could not resume"
    pairs = list(first.read(Counter()))
    assert pairs == list(first.read(Counter())) == list(again.read(Counter())), "read twice, a split differs"
    assert pairs, "a split without pairs"
    assert first.size in (0, len(pairs)), f"size={first.size}, but there are {len(pairs)} pairs"
    for pair in pairs:
        assert isinstance(pair, Pair), f"{pair!r:.80} is not a Pair"
        assert "\n" not in pair.source + pair.target, f"{pair!r:.80} has a line feed"
        if pair.start is not None:
            context = pair.source.partition("\t")[2]
            assert context[pair.start :].startswith(pair.target), f"{pair!r:.80}: the answer does not start there"


def check_tokenizer(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    """Check ids, symbols and fingerprint, and that a tokenizer survives being saved and loaded."""
    ids = tokenizer.encode(texts)
    assert len(ids) == len(texts), "encode() must return a list for each text"
    assert ids == [tokenizer.encode([text])[0] for text in texts], "a text's ids depend on the texts beside it"
    assert len(tokenizer.tokens) == tokenizer.vocab_size, f"{len(tokenizer.tokens)} tokens, but vocab_size differs"
    assert all(0 <= each < tokenizer.vocab_size for some in ids for each in some), "an id is outside of the vocabulary"
    symbols = tokenizer.symbols
    inside = {*(each for some in ids for each in some)} & {symbols.pad, symbols.bos, symbols.eos}
    assert not inside, f"encode() writes the symbols {inside}, which the task adds"
    texts_back = [tokenizer.decode(some) for some in ids]
    assert all(isinstance(text, str) for text in texts_back), "decode() must return text"
    framed = [tokenizer.decode([symbols.bos, *some, symbols.eos]) for some in ids]
    assert framed == texts_back, "decode() must leave out the symbols around a text"
    with TemporaryDirectory() as folder:
        tokenizer.save(epath.Path(folder), "saved")
        back = load(epath.Path(folder), "saved")
    assert back.fingerprint == tokenizer.fingerprint, "loaded again, the tokenizer has another fingerprint"
    assert back.encode(texts) == ids, "loaded again, the tokenizer encodes differently"


def check_task(make: MakeTask, config: DataConfig, pairs: Sequence[Pair], family: str = "encdec") -> None:
    """Check the batches, the scores, and the loss and gradient of a task with a small model.

    Args:
        make: the task's factory.
        config: data options that the task supports; data.cache_dir is not used.
        pairs: a few dozen examples.
        family: the model family to train.
    """
    task = make(
        config, label_smoothing=0.0, scores=(), tokenize="13a", lowercase=False, crf=False, family=family,
        temperature=OptimConfig.temperature, symmetric=False,
    )  # fmt: skip
    split = Split("train", fingerprint(list(pairs)), lambda counts: iter(pairs), size=len(pairs))
    with TemporaryDirectory() as folder:
        tokenizers = learn_tokenizers(epath.Path(folder) / "tokenizer", config, [split], task.vocabularies)
        corpus = open_corpus(split, task.encoder(*tokenizers), folder)
        batches = make_batches([corpus], [1.0], config, 0, task.features(*tokenizers))
        first, again = batches[0], batches[0]
    assert all(np.array_equal(first[name], again[name]) for name in first), "a batch differs when it is made again"
    batch: Any = {name: jnp.asarray(array) for name, array in first.items()}
    source, target = tokenizers
    own_noise = bool(target.symbols.noise)
    model = build_model(sized(small_model(family=family), task, source.vocab_size, target.vocab_size, own_noise))
    params, loss = init_params(model, jax.random.key(0)), make_loss(model, task.loss)

    def total(params: Any) -> tuple[Any, Any]:
        sums = loss(params, batch, None)
        return sums["loss"].total, sums

    gradient, sums = jax.jit(jax.grad(total, has_aux=True))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((sums, gradient))), "not finite: loss or gradient"
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradient)), "the loss moves no parameter"
    assert sums["loss"].count > 0, "the loss counts nothing"
    if task.answer:
        scores = task.score([pair.target for pair in pairs], list(pairs), sums)
        assert all(math.isfinite(entry["score"]) for entry in scores.values()), f"scores are not finite: {scores}"


def check_loss(loss: TaskLoss) -> None:
    """Check a loss of tokens: finite sums that add up over rows, and a nonzero gradient at the hidden states."""
    batch = make_batch(target=[[4, 5, 6, 2], [7, 2]])
    hidden, kernel = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 4, 8), (8, VOCABULARY)])
    )

    def sums_of(hidden: Any, rows: slice) -> Any:
        some: Any = jax.tree.map(lambda array: array[rows], batch)
        return jax.jit(lambda hidden: loss(hidden, lambda states: states @ kernel, some))(hidden[rows])

    sums, *rows = (sums_of(hidden, each) for each in (slice(None), slice(1), slice(1, 2)))
    assert "loss" in sums, f"the sums are {sorted(sums)}, without 'loss'"
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sums)), f"a sum is not finite: {sums}"
    for each, first, second in zip(*map(jax.tree.leaves, (sums, *rows)), strict=True):
        np.testing.assert_allclose(each, first + second, rtol=1e-5, err_msg="the sums of two rows do not add up")
    assert sums["loss"].count > 0, "the loss counts nothing"
    gradient = jax.grad(lambda hidden: sums_of(hidden, slice(None))["loss"].total)(hidden)
    assert np.isfinite(gradient).all(), "the gradient is not finite"
    assert np.any(gradient), "the gradient is zero"


def check_score(score: OwnScore) -> None:
    """Check that a score is a finite number, the same twice, and finite for empty answers."""
    references = [list(TEXTS), list(reversed(TEXTS))]
    value = score(list(TEXTS), references)
    assert math.isfinite(value), f"the score is {value}"
    assert value == score(list(TEXTS), references), "scored twice, the same answers have two scores"
    assert math.isfinite(score([""] * len(TEXTS), references)), "the score of empty answers is not finite"


def check_schedule(schedule: Callable[[Any, ScheduleParams], Any], num_steps: int = 100) -> None:
    """Check that factors are finite, at least 0, traceable, and a function of the update alone."""
    params = ScheduleParams(warmup=10, num_steps=num_steps, d_model=64, decay=20, final_rate=0.1)
    factors = [float(schedule(step, params)) for step in range(num_steps)]
    assert all(math.isfinite(each) and each >= 0 for each in factors), "a factor is negative or not finite"
    traced = jax.jit(lambda step: schedule(step, params))
    np.testing.assert_allclose([traced(step) for step in range(num_steps)], factors, rtol=1e-4, atol=1e-7)


def check_optimizer(make: Callable[[Any, OptimConfig, float], optax.GradientTransformation]) -> None:
    """Check that an optimizer minimizes a small quadratic, keeps shapes and dtypes, and can be saved and restored.

    It must also update a stack of two layers, one array for each parameter, just as it updates the two on their own.
    """
    transform = make(lambda step: 0.05, OptimConfig(epsilon=1e-8), 1.0)
    params = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.full(3, 2.0)}}

    def loss(params: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    after, state = params, transform.init(params)
    for _ in range(20):
        after, state = update(after, state)
    assert loss(after) < loss(params), "twenty updates did not lower a sum of squares"
    items = {"params": after, "rest": state}
    shapes = jax.eval_shape(lambda params: {"params": params, "rest": transform.init(params)}, params)
    assert entries(items) == entries(shapes), "updates changed a shape or a dtype of the parameters or of the state"
    _check_saving(items, shapes)
    _check_stack(transform)


def _check_stack(transform: optax.GradientTransformation) -> None:
    """Check that two layers are updated alike in a stack and on their own, unless updates are random."""
    layers = [
        {
            "kernel": jax.random.normal(jax.random.key(2 * i), (4, 3)),
            "bias": jax.random.normal(jax.random.key(2 * i + 1), (3,)),
        }
        for i in range(2)
    ]
    stack = {"block": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}

    def after_updates(params: Any) -> Any:
        state = transform.init(params)
        for _ in range(3):
            updates, state = jax.jit(transform.update)(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        return params

    separate = {f"layer_{i}": layer for i, layer in enumerate(layers)}
    alone, beside = after_updates(separate), after_updates({"a": jnp.zeros(2), **separate})
    del beside["a"]  # its gradient is zero: only random numbers drawn for each parameter depend on it
    if not jax.tree.all(jax.tree.map(np.allclose, alone, beside)):
        return
    stacked = after_updates(stack)["block"]
    for i in range(2):
        for name, leaf in alone[f"layer_{i}"].items():
            note = (
                f"the {name} of a layer is updated differently in a stack, where it is one array [layers …]: wrap what "
                "depends on shapes in jformer.per_layer"
            )
            np.testing.assert_allclose(stacked[name][i], leaf, rtol=1e-4, atol=1e-6, err_msg=note)


def _check_saving(items: dict[str, Any], shapes: dict[str, Any]) -> None:
    sharding = replicated(make_mesh(1))
    with TemporaryDirectory() as folder, Checkpoints(epath.Path(folder)) as checkpoints:
        for step in (10, 20):  # before the first is deleted, the second is read back
            checkpoints.save(step, items, {}, None)
        checkpoints.wait()
        assert checkpoints.steps() == [20], "a checkpoint cannot be read back"
        checkpoints.restore(20, abstract_like(shapes, jax.tree.map(lambda _: sharding, shapes)))


def check_layer(**options: Any) -> None:
    """Check a decoder with a user-defined layer: `check_layer(norm_type="my_layers:norm")`, after `plugins.allow`.

    Its logits must be finite and causal, decoding token by token with the cache must give the logits of one pass over
    the whole text, and training with dropout must give finite gradients.
    """
    config = small_model(family="decoder", vocab_size=VOCABULARY, **options)
    try:
        params = init_params(build_model(config), jax.random.key(0))
        _check_decoding(config, params)
        _check_training(config, params)
    except tuple(REMEDIES) as error:
        named = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise AssertionError(f"{named}: {REMEDIES[type(error)]} ({error})") from error


def _check_decoding(config: ModelConfig, params: Any) -> None:
    model = build_model(config)
    batch: Any = {
        "target_in": jax.random.randint(jax.random.key(1), (2, 7), 0, VOCABULARY),
        "target_segments": jnp.ones((2, 7), jnp.int32),
        "target_positions": jnp.tile(jnp.arange(7), (2, 1)),
    }
    logits = model.apply({"params": params}, batch)
    assert np.isfinite(logits).all(), "logits are not finite"
    later = {**batch, "target_in": (batch["target_in"] + jnp.arange(7) // 6) % VOCABULARY}
    np.testing.assert_allclose(
        model.apply({"params": params}, later)[:, :-1], logits[:, :-1], atol=1e-5, err_msg="a later token leaks"
    )
    stepped = stepwise_logits(model, params, batch, jnp.tile(jnp.arange(7) < 3, (2, 1)))
    np.testing.assert_allclose(stepped, logits, atol=1e-4, err_msg="decoding with the cache differs from a full pass")


def _check_training(config: ModelConfig, params: Any) -> None:
    model = build_model(dataclasses.replace(config, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5))
    batch, loss = make_batch(target=[[4, 5, 6, 2], [7, 2]]), make_loss(model, token_loss(0.0))
    gradient = jax.jit(jax.grad(lambda params: loss(params, batch, jax.random.key(2))["loss"].total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)), "not finite: a gradient in training"


def check_search(search: OwnSearch, options: DecodeConfig | None = None) -> None:
    """Check a search over a table of probabilities: the limits, tokens and scores of its outputs."""
    options, eos, pad, limits = options or DecodeConfig(search="sample"), 2, 0, np.array([4, 2, 0])
    rows = 3 * options.hypotheses
    table = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY)))

    def step(cache: Any, last: Any) -> Any:
        return table[last], {**cache, "position": cache["position"] + 1}

    @jax.jit
    def run() -> Decoded:
        cache = {"position": jnp.zeros(rows, jnp.int32), "self": {}}
        start = Start(token=jnp.ones(3, jnp.int32), limits=jnp.asarray(limits), room=4)
        return search(step, cache, start, Rules(eos=eos, pad=pad), options).run()

    found = jax.tree.map(np.asarray, run())
    assert found.tokens.shape[:2] == found.scores.shape == found.lengths.shape, "shapes of outputs do not agree"
    assert (found.lengths <= limits[:, None]).all(), "an output is longer than its limit"
    assert ((found.tokens >= 0) & (found.tokens < VOCABULARY)).all(), "a token is outside of the vocabulary"
    for tokens, score, length in zip(*(np.concatenate(each) for each in found[:3]), strict=True):
        path = [1, *tokens[:length]]
        expected = sum(table[a, b] for a, b in pairwise(path))
        assert not length or abs(score - expected) < 1e-4, f"{path} has the score {score}, expected {expected}"
        assert eos not in tokens[: max(length - 1, 0)], f"{path} continues after the end symbol"


def small_model(**options: Any) -> ModelConfig:
    """Return the options of a tiny model."""
    return ModelConfig(**{"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0.0, **options})
