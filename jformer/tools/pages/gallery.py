"""The gallery: a page on what a Transformer is made of, at the sizes of a config and before any training.

Every number comes from the modules that a run uses. Only the step of attention with numbers to edit is computed in the
page, by gallery.js; it begins with those of docs/walkthrough.md.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from etils.epath import Path
from jaxtyping import Array

from jformer.config import default_config, resolve
from jformer.config.options import ENDING_SCHEDULES, Config, OptimConfig
from jformer.models import ModelConfig, build_model, param_shapes
from jformer.models.flops import forward_flops, text_work
from jformer.models.layers.dot_product import attend
from jformer.models.layers.initializers import table_init
from jformer.models.layers.positions import alibi_slopes, apply_rotary, sinusoids
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from jformer.models.parts import parameter_rows
from jformer.tasks.build import build_task, sized_model
from jformer.tools.pages import page
from jformer.tools.pages.embedding_planes import FAR, Positions, biases, distances_of, map_data
from jformer.tools.pages.run_report import parameters
from jformer.training.optim import SCHEDULES, build_schedule, schedule_line

WORDS = ("The", "cat", "sat")  # of docs/walkthrough.md; their embeddings are queries, keys and values
EMBEDDINGS = ((1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1))
STEP = '<div id="step"></div>'  # where gallery.js draws it
PROGRAMS = ("element", "explorer_drawing", "charts", "gallery")
LENGTH, WIDTH = 128, 512  # positions and features of a map at most
NARROW = 40  # columns of a map that stands beside others
SHIFTS = (1, 2, 8, 32, 100)
QUERIES, KEYS = 512, 16  # whose softmax is shown: keys of each query
WINDOW = 3  # of the mask that shows one, where the config has none
POINTS = 200  # of a learning rate's line
LONGEST = 2**13  # tokens of a text whose FLOPs are drawn
KINDS = {  # how a part of a model is called → its kind; the first that fits
    "norm": "norms",
    "attn": "attention",
    "feed_forward": "feed-forward",
    "embedding": "token table",
    "positions": "position table",
}
PUBLISHED = {  # preset → parameters as its paper has them: Radford et al. 2019, Table 2; Brown et al. 2020, Table 2.1
    "gpt2": "117M",
    "gpt2_medium": "345M",
    "gpt2_large": "762M",
    "gpt2_xl": "1542M",
    "gpt3_small": "125M",
    "gpt3_medium": "350M",
    "gpt3_large": "760M",
    "gpt3_xl": "1.3B",
    "gpt3_2_7b": "2.7B",
    "gpt3_6_7b": "6.7B",
    "gpt3_13b": "13.0B",
    "gpt3_175b": "175.0B",
}


class Chart(NamedTuple):
    """Lines over whole numbers."""

    title: str
    along: str  # what the numbers count
    at: Sequence[int]
    lines: Mapping[str, Sequence[float]]
    log_x: bool = False
    log_y: bool = False


Part = str | Chart | Positions


def write_gallery(config: Config, workdir: Path | None, output: str) -> str:
    """Write the page to a file and return a summary; raise UserError as `gallery` does, or if it cannot be written."""
    page.check_output("gallery", output)
    content = gallery(config, workdir)
    page.write_page(output, content.encode())
    return f"{output}: {len(content) / 1e3:,.0f} kB; open it in a browser"


def gallery(config: Config, workdir: Path | None = None) -> str:
    """Return the page for a config; the vocabulary has the size of that of the run in `workdir`, or `data.vocab_size`.

    Raises UserError for model options whose FLOPs are not known.
    """
    model, _ = sized_model(config, build_task(config), workdir)
    model = dataclasses.replace(model, dtype="float32")  # auto would time both
    sections: dict[str, tuple[str, list[Part]]] = {
        "attention": ("One step of attention, to edit", [STEP]),
        "masks": ("Masks", masks(model.window or WINDOW)),
        "softmax": ("Softmax and its gradient, by the scale", softmax_by_scale()),
        "positions": ("Positions", positions(model, config.seed)),
        "parameters": ("Where the parameters are", parameter_shares(model)),
        "cost": ("What a token costs", cost(model)),
        "schedules": ("Learning rates", schedules(config.optim, config.train.num_steps, model.scale_width)),
    }
    charts: list[dict[str, Any]] = []
    maps: list[dict[str, Any]] = []

    def placed(part: Part) -> str:
        if isinstance(part, Chart):
            lines = {name: [float(f"{value:.5g}") for value in values] for name, values in part.lines.items()}
            charts.append(part._asdict() | {"at": list(part.at), "lines": lines})
            return f'<div data-chart="{len(charts) - 1}"></div>'
        if isinstance(part, Positions):
            maps.append(map_data(part))
            whole = ' class="whole"' if len(part.columns) > NARROW else ""
            return f'<div data-map="{len(maps) - 1}"{whole}></div>'
        return part

    sizes = f"{model.family} of {model.num_layers} layers, d_model {model.d_model}, {model.num_heads} heads"
    parts = [
        page.paragraph(
            f"At the sizes of this config ({sizes}), before training. Charts and maps are read with arrow keys."
        ),
        page.contents({anchor: title for anchor, (title, _) in sections.items()}),
    ]
    for anchor, (title, content) in sections.items():
        parts += [page.heading(title, anchor), '<div class="views">', *map(placed, content), "</div>"]
    data = {"charts": charts, "maps": maps, "step": {"words": WORDS, "numbers": EMBEDDINGS}}
    return page.page("Inside a Transformer", parts, PROGRAMS, data)


def masks(window: int) -> list[Part]:
    """Return the masks of attention, of queries down and keys across."""

    def places(*segments: int, prefix: int = 0) -> TokenPlaces:
        numbers = np.array(segments)
        order = np.arange(len(numbers)) - np.array([np.flatnonzero(numbers == n)[0] for n in numbers])
        seen = jnp.asarray(np.arange(len(numbers)) < prefix)[None] if prefix else None
        return TokenPlaces(jnp.asarray(numbers)[None], jnp.asarray(order)[None], seen)

    text, padded, packed = places(*[1] * 8), places(1, 1, 1, 1, 1, 0, 0, 0), places(1, 1, 1, 2, 2, 2, 3, 3)
    started = places(*[1] * 8, prefix=3)
    found = {
        "Padding: 5 tokens and 3 of padding, in an encoder": Visibility(padded, padded),
        "Causal: a decoder": Visibility(text, text, Rule(causal=True)),
        f"Window of {window}, causal": Visibility(text, text, Rule(causal=True, window=window)),
        "Packed: 3 texts in a row, causal": Visibility(packed, packed, Rule(causal=True)),
        "Prefix of 3, which all see": Visibility(started, started, Rule(causal=True, prefix=True)),
        "Cross-attention to 5 tokens": Visibility(places(*[1] * 4), padded),
    }
    words = page.paragraph(
        "Who may attend to whom (models/layers/visibility.py): coloured where a query, down, may attend to a key, "
        "across; hatched where it may not. Queries that are padding see nothing, and nothing reads their outputs."
    )
    return [words, *(_map(name, ("query", "key"), each.mask()[0, 0], masked=True) for name, each in found.items())]


def softmax_by_scale() -> list[Part]:
    """Return charts of softmax over scores of Gaussian queries and keys: its largest weight, and its derivative."""
    sizes = [2**power for power in range(10)]
    scales = {"divided by √d_k": lambda k: k**-0.5, "not divided": lambda k: 1.0, "divided by d_k": lambda k: 1 / k}
    drawn = jax.random.normal(jax.random.key(0), (QUERIES, 1 + KEYS, 1, sizes[-1]))

    @jax.jit
    def means(size: int, scale: float) -> tuple[Array, Array]:
        vectors = jnp.where(jnp.arange(sizes[-1]) < size, drawn, 0)  # products of d_k features
        q, k = vectors[:, :1], vectors[:, 1:]
        weights = attend(scale * q, {"k": k, "v": k}, None)[1][:, 0, 0]  # [b s]
        slopes = jax.vmap(jax.jacobian(jax.nn.softmax))(jnp.log(weights))  # [b s s]: log-weights are shifted scores
        return weights.max(axis=-1).mean(), jnp.linalg.norm(slopes, axis=(1, 2)).mean()

    found = {name: [means(size, scale(size)) for size in sizes] for name, scale in scales.items()}
    largest, gradient = ({name: [float(both[i]) for both in each] for name, each in found.items()} for i in range(2))
    words = page.paragraph(
        f"A query and {KEYS} keys of d_k independent numbers of variance 1: their scores have variance d_k. Not "
        "scaled, one weight takes all, and the gradient of softmax vanishes. Divided by √d_k, neither depends on d_k. "
        f"Divided by d_k, all keys get the same. (Section 3.2.1 of Vaswani et al. 2017; means of {QUERIES} queries.)"
    )
    return [
        words,
        Chart("largest weight", along="sizes d_k", at=sizes, lines=largest, log_x=True),
        Chart("norm of the derivative of softmax", along="sizes d_k", at=sizes, lines=gradient, log_x=True),
    ]


def positions(model: ModelConfig, seed: int) -> list[Part]:
    """Return the positional encodings as maps, and how each depends on distance."""
    table, kept = encoded(model.d_model)
    learned = table_init(model, "positions")(jax.random.key(seed), (LENGTH, model.d_model))
    size = _even(model.key_size)
    rotated = apply_rotary(jnp.ones((1, LENGTH, 1, size)), jnp.arange(LENGTH)[None])[0, :, 0]
    slopes, far = alibi_slopes(model.num_heads), distances_of(FAR, causal=False)
    by_distance = {
        name: products_by_distance(np.asarray(values))
        for name, values in {"sinusoidal": table, "learned": learned, "rotary": rotated}.items()
    }
    drawn = {name: found.tolist() for name, (found, _) in by_distance.items()}
    for head in sorted({0, len(slopes) - 1}):
        drawn[f"ALiBi, head {head + 1}"] = np.exp(-slopes[head] * np.arange(LENGTH)).tolist()
    errors = [
        ["k", "largest error of PE(p + k) = M · PE(p)"],
        *([str(k), f"{shifted(table, k)[1]:.1e}"] for k in SHIFTS),
    ]
    spread = ", ".join(f"{name} {spread:.1e}" for name, (_, spread) in by_distance.items())
    few = slice(None, LENGTH // 4)
    return [
        page.paragraph(
            "Of models/layers/positions.py. Sinusoids (section 3.5 of Vaswani et al. 2017): position p has sin(p / "
            "10000^(2i / d_model)) in feature 2i and the cosine in feature 2i + 1: fast waves left, slow ones right."
        ),
        _map("Sinusoidal positions, PE(p)", ("position", "feature"), table, columns=kept),
        Chart("product of two positions, as a share", along="distances", at=range(LENGTH), lines=drawn),
        page.paragraph(
            f"At one distance, products differ by at most this share wherever the two stand: {spread}. So sinusoids "
            "and rotary positions (of a vector of ones) encode distances alone, and a learned table has to learn them. "
            "ALiBi is drawn as the factor exp(−slope · distance) that it gives a weight."
        ),
        page.paragraph(
            "A shift by k is a linear map, the same for every p: each pair of features is rotated by the angle whose "
            "sine and cosine are PE(k)."
        ),
        page.table(errors),
        _map("M of a shift by 1, its first 16 features", ("row", "column"), shifted(table, 1)[0][:16, :16]),
        _map("Learned positions before training", ("position", "feature"), np.asarray(learned)[few, :LENGTH]),
        _map(f"Rotary: ones rotated, of d_k = {size}", ("position", "feature"), np.asarray(rotated)[few, :LENGTH]),
        biases("ALiBi: what is added to scores", -slopes[:, None] * np.abs(far), far, slopes.tolist()),
    ]


def encoded(d_model: int) -> tuple[np.ndarray, Sequence[int]]:
    """Return sinusoids f32 [LENGTH d] and the numbers of their features, of many every n-th pair."""
    pairs = np.arange(0, _even(d_model), 2)[:: -(-d_model // WIDTH)]
    kept = np.stack([pairs, pairs + 1], axis=1).ravel()
    return np.asarray(sinusoids(LENGTH, _even(d_model)))[:, kept], kept.tolist()


def products_by_distance(table: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the mean product of two rows of a table [t d] by distance [t], and the largest spread at any distance.

    Both are shares of the mean product of a row with itself.
    """
    products = table @ table.T
    diagonals = [np.diagonal(products, distance) / np.diagonal(products).mean() for distance in range(len(table))]
    return np.array([each.mean() for each in diagonals]), max(float(np.ptp(each)) for each in diagonals)


def shifted(table: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """Return M [d d], made of row k of a table [t d] of sinusoids, and the largest error of row p + k = M · row p."""
    sin, cos = table[k, 0::2], table[k, 1::2]
    matrix = scipy.linalg.block_diag(*np.moveaxis(np.array([[cos, sin], [-sin, cos]]), -1, 0))
    return matrix, float(np.abs(table[:-k] @ matrix.T - table[k:]).max())


def parameter_shares(model: ModelConfig) -> list[Part]:
    """Return the parameters of a model by part, and by kind beside those of GPT-2 and GPT-3."""
    parts = counted_parts(model)
    kinds = [*KINDS.values(), "other"]
    rows = [["model", "layers x d_model", "published", "counted", *kinds]]
    models = {"this config": (model, "")}
    for preset, published in PUBLISHED.items():
        gpt = dataclasses.replace(resolve(default_config(preset)).model, vocab_size=50_257)
        models[preset] = gpt, published
    for name, (each, published) in models.items():
        of_kind = by_kind(parts if each is model else counted_parts(each))
        total = of_kind.total()
        shares = [f"{of_kind[kind] / total:.1%}" for kind in kinds]
        rows.append([name, f"{each.num_layers} x {each.d_model}", published, f"{total:,}", *shares])
    words = page.paragraph(
        "GPT-2's paper says 117M parameters; its shapes have 124M. Attention has 4 d_model² a layer and feed-forward "
        "8 d_model²; the token table, a third of the smallest model, is next to nothing in the largest."
    )
    return [*parameters(parts)[1:], words, page.table(rows)]


def counted_parts(model: ModelConfig) -> dict[str, int]:
    """Return the parameters of every part of a model, from shapes alone."""
    shapes = param_shapes(build_model(model))
    return {name: count for name, _, count in parameter_rows(shapes)}


def by_kind(parts: Mapping[str, int]) -> Counter[str]:
    """Return the number of parameters of each of KINDS, and "other"."""
    found: Counter[str] = Counter()
    for name, count in parts.items():
        found[next((kind for part, kind in KINDS.items() if part in name), "other")] += count
    return found


def cost(model: ModelConfig) -> list[Part]:
    """Return the FLOPs of a forward pass per token, by the length of a text; for images, those of one."""
    if model.reads_images:
        flops = forward_flops(model, text_work(1, 0))
        return [page.table([["part", "forward FLOPs of an image"], *([part, f"{n:,}"] for part, n in flops.items())])]
    lengths = [2**power for power in range(4, LONGEST.bit_length())]
    found = [forward_flops(model, text_work(length, length)) for length in lengths]
    lines = {part: [flops[part] / length for flops, length in zip(found, lengths, strict=True)] for part in found[0]}
    words = page.paragraph(
        "Matrix products of a forward pass over a source and a target of one length (models/flops.py). Projections and "
        "feed-forward cost every token the same, attention more the longer the text. An update takes three times that."
    )
    return [
        words,
        Chart("FLOPs of a token", along="lengths of a text", at=lengths, lines=lines, log_x=True, log_y=True),
    ]


def schedules(options: OptimConfig, num_steps: int, d_model: int) -> list[Part]:
    """Return the learning rates of a run under each schedule; `d_model` is `ModelConfig.scale_width`."""
    steps = np.unique(
        [*np.linspace(1, num_steps, POINTS, dtype=int), np.clip(options.warmup_steps(num_steps), 1, num_steps)]
    )
    rows = [["schedule", "highest", "at update", "at the last update"]]
    lines = {}
    for name in dict.fromkeys([*SCHEDULES, options.schedule]):
        shown = dataclasses.replace(options, schedule=name)
        if name in ENDING_SCHEDULES and shown.ramp_steps(num_steps) > num_steps:
            continue  # no run of this length can have it
        rate = build_schedule(shown, num_steps, d_model)
        rates = np.asarray(jax.vmap(rate)(jnp.asarray(steps) - 1), float)
        lines[name] = (rates / max(rates.max(), 1e-30)).tolist()
        rows.append([name, f"{rates.max():.3g}", f"{steps[int(np.argmax(rates))]:,}", f"{rates[-1]:.3g}"])
    words = page.paragraph(f"This config's {schedule_line(options, num_steps, d_model)}.")
    return [
        words,
        Chart("learning rate, as a share of its highest", along="updates", at=steps.tolist(), lines=lines),
        page.table(rows),
    ]


def _even(size: int) -> int:
    return max(2, size // 2 * 2)


def _map(
    name: str, axes: tuple[str, str], values: Any, columns: Sequence[int] | None = None, masked: bool = False
) -> Positions:
    """Return a map whose rows and columns are numbered, from 0 unless columns have numbers of their own."""
    numbers = np.asarray(values, np.float32)
    rows, across = (tuple(map(str, names)) for names in (range(len(numbers)), columns or range(numbers.shape[1])))
    return Positions(name=name, axes=axes, values=numbers, rows=rows, columns=across, masked=masked)
