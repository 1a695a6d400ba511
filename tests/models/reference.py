"""The forward pass of every family a second time: float64 NumPy, one text or image at a time, from the papers alone.

It shares nothing with jformer.models but the names of parameters and of options. The functions take the config `c` and
the parameters `p` that they need; arrays are [t d], without batch, padding, cache or dropout.
"""

import dataclasses
import math

import jax
import numpy as np

from jformer.models import param_shapes

erf = np.vectorize(math.erf)
PLAIN = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
GATED = {
    "glu": lambda x: 1 / (1 + np.exp(-x)),
    "reglu": PLAIN["relu"],
    "geglu": PLAIN["gelu"],
    "geglu_tanh": PLAIN["gelu_tanh"],
    "swiglu": PLAIN["silu"],
}


def random_params(model):
    """Draw all parameters, also those that begin at zero or one, so that each of them matters."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        kind = path[-1].key
        deviation = leaf.shape[-2] ** -0.5 if kind == "kernel" else 0.3
        return np.float32((kind == "scale") + deviation * rng.standard_normal(leaf.shape))

    shapes = param_shapes(model)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def forward(c, params, example):
    """Return the logits float64 [t v] of an example: ids [t] of source and target, types [t], and an image [h w c].

    Of the target, the first `prefix` tokens are seen by all, 0 where it is missing.
    """
    prefix = example.get("prefix", 0)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    if c.family == "vit":
        x = patches(c, p, example["image"])
        x = np.concatenate([p["class_token"][0], x]) if c.head.pooling == "first" else x
        x = enter(c, p.get("input", {}), x)
        return classify(c, p, stack(c, p["encoder"], x))
    if c.family == "encoder":
        table = p["embedding"]["embedding"]
        x = enter(c, p.get("input", {}), table[example["source"]], example["types"])
        x = stack(c, p["encoder"], x)
        return classify(c, p, x) if c.head.num_classes else predict(c, p.get("head"), x, table)
    if c.family == "decoder":
        table = p["embedding"]["embedding"]
        x = enter(c, p.get("input", {}), table[example["target"]])
        return predict(c, p.get("head"), stack(c, p["decoder"], x, causal=True, prefix=prefix), table)
    shared = "target_embedding" not in p
    if c.vision.source:
        unscaled = dataclasses.replace(c, embedding_scale="none")
        x = enter(unscaled, p.get("source_input", {}), patches(c, p, example["image"]))
    else:
        x = enter(c, p.get("source_input", {}), p["source_embedding"]["embedding"][example["source"]])
    memory = stack(c, p["encoder"], x)
    table = p["source_embedding" if shared else "target_embedding"]["embedding"]
    x = enter(c, p.get("target_input", {}), table[example["target"]])
    return predict(c, p.get("head"), stack(c, p["decoder"], x, memory, causal=True, prefix=prefix), table)


def patches(c, p, image):
    """Return the projected patches of normalised pixels, row by row (Dosovitskiy et al. 2021)."""
    size, pixels, rows = c.vision.patch_size, (image / 255 - c.vision.mean) / c.vision.deviation, []
    for top in range(0, image.shape[0], size):
        for left in range(0, image.shape[1], size):
            rows.append(pixels[top : top + size, left : left + size].flatten())
    return dense(p["patches"], np.array(rows))


def enter(c, p, x, types=None):
    """Return the stack's input: scaled embeddings plus positions plus segments, normalised where asked."""
    if c.embedding_scale == "input":
        x = x * math.sqrt(c.d_model)
    over = math.sqrt(c.d_model) if c.embedding_scale == "positions" else 1
    if c.positions == "learned":
        x = x + p["positions"]["embedding"][: len(x)] / over
    if c.positions == "sinusoidal":
        x = x + np.array([[sinusoid(t, i, c.d_model) for i in range(c.d_model)] for t in range(len(x))]) / over
    if c.head.num_segments:
        x = x + p["segments"]["embedding"][types]
    return norm(c, p["norm"], x) if c.embedding_norm else x


def sinusoid(position, i, d):
    """Feature i of a position (Vaswani et al. 2017, section 3.5)."""
    angle = position / 10_000 ** ((i - i % 2) / d)
    return math.cos(angle) if i % 2 else math.sin(angle)


def stack(c, p, x, memory=None, causal=False, prefix=0):
    """Run N layers; the decoder of an encoder-decoder has a memory and its own N."""
    num_layers = c.num_layers if memory is None else c.num_decoder_layers or c.num_layers
    bias = np.array([[position_bias(c, p, j - i, causal) for j in range(len(x))] for i in range(len(x))])
    bias[[[hides(c, i, j, causal, prefix) for j in range(len(x))] for i in range(len(x))]] = -np.inf
    for i in range(num_layers):
        own = jax.tree.map(lambda leaf, i=0 if c.shared_layers else i: leaf[i], p["block"])
        x = layer(c, own, x, memory, bias)
    return norm(c, p["final_norm"], x) if c.norm in ("pre", "sandwich") else x


def layer(c, p, x, memory, bias):
    """Run the two or three sublayers."""
    a = alpha(c, memory is not None)
    x = sublayer(c, p, "self_attn", a, x, lambda y: attention(c, p["self_attn"], y, y, bias, c.positions))
    if memory is not None:
        x = sublayer(c, p, "cross_attn", a, x, lambda y: attention(c, p["cross_attn"], y, memory))
    return sublayer(c, p, "feed_forward", a, x, lambda y: feed_forward(c, p["feed_forward"], y))


def sublayer(c, p, name, a, x, f):
    """Place norms and the residual around f."""
    skipped = x if c.residual else 0 * x
    first, second = p.get(f"{name}_norm"), p.get(f"{name}_out_norm")
    match c.norm:
        case "post":
            return norm(c, first, skipped + f(x))
        case "pre":
            return skipped + f(norm(c, first, x))
        case "sandwich":
            return skipped + norm(c, second, f(norm(c, first, x)))
        case "deepnorm":
            return norm(c, first, a * skipped + f(x))
        case "none":
            return skipped + f(x)


def alpha(c, decodes):
    """Weigh DeepNorm's residual (Wang et al. 2022, Figure 2)."""
    n, m = c.num_layers, c.num_decoder_layers or c.num_layers
    if c.family != "encdec":
        return (2 * n) ** (1 / 4)
    return (3 * m) ** (1 / 4) if decodes else 0.81 * (n**4 * m) ** (1 / 16)


def norm(c, p, x):
    """Normalise every position: LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)."""
    centred = x if c.norm_type == "rmsnorm" else x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + c.norm_epsilon) * p["scale"] + p.get("bias", 0)


def dense(p, x):
    """Project the last axis."""
    return x @ p["kernel"] + p.get("bias", 0)


def attention(c, p, x, y, bias=None, positions=None):
    """Attend from x [t d] to y [s d], head by head; neighbouring heads may share keys and values."""
    keys, values = c.d_k or c.d_model // c.num_heads, c.d_v or c.d_model // c.num_heads
    sizes = keys, keys, values
    q, k, v = (heads(dense(p[name], z), size) for name, z, size in zip("qkv", (x, y, y), sizes, strict=True))
    q, k = ([turn(z) for z in zs] if positions == "rotary" else zs for zs in (q, k))
    found = []
    for i in range(c.num_heads):
        j = i * (c.num_kv_heads or c.num_heads) // c.num_heads
        scores = by_distance(c, p["distance"], i, q[i], k[j]) if positions == "transformer_xl" else q[i] @ k[j].T
        scores = scores / (math.sqrt(keys) if c.attention_scale == "sqrt" else 1)
        scores = scores if bias is None else scores + bias[..., i]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(weights / weights.sum(-1, keepdims=True) @ v[j])
    return dense(p["o"], np.concatenate(found, axis=-1))


def by_distance(c, p, head, q, k):
    """Return the scores [t s] of a head, pair by pair: Dai et al. 2019, section 3.3, the four terms (a) to (d)."""
    part, scores = slice(head * q.shape[-1], (head + 1) * q.shape[-1]), np.zeros((len(q), len(k)))
    u, v, w = p["content_bias"][part], p["distance_bias"][part], p["kernel"][:, part]
    for i, j in np.ndindex(*scores.shape):
        r = np.array([sinusoid(i - j, n, c.d_model) for n in range(c.d_model)]) @ w
        scores[i, j] = q[i] @ k[j] + q[i] @ r + u @ k[j] + v @ r
    return scores


def heads(x, size):
    """Cut the last axis into heads."""
    return np.split(x, x.shape[-1] // size, axis=-1)


def turn(x):
    """Rotate by the position: features i and i + k/2 are a complex number (Su et al. 2021, section 3.2)."""
    half = x.shape[-1] // 2
    z = x[:, :half] + 1j * x[:, half:]
    z = z * np.exp(1j * np.arange(len(x))[:, None] / 10_000 ** (2 * np.arange(half) / (2 * half)))
    return np.concatenate([z.real, z.imag], axis=-1)


def hides(c, query, key, causal, prefix):
    """Tell whether the query at one position does not see the key at another."""
    beyond = 0 < c.window <= abs(query - key)  # Beltagy et al. 2020, section 3.1; Jiang et al. 2023, section 2
    return key >= prefix and ((causal and key > query) or beyond)


def position_bias(c, p, distance, causal):
    """Return what every head adds to a score, float64 [h]."""
    if c.positions == "relative":
        distance = min(distance, 0) if causal else distance  # a causal stack has no buckets ahead: see relative_buckets
        number = bucket(distance, c.relative.num_buckets, c.relative.max_distance, causal)
        return p["position_bias"]["embedding"][number]
    if c.positions == "alibi":  # Press et al. 2022, section 3, for a power of two
        return -abs(distance) * 2 ** (-8 / c.num_heads * np.arange(1, c.num_heads + 1))
    return np.zeros(c.num_heads)


def bucket(distance, count, longest, causal):
    """Number a distance (Raffel et al. 2020, section 2.1), by where each logarithmic bucket begins."""
    count = count if causal else count // 2
    first = count if distance > 0 else 0
    exact, distance = count // 2, abs(distance)
    if distance < exact:
        return first + distance
    begins = [exact * (longest / exact) ** (i / (count - exact)) for i in range(count - exact)]
    return first + exact - 1 + sum(distance >= round(begin, 9) for begin in begins)


def feed_forward(c, p, x):
    """Two projections and a nonlinearity, or a gate (Shazeer 2020)."""
    up = dense(p["up"], x)
    return dense(p["down"], GATED[c.activation](dense(p["gate"], x)) * up if "gate" in p else PLAIN[c.activation](up))


def predict(c, p, x, table):
    """Return logits over the vocabulary, with BERT's transform before them where there is one."""
    if c.head.transform:
        x = norm(c, p["norm"], {**PLAIN, **GATED}[c.activation](dense(p["transform"], x)))
    kernel = table.T / (math.sqrt(c.d_model) if c.embedding_scale == "output" else 1)
    logits = x @ (kernel if c.tied_output else p["output"]["kernel"])
    return logits + p["bias"] if c.head.transform else logits


def classify(c, p, x):
    """Return logits over classes, [1 v], or [s v] where nothing is pooled."""
    x = {"first": x[:1], "mean": x.mean(0, keepdims=True), "none": x}[c.head.pooling]
    return dense(p["classifier"], np.tanh(dense(p["pooler"]["dense"], x)) if c.head.pooler else x)
