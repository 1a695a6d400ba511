"""A trained run answers as well in bfloat16, which `dtype=auto` may choose, as in float32. Trains for a minute."""

import pytest

import jformer
from tests import small_run


@pytest.mark.slow
def test_bfloat16_costs_no_quality(tmp_path):
    """BLEU within 0.2 and exact match within 0.1 points, of a run that has learned its task."""
    config = small_run.get_config()
    config.data.update(name="copy", num_pairs=4_000)
    config.model.update(d_model=64, d_ff=128, num_heads=4, dropout=0.0)
    config.optim.update(schedule="cosine", learning_rate=4e-3, warmup=50)
    config.train.update(num_steps=900, eval_every=300, checkpoint_every=300)
    assert jformer.train(config, tmp_path)
    found = {}
    for dtype in ("float32", "bfloat16"):
        scores = jformer.evaluate(tmp_path, tmp_path / dtype, dtype=dtype)["test"]
        assert scores["settings"]["decode"]["dtype"] == dtype
        found[dtype] = scores["bleu"]["score"], 100 * scores["exact_match"]["score"]
    assert found["float32"][1] > 99
    assert found["bfloat16"][0] == pytest.approx(found["float32"][0], abs=0.2)
    assert found["bfloat16"][1] == pytest.approx(found["float32"][1], abs=0.1)
