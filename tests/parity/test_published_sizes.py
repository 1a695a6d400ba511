"""Models of published sizes, with random weights, compute here what they compute in transformers.

The largest needs 16 GB of memory. `python -m pytest -m slow tests/parity/test_published_sizes.py -n0 -s` prints the
deviations of docs/weights.md.
"""

import resource
import time

import jax
import numpy as np
import pytest

from jformer.models import build_model
from jformer.models.parts import count_params
from tests.parity.pairs import Pair, apart, torch

LOGITS = 1e-5  # relative to the largest of them; float32
T5 = {"vocab_size": 32_128, "d_model": 768, "d_kv": 64, "d_ff": 3_072, "num_layers": 12, "num_heads": 12}
LARGE = {"d_model": 1_024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
         "decoder_attention_heads": 16, "encoder_ffn_dim": 4_096, "decoder_ffn_dim": 4_096,
         "scale_embedding": True}  # fmt: skip
PUBLISHED = {  # what the config.json of each says where it differs from the defaults of transformers, and its millions
    "bert-base-uncased": ("BertForMaskedLM", {}, 110),
    "roberta-base": ("RobertaForMaskedLM", {"vocab_size": 50_265, "max_position_embeddings": 514,
                                            "type_vocab_size": 1, "layer_norm_eps": 1e-5}, 125),
    "distilbert-base-uncased": ("DistilBertForMaskedLM", {}, 67),
    "gpt2": ("GPT2LMHeadModel", {}, 124),
    "TinyLlama-1.1B": ("LlamaForCausalLM", {"hidden_size": 2_048, "intermediate_size": 5_632, "num_hidden_layers": 22,
                                            "num_key_value_heads": 4, "rms_norm_eps": 1e-5}, 1_100),
    "t5-base": ("T5ForConditionalGeneration", T5, 223),
    "flan-t5-base": ("T5ForConditionalGeneration", {**T5, "d_ff": 2_048, "feed_forward_proj": "gated-gelu",
                                                    "tie_word_embeddings": False}, 248),
    "mt5-small": ("MT5ForConditionalGeneration", {}, 300),
    "bart-base": ("BartForConditionalGeneration", {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3_072, "decoder_ffn_dim": 3_072}, 139),
    "mbart-large-cc25": ("MBartForConditionalGeneration", {**LARGE, "vocab_size": 250_027}, 611),
    "opus-mt-en-de": ("MarianMTModel", {
        "vocab_size": 58_101, "pad_token_id": 58_100, "decoder_start_token_id": 58_100, "eos_token_id": 0,
        "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 2_048, "decoder_ffn_dim": 2_048,
        "activation_function": "swish", "scale_embedding": True, "max_position_embeddings": 512}, 74),
    "nllb-200-distilled-600M": ("M2M100ForConditionalGeneration", {**LARGE, "vocab_size": 256_206}, 615),
    "vit-base-patch16-224": ("ViTForImageClassification", {"num_labels": 1_000}, 86),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_theirs(name, tmp_path):
    architecture, fields, millions = PUBLISHED[name]
    began = time.perf_counter()
    pair = Pair(architecture, fields, tmp_path, deviation=0.02)
    with torch.no_grad():
        theirs = pair.run_theirs().numpy()
    model = build_model(pair.model)
    ours = jax.jit(lambda params, batch: model.apply({"params": params}, batch))(pair.params, pair.batch)
    real, count = pair.real() > 0, count_params(pair.params) / 1e6
    found, seconds = apart(np.asarray(ours)[real], theirs[real]), time.perf_counter() - began
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name}: {count:,.1f} million, logits {found:.1e}, {seconds:.0f} s, {held:.1f} GiB")
    assert count == pytest.approx(millions, rel=0.02)
    assert found < LOGITS
