"""Our parameters under Marian's names and back; with torch installed, also that their model computes what ours does."""

import jax
import numpy as np
import pytest

from jformer.data.symbols import BOS, EOS, PAD
from jformer.errors import UserError
from jformer.hf import marian
from jformer.models import ModelConfig
from tests.conftest import make_batch, run

MARIAN = {"num_decoder_layers": 1, "d_ff": 40}


def test_from_state_gives_back_what_to_state_was_given(tiny):
    model, params = tiny(**MARIAN)
    back = marian.from_state(model.config, marian.to_state(model.config, params))
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_even_features_are_their_first_half(tiny):
    model, params = tiny(**MARIAN)
    state = marian.to_state(model.config, params)
    ours = np.asarray(params["source_embedding"]["embedding"])
    np.testing.assert_array_equal(state["model.shared.weight"], np.hstack([ours[:, ::2], ours[:, 1::2]]))
    assert state["model.decoder.layers.0.fc1.weight"].shape == (40, 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("norm", "pre"), ("positions", "rotary"), ("activation", "swiglu"), ("tied_output", False)),
        *(("num_kv_heads", 2), ("d_v", 4), ("bias", False), ("family", "decoder"), ("shared_embedding", False)),
    ],
)
def test_what_marian_cannot_express_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"model\.{field}={value!r}: Marian's"):
        marian.check(ModelConfig(**{field: value}))


def test_another_state_is_refused(tiny):
    model, params = tiny(**MARIAN)
    state = marian.to_state(model.config, params)
    with pytest.raises(UserError, match="bias of the logits"):
        marian.from_state(model.config, state | {"final_logits_bias": np.ones((1, 50))})
    with pytest.raises(UserError, match=r"model\.encoder\.layers\.2\.fc1\.weight has no place"):
        marian.from_state(model.config, state | {"model.encoder.layers.2.fc1.weight": np.ones(3)})
    with pytest.raises(UserError, match=r"fc2\.bias is missing"):
        marian.from_state(
            model.config, {name: x for name, x in state.items() if "encoder.layers.1.fc2.bias" not in name}
        )


@pytest.mark.parametrize("fields", [{}, {"activation": "gelu_tanh", "embedding_scale": "none"}])
def test_their_model_computes_what_ours_does(tiny, fields):
    torch = pytest.importorskip("torch", reason="comparing needs: pip install torch transformers")
    transformers = pytest.importorskip("transformers")
    model, params = tiny(**MARIAN, **fields)
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**marian.options(model.config, PAD, BOS, EOS))).eval()
    state = {name: torch.tensor(array) for name, array in marian.to_state(model.config, params).items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert {*missing} == {*marian.COMPUTED} and not unexpected
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = model.config.norm_epsilon
    batch = make_batch([9, 4, 6], [7, 8, 2])
    ids = {name: torch.tensor(array).long() for name, array in batch.items()}
    with torch.no_grad():
        logits = theirs(
            input_ids=ids["source"], attention_mask=ids["source_segments"], decoder_input_ids=ids["target_in"]
        ).logits.numpy()
    real = batch["target_segments"] > 0
    np.testing.assert_allclose(np.asarray(run(model, params, batch))[real], logits[real], atol=3e-5)
