"""What do heads, feed-forward units and layers of a trained translator do?

Claims:   Michel et al. 2019 (Are Sixteen Heads Really Better than One?), sections 3.2 and 3.3: most heads can be taken
          away one at a time, and in most layers all but one; of cross-attention fewest. Geva et al. 2021 (Transformer
          Feed-Forward Layers Are Key-Value Memories), 3 and 4: a unit is active for texts with a pattern, and its value
          vector promotes tokens; nostalgebraist 2020 (logit lens): lower layers already have the answer.
Design:   a trained run and its own test pairs, scored as they are: accuracy is the share of target tokens that are most
          probable given those before. Heads are zeroed alone, and all others of their layer; units are those of the
          decoder, looked at where they are most active; layers are read through the last norm and the head.
Command:  python -m experiments.papers.inside_a_translator --workdir=runs/quickstart --output=runs/inside [--smoke]
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jformer
from experiments.measure import smoke_sizes
from experiments.runs import results_of, small_run
from jformer.data.sources import open_split
from jformer.evaluation.statistics import estimate
from jformer.inference.answers import EncodedPair
from jformer.models.interventions import activations, intervene
from jformer.tools.pages.plots import PlottedLine, lines

WORKDIR = flags.DEFINE_string("workdir", None, "A trained run of translation.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "The folder of the pictures.", required=True)
PAIRS = flags.DEFINE_integer("pairs", 256, "Of the test set.", lower_bound=2)
PARTS = ("encoder/block/self_attn", "decoder/block/self_attn", "decoder/block/cross_attn")
TOP = 20  # texts at which a unit is most active
Params = Any


class Examples(NamedTuple):
    """Test pairs as one batch, with the model that reads them."""

    model: Any
    params: Params
    batch: Any
    tokens: Sequence[str]  # of the target


def main(_: list[str]) -> None:
    """Print the tables, and draw heads and layers."""
    if smoke_sizes(pairs=8):
        from configs import quickstart

        results_of(quickstart, Path(WORKDIR.value), small_run(2))
    folder = Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    examples = open_examples(Path(WORKDIR.value))
    for line in itertools.chain(heads(examples, folder), lens(examples, folder), units(examples)):
        print(line, flush=True)


def open_examples(workdir: Path) -> Examples:
    """Return the first test pairs of a run."""
    run = jformer.load(workdir)
    data = run.config.data
    split = open_split(data, next(iter(data.test_splits().values()), data.valid))
    pairs = [(pair.source, pair.target) for pair in itertools.islice(split.read(Counter()), PAIRS.value)]
    encoded: list[EncodedPair] = run.inputs.encode_pairs(pairs)
    return Examples(run.model, run.params, run.inputs.pair_arrays(encoded, len(encoded)), run.tokenizers[1].tokens)


def right(examples: Examples, logits: Any) -> np.ndarray:
    """Return for every pair the share of its target tokens that are most probable."""
    weights = examples.batch["weights"]
    found = (np.asarray(logits).argmax(-1) == examples.batch["target_out"]) * weights
    return found.sum(1) / weights.sum(1)


def heads(examples: Examples, folder: Path) -> Iterator[str]:
    """Take every head away, and all others of its layer; heads that are kept are numbers, so one program does it."""
    model, params, batch, _ = examples
    c = model.config

    @functools.partial(jax.jit, static_argnames="part")
    def masked(params: Params, batch: Any, part: str, kept: jax.Array) -> jax.Array:  # kept [l h]: 1, 0 = taken away
        without = intervene(model, {f"{part}/heads": lambda x, layer: x * kept[layer][:, None]})
        return without.apply({"params": params}, batch)

    logits = functools.partial(masked, params, batch)

    drawn = []
    for part in PARTS:
        layers = c.num_layers if part.startswith("encoder") else c.decoder_layers
        ones = jnp.ones((layers, c.num_heads))
        whole = right(examples, logits(part, ones))
        alone, others = np.zeros((2, layers, c.num_heads))
        for layer, head in np.ndindex(layers, c.num_heads):
            alone[layer, head] = right(examples, logits(part, ones.at[layer, head].set(0))).mean()
            only = ones.at[layer].set(0).at[layer, head].set(1)
            others[layer, head] = right(examples, logits(part, only)).mean()
        lost = whole.mean() - alone
        one = estimate(whole.tolist())
        yield f"{part}: tokens right {one.mean:.2%}; a head taken away costs, in points, by layer and head"
        for layer in range(layers):
            each = ", ".join(f"{100 * value:.1f}" for value in lost[layer])
            none = right(examples, logits(part, ones.at[layer].set(0))).mean()
            best, nothing = (100 * (whole.mean() - value) for value in (others[layer].max(), none))
            yield f"  layer {layer + 1}: {each}; only the best kept {best:.1f}, none {nothing:.1f}"
        drawn.append(
            PlottedLine(part, range(1, lost.size + 1), sorted((100 * lost).ravel().tolist())[::-1], [None] * lost.size)
        )
        small = (lost < 0.01).mean()
        yield f"  {small:.0%} of {lost.size} heads cost less than a point"
    (folder / "heads.png").write_bytes(lines(drawn, "heads, the dearest first", "points lost without it"))


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
    for layer in range(layers + 1):
        early, last = through(params, batch, jnp.asarray(layer))
        weights = batch["weights"]
        same = ((np.asarray(early).argmax(-1) == np.asarray(last).argmax(-1)) * weights).sum() / weights.sum()
        shares.append(100 * float(same))
        yield f"logit lens, {'input' if not layer else f'layer {layer}'}: {same:.1%} of the last layer's choices"
    drawn = [PlottedLine("decoder", range(layers + 1), shares, [None] * len(shares))]
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
        agree = (comes[top] == promoted[layer])[:, live].mean()
        yield (
            f"layer {layer + 1}, {live.sum()} units: of {TOP} most active places {same_read:.0%} have read one token, "
            f"{same_next:.0%} come before one, {agree:.0%} before what the unit promotes (most frequent {chance:.0%})"
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
