"""Scores made again from outputs: equal to those of the tasks, and resampled as if every sample were scored anew."""

import json
import math

import numpy as np
import pytest
from etils.epath import Path
from sacrebleu import TER

from jformer.config import resolve, save_config
from jformer.config.config_files import with_keys
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.evaluation import records, resampling
from jformer.evaluation.resampling import intervals, is_resampled, resample
from jformer.evaluation.statistics import Ratios, paired_bootstrap, paired_bootstrap_of_ratios
from jformer.tasks import classify, tag
from jformer.tasks.cider import cider_d
from jformer.tasks.metrics import answer_scores, reference_texts, text_metric, text_scores
from jformer.tasks.span_scores import span_scores
from jformer.tasks.sums import Sum
from jformer.tools.compare.comparison import Arm, compare_arms
from tests import small_run

LINES, SUMS = 40, dict.fromkeys(("loss", "nll", "correct"), Sum(1.0, 1.0))
TAGS, LABELS, WORDS = ("O", "O", "B-x", "I-x", "B-y"), ("a", "b", "c"), tuple("bcdefg")


def texts(words, least, most, join=" ".join):
    draw = np.random.default_rng(0)
    return [join(draw.choice(words, draw.integers(least, most + 1))) for _ in range(LINES)]


def damaged(targets, share, words):
    """Return the targets with so large a share of their words drawn anew."""
    draw = np.random.default_rng(int(100 * share))
    return [" ".join(str(draw.choice(words)) if draw.random() < share else w for w in text.split()) for text in targets]


def of_labels(words):
    return ",".join(sorted(set(words)))


def config(task, **data):
    return resolve({"task": task, "data": {"dir": "nowhere", **data}, "model": {"family": "encoder"}})


def summed(score):
    return lambda outputs, pairs: score(outputs, pairs, SUMS)


SEVERAL = texts(LABELS, 0, 3, of_labels)
CASES = {  # targets, outputs of two systems, config, what scores them, scores
    "tags": (
        (targets := texts(TAGS, 1, 8)),
        [damaged(targets, share, TAGS) for share in (0.3, 0.45)],
        config("tag", source="conll"),
        summed(tag.score),
        ("span_f1", "span_precision", "span_recall", "accuracy", "macro_f1", "exact_match"),
    ),
    "one label": (
        (targets := texts(LABELS, 1, 1)),
        [["", *damaged(targets, share, LABELS)[1:]] for share in (0.3, 0.5)],
        config("classify", source="labelled"),
        summed(classify._score_one),
        ("accuracy", "macro_f1"),
    ),
    "several labels": (
        SEVERAL,
        [SEVERAL[:cut] + SEVERAL[cut::-1][: LINES - cut] for cut in (30, 24)],
        config("classify", source="labelled", labels="several"),
        summed(classify._score_several),
        ("exact_match", "micro_f1", "macro_f1"),
    ),
    "answers": (
        (targets := texts(WORDS, 1, 4)),
        [damaged(targets, share, WORDS) for share in (0.3, 0.5)],
        config("qa", source="squad"),
        answer_scores,
        ("exact_match", "f1"),
    ),
}


def by_hand(score, name):
    """Return the p of scoring both systems on every sample of lines: `score` takes lines and a system's number."""
    draw = np.random.default_rng(12_345)
    samples = [draw.integers(0, LINES, LINES) for _ in range(1_000)]
    gaps = np.array([abs(score(lines, 1)[name] - score(lines, 0)[name]) for lines in samples])
    observed = abs(score(range(LINES), 1)[name] - score(range(LINES), 0)[name])
    return (1 + int(np.sum(gaps - gaps.mean() > observed))) / 1_001


@pytest.mark.parametrize("case", CASES)
def test_a_bootstrap_is_that_of_scoring_every_sample(case):
    targets, outputs, options, task_score, names = CASES[case]
    pairs, scored = [Pair("s", text) for text in targets], {}

    def score(lines, system):
        key = (system, *lines)
        if key not in scored:
            found = task_score([outputs[system][i] for i in lines], [pairs[i] for i in lines])
            scored[key] = {name: found[name]["score"] for name in names}
        return scored[key]

    for name in names:
        first, second = resample(options, name, outputs, pairs)
        assert (first.score, second.score) == pytest.approx(
            (score(range(LINES), 0)[name], score(range(LINES), 1)[name])
        )
        assert first.score != second.score
        assert (first.p, second.p) == (1, by_hand(score, name)), name


def test_cider_is_resampled_with_the_rarity_that_all_references_say():
    targets, outputs, *_ = CASES["answers"]
    values = [cider_d(each, [[text] for text in targets]) for each in outputs]
    pairs = [Pair("s", text) for text in targets]
    found = resample(config("qa", source="squad"), "cider", outputs, pairs)
    assert [each.score for each in found] == pytest.approx([np.mean(each) for each in values])
    p = by_hand(lambda lines, system: {"cider": np.mean([values[system][i] for i in lines])}, "cider")
    assert found[1].p == p


def test_samples_and_test_are_those_of_sacrebleu():
    targets, outputs, *_ = CASES["answers"]
    counts = [np.array(TER()._extract_corpus_statistics(each, [targets])) for each in outputs]
    lines = np.arange(LINES)
    ours = [Ratios(lines, 0 * lines, 100.0 * each[:, 0], each[:, 1].astype(float)) for each in counts]
    theirs = paired_bootstrap(TER(), outputs[0], outputs[1:], [targets])
    for one, other in zip(paired_bootstrap_of_ratios(LINES, ours), theirs, strict=True):
        assert one.p == other.p
        assert (one.score, one.margin) == pytest.approx((other.score, other.margin), rel=1e-5)


def test_what_scores_the_same_does_not_differ_and_what_is_nothing_is_no_division():
    pairs, outputs = [Pair("s", "O O")] * 3, ["O O"] * 3
    assert [(each.score, each.p) for each in resample(CASES["tags"][2], "span_f1", [outputs] * 2, pairs)] == [
        (0, 1)
    ] * 2
    empty = [Pair("s", "")] * 3
    assert resample(CASES["several labels"][2], "micro_f1", [[""] * 3], empty)[0].score == 1


def test_scores_that_no_line_adds_to_are_not_resampled():
    assert not is_resampled(resolve({"task": "mlm", "data": {"dir": "x"}, "model": {"family": "encoder"}}), "accuracy")
    assert not is_resampled(CASES["answers"][2], "perplexity")
    assert resample(CASES["answers"][2], "accuracy", [["a"]], [Pair("s", "a")]) == []


@pytest.fixture(scope="module")
def taggers(tmp_path_factory):
    """Return two runs that tag generated sentences, the second better, and their F1."""
    found, folder = {}, tmp_path_factory.mktemp("taggers")
    data = {
        "data.source": "experiments.sources.parts_of_speech:open_split",
        "data.tokenizer": "word",
        "data.num_pairs": 60,
    }
    options = with_keys(small_run.get_config(), {"task": "tag", "model.family": "encoder", **data})
    for name, share in (("worse", 0.3), ("better", 0.1)):
        run = Path(folder / name)
        run.mkdir()
        save_config(options, run / "config.json")
        split = records.open_split(options.data, "test")
        pairs = list(split.read(records.Counter()))
        outputs = damaged([pair.target for pair in pairs], share, pairs[0].target.split())
        scores = tag.score(outputs, pairs, SUMS)
        (run / "outputs").mkdir()
        (run / "outputs" / "test.txt").write_text("".join(f"{line}\n" for line in outputs))
        entry = {"checksum": split.fingerprint, **{key: scores[key] for key in ("macro_f1", "accuracy")}}
        both = zip(outputs, pairs, strict=True)  # as a command of that name would leave them
        segments = [sum(map(str.__eq__, line.split(), pair.target.split())) / 3 for line, pair in both]
        (run / "outputs" / "test.comet.txt").write_text("".join(f"{value}\n" for value in segments))
        scores["comet"] = {"score": sum(segments) / len(segments)}
        entry["comet"] = scores["comet"]
        (run / "results.json").write_text(json.dumps({"run": {}, "test": entry}))
        found[name] = (run, scores)
    return found


@pytest.mark.parametrize("name", ["macro_f1", "accuracy", "comet"])
def test_two_runs_are_compared_by_their_lines(taggers, name):
    arms = [Arm(label, {0: scores[name]["score"]}, {0: run}) for label, (run, scores) in taggers.items()]
    (_, better), notes = compare_arms(arms, "worse", f"test/{name}")
    assert better.difference.p < 0.05
    assert "p of a paired bootstrap of the outputs (1,000 samples)" in notes[0]
    run, scores = taggers["worse"]
    found = intervals(records.saved_config(run), run, {"test": {name: scores[name], "checksum": ""}})
    assert 0 < found["test", name] < scores[name]["score"]


def test_shares_are_tested_over_seeds_where_there_are_several(taggers):
    (worse, _), (better, _) = taggers.values()
    arms = [
        Arm("worse", {0: 0.7, 1: 0.72}, {0: worse, 1: worse}),
        Arm("better", {0: 0.9, 1: 0.93}, {0: better, 1: better}),
    ]
    assert "p of paired t tests" in compare_arms(arms, "worse", "test/accuracy")[1][0]


# --- intervals of a run's own scores ---

PAIRS = [Pair("s", f"a b c d {i}") for i in range(100)]


def found_of(monkeypatch, scores, right=60):
    outputs = [pair.target if i < right else "a b c d x" for i, pair in enumerate(PAIRS)]
    return found_for(monkeypatch, scores, outputs, PAIRS)


def found_for(monkeypatch, scores, outputs, pairs, key="test", **options):
    monkeypatch.setattr(records, "outputs", lambda run, key: outputs)
    monkeypatch.setattr(records, "examples", lambda run, key, data: pairs)
    config = resolve({"data": {"dir": "nowhere", **options.pop("data", {})}, **options})
    results = {key: {name: {"score": value} for name, value in scores.items()}}
    return [intervals(config, Path("run"), results) for _ in range(2)]


def test_a_share_has_the_interval_of_a_binomial_and_the_same_each_time(monkeypatch):
    first, again = found_of(monkeypatch, {"exact_match": 0.6, "token_accuracy": 0.9})
    assert first == again
    assert first.keys() == {("test", "exact_match")}
    assert first["test", "exact_match"] == pytest.approx(1.96 * math.sqrt(0.6 * 0.4 / 100), rel=0.1)


def test_a_score_that_the_outputs_do_not_give_again_has_none(monkeypatch):
    assert found_of(monkeypatch, {"exact_match": 0.7, "bleu": 12.0})[0] == {}


def test_bleu_is_resampled(monkeypatch):
    outputs = [pair.target if i < 60 else "a b c d x" for i, pair in enumerate(PAIRS)]
    score = text_metric("bleu", "13a", False).corpus_score(outputs, [[pair.target for pair in PAIRS]]).score
    first, again = found_of(monkeypatch, {"bleu": score})
    assert first == again
    assert 0.5 < first["test", "bleu"] < 10


def test_a_score_is_resampled_with_the_options_that_it_was_computed_with(monkeypatch):
    outputs = [pair.target.upper() for pair in PAIRS]
    monkeypatch.setattr(records, "outputs", lambda run, key: outputs)
    monkeypatch.setattr(records, "examples", lambda run, key, data: PAIRS)
    config, settings = resolve({"data": {"dir": "nowhere"}}), {"evaluate": {"tokenize": "char", "lowercase": True}}
    results = {"test": {"bleu": {"score": 100.0}, "settings": settings}}
    assert intervals(config, Path("run"), results).keys() == {("test", "bleu")}
    assert intervals(config, Path("run"), {"test": {"bleu": {"score": 100.0}}}) == {}  # with those of the config


def test_a_tokenization_that_is_not_installed_leaves_the_other_intervals(monkeypatch):
    monkeypatch.setattr(resampling, "text_metric", raising(UserError("needs mecab")))
    assert found_of(monkeypatch, {"bleu": 50.0, "exact_match": 0.6})[0].keys() == {("test", "exact_match")}


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_bleu_is_resampled_with_the_tokenization_of_the_language_and_without_missing_references(monkeypatch):
    pairs = [Pair("", f"一大的房{i}在山上", others=(f"房{i}在山上" if i % 2 else "",)) for i in range(20)]
    outputs = [f"一大的房{i}在山下" for i in range(20)]
    config = resolve({"data": {"dir": "nowhere", "target_language": "zh"}})
    (found,) = resample(config, "bleu", [outputs], pairs)
    assert found.score == text_scores(outputs, reference_texts(pairs), tokenize="zh")["bleu"]["score"]
    assert found.score > 50
    corpora = {"mixture": ({"dir": "nowhere", "target_language": "zh", "test": ("zh",)},)}
    assert found_for(monkeypatch, {"bleu": found.score}, outputs, pairs, key="zh", data=corpora)[0].keys() == {
        ("zh", "bleu")
    }
    assert resample(config, "exact_match", [[""] * 20], pairs)[0].score == 0


def test_scores_of_spans_are_resampled_by_sentence(monkeypatch):
    wanted = 40 * ["B-x I-x O", "O B-y O", "O O O"]
    outputs = 40 * ["B-x I-x O", "O O O", "O O B-y"]  # of three sentences one span is right, one lost, one invented
    scores = span_scores(*([tags.split() for tags in texts] for texts in (outputs, wanted)))
    values = {name: scores[name]["score"] for name in ("span_f1", "span_precision", "span_recall")} | {
        "accuracy": 7 / 9
    }
    assert values["span_f1"] == 0.5
    pairs = [Pair("a b c", tags) for tags in wanted]
    first, again = found_for(
        monkeypatch, values, outputs, pairs, task="tag", data={"source": "conll"}, model={"family": "encoder"}
    )
    assert first == again
    assert {name for _, name in first} == {*values}
    # Of 120 sentences each of the kinds is drawn with chance 1/3: the delta method gives the deviation of their ratio.
    assert first["test", "span_recall"] == pytest.approx(1.96 * math.sqrt(0.5 * 0.5 / 80), rel=0.2)


def test_cider_is_resampled(monkeypatch):
    outputs = [pair.target if i < 60 else "a b c d x" for i, pair in enumerate(PAIRS)]
    values = cider_d(outputs, [[pair.target] for pair in PAIRS])
    mean = sum(values) / len(values)
    first, again = found_of(monkeypatch, {"cider": mean})
    assert first == again
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) / len(values))
    assert first["test", "cider"] == pytest.approx(1.96 * deviation, rel=0.1)
