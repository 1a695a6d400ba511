"""Every family computes what the published models compute, as Hugging Face Transformers has them.

Tiny models with random weights: theirs made of their configuration's defaults, ours of a preset, both at the same
small sizes. So what is compared are the preset's choices. jformer needs neither torch nor transformers.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jformer.config import default_config, resolve
from jformer.hf import marian
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.config import RelativeConfig, VisionConfig
from jformer.presets import PRESETS
from tests.conftest import run
from tests.parity import weights

WANTED = "comparing with the published models needs: pip install torch transformers"
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

TOLERANCE = 5e-5  # in standard deviations of the logits, float32
V, D, F, H, N, LONGEST, CLASSES = 50, 32, 48, 4, 2, 160, 3
SIZES = {"vocab_size": V, "d_model": D, "d_ff": F, "num_heads": H, "num_layers": N, "max_length": LONGEST}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model on both sides."""

    ours: ModelConfig
    theirs: str  # a class of transformers
    options: dict[str, Any]  # of its configuration: sizes, and choices that are not its defaults
    table: dict[str, Any]
    neighbour: dict[str, Any]  # the choice of ours nearest to theirs that has the same parameters
    unused: dict[str, str] = dataclasses.field(default_factory=dict)  # their parameters not read in full → why


def preset(name, **fields):
    """Return a preset at small sizes."""
    return dataclasses.replace(resolve(default_config(name)).model, **SIZES, **fields)


BERT = preset("bert_base")
BERT_SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_attention_heads": H, "num_hidden_layers": N,
    "max_position_embeddings": LONGEST,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": V, "n_embd": D, "n_inner": F, "n_head": H, "n_layer": N, "n_positions": LONGEST}
T5_SIZES = {"vocab_size": V, "d_model": D, "d_ff": F, "num_heads": H, "num_layers": N}
BART_SIZES = {
    "vocab_size": V, "d_model": D, "max_position_embeddings": LONGEST, "encoder_layers": N, "decoder_layers": N,
    "encoder_ffn_dim": F, "decoder_ffn_dim": F, "encoder_attention_heads": H, "decoder_attention_heads": H,
}  # fmt: skip
# What their conversion from Marian sets for OPUS-MT; 'swish' is the authors' setting.
OPUS_MT = {
    "activation_function": "swish", "scale_embedding": True, "pad_token_id": V - 1, "decoder_start_token_id": V - 1,
}  # fmt: skip
VISION = VisionConfig(image_size=12, patch_size=4)

PAIRS = {
    "bert_base": Pair(
        BERT, "BertForMaskedLM", BERT_SIZES, weights.BERT_TOKENS, {"activation": "gelu_tanh"},
    ),
    "bert_base as a classifier": Pair(
        BERT.with_classes(CLASSES), "BertForSequenceClassification", {**BERT_SIZES, "num_labels": CLASSES},
        weights.BERT_CLASSES, {"activation": "gelu_tanh"},
    ),
    "gpt2": Pair(
        preset("gpt2"), "GPT2LMHeadModel", {**GPT2_SIZES, "bos_token_id": None, "eos_token_id": None}, weights.GPT2,
        {"activation": "gelu"},
    ),
    "llama_7b": Pair(
        preset("llama_7b", num_kv_heads=2), "LlamaForCausalLM", {**BERT_SIZES, "num_key_value_heads": 2},
        weights.LLAMA, {"activation": "geglu"},
    ),
    "t5_small": Pair(
        preset("t5_small"), "T5ForConditionalGeneration", {**T5_SIZES, "d_kv": D // H}, weights.T5,
        {"relative": RelativeConfig(max_distance=256)},
    ),
    "t5_1_1_small": Pair(
        preset("t5_1_1_small", d_k=6, d_v=6), "T5ForConditionalGeneration",
        {**T5_SIZES, "d_kv": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, weights.T5_1_1,
        {"activation": "geglu"},
    ),
    "bart_base": Pair(
        preset("bart_base"), "BartForConditionalGeneration", BART_SIZES, weights.BART, {"activation": "gelu_tanh"},
        {
            "final_logits_bias": "not of the model, zero",
            "model.encoder.embed_positions.weight": "two rows that stand for no position",
            "model.decoder.embed_positions.weight": "two rows that stand for no position",
        },
    ),
    "marian": Pair(
        preset("marian"), "MarianMTModel", {**BART_SIZES, **OPUS_MT}, weights.MARIAN, {"activation": "gelu"},
    ),
    "vit_s16": Pair(
        dataclasses.replace(preset("vit_s16"), vision=VISION).with_classes(CLASSES), "ViTForImageClassification",
        # The authors' code has this epsilon; the default of transformers is BERT's.
        {**BERT_SIZES, "image_size": 12, "patch_size": 4, "num_labels": CLASSES, "layer_norm_eps": 1e-6}, weights.VIT,
        {"activation": "gelu_tanh"},
    ),
}  # fmt: skip
every_pair = pytest.mark.parametrize("name", PAIRS)


@functools.cache
def build_theirs(name):
    """Return their model with every parameter drawn: scales about one, all else about zero."""
    cls = getattr(transformers, PAIRS[name].theirs)
    model = cls(cls.config_class(**PAIRS[name].options)).eval()
    if "head/output" in PAIRS[name].table:  # T5 1.1 comes tied, its published weights are not
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    rng = np.random.default_rng(0)
    for path, weight in model.named_parameters():
        if weight.requires_grad:  # Marian's sinusoids are a parameter, frozen
            centre = weight.ndim == 1 and path.endswith("weight")
            weight.data = torch.tensor(centre + 0.2 * rng.standard_normal(weight.shape), dtype=torch.float32)
    return model


def read_state(model):
    """Return names → arrays: parameters once, however many names they have, and the buffers that are saved."""
    saved = model.state_dict()
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in saved]
    return {name: saved[name].numpy() for name in names}


@functools.cache
def convert(name):
    """Return our parameters, from theirs."""
    pair = PAIRS[name]
    shapes = jax.eval_shape(functools.partial(init_params, build_model(pair.ours)), jax.random.key(0))
    state = read_state(build_theirs(name))
    if name == "marian":
        return marian.from_state(pair.ours, state)
    return weights.fill(shapes, state, pair.table, pair.unused)


def draw_batch():
    """Return texts of uneven length, and images. In padding there are tokens too: only the segments tell."""
    rng, batch = np.random.default_rng(1), {}
    for side, tokens, lengths in (("source", "source", [LONGEST, 90, 7]), ("target", "target_in", [12, 150, 70])):
        shape = (len(lengths), max(lengths))
        batch[tokens] = rng.integers(0, V, shape).astype(np.int32)
        batch[f"{side}_segments"] = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int32)
        batch[f"{side}_positions"] = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    types = (batch["source_positions"] > 4).astype(np.int32)
    image = rng.integers(0, 256, (3, VISION.image_size, VISION.image_size, VISION.channels)).astype(np.uint8)
    return batch | {"source_types": types, "image": image}


def run_theirs(model, family, batch):
    """Return their logits."""
    ids = {name: torch.tensor(x).long() for name, x in batch.items()}
    source = {"input_ids": ids["source"], "attention_mask": ids["source_segments"]}
    target = {"input_ids": ids["target_in"], "attention_mask": ids["target_segments"]}
    mean, std = (getattr(transformers.image_utils, f"IMAGENET_STANDARD_{name}") for name in ("MEAN", "STD"))
    pixels = (batch["image"] / 255 - np.array(mean)) / np.array(std)
    inputs = {
        "encoder": {**source, "token_type_ids": ids["source_types"]},
        "decoder": target,
        "encdec": {**source, **{f"decoder_{name}": x for name, x in target.items()}},
        "vit": {"pixel_values": torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)},
    }
    with torch.no_grad():
        return model(**inputs[family]).logits.numpy()


def predictions(config, batch):
    """Return where the model predicts: bool [b t], or [b 1] for a classifier."""
    if config.head.num_classes:
        return np.ones((3, 1), bool)
    return batch["source_segments" if config.family == "encoder" else "target_segments"] > 0


@functools.cache
def expected(name):
    """Return (a batch, their logits [b t v] for it)."""
    batch = draw_batch()
    logits = run_theirs(build_theirs(name), PAIRS[name].ours.family, batch)
    return batch, logits[:, None] if logits.ndim == 2 else logits


def difference(name, config):
    """Return the greatest difference from their logits of ours, for a config that has the pair's parameters.

    The unit is the standard deviation of theirs.
    """
    batch, logits = expected(name)
    real = predictions(config, batch)
    ours = np.asarray(run(build_model(config), convert(name), batch))
    return np.abs(ours - logits)[real].max() / logits[real].std()


def test_larger_presets_make_the_choices_of_the_one_compared():
    sizes = {"d_k": 0, "d_v": 0, "num_kv_heads": 0, "norm_epsilon": 1e-6}
    compared = {preset(name, **sizes) for name in PAIRS if name in PRESETS}
    others = {name for name in PRESETS if preset(name, **sizes) not in compared}
    assert {name for name in others if not name.startswith(("transformer_", "table3_"))} == set()


@every_pair
def test_our_logits_are_theirs(name):
    found = difference(name, PAIRS[name].ours)
    print(f"{name}: {found:.1e} standard deviations of the logits, which is {expected(name)[1].std():.2f}")
    assert found < TOLERANCE


@every_pair
def test_the_nearest_other_choice_is_told_apart(name):
    found = difference(name, dataclasses.replace(PAIRS[name].ours, **PAIRS[name].neighbour))
    print(f"{name} with {PAIRS[name].neighbour}: {found:.1e}")
    assert found > 5 * TOLERANCE


@every_pair
def test_norms_have_the_same_epsilon(name):
    epsilons = {getattr(m, "eps", getattr(m, "variance_epsilon", None)) for m in build_theirs(name).modules()}
    assert epsilons - {None} == {PAIRS[name].ours.norm_epsilon}


def test_what_does_not_fit_is_told_all_at_once():
    state = {"a.weight": np.ones((2, 3)), "b.weight": np.ones(2), "c": np.ones(4)}
    shapes = {"x": {"kernel": np.ones((2, 3))}, "y": {"bias": np.ones(2)}}
    with pytest.raises(AssertionError) as error:
        weights.fill(shapes, state, {"x": "a", "y": "b", "z": "c"}, {"a.weight": "a reason"})
    assert str(error.value).splitlines()[1:] == [
        "a.weight: 6 of 6 numbers were read; unused: a reason",
        "b.weight: 0 of 2 numbers were read",
        "c: 0 of 4 numbers were read",
        "row 'y' is about nothing of ours",
        "row 'z' is about nothing of ours",
        "x/kernel: (2, 3), but a.weight gives (3, 2)",
        "y/bias: there is no 'b.bias'",
    ]
