"""Every family computes what the published models compute, as Hugging Face Transformers has them.

Tiny models with random weights: theirs made of their configuration's defaults, ours of a preset, both at the same
small sizes. So what is compared are the preset's choices. jformer needs neither torch nor transformers.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jformer.checkpoints.weights import abstract_params
from jformer.config import default_config, resolve
from jformer.config.presets import PRESETS
from jformer.models import ModelConfig, build_model
from jformer.models.interventions import activations
from jformer.models.model_config import RelativeConfig
from jformer.models.vision_config import VisionConfig
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf import convert as hf
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf import tensors
from tests.conftest import run
from tests.slow import slow_but
from tests.tools.hf.small_runs import Arrays

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
    neighbour: dict[str, Any]  # the choice of ours nearest to theirs that has the same parameters


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
        BERT, "BertForMaskedLM", BERT_SIZES, {"activation": "gelu_tanh"},
    ),
    "bert_base as a classifier": Pair(
        BERT.with_classes(CLASSES), "BertForSequenceClassification", {**BERT_SIZES, "num_labels": CLASSES},
        {"activation": "gelu_tanh"},
    ),
    "gpt2": Pair(
        preset("gpt2"), "GPT2LMHeadModel", {**GPT2_SIZES, "bos_token_id": None, "eos_token_id": None},
        {"activation": "gelu"},
    ),
    "llama_7b": Pair(
        preset("llama_7b", num_kv_heads=2), "LlamaForCausalLM", {**BERT_SIZES, "num_key_value_heads": 2},
        {"activation": "geglu"},
    ),
    "t5_small": Pair(
        preset("t5_small"), "T5ForConditionalGeneration", {**T5_SIZES, "d_kv": D // H},
        {"relative": RelativeConfig(max_distance=256)},
    ),
    "t5_1_1_small": Pair(
        preset("t5_1_1_small", d_k=6, d_v=6), "T5ForConditionalGeneration",
        {**T5_SIZES, "d_kv": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"activation": "geglu"},
    ),
    "bart_base": Pair(
        preset("bart_base"), "BartForConditionalGeneration", BART_SIZES, {"activation": "gelu_tanh"},
    ),
    "marian": Pair(
        preset("marian"), "MarianMTModel", {**BART_SIZES, **OPUS_MT}, {"activation": "gelu"},
    ),
    "vit_s16": Pair(
        dataclasses.replace(preset("vit_s16"), vision=VISION).with_classes(CLASSES), "ViTForImageClassification",
        # The authors' code has this epsilon; the default of transformers is BERT's.
        {**BERT_SIZES, "image_size": 12, "patch_size": 4, "num_labels": CLASSES, "layer_norm_eps": 1e-6},
        {"activation": "gelu_tanh"},
    ),
}  # fmt: skip
every_pair = pytest.mark.parametrize("name", slow_but(PAIRS, "gpt2", "marian"))


@functools.cache
def build_theirs(name):
    """Return their model with every parameter drawn: scales about one, all else about zero."""
    cls = getattr(transformers, PAIRS[name].theirs)
    model = cls(cls.config_class(**PAIRS[name].options)).eval()
    if name == "t5_1_1_small":  # comes tied, its published weights are not
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
    pair, theirs = PAIRS[name], build_theirs(name)
    family = hf.find_family(theirs.config.model_type)
    source: Any = Arrays(read_state(theirs))
    if name == "vit_s16":  # has other names in files than in memory
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            source = tensors.Tensors(Path(directory))
            source = Arrays({each: source.read(each) for each in source.found})
    abstract = abstract_params(build_model(pair.ours), make_mesh(1))
    return tables.from_source(family.table(pair.ours), abstract, source, family.is_unread)


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


def run_theirs(model, family, batch, **options):
    """Return what their model gives."""
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
        return model(**inputs[family], **options)


def predictions(config, batch):
    """Return where the model predicts: bool [b t], or [b 1] for a classifier."""
    if config.head.num_classes:
        return np.ones((3, 1), bool)
    return batch["source_segments" if config.family == "encoder" else "target_segments"] > 0


@functools.cache
def expected(name):
    """Return (a batch, their logits [b t v] for it)."""
    batch = draw_batch()
    logits = run_theirs(build_theirs(name), PAIRS[name].ours.family, batch).logits.numpy()
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
    # Recurrent ones have no counterpart in Transformers; test_recurrent_torch.py compares their layers with PyTorch.
    transformers = {name for name in PRESETS if not resolve(default_config(name)).model.recurrent.cell}
    others = {name for name in transformers if preset(name, **sizes) not in compared}
    assert {name for name in others if not name.startswith(("transformer_", "table3_"))} == set()


@every_pair
def test_our_logits_are_theirs(name):
    found = difference(name, PAIRS[name].ours)
    print(f"{name}: {found:.1e} standard deviations of the logits, which is {expected(name)[1].std():.2f}")
    assert found < TOLERANCE


@pytest.mark.parametrize("name", slow_but(["bert_base", "gpt2", "t5_small"], "gpt2"))
def test_hidden_states_of_every_layer_are_theirs(name):
    batch, family = draw_batch(), PAIRS[name].ours.family
    theirs = run_theirs(build_theirs(name), family, batch, output_hidden_states=True)
    names = ("*input/output", "*coder/output", "*/block/output")
    model = build_model(PAIRS[name].ours)
    seen = jax.jit(lambda params, batch: activations(model, params, batch, names))(convert(name), batch)
    for stack, side in {"encoder": "source", "decoder": "target"}.items():
        if f"{stack}/output" not in seen:
            continue
        inputs = f"{side}_input/output" if family == "encdec" else "input/output"
        ours = [seen[inputs], *seen[f"{stack}/block/output"][:-1], seen[f"{stack}/output"]]  # their last is normalised
        expected = theirs[f"{stack}_hidden_states"] if family == "encdec" else theirs.hidden_states
        real = batch[f"{side}_segments"] > 0
        for mine, other in zip(ours, expected, strict=True):
            differences = np.abs(mine - other.numpy())[real] / other.numpy()[real].std()
            print(f"{name} {stack}: {differences.max():.1e} standard deviations")
            assert differences.max() < 1e-5


@every_pair
def test_the_nearest_other_choice_is_told_apart(name):
    found = difference(name, dataclasses.replace(PAIRS[name].ours, **PAIRS[name].neighbour))
    print(f"{name} with {PAIRS[name].neighbour}: {found:.1e}")
    assert found > 5 * TOLERANCE


@every_pair
def test_norms_have_the_same_epsilon(name):
    epsilons = {getattr(m, "eps", getattr(m, "variance_epsilon", None)) for m in build_theirs(name).modules()}
    assert epsilons - {None} == {PAIRS[name].ours.norm_epsilon}
