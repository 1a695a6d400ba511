"""Each family without torch: options and parameters go there and back, all else is refused."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jformer.checkpoints.weights import abstract_params
from jformer.config import default_config, resolve
from jformer.data.tokenizers import learn
from jformer.errors import UserError
from jformer.models import ExecutionConfig, ModelConfig, build_model, param_shapes
from jformer.models.head_config import HeadConfig
from jformer.models.model_config import RelativeConfig
from jformer.models.vision_config import VisionConfig
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf import convert
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf import write_model as export
from jformer.tools.hf.families import LOGITS_BIAS, config_fields, model_config, table_of
from jformer.tools.hf.vit import image_steps, pixel_scale
from tests.tools.hf.small_runs import Arrays

SIZES = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 4, "max_length": 40}


def preset(name, **fields):
    model = resolve(default_config(name)).model
    options = {**SIZES, "execution": ExecutionConfig(unroll=1), **fields}
    return dataclasses.replace(model, **options)


M2M100 = preset("bart_base", norm="pre", embedding_norm=False)
CASES = {
    "gpt2": ("lm", preset("gpt2", norm_epsilon=1e-4)),
    "bert": ("mlm", preset("bert_base")),
    "roberta": ("classify", preset("bert_base").with_classes(3)),
    "distilbert": (
        "mlm", preset("bert_base", head=HeadConfig(pooler=True, transform=True, pooler_activation="relu")),
    ),
    "llama": ("lm", preset("llama_7b", num_kv_heads=2)),
    "t5": ("translate", preset("t5_small", num_decoder_layers=1, relative=RelativeConfig(8, 20))),
    "mt5": ("translate", preset("t5_1_1_small", d_k=6, d_v=6)),
    "bart": ("translate", preset("bart_base", head=HeadConfig(bias=True))),
    "mbart": ("translate", preset("bart_base", norm="pre", embedding_scale="input")),
    "marian": ("translate", preset("marian", num_decoder_layers=1, head=HeadConfig(bias=True))),
    "vit": ("classify", preset("vit_s16", vision=VisionConfig(12, 4)).with_classes(3)),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def state(name):
    """Return a model's parameters, drawn anew so that none is zero or one, and theirs."""
    model = CASES[name][1]
    shapes = param_shapes(build_model(model))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    return params, dict(tables.to_tensors(convert.FAMILIES[name].table(model), params))


def read_back(name, tensors):
    family, model = convert.FAMILIES[name], CASES[name][1]
    abstract = abstract_params(build_model(model), make_mesh(1))
    return tables.from_source(family.table(model), abstract, Arrays(tensors), family.is_unread)


def test_every_family_has_a_case_but_one_with_computed_positions():
    assert set(convert.FAMILIES) - set(CASES) == {"m2m_100"}


@every_case
def test_fields_read_back_give_the_model(name):
    task, model = CASES[name]
    family = convert.FAMILIES[name]
    fields = config_fields(family, model, task)
    back = model_config(family, fields, task, model.head.num_classes)
    assert config_fields(family, back, task) == fields
    places = None if name in ("gpt2", "t5", "mt5", "vit") else 42 if name == "roberta" else 40  # theirs begin at 2
    assert fields.get("max_position_embeddings") == places


@pytest.mark.parametrize(("name", "places", "longest"), [("gpt2", 1024, 1024), ("llama", 4096, 512), ("llama", 64, 64)])
def test_texts_may_be_as_long_as_learned_positions_say(name, places, longest, tmp_path):
    task, model = CASES[name]
    source = SimpleNamespace(directory=tmp_path)  # without generation_config.json
    found = convert.ForeignModel(
        convert.FAMILIES[name], {}, task, dataclasses.replace(model, max_length=places), source
    )
    side = learn("char", ["ab"], 50, "identity", False)
    assert convert.make_config(found, (side, side))[0].data.max_target_length == longest


@every_case
def test_parameters_come_back_bit_for_bit(name):
    params, theirs = state(name)
    assert all(array.flags.owndata or array.base is not None for array in theirs.values())
    jax.tree.map(np.testing.assert_array_equal, read_back(name, theirs), params)


@every_case
def test_what_does_not_fit_is_told_together(name):
    theirs = dict(state(name)[1])
    lost, wrong = sorted(theirs)[:2]
    del theirs[lost]
    theirs[wrong] = np.zeros((7, 5, 3, 2), np.float32)
    extra = f"{convert.FAMILIES[name].prefix}extra.weight"  # a tensor of a head would be left out
    theirs[extra] = np.zeros(3, np.float32)
    with pytest.raises(UserError) as error:
        read_back(name, theirs)
    for said in (f"{lost} (our", f"{wrong} (7, 5, 3, 2)", f"{extra} (3,) has no place in ours"):
        assert said in str(error.value)


@pytest.mark.parametrize(("name", "change"), [
    ("gpt2", {"norm": "post"}), ("gpt2", {"activation": "swiglu"}), ("bert", {"norm_type": "rmsnorm"}),
    ("bert", {"positions": "rotary"}), ("bart", {"positions": "transformer_xl"}),
    ("llama", {"positions": "learned"}), ("llama", {"window": 4}), ("t5", {"attention_scale": "sqrt"}),
    ("mt5", {"tied_output": True}), ("bart", {"num_kv_heads": 2}), ("marian", {"embedding_norm": True}),
    ("vit", {"bias": False}), ("t5", {"d_v": 4}),
    ("gpt2", {"parametrization": "mup"}), ("bart", {"parametrization": "mup"}),
])  # fmt: skip
def test_options_that_a_family_has_not_are_refused_by_name(name, change):
    task, model = CASES[name]
    (option,) = change
    with pytest.raises(UserError, match=rf"model\.{option}="):
        config_fields(convert.FAMILIES[name], dataclasses.replace(model, **change), task)


def test_of_a_group_of_options_the_one_that_a_family_has_not_is_named():
    model = CASES["bert"][1].with_classes(3, each=True)
    chain = dataclasses.replace(model, head=dataclasses.replace(model.head, crf=True))
    with pytest.raises(UserError, match=r"^model\.head\.crf=True: bert has only False there$"):
        config_fields(convert.FAMILIES["bert"], chain, "tag")


@pytest.mark.parametrize(("name", "change", "says"), [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ("bert", {"hidden_act": "mish"}, "hidden_act='mish'"),
    ("bert", {"hidden_size": "768"}, "hidden_size='768' must be a number"),
    ("bert", {"num_attention_heads": 5}, "num_heads=5 must divide"),
    ("roberta", {"pad_token_id": 0}, "pad_token_id=0"),
    ("m2m_100", {"pad_token_id": 0}, "pad_token_id=0"),
    ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
    ("bert", {"type_vocab_size": 0.5}, "type_vocab_size=0.5 must be a number"),
    ("vit", {"patch_size": "4"}, "patch_size='4' must be a number"),
    ("llama", {"rope_theta": 500_000.0}, "rotary positions"),
    ("llama", {"model_type": "granite", "residual_multiplier": 0.22}, "residual_multiplier=0.22"),
    ("llama", {"model_type": "gemma"}, "model_type='gemma'"),
    ("llama", {"attention_bias": True}, "attention_bias and mlp_bias differ"),
    ("bart", {"decoder_ffn_dim": 7}, "decoder_ffn_dim=7"),
    ("vit", {"qkv_bias": False}, "qkv_bias=False"),
])  # fmt: skip
def test_fields_that_ask_for_what_we_have_not_are_refused_by_name(name, change, says):
    task, model = CASES.get(name, ("translate", M2M100))
    family = convert.FAMILIES[name]
    fields = {key: value for key, value in config_fields(family, model, task).items() if key != "rope_parameters"}
    with pytest.raises(UserError, match=says):
        model_config(family, {**fields, **change}, task, model.head.num_classes)


@pytest.mark.parametrize(("task", "classes", "output"), [("tag", 3, "classifier"), ("qa", 2, "qa_outputs")])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_classes_of_every_position_come_back_without_a_pooler(name, task, classes, output):
    family, (_, model) = convert.FAMILIES[name], CASES[name]
    head = dataclasses.replace(model.head, num_classes=0)
    model = dataclasses.replace(model, head=head).with_classes(classes, each=True)
    fields = config_fields(family, model, task)
    assert model_config(family, fields, task, classes).head == model.head
    table = table_of(family, model, task)
    abstract = abstract_params(build_model(model), make_mesh(1))
    params = jax.tree.map(lambda leaf: np.random.default_rng(0).standard_normal(leaf.shape, np.float32), abstract)
    theirs = dict(tables.to_tensors(table, params))
    heads = {key for key in theirs if any(part in key for part in ("pooler", "classifier", "outputs"))}
    assert heads == {f"{output}.weight", f"{output}.bias"}
    back = tables.from_source(table, abstract, Arrays(theirs), family.is_unread)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_marian_names_even_features_its_first_half():
    params, theirs = state("marian")
    ours = params["source_embedding"]["embedding"]
    np.testing.assert_array_equal(theirs["model.shared.weight"], np.hstack([ours[:, ::2], ours[:, 1::2]]))


def test_positions_that_are_computed_may_not_have_been_trained():
    family, model = convert.FAMILIES["m2m_100"], M2M100
    assert not config_fields(family, model, "translate")[LOGITS_BIAS]
    abstract = param_shapes(build_model(model))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract)
    with pytest.raises(UserError, match="source_input/positions/embedding was trained"):
        dict(tables.to_tensors(family.table(model), params))


def test_an_encoder_without_segments_is_no_bert(tmp_path):
    model = preset("bert_base")
    model = dataclasses.replace(model, head=dataclasses.replace(model.head, num_segments=0, pooler_activation="relu"))
    assert export.express("mlm", model, tmp_path)[0].model_type == "distilbert"
    for family in ("bert", "roberta"):
        with pytest.raises(UserError, match=r"model\.head\.num_segments=0: it looks up token type 0"):
            export.express("mlm", model, tmp_path, family)


def test_a_run_that_no_family_has_says_why(tmp_path):
    with pytest.raises(UserError, match=r"gpt2: model\.norm='sandwich'.*llama: "):
        export.express("lm", preset("gpt2", norm="sandwich"), tmp_path)
    with pytest.raises(UserError, match=r"--family='gpt3'; choose one of: .*did you mean 'gpt2'"):
        export.express("lm", ModelConfig(), tmp_path, "gpt3")


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, ((0.5,), (0.5,))),
    ({"rescale_factor": 0.00392156862745098, "image_mean": [0.1, 0.2], "image_std": 0.5}, ((0.1, 0.2), (0.5,))),
    ({"do_normalize": False, "image_mean": [0.1] * 3}, ((0.0,), (1.0,))),
    ({"rescale_factor": 2 / 255, "image_mean": [1.0] * 3, "image_std": [0.5] * 3}, ((0.5,), (0.25,))),
])  # fmt: skip
def test_whatever_pixels_are_scaled_by_is_a_mean_and_a_deviation(fields, expected):
    assert pixel_scale(fields) == tuple(pytest.approx(each) for each in expected)


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, {}),
    ({"do_resize": False, "size": 9}, {}),
    ({"size": 8, "resample": 3}, {"sides": [8, 8], "filter": 3}),
    ({"size": 9, "image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "crop_size": 8},
     {"sides": [9], "filter": 2}),
    ({"size": 9}, "size=9 gives other images than config.json's image_size=8"),
    ({"size": {"shortest_edge": 8}}, "size={'shortest_edge': 8} gives other images"),
    ({"size": {"longest_edge": 8}}, "size={'longest_edge': 8} is not implemented: height and width, or shortest_edge"),
    ({"size": 8, "crop_pct": 0.9}, r"crop_pct=0\.9 is not implemented"),
])  # fmt: skip
def test_steps_that_bring_images_to_the_models_size(fields, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            image_steps(fields, 8)
    else:
        assert image_steps(fields, 8) == expected


def row_of(name, family):
    """Return the row of docs/weights.md about a family: the fields of which one value is implemented."""
    fixed = ", ".join(f"`{key}={value!r}`" for key, value in sorted(family.theirs.items()))
    return f"| `{name}` | {fixed} |"


def test_the_page_lists_the_fields_of_which_one_value_is_implemented():
    page = (Path(__file__).parents[3] / "docs" / "weights.md").read_text(encoding="utf-8")
    rows = [row_of(name, family) for name, family in convert.FAMILIES.items() if family.theirs]
    missing = [row for row in rows if row not in page]
    assert not missing, "rows of docs/weights.md should be:\n" + "\n".join(missing)
