"""What notes on Transformers claim, and common errors in them, each with a number.

Design:   every function below is one claim or one trap, computed on small models of random weights, or trained for
          seconds; docs/claims.md has the verdicts, beside those of the other experiments.
Command:  python -m experiments.papers.claims [--only=no_residuals] [--smoke]
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jformer
from experiments.layerwise import make_norms
from experiments.measure import mean_seconds, smoke_sizes
from jformer.config import default_config, resolve
from jformer.models import Attention, ExecutionConfig, FeedForward, ModelConfig, build_model, init_params, param_shapes
from jformer.models.layers.dot_product import attend
from jformer.models.layers.dropout import Site
from jformer.models.layers.recurrent_cells import RecurrentLayer
from jformer.models.layers.visibility import TokenPlaces, Visibility
from jformer.models.parts import count_params
from jformer.tools.forecast.cost_analysis import flops
from jformer.tools.forecast.hlo import parse

ONLY = flags.DEFINE_list("only", [], "Names of functions in this file; all by default.")
SIZES = ModelConfig(
    vocab_size=40, d_model=64, d_ff=256, num_heads=4, num_layers=6, dropout=0.0, execution=ExecutionConfig(unroll=1)
)
Params = Any
Trained = tuple[Callable[[int], Params], Callable[..., jax.Array], Callable[[int, int], Any]]
"""Initial parameters by seed, the loss of a batch, and batches by seed and number."""


def main(_: list[str]) -> None:
    """Print what every claim and trap gives."""
    smoke_sizes()
    for claim in CLAIMS:
        if not ONLY.value or claim.__name__ in ONLY.value:
            print(f"\n{claim.__name__}: {claim.__doc__}")
            for line in claim():
                print(f"  {line}", flush=True)


def no_residuals() -> Iterator[str]:
    """Without residuals gradients do not reach the lower layers of a deep stack, at initialisation."""
    for residual in (True, False):
        model = build_model(dataclasses.replace(SIZES, residual=residual, norm="pre"))
        norms = make_norms(model, jformer.make_loss(model, jformer.token_loss(0.0)))
        found = norms(drawn(model), batch_of(letters(0))).gradients["decoder/feed_forward"]
        shown = ", ".join(f"{value:.1e}" for value in found)
        yield f"residuals {residual}: gradient of the decoder's feed-forwards, first to last, {shown}"


def no_norm() -> Iterator[str]:
    """Without any norm the residual stream and its gradients grow with depth, at initialisation."""
    batch = batch_of(letters(0))
    for depth in (2, 12):
        for norm in ("none", "post", "pre"):
            model = build_model(dataclasses.replace(SIZES, family="decoder", num_layers=depth, norm=norm))
            norms = make_norms(model, jformer.make_loss(model, jformer.token_loss(0.0)))(drawn(model), batch)
            stream, gradients = norms.activations["decoder"], norms.gradients["decoder/feed_forward"]
            yield f"{depth} layers, norm {norm}: last output {stream[-1]:.2f}, first gradient {gradients[0]:.2f}"


def clipping() -> Iterator[str]:
    """Clipping fixes training runs whose gradients explode: SGD with momentum, its rate falling to 0."""
    updates = 4 if flags.FLAGS.smoke else 1_000
    for name, (start, loss, draw) in {"RNN": recall(), "Transformer without norms": reverse()}.items():

        @jax.jit
        def train(params: Params, batches: Any, rate: float, clip: float, loss: Any = loss) -> tuple[Any, Any]:
            rates = optax.linear_schedule(rate, 0.0, updates)
            tx = optax.chain(optax.clip_by_global_norm(clip), optax.sgd(rates, momentum=0.9))

            def update(carry: Any, batch: Any) -> tuple[Any, Any]:
                params, state = carry
                value, gradient = jax.value_and_grad(loss)(params, batch)
                change, state = tx.update(gradient, state)
                return (optax.apply_updates(params, change), state), (value, optax.global_norm(gradient))

            return jax.lax.scan(update, (params, tx.init(params)), batches)[1]

        for rate, clip in ((0.1, np.inf), (0.01, np.inf), (0.001, np.inf), (0.1, 0.1)):
            losses, norms = zip(
                *(train(start(seed), draw(seed, updates), rate, clip) for seed in range(3)), strict=True
            )
            shown = ", ".join(f"{value[-100:].mean():.3f}" for value in losses)
            yield f"{name}, rate {rate}, clipped to {clip}: loss {shown}; largest gradient {np.max(norms):,.0f}"
        nothing = np.log(8) if name == "RNN" else 8 / 9 * np.log(30)
        yield f"{name} that knows nothing: loss {nothing:.3f}"


def recall() -> Trained:
    """Return a plain RNN that must recall the first of 20 tokens."""
    layer, kinds = RecurrentLayer("rnn", 32), 8

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        hidden, _ = layer.apply(
            {"params": params["layer"]}, jax.nn.one_hot(tokens, kinds), jnp.ones(tokens.shape, bool)
        )
        return optax.softmax_cross_entropy_with_integer_labels(hidden[:, -1] @ params["out"], tokens[:, 0]).mean()

    def start(seed: int) -> Params:
        keys = jax.random.split(jax.random.key(seed))
        params = layer.init(keys[0], jnp.ones((1, 20, kinds)), jnp.ones((1, 20), bool))["params"]
        return {"layer": params, "out": 0.1 * jax.random.normal(keys[1], (32, kinds))}

    return start, loss, lambda seed, updates: np.random.default_rng(seed).integers(0, kinds, (updates, 64, 20))


def reverse() -> Trained:
    """Return a Transformer of 3 + 3 layers without norms that must reverse letters."""
    model = build_model(dataclasses.replace(SIZES, d_model=32, d_ff=128, num_layers=3, norm="none"))
    of_batch = jformer.make_loss(model, jformer.token_loss(0.0))

    def loss(params: Params, batch: Any) -> jax.Array:
        found = of_batch(params, batch, None)["loss"]
        return jnp.divide(found.total, found.count)

    def draw(seed: int, updates: int) -> Any:
        return jax.tree.map(lambda x: x.reshape(updates, 16, *x.shape[1:]), batch_of(letters(seed, 16 * updates)))

    return lambda seed: init_params(model, jax.random.key(seed)), loss, draw


def not_linear() -> Iterator[str]:
    """Attention is not linear in its input, though it is in its values."""
    rng = np.random.default_rng(0)
    x, y, fixed = (jnp.asarray(rng.normal(size=(1, 8, 4, 16)), jnp.float32) for _ in range(3))

    def of_input(z: jax.Array) -> jax.Array:
        return attend(z, {"k": z, "v": z}, None, scale=0.25)[0]

    def of_values(z: jax.Array) -> jax.Array:
        return attend(fixed, {"k": fixed, "v": z}, None, scale=0.25)[0]

    for name, f in {"its input": of_input, "its values": of_values}.items():
        yield f"|f(x + y) - f(x) - f(y)| / |f(x) + f(y)|, of {name}: {relative(f(x + y), f(x) + f(y)):.1e}"


def softmax_gradient() -> Iterator[str]:
    """Without 1 / sqrt(d_k) softmax saturates, and its gradient vanishes."""
    rng = np.random.default_rng(0)
    for d_k in (16, 64, 512):
        q, k = rng.normal(size=(200, 1, d_k)), rng.normal(size=(200, 20, d_k))
        scores = jnp.asarray((q * k).sum(-1), jnp.float32)
        for name, scale in {"no scale": 1.0, "1 / sqrt(d_k)": d_k**-0.5, "1 / d_k": 1 / d_k}.items():
            weights = jax.nn.softmax(scores * scale)
            jacobian = jax.vmap(jax.jacobian(jax.nn.softmax))(scores * scale)
            norm = jnp.median(jnp.linalg.norm(jacobian.reshape(len(q), -1), axis=1))
            yield f"d_k {d_k}, {name}: largest weight {weights.max(-1).mean():.2f}, Jacobian {norm:.1e} (median norm)"


def shuffled() -> Iterator[str]:
    """Without positions an encoder does not see the order of words; a causal decoder does."""
    batch = batch_of(letters(0))
    order = np.random.default_rng(1).permutation(batch["source"].shape[1])
    for positions in ("none", "sinusoidal"):
        model = build_model(dataclasses.replace(SIZES, num_layers=2, positions=positions))
        apply = jax.jit(functools.partial(model.apply, {"params": drawn(model)}), static_argnames="method")
        states = apply(batch, method="encode")["hidden"]
        moved = apply({**batch, "source": batch["source"][:, order]}, method="encode")["hidden"]
        inner = slice(1, -1)
        turned = np.concatenate(
            [batch["target_in"][:, :1], batch["target_in"][:, -2:0:-1], batch["target_in"][:, -1:]], 1
        )
        hidden, other = apply(batch, method="hidden"), apply({**batch, "target_in": turned}, method="hidden")
        last = relative(other[:, -1], hidden[:, -1])
        inside = relative(np.sort(other[:, inner], axis=1), np.sort(hidden[:, inner], axis=1))
        yield (
            f"{positions}: shuffled source, encoder {relative(moved, states[:, order]):.1e}; tokens before the last "
            f"reversed, decoder's last state {last:.1e}, those before {inside:.1e}"
        )


def cost_by_length() -> Iterator[str]:
    """Attention costs n² d, a recurrent layer n d², a convolution k n d² (Vaswani et al. 2017, Table 1)."""
    d, lengths = (64, (16, 64)) if flags.FLAGS.smoke else (256, (64, 256, 512, 1_024, 2_048))
    attention = Attention(dataclasses.replace(SIZES, d_model=d, num_heads=4), Site.SELF_WEIGHTS)

    def of_attention(params: Params, x: jax.Array) -> jax.Array:
        places = TokenPlaces(jnp.ones(x.shape[:2], jnp.int32), jnp.arange(x.shape[1])[None])
        kv = attention.apply({"params": params}, x, method="project_kv")
        return attention.apply({"params": params}, x, kv, Visibility(places, places))

    lstm, convolution = RecurrentLayer("lstm", d), nn.Conv(d, (3,))
    layers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "attention": (of_attention, lambda x: kernels(attention, x)),
        "LSTM": (
            lambda params, x: lstm.apply({"params": params}, x, jnp.ones(x.shape[:2], bool))[0],
            lambda x: lstm.init(jax.random.key(0), x, jnp.ones(x.shape[:2], bool))["params"],
        ),
        "convolution of 3": (
            lambda params, x: convolution.apply({"params": params}, x),
            lambda x: convolution.init(jax.random.key(0), x)["params"],
        ),
    }
    for length in lengths:
        x, shown = jnp.ones((1, length, d)), []
        steps = {"attention": 1, "LSTM": length, "convolution of 3": 1}
        for name, (apply, init) in layers.items():
            params = init(x)
            program = jax.jit(lambda params, x, apply=apply: apply(params, x)).lower(params, x).compile()
            work, memory = flops(parse(program.as_text() or "")), scratch(program)
            seconds = mean_seconds(program, params, x, least=0.2)
            shown.append(
                f"{name} {work / 1e6:,.0f} MFLOP, {memory / 1e6:.1f} MB, {1e3 * seconds:.1f} ms, {steps[name]} steps"
            )
        yield f"n {length:,}, d {d}: " + "; ".join(shown)


def trap_feed_forward_parameters() -> Iterator[str]:
    """A feed-forward of 512 and 2,048 has 2,099,712 parameters, not 2,098,176: the first bias has 2,048."""
    yield f"{count_params(kernels(FeedForward(ModelConfig(d_model=512, d_ff=2_048)), jnp.ones((1, 1, 512)))):,}"


def trap_gpt2_parameters() -> Iterator[str]:
    """GPT-2 small has 124 million parameters; its paper says 117."""
    model = build_model(dataclasses.replace(resolve(default_config("gpt2")).model, vocab_size=50_257))
    yield f"{count_params(param_shapes(model)):,}"


def trap_mask_of_infinities() -> Iterator[str]:
    """triu(ones) * -inf is no mask: 0 * -inf is NaN; where(mask, score, -inf) is one."""
    with np.errstate(invalid="ignore"):
        product = np.triu(np.ones((4, 4)), k=1) * -np.inf
    chosen = jax.nn.softmax(jnp.where(jnp.tri(4) > 0, 0.0, -jnp.inf))
    yield f"NaN in {int(np.isnan(product).sum())} of 16 entries; with where, rows of softmax add up to {chosen.sum(-1)}"


def trap_earlier_positions_only() -> Iterator[str]:
    """A causal mask includes the position itself: with earlier ones alone, the first has none to attend to."""
    scores = jnp.where(jnp.tri(3, k=-1) > 0, 0.0, -jnp.inf)
    yield f"softmax of the first row, earlier positions only: {jax.nn.softmax(scores)[0]}"


def trap_swapped_cross_attention() -> Iterator[str]:
    """In cross-attention queries are the decoder's: swapped, it returns a vector for each source position."""
    decoder, encoder = jnp.ones((1, 5, 4, 16)), jnp.ones((1, 9, 4, 16))
    right, swapped = (
        attend(q, {"k": k, "v": k}, None)[0].shape[1] for q, k in ((decoder, encoder), (encoder, decoder))
    )
    yield f"5 target and 9 source positions: {right} vectors, swapped {swapped}"


def trap_scale_by_d_model() -> Iterator[str]:
    """Scores are divided by sqrt(d_k), not by sqrt(d_model): 8 heads make them sqrt(8) times too small."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 100_000, 64))
    scores = (q * k).sum(-1)
    yield f"standard deviation {(scores / 64**0.5).std():.2f}, by sqrt(d_model) {(scores / 512**0.5).std():.2f}"


def trap_no_output_projection() -> Iterator[str]:
    """Without W_O heads stay apart: each feature would depend on one head alone."""
    config = dataclasses.replace(SIZES, d_model=512, num_heads=8)
    params = kernels(Attention(config, Site.SELF_WEIGHTS), jnp.ones((1, 2, 512)))
    yield f"parameters with W_O {count_params(params):,}, without {count_params(params) - count_params(params['o']):,}"


def trap_sublayers() -> Iterator[str]:
    """A layer of the encoder has two sublayers, one of the decoder three."""
    shapes = param_shapes(build_model(SIZES))
    for stack in ("encoder", "decoder"):
        yield f"{stack}: {', '.join(name for name in shapes[stack]['block'] if not name.endswith('norm'))}"


def scratch(program: Any) -> int:
    """Return the bytes that a compiled program needs besides its arguments and results."""
    return int(program.memory_analysis().temp_size_in_bytes)


def relative(found: Any, expected: Any) -> float:
    """Return the norm of a difference, relative to what is expected."""
    return float(np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected))


def kernels(module: Any, x: jax.Array) -> Params:
    """Return the parameters of an attention or a feed-forward for inputs like x."""
    if isinstance(module, FeedForward):
        return module.init(jax.random.key(0), x)["params"]
    places = TokenPlaces(jnp.ones(x.shape[:2], jnp.int32), jnp.arange(x.shape[1])[None])

    def run(module: Any, x: jax.Array) -> jax.Array:
        return module(x, module.project_kv(x), Visibility(places, places))

    return nn.init(run, module)(jax.random.key(0), x)["params"]


def drawn(model: Any) -> Params:
    """Return a model's initial parameters."""
    return jax.jit(functools.partial(init_params, model))(jax.random.key(0))


def letters(seed: int, rows: int = 64) -> np.ndarray:
    """Return rows of eight of 30 letters, and an end symbol."""
    drawn_ids = np.random.default_rng(seed).integers(4, 34, (rows, 8))
    return np.concatenate([drawn_ids, np.full((rows, 1), 2)], axis=1)


def batch_of(source: np.ndarray) -> Any:
    """Return a batch of letters to reverse."""
    return jformer.make_batch(source, np.concatenate([source[:, -2::-1], source[:, -1:]], axis=1))


CLAIMS = (
    no_residuals,
    no_norm,
    clipping,
    not_linear,
    softmax_gradient,
    shuffled,
    cost_by_length,
    trap_feed_forward_parameters,
    trap_gpt2_parameters,
    trap_mask_of_infinities,
    trap_earlier_positions_only,
    trap_swapped_cross_attention,
    trap_scale_by_d_model,
    trap_no_output_projection,
    trap_sublayers,
)

if __name__ == "__main__":
    app.run(main)
