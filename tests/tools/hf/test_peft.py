"""Adapters in the files of PEFT, here written by hand: the kernels that they make are those of the formula."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jformer.config import load_config, save_config
from jformer.config.options import EvaluateConfig
from jformer.data.tokenizers import NumberTokenizer
from jformer.errors import UserError
from jformer.tools.hf import __main__ as command
from jformer.tools.hf.marian import MARIAN
from jformer.tools.hf.peft import CONFIG, WEIGHTS, export_adapter, import_adapter
from jformer.tools.hf.write_model import export_model
from tests.tools.hf import small_runs

Q, DOWN = "model.encoder.layers.0.self_attn.q_proj", "model.decoder.layers.0.fc2"
FIELDS = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 6, "alpha_pattern": {"fc2": 5}, "lora_dropout": 0.1,
    "rank_pattern": {"fc2": 3}, "target_modules": ["q_proj", "fc2"], "base_model_name_or_path": "opus",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return small_runs.marian(tmp_path_factory.mktemp("marian") / "base")


def write_adapter(directory, fields=None, **tensors):
    """Write an adapter of a query's kernel and of one of the feed-forward; return its tensors by their full names."""
    rng = np.random.default_rng(0)
    shapes = {f"{Q}.lora_A": (2, 16), f"{Q}.lora_B": (16, 2), f"{DOWN}.lora_A": (3, 24), f"{DOWN}.lora_B": (16, 3)}
    arrays = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays = {f"base_model.model.{name}": array for name, array in (arrays | tensors).items()}
    directory.mkdir()
    save_file(arrays, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps(FIELDS | (fields or {})))
    return arrays


def test_an_imported_adapter_adds_its_products_to_kernels_and_is_exported_as_it_was(base, tmp_path, capsys):
    written = write_adapter(tmp_path / "adapter")
    arguments = ["import", str(tmp_path / "adapter"), f"--workdir={tmp_path / 'run'}", f"--base={base}"]
    assert command.main(arguments) == 0
    assert "2 kernels with adapters of rank 3, 0 whole parameters" in capsys.readouterr().out
    assert load_config(tmp_path / "run" / "config.json").model.lora.dropout == 0.1
    for workdir, name in ((base, "old"), (tmp_path / "run", "new")):
        export_model(str(workdir), tmp_path / name)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("old", "new"))
    for module, scale in ((Q, 6 / 2), (DOWN, 5 / 3)):
        a, b = (written[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        np.testing.assert_allclose(new.pop(f"{module}.weight"), old[f"{module}.weight"] + scale * b @ a, atol=1e-5)
    for name, array in new.items():
        np.testing.assert_array_equal(array, old[name], err_msg=name)
    export = ["export", str(tmp_path / "run"), f"--output={tmp_path / 'back'}", "--adapter_of=opus"]
    assert command.main(export) == 0
    back, fields = load_file(tmp_path / "back" / WEIGHTS), json.loads((tmp_path / "back" / CONFIG).read_text())
    assert back.keys() == written.keys()
    scale = fields["lora_alpha"] / fields["r"]
    for module, own in ((Q, 6 / 2), (DOWN, 5 / 3)):  # zeros fill the ranks up, and B has a part of the scale
        a, b = (f"base_model.model.{module}.lora_{letter}.weight" for letter in "AB")
        np.testing.assert_allclose(scale * back[b] @ back[a], own * written[b] @ written[a], atol=1e-5)
    assert (fields["base_model_name_or_path"], fields["target_modules"]) == ("opus", [DOWN, Q])
    import_adapter(tmp_path / "back", str(tmp_path / "again"), str(base))
    export_adapter(str(tmp_path / "again"), tmp_path / "same", "opus")
    again = load_file(tmp_path / "same" / WEIGHTS)
    assert all(np.array_equal(array, again[name]) for name, array in back.items())


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, r"peft_type='IA3' is not implemented: only 'LORA'"),
        ({"use_dora": True}, {}, "use_dora=True is not implemented: only factors beside kernels are"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa' changes the base"),
        ({}, {"model.shared.lora_embedding_A": np.zeros((2, 9), np.float32)}, "lora_embedding_A have no place beside"),
        ({}, {f"{Q}.lora_A.weight": np.zeros((2, 15), np.float32)}, r"q_proj.lora_A.weight \(2, 15\) and its B"),
        ({}, {"model.shared.weight": np.zeros((9, 16), np.float32)}, r"shared.weight gives \(9, 16\), and our source_"),
    ],
)
def test_what_is_no_adapter_of_kernels_is_refused_by_name(base, tmp_path, fields, tensors, message):
    write_adapter(tmp_path / "adapter", fields, **tensors)
    with pytest.raises(UserError, match=message):
        import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(base))
    assert not (tmp_path / "run").exists()


def test_commands_that_lack_adapters_or_their_base_say_so(base, tmp_path, capsys):
    write_adapter(tmp_path / "adapter")
    for arguments, message in (
        (["import", str(tmp_path / "adapter"), f"--workdir={tmp_path / 'run'}"], "adapts 'opus': import that, too"),
        (["export", str(base), f"--output={tmp_path / 'out'}", "--adapter_of=opus"], "holds no adapters"),
    ):
        assert command.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_table_of_both_sides_is_neither_replaced_on_one_nor_exported(base, tmp_path):
    export_model(str(base), tmp_path / "model")
    table = load_file(tmp_path / "model" / "model.safetensors")["model.shared.weight"]
    write_adapter(tmp_path / "adapter", **{"model.shared.weight": table})
    with pytest.raises(UserError, match=r"replaces model\.shared\.weight and not .*, which the base ties to it"):
        import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(base))
    copies = dict.fromkeys(MARIAN.copies, table)
    write_adapter(tmp_path / "tied", **{"model.shared.weight": table, **copies})
    import_adapter(tmp_path / "tied", str(tmp_path / "run"), str(base))
    with pytest.raises(UserError, match=r"trains source_embedding/embedding, which .* shares: export the"):
        export_adapter(str(tmp_path / "run"), tmp_path / "back", "opus")


def test_a_module_that_is_trained_in_part_cannot_be_exported(base, tmp_path, capsys):
    norm = "model.encoder.layers.0.final_layer_norm.weight"
    write_adapter(tmp_path / "adapter", **{norm: np.full(16, 2, np.float32)})
    import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(base))
    with pytest.raises(UserError, match=r"model\.lora\.also=.* trains a module without its .*bias, which PEFT"):
        export_adapter(str(tmp_path / "run"), tmp_path / "back", "opus")


@pytest.mark.parametrize("head", [(), ("weight",)], ids=str)
def test_numbers_of_adapters_without_the_whole_classifier_cannot_be_exported(head, tmp_path):
    numbers = small_runs.bert(tmp_path / "numbers", numbers=NumberTokenizer(250.0, 40.0))
    (tmp_path / "adapter").mkdir()
    query, rng = "bert.encoder.layer.0.attention.self.query", np.random.default_rng(0)
    arrays = {f"{query}.lora_A.weight": (2, 16), f"{query}.lora_B.weight": (16, 2)}
    arrays |= {f"classifier.{name}": (1, 16) for name in head}
    tensors = {f"base_model.model.{name}": rng.random(shape, np.float32) for name, shape in arrays.items()}
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(numbers))
    with pytest.raises(UserError, match=r"mean 250 and deviation 40 in theirs: add '\^classifier/', or export the"):
        export_adapter(str(tmp_path / "run"), tmp_path / "back", "bert")
    assert not (tmp_path / "back").exists()


def write_regressor(directory, **tensors):
    """Write an adapter of a query's kernel and of parts of the classifier of numbers."""
    query, rng = "bert.encoder.layer.0.attention.self.query", np.random.default_rng(0)
    shapes = {f"{query}.lora_A.weight": (2, 16), f"{query}.lora_B.weight": (16, 2)}
    arrays = {name: rng.random(shape, np.float32) for name, shape in shapes.items()} | tensors
    directory.mkdir()
    save_file({f"base_model.model.{name}": array for name, array in arrays.items()}, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "task_type": "SEQ_CLS"}))


def test_numbers_of_adapters_have_the_units_of_labels_there_and_standardized_ones_here(tmp_path):
    numbers = small_runs.bert(tmp_path / "numbers", numbers=NumberTokenizer(250.0, 40.0))
    head = {"classifier.weight": np.full((1, 16), 8, np.float32), "classifier.bias": np.array([260], np.float32)}
    write_regressor(tmp_path / "adapter", **head)
    import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(numbers))
    export_adapter(str(tmp_path / "run"), tmp_path / "back", "bert")
    export_model(str(tmp_path / "run"), tmp_path / "merged")
    back, merged = load_file(tmp_path / "back" / WEIGHTS), load_file(tmp_path / "merged" / "model.safetensors")
    for name, array in head.items():
        np.testing.assert_allclose(back[f"base_model.model.{name}"], array, rtol=1e-6)
        np.testing.assert_allclose(merged[name], array, rtol=1e-6)


@pytest.mark.parametrize("units", [(250.0, 40.0), (0.0, 1.0)], ids=str)
def test_factors_of_the_classifier_of_numbers_have_their_units_too(units, tmp_path):
    numbers = small_runs.bert(tmp_path / "numbers", numbers=NumberTokenizer(*units))
    factors = {"classifier.lora_A.weight": (2, 16), "classifier.lora_B.weight": (1, 2)}
    factors = {name: np.random.default_rng(1).random(shape, np.float32) for name, shape in factors.items()}
    write_regressor(tmp_path / "adapter", **factors)
    import_adapter(tmp_path / "adapter", str(tmp_path / "run"), str(numbers))
    for run in ("numbers", "run"):
        export_model(str(tmp_path / run), tmp_path / f"{run}_exported")
    old, new = (load_file(tmp_path / f"{run}_exported" / "model.safetensors") for run in ("numbers", "run"))
    a, b = factors.values()
    np.testing.assert_allclose(new["classifier.weight"] - old["classifier.weight"], 8 / 2 * b @ a, rtol=1e-4)
    np.testing.assert_allclose(new["classifier.bias"], old["classifier.bias"], rtol=1e-6)
    if units == (0.0, 1.0):  # otherwise refused
        export_adapter(str(tmp_path / "run"), tmp_path / "back", "bert")
        back = load_file(tmp_path / "back" / WEIGHTS)
        np.testing.assert_allclose(back["base_model.model.classifier.lora_A.weight"], a, rtol=1e-6)


def test_an_imported_adapter_can_be_exported_from_anywhere_whatever_its_base_evaluates(tmp_path, monkeypatch):
    base = small_runs.marian(tmp_path / "base")
    config = load_config(base / "config.json")
    save_config(dataclasses.replace(config, evaluate=EvaluateConfig(weights="average")), base / "config.json")
    write_adapter(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    import_adapter(tmp_path / "adapter", str(tmp_path / "run"), "base")
    monkeypatch.chdir(tmp_path / "adapter")
    assert load_config(tmp_path / "run" / "config.json").evaluate.weights == "last"
    export_model(str(tmp_path / "run"), tmp_path / "merged")
