"""What leaves as a directory answers as the run does, without jformer."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jformer.data.tokenizers.symbols import BOS, EOS, PAD, SYMBOLS
from jformer.errors import UserError
from jformer.inference.predict import load
from jformer.models import ModelConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tools.export import stablehlo
from jformer.tools.export.ctranslate2 import build_spec
from jformer.tools.export.folder import export
from tests.conftest import TINY, run
from tests.inference.untrained import TEXTS, draw, settings_of, write_run
from tests.slow import slow_but

ctranslate2 = pytest.importorskip("ctranslate2", reason="export needs: pip install ctranslate2 flatbuffers")
pytest.importorskip("flatbuffers", reason="export needs: pip install ctranslate2 flatbuffers")

LOADERS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs/serving.md").read_text(), re.DOTALL)
WITHOUT = 'import sys\n\nsys.modules["jformer"] = None  # an import of it fails\n'
WORDS = [*SYMBOLS, *(f"w{i}" for i in range(4, 50))]
T5 = {"positions": "relative", "norm": "pre", "norm_type": "rmsnorm", "bias": False, "attention_scale": "one"}
VARIANTS = {
    "2017": {},
    "layers that are one": {"shared_layers": True, "num_decoder_layers": 3},
    "pre": {"norm": "pre", "num_decoder_layers": 1, "positions": "none", "activation": "gelu_tanh"},
    "bart": {"positions": "learned", "max_length": 64, "embedding_norm": True, "embedding_scale": "none"},
    "t5": {**T5, "embedding_scale": "output", "activation": "geglu", "d_k": 6, "d_v": 6},
    "llama": {"positions": "rotary", "num_kv_heads": 2, "activation": "swiglu", "tied_output": False, "bias": False},
    "two tables": {"shared_embedding": False, "target_vocab_size": 40, "activation": "glu"},
}
RECURRENT = {
    "none": RecurrentConfig("lstm", reverse_source=True, bridge="copy"),
    "additive": RecurrentConfig("gru", bidirectional=True, attention="additive", bridge="dense", readout_size=6),
    "general": RecurrentConfig("rnn", attention="general", input_feeding=True),
}
OTHERS = {name: {"num_layers": 2, "d_model": 16, "recurrent": options} for name, options in RECURRENT.items()}
OTHERS["distances"] = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "positions": "transformer_xl"}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Write the run of an untrained model."""
    return write_run(tmp_path_factory.mktemp("run"), TINY)


def answers_of(loader, directory):
    """Run a loader of docs/serving.md in a process that has no jformer."""
    code = f"{WITHOUT}{loader}\nimport json\nprint(json.dumps(Translator(sys.argv[1])({TEXTS!r})))"
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", slow_but(VARIANTS, "2017"))
def test_ctranslate2_gives_the_same_log_probabilities(name, tmp_path):
    config = ModelConfig(**{**TINY, **VARIANTS[name]})
    config.check()
    model, params = draw(config)
    target = WORDS[: config.target_vocab_size or 50]
    build_spec(config, jax.device_get(params), (WORDS, target), longest=40).save(str(tmp_path))
    rng = np.random.default_rng(0)
    source, out = rng.integers(4, 50, (3, 35)), rng.integers(4, len(target), (3, 30))
    scored = ctranslate2.Translator(str(tmp_path), intra_threads=1).score_batch(
        *([[words[i] for i in row] for row in ids] for words, ids in ((WORDS, source), (target, out)))
    )
    ends = np.full((3, 1), EOS)
    arrays = {"source": np.hstack([source, ends]), "target_in": np.hstack([ends * 0 + BOS, out])}
    for side, ids in (("source", arrays["source"]), ("target", arrays["target_in"])):
        arrays |= {f"{side}_segments": np.ones_like(ids), f"{side}_positions": np.tile(np.arange(ids.shape[1]), (3, 1))}
    logits = run(model, params, {key: x.astype(np.int32) for key, x in arrays.items()}).at[..., jnp.array([PAD, BOS])]
    ours = np.asarray(jax.nn.log_softmax(logits.set(-jnp.inf)))
    ours = np.take_along_axis(ours, np.hstack([out, ends])[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.array([one.log_probs for one in scored]), ours, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("decode", [{"beam_size": 1}, {"beam_size": 1, "min_length": 4}], ids=str)
def test_ctranslate2_writes_greedily_what_the_run_writes(workdir, tmp_path, decode):
    settings = settings_of(workdir, **decode)
    said = export(
        settings_of(workdir, **decode, search="sample", max_length=9), workdir, "ctranslate2", tmp_path / "served"
    )
    assert said.startswith(f"{tmp_path / 'served'}: ctranslate2, ")
    assert said.endswith(
        "give these to CTranslate2 yourself, if it has them: decode.search='sample', decode.max_length=9"
    )
    ours = load(workdir, settings).predict(TEXTS)
    # Its limit is the same for all, ours goes by the source: what has not ended is compared as far as ours goes.
    theirs = answers_of(LOADERS[0], tmp_path / "served")
    assert len({*ours}) == len(TEXTS)
    assert [them.startswith(us) for us, them in zip(ours, theirs, strict=True)] == [True] * len(TEXTS)


@pytest.fixture(scope="module")
def program(workdir, tmp_path_factory):
    """Export a program."""
    return program_of(workdir, tmp_path_factory.mktemp("program"))


def program_of(workdir, target):
    """Export a program. The checks of the test session take a symbolic size for no int."""
    jaxtyping.config.update("jaxtyping_disable", True)
    export(settings_of(workdir), workdir, "stablehlo", target)
    jaxtyping.config.update("jaxtyping_disable", False)
    return target


@pytest.mark.slow
def test_the_program_writes_what_the_run_writes(workdir, program):
    assert answers_of(LOADERS[1], program) == load(workdir, settings_of(workdir)).predict(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_program_of_another_model_answers_as_its_run(name, tmp_path):
    workdir = write_run(tmp_path / "run", OTHERS[name])
    answers = load(workdir, settings_of(workdir)).predict(TEXTS)
    assert answers_of(LOADERS[1], program_of(workdir, tmp_path / "program")) == answers
    assert len({*answers}) > 3


@pytest.mark.slow
def test_the_program_runs_anywhere(program):
    read = jax.export.deserialize(bytearray((program / "program.bin").read_bytes()))
    assert read.platforms == ("cpu", "cuda", "tpu")
    assert [str(size) for size in read.in_avals[-2].shape] == ["b", "s"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"norm": "deepnorm"}, "model.norm='deepnorm'"),
        ({"positions": "alibi"}, "model.positions='alibi'"),
        ({"positions": "transformer_xl"}, "model.positions='transformer_xl'"),
        ({"embedding_scale": "positions"}, "model.embedding_scale='positions'"),
        ({"d_k": 8, "d_v": 4}, "model.d_v=4"),
        ({"d_k": 6}, "model.d_v=0"),
        ({"residual": False}, "model.residual=False"),
        ({"parametrization": "mup"}, "model.parametrization='mup'"),
        ({"window": 4}, "model.window=4"),
    ],
)
def test_what_ctranslate2_cannot_express_is_refused_by_name(fields, said):
    with pytest.raises(UserError, match=f"{re.escape(said)}: CTranslate2's"):
        build_spec(ModelConfig(**{**TINY, **fields}), {}, (WORDS, WORDS), 10)


def test_a_program_has_no_kernel_of_one_platform(workdir, tmp_path, monkeypatch):
    models = []
    monkeypatch.setattr(stablehlo, "make_setup", lambda found, *_: models.extend(found) or sys.exit())
    with pytest.raises(SystemExit):
        export(settings_of(workdir), workdir, "stablehlo", tmp_path / "served")
    assert models[0].config.execution.attention_kernel == "own"


def test_what_cannot_be_exported_is_refused_before_anything_is_written(workdir, tmp_path, monkeypatch):
    settings, target = settings_of(workdir), tmp_path / "served"
    with pytest.raises(UserError, match=r"--format=onnx; choose one of: ctranslate2, stablehlo"):
        export(settings, workdir, "onnx", target)
    with pytest.raises(UserError, match=r"task='lm' cannot be exported: only translate can"):
        export(dataclasses.replace(settings, task="lm"), workdir, "stablehlo", target)
    with pytest.raises(UserError, match=r"decode\.search='sample' cannot be exported"):
        export(settings_of(workdir, search="sample"), workdir, "stablehlo", target)
    with pytest.raises(UserError, match=r"decode\.ensemble cannot be exported"):
        export(settings_of(workdir, ensemble=("elsewhere",)), workdir, "stablehlo", target)
    with pytest.raises(UserError, match=r"exists and is not empty"):
        export(settings, workdir, "stablehlo", workdir)
    with pytest.raises(UserError, match=r"--output=gs://bucket/served: this is written to a disk"):
        export(settings, workdir, "stablehlo", "gs://bucket/served")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UserError, match=r"needs a package: pip install ctranslate2"):
        export(settings, workdir, "ctranslate2", target)
    assert not target.exists()
