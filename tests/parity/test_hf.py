"""Models of every family, written by transformers, compute here what they compute there, gradients too, and go back.

Each family in three configurations of random sizes and choices that differ in every field we read; texts of uneven
length. `python -m pytest tests/parity -s` prints the deviations of docs/weights.md.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jformer.checkpoints.weights import abstract_params
from jformer.models import build_model
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf import convert, tensors
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf import write_model as export
from jformer.tools.hf.families import LOGITS_BIAS, table_of
from tests.parity.pairs import Pair, V, apart, torch
from tests.tools.hf.small_runs import Arrays

LOGITS, GRADIENTS = 1e-5, 1e-4  # relative to the largest number; float32


def encoders(**more):
    """Return three configurations with BERT's names of sizes."""
    return [
        {"vocab_size": V + i, "hidden_size": d, "num_hidden_layers": n, "num_attention_heads": h,
         "intermediate_size": f, "max_position_embeddings": 20 + i, "hidden_act": act, "layer_norm_eps": eps,
         **{key: values[i] for key, values in more.items()}}
        for i, (d, n, h, f, act, eps) in enumerate(
            [(16, 1, 2, 24, "gelu", 1e-12), (24, 2, 3, 16, "relu", 1e-5), (32, 3, 4, 40, "gelu_new", 1e-3)]
        )
    ]  # fmt: skip


def pairs_of_stacks(**more):
    """Return three configurations with BART's names of sizes."""
    return [
        {"vocab_size": V + i, "d_model": d, "encoder_layers": n, "decoder_layers": m, "encoder_attention_heads": h,
         "decoder_attention_heads": h, "encoder_ffn_dim": f, "decoder_ffn_dim": f, "activation_function": act,
         "scale_embedding": scale, "max_position_embeddings": 20 + i,
         **{key: values[i] for key, values in more.items()}}
        for i, (d, n, m, h, f, act, scale) in enumerate(
            [(16, 1, 2, 2, 24, "gelu", True), (24, 2, 1, 3, 16, "relu", False), (32, 2, 2, 4, 40, "swish", True)]
        )
    ]  # fmt: skip


def t5s(forwards, tied):
    return [
        {"vocab_size": V + i, "d_model": d, "d_kv": k, "d_ff": f, "num_layers": n, "num_decoder_layers": m,
         "num_heads": h, "feed_forward_proj": forward, "relative_attention_num_buckets": b, "layer_norm_epsilon": eps,
         "relative_attention_max_distance": far, "tie_word_embeddings": tied[i]}
        for i, (d, k, f, n, m, h, forward, b, far, eps) in enumerate([
            (16, 8, 24, 1, 2, 2, forwards[0], 8, 10, 1e-6), (24, 6, 16, 2, 1, 3, forwards[1], 16, 12, 1e-5),
            (32, 8, 40, 2, 2, 4, forwards[2], 32, 128, 1e-4),
        ])
    ]  # fmt: skip


ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
MARIAN = {"pad_token_id": [V - 1 + i for i in range(3)], "decoder_start_token_id": [V - 1 + i for i in range(3)]}
MODELS = {
    "BertForMaskedLM": encoders(type_vocab_size=[2, 1, 3]),
    "BertForSequenceClassification": encoders(type_vocab_size=[2, 1, 3], num_labels=[2, 3, 4]),
    "BertForTokenClassification": encoders(type_vocab_size=[2, 1, 3], num_labels=[2, 3, 4]),
    "RobertaForTokenClassification": encoders(type_vocab_size=[1, 1, 2], num_labels=[2, 3, 4], hidden_act=["gelu"] * 3),
    "BertForQuestionAnswering": encoders(type_vocab_size=[2, 1, 3]),
    "RobertaForQuestionAnswering": encoders(type_vocab_size=[1, 1, 2], hidden_act=["gelu"] * 3),
    "DistilBertForQuestionAnswering": [
        {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20}
    ],
    "DistilBertForTokenClassification": [
        {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": 3,
         "max_position_embeddings": 20}
    ],
    "RobertaForMaskedLM": encoders(type_vocab_size=[1, 1, 2], hidden_act=["gelu"] * 3),
    "RobertaForSequenceClassification": encoders(
        type_vocab_size=[1, 1, 2], num_labels=[2, 3, 4], hidden_act=["gelu"] * 3
    ),
    "DistilBertForMaskedLM": [
        {"vocab_size": V + i, "dim": d, "n_layers": n, "n_heads": h, "hidden_dim": f, "activation": act,
         "max_position_embeddings": 20 + i}
        for i, (d, n, h, f, act) in enumerate([(16, 1, 2, 24, "gelu"), (24, 2, 3, 16, "relu"), (32, 3, 4, 40, "gelu")])
    ],
    "DistilBertForSequenceClassification": [
        {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": 3,
         "max_position_embeddings": 20}
    ],
    "GPT2LMHeadModel": [
        {"vocab_size": V + i, "n_embd": d, "n_layer": n, "n_head": h, "n_inner": f, "activation_function": act,
         "n_positions": 20 + i, "layer_norm_epsilon": eps, "bos_token_id": 1, "eos_token_id": 1}
        for i, (d, n, h, f, act, eps) in enumerate(
            [(16, 1, 2, None, "gelu_new", 1e-5), (24, 2, 3, 16, "relu", 1e-6), (32, 3, 4, 40, "gelu", 1e-3)]
        )
    ],
    "LlamaForCausalLM": [
        {"vocab_size": V + i, "hidden_size": d, "num_hidden_layers": n, "num_attention_heads": h,
         "num_key_value_heads": g, "intermediate_size": f, "hidden_act": act, "rms_norm_eps": eps, "head_dim": k,
         "attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied, "rope_parameters": ROTARY}
        for i, (d, n, h, g, f, act, eps, k, bias, tied) in enumerate([
            (16, 1, 2, 2, 24, "silu", 1e-6, 8, False, False), (24, 2, 4, 2, 16, "gelu", 1e-5, 8, True, True),
            (32, 3, 4, 1, 40, "silu", 1e-3, 8, False, True),
        ])
    ],
    "T5ForConditionalGeneration": t5s(("relu", "gated-gelu", "gated-silu"), (True, False, False)),
    "MT5ForConditionalGeneration": t5s(("gated-gelu", "gated-gelu", "relu"), (False, False, False)),
    "BartForConditionalGeneration": pairs_of_stacks(tie_word_embeddings=[True, False, True]),
    "MBartForConditionalGeneration": pairs_of_stacks(decoder_start_token_id=[2, 2, 2]),
    "MarianMTModel": pairs_of_stacks(**MARIAN, tie_word_embeddings=[True, False, True]),
    "M2M100ForConditionalGeneration": pairs_of_stacks(),
    "ViTForImageClassification": [
        {key: value for key, value in options.items() if key not in ("vocab_size", "max_position_embeddings")}
        | {"image_size": size, "patch_size": patch, "num_channels": channels, "num_labels": 2 + i}
        for i, (options, size, patch, channels) in enumerate(
            zip(encoders(), (12, 8, 6), (4, 2, 3), (3, 1, 3), strict=True)
        )
    ],
}  # fmt: skip
CASES = [(name, i) for name, configurations in MODELS.items() for i in range(len(configurations))]
QUICK = [("BertForMaskedLM", 0), ("MarianMTModel", 0)]
every_case = pytest.mark.parametrize(
    ("name", "i"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)]
)


@functools.cache
def pair(name, i, directory):
    return Pair(name, MODELS[name][i], Path(directory), seed=i, bias=i == 1)


@pytest.fixture
def subject(name, i, tmp_path_factory):
    return pair(name, i, str(tmp_path_factory.getbasetemp() / f"{name}-{i}"))


@every_case
def test_logits_loss_and_gradients_are_theirs(subject, name, i):
    (loss, logits), gradients = jax.jit(jax.value_and_grad(subject.loss, has_aux=True))(subject.params)
    theirs = subject.run_theirs()
    weights, labels = torch.tensor(subject.real()), torch.tensor(subject.labels())
    wanted = (torch.nn.functional.cross_entropy(theirs.transpose(1, 2), labels, reduction="none") * weights).sum()
    wanted = wanted / weights.sum()
    wanted.backward()
    real = subject.real() > 0
    found = apart(np.asarray(logits)[real], theirs.detach().numpy()[real])
    grads = their_gradients(subject, gradients)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    worst = max(
        float(np.abs(np.asarray(ours) - np.asarray(other)).max()) / scale
        for ours, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(grads), strict=True)
    )
    print(f"{name} {i}: logits {found:.1e}, loss {abs(float(loss) - wanted.item()):.1e}, gradients {worst:.1e}")
    assert found < LOGITS
    assert abs(float(loss) - wanted.item()) < GRADIENTS
    assert worst < GRADIENTS


def their_gradients(subject, ours):
    """Return the gradients of their parameters in the shape of ours, where ours stand for what they do not train."""
    state = {path: weight.grad for path, weight in subject.theirs.named_parameters() if weight.grad is not None}
    state = {path: grad.numpy() for path, grad in state.items()}
    if subject.family.model_type == "vit":
        state = {in_file(path): grad for path, grad in state.items()}
    if subject.model.head.bias:
        state[convert.BIAS] = None
    table = dict(table_of(subject.family, subject.model, subject.task))
    abstract = abstract_params(build_model(subject.model), make_mesh(1))
    if subject.model.head.bias:
        state[convert.BIAS] = np.asarray(ours["head"]["bias"])[None]
    for path, entry in table.items():
        if entry.value is not None:
            side = path.split("/")[0]
            table[path] = entry._replace(value=np.asarray(ours[side]["positions"]["embedding"]))
    return tables.from_source(table, abstract, Arrays(state), lambda name: True)


def in_file(path):
    """Return the name that a file has for a parameter of ViT."""
    names = {
        "vit.layers.": "vit.encoder.layer.", "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
    }  # fmt: skip
    for old, new in names.items():
        path = path.replace(old, new)
    return path


@every_case
def test_parameters_and_fields_go_back_and_forth(subject, name, i, tmp_path):
    family, fields = export.express(subject.task, subject.model, tmp_path, subject.fields["model_type"])
    fields.pop(LOGITS_BIAS, None)
    symbols = {key: subject.fields.get(key) for key in ("pad_token_id", "decoder_start_token_id", "num_labels")}
    symbols |= {"id2label": {str(n): f"L{n}" for n in range(subject.model.head.num_classes)} or None}
    fields |= {key: value for key, value in symbols.items() if value is not None} | {"architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    written = dict(tables.to_tensors(table_of(family, subject.model, subject.task), subject.params))
    tensors.write(tmp_path, written.items())
    again = dataclasses.replace(subject.found, family=family, source=tensors.Tensors(tmp_path))
    back = convert.read_params(again, make_mesh(1))
    jax.tree.map(np.testing.assert_array_equal, back, subject.params)
    again, report = type(subject.theirs).from_pretrained(tmp_path, output_loading_info=True)
    missing = {key for key in report["missing_keys"] if "position" not in key and key not in family.copies}
    assert missing <= {convert.BIAS, *([] if subject.model.tied_output else ["model.shared.weight"])}  # none reads it
    assert not report["unexpected_keys"]
    with torch.no_grad():
        before, subject.theirs = subject.run_theirs(), again.eval()
        after = subject.run_theirs()
    real = subject.real() > 0
    np.testing.assert_allclose(after.numpy()[real], before.numpy()[real], rtol=1e-6, atol=1e-6)


def test_fields_of_every_configuration_differ():
    for name, configurations in MODELS.items():
        for key in configurations[0]:
            assert len(configurations) == 1 or len({str(one[key]) for one in configurations}) > 1 or key in (
                "rope_parameters", "bos_token_id", "eos_token_id", "decoder_start_token_id", "head_dim", "hidden_act",
                "num_labels", *(["tie_word_embeddings"] if name.startswith("MT5") else []),  # no mT5 ties
            ), (name, key)  # fmt: skip


def test_every_architecture_that_can_be_imported_is_compared():
    names = {name for family in convert.FAMILIES.values() for name in family.classes if not name.endswith("Model")}
    assert names - set(MODELS) == {"BertForPreTraining", "BertForNextSentencePrediction"}  # in test_directories
