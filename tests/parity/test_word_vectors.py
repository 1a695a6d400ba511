"""The loss of skip-gram against gensim's, on the same pairs; skipped, and said so, where there is no gensim."""

import numpy as np
import pytest

from jformer.tools.skipgram import negative_sampling

gensim = pytest.importorskip("gensim", reason="parity with gensim needs it: pip install gensim==4.4.0")

WORDS, NOISE, NEGATIVES = "abcdef", "z", 5


def table(x):
    """Return log σ as gensim has it: of 1,000 numbers from -6 to 6, found by an index that counts 83 for each 1."""
    return -np.log1p(np.exp(-(np.floor((x + 6) * 83) * 12 / 1_000 - 6)))


def test_the_loss_of_a_batch_is_that_of_gensim():
    """Nearly every draw is the one word that is so frequent, so the drawn words are known; the rate is next to none."""
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
    there, others = (v[center] * u[context]).sum(1), np.einsum("bd,bnd->bn", v[center], u[drawn])
    as_gensim, exact = (-np.mean(f(there) + f(-others).sum(1)) for f in (table, lambda x: -np.log1p(np.exp(-x))))
    assert model.get_latest_training_loss() / len(center) == pytest.approx(as_gensim, rel=1e-4)
    assert float(negative_sampling((v, u), center, context, drawn)) == pytest.approx(exact, rel=1e-6)
    assert as_gensim == pytest.approx(exact, rel=0.02)  # what its table is off by
