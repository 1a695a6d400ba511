"""Captions: from images and texts to arrays, and from outputs to scores; and how such a run is asked."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.sources.scenes import build, draw_all
from jformer.config import resolve
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import ImageTokenizer, learn
from jformer.errors import UserError
from jformer.inference import verify
from jformer.inference.answers import Part
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained
from jformer.tasks.build import build_sized, build_task
from jformer.tasks.sums import Sum
from jformer.tools.forecast.describe import describe
from tests.conftest import draw_params
from tests.tasks.conftest import PAIRS, PICTURES, make_task

TOTALS = {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0), "loss": Sum(4.0, 2.0)}
SMALL = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "vision": {"image_size": 32, "patch_size": 8}}


def settings(**options):
    """Return the config of a small run over generated pictures."""
    data = {
        "source": "experiments.sources.scenes:open_split",
        "num_pairs": 20,
        "tokenizer": "word",
        **options.pop("data", {}),
    }
    decode = {"beam_size": 1, "max_extra_length": 6, **options.pop("decode", {})}
    model = {**SMALL, **options.pop("model", {})}
    return resolve({"task": "caption", "model": model, "data": data, "decode": decode, **options})


@functools.cache
def predictor():
    """Return an untrained run."""
    config = settings()
    words = learn("word", [pair.target for pair in build(20)["train"]], 100, "identity", False)
    task, tokenizers = build_task(config), (ImageTokenizer((32, 32, 3)), words)
    model = build_sized(config, task, tokenizers)
    params = draw_params(model)
    return Predictor(Trained(config=config, task=task, tokenizers=tokenizers, model=model, params=params))


def test_an_image_and_its_caption_come_back_from_the_batches(make):
    made, found = make("caption"), {}
    for step in range(len(made.batches)):
        batch = made.batches[step]
        assert "source" not in batch
        for row in np.flatnonzero(batch["weights"][:, 0]):
            ids = batch["target_out"][row][batch["target_segments"][row] > 0]
            found[batch["image"][row].tobytes()] = made.tokenizers[1].decode(ids)
    assert found == {
        image.tobytes(): pair.target for image, pair in zip(np.load(PICTURES), PAIRS["caption"], strict=True)
    }


def test_scores_are_those_of_a_translation_and_cider():
    """The first output is the second reference; "a" is said of both images, so the second output says nothing of it."""
    examples = [Pair("1", "one red cat", others=("a cat",)), Pair("2", "two dogs", others=("a dog",))]
    scores = make_task("caption")[0].score(["a cat", "a"], examples, TOTALS)
    assert set(scores) == {"bleu", "cider", "exact_match", "token_accuracy", "perplexity"}
    assert scores["exact_match"] == {"score": 0.5}
    # 5 for the equal reference ("a cat": two of four orders), less for the other one, the mean of images.
    assert 2.5 / 2 < scores["cider"]["score"] < 5 / 2
    assert scores["cider"]["signature"].startswith("words:lowercase")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"source": "files"}}, r"data\.source='files' is not for task='caption': use 'captions'"),
        ({"data": {"tokenizer": "image"}}, r"data\.tokenizer='image' is not for task='caption'"),
        ({"model": {"recurrent": {"cell": "gru"}, "vision": {}}}, r"model\.recurrent\.cell='gru' reads tokens, and"),
        ({"model": {"family": "decoder"}}, r"task='caption' is not for model\.family='decoder'"),
        ({"decode": {"alignments": True, "outputs": "jsonl"}}, r"decode\.alignments=True links words of two texts"),
        ({"train": {"source_vectors": "x"}}, r"train\.source_vectors: .* embeds no source tokens"),
        ({"data": {"augment": ("spin",)}}, r"data\.augment='spin'; choose one of: flip, crop, color"),
        ({"data": {"image_size": -1}}, r"data\.image_size=-1 must be at least 0"),
    ],
)
def test_what_captions_cannot_work_with_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build_task(settings(**options))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"vision": {"source": True}}}, r"the source of task='translate' is a text, not an image; use False"),
        ({"data": {"augment": ("flip",)}}, r"data\.augment=\('flip',\) is about images: task='translate' reads texts"),
        ({"data": {"image_size": 8}}, r"data\.image_size=8 is about images: task='translate' reads texts"),
    ],
)
def test_options_of_images_are_refused_where_texts_are_read(values, message):
    with pytest.raises(UserError, match=message):
        resolve(values)


def test_images_of_another_size_than_the_models_are_refused():
    tokenizers = (ImageTokenizer((16, 16, 3)), predictor().tokenizers[1])
    with pytest.raises(UserError, match=r"model\.vision\.image_size=32 .* but the images are 16 x 16 x 3"):
        build_sized(settings(), predictor().task, tokenizers)


def test_the_parameters_are_those_of_a_formula():
    """Patches, positions, a target table, N encoder and N decoder layers of d 16, f 24; nothing for source tokens."""
    d, f, v = 16, 24, predictor().tokenizers[1].vocab_size
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    expected = (8 * 8 * 3 * d + d) + v * d + encoder + decoder
    params = predictor().params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected
    assert set(params) == {"patches", "target_embedding", "encoder", "decoder"}


def test_an_image_takes_no_room_of_its_caption():
    reader = predictor().inputs
    names = [f"{PICTURES}#{number}" for number in range(3)]
    pieces = [group[0] for group in reader.pieces([*map(verify.Request, names)])]
    batch, room = reader.arrays(pieces, 4)
    assert room == 6
    assert batch["limit"].tolist() == [6, 6, 6, 0]
    assert batch["image"].shape == (4, 32, 32, 3)
    encoded = reader.encode_pairs([(names[0], "a large red circle")])
    assert reader.pair_arrays(encoded, 1)["target_in"].shape == (1, 16)


@pytest.mark.slow
def test_every_check_of_decoding_passes(capsys, monkeypatch):
    monkeypatch.setattr(verify, "SENTENCES", 4)
    monkeypatch.setattr(verify, "BEAMS", 2)
    subject = verify.Subject(predictor(), predictor().config.decode)
    assert subject.origin == "of test set 'test'"
    for check in verify.checks_of(subject):
        assert verify.report(check, subject, 2e-4), capsys.readouterr().out
    config = dataclasses.replace(predictor().config, data=dataclasses.replace(predictor().config.data, test=("none",)))
    pieces, origin = subject._find(config)
    assert origin.startswith("random tokens, for data.source")
    assert {len(piece.ids) for piece in pieces} == {32 * 32 * 3}


def test_a_caption_shows_what_its_words_take_from_the_patches():
    pair = build(20)["test"][0]
    place = f"{draw_all([pair.source])}#0"
    (shown,) = predictor().attend([(place, pair.target)])
    encoder, cross = shown.encoder, shown.cross
    assert cross.part is Part.CROSS
    assert encoder.columns == cross.columns == tuple(f"{row},{column}" for row in range(1, 5) for column in range(1, 5))
    assert cross.rows == (*pair.target.split(), "</s>")
    np.testing.assert_allclose(cross.weights.sum(-1), 1, rtol=1e-5)
    assert shown.image.shape == (32, 32, 3)
    np.testing.assert_array_equal(shown.image.reshape(-1), predictor().tokenizers[0].encode([place])[0])


@pytest.mark.slow
def test_it_is_described_before_there_is_any_data():
    text = describe(settings())
    assert "full rows of 1,024 + 256 pixels + tokens" in text
    assert "forward FLOPs of one target token of an image, the target having" in text
    assert "patches" in text
    assert "source_embedding" not in text
