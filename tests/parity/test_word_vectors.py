"""The loss of skip-gram against gensim's, on the same pairs; skipped, and said so, where there is no gensim."""

import numpy as np
import pytest

from jformer.skipgram import negative_sampling

gensim = pytest.importorskip("gensim", reason="parity with gensim needs it: pip install gensim==4.4.0")

WORDS, NOISE, NEGATIVES = "abcdef", "z", 5


def test_the_loss_of_a_batch_is_that_of_gensim():
    """Nearly every draw is the one word that is so frequent, so the drawn words are known; the rate is next to none.

    Of log σ gensim has a table of 1,000 entries from -6 to 6: a term is off by up to 0.012.
    """
    counts = dict.fromkeys(WORDS, 1) | {NOISE: 10**12}
    options = {"sg": 1, "hs": 0, "negative": NEGATIVES, "window": 1, "sample": 0, "min_count": 1, "workers": 1}
    model = gensim.models.Word2Vec(vector_size=12, **options)
    model.build_vocab_from_freq(counts)
    rng = np.random.default_rng(0)
    v, u = rng.normal(size=(2, len(counts), 12), scale=0.5).astype(np.float32)
    model.wv.vectors[:], model.syn1neg[:] = v, u
    lines = [rng.choice(list(WORDS), 2, replace=False).tolist() for _ in range(200)]
    model.train(lines, total_examples=200, epochs=1, start_alpha=1e-9, end_alpha=1e-9, compute_loss=True)
    np.testing.assert_allclose(model.wv.vectors, v, atol=1e-6)

    ids = np.array([[model.wv.key_to_index[word] for word in line] for line in lines])
    center, context = np.concatenate([ids, ids[:, ::-1]]).T
    drawn = np.full((len(center), NEGATIVES), model.wv.key_to_index[NOISE])
    ours = float(negative_sampling((v, u), center, context, drawn))
    assert ours == pytest.approx(model.get_latest_training_loss() / len(center), rel=0.01)
