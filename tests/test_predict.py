"""Every line in gives one line out, in order, whatever its neighbours, its length or the batch it falls into."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jformer.config import resolve
from jformer.data.tokenizers import BOS, EOS, PAD, learn
from jformer.decoding.config import DecodeConfig
from jformer.errors import UserError
from jformer.generation import generate, make_answer
from jformer.predict import Predictor, average_steps, build_task, predict_file

TEXTS = ["abc", "", "hgfedcba hgfedcba", "b", "  ", "cab", "xyz unknown", "abcdefgh", "ha"]


@pytest.fixture(scope="module")
def predictor(tiny):
    """Return a function: decode options → Predictor of an untrained model that does write something."""
    tokenizer = learn("char", ["abcdefgh "], 99, "identity", False)
    # Rows past the vocabulary must never be written; tied logits of an untrained model would just repeat its input.
    model, params = tiny(vocab_size=tokenizer.vocab_size + 6, tied_output=False)

    @functools.cache
    def build(batch_size=4, beam_size=1, max_source_length=64):
        config = resolve({"data": {"max_source_length": max_source_length}})
        decoding = DecodeConfig(beam_size=beam_size, batch_size=batch_size, max_extra_length=6)
        config = dataclasses.replace(config, decode=decoding)
        return Predictor(config, build_task(config), (tokenizer, tokenizer), model, params)

    return build


def test_empty_lines_stay_empty_and_order_is_kept(predictor):
    together = predictor().predict(TEXTS)
    assert len(together) == len(TEXTS)
    assert together[1] == together[4] == ""
    assert together[0]
    assert predictor().predict(TEXTS[::-1]) == together[::-1]
    assert predictor().predict([]) == []


@pytest.mark.parametrize("beam_size", [1, 3])
def test_output_does_not_depend_on_the_batch(predictor, beam_size):
    together = predictor(beam_size=beam_size).predict(TEXTS)
    alone = [predictor(beam_size=beam_size, batch_size=1).predict([text])[0] for text in TEXTS]
    assert together == alone


def test_overlong_source_is_cut_and_counted(predictor):
    short = predictor(max_source_length=4)
    assert short.predict(["abcdefgh", "abc"]) == predictor(max_source_length=64).predict(["abc", "abc"])
    assert short.cut == 1


def test_output_is_no_longer_than_the_source_and_the_extra(predictor):
    tokenizer = predictor().tokenizers[1]
    for text, output in zip(TEXTS, predictor().predict(TEXTS), strict=True):
        assert len(tokenizer.encode([output])[0]) <= len(text) + 1 + 6


def test_decoded_tokens_are_words_of_the_vocabulary(predictor):
    p = predictor(batch_size=3)
    size = p.tokenizers[1].vocab_size
    batch, room = p.arrays([[5, 6, 7, EOS], [8, EOS]])
    tokens = np.asarray(make_answer(p.model, "text", p.config.decode, size)(p.params, batch, room))
    assert tokens.max() < size
    assert not (tokens == BOS).any()
    assert (tokens[2] == PAD).all()


def full_pass_log_prob(p, source, tokens):
    """Return the log-probability of output tokens by one uncached pass, over what may be written."""
    ones = np.ones((1, len(tokens)), np.int32)
    batch = p.arrays([source])[0] | {"target_segments": ones, "target_positions": np.cumsum(ones, axis=1) - 1}
    batch["target_in"] = np.array([[BOS, *tokens[:-1]]], np.int32)
    logits = np.asarray(jax.jit(p.model.apply)({"params": p.params}, batch))[0].astype(float)
    logits[:, p.tokenizers[1].vocab_size :] = logits[:, [PAD, BOS]] = -np.inf
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return log_probs[np.arange(len(tokens)), tokens].sum()


@pytest.mark.parametrize("beam_size", [1, 4])
def test_scores_of_cached_search_are_those_of_one_uncached_pass(predictor, beam_size):
    p = predictor(batch_size=2)
    sources = [[5, 6, 7, EOS], [8, 5, EOS]]
    options = DecodeConfig(beam_size=beam_size, length_penalty=0.0, max_extra_length=4)
    run = jax.jit(functools.partial(generate, p.model, options, p.tokenizers[1].vocab_size), static_argnums=2)
    found = jax.device_get(run(p.params, *p.arrays(sources)))
    for i, source in enumerate(sources):
        for n in range(beam_size):
            output = found.tokens[i, n, : found.lengths[i, n]].tolist()
            assert abs(full_pass_log_prob(predictor(batch_size=1), source, output) - found.scores[i, n]) < 1e-4


def test_file_gives_as_many_lines_as_it_has(predictor, tmp_path, monkeypatch):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"abc\n\n\xe2\x80\xa8ha\r\nb")
    monkeypatch.setattr("jformer.predict.load", lambda workdir, settings: predictor())
    predict_file(predictor().config, tmp_path, str(source), str(target))
    assert target.read_text().count("\n") == 4
    source.write_bytes(b"abc\n\xff\n")
    with pytest.raises(UserError, match=r"in\.txt:2: invalid UTF-8"):
        predict_file(predictor().config, tmp_path, str(source), str(target))


def test_averaged_steps_are_the_last_regular_ones():
    assert average_steps([10, 20, 25, 30], 10, 3) == [10, 20, 30]
    assert average_steps([10, 20, 27], 10, 2) == [20, 27]
    with pytest.raises(UserError, match="average_last=4"):
        average_steps([10, 20, 25, 30], 10, 4)
