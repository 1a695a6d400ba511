"""Word vectors become rows of the table that embeds tokens, of whatever size; what is inherited is finite."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jformer.checkpoints.weights import adopt
from jformer.config import resolve
from jformer.data.tokenizers import LabelTokenizer, learn
from jformer.errors import UserError
from jformer.integrity import seal
from jformer.models.lora_config import LoraConfig
from jformer.parallel.mesh import make_mesh
from jformer.training import initial_state
from jformer.training.initial_state import inherit, put_vectors


def test_vectors_have_the_size_of_a_recurrent_models_embedding(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("sea 1 2 3\n")
    words = learn("word", ["calm sea"], 10, "identity", False)
    model = {"family": "decoder", "tied_output": False, "d_model": 8, "recurrent": {"cell": "gru", "embedding_size": 3}}
    config = resolve({"task": "lm", "model": model, "train": {"target_vectors": str(path)}})
    blank = {"embedding": {"embedding": jnp.zeros((words.vocab_size, 3))}}
    params, _ = put_vectors(config.train, config.model, (words, words), blank)
    assert params["embedding"]["embedding"][words.tokens.index("sea")].tolist() == [1, 2, 3]
    wider = dataclasses.replace(config.model, recurrent=dataclasses.replace(config.model.recurrent, embedding_size=0))
    with pytest.raises(UserError, match=r"vectors of 3 numbers, the model's are of 8"):
        put_vectors(config.train, wider, (words, words), params)


def test_vectors_of_either_text_of_a_pair_go_into_the_table_that_reads_both(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("sea 1 2 3 4\n")
    words = learn("word", ["calm sea"], 10, "identity", False)
    model = {"shared_embedding": False, "d_model": 4, "num_heads": 1}
    for side in ("source", "target"):
        config = resolve({"task": "embed", "model": model, "train": {f"{side}_vectors": str(path)}})
        blank = {"source_embedding": {"embedding": jnp.zeros((words.vocab_size, 4))}}  # of an encoder alone
        params, _ = put_vectors(config.train, config.model, (words, words), blank)
        assert params["source_embedding"]["embedding"][words.tokens.index("sea")].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("value", [0.0, jnp.nan, jnp.inf])
def test_inherited_parameters_are_finite(monkeypatch, value):
    fresh = {"embedding": {"embedding": jnp.zeros((4, 3))}}
    parent = SimpleNamespace(params={"embedding": {"embedding": jnp.full((4, 3), value)}}, digest="")
    monkeypatch.setattr(initial_state, "load_parent", lambda *_: parent)
    config = resolve({"train": {"init_from": "runs/parent"}})
    if value == 0:
        assert inherit(config, (None, None), make_mesh(1), fresh)[1] == ["init_from runs/parent: 1 parameter copied"]
        return
    with pytest.raises(UserError, match=r"train\.init_from='runs/parent': embedding/embedding is not finite there"):
        inherit(config, (None, None), make_mesh(1), fresh)


def test_a_head_is_copied_for_the_same_labels_alone(tmp_path, monkeypatch):
    def labels(*names):
        return LabelTokenizer("label", "identity", names)

    (tmp_path / "tokenizer").mkdir()
    learn("word", ["calm sea"], 10, "identity", False).save(tmp_path / "tokenizer", "source")
    labels("no", "yes").save(tmp_path / "tokenizer", "target")
    seal(tmp_path / "tokenizer")
    old, new = ({"classifier": {"kernel": jnp.full((3, 2), value)}} for value in (1.0, 2.0))
    monkeypatch.setattr(initial_state, "load_parent", lambda *_: SimpleNamespace(params=old, digest=""))
    config = resolve({"train": {"init_from": str(tmp_path)}})
    params, notes, _ = inherit(config, (None, labels("bad", "good")), make_mesh(1), new)
    assert params["classifier"]["kernel"].tolist() == new["classifier"]["kernel"].tolist()
    assert notes == [
        f"init_from {tmp_path}: 0 parameters copied",
        f"init_from {tmp_path}: classifier/kernel is newly initialised",
        f"init_from {tmp_path}: its labels are no, yes, those of this run bad, good",
    ]
    with pytest.raises(UserError, match=r"lacks part of classifier/kernel: add '\^classifier/' to model\.lora\.also"):
        adopt({}, new, "runs/parent", LoraConfig(rank=2))  # adapters alone cannot learn a head
    params, notes, _ = inherit(config, (None, labels("no", "yes")), make_mesh(1), new)
    assert params["classifier"]["kernel"].tolist() == old["classifier"]["kernel"].tolist()
    assert notes == [f"init_from {tmp_path}: 1 parameter copied"]
