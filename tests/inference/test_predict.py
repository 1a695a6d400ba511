"""Every input gives its outputs, in order, whatever its neighbours, its length or the batch it falls into."""

import copy
import dataclasses
import functools
import itertools
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jformer import plugins
from jformer.checkpoints.checkpoint import Checkpoints
from jformer.checkpoints.weights import average_steps
from jformer.config import load_config, resolve, save_config
from jformer.config.options import Config
from jformer.data.tokenizers import BOS, EOS, PAD, LabelTokenizer, learn
from jformer.data.tokenizers.numbers import NumberTokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.mbr import chrf, rank
from jformer.errors import UserError
from jformer.inference.answers import CUT, TRUNCATED, Output, Piece, Request
from jformer.inference.batching import NBest
from jformer.inference.inputs import Attempt
from jformer.inference.one_pass import HEADS
from jformer.inference.predict import Predictor, load
from jformer.inference.ranking import by_utility
from jformer.inference.restore import Trained, embedding_run, member_config
from jformer.models import ModelConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.mesh import make_mesh
from jformer.tasks.task import SPAN
from tests.inference import untrained
from tests.inference.untrained import CHARS, MODEL, ROWS
from tests.slow import slow_but

TEXTS = ["abc", "", "hgfedcba hgfe", "b", "  ", "cab", "xyz unknown", "abcdefgh", "ha"]


def ask(predictor, texts, **more):
    return predictor.generate([Request(text, line=line, **more) for line, text in enumerate(texts)])


@pytest.mark.slow
def test_empty_lines_stay_empty_and_order_is_kept(predictor):
    texts = [*TEXTS, "hgfedcba hgfedcba"]  # the last one is of another shape
    together = predictor().predict(texts)
    assert len(together) == len(texts)
    assert together[1] == together[4] == ""
    assert together[0]
    assert predictor().predict(texts[::-1]) == together[::-1]
    assert predictor().predict([]) == []


@pytest.mark.parametrize("beam_size", slow_but([1, 3], 1))
def test_output_does_not_depend_on_the_batch(predictor, beam_size):
    together = predictor(beam_size=beam_size).predict(TEXTS * 2)
    alone = [predictor(beam_size=beam_size, batch_size=1).predict([text])[0] for text in TEXTS]
    assert together == alone * 2


@pytest.mark.slow
def test_a_padding_symbol_past_the_vocabulary_changes_no_output(tiny):
    model, params = tiny(family="decoder", vocab_size=ROWS, **MODEL)
    options = {"beam_size": 3, "max_extra_length": 6, "repetition_penalty": 1.2, "forbid": ("<pad>",)}
    asked = [Request("abc", constraints=("ef", "h")), Request("a"), Request("")]
    both = [(tokenizer, tokenizer) for tokenizer in (CHARS, CHARS.with_symbols(pad=ROWS))]
    inside, past = (untrained.predictor(model, params, "lm", each, **options).generate(asked) for each in both)
    assert inside == past


@pytest.mark.slow
def test_outputs_that_are_long_for_their_inputs_are_asked_for_again(predictor, monkeypatch):
    hurried, patient = (predictor(batch_size=size, max_extra_length=40) for size in (9, 4))
    attempts = []
    arrays = hurried.inputs.arrays
    monkeypatch.setattr(hurried.inputs, "arrays", lambda *args: attempts.append(args[-1]) or arrays(*args))
    assert hurried.predict(TEXTS * 2) == patient.predict(TEXTS * 2)
    assert attempts[0] == Attempt(short=True)
    assert attempts[-1] == Attempt(min_length=64)
    assert any(len(outputs[0].ids) > 24 for outputs in ask(patient, TEXTS))
    hurried.predict(TEXTS * 10)  # so many that it is judged by them: most outputs were long
    attempts.clear()
    hurried.predict(TEXTS * 2)
    assert attempts[0] == Attempt(short=False)


@pytest.mark.slow
def test_overlong_source_is_cut_or_answered_in_pieces(predictor):
    whole, cut = predictor(), predictor(max_source_length=4)
    assert cut.predict(["abcdefgh", "abc"]) == whole.predict(["abc", "abc"])
    assert cut.counts[CUT] == 1
    split = predictor(max_source_length=4, overlong="split", beam_size=2, alignments=True, outputs="tsv")
    (joined,), (alone,) = ask(split, ["abcdefgh", "ab"])
    pieces = [outputs[0] for outputs in ask(split, ["abc", "def", "gh"])]
    assert joined.text == " ".join(piece.text for piece in pieces)
    assert abs(joined.score - sum(piece.score for piece in pieces)) < 1e-4
    tokens = [[i for i in piece.ids if i != EOS] for piece in pieces]
    assert [i for i in joined.ids if i != EOS] == [*itertools.chain(*tokens)]
    shifts = [(0, 0), (3, len(tokens[0])), (6, len(tokens[0]) + len(tokens[1]))]
    links = [[(s + x, t + y) for s, t in piece.alignment.pairs] for piece, (x, y) in zip(pieces, shifts, strict=True)]
    assert list(joined.alignment.pairs) == [*itertools.chain(*links)]
    assert joined.alignment.source == tuple("abcdefgh")
    assert joined.alignment.target == tuple(CHARS.tokens[i] for i in joined.ids if i != EOS)
    assert alone.alignment.pairs


def test_an_alignment_counts_the_tokens_that_it_shows_where_symbols_follow_the_end(tiny, monkeypatch):
    model, params = tiny(vocab_size=ROWS, **MODEL)
    (code,), *_ = CHARS.encode(["h"])
    sides = CHARS.with_symbols(after=(code,)), CHARS
    p = untrained.predictor(model, params, tokenizers=sides, alignments=True, outputs="jsonl", max_extra_length=4)
    ends = lambda params, pairs, attend: [{"attention": np.eye(5)[[4] * len(pair.target)]} for pair in pairs]  # noqa: E731
    monkeypatch.setattr(p, "_forced", ends)
    ((output,),) = p.generate(["abc"])
    assert output.alignment.source == ("a", "b", "c", "h")
    assert output.alignment.pairs == tuple((3, t) for t in range(len(output.alignment.target)))
    assert output.alignment.pairs


def test_vectors_have_all_interventions_and_their_inputs_are_counted(tiny):
    model, params = tiny(vocab_size=ROWS, **MODEL)
    p = untrained.predictor(model, params, data={"max_source_length": 4})
    last = {"encoder/output": lambda x, _: x + 1.0}
    changed = p.intervene({"encoder/block/output": lambda x, _: 0 * x}).intervene(last).intervene(last)
    together = p.intervene({"encoder/block/output": lambda x, _: 0 * x, "encoder/output": lambda x, _: x + 2.0})
    told = []
    changed.on_answered = told.append
    np.testing.assert_allclose(changed.embed(["abcdefgh", "b"]), together.embed(["abcdefgh", "b"]), atol=1e-6)
    assert changed.counts[CUT] == together.counts[CUT] == 1
    assert sum(told) == 2
    changed.forget()
    assert not changed.counts
    assert not changed.embedder.counts
    beyond = {"decoder/block/cross_attn/heads": lambda x, _: 0 * x, "logits": lambda x, _: 0 * x}
    np.testing.assert_array_equal(changed.intervene(beyond).embed(["b"]), changed.embed(["b"]))


def test_vectors_are_of_the_parameters_that_have_replaced_the_first_ones(tiny):
    model, params = tiny(vocab_size=ROWS, **MODEL)
    others = jax.tree.map(lambda leaf: -leaf, params)
    replaced = untrained.predictor(model, params)
    before = replaced.embed(["abc"])
    replaced.params = others
    after = replaced.embed(["abc"])
    np.testing.assert_array_equal(after, untrained.predictor(model, others).embed(["abc"]))
    assert not np.allclose(after, before)


def test_output_is_no_longer_than_the_source_and_the_extra(predictor):
    p = predictor()
    before = p.counts[TRUNCATED]
    outputs = [outputs[0] for outputs in ask(p, TEXTS)]
    for text, output in zip(TEXTS, outputs, strict=True):
        assert len(output.ids) <= len(text) + 1 + 6
    assert p.counts[TRUNCATED] - before == sum(len(one.ids) > 0 and one.ids[-1] != EOS for one in outputs) > 0


@pytest.mark.slow
def test_the_n_best_have_the_scores_of_the_forced_pass_and_are_words_of_the_vocabulary(predictor):
    p = predictor(beam_size=3, n_best=3, length_penalty=0.0, forbid=("<unk>",))
    for text, outputs in zip(TEXTS, ask(p, TEXTS), strict=True):
        if not text.strip():
            assert outputs == [Output("")]
            continue
        assert len({output.ids for output in outputs}) == 3
        assert outputs == sorted(outputs, key=lambda one: (one.ids[-1] != EOS, -one.score))  # cut ones come last
        for output, scored in zip(outputs, p.score([(text, output.text) for output in outputs]), strict=True):
            assert abs(sum(scored.token_log_probs[: len(output.ids)]) - output.score) < 1e-3
            assert scored.log_prob == sum(scored.token_log_probs)
            assert scored.tokens == (*output.text, "</s>")
            assert not {PAD, BOS} & set(output.ids)
            assert max(output.ids) < CHARS.vocab_size


@pytest.mark.slow
def test_a_prefix_begins_the_output(predictor):
    p = predictor()
    for outputs in ask(p, ["abc", "b"], prefix="hag"):
        assert outputs[0].text.startswith("hag")
    mixed = p.generate([Request("abc"), Request("b", "hag"), Request("cab")])
    assert [mixed[0][0].text, mixed[2][0].text] == p.predict(["abc", "cab"])


@pytest.mark.slow
def test_samples_depend_on_their_line_alone(predictor):
    p = predictor(search="sample", samples=3)
    together = ask(p, TEXTS)
    assert [len(outputs) for outputs in together] == [3 if text.strip() else 1 for text in TEXTS]
    assert len({output.ids for output in together[0]}) > 1
    (alone,) = p.generate([Request(TEXTS[7], line=7)])
    assert [output.ids for output in alone] == [output.ids for output in together[7]]
    (elsewhere,) = p.generate([Request(TEXTS[7], line=8)])
    assert [output.ids for output in elsewhere] != [output.ids for output in together[7]]


@pytest.mark.slow
def test_minimum_bayes_risk_ranks_the_samples(predictor):
    samples = ask(predictor(search="sample", samples=6), TEXTS[:3])
    for drawn, ranked in zip(samples, ask(predictor(search="mbr", samples=6, n_best=2), TEXTS[:3]), strict=True):
        texts = [output.text for output in drawn]
        order, utilities = rank(texts, chrf([*dict.fromkeys(texts)]))
        assert [output.text for output in ranked] == [drawn[i].text for i in order[:2]]
        assert [output.utility for output in ranked] == utilities[:2] or not drawn[0].ids


# The share of characters of the answer that the reference, or else the source, has at the same place.
AGREEMENT = """
import json, sys
for line in sys.stdin:
    record = json.loads(line)
    answer, other = record["answer"], (record["references"] or [record["source"]])[0]
    print(sum(map(str.__eq__, answer, other)) / max(len(answer), 1))
"""


@pytest.fixture(scope="module")
def agreement(tmp_path_factory):
    """Return the config of evaluation and of the cache with a command of that name."""
    folder = tmp_path_factory.mktemp("agreement")
    (folder / "agreement.py").write_text(AGREEMENT)
    plugins.allow(command := f"{sys.executable} -S {folder}/agreement.py")
    return {"evaluate": {"command": command}, "data": {"cache_dir": str(folder)}}


def agree(answer, other):
    return sum(map(str.__eq__, answer, other)) / max(len(answer), 1)


def test_a_command_is_the_utility_of_minimum_bayes_risk(tiny, agreement):
    model, params = tiny(vocab_size=ROWS, **MODEL)
    build = functools.partial(untrained.predictor, model, params, samples=5, batch_size=2, max_extra_length=4)
    samples = ask(build(search="sample"), TEXTS[:4])
    ranked = ask(build(search="mbr", n_best=5, mbr_utility="agreement", **agreement), TEXTS[:4])
    for drawn, outputs in zip(samples, ranked, strict=True):
        texts = [output.text for output in drawn]
        expected = {text: np.mean([agree(text, other) for other in texts]) for text in texts if drawn[0].ids}
        assert {output.text: output.utility for output in outputs if output.ids} == pytest.approx(expected)
        utilities = [output.utility for output in outputs if output.ids]
        assert utilities == sorted(utilities, reverse=True)


@pytest.mark.parametrize(("language", "best"), [("de", "我们去。"), ("zh", "他来了。")])
def test_bleu_cuts_samples_into_words_as_the_language_of_their_line(language, best):
    texts = ["我们去。", "他来了", "他来了。"]
    config = Config(decode=DecodeConfig(search="mbr", samples=3, mbr_utility="bleu"))
    piece = Piece([], 0, languages=("en", language))
    (ranked,) = by_utility(config, [piece], [[*map(Output, texts)]], [texts])
    assert ranked[0].text == best


@pytest.mark.parametrize("options", [{"beam_size": 4}, {"search": "sample", "samples": 4}], ids=["beam", "sample"])
def test_a_command_reranks_all_candidates_without_references(tiny, agreement, options):
    model, params = tiny(vocab_size=ROWS, **MODEL)
    build = functools.partial(untrained.predictor, model, params, batch_size=2, max_extra_length=4, **options)
    every = ask(build(n_best=4) if "beam_size" in options else build(), TEXTS[:4])
    best = ask(build(n_best=2, rerank="agreement", **agreement), TEXTS[:4])
    for source, candidates, outputs in zip(TEXTS, every, best, strict=False):
        scores = sorted((agree(output.text, source) for output in candidates if output.ids), reverse=True)
        assert [output.utility for output in outputs if output.ids] == scores[:2]
        assert all(output.utility == agree(output.text, source) for output in outputs if output.ids)
        assert {output.text for output in outputs} <= {output.text for output in candidates}


def test_samples_that_are_all_empty_are_an_empty_answer(predictor, monkeypatch):
    p = predictor(search="mbr", samples=2)
    monkeypatch.setattr(p, "_search", lambda params, pieces, on_answered: iter([{0: NBest([(), ()], [0.0, 0.0])}]))
    assert p.predict(["abc"]) == [""]


def test_two_of_the_same_answer_as_one(predictor):
    assert predictor(copies=1).predict(TEXTS) == predictor().predict(TEXTS)


def test_broken_weights_are_one_clear_error(predictor):
    p = predictor()
    nan = jax.tree.map(lambda x: x * np.nan, p.params)
    broken = Predictor(Trained(config=p.config, task=p.task, tokenizers=p.tokenizers, model=p.model, params=nan))
    for call in (lambda: broken.predict(["abc"]), lambda: broken.score([("abc", "a")])):
        with pytest.raises(UserError, match="scores are NaN, so its weights are broken: try another evaluate"):
            call()


def test_a_target_over_the_limits_is_cut_and_splitting_it_refused(predictor):
    p = predictor(max_source_length=4)
    before = p.counts[CUT]
    (whole,) = predictor().score([("abc", "ab")])
    assert abs(p.score([("abcdefgh", "ab")])[0].log_prob - whole.log_prob) < 1e-4
    assert p.counts[CUT] == before + 1
    assert [scored.cut for scored in p.score([("abcdefgh", "ab"), ("abc", "ab")])] == [True, False]
    (cut,) = predictor().score([("abc", "a" * 999)])
    assert cut.cut
    with pytest.raises(UserError, match=r"decode\.overlong='split' cannot score"):
        predictor(overlong="split").score([("abc", "ab")])


REFUSED = {
    "one text": (lambda p: p.predict("abc"), r"'abc' is one text, not a list of texts: predict\(\['a text'"),
    "no list": (lambda p: p.predict(None), r"None is not a list of texts: predict\(\['a text'"),
    "a number": (lambda p: p.predict(5), "5 is not a list of texts"),
    "a number to generate": (lambda p: p.generate(5), "5 is not a list of texts: generate"),
    "a number of pairs": (lambda p: p.score(5), "5 is not a list of pairs: score"),
    "constraints that are a number": (lambda p: p.generate([Request("abc", constraints=5)]), "=5 is not a list of tex"),
    "None": (lambda p: p.predict(["abc", None]), "text 2 of 2 is None, not a text"),
    "bytes": (lambda p: p.predict([b"abc"]), "text 1 of 1 is b'abc', not a text"),
    "a line break": (
        lambda p: p.predict(["abc", "a", "a\nb"]),
        "text 3 of 3 has a line break, which training texts never have: pass",
    ),
    "one text to generate": (
        lambda p: p.generate("abc"),
        r"'abc' is one text, not a list of texts: generate\(\['a text'",
    ),
    "no request": (lambda p: p.generate([Request("abc"), 3]), "text 2 of 2 is 3, not a text: generate"),
    "constraints that are one text": (
        lambda p: p.generate([Request("abc", constraints="bad")]),
        "constraints='bad' is one text, not a list of texts",
    ),
    "a prefix that is none": (lambda p: p.generate([Request("abc", prefix=None)]), "text 1 of 1 is None, not a text"),
    "one pair": (lambda p: p.score(("ab", "cd")), "'ab' is not a pair of source and target"),
    "a number in place of a pair": (lambda p: p.score([5]), "5 is not a pair of source and target"),
    "half a pair": (lambda p: p.score([("ab",)]), r"\('ab',\) is not a pair of source and target"),
    "a pair with None": (lambda p: p.score([("ab", None)]), "text 2 of 2 is None, not a text"),
    "lone surrogate": (
        lambda p: p.predict(["abc", "a\ud800b"]),
        "text 2 of 2: lone surrogate at offset 1; remo",
    ),
    "a NUL": (lambda p: p.predict(["ab\0"]), "text 1 of 1: NUL character at offset 2; remove it"),
    "a NUL in a pair": (lambda p: p.score(iter([("ab", "c\0")])), "text 2 of 2: NUL character at offset 1; remove it"),
    "one text to score": (lambda p: p.score("ab"), "'a' is not a pair of source and target"),
    "a pair with a line break": (lambda p: p.score([("ab", "c\nd")]), "text 2 of 2 has a line break"),
}


def test_what_an_iterator_gives_is_answered_as_a_list_is(predictor):
    p, pairs = predictor(), [("abc", "cab"), ("h", "gf")]
    assert p.predict(iter(TEXTS)) == p.predict(TEXTS)
    assert p.generate(iter(TEXTS)) == p.generate(TEXTS)
    sources, targets = zip(*pairs, strict=True)
    assert p.score(zip(sources, targets, strict=True)) == p.score(pairs)
    (of_zip, _), (of_list, _) = p.attend(zip(sources, targets, strict=True)), p.attend(pairs)
    assert of_zip.target == of_list.target
    np.testing.assert_array_equal(of_zip.cross.weights, of_list.cross.weights)


def test_every_answer_and_score_is_told_as_it_is_done(predictor):
    p, told = predictor(), []
    p.on_answered = told.append
    p.predict(["ab", "", *["abc"] * 9])
    answered = sum(told)
    p.score([("ab", "c")] * 5)
    assert (answered, sum(told)) == (10, 15)
    assert len(told) > 3


def test_other_parameters_or_another_vocabulary_have_another_fingerprint(predictor):
    one, again = predictor(), predictor(beam_size=2)
    assert one.fingerprint() == again.fingerprint()
    alone = one.fingerprint()
    params, one.params = one.params, jax.tree.map(lambda x: x.at[..., 0].add(1e-6), one.params)
    assert one.fingerprint() != alone
    one.params, vocabularies = params, one.tokenizers
    one.tokenizers = (vocabularies[0], learn("char", ["abcdefg "], 99, "identity", False))
    assert one.fingerprint() != alone
    one.tokenizers = vocabularies
    assert predictor(copies=1).fingerprint() != alone


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_list_of_texts_is_refused_and_told_how(predictor, case):
    call, said = REFUSED[case]
    with pytest.raises(UserError, match=said):
        call(predictor())


def test_attention_has_a_row_for_every_target_token(predictor):
    p = predictor(beam_size=2, alignments=True, outputs="tsv")
    output = ask(p, ["hgfa"])[0][0]
    cross = p.attend([("hgfa", output.text)])[0].cross
    assert cross.columns == (*"hgfa", "</s>")
    assert cross.rows == (*output.text, "</s>")
    weights = cross.weights[-1].mean(axis=0)
    assert weights.shape == (len(cross.rows), 5)
    likeliest = [(int(s), t) for t, s in enumerate(weights[: len(output.alignment.target)].argmax(axis=1))]
    assert output.alignment.pairs == tuple((s, t) for s, t in likeliest if s < 4)


def test_a_predictor_says_what_it_is(predictor):
    assert repr(predictor(beam_size=3)).startswith("<Predictor: translate with encdec of ")
    assert repr(predictor(beam_size=3)).endswith("parameters, steps=[], search='beam', beam_size=3>")


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Return a function: name, text to learn characters from, config → the workdir of an untrained run."""
    root = tmp_path_factory.mktemp("runs")

    def save(name, text="abcdefgh ", **config):
        workdir = root / name
        (workdir / "tokenizer").mkdir(parents=True)
        learn("char", [text], 99, "identity", False).save(workdir / "tokenizer", "shared")
        settings = resolve({"model": {**MODEL, "vocab_size": ROWS}, **config})
        save_config(settings, workdir / "config.json")
        checkpoints = Checkpoints(workdir / "checkpoints")
        _, params = tiny(vocab_size=ROWS, **MODEL)
        checkpoints.save(1, {"params": params, "ema": jax.tree.map(jax.numpy.zeros_like, params)}, {}, None)
        checkpoints.close()
        return workdir

    return save


def test_an_ensemble_of_an_own_task_that_answers_in_one_pass_is_refused(monkeypatch):
    config = resolve({"decode": {"ensemble": ("other",)}})
    own = SimpleNamespace(config=config, task=SimpleNamespace(answer=next(iter(HEADS))))
    monkeypatch.setattr("jformer.inference.restore.restore_to_answer", lambda *_: own)
    with pytest.raises(UserError, match=r"decode\.ensemble is read by searches, but task=.* answers in one pass"):
        load("run", mesh=make_mesh(1))


def test_runs_of_several_languages_form_an_ensemble_if_their_symbols_stand_at_one_side(runs):
    def directions(at, *targets):
        first, *others = ({"source_language": "en", "target_language": each} for each in targets)
        return {"data": {**first, "language_symbols": at, "mixture": [{**other, "train": "x"} for other in others]}}

    run, finer = runs("both", **directions("target", "de", "fr")), runs("finer", **directions("target", "fr"))
    config, tokenizers = load_config(run / "config.json"), load_tokenizers(run / "tokenizer")
    assert member_config(finer, config, tokenizers).data.target_language == "fr"
    with pytest.raises(UserError, match=r"has data\.language_symbols='source', this run 'target'; leave it out"):
        member_config(runs("opposite", **directions("source", "de")), config, tokenizers)


@pytest.mark.slow
def test_an_ensemble_is_loaded_with_its_own_weights_or_refused(runs):
    ours = runs("ours")
    settings = load_config(ours / "config.json")

    def ensemble(*workdirs, **options):
        decode = DecodeConfig(ensemble=tuple(map(str, workdirs)), **options)
        return load(ours, dataclasses.replace(settings, decode=decode))

    other = runs("other", evaluate={"weights": "ema"}, train={"ema_decay": 0.9}, seed=3)
    found = ensemble(other, dtype="bfloat16")
    assert [each.config.dtype for each in (found.model, found.members[0].model)] == ["bfloat16"] * 2
    assert not any(leaf.any() for leaf in jax.tree.leaves(found.members[0].params))
    assert load(ours).model.config.dtype == "float32"
    with pytest.raises(UserError, match=r"decode\.ensemble: .*wider has another source vocabulary than this run"):
        ensemble(runs("wider", "abcdefghi "))
    with pytest.raises(UserError, match=r"decode\.ensemble: .*french was trained on en to fr, this run on en to de"):
        ensemble(runs("french", data={"source_language": "en", "target_language": "fr"}))
    with pytest.raises(UserError, match=r"decode\.ensemble: .*noise has task='denoise', this run 'translate'"):
        ensemble(runs("noise", task="denoise"))
    short = {"positions": "learned", "max_length": 200, "vocab_size": ROWS}
    with pytest.raises(UserError, match=r"decode\.ensemble: .*short: model\.max_length=200 is below the 256 tokens"):
        ensemble(runs("short", model=short, data={"max_source_length": 200, "max_target_length": 200}))
    deaf = {"recurrent": {"cell": "gru", "attention": "none"}, "vocab_size": ROWS}
    with pytest.raises(UserError, match=r"decode\.ensemble: .*deaf: decode\.alignments=True needs model\.recurrent"):
        ensemble(runs("deaf", model=deaf), alignments=True, outputs="jsonl")


def test_pieces_are_joined_as_the_target_language_is_written(predictor):
    run = copy.copy(predictor())
    answers = [[Output("我们去", (5, EOS))], [Output("Rom。", (6, EOS))], [Output("好", (7, EOS))]]
    for language, text in (("de", "我们去 Rom。好"), ("zh-TW", "我们去Rom。好")):
        data = dataclasses.replace(run.config.data, target_language=language)
        run.config = dataclasses.replace(run.config, data=data)
        assert run._join(answers, [])[0].text == text
        asked = dataclasses.replace(run.config.decode, target_language="de")
        run.config = dataclasses.replace(run.config, decode=asked)
        assert run._join(answers, [])[0].text == run._join(answers, [Piece([5], 0)])[0].text == "我们去 Rom。好"
        assert run._join(answers, [Piece([5], 0, languages=("", "zh"))])[0].text == "我们去Rom。好"
        run.config = dataclasses.replace(run.config, decode=predictor().config.decode)


def test_averaged_steps_are_the_last_regular_ones():
    assert average_steps([10, 20, 25, 30], 10, 3) == [10, 20, 30]
    assert average_steps([10, 20, 27], 10, 2) == [20, 27]
    assert average_steps([10, 20, 25, 30], 10, 4) == [10, 20, 30], "as many as there are"
    assert average_steps([20, 4980, 4990, 5000], 10, 4) == [4980, 4990, 5000], "not the best of long ago"
    assert average_steps([20, 4980, 4990, 4993], 10, 3) == [4980, 4990, 4993]
    assert average_steps([0], 1000, 5) == [0]


LABELS = LabelTokenizer("label", "identity", ["yes", "no"]), NumberTokenizer(0.0, 1.0)
SIDES = {  # of a line: task, the label tokenizer of a classifier, line → source and target
    "a text to restore": ("mlm", None, "a\tb", ("a\tb", None)),
    "another text to restore": ("denoise", None, "a\tb", ("a\tb", None)),
    "a question and its context": ("qa", None, "who\ta cat", ("who\ta cat", None)),
    "a question, its context and an answer": ("qa", None, "who\ta cat\tcat", ("who\ta cat", "cat")),
    "a source and a target": ("translate", None, "a\tb", ("a", "b")),
    "a source": ("translate", None, "a", ("a", None)),
    "a text": ("classify", LABELS[0], "a cat", ("a cat", None)),
    "a text and a label": ("classify", LABELS[0], "a cat\tno", ("a cat", "no")),
    "two texts": ("classify", LABELS[0], "a cat\ta dog", ("a cat\ta dog", None)),
    "two texts and a label": ("classify", LABELS[0], "a cat\ta dog\tno", ("a cat\ta dog", "no")),
    "a text and a number": ("classify", LABELS[1], "a cat\t2.5", ("a cat", "2.5")),
    "two texts of a task of one's own": ("my_parts:both", None, "a cat\ta dog", ("a cat\ta dog", None)),
    "two texts without a number": ("classify", LABELS[1], "a cat\ta dog", ("a cat\ta dog", None)),
}


@pytest.mark.parametrize("line", SIDES)
def test_the_sides_of_a_line_depend_on_the_task(line):
    task, labels, text, sides = SIDES[line]
    answer = {"mlm": "", "denoise": "", "qa": SPAN, "classify": "label"}.get(task, "text")
    of = SimpleNamespace(restores=not answer, answer=answer)
    encoder = SimpleNamespace(source=SimpleNamespace(parts=task in ("classify", "qa", "my_parts:both")))
    run = SimpleNamespace(task=of, inputs=SimpleNamespace(encoder=encoder), tokenizers=(None, labels))
    assert Predictor.pair_of(run, text) == sides


@pytest.mark.parametrize(("recurrent", "family", "refused"), [
    ({}, "encoder", ("first",)), ({"bidirectional": True}, "encoder", ("first", "last")),
    ({"reverse_source": True}, "encdec", ("last",)), ({"cell": ""}, "encoder", ()),
])  # fmt: skip
def test_a_state_that_has_read_one_token_is_the_vector_of_no_text(recurrent, family, refused):
    model = ModelConfig(family, recurrent=RecurrentConfig(**{"cell": "lstm", **recurrent}))
    for pooling in ("first", "last", "mean"):
        config = dataclasses.replace(Config(), decode=DecodeConfig(pooling=pooling))
        run = SimpleNamespace(config=config, tokenizers=(None, None), model=SimpleNamespace(config=model), params={})
        says = "reads a recurrent state that has read one token" if pooling in refused else "attribute 'task'"
        with pytest.raises((UserError, AttributeError), match=says):
            embedding_run(run)
