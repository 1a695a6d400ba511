import dataclasses
import gc
import itertools
import threading
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from jformer.data.corpus import Corpus, Tokens, open_corpus
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.pipeline import make_batches, prefetch
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers import BOS, EOS
from jformer.data.tokenizers.lists import ByteTokenizer
from jformer.errors import UserError
from jformer.tasks.caption import captioned_images
from jformer.tasks.classify import labelled_images, labelled_texts, one_label
from jformer.tasks.denoise import corrupted_spans, infilled
from jformer.tasks.features import sequence_to_sequence
from jformer.tasks.lm import next_token
from jformer.tasks.mlm import masked

BYTES = ByteTokenizer("identity")
ENCODER = PairEncoder(Side(BYTES, 40), Side(BYTES, 40), "drop")
FEATURES = sequence_to_sequence()
SIZES = {"tokens_per_update": 160, "row_multiple": 2, "packed_length": 40, "num_buckets": 3}


def open_pairs(pairs, folder, name="train"):
    return open_corpus(Split(name, name, lambda counts: iter(pairs)), ENCODER, str(folder))


def numbered(number, start=0):
    """Return pairs that all differ, of 1 to 25 bytes a side."""
    rng = np.random.default_rng(start)
    fill = ["x" * n for n in rng.integers(0, 22, 2 * number)]
    return [Pair(f"{start + i}{fill[2 * i]}", f"{start + i}{fill[2 * i + 1]}") for i in range(number)]


@pytest.fixture(params=["buckets", "packed"])
def config(request):
    return DataConfig(batching=request.param, **SIZES)


@pytest.fixture
def pairs():
    return numbered(61)


@pytest.fixture
def batches(pairs, config, tmp_path):
    return make_batches([open_pairs(pairs, tmp_path)], [1.0], config, 0, FEATURES)


def decoded(batch):
    """Read the pairs of a batch back, from its tokens and segments alone."""
    for row in range(len(batch["row"])):
        for segment in range(1, batch["source_segments"][row].max() + 1):
            sides = (("source", "source_segments"), ("target_out", "target_segments"))
            yield Pair(*(BYTES.decode(batch[x][row][batch[s][row] == segment].tolist()) for x, s in sides))


def test_an_epoch_holds_the_text_of_the_corpus(batches, pairs):
    for epoch in range(2):
        steps = range(epoch * len(batches), (epoch + 1) * len(batches))
        assert Counter(pair for step in steps for pair in decoded(batches[step])) == Counter(pairs)


def test_packed_rows_hold_other_pairs_together_in_each_epoch(tmp_path):
    pairs = [Pair(f"{i:05}{'x' * (i % 3)}", f"{i:05}") for i in range(200)]
    config = DataConfig(batching="packed", **SIZES)
    for weight in (1.0, 0.5):  # of which two epochs pass once over the corpus
        made, again = (make_batches([open_pairs(pairs, tmp_path)], [weight], config, 0, FEATURES) for _ in range(2))
        turn = len(made) * round(1 / weight)
        together = [
            {frozenset(decoded({name: array[row : row + 1] for name, array in batch.items()}))
             for step in range(first, first + turn) for batch in [made[step]] for row in range(len(batch["row"]))}
            for first in (0, turn)
        ]  # fmt: skip
        assert [Counter(pair for row in rows for pair in row) for rows in together] == [Counter(pairs)] * 2
        assert len(together[0] & together[1]) < len(together[0]) / 4
        np.testing.assert_array_equal(again[turn]["source"], made[turn]["source"])  # whatever was made before


def test_packed_rows_hold_several_pairs_and_bucketed_rows_one(batches, config):
    segments = max(batches[step]["source_segments"].max() for step in range(len(batches)))
    assert (segments > 1) == (config.batching == "packed")


def test_packed_and_bucketed_epochs_hold_the_same_tokens(pairs, tmp_path):
    corpus, tokens = open_pairs(pairs, tmp_path), []
    for batching in ("buckets", "packed"):
        batches = make_batches([corpus], [1.0], DataConfig(batching=batching, **SIZES), 0, FEATURES)
        tokens.append(Counter())
        for batch in map(batches.__getitem__, range(len(batches))):
            for side in ("source", "target_in", "target_out"):
                tokens[-1].update((side, int(token)) for token in batch[side].flat)
    assert (tokens[0] - tokens[1] | tokens[1] - tokens[0]).keys() <= {
        ("source", 0),
        ("target_in", BOS),
        ("target_out", 0),
    }


def test_segments_count_the_pairs_of_a_row_on_both_sides_and_positions_start_anew(batches):
    for step in range(len(batches)):
        batch = batches[step]
        for side in ("source", "target"):
            for segments, positions in zip(batch[f"{side}_segments"], batch[f"{side}_positions"], strict=True):
                real = segments[segments > 0]
                assert segments.tolist() == [*real, *np.zeros(len(segments) - len(real))]  # no gap before the padding
                numbers, lengths = np.unique(real, return_counts=True)
                assert numbers.tolist() == list(range(1, len(numbers) + 1))
                assert real.tolist() == np.repeat(numbers, lengths).tolist()
                assert positions[segments > 0].tolist() == [p for length in lengths for p in range(length)]
        np.testing.assert_array_equal(batch["source_segments"].max(axis=1), batch["target_segments"].max(axis=1))


def test_each_sentence_ends_with_eos_and_is_read_shifted_from_bos(batches):
    for step in range(len(batches)):
        batch = batches[step]
        for row, segments in enumerate(batch["target_segments"]):
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                out, read = batch["target_out"][row][here].tolist(), batch["target_in"][row][here].tolist()
                assert out.index(EOS) == len(out) - 1
                assert read == [BOS, *out[:-1]]


def test_padding_is_zero_and_weighs_nothing(batches):
    for step in range(len(batches)):
        batch = batches[step]
        for side, tokens in (("source", "source"), ("target", "target_out")):
            padding = batch[f"{side}_segments"] == 0
            for name in (tokens, f"{side}_positions"):
                assert not batch[name][padding].any()
        np.testing.assert_array_equal(batch["weights"], batch["target_segments"] > 0)


def test_arrays_are_of_the_plans_shape_and_32_bits_wide(batches):
    for step in range(len(batches)):
        batch, shape = batches[step], batches.plan.batch(step).shape
        for name, array in batch.items():
            length = {"row": (), "source": (shape.source_length,)}.get(name.split("_")[0], (shape.target_length,))
            assert array.shape == (shape.rows, *length), name
            assert array.dtype == (np.float32 if name == "weights" else np.int32)
        assert batch["row"].tolist() == list(range(shape.rows))


def test_weights_count_the_real_target_tokens(batches, pairs):
    total = sum(float(batches[step]["weights"].sum()) for step in range(len(batches)))
    assert total == sum(len(pair.target) + 1 for pair in pairs)


def test_a_batch_does_not_depend_on_those_made_before(pairs, config, tmp_path):
    corpus = open_pairs(pairs, tmp_path)
    one, other = (make_batches([corpus], [1.0], config, 0, FEATURES) for _ in range(2))
    for step in reversed(range(len(one))):
        for name, array in one[step].items():
            np.testing.assert_array_equal(array, other[step][name])


EVERY_FEATURE = {
    "translate": FEATURES,
    "lm": next_token(),
    "mlm": masked(0.3, 260),
    "t5": corrupted_spans(0.3, 2.0, 260),
    "bart": infilled(0.3, 2.0, 260),
    "classes": labelled_texts(one_label()),
    "images": labelled_images(2, 2, 3, one_label()),
    "captions": captioned_images(2, 2, 3),
    "augmented": captioned_images(2, 2, 3),
}


@pytest.mark.parametrize("name", EVERY_FEATURE)
def test_some_rows_alone_are_those_rows_of_the_whole_batch(name, config):
    rng = np.random.default_rng(0)
    of_images = name in ("images", "captions", "augmented")
    lengths = np.full(53, 12) if of_images else rng.integers(1, 20, 53)
    sides = [Tokens(rng.integers(4, 256, n.sum()), np.cumsum([0, *n])) for n in (lengths, lengths)]
    if name in ("classes", "images"):
        sides[1] = Tokens(rng.integers(4, 9, 53), np.arange(54))
    if name == "augmented":
        config = dataclasses.replace(config, augment=("flip", "crop", "color"))
    if of_images or name == "classes":
        config = dataclasses.replace(config, batching="buckets")
    made = make_batches([Corpus(*sides, {}, "")], [1.0], config, 5, EVERY_FEATURE[name])
    empty = 0
    for step in range(len(made) + 2):
        whole = made[step]
        order = rng.permutation(len(whole["row"]))
        for numbers in (order[::2], order[1::2], np.sort(order)[-1:]):
            part = made.rows(step, numbers)
            empty += not part["weights"].any()
            assert set(part) == set(whole)
            for key, array in part.items():
                np.testing.assert_array_equal(array, whole[key][numbers], key)
                assert array.dtype == whole[key].dtype, key
    assert empty  # a part without a single example is made too


def test_a_mixture_passes_over_each_corpus_by_its_weight(config, tmp_path):
    parts = [numbered(40), numbered(30, start=1000)]
    corpora = [open_pairs(part, tmp_path, name) for part, name in zip(parts, "ab", strict=True)]
    batches = make_batches(corpora, [1.0, 3.0], config, 0, FEATURES)
    seen = Counter(pair for step in range(len(batches)) for pair in decoded(batches[step]))
    assert seen == Counter(parts[0]) + Counter(3 * parts[1])


def test_a_packed_row_holds_one_corpus_only(tmp_path):
    parts = [numbered(40), numbered(30, start=1000)]
    corpora = [open_pairs(part, tmp_path, name) for part, name in zip(parts, "ab", strict=True)]
    batches = make_batches(corpora, [1.0, 1.0], DataConfig(batching="packed", **SIZES), 0, FEATURES)
    for batch in map(batches.__getitem__, range(len(batches))):
        for row in range(len(batch["row"])):
            one = {name: array[row : row + 1] for name, array in batch.items()}
            assert len({pair in parts[0] for pair in decoded(one)}) <= 1


def test_weights_that_leave_nothing_to_train_on_are_refused(tmp_path):
    config = DataConfig(**SIZES)
    with pytest.raises(UserError, match=r"data\.weight=0\.01 .*raise it"):
        make_batches([open_pairs(numbered(10), tmp_path)], [0.01], config, 0, FEATURES)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["buckets", "packed"], indirect=True)
def test_making_many_batches_takes_no_more_memory_than_making_a_few(batches):
    sizes = []
    tracemalloc.start()
    for step, _ in enumerate(prefetch(map(batches.__getitem__, range(601)))):
        if step in (100, 600):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] < sizes[0] + 40_000  # bytes: less than keeping what an epoch's plan holds would take


def ended(thread):
    thread.join(timeout=5)
    return not thread.is_alive()


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetched_items_come_in_order_and_end():
    assert list(prefetch(iter(range(50)))) == list(range(50))
    assert all(ended(thread) for thread in prefetching())


def test_items_are_made_ahead_but_not_further_than_the_depth():
    made = []
    items = prefetch((made.append(i) or i for i in itertools.count()), depth=3)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)  # longer than a full queue is waited for
    assert len(made) == 5  # one taken, three waiting, one in hand
    items.close()


def test_an_error_of_the_thread_is_raised_to_the_reader_at_once():
    def failing():
        yield 1
        raise UserError("train.en:7: not UTF-8")

    items, met = prefetch(failing()), []

    def read():
        assert next(items) == 1
        with pytest.raises(UserError, match=r"train\.en:7") as error:
            next(items)
        met.append(error)

    reader = threading.Thread(target=read, daemon=True)  # it would wait for ever for an error that never comes
    reader.start()
    assert ended(reader)
    assert met
    assert all(ended(thread) for thread in prefetching())


def test_leaving_early_ends_the_thread():
    items = prefetch(itertools.count())
    assert [next(items), next(items)] == [0, 1]
    threads = prefetching()
    assert threads
    items.close()
    assert all(ended(thread) for thread in threads)
