"""Word vectors become rows of the table that embeds tokens, of whatever size; what is inherited is finite."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.checkpoints.weights import adopt, load_parent
from jformer.config import resolve, save_config
from jformer.data.tokenizers import LabelTokenizer, NumberTokenizer, learn
from jformer.errors import UserError
from jformer.integrity import seal
from jformer.models.lora_config import LoraConfig
from jformer.parallel.mesh import make_mesh
from jformer.training import initial_state
from jformer.training.initial_state import in_unit, inherit, other_options, put_vectors


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


def test_vectors_of_either_text_of_a_pair_go_into_the_table_that_reads_both(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("jformer.parallel.processes.check_same", lambda fields: told.extend(fields))
    path = tmp_path / "vectors.txt"
    path.write_text("sea 1 2 3 4\n")
    words = learn("word", ["calm sea"], 10, "identity", False)
    model = {"shared_embedding": False, "d_model": 4, "num_heads": 1}
    for side in ("source", "target"):
        config = resolve({"task": "embed", "model": model, "train": {f"{side}_vectors": str(path)}})
        blank = {"source_embedding": {"embedding": jnp.zeros((words.vocab_size, 4))}}  # of an encoder alone
        params, _ = put_vectors(config.train, config.model, (words, words), blank)
        assert params["source_embedding"]["embedding"][words.tokens.index("sea")].tolist() == [1, 2, 3, 4]
    assert told == ["the vectors of train.source_vectors", "the vectors of train.target_vectors"]


def parent_run(path, target, model=None):
    """Write what a child reads of a run beside its parameters: a config, and tokenizers with this target."""
    words = learn("word", ["calm sea"], 10, "identity", False)
    (path / "tokenizer").mkdir(parents=True)
    words.save(path / "tokenizer", "source")
    (target or words).save(path / "tokenizer", "target")
    seal(path / "tokenizer")
    save_config(resolve({"model": model or {}}), path / "config.json")
    return resolve({"train": {"init_from": str(path)}}), words


@pytest.mark.parametrize("value", [0.0, jnp.nan, jnp.inf])
def test_inherited_parameters_are_finite(tmp_path, monkeypatch, value):
    fresh = {"embedding": {"embedding": jnp.zeros((4, 3))}}
    parent = SimpleNamespace(params={"embedding": {"embedding": jnp.full((4, 3), value)}}, digest="")
    monkeypatch.setattr(initial_state, "load_parent", lambda *_, **options: parent)
    config, words = parent_run(tmp_path / "parent", None)
    if value == 0:
        notes = inherit(config, (words, words), make_mesh(1), fresh)[1]
        assert notes == [f"init_from {tmp_path / 'parent'}: 1 parameter copied"]
        return
    with pytest.raises(UserError, match=r"train\.init_from='.*parent': embedding/embedding is not finite there"):
        inherit(config, (words, words), make_mesh(1), fresh)


@pytest.mark.parametrize(
    ("axis", "width", "split"),
    [("fsdp", 3, 3), ("fsdp", 4, 2), ("tensor", 4, 4)],  # where one does not divide, as 2 not 5 tokens, all is whole
)
def test_a_parent_is_split_as_the_run_is(tmp_path, axis, width, split):
    parent_run(tmp_path, None)
    params = {"embedding": {"embedding": jnp.ones((5, width))}, "norm": {"scale": jnp.ones(4)}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params}, {"step": 0}, None)
    found = load_parent(str(tmp_path), make_mesh(1, **{axis: 2}), whole=()).params["embedding"]["embedding"]
    assert found.sharding.shard_shape(found.shape) == (5, split)
    np.testing.assert_array_equal(found, params["embedding"]["embedding"])


def test_a_head_is_copied_for_the_same_labels_alone(tmp_path, monkeypatch):
    def labels(*names):
        return LabelTokenizer("label", "identity", names)

    config, words = parent_run(tmp_path, labels("no", "yes"))
    old, new = ({"classifier": {"kernel": jnp.full((3, 2), value)}} for value in (1.0, 2.0))
    monkeypatch.setattr(initial_state, "load_parent", lambda *_, **options: SimpleNamespace(params=old, digest=""))
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
    for other in (words, NumberTokenizer(2.0, 1.0)):  # spans of qa, and numbers
        params, notes, _ = inherit(config, (None, other), make_mesh(1), new)
        assert params["classifier"]["kernel"].tolist() == new["classifier"]["kernel"].tolist()
        assert notes[-1] == f"init_from {tmp_path}: its head has answers of another kind"


def test_a_head_over_a_vocabulary_keeps_the_rows_of_its_tokens():
    old = {"head": {"output": {"kernel": jnp.arange(10.0).reshape(2, 5)}, "bias": jnp.arange(5.0)}}
    fewer = {"head": {"output": {"kernel": jnp.zeros((2, 3))}, "bias": jnp.zeros(3)}}
    found, notes = adopt(old, fewer, "a")
    assert found["head"]["output"]["kernel"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert (found["head"]["bias"].tolist(), notes[1]) == ([0, 1, 2], "init_from a: head/bias: 3 of 3 rows copied, of 5")
    more = {"head": {"output": {"kernel": jnp.full((2, 6), 9.0)}, "bias": jnp.full(6, 9.0)}}
    found, _ = adopt(old, more, "a")
    assert found["head"]["output"]["kernel"].tolist() == [[0, 1, 2, 3, 4, 9], [5, 6, 7, 8, 9, 9]]
    with pytest.raises(UserError, match=r"lacks part of head/bias: add '\^head/' to model\.lora\.also"):
        adopt(old, more, "a", LoraConfig(rank=2))


def test_only_positions_of_texts_may_be_more_or_fewer():
    old, new = ({"input": {"positions": {"embedding": jnp.full((rows, 2), rows)}}} for rows in (3, 5))
    found, _ = adopt(old, new, "a")
    assert found["input"]["positions"]["embedding"][:, 0].tolist() == [3, 3, 3, 5, 5]
    patches = {"patches": {"kernel": jnp.zeros((2, 2))}}
    with pytest.raises(UserError, match=r"has \(3, 2\) for input/positions/embedding, this model needs \(5, 2\)"):
        adopt({**old, **patches}, {**new, **patches}, "a")  # of an image: other rows are other places
    buckets = ({"encoder": {"relative": {"embedding": jnp.zeros((rows, 2))}}} for rows in (8, 16))
    with pytest.raises(UserError, match="for encoder/relative/embedding"):
        adopt(*buckets, "a")
    assert adopt({**old, **patches}, {**new, **patches}, "a", new=False)[1]  # of adapters that began so


def test_a_new_head_that_would_be_frozen_is_refused():
    old, new = (
        {"encoder": {"kernel": jnp.ones(2)}},
        {"encoder": {"kernel": jnp.zeros(2)}, "classifier": {"kernel": jnp.zeros(3)}},
    )
    with pytest.raises(UserError, match=r"lacks part of classifier/kernel, which train\.freeze='kernel\$' would leave"):
        adopt(old, new, "a", freeze=("kernel$",))
    with pytest.raises(UserError, match="as it was drawn: leave it out"):
        adopt(old, new, "a", freeze=("^classifier/",))
    assert len(adopt(old, new, "a", freeze=("kernel$",), new=False)[1]) == 2  # adapters that began so resume
    assert len(adopt(old, new, "a", freeze=("^(?!classifier/).*(?:kernel$)",))[1]) == 2


def test_a_model_that_reads_the_same_parameters_in_another_way_is_told(tmp_path, monkeypatch):
    params = {"encoder": {"kernel": jnp.ones(2)}}
    monkeypatch.setattr(initial_state, "load_parent", lambda *_, **options: SimpleNamespace(params=params, digest=""))
    own = {"num_heads": 4, "dropout": 0.3, "vocab_size": 7, "dtype": "bfloat16"}
    config, words = parent_run(tmp_path, None, own)
    notes = inherit(config, (words, words), make_mesh(1), params)[1]
    shared = dataclasses.replace(config.model, shared_layers=True, num_layers=9)
    assert "model.num_layers=6, and this run has 9" in other_options(str(tmp_path), shared)[0]
    assert notes[1:] == [f"init_from {tmp_path}: it was trained with model.num_heads=4, and this run has 8"]


def test_a_head_of_numbers_is_brought_into_the_unit_of_the_run(tmp_path, monkeypatch):
    head = {"kernel": jnp.full((3, 1), 2.0), "bias": jnp.array([0.5])}
    parent = SimpleNamespace(params={"classifier": head}, digest="")
    monkeypatch.setattr(initial_state, "load_parent", lambda *_, **options: parent)
    config, words = parent_run(tmp_path, NumberTokenizer(2.0, 3.0))
    fresh = {"classifier": {"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)}}
    found = inherit(config, (words, NumberTokenizer(5.0, 6.0)), make_mesh(1), fresh)[0]["classifier"]
    x = np.array([[1.0, -2.0, 0.25]])
    theirs, ours = ((x @ np.asarray(each["kernel"]) + np.asarray(each["bias"])).item() for each in (head, found))
    assert ours * 6 + 5 == pytest.approx(theirs * 3 + 2)
    same = inherit(config, (words, NumberTokenizer(2.0, 3.0)), make_mesh(1), fresh)[0]["classifier"]
    assert same["kernel"].tolist() == head["kernel"].tolist()
    lora = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig(rank=2)))
    with pytest.raises(UserError, match=r"mean 2 and the deviation 3, not 5 and 6: add '\^classifier/'"):
        inherit(lora, (words, NumberTokenizer(5.0, 6.0)), make_mesh(1), fresh)
    biases = dataclasses.replace(lora.model.lora, also=("bias$",))
    with pytest.raises(UserError, match=r"add '\^classifier/'"):
        in_unit({"classifier": head}, NumberTokenizer(2.0, 3.0), NumberTokenizer(5.0, 6.0), "a", biases)
    heads = {"classifier": {**fresh["classifier"], "lora_a": {"kernel": jnp.zeros((3, 2))}}}
    model = dataclasses.replace(config.model, lora=LoraConfig(rank=2, dropout=0.1, kernels="kernel$"))
    dropping = dataclasses.replace(config, model=model)
    with pytest.raises(UserError, match=r"dropout=0\.1 does not reach the adapter classifier/lora_a: set it to 0"):
        inherit(dropping, (words, words), make_mesh(1), heads)
    resumed = inherit(lora, (words, NumberTokenizer(5.0, 6.0)), make_mesh(1), fresh, new=False)[0]["classifier"]
    assert resumed["kernel"].tolist() == head["kernel"].tolist()  # as it began
