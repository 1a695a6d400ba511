"""Searches write the tokens that `generate` of transformers writes: every family that writes, greedily and with beams.

Three configurations of random weights each, 12 inputs of uneven length. `python -m pytest tests/parity/test_generate.py
-s` prints the shares of docs/weights.md.
"""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data.tokenizers import Symbols
from jformer.inference.generation import make_answer, make_setup
from jformer.models import build_model
from jformer.tools.hf import generation_config as generation
from tests.parity.pairs import Pair, V, torch, transformers
from tests.parity.test_hf import MODELS
from tests.slow import slow_but

INPUTS, NEW = 12, 10
FAMILIES = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "MT5ForConditionalGeneration",
            "BartForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel",
            "M2M100ForConditionalGeneration")  # fmt: skip
LANGUAGE = {"MBartForConditionalGeneration": 7, "M2M100ForConditionalGeneration": 7}  # the first token of a text
SEARCHES = {  # as a generation_config.json says it
    "greedy": {"num_beams": 1},
    "4 beams, early_stopping=True": {"num_beams": 4, "early_stopping": True},
    "4 beams, early_stopping='never'": {"num_beams": 4, "early_stopping": "never"},
    "4 beams, early_stopping=False": {"num_beams": 4, "early_stopping": False},
    "3 beams, no bigram twice, 4 tokens or more": {
        "num_beams": 3, "early_stopping": "never", "no_repeat_ngram_size": 2, "min_new_tokens": 4,
    },
    "greedy, a forced end": {"num_beams": 1, "forced_eos_token_id": True},
    "3 beams, a forced end, normalised again": {
        "num_beams": 3, "early_stopping": True, "forced_eos_token_id": True, "renormalize_logits": True,
    },
}  # fmt: skip


class Writers:
    """A model on both sides, and what both are given."""

    def __init__(self, name, i, directory):
        self.pair, rng = Pair(name, MODELS[name][i], directory, seed=i, bias=i == 1), np.random.default_rng(i)
        self.begins = self.pair.model.family == "decoder"  # its inputs are the beginning of what it writes
        ids = self.pair.fields
        self.eos, self.pad = ids["eos_token_id"], ids.get("pad_token_id") or 0
        self.start = 1 if self.begins else ids.get("decoder_start_token_id", self.pad)
        self.language = LANGUAGE.get(name)
        self.inputs = [rng.integers(3, V - 1, length) for length in rng.integers(1, 9, INPUTS)]
        self.pair.theirs.generation_config = transformers.GenerationConfig()  # else its values fill in for None
        self.eos = self.frequent_end()

    def frequent_end(self):
        """Return a token that ends outputs of many lengths: a model of random weights hardly writes its own."""
        found = self.theirs({"num_beams": 1})
        later = {token for tokens in found for token in tokens[1:]} - {self.language}
        return max(sorted(later), key=lambda end: len({len(until(tokens, end)) for tokens in found}), default=self.eos)

    def settings(self, options):
        """Return the generation_config.json of a search, as a published model has it."""
        never, before = {self.pad, self.start} - {self.eos}, int(self.language is not None)
        known = {"length_penalty": 0.8, **options} if options["num_beams"] > 1 else dict(options)
        if "min_new_tokens" in options:
            known["min_new_tokens"] = options["min_new_tokens"] + before
        if "forced_eos_token_id" in options:
            known["forced_eos_token_id"] = self.eos
        return known | {
            "max_new_tokens": NEW + before, "bad_words_ids": [[i] for i in sorted(never)] or None,
            "eos_token_id": self.eos, "forced_bos_token_id": self.language,
        }  # fmt: skip

    def theirs(self, options):
        """Return the tokens of each output that `generate` writes."""
        width = max(map(len, self.inputs))
        rows = torch.full((INPUTS, width), self.pad)
        mask = torch.zeros((INPUTS, width), dtype=torch.long)
        for row, tokens in enumerate(self.inputs):
            place = slice(width - len(tokens), width) if self.begins else slice(len(tokens))
            rows[row, place], mask[row, place] = torch.tensor(tokens), 1
        config = transformers.GenerationConfig(
            **self.settings(options), pad_token_id=self.pad, bos_token_id=self.start, do_sample=False,
            use_cache=False,  # theirs fails where an encoder and its decoder have not as many layers
            decoder_start_token_id=self.start,
        )  # fmt: skip
        with torch.no_grad():
            found = self.pair.theirs.generate(rows, attention_mask=mask, generation_config=config).numpy()
        first = width if self.begins else 1 + int(self.language is not None)
        return [until(row[first:], self.eos) for row in found]

    def ours(self, options):
        """Return the tokens of each output of our search, with the options that import makes of the settings."""
        before = () if self.language is None else (self.language,)
        symbols = Symbols(self.pad, self.start, self.eos, unk=-1, before=before)
        options, notes = generation.read({}, self.settings(options), symbols, list(map(str, range(V))))
        assert not notes
        allowed = np.ones(self.pair.fields["vocab_size"], bool)
        allowed[[i for i in {self.pad, self.start} - {self.eos} if i < len(allowed)]] = False
        inputs = self.inputs if self.begins else [np.array([self.start, *before])] * INPUTS
        batch = {
            **padded("prompt", inputs),
            **({} if self.begins else self.source()),
            "limit": jnp.full(INPUTS, NEW),
            "line": jnp.arange(INPUTS),
        }
        answer = make_answer(make_setup([build_model(self.pair.model)], options, allowed, symbols), "text")
        found = answer([self.pair.params], batch, NEW)
        return [until(tokens[0], self.eos) for tokens in np.asarray(found.tokens).reshape(INPUTS, -1, NEW)]

    def score(self, row, tokens):
        """Return the score of an output in theirs: its log-probability over its length to the power of 0.8."""
        written = [*tokens, self.eos][:NEW]
        source = torch.tensor(self.inputs[row])[None]
        before = (
            [*self.inputs[row]] if self.begins else [self.start, *([] if self.language is None else [self.language])]
        )
        ids = torch.tensor([[*before, *written[:-1]]])
        given = {"input_ids": ids} if self.begins else {"input_ids": source, "decoder_input_ids": ids}
        with torch.no_grad():
            logits = self.pair.theirs(**given).logits[0, -len(written) :].double()
        total = torch.log_softmax(logits, -1)[range(len(written)), written].sum().item()
        return total / (len(written) + int(self.language is not None)) ** 0.8

    def source(self):
        found = padded("source", self.inputs)
        real = np.arange(found["source"].shape[1]) < np.asarray(found.pop("source_length"))[:, None]
        positions = np.broadcast_to(np.arange(real.shape[1], dtype=np.int32), real.shape)
        return {**found, "source_segments": real.astype(np.int32), "source_positions": positions}


def padded(name, rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return {name: jnp.asarray(ids), f"{name}_length": jnp.asarray([*map(len, rows)])}


def until(tokens, eos):
    """Return what stands before the end symbol."""
    tokens = [*map(int, tokens)]
    return tokens[: tokens.index(eos)] if eos in tokens else tokens


@functools.cache
def writers(name, i, directory):
    return Writers(name, i, Path(directory))


@pytest.mark.parametrize("search", slow_but(SEARCHES, "greedy"))
@pytest.mark.parametrize("name", slow_but(FAMILIES, "MarianMTModel"))
def test_tokens_are_theirs(name, search, tmp_path_factory):
    """With early_stopping=False theirs stops by an estimate: there ours may write others, of a higher score."""
    better, lengths = [], set()
    settings = SEARCHES[search]
    for i in range(3):
        both = writers(name, i, str(tmp_path_factory.getbasetemp() / f"writes-{name}-{i}"))
        expected = both.theirs(settings)
        for row, (theirs, ours) in enumerate(zip(expected, both.ours(settings), strict=True)):
            if theirs != ours:
                assert settings.get("early_stopping") is False, (i, row, theirs, ours)
                better.append(both.score(row, ours) - both.score(row, theirs))
        lengths |= {*map(len, expected)}
    print(f"\n{name}, {search}: {3 * INPUTS - len(better)} of {3 * INPUTS} alike, lengths {sorted(lengths)}")
    assert len(lengths) > 1
    assert len(better) <= 3
    assert all(gain > 0 for gain in better), better
