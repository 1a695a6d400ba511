"""Parameters are drawn as the papers say: measured deviations, DeepNorm's numbers, one layer at a time."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.models.head_config import HeadConfig
from jformer.models.layers.initializers import bias_init, deepnorm, kernel_init, table_init

D, F, K = 256, 640, 32  # of the model, of the feed-forward, and of a query
BASE = ModelConfig(d_model=D, d_ff=F, num_heads=8)
TRUNCATED = 0.8796  # the deviation of a normal distribution of deviation 1, cut off at 2


def draw(init, *shape):
    return np.asarray(init(jax.random.key(0), shape))


def deviation_of(init, *shape):
    return math.sqrt((draw(init, *shape) ** 2).mean())


# init, role of the kernel, its shape, its deviation.
KERNELS = [
    ("glorot", "query", (D, D), (2 / (D + D)) ** 0.5),
    ("glorot", "up", (D, F), (2 / (D + F)) ** 0.5),
    ("he", "up", (D, F), (2 / D) ** 0.5),
    ("he", "down", (F, D), (2 / F) ** 0.5),
    ("small", "value", (D, D), (2 / (D + 4 * D)) ** 0.5),
    ("small", "down", (F, D), (2 / (D + 4 * D)) ** 0.5),
    ("bert", "key", (D, D), 0.02 * TRUNCATED),
    ("bert", "pooler", (D, D), 0.02 * TRUNCATED),
    ("gpt2", "value", (D, D), 0.02),
    ("gpt2", "up", (D, F), 0.02),
    ("gpt2", "output", (D, D), 0.02 / math.sqrt(2 * 12)),
    ("gpt2", "down", (F, D), 0.02 / math.sqrt(2 * 12)),
    ("t5", "query", (D, D), D**-0.5),  # and times K^-0.5, see below
    ("t5", "key", (D, D), D**-0.5),
    ("t5", "output", (F, D), F**-0.5),
    ("t5", "gate", (D, F), D**-0.5),
    ("t5", "down", (F, D), F**-0.5),
    ("vit", "query", (D, D), (2 / (D + D)) ** 0.5),
    ("vit", "patches", (F, D), F**-0.5),
    ("vit", "head", (D, F), 0.0),
]


@pytest.mark.parametrize(("init", "role", "shape", "deviation"), KERNELS)
def test_kernels_have_the_deviation_of_their_paper(init, role, shape, deviation):
    rule = kernel_init(dataclasses.replace(BASE, init=init), role, layers=12)
    assert deviation_of(rule, *shape) == pytest.approx(deviation, rel=0.01)


def test_glorot_is_uniform_and_bert_is_cut_off_at_two_deviations():
    glorot, bert = (
        draw(kernel_init(dataclasses.replace(BASE, init=name), "query"), D, D) for name in ("glorot", "bert")
    )
    assert np.abs(glorot).max() == pytest.approx((6 / (D + D)) ** 0.5, rel=1e-3)
    assert np.abs(bert).max() == pytest.approx(0.04, rel=1e-3)


@pytest.mark.parametrize(
    ("init", "role", "gain"), [("t5", "query", K**-0.5), ("glorot", "query", K**-0.5), ("t5", "key", 1)]
)
def test_queries_alone_carry_the_scale_that_attention_leaves_out(init, role, gain):
    plain, scaled = (dataclasses.replace(BASE, init=init, attention_scale=scale) for scale in ("sqrt", "one"))
    assert deviation_of(kernel_init(scaled, role), D, D) == pytest.approx(
        gain * deviation_of(kernel_init(plain, role), D, D)
    )


TABLES = [
    *((init, role, D**-0.5) for init in ("glorot", "he", "small") for role in ("tokens", "positions")),
    *(("bert", role, 0.02 * TRUNCATED) for role in ("tokens", "positions", "segments")),
    ("gpt2", "tokens", 0.02),
    ("gpt2", "positions", 0.01),
    ("t5", "tokens", 1.0),
    ("t5", "relative", D**-0.5),
    ("vit", "positions", 0.02),
]


@pytest.mark.parametrize(("init", "role", "deviation"), TABLES)
def test_tables_have_the_deviation_of_their_paper(init, role, deviation):
    rule = table_init(dataclasses.replace(BASE, init=init), role)
    assert deviation_of(rule, 300, D) == pytest.approx(deviation, rel=0.01)


def test_only_the_feed_forward_of_vit_has_biases_that_are_not_zero():
    vit = dataclasses.replace(BASE, init="vit")
    assert deviation_of(bias_init(vit, "up"), 10_000) == pytest.approx(1e-6, rel=0.03)
    assert not draw(bias_init(vit, "query"), 100).any()
    assert not draw(bias_init(BASE, "up"), 100).any()


# Wang et al. 2022, Figure 2, with N = 6 layers in the encoder and M = 4 in the decoder.
DEEPNORM = [
    ("encoder", False, 12**0.25, 48**-0.25),  # (2N)^(1/4) = 1.8612, (8N)^(-1/4) = 0.3799
    ("decoder", False, 12**0.25, 48**-0.25),
    ("vit", False, 12**0.25, 48**-0.25),
    ("encdec", False, 0.81 * 5184 ** (1 / 16), 0.87 * 5184 ** (-1 / 16)),  # N^4 · M = 5184: 1.3825, 0.5097
    ("encdec", True, 12**0.25, 48**-0.25),  # (3M)^(1/4), (12M)^(-1/4)
]


@pytest.mark.parametrize(("family", "decoder", "alpha", "beta"), DEEPNORM)
def test_deepnorm_has_the_alpha_and_beta_of_its_paper(family, decoder, alpha, beta):
    layers = {"num_layers": 6, "num_decoder_layers": 4 if family == "encdec" else 0}
    c = ModelConfig(family=family, norm="deepnorm", **layers)
    assert deepnorm(c, decoder) == pytest.approx((alpha, beta))
    assert deepnorm(dataclasses.replace(c, norm="post"), decoder) == (1.0, 1.0)


def drawn(**fields):
    """Return the initial parameters of a small model with layers big enough to measure."""
    model = build_model(
        ModelConfig(
            vocab_size=8,
            d_model=64,
            d_ff=192,
            num_heads=4,
            num_layers=5,
            execution=ExecutionConfig(unroll=1),
            **fields,
        )
    )
    return jax.device_get(init_params(model, jax.random.key(0)))


@pytest.mark.slow
def test_initialisers_see_one_layer_and_the_beta_of_its_stack():
    """Were glorot to see the stack [5 64 64], its deviation would be smaller by sqrt(5)."""
    params = drawn(norm="deepnorm", num_decoder_layers=3)
    shrunk = [("self_attn", "v"), ("self_attn", "o"), ("feed_forward", "up"), ("feed_forward", "down")]
    for stack, layers, beta in (("encoder", 5, 0.87 * (5**4 * 3) ** (-1 / 16)), ("decoder", 3, 36**-0.25)):
        for part, name in [("self_attn", "q"), ("self_attn", "k"), *shrunk]:
            kernel = params[stack]["block"][part][name]["kernel"]
            gain = beta if (part, name) in shrunk else 1.0
            expected = gain * (2 / sum(kernel.shape[1:])) ** 0.5
            np.testing.assert_allclose(kernel.std((1, 2)), expected, rtol=0.06, err_msg=f"{stack} {part} {name}")
            assert len({layer.tobytes() for layer in kernel}) == layers
    assert params["decoder"]["block"]["cross_attn"]["v"]["kernel"].std() == pytest.approx(36**-0.25 / 8, rel=0.03)


@pytest.mark.slow
def test_gpt2_counts_the_layers_of_its_stack():
    block = drawn(family="decoder", init="gpt2", norm="pre")["decoder"]["block"]
    assert block["self_attn"]["o"]["kernel"].std() == pytest.approx(0.02 / math.sqrt(10), rel=0.03)
    assert block["feed_forward"]["down"]["kernel"].std() == pytest.approx(0.02 / math.sqrt(10), rel=0.03)
    assert block["feed_forward"]["up"]["kernel"].std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.slow
def test_a_vision_model_begins_undecided():
    params = drawn(family="vit", init="vit", head=HeadConfig(num_classes=3))
    assert not params["classifier"]["kernel"].any()
    assert not params["class_token"].any()
    assert params["encoder"]["block"]["feed_forward"]["up"]["bias"].std() == pytest.approx(1e-6, rel=0.1)
    assert params["patches"]["kernel"].std() == pytest.approx((16 * 16 * 3) ** -0.5, rel=0.02)
