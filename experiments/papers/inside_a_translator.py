"""What do heads, feed-forward units and layers of a trained translator do?

Claims:   Michel et al. 2019 (Are Sixteen Heads Really Better than One?), sections 3.2, 3.3 and 4: most heads can be
          removed one at a time, in most layers all but one, and many together in the order of their importance (Voita
          et al. 2019); of cross-attention fewest. Geva et al. 2021 (Transformer Feed-Forward Layers Are Key-Value
          Memories), 3 and 4: a unit is active for texts with a pattern, and its value vector promotes tokens;
          nostalgebraist 2020 (logit lens): lower layers already have the answer.
Design:   a trained run of any data. A head is zeroed alone, all others of its layer, and more and more of them, the
          cheapest first: nats a token of validation targets decide the order, greedy outputs for the test set judge it,
          beside random orders; paired bootstraps over pairs. Units are those of the decoder, looked at where they are
          most active in test pairs; layers are read through the last norm and the head.
Command:  python -m experiments.papers.inside_a_translator --workdir=runs/quickstart --output=runs/inside [--smoke]
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax.traverse_util import flatten_dict, unflatten_dict

import jformer
from experiments.measure import smoke_sizes
from experiments.runs import results_of, small_run
from jformer.data.sources import open_split
from jformer.evaluation.statistics import CONFIDENCE, SAMPLES, Resampled, estimate, paired_bootstrap
from jformer.inference.predict import Predictor
from jformer.models.interventions import activations, intervene
from jformer.tasks.metrics import text_metric, tokenization
from jformer.tools.pages.plots import PlottedLine, lines

WORKDIR = flags.DEFINE_string("workdir", None, "A trained run of translation.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "The folder of the pictures.", required=True)
PAIRS = flags.DEFINE_integer("pairs", 1_024, "Pairs at most, of the validation set and of the test set.", lower_bound=2)
POINTS = flags.DEFINE_integer("points", 13, "Numbers of heads removed that are scored.", lower_bound=2)
PARTS = ("encoder/block/self_attn", "decoder/block/self_attn", "decoder/block/cross_attn")
RANDOM = 3  # orders
READ = 256  # test pairs of which layers and units are read
TOP = 20  # texts at which a unit is most active
Params = Any


class Head(NamedTuple):
    """A head of a stack, numbered from 0."""

    part: str
    layer: int
    head: int


class Examples(NamedTuple):
    """Test pairs as one batch, with the model that reads them."""

    model: Any
    params: Params
    batch: Any
    tokens: Sequence[str]  # of the target


def main(_: list[str]) -> None:
    """Print the tables, and draw heads and layers."""
    if smoke_sizes(pairs=8, points=2) and not (Path(WORKDIR.value) / "results.json").exists():
        from configs import quickstart

        results_of(quickstart, Path(WORKDIR.value), small_run(2))
    folder = Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    run = jformer.load(WORKDIR.value, beam_size=1)
    pairs = test_pairs(run)[:READ]
    batch = run.inputs.pair_arrays(run.inputs.encode_pairs(pairs), len(pairs))
    examples = Examples(run.model, run.params, batch, run.tokenizers[1].tokens)
    for line in itertools.chain(heads(run, folder), lens(examples, folder), units(examples)):
        print(line, flush=True)


def test_pairs(run: Predictor) -> list[tuple[str, str]]:
    """Return the first pairs of the first test set, or of the validation set where there is none."""
    data = run.config.data
    return pairs_of(run, next(iter(data.test_splits().values()), data.valid))


def pairs_of(run: Predictor, split: str) -> list[tuple[str, str]]:
    """Return the first pairs of a split."""
    found = itertools.islice(open_split(run.config.data, split).read(Counter()), PAIRS.value)
    return [(pair.source, pair.target) for pair in found]


def heads(run: Predictor, folder: Path) -> Iterator[str]:
    """Zero every head alone, all others of its layer, and more and more of them; the validation set judges."""
    pairs, c = pairs_of(run, run.config.data.valid), run.model.config
    layers = {part: c.num_layers if part.startswith("encoder") else c.decoder_layers for part in PARTS}
    everything = [Head(part, *each) for part in PARTS for each in np.ndindex(layers[part], c.num_heads)]
    nats, tokens = scored(run, pairs)

    def without(gone: Sequence[Head]) -> tuple[float, float]:
        return share(scored(run, pairs, gone)[0] - nats, tokens)

    cost = {head: without([head]) for head in everything}
    yield f"{len(pairs)} validation pairs, {share(nats, tokens)[0]:.3f} nats a token, more without each head:"
    for (part, layer), group in itertools.groupby(everything, key=lambda head: head[:2]):
        some = list(group)
        each = ", ".join(f"{mean:+.3f} ± {margin:.3f}" for mean, margin in map(cost.__getitem__, some))
        one = min(without([head for head in some if head != kept])[0] for kept in some)
        yield f"{part}, layer {layer + 1}: {each}; only the best one kept {one:+.3f}, none {without(some)[0]:+.3f}"
    drawn = []
    for part in PARTS:
        ours = sorted((cost[head] for head in everything if head.part == part), reverse=True)
        drawn.append(PlottedLine(part, range(1, len(ours) + 1), *zip(*ours, strict=True)))
    (folder / "heads.png").write_bytes(lines(drawn, "heads, the dearest first", "nats a token more without it"))
    whole, *alone = bleu(run, pairs, [[head] for head in everything])
    changed = [
        f"{part} {layer + 1}.{head + 1} {one.score:.2f}"
        for (part, layer, head), one in zip(everything, alone, strict=True)
        if one.p < 0.01
    ]
    yield f"BLEU {whole.score:.2f}; {len(changed)} of {len(alone)} heads alone change it (p < 0.01): " + ", ".join(
        changed
    )
    yield from removed(run, sorted(everything, key=cost.__getitem__), folder)


def removed(run: Predictor, order: Sequence[Head], folder: Path) -> Iterator[str]:
    """Zero more and more heads in this order, and in random ones; the test set, which chose no order, judges."""
    pairs = test_pairs(run)
    counts = sorted({*np.linspace(0, len(order), POINTS.value).astype(int).tolist()})
    found = bleu(run, pairs, [order[:count] for count in counts[1:]])
    shuffled = [np.random.default_rng(seed).permutation(len(order)) for seed in range(RANDOM)]
    drawn = [[order[i] for i in each[:count]] for each in shuffled for count in counts[1:]]
    scores = np.reshape([one.score for one in bleu(run, pairs, drawn)[1:]], (RANDOM, -1))
    random = [estimate(column) for column in [[found[0].score] * RANDOM, *scores.T.tolist()]]
    for count, one, other in zip(counts, found, random, strict=True):
        yield (
            f"{count} of {len(order)} heads removed: BLEU {one.score:.2f} ± {one.margin:.2f}, p {one.p:.3f}; "
            f"in {RANDOM} random orders {other.mean:.2f} ± {other.margin:.2f}"
        )
    by_cost = PlottedLine("least costly first", counts, *zip(*((one.score, one.margin) for one in found), strict=True))
    by_chance = PlottedLine("in random orders", counts, *zip(*(one[:2] for one in random), strict=True))
    (folder / "removed.png").write_bytes(lines([by_cost, by_chance], "heads removed", "BLEU"))


def scored(
    run: Predictor, pairs: Sequence[tuple[str, str]], gone: Iterable[Head] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return for every pair the negative log-probability of its target and its tokens, with these heads at zero."""
    with zeroed(run, gone):
        found = run.score(pairs)
    return np.array([-each.log_prob for each in found]), np.array([len(each.tokens) for each in found])


def bleu(run: Predictor, pairs: Sequence[tuple[str, str]], choices: Sequence[Sequence[Head]]) -> list[Resampled]:
    """Return BLEU of greedy outputs with all heads, then with each choice of them at zero, by a paired bootstrap."""
    sources, references = zip(*pairs, strict=True)
    outputs = []
    for gone in [(), *choices]:
        with zeroed(run, gone):
            outputs.append(run.predict(sources))
    metric = text_metric("bleu", tokenization(run.config), run.config.evaluate.lowercase)
    return paired_bootstrap(metric, outputs[0], outputs[1:], [references])


@contextlib.contextmanager
def zeroed(run: Predictor, gone: Iterable[Head]) -> Iterator[None]:
    """Zero what a run's output projections take from these heads; one program serves all choices."""
    whole, flat = run.params, flatten_dict(run.params, sep="/")
    for part, layer, head in gone:
        name = f"{part}/o/kernel"  # [l (h u) d]
        size = flat[name].shape[1] // run.model.config.num_heads
        flat[name] = flat[name].at[layer, head * size : (head + 1) * size].set(0)
    run.params = unflatten_dict(flat, sep="/")
    try:
        yield
    finally:
        run.params = whole


def share(parts: np.ndarray, wholes: np.ndarray) -> tuple[float, float]:
    """Return the sum of parts over that of wholes, with half the interval of a bootstrap over the pairs."""
    times = np.random.default_rng(0).multinomial(len(parts), np.full(len(parts), 1 / len(parts)), SAMPLES)
    low, high = np.quantile(times @ parts / (times @ wholes), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(parts.sum()) / float(wholes.sum()), float(high - low) / 2


def lens(examples: Examples, folder: Path) -> Iterator[str]:
    """Read every layer of the decoder as if it were the last."""
    model, params, batch, _ = examples
    layers = model.config.decoder_layers

    @jax.jit
    def through(params: Params, batch: Any, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = activations(model, params, batch, ("decoder/block/output", "target_input/output", "logits"))
        states = jnp.concatenate([seen["target_input/output"][None], seen["decoder/block/output"]])

        def as_last(x: jax.Array, number: Any) -> jax.Array:
            return jnp.where(number == layers - 1, states[layer], x)

        early = intervene(model, {"decoder/block/output": as_last})
        return early.apply({"params": params}, batch), seen["logits"]

    shares = []
    weights = batch["weights"]
    for layer in range(layers + 1):
        early, last = through(params, batch, jnp.asarray(layer))
        same = (np.asarray(early).argmax(-1) == np.asarray(last).argmax(-1)) * weights
        shares.append([100 * each for each in share(same.sum(1), weights.sum(1))])
        name = f"layer {layer}" if layer else "input"
        yield "logit lens, {}: {:.1f} ± {:.1f} % of the last layer's choices".format(name, *shares[-1])
    drawn = [PlottedLine("decoder", range(layers + 1), *zip(*shares, strict=True))]
    (folder / "lens.png").write_bytes(lines(drawn, "layer", "choices of the last layer, %"))


def units(examples: Examples) -> Iterator[str]:
    """Look at where each unit of the decoder is most active: which token comes there, and what its value promotes."""
    model, params, batch, tokens = examples
    names = ("decoder/block/feed_forward/units", "decoder/block/output")
    seen = jax.jit(lambda params, batch: activations(model, params, batch, names))(params, batch)
    real = batch["weights"] > 0
    active = np.asarray(seen[names[0]])[:, real]  # [l n f]
    read, comes = batch["target_in"][real], batch["target_out"][real]
    down = np.asarray(params["decoder"]["block"]["feed_forward"]["down"]["kernel"])  # [l f d]
    promoted = np.asarray(jax.jit(lambda x: model.apply({"params": params}, x, method="logits"))(down)).argmax(-1)
    chance = float(np.max(np.bincount(comes))) / len(comes)
    for layer in range(len(active)):
        top = np.argsort(-active[layer], axis=0)[:TOP]  # [TOP f]
        live = active[layer].max(0) > 0
        same_read, same_next = (_purity(each[top])[live].mean() for each in (read, comes))
        agree = estimate((comes[top] == promoted[layer])[:, live].mean(0).tolist())
        yield (
            f"layer {layer + 1}, {live.sum()} units: of {TOP} most active places {same_read:.0%} have read one token, "
            f"{same_next:.0%} come before one, {agree.mean:.1%} ± {agree.margin:.1%} before what the unit promotes "
            f"(the most frequent token {chance:.0%})"
        )
        for unit in np.argsort(-(_purity(comes[top]) * live + (comes[top] == promoted[layer]).mean(0)))[:3]:
            common = Counter(tokens[i] for i in comes[top[:, unit]]).most_common(2)
            shown = ", ".join(f"{token!r} {count}" for token, count in common)
            yield f"  unit {unit}: before {shown} of {TOP}; promotes {tokens[promoted[layer][unit]]!r}"


def _purity(tokens: np.ndarray) -> np.ndarray:
    """Return the share of the most frequent value in each column [n f]."""
    return np.array([float(np.max(np.bincount(column))) / len(column) for column in tokens.T])


if __name__ == "__main__":
    app.run(main)
