"""One side of experiments/speed/decoding.py, in a process and an environment of its own.

Command:  python -m experiments.speed.decoding_worker jformer|transformers|ctranslate2|floor     (decoding.py starts it)

It reads a line of JSON, does what it says and answers with a line of JSON: first what to load, then passes to run.
Nothing is imported but what its side needs: that of transformers needs no jformer.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 2
OF_ENCODER = ("qkv", "o", "up", "down")  # kernels of a layer
Answer = dict[str, Any]
Pass = Callable[[Answer], tuple[float, list[Any]]]  # a request → seconds, outputs: texts, or ids of the tokens


def load_jformer(told: Answer) -> tuple[Pass, Answer]:
    """Decode through predict.load, text in and text out."""
    import dataclasses
    import functools

    import jax

    from jformer.config import load_config
    from jformer.inference.predict import load

    saved = load_config(Path(told["workdir"]) / "config.json")
    lines = Path(told["lines"]).read_text(encoding="utf-8").split("\n")

    @functools.cache
    def predictor(beam: int, batch: int, tokens: int) -> Any:
        exactly = {"max_length": tokens, "max_extra_length": tokens, "forbid": ("</s>",)} if tokens else {}
        options: dict[str, Any] = {"beam_size": beam, "batch_size": batch, "length_penalty": 1.0, **exactly}
        options |= {"dtype": told["dtype"], "patience": told["patience"]}
        decode = dataclasses.replace(saved.decode, **options)
        return load(told["workdir"], dataclasses.replace(saved, decode=decode))

    def run(asked: Answer) -> tuple[float, list[Any]]:
        answer = predictor(asked["beam"], asked["batch"], asked["tokens"])
        began = time.perf_counter()
        texts = answer.predict(lines[: asked["count"]])
        return time.perf_counter() - began, texts

    return run, {"jax": jax.__version__}


def load_transformers(told: Answer) -> tuple[Pass, Answer]:
    """Decode with generate() of MarianMTModel, sorted by length."""
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    options = json.loads(Path(told["options"]).read_text())
    model = transformers.MarianMTModel(transformers.MarianConfig(**options["config"])).eval()
    with np.load(told["state"]) as state:
        model.load_state_dict({name: torch.tensor(state[name]) for name in state}, strict=False)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = options["epsilon"]
    sources, pad = json.loads(Path(told["ids"]).read_text()), options["config"]["pad_token_id"]

    def run(asked: Answer) -> tuple[float, list[Any]]:
        rows = sorted(range(min(asked["count"], len(sources))), key=lambda i: len(sources[i]))
        outputs: list[Any] = [None] * len(rows)
        began = time.perf_counter()
        for start in range(0, len(rows), asked["batch"]):
            batch = rows[start : start + asked["batch"]]
            longest = max(len(sources[i]) for i in batch)
            ids = torch.tensor([sources[i] + [pad] * (longest - len(sources[i])) for i in batch])
            tokens = asked["tokens"]
            limits = {"min_new_tokens": tokens, "max_new_tokens": tokens or longest + told["extra"]}
            search = {"num_beams": asked["beam"], "do_sample": False, "length_penalty": 1.0}
            mask = (torch.arange(longest) < torch.tensor([len(sources[i]) for i in batch])[:, None]).long()
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=mask, **search, **limits)
            for i, row in zip(batch, found.tolist(), strict=True):
                outputs[i] = row[1:]
        return time.perf_counter() - began, outputs

    return run, {"transformers": transformers.__version__, "torch": torch.__version__}


def load_ctranslate2(told: Answer) -> tuple[Pass, Answer]:
    """Decode with Translator.translate_batch, which sorts by length itself."""
    import ctranslate2

    model = ctranslate2.Translator(
        told["directory"], inter_threads=1, intra_threads=THREADS, compute_type=told["compute_type"]
    )
    words = json.loads(Path(told["words"]).read_text())
    numbers = {word: i for i, word in enumerate(words["target"])}
    sources = [[words["source"][i] for i in ids[:-1]] for ids in json.loads(Path(told["ids"]).read_text())]

    def run(asked: Answer) -> tuple[float, list[Any]]:
        tokens = asked["tokens"]
        limits = {"min_decoding_length": tokens, "max_decoding_length": tokens} if tokens else {}
        began = time.perf_counter()
        found = model.translate_batch(
            sources[: asked["count"]], beam_size=asked["beam"], max_batch_size=asked["batch"], **limits
        )
        seconds = time.perf_counter() - began
        return seconds, [[numbers[word] for word in one.hypotheses[0]] for one in found]

    return run, {"ctranslate2": ctranslate2.__version__}


def load_floor(told: Answer) -> tuple[Pass, Answer]:
    """Time only the matrix products of decoding, or only the reading of a cache."""
    import jax
    import jax.numpy as jnp

    from experiments.measure import mean_seconds

    d, f, v, layers, dtype = (told[key] for key in ("d_model", "d_ff", "vocabulary", "layers", "dtype"))
    keys = iter(jax.random.split(jax.random.key(0), 1_000))

    def weights(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape).astype(dtype) * shape[0] ** -0.5

    shapes = {"qkv": (d, 3 * d), "o": (d, d), "cross_q": (d, d), "cross_o": (d, d), "up": (d, f), "down": (f, d)}
    decoder = [{name: weights(*shape) for name, shape in shapes.items()} for _ in range(layers)]
    encoder = [{name: weights(*shapes[name]) for name in OF_ENCODER} for _ in range(told["encoder_layers"])]
    cross_kv = [weights(d, 2 * d) for _ in range(layers)]
    table = weights(d, v)

    def thirds(x: Any, parts: int) -> Any:
        return sum(jnp.split(x, parts, axis=-1))

    @jax.jit
    def step(x: Any, decoder: Any, table: Any) -> Any:
        for w in decoder:
            x = thirds(x @ w["qkv"], 3) @ w["o"] @ w["cross_q"] @ w["cross_o"]
            x = jax.nn.relu(x @ w["up"]) @ w["down"]
        return (x @ table).max(-1)

    @jax.jit
    def encode(x: Any, encoder: Any, cross_kv: Any) -> Any:
        for w in encoder:
            x = thirds(x @ w["qkv"], 3) @ w["o"]
            x = jax.nn.relu(x @ w["up"]) @ w["down"]
        return sum(thirds(x @ kv, 2) for kv in cross_kv)

    def clock(function: Callable[..., Any], *arrays: Any) -> float:
        jax.block_until_ready(function(*arrays))  # compiles
        return mean_seconds(function, *arrays, least=told["seconds"], calls=2)

    def run(asked: Answer) -> tuple[float, list[Any]]:
        if asked.get("read"):  # bytes
            cache = jnp.ones((asked["read"] // 4,), jnp.float32)
            return clock(jax.jit(jnp.sum), cache), []
        if asked["what"] == "step":
            return clock(step, jnp.ones((asked["rows"], d), dtype), decoder, table), []
        return clock(encode, jnp.ones((asked["rows"], d), dtype), encoder, cross_kv), []

    return run, {"jax": jax.__version__}


LOADERS = {
    "jformer": load_jformer,
    "transformers": load_transformers,
    "ctranslate2": load_ctranslate2,
    "floor": load_floor,
}


def main() -> None:
    """Answer line by line; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, versions = LOADERS[sys.argv[1]](json.loads(sys.stdin.readline()))
    versions = {"python": ".".join(map(str, sys.version_info[:2])), **versions}
    print(json.dumps(versions), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, outputs = run(asked)
        answer = {"seconds": seconds, **({"outputs": outputs} if asked.get("show") else {})}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
