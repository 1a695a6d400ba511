"""Every part together with every other: the models against an independent float64 reference.

The arrangements are a pairwise covering array: any two values of two options meet in at least one model, unless they
are refused or one of them would be read by nobody. The first rows hold every value; the others are marked slow.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.layers.matmul import jax_gradients
from jformer.models.model_config import CHOICES, RelativeConfig
from jformer.models.vision_config import VisionConfig
from jformer.parallel.backend import Target, compiling_for
from tests.conftest import TINY, draw_params, make_batch, run
from tests.models.reference import GATED, PLAIN, forward, random_params
from tests.slow import slow_but

OPTIONS = {
    "num_classes": (0, 3),
    **{name: CHOICES[name] for name in ("family", "positions", "norm", "attention_scale", "embedding_scale")},
    "activation": ("plain", "gated"),  # of either kind the next one in turn
    "norm_type": CHOICES["norm_type"],
    "num_kv_heads": (0, 1, 2),
    "sizes": ((0, 0), (6, 10)),  # d_k and d_v
    **dict.fromkeys(("residual", "bias", "embedding_norm", "tied_output", "shared_embedding"), (True, False)),
    "shared_layers": (False, True),
    "pooling": ("first", "mean", "none"),
    **dict.fromkeys(("pooler", "transform", "image_source"), (False, True)),
    "num_segments": (0, 2),
    "window": (0, 3),
}
NEVER = {  # value → the values that it never meets
    ("norm", "deepnorm"): [("residual", False)],
    ("family", "encdec"): [("num_classes", 3), ("transform", True), ("num_segments", 2)],
    ("family", "decoder"): [("num_classes", 3), ("transform", True), ("num_segments", 2), ("shared_embedding", False)],
    ("family", "encoder"): [("shared_embedding", False)],
    ("family", "vit"): [("num_classes", 0), ("pooling", "none"), ("num_segments", 2), ("shared_embedding", False)],
    ("num_classes", 0): [("pooling", "mean"), ("pooling", "none"), ("pooler", True)],
    ("num_classes", 3): [("transform", True), ("tied_output", False), ("embedding_scale", "output")],
    ("tied_output", False): [("embedding_scale", "output")],
    ("image_source", True): [("shared_embedding", False), *(("family", f) for f in ("encoder", "decoder", "vit"))],
}
REFUSED = {frozenset({a, b}) for a, others in NEVER.items() for b in others}


def pairs(row):
    """Return the pairs of (option, value) in a row, complete or not."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def complete(row, missing):
    """Return the row with every option, preferring values that meet the most missing pairs, or None where none do."""
    if pairs(row) & REFUSED:
        return None
    option = next((name for name in OPTIONS if name not in row), None)
    if option is None:
        return row
    ways = [{**row, option: value} for value in OPTIONS[option]]
    ways.sort(key=lambda way: -len(pairs(way) & missing))
    return next(filter(None, (complete(way, missing) for way in ways)), None)


@functools.cache
def covering():
    """Return rows that hold every pair there can be, greedily few."""
    values = [[(name, value) for value in OPTIONS[name]] for name in OPTIONS]
    products = (itertools.product(a, b) for a, b in itertools.combinations(values, 2))
    missing = dict.fromkeys(map(frozenset, itertools.chain(*products)))
    rows = []
    while missing:
        first = next(iter(missing))
        row = complete(dict(first), missing.keys())
        rows += [row] if row else []
        done = pairs(row) if row else {first}
        missing = dict.fromkeys(pair for pair in missing if pair not in done)
    return rows


@functools.cache
def config(index):
    """Return the tiny model of a row."""
    fields = dict(covering()[index])
    names = list(PLAIN if fields["activation"] == "plain" else GATED)
    earlier = sum(row["activation"] == fields["activation"] for row in covering()[:index])
    fields["activation"] = names[earlier % len(names)]
    fields["d_k"], fields["d_v"] = fields.pop("sizes")
    head = {name: fields.pop(name) for name in ("num_classes", "pooling", "pooler", "transform", "num_segments")}
    decoder = {"num_decoder_layers": 3, "target_vocab_size": 50} if fields["family"] == "encdec" else {}
    scale = {"mean": (0.4, 0.5), "deviation": (0.3,)} if index % 2 else {}
    vision = VisionConfig(image_size=6, patch_size=2, channels=2, source=fields.pop("image_source"), **scale)
    small = {"vision": vision, "relative": RelativeConfig(8, 7)}
    # Without residuals a norm may see next to nothing: its epsilon keeps rounding errors small, and is seen to work.
    return ModelConfig(**{**TINY, **decoder, **fields, **small}, norm_epsilon=0.01, head=HeadConfig(**head))


def draw_examples():
    """Draw three texts, their targets and images."""
    rng = np.random.default_rng(1)
    sizes = ((7, 4), (5, 9), (6, 3))  # of source and target
    texts = [
        {"source": rng.integers(4, 50, s), "types": rng.integers(0, 2, s), "target": rng.integers(4, 50, t)}
        for s, t in sizes
    ]
    return [{**text, "image": rng.integers(0, 256, (6, 6, 2)).astype(np.uint8)} for text in texts]


def fill(rows, key, size):
    """Lay the texts of each row side by side, then padding: arrays [b size] of them, of segments and of positions."""
    arrays = np.zeros((3, len(rows), size), np.int32)
    for i, row in enumerate(rows):
        parts = [(text[key], np.full(len(text[key]), n + 1), np.arange(len(text[key]))) for n, text in enumerate(row)]
        filled = np.concatenate(parts, axis=1)
        arrays[:, i, : filled.shape[1]] = filled
    return arrays


def batch_of(rows):
    """Return the batch of rows of examples."""
    source, source_segments, source_positions = fill(rows, "source", 13)
    target, target_segments, target_positions = fill(rows, "target", 14)
    return {
        "source": source, "source_segments": source_segments, "source_positions": source_positions,
        "source_types": fill(rows, "types", 13)[0], "image": np.stack([row[0]["image"] for row in rows]),
        "target_in": target, "target_segments": target_segments, "target_positions": target_positions,
    }  # fmt: skip


def test_the_models_hold_every_pair_and_every_activation():
    values = [[(name, value) for value in OPTIONS[name]] for name in OPTIONS]
    every = {frozenset(pair) for a, b in itertools.combinations(values, 2) for pair in itertools.product(a, b)}
    impossible = every - set().union(*map(pairs, covering()))
    assert not any(complete(dict(pair), set()) for pair in impossible)
    assert {config(i).activation for i in range(len(covering()))} == set(CHOICES["activation"])


def name(index):
    c = config(index)
    return f"{c.family}-{c.norm}-{c.positions}-{c.activation}"


def hold_every_value(rows):
    """Tell whether the first so many rows hold every value of every option, and every activation."""
    every = {(name, value) for name in OPTIONS for value in OPTIONS[name]}
    held = {item for row in covering()[:rows] for item in row.items()}
    return held == every and {config(i).activation for i in range(rows)} == set(CHOICES["activation"])


ENOUGH = next(filter(hold_every_value, itertools.count()))
ROWS = [pytest.param(i, marks=[pytest.mark.slow] * (i >= ENOUGH)) for i in range(len(covering()))]


@pytest.mark.parametrize("index", ROWS, ids=name)
def test_model_equals_the_reference(index):
    """Two texts share the first row, the third has a row with padding; what is pooled and images have no neighbours."""
    c, texts = config(index), draw_examples()
    c.check()
    pooled = c.head.num_classes and c.head.pooling != "none"
    alone = pooled or c.reads_images
    model, rows = build_model(c), [[text] for text in texts] if alone else [texts[:2], texts[2:]]
    params, batch = random_params(model), batch_of(rows)
    logits = np.asarray(run(model, params, batch))
    segments = batch["source_segments" if c.family == "encoder" else "target_segments"]
    for i, row in enumerate(rows):
        for n, text in enumerate(row):
            expected = forward(c, params, text)
            found = logits[i] if pooled else logits[i, segments[i] == n + 1]
            np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=[pytest.mark.slow] * (i != 2)) for i in range(ENOUGH)], ids=name
)
def test_models_and_gradients_written_for_gpus_are_those_that_jax_derives(index):
    c, texts = config(index), draw_examples()
    model, rows = build_model(c), [[text] for text in texts]
    params, batch = jax.tree.map(jnp.asarray, (random_params(model), batch_of(rows)))

    def gradients():
        return jax.jit(jax.grad(lambda params: jnp.sin(model.apply({"params": params}, batch)).sum()))(params)

    with jax_gradients(True):
        expected = gradients()
    with compiling_for(Target("gpu")):
        found = gradients()
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * largest), found, expected)


@pytest.mark.parametrize("window", slow_but([0, 1], 1))
@pytest.mark.parametrize("family", slow_but(["encdec", "decoder"], "decoder"))
def test_all_of_a_text_sees_its_prefix(family, window):
    """Two packed texts: of one, two tokens are given, of the other all but the last; fed to a cache, too.

    A window hides nothing of a prefix.
    """
    c = ModelConfig(**TINY, family=family, window=window, positions="relative", relative=RelativeConfig(8, 7))
    model, texts, prefixes = build_model(c), draw_examples()[:2], (2, 8)
    params, batch = random_params(model), batch_of([texts])
    batch["target_prefix"] = np.isin(batch["target_segments"], (1, 2)) & (
        batch["target_positions"] < np.array([0, *prefixes])[batch["target_segments"]]
    )
    logits = run(model, params, batch)[0]
    for n, (text, prefix) in enumerate(zip(texts, prefixes, strict=True)):
        expected = forward(c, params, {**text, "prefix": prefix})
        np.testing.assert_allclose(logits[batch["target_segments"][0] == n + 1], expected, atol=1e-4)
        cache = run(model, params, run(model, params, batch_of([[text]]), method="encode"), 1, 16, method="start")
        cache["self"]["prefix"] = np.array([prefix], np.int32)
        for part in (slice(0, prefix), slice(prefix, None)):
            tokens = text["target"][None, part].astype(np.int32)
            hidden, cache = run(model, params, cache, tokens, np.ones(tokens.shape, bool), method="extend")
            found = run(model, params, hidden, method="logits")[0]
            np.testing.assert_allclose(found, expected[part], atol=1e-4)


def test_a_prefix_is_refused_where_a_cache_could_not_score_it():
    model = build_model(ModelConfig(**TINY, family="decoder", positions="transformer_xl"))
    batch = batch_of([draw_examples()[:1]])
    with pytest.raises(UserError, match="later keys in a cache, which target_prefix needs"):
        run(model, random_params(model), {**batch, "target_prefix": batch["target_positions"] < 2})


def test_one_row_of_segments_is_that_of_both_texts_and_learns_from_both():
    """As RoBERTa has it: a lookup of a second row would be out of the table."""
    model = build_model(ModelConfig(**{**TINY, "family": "encoder"}, head=HeadConfig(num_classes=2, num_segments=1)))
    batch, params = make_batch([5, 7], [1, 1]), draw_params(model)

    def gradient(types):
        rows = jax.tree.map(jnp.asarray, {**batch, "source_types": np.full_like(batch["source"], types)})
        return jax.grad(lambda params: jnp.sin(model.apply({"params": params}, rows)).sum())(params)

    first, second = (gradient(types)["input"]["segments"]["embedding"] for types in (0, 1))
    assert np.abs(first).max() > 0
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_choice_is_refused(key):
    with pytest.raises(UserError, match=f"model.{key}='x'; choose one of: {CHOICES[key][0]}, {CHOICES[key][1]}"):
        ModelConfig(**{key: "x"}).check()


REFUSALS = [
    *(({key: 0}, f"model.{key}=0 must be at least 1") for key in ("num_layers", "d_model", "d_ff", "num_heads")),
    *(
        ({key: -1}, f"model.{key}=-1 must be at least 0")
        for key in ("vocab_size", "num_kv_heads", "d_k", "d_v", "window")
    ),
    *(({key: 1.0}, f"model.{key}=1.0 must be") for key in ("dropout", "attention_dropout", "activation_dropout")),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon=0.0 must be above 0"),
    ({"norm": "deepnorm", "residual": False}, "model.norm='deepnorm' scales residuals"),
    ({"num_heads": 7}, "model.num_heads=7 must divide model.d_model=512"),
    ({"num_kv_heads": 3}, "model.num_kv_heads=3 must divide model.num_heads=8"),
    ({"num_kv_heads": 16}, "model.num_kv_heads=16 must divide model.num_heads=8"),
    ({"d_model": 9, "num_heads": 1}, "model.d_model=9 must be even: sinusoidal"),
    ({"d_model": 9, "num_heads": 1, "positions": "transformer_xl"}, "model.d_model=9 must be even: transformer_xl"),
    ({"positions": "rotary", "d_k": 5}, "model.d_k=5 must be even: rotary"),
    ({"positions": "relative", "relative": RelativeConfig(6, 128)}, "model.relative.num_buckets=6 must be a multiple"),
    ({"positions": "relative", "relative": RelativeConfig(0, 128)}, "model.relative.num_buckets=0 must be"),
    ({"positions": "relative", "relative": RelativeConfig(32, 16)}, "less than twice model.relative.max_distance=16"),
    ({"family": "decoder", "num_decoder_layers": 6}, "model.num_decoder_layers=6 is read by family='encdec' only"),
    (
        {"family": "decoder", "head": HeadConfig(pooler=True)},
        "model.head, except its bias, is read by .* not by family='decoder'",
    ),
    ({"head": HeadConfig(num_segments=2)}, "model.head, except its bias, is read by .* not by family='encdec'"),
    (
        {"family": "encoder", "head": HeadConfig(pooling="max")},
        "model.head.pooling='max'; choose one of: first, last, final, mean, none",
    ),
    ({"family": "encoder", "head": HeadConfig(num_classes=-1)}, "model.head.num_classes=-1 must be at least 0"),
    ({"family": "vit", "head": HeadConfig(num_segments=2)}, "model.head.num_segments=2: an image has no second text"),
    ({"family": "vit", "vision": VisionConfig(patch_size=15)}, "patch_size=15 must divide model.vision.image_size=224"),
    (
        {"family": "vit", "vision": VisionConfig(deviation=(0.5, 0.0, 1.0))},
        "deviation=.* must be one number above 0, or",
    ),
    ({"family": "vit", "vision": VisionConfig(channels=0)}, "model.vision.channels=0 must be at least 1"),
    ({"family": "encoder", "vision": VisionConfig(source=True)}, "source=True is read by family='encdec' only, not by"),
    ({"shared_embedding": False, "vision": VisionConfig(source=True)}, "an image as the source has no table to share"),
    ({"vision": VisionConfig(patch_size=15, source=True)}, "patch_size=15 must divide model.vision.image_size=224"),
    ({"family": "decoder", "shared_embedding": False}, "model.shared_embedding=False is read by family='encdec' only"),
    ({"embedding_scale": "output", "tied_output": False}, "it needs model.tied_output=True"),
    ({"family": "vit", "head": HeadConfig(transform=True)}, "are about vocabularies: family='vit' has none"),
    ({"family": "vit", "tied_output": False}, "are about vocabularies: family='vit' has none"),
    ({"target_vocab_size": 9}, "model.target_vocab_size=9 differs from model.vocab_size=0"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSALS, ids=[words[:48] for _, words in REFUSALS])
def test_a_model_that_cannot_be_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(**fields).check()


MISSPELT = {
    "norm": ("prenorm", r"model.norm='prenorm'; choose one of: post, pre, .*\(did you mean 'pre'\?\)$"),
    "activation": ("swiglo", r"model.activation='swiglo'; choose one of: relu, .*\(did you mean 'swiglu'\?\)$"),
    "dtype": ("auto", "model.dtype='auto' is resolved when a run starts: build a model with 'float32' or 'bfloat16'"),
    "positions": ("rope", "model.positions='rope'; choose one of: sinusoidal, learned, relative, rotary"),
}


@pytest.mark.parametrize("key", MISSPELT)
def test_a_model_is_checked_when_it_is_built(key):
    value, words = MISSPELT[key]
    with pytest.raises(UserError, match=words):
        build_model(ModelConfig(**{key: value}))


def test_sizes_that_the_data_contradicts_are_refused():
    with pytest.raises(UserError, match="vocab_size=9 is less than the tokenizer's 10"):
        ModelConfig(vocab_size=9).with_vocabulary(10, 10)
    with pytest.raises(UserError, match="num_classes=3 but the training text has 2 labels"):
        ModelConfig(family="encoder", head=HeadConfig(num_classes=3)).with_classes(2)
    with pytest.raises(UserError, match="num_classes=0: a vision model needs its number of classes"):
        build_model(ModelConfig(family="vit"))
