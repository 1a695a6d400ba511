"""The side of PyTorch in steps.py: nn.Transformer written plainly, in float32 or under autocast.

On a GPU rows must be full: then no mask keeps PyTorch from its flash attention.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.speed.steps_worker import Step, Told

Arrays = dict[str, Any]  # of tensors, and what nn.Transformer takes beside them


class Translator(nn.Module):
    """nn.Transformer of 2017, post-norm without norms at the end, on one tied table and sinusoidal positions."""

    def __init__(self, c: dict[str, Any], length: int) -> None:
        super().__init__()
        d, layers = c["d_model"], (c["num_layers"], c["num_layers"])
        self.embedding = nn.Embedding(c["vocab_size"], d)
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("sinusoids", torch.cat([angles.sin(), angles.cos()], -1))
        self.dropout = nn.Dropout(c["dropout"])
        self.core = nn.Transformer(d, c["num_heads"], *layers, c["d_ff"], c["dropout"], batch_first=True)
        self.core.encoder.norm = self.core.decoder.norm = None
        for module in self.core.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = c["attention_dropout"]
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = c["activation_dropout"]

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what a stack reads."""
        return self.dropout(self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.sinusoids[positions])

    def forward(self, batch: Arrays, masks: Arrays) -> torch.Tensor:
        """Return the logits of every target position."""
        source = self.embed(batch["source"], batch["source_positions"])
        target = self.embed(batch["target_in"], batch["target_positions"])
        return self.core(source, target, **masks) @ self.embedding.weight.T


def load(told: Told) -> tuple[Step, Told]:
    """Build the step for one batch; torch.compile works at the first one."""
    torch.set_num_threads(told["threads"])
    torch.manual_seed(0)
    c, device = told["model"], torch.device(told.get("device", "cpu"))
    with np.load(told["batch"]) as arrays:
        batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    make = make_full_masks if device.type == "cuda" else make_masks
    masks = make_packed_masks(batch, c["num_heads"]) if told["packed"] else make(batch)
    wanted = batch["target_out"].long().flatten()
    model = Translator(c, max(batch[side].shape[1] for side in ("source", "target_in"))).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
    slope = c["d_model"] ** -0.5 * told["warmup"] ** -1.5
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: slope * (step + 1))
    forward: Any = torch.compile(model) if told["compiled"] else model

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=c["dtype"] == "bfloat16"):
            logits = forward(batch, masks).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, wanted, ignore_index=0, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        schedule.step()
        wait(device.type)
        return time.perf_counter() - began, loss.item()

    return run, {"parameters": sum(p.numel() for p in model.parameters()), "versions": {"torch": torch.__version__}}


def wait(device: str) -> None:
    """Wait until a device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def make_masks(batch: Arrays) -> Arrays:
    """Return the mask of padding and later tokens; True hides."""
    source, target = batch["source_segments"] == 0, batch["target_segments"] == 0
    later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    padding = {"src_key_padding_mask": source, "tgt_key_padding_mask": target, "memory_key_padding_mask": source}
    return padding | {"tgt_mask": later}


def make_full_masks(batch: Arrays) -> Arrays:
    """Return the mask of later tokens, for rows without padding; with the flag PyTorch's kernels need no mask."""
    target = batch["target_out"]
    assert (target > 0).all(), "a GPU times full rows only"
    size = target.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=target.device).triu(1)
    return {"tgt_mask": later, "tgt_is_causal": True}


def make_packed_masks(batch: Arrays, heads: int) -> Arrays:
    """Return the mask of other sentences and later tokens; True hides."""
    source, target = batch["source_segments"], batch["target_segments"]
    later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)

    def others(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # Padding attends everywhere: queries without a key become NaN.
        return (query[:, :, None] != key[:, None, :]) & (query[:, :, None] > 0)

    masks = {"src_mask": others(source, source), "tgt_mask": others(target, target) | later}
    masks |= {"memory_mask": others(target, source)}
    return {name: mask.repeat_interleave(heads, 0) for name, mask in masks.items()}
