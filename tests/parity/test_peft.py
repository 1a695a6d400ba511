"""Adapters that PEFT writes compute here what they compute there, and PEFT reads those that export writes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jformer
from jformer.checkpoints.weights import write_run
from jformer.config import resolve
from jformer.data.tokenizers import LabelTokenizer, learn
from jformer.errors import UserError
from jformer.inference.answers import Request
from jformer.inference.restore import restore
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf import convert
from jformer.tools.hf.against import their_logits
from jformer.tools.hf.peft import export_adapter, import_adapter
from tests.parity.pairs import Pair, apart, torch, transformers
from tests.parity.test_directories import BERT, ROBERTA, imported, roberta, write
from tests.parity.test_hf import MODELS
from tests.parity.test_tokenizers import wordpiece
from tests.slow import slow_but

peft = pytest.importorskip("peft", reason="comparing with adapters of PEFT needs: pip install peft")

ADAPTERS = {  # options of LoraConfig: which modules, of which ranks and scales, and what is trained whole
    "T5ForConditionalGeneration": {"target_modules": ["q", "v", "wo"], "r": 4, "lora_alpha": 6},
    "BartForConditionalGeneration": {
        "target_modules": r".*decoder.*(q_proj|fc1)", "r": 3, "use_rslora": True, "rank_pattern": {"fc1": 5},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 9}, "layers_to_transform": None,
    },
    "MarianMTModel": {"target_modules": ["k_proj", "out_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "BertForSequenceClassification": {
        "target_modules": ["query", "key"], "task_type": "SEQ_CLS", "modules_to_save": ["classifier"], "bias": "all",
    },
    "GPT2LMHeadModel": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "LlamaForCausalLM": {"target_modules": "all-linear", "task_type": "CAUSAL_LM"},
}  # fmt: skip


def write_base(pair, workdir):
    """Write the run that import makes of a model, but for its tokenizer."""
    text = learn("char", ["abcdefgh "], 99, "identity", False)
    classes = pair.model.head.num_classes
    labels = LabelTokenizer("label", "identity", [f"LABEL_{i}" for i in range(classes)])
    source = {"classify": "labelled", "lm": "text"}.get(pair.task, "files")
    data = {"source": source, "max_source_length": 20, "max_target_length": 20}
    config = resolve({"task": pair.task, "model": dataclasses.asdict(pair.model), "data": data})
    write_run(workdir, config, (text, labels if classes else text), pair.params)
    (workdir / convert.ORIGIN).write_text(json.dumps({"model_type": pair.family.model_type}))


def draw(model, seed=1):
    """Draw all parameters of an adapter, as the second factor is zero at first."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore::UserWarning")  # PEFT's
@pytest.mark.parametrize("name", slow_but(ADAPTERS, "GPT2LMHeadModel"))
def test_an_adapter_computes_the_same_and_goes_back(name, tmp_path):
    pair = Pair(name, MODELS[name][1], tmp_path / "model")
    plain = pair.run_theirs().detach().numpy()
    write_base(pair, tmp_path / "base")
    theirs = peft.get_peft_model(pair.theirs, peft.LoraConfig(**ADAPTERS[name])).eval()
    draw(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = their_logits(theirs, pair.model, pair.batch, {}).numpy()
    import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(tmp_path / "base"))
    merged = restore(tmp_path / "run", mesh=make_mesh(1))
    apply = jax.jit(lambda model, params: model.apply({"params": params}, pair.batch), static_argnums=0)
    ours = np.asarray(apply(merged.model, merged.params))[..., : expected.shape[-1]]
    real = pair.real().astype(bool)
    print(f"{name}: {apart(ours[real], expected[real]):.1e} of the largest logit")
    assert apart(ours[real], expected[real]) < 1e-5
    assert apart(plain[real], expected[real]) > 0.05
    shared = jformer.load(tmp_path / "base").with_adapter(tmp_path / "run")
    assert apart(np.asarray(apply(shared.model, shared.params))[real][:, : expected.shape[-1]], expected[real]) < 1e-5
    if ADAPTERS[name].get("bias"):
        return
    summary = export_adapter(str(tmp_path / "run"), tmp_path / "back", "model")
    again = peft.PeftModel.from_pretrained(type(pair.theirs).from_pretrained(tmp_path / "model"), tmp_path / "back")
    with torch.no_grad():
        found = their_logits(again.eval(), pair.model, pair.batch, {}).numpy()
    assert apart(found[real], expected[real]) < 1e-6, summary


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore::UserWarning")  # PEFT's
@pytest.mark.parametrize("saved", slow_but(["lm_head", "wte"], "lm_head"))
def test_a_table_is_tied_as_in_the_base_or_refused(saved, tmp_path):
    pair = Pair("GPT2LMHeadModel", MODELS["GPT2LMHeadModel"][0], tmp_path / "model")  # 16 inputs: not 3 equal parts
    write_base(pair, tmp_path / "base")
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": [saved]}
    theirs = peft.get_peft_model(pair.theirs, peft.LoraConfig(**options, ensure_weight_tying=True)).eval()
    draw(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    arguments = tmp_path / "adapter", str(tmp_path / "run"), str(tmp_path / "base")
    if saved == "wte":  # PEFT ties no table of that name
        with pytest.raises(
            UserError, match=r"wte\.weight and not lm_head\.weight, which the base ties to it: train both"
        ):
            import_adapter(*arguments)
        return
    import_adapter(*arguments)
    export_adapter(str(tmp_path / "run"), tmp_path / "back", "model")
    again = peft.PeftModel.from_pretrained(type(pair.theirs).from_pretrained(tmp_path / "model"), tmp_path / "back")
    with torch.no_grad():
        expected, found = (their_logits(each.eval(), pair.model, pair.batch, {}).numpy() for each in (theirs, again))
    merged, real = restore(tmp_path / "run", mesh=make_mesh(1)), pair.real().astype(bool)
    ours = np.asarray(merged.model.apply({"params": merged.params}, pair.batch))[..., : expected.shape[-1]]
    assert apart(ours[real], expected[real]) < 1e-5
    assert apart(found[real], expected[real]) < 1e-6


HEADS = {  # of a base that predicts masked tokens: its class, tokenizer and sizes, the class of the adapter, its task
    "labels": ("RobertaForMaskedLM", roberta, ROBERTA, "RobertaForSequenceClassification", "SEQ_CLS"),
    "tags": ("BertForMaskedLM", wordpiece, BERT, "BertForTokenClassification", "TOKEN_CLS"),
    "a pooler that is not there": ("BertForMaskedLM", wordpiece, BERT, "BertForSequenceClassification", "SEQ_CLS"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore::UserWarning")  # PEFT's
@pytest.mark.parametrize("case", slow_but(HEADS, "labels"))
def test_a_head_comes_with_the_adapters_of_a_base_without_one(case, tmp_path):
    cls, tokenizer, sizes, adapted, task = HEADS[case]
    write(tmp_path / "model", cls, tokenizer, {"model_max_length": 40}, **sizes)
    imported(tmp_path / "model")
    plain = getattr(transformers, adapted).from_pretrained(tmp_path / "model", num_labels=3)
    theirs = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["query", "value"], task_type=task)).eval()
    draw(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    arguments = tmp_path / "adapter", str(tmp_path / "classifier"), str(tmp_path / "run")
    if case == "a pooler that is not there":
        with pytest.raises(
            UserError, match=r"neither the adapter nor .*run has bert\.pooler\.dense\.bias, bert\.pooler"
        ):
            import_adapter(*arguments)
        return
    import_adapter(*arguments)
    run = jformer.load(tmp_path / "classifier")
    (answer,) = run.generate(["This is a text of jformer."])
    (ids,) = run.inputs.encoder.source.encode(["This is a text of jformer."])
    with torch.no_grad():
        expected = theirs(torch.tensor([[*map(int, ids)]])).logits[0].softmax(-1).numpy()
    if task == "SEQ_CLS":
        found = [answer[0].labels[f"LABEL_{i}"] for i in range(3)]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    else:
        (piece,) = run.inputs.pieces([Request("This is a text of jformer.")])[0]
        found = [word.probability for word in answer[0].tags]
        np.testing.assert_allclose(found, expected[piece.starts].max(-1), rtol=1e-4)
