"""What a model answers to a batch of inputs: tokens by search, or a class. Arrays in, arrays out; no text here."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jformer.data.tokenizers import BOS, EOS, NUM_SYMBOLS, PAD
from jformer.decoding.beam import beam_search
from jformer.decoding.cache import spread
from jformer.decoding.config import DecodeConfig
from jformer.decoding.tokens import Decoded


def make_answer(model: Any, answer: str, options: DecodeConfig, vocab_size: int) -> Any:
    """Return the compiled (parameters, batch, room) → ids [b t] that a task's answers are read from."""

    def search(params: Any, batch: dict[str, jax.Array], room: int) -> Int[Array, "b t"]:
        return generate(model, options, vocab_size, params, batch, room).tokens[:, 0]

    def choose(params: Any, batch: dict[str, jax.Array], room: int) -> Int[Array, "b 1"]:
        return jnp.argmax(model.apply({"params": params}, batch), axis=-1) + NUM_SYMBOLS

    return jax.jit(choose if answer == "label" else search, static_argnums=2)


def generate(
    model: Any, options: DecodeConfig, vocab_size: int, params: Any, batch: dict[str, jax.Array], room: int
) -> Decoded:
    """Return the best outputs for every row of a batch, at most `room` tokens; rows whose limit is 0 give none.

    The batch holds, beside what the model encodes, `prompt` [b p], `prompt_length` [b] (at least 1: BOS) and `limit`
    [b], the most tokens to add. Ids past the tokenizer's vocabulary, PAD and BOS are never generated.
    """
    variables, prompt, sizes = {"params": params}, batch["prompt"], batch["prompt_length"]
    rows, width = prompt.shape
    memory = model.apply(variables, batch, method="encode")
    cache = model.apply(variables, memory, rows, width - 1 + room * options.beam_size, method="start")
    if width > 1:  # all but the last token, whose successor is what the search asks for
        before = jnp.arange(width - 1) < sizes[:, None] - 1
        _, cache = model.apply(variables, cache, prompt[:, :-1], before, method="extend")
    cache = spread(cache, options.beam_size)

    def step(cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        valid = jnp.ones((tokens.shape[0], 1), bool)
        hidden, cache = model.apply(variables, cache, tokens[:, None], valid, method="extend")
        logits = model.apply(variables, hidden, method="logits")[:, 0].astype(jnp.float32)
        ids = jnp.arange(logits.shape[-1])
        return jnp.where((ids < vocab_size) & (ids != PAD) & (ids != BOS), logits, -jnp.inf), cache

    return beam_search(
        step,
        cache,
        first=jnp.take_along_axis(prompt, sizes[:, None] - 1, axis=1)[:, 0],
        beam_size=options.beam_size,
        n_best=options.beam_size,
        length_penalty=options.length_penalty,
        max_lengths=batch["limit"],
        length=room,
        eos=EOS,
        pad=PAD,
    )


def prompts(sequences: Sequence[Sequence[int]], rows: int, width: int) -> dict[str, np.ndarray]:
    """Return `prompt` and `prompt_length` of `rows` rows: BOS, then the given ids."""
    prompt = np.full((rows, width), PAD, np.int32)
    prompt[:, 0] = BOS
    for row, sequence in enumerate(sequences):
        prompt[row, 1 : 1 + len(sequence)] = sequence
    sizes = np.array([1 + len(sequence) for sequence in sequences] + [1] * (rows - len(sequences)), np.int32)
    return {"prompt": prompt, "prompt_length": sizes}
