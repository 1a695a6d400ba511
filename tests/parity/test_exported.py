"""Transformers alone loads what is exported; its logits, its tokenizer and `generate` do what the run does.

Small runs with random parameters. NLLB's shape is not among them: its positions are computed, so random ones have no
place there, and export refuses them.
"""

import functools
import json

import pytest

from jformer.config import load_config
from jformer.inference import verify
from jformer.inference.answers import Request
from jformer.inference.predict import load
from jformer.tools.hf.against import check_against
from jformer.tools.hf.write_model import export_model
from tests.parity.pairs import torch, transformers
from tests.slow import slow_but
from tests.tools.hf import small_runs

PREFIX = {"marian": "", "bart": "", "learned": "", "t5": "a mat: "}  # what the run puts in front of every source


WRITERS = {name: getattr(small_runs, name) for name in PREFIX}
ENCODERS = {task: functools.partial(small_runs.bert, task=task) for task in ("classify", "qa", "embed")}


@pytest.mark.parametrize("name", slow_but([*WRITERS, *ENCODERS], "classify", "marian"))
def test_verify_compares_logits_with_those_of_transformers(name, tmp_path, monkeypatch, capsys):
    run = (WRITERS | ENCODERS)[name](tmp_path / "run")
    export_model(str(run), tmp_path / "theirs")
    monkeypatch.setattr(verify, "CHECKS", ())

    def is_theirs():
        return verify.verify(load_config(run / "config.json"), run, [check_against(tmp_path / "theirs", run)])

    assert is_theirs()
    shown = capsys.readouterr().out
    assert f"pass  ours = transformers {transformers.__version__} with torch {torch.__version__}" in shown
    assert float(shown.split("(at most")[0].split()[-1]) < 1e-4  # of parameters as large as 1
    from safetensors.torch import load_file, save_file

    weights = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(weights)
    save_file({key: 1.01 * value for key, value in tensors.items()}, weights, {"format": "pt"})
    assert not is_theirs()


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")  # imported and not called
@pytest.mark.parametrize("name", slow_but(PREFIX, "marian"))
def test_a_directory_translates_by_itself_as_the_run_does(name, tmp_path):
    run = getattr(small_runs, name)(tmp_path / "run")
    export_model(str(run), tmp_path / "theirs")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs").eval()
    predictor = load(run)
    expected = predictor.generate(small_runs.LINES)
    for line, outputs in zip(small_runs.LINES, expected, strict=True):
        pieces = predictor.inputs.pieces([Request(line)])[0]
        with torch.no_grad():
            found = model.generate(torch.tensor([list(pieces[0].ids)]), do_sample=False)
        text = predictor.tokenizers[1].decode(written(found[0].tolist(), predictor.tokenizers[1].symbols))
        assert text == outputs[0].text


def written(ids, symbols):
    """Return what stands between the first tokens and the end."""
    ids = ids[1 + len(symbols.before) :]
    return ids[: ids.index(symbols.eos)] if symbols.eos in ids else ids


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("name", slow_but(PREFIX, "marian"))
def test_an_exported_tokenizer_makes_the_ids_that_the_run_reads(name, tmp_path):
    run = getattr(small_runs, name)(tmp_path / "run")
    export_model(str(run), tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    source = load(run).tokenizers[0]
    for line in small_runs.LINES:
        expected = theirs(PREFIX[name] + line, add_special_tokens=False)["input_ids"]
        assert list(source.encode([line])[0]) == expected
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "generation_config.json").read_text())
    assert {key: getattr(settings, key) for key in written if hasattr(settings, key)}.items() <= written.items()
