"""PyTorch and Transformers on the GPU of accelerator_rows.py: updates and searches with random parameters, in bfloat16.

Nothing here knows of JAX; each is what its users write, with torch.compile or without.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from experiments.speed import steps_torch
from experiments.speed.steps_worker import Step, Told


def has_gpu() -> bool:
    """Return whether PyTorch sees an NVIDIA GPU."""
    return torch.cuda.is_available()


def device() -> str:
    """Return the device to compute on."""
    return "cuda" if has_gpu() else "cpu"


def translator(told: Told) -> Step:
    """Return an update of nn.Transformer on a batch of full rows."""
    step, _ = steps_torch.load({"threads": 8, "packed": False, "warmup": 100, "device": device(), **told})
    return step


def language_model(told: Told) -> Step:
    """Return an update of Transformers' GPT-2 on a batch of full rows, with AdamW and scaled_dot_product_attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = told["model"]
    sizes = {"n_layer": c["num_layers"], "n_embd": c["d_model"], "n_head": c["num_heads"], "n_inner": c["d_ff"]}
    sizes |= {"vocab_size": c["vocab_size"], "n_positions": c["max_length"]}
    rates = {"resid_pdrop": c["dropout"], "embd_pdrop": c["dropout"], "attn_pdrop": c["attention_dropout"]}
    config = GPT2Config(**sizes, **rates, attn_implementation="sdpa", use_cache=False)
    return update(GPT2LMHeadModel(config), told, {"input_ids": "target_out", "labels": "target_out"})


def text_to_text(told: Told) -> Step:
    """Return an update of Transformers' T5 on a batch of full rows, with AdamW."""
    from transformers import T5Config, T5ForConditionalGeneration

    c = told["model"]
    sizes = {"num_layers": c["num_layers"], "d_model": c["d_model"], "num_heads": c["num_heads"], "d_ff": c["d_ff"]}
    sizes |= {"vocab_size": c["vocab_size"], "d_kv": c["d_k"] or c["d_model"] // c["num_heads"]}
    config = T5Config(**sizes, dropout_rate=c["dropout"], use_cache=False, decoder_start_token_id=0)
    return update(T5ForConditionalGeneration(config), told, {"input_ids": "source", "labels": "target_out"})


def update(model: Any, told: Told, arrays: dict[str, str]) -> Step:
    """Return an update of a model of Transformers with AdamW; `arrays`: its argument → the batch's array."""
    model = model.to(device()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with np.load(told["batch"]) as batch:
        tokens = {name: torch.from_numpy(batch[array]).long().to(device()) for name, array in arrays.items()}
    forward: Any = torch.compile(model) if told["compiled"] else model

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device(), torch.bfloat16):
            loss = forward(**tokens).loss
        loss.backward()
        optimizer.step()
        found = loss.item()
        steps_torch.wait(device())
        return time.perf_counter() - began, found

    return run


STEPS: dict[str, Callable[[Told], Step]] = {
    "transformer_base": translator,
    "gpt2": language_model,
    "t5_base": text_to_text,
}


def searches(c: Told, rows: int, length: int, room: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield (beam, a search for `room` tokens) of a Marian model of the shape of `c`, with random parameters."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes = {"d_model": c["d_model"], "vocab_size": c["vocab_size"], "max_position_embeddings": 512}
    layers = {"encoder_layers": c["num_layers"], "decoder_layers": c["num_decoder_layers"] or c["num_layers"]}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), c["num_heads"])
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), c["d_ff"])
    marks = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    model = MarianMTModel(MarianConfig(**sizes, **layers, **heads, **widths, **marks)).eval()
    model = model.to(device(), torch.bfloat16)
    sources = torch.randint(4, c["vocab_size"], (rows, length), device=device())
    for beam in (1, 4):

        def search(beam: int = beam) -> None:
            limits = {"min_new_tokens": room, "max_new_tokens": room}
            with torch.inference_mode():
                model.generate(sources, num_beams=beam, do_sample=False, **limits)
            steps_torch.wait(device())

        yield beam, search
