"""The chain over tags is exact against all paths, written out; sentences of a row are chains of their own.

Words have one piece or two, the first of which is tagged; what scores say of other positions is noise.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import default_config, resolve
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch
from jformer.tasks.build import build_task
from jformer.tasks.crf import allowed_states, best_tags, chain_loss, pair_shares
from jformer.tasks.losses import cross_entropy
from jformer.tasks.task import make_loss
from jformer.training.step import make_gradient
from tests.conftest import draw_params
from tests.tasks.conftest import make_task

TAGS = 3
PIECES = [(2, 1, 1, 2), (1,), (1, 2, 1), (2, 2, 1, 1)]  # of each word of each sentence
RNG = np.random.default_rng(0)
SCORES = RNG.normal(0, 2, (len(PIECES), 4, TAGS)).astype(np.float32)  # of each tag of each word
TABLE = RNG.normal(0, 2, (TAGS + 1, TAGS + 1)).astype(np.float32)
RIGHT = RNG.integers(0, TAGS, (len(PIECES), 4))


def lay_out(rows, length):
    """Return a batch of rows of sentences, given by their numbers, and (row, positions of its words) of each."""
    names = ("source", "source_positions", "source_segments", "source_types", "target_out")
    batch = {name: np.zeros((len(rows), length), np.int32) for name in names}
    batch["weights"] = np.zeros((len(rows), length), np.float32)
    words = {}
    for row, sentences in enumerate(rows):
        at = 0
        for segment, number in enumerate(sentences, 1):
            size = sum(PIECES[number]) + 2
            first = at + 1 + np.cumsum([0, *PIECES[number][:-1]])
            batch["source"][row, at : at + size] = 2 + (np.arange(size) + 3 * number) % 9
            batch["source_positions"][row, at : at + size] = np.arange(size)
            batch["source_segments"][row, at : at + size] = segment
            batch["target_out"][row, first] = RIGHT[number, : len(first)]
            batch["weights"][row, first] = 1
            words[number] = row, first
            at += size
    return {name: jnp.asarray(x) for name, x in batch.items()}, words


def pairs_of(batch, words, scores=SCORES, table=TABLE):
    """Return the scores of each state after each other as a model gives them."""
    noise = np.random.default_rng(1).normal(0, 5, (*batch["weights"].shape, TAGS)).astype(np.float32)
    places = [(row, at, number, i) for number, (row, first) in words.items() for i, at in enumerate(first)]
    rows, at, numbers, i = np.array(places).T
    logits = jnp.asarray(noise).at[rows, at].set(scores[numbers, i])
    return jnp.pad(logits, ((0, 0), (0, 0), (0, 1)))[:, :, None] + table


def written_out(number, scores, table):
    """Return all rows of tags of a sentence [n i], and the score of each [n], added up word by word."""
    words = len(PIECES[number])
    paths = np.array([*itertools.product(range(TAGS), repeat=words)])
    total = table[TAGS, paths[:, 0]] + table[paths[:, -1], TAGS]
    for i in range(words):
        total = total + scores[number, i, paths[:, i]]
    for i in range(1, words):
        total = total + table[paths[:, i - 1], paths[:, i]]
    return paths, total


@jax.jit
def loss_of(pairs, batch):
    """Return the sums of a chain whose scores these are, by one program."""
    return chain_loss(pairs, lambda pairs: pairs, batch)


tags_of = jax.jit(best_tags)
LAYOUTS = {
    "apart": lay_out([(0,), (1,), (2,), (3,)], 10),
    "packed": lay_out([(0, 1), (3,), (2,)], 13),
    "without padding": lay_out([(0, 1, 2, 3)], 25),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tags_and_their_probabilities_are_those_of_all_paths(layout):
    batch, words = LAYOUTS[layout]

    pairs = pairs_of(batch, words)
    shares = jax.jit(lambda pairs, batch: pair_shares(pairs, allowed_states(batch, TAGS + 1)).sum(axis=2))(pairs, batch)
    found, shares = jax.device_get((tags_of(pairs, batch), shares))
    log_probs = np.zeros(len(pairs))
    for number, (row, first) in words.items():
        paths, scores = written_out(number, SCORES.astype(np.float64), TABLE.astype(np.float64))
        share = np.exp(scores) / np.exp(scores).sum()  # [n]
        best = paths[share.argmax()]
        np.testing.assert_array_equal(found.tags[row, first], best)
        log_probs[row] += np.log(share.max())
        for i, position in enumerate(first):
            each = [share[paths[:, i] == tag].sum() for tag in range(TAGS)]
            np.testing.assert_allclose(shares[row, position, :TAGS], each, atol=1e-5)
            assert np.exp(found.shares[row, position]) == pytest.approx(each[best[i]], rel=1e-4)
            before = paths[:, i - 1] == best[i - 1] if i else np.full(len(paths), True)
            follows = share[before & (paths[:, i] == best[i])].sum() / share[before].sum()
            assert np.exp(found.follows[row, position]) == pytest.approx(follows, rel=1e-4)
    np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_those_of_all_paths(layout):
    batch, words = LAYOUTS[layout]

    def written(scores, table):
        total = 0.0
        for number, (_, first) in words.items():
            paths, values = written_out(number, scores, table)
            right = (paths == RIGHT[number, : len(first)]).all(axis=1).argmax()
            total += jax.nn.logsumexp(values) - values[right]
        return total

    def chained(scores, table):
        return loss_of(pairs_of(batch, words, scores, table), batch)["loss"].total

    arguments = jnp.asarray(SCORES), jnp.asarray(TABLE)
    wanted, slopes = jax.jit(jax.value_and_grad(written, (0, 1)))(*arguments)
    loss, found = jax.jit(jax.value_and_grad(chained, (0, 1)))(*arguments)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert abs(found[1]).max() > 0.1
    for ours, theirs in zip(found, slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_padding_changes_no_bit():
    made = []
    for length in (8, 30):
        batch, words = lay_out([(0,), (2,)], length)
        pairs = jnp.where(
            batch["weights"][..., None, None] > 0, pairs_of(batch, words), TABLE
        )  # no noise, which differs
        made.append((loss_of(pairs, batch), tags_of(pairs, batch)))
    (loss, tags), (same, longer) = made
    assert loss == same
    for one, other in zip(tags, longer, strict=True):
        np.testing.assert_array_equal(one[:, :6] if one.ndim > 1 else one, other[:, :6] if one.ndim > 1 else other)


def test_a_row_of_padding_counts_nothing():
    batch, words = lay_out([(0,), ()], 8)
    alone, same = lay_out([(0,)], 8)
    pairs, found = pairs_of(batch, words), pairs_of(alone, same)
    sums, wanted = (loss_of(each, rows) for each, rows in ((pairs, batch), (found, alone)))
    for name, (total, count) in wanted.items():
        np.testing.assert_allclose(sums[name], (total, count), rtol=1e-6)
    assert tags_of(pairs, batch).log_probs[1] == 0


@pytest.mark.slow
def test_without_transitions_a_chain_is_tags_one_by_one():
    batch, words = LAYOUTS["packed"]
    pairs = pairs_of(batch, words, table=np.zeros_like(TABLE))
    logits = pairs[:, :, 0, :TAGS]
    alone, chain = cross_entropy(logits, batch["target_out"], batch["weights"]), loss_of(pairs, batch)
    for name, (total, count) in alone.items():
        np.testing.assert_allclose(chain[name], (total, count), rtol=1e-5)


KINDS = {
    "transformer": {"num_layers": 1, "d_ff": 8, "num_heads": 2},
    "lstm": {"num_layers": 1, "recurrent": RecurrentConfig("lstm", bidirectional=True)},
}


def untrained(kind):
    """Return a model, and parameters whose table of transitions is not 0."""
    head = HeadConfig(num_classes=TAGS, pooling="none", crf=True)
    sizes = {"d_model": 8, "vocab_size": 16, "dropout": 0.0}
    model = build_model(ModelConfig(family="encoder", head=head, **sizes, **KINDS[kind]))
    return model, {**draw_params(model), "transitions": jnp.asarray(TABLE)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_devices_share_the_rows_of_chains(kind):
    (model, params), (batch, _) = untrained(kind), LAYOUTS["apart"]
    task, _ = make_task("tag", crf=True)
    rows = {name: np.asarray(x)[None] for name, x in {**batch, "row": np.arange(4)}.items()}
    found = []
    for sizes in ((1, 1, 1), (2, 1, 2)):
        mesh = make_mesh(*sizes)
        gradient = jax.jit(make_gradient(make_loss(model, task.loss), mesh))
        found.append(jax.device_get(gradient(params, put_batch(mesh, rows), jax.random.key(1))))
    (slopes, sums), (shared, same) = found
    assert sums["loss"].count == sum(map(len, PIECES))
    assert np.abs(slopes["transitions"]).max() > 1e-3
    assert set(sums) == {"loss", "nll", "correct"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (slopes, sums), (shared, same))


def test_sentences_that_share_a_row_lose_what_they_lose_apart():
    model, params = untrained("transformer")
    loss = jax.jit(make_loss(model, make_task("tag", crf=True)[0].loss))
    apart, packed = (loss(params, LAYOUTS[name][0], None) for name in ("apart", "packed"))
    for name, (total, count) in apart.items():
        np.testing.assert_allclose(packed[name], (total, count), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "tag", "optim.label_smoothing": 0.1}, r"optim\.label_smoothing=0\.1 smooths single tags"),
        ({"task": "tag", "optim.r_drop": 1.0}, r"optim\.r_drop=1\.0 compares one prediction per token"),
        (
            {"task": "classify", "data.source": "labelled"},
            r"model\.head\.crf=True is read by task='tag' only, not by 'classify': leave it out",
        ),
        ({"task": "mlm", "data.source": "text"}, r"model\.head\.crf=True is read by task='tag' only, not by 'mlm'"),
        ({"task": "lm", "model.family": "decoder"}, r"model\.head, except its bias, is read by encoder and vit"),
    ],
)
def test_what_a_chain_is_not_for_is_refused_in_one_line(options, words):
    config = default_config("bert_base")
    config.update_from_flattened_dict({"data.source": "conll", "optim.label_smoothing": 0.0, **options})
    config.model.head.crf = True
    with pytest.raises(UserError, match=words) as error:
        build_task(resolve(config))
    assert "\n" not in str(error.value)
