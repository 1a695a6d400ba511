import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import default_config, resolve
from jformer.data.sources.split import Pair
from jformer.data.spans import END, MAY_END, MAY_START, START
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks.losses import span_cross_entropy, span_log_probs
from jformer.tasks.metrics import answer_scores, normalized, token_f1
from jformer.tasks.sums import Sum
from jformer.tasks.task import make_loss, sized
from tests.conftest import draw_params
from tests.tasks.conftest import make_task

NAMES = ("Ada", "Bo", "Cy")
QUESTIONS = (
    *(
        Pair(f"Who is {age}?\t{first} is {age}. {second} is {age + 1}.", first, others=(first,) * (age % 3), start=0)
        for age in range(1, 20)
        for first, second in (NAMES[:2], NAMES[1:])
    ),
    Pair("Who is 50?\tBo is 9.", ""),
)


def make_qa(**data):
    return make_task("qa", **data)


def test_answers_come_back_from_the_batches(make):
    made, found = make("qa", QUESTIONS, tokenizer="word", max_source_length=32), Counter()
    for step in range(len(made.batches)):
        batch = made.batches[step]
        marks, tokens = batch["target_out"], batch["source"]
        np.testing.assert_array_equal(batch["weights"] > 0, marks > 0)
        for row in np.flatnonzero(marks.any(axis=1)):
            (first,), (last,) = (np.flatnonzero(marks[row] & mark) for mark in (START, END))
            types = batch["source_types"][row]
            assert set(types[: batch["source_segments"][row].sum()]) == {0, 1}
            assert (marks[row, 1:][types[1:] == 0] == 0).all()
            found[made.tokenizers[0].decode(tokens[row, first : last + 1]) if first else ""] += 1
    assert found == Counter(pair.target for pair in QUESTIONS)


def test_the_vocabulary_is_that_of_words_cut_one_by_one(make):
    made = make("qa", QUESTIONS, tokenizer="word", vocab_size=99)
    assert {"Who", "is", "Ada", "?", "."} <= set(made.tokenizers[0].tokens)
    assert not any("." in token and len(token) > 1 for token in made.tokenizers[0].tokens)
    assert "unknown tokens" not in made.corpus.counts


def test_the_loss_is_the_mean_of_both_ends_over_what_may_be_pointed_at():
    """Row 0 may start at 0, 2 and 3 and end at 0 and 3; its answer is 2 to 3. Row 1 has none, row 2 is padding."""
    marks = np.array(
        [[MAY_START | MAY_END, 0, START | MAY_START, END | MAY_END | MAY_START], [15, 0, 12, 12], [0, 0, 0, 0]]
    )
    logits = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)

    loss_of = jax.jit(span_cross_entropy, static_argnums=2)

    def nll(values, target):
        return math.log(sum(map(math.exp, values))) - target

    z = np.asarray(logits, float)
    first = (nll(z[0, [0, 2, 3], 0], z[0, 2, 0]) + nll(z[0, [0, 3], 1], z[0, 3, 1])) / 2
    second = (nll(z[1, [0, 2, 3], 0], z[1, 0, 0]) + nll(z[1, [0, 2, 3], 1], z[1, 0, 1])) / 2
    sums = loss_of(logits, marks)
    assert float(sums["nll"].total) == pytest.approx(first + second, rel=1e-5)
    assert {name: float(each.count) for name, each in sums.items()} == {"loss": 2, "nll": 2, "correct": 2}
    alone = loss_of(logits[:1], marks[:1])
    assert float(alone["loss"].total) == pytest.approx(first, rel=1e-5)
    sharp = np.zeros((3, 4, 2), np.float32)
    sharp[[0, 0, 1], [2, 3, 0], [0, 1, 0]] = 9
    assert float(loss_of(sharp, marks)["correct"].total) == 2  # of equals the first: row 1 ends at 0
    smoothed = loss_of(logits[:1], marks[:1], 0.3)["loss"].total
    each = [[nll(z[0, at, i], z[0, j, i]) for j in at] for i, at in enumerate(([0, 2, 3], [0, 3]))]
    spread = (sum(each[0]) / 3 + sum(each[1]) / 2) / 2
    assert float(smoothed) == pytest.approx(0.7 * first + 0.3 * spread, rel=1e-5)
    slope = jax.jit(jax.grad(lambda x: span_cross_entropy(x, jnp.asarray(marks), 0.1)["loss"].total))(logits)
    assert np.isfinite(slope).all()
    assert not np.asarray(slope)[np.asarray(marks) == 0].any()
    assert np.isneginf(jax.jit(span_log_probs)(logits, marks)[0, 1]).all()
    wider = loss_of(np.pad(logits, ((0, 0), (0, 5), (0, 0)), constant_values=9.0), np.pad(marks, ((0, 0), (0, 5))))
    for name, each in sums.items():
        assert float(wider[name].total) == pytest.approx(float(each.total), rel=1e-6)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("The  Cat.", "cat"),
        ("U.S.-led", "usled"),
        ("“the” theatre", "“ ” theatre"),  # no ASCII, so it stays; the article between the marks does not
        ("a an the", ""),
        ("A.", ""),  # the mark goes first, then the article
        ("über–ich", "über–ich"),
        ("a-b", "ab"),
        ("x\u00a0the\ty", "x y"),
        ("...", ""),
    ],
)
def test_an_answer_is_normalized_as_squad_does(answer, words):
    assert normalized(answer) == words


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("the cat", "a cat!", 1.0),
        ("red cat", "cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("cat cat", "cat cat sat", 4 / 5),
        ("dog", "cat", 0.0),
        ("", "the", 1.0),
        ("", "cat", 0.0),
        ("the", "cat", 0.0),
    ],
)
def test_f1_is_of_words_as_often_as_they_stand(answer, reference, f1):
    assert token_f1(answer, reference) == token_f1(reference, answer) == pytest.approx(f1)


def test_scores_are_the_best_of_all_answers_by_group():
    examples = [
        Pair("", "red cat", "answerable", ("cat", "the dog", "...")),
        Pair("", "the", "answerable"),  # nothing is left of it, so no answer is right
        Pair("", "", "unanswerable"),
        Pair("", "", "unanswerable"),
    ]
    scores = answer_scores(["Dog", "", "", "dog"], examples)
    assert scores["exact_match"] == {"score": 0.75, "by_group": {"answerable": 1.0, "unanswerable": 0.5}}
    assert scores["f1"] == scores["exact_match"]
    assert answer_scores(["cat sat"], examples[:1]) == {
        "exact_match": {"score": 0.0},
        "f1": {"score": pytest.approx(2 / 3)},
    }
    assert answer_scores([""], examples[:1])["exact_match"] == {"score": 0.0}  # "..." does not make nothing right
    task, _ = make_qa()
    found = task.score(["Dog"], examples[:1], {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)})
    assert found == {
        "exact_match": {"score": 1.0},
        "f1": {"score": 1.0},
        "perplexity": {"score": pytest.approx(math.exp(2))},
    }


def test_the_head_has_an_output_for_each_end_at_every_position():
    model = sized(resolve(default_config("bert_base")).model, make_qa()[0], 40, 40)
    assert (model.head.num_classes, model.head.pooling, model.head.pooler, model.vocab_size) == (2, "none", False, 40)


@pytest.mark.parametrize("cell", ["", "gru"])
def test_a_model_of_either_kind_learns_where_answers_are(make, cell):
    made = make("qa", QUESTIONS, tokenizer="word", vocab_size=99, max_source_length=32)
    blocks = {} if cell else {"d_ff": 32, "num_heads": 2}
    recurrent = RecurrentConfig(cell, bidirectional=bool(cell))
    options = ModelConfig(family="encoder", num_layers=1, d_model=16, dropout=0.0, recurrent=recurrent, **blocks)
    model = build_model(sized(options, made.task, made.tokenizers[0].vocab_size, made.tokenizers[1].vocab_size))
    batch = jax.tree.map(jnp.asarray, made.batches[0])
    params = draw_params(model)
    loss = make_loss(model, made.task.loss)

    @jax.jit
    def update(params):
        value, slopes = jax.value_and_grad(lambda p: mean(loss(p, batch, None)["loss"]))(params)
        return value, jax.tree.map(lambda p, slope: p - 0.5 * slope, params, slopes)

    values = []
    for _ in range(30):
        value, params = update(params)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]


def mean(total):
    return total.total / total.count


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": "generated"}, "data.source='generated' is not for task='qa': use 'squad'"),
        ({"source": "files"}, "data.source='files' is not for task='qa'"),
        ({"overlong": "split"}, "data.overlong='split' is not for task='qa'"),
        ({"batching": "packed"}, "data.batching='packed' is not for task='qa'"),
        ({"max_source_length": 15}, "data.max_source_length=15 has no room for a question and its context"),
    ],
)
def test_what_no_question_can_be_learned_from_is_refused(data, words):
    with pytest.raises(UserError) as error:
        make_task("qa", **data)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data.source": "squad"}, "data.source='squad' is for task='qa', not 'mlm'"),
        ({"data.doc_stride": 64}, "data.doc_stride=64 is read by task='qa' only, not by 'mlm': leave it out"),
        ({"decode.max_answer_length": 8}, "decode.max_answer_length=8 is read by task='qa' only"),
        ({"decode.no_answer_threshold": 1.0}, "decode.no_answer_threshold=1.0 is read by task='qa' only"),
        ({"task": "qa", "data.doc_stride": 0}, "data.doc_stride=0 must be at least 1"),
        ({"task": "qa", "decode.max_answer_length": 0}, "decode.max_answer_length=0 must be at least 1"),
        ({"task": "qa", "evaluate.during": ("bleu",)}, "evaluate.during='bleu'; choose one of: exact_match, f1"),
    ],
)
def test_options_of_questions_are_refused_where_nothing_reads_them(change, words):
    config = default_config("bert_base")
    config.update_from_flattened_dict({"data.source": "text", **change})
    with pytest.raises(UserError) as error:
        resolve(config)
    assert words in str(error.value)
