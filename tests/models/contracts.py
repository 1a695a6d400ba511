"""What every model keeps, as checks of one model over given batches: presets and rare recurrent ones share them."""

import functools

import numpy as np

from tests.conftest import run


def check_causality(model, params, batch):
    """No position sees a later target token; target position 4 is changed."""
    changed = {**batch, "target_in": batch["target_in"].copy()}
    changed["target_in"][:, 4] = 3
    before, after = (np.asarray(run(model, params, b)) for b in (batch, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-3


def check_padding(model, params, alone, wide, atol):
    """An example of 7 source tokens gives the same alone and as the first row of a larger batch."""
    for name, x in alone.items():
        wide[name][0] = 0
        wide[name][(0, slice(x.shape[1])) if x.ndim > 1 else 0] = x[0]
    wide["source"][0, 7:] = 9  # what stands in padding does not matter
    expected = run(model, params, alone)[0]
    np.testing.assert_allclose(run(model, params, wide)[0, : len(expected)], expected, atol=atol)


def check_cache(model, params, batch, atol):
    """Token by token after a ragged prompt, two rows of six target tokens give what the whole pass gives."""
    apply = functools.partial(run, model, params)
    tokens = batch["target_in"]
    cache = apply(apply(batch, method="encode"), 2, 12, method="start")
    valid = np.array([[1, 1, 1], [1, 0, 0]], bool)
    hidden, cache = apply(cache, tokens[:, :3], valid, method="extend")
    steps = [[np.asarray(hidden[0, i]) for i in range(3)], [np.asarray(hidden[1, 0])]]
    for i in range(3):
        token = np.array([[tokens[0, 3 + i]], [tokens[1, 1 + i]]])
        hidden, cache = apply(cache, token, np.ones((2, 1), bool), method="extend")
        for row in range(2):
            steps[row].append(np.asarray(hidden[row, 0]))
    full = np.asarray(apply(batch, method="hidden"))
    np.testing.assert_allclose(steps[0], full[0], atol=atol)
    np.testing.assert_allclose(steps[1], full[1, :4], atol=atol)
    assert cache["position"].tolist() == [6, 4]
