"""Published weights, as packages ship them, compute here what they compute in their own code.

    pip download --no-deps --dest=DIR g2p-en annalog rxnfp antiberty==0.1.3
    JFORMER_PUBLISHED=DIR python -m pytest -m "slow or not slow" tests/parity/test_published.py

190 MB; nothing of them is installed, as some need versions of other packages that are long gone.
"""

import ast
import importlib
import io
import os
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jformer.checkpoints.weights import abstract_params
from jformer.data.tokenizers.pretrained import FastTokenizer
from jformer.inference.predict import load
from jformer.inference.verify import Subject
from jformer.models import ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf.__main__ import main
from jformer.tools.hf.against import both_logits
from jformer.tools.hf.tensors import Tensors
from jformer.tools.hf.write_model import export_model
from tests.hostile_texts import documents
from tests.inference import untrained
from tests.tools.hf.small_runs import Arrays

FOLDER = os.environ.get("JFORMER_PUBLISHED", "")
WANTED = "PUBLISHED WEIGHTS ARE NOT TRIED: name the folder of their packages with JFORMER_PUBLISHED, as this file says"
pytestmark = pytest.mark.slow


@pytest.fixture
def wheel():
    """Return a function: name of a package → its wheel."""

    def find(name):
        found = [*Path(FOLDER).glob(f"{name}-*.whl")] if FOLDER else []
        if not found:
            pytest.skip(f"{WANTED} ({name})")
        return found[0]

    return find


def run_of(fields, sides, table, arrays):
    """Return a translator of some fields of a model, with arrays by the names of their authors."""
    rows = dict(zip(("vocab_size", "target_vocab_size"), (side.vocab_size for side in sides), strict=True))
    head = HeadConfig(bias=True)
    model = build_model(ModelConfig(**fields, **rows, shared_embedding=False, tied_output=False, head=head))
    abstract = abstract_params(model, make_mesh(1), whole=())
    params = tables.from_source(table, abstract, Arrays(arrays), lambda name: False)
    return untrained.predictor(model, params, tokenizers=sides, beam_size=1, max_length=20, length_penalty=0.0)


def vocabulary(tokens, between, **symbols):
    """Return the tokenizer of texts of some tokens, whose ids are their places, with something between them."""
    fast = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, tokens[symbols["unk"]])
    )
    apart = (between, "removed") if between else (tokenizers.Regex("."), "isolated")
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(*apart)
    fast.add_special_tokens([tokens[i] for i in symbols.values() if isinstance(i, int)])
    if not between:
        fast.decoder = tokenizers.decoders.Fuse()
    return FastTokenizer(fast.to_str(), symbols)


def gru(stack, theirs):
    """Map a GRU of one layer."""
    return {
        f"{stack}/forward_0/input/kernel": tables.Entry(f"{theirs}_w_ih", np.transpose),
        f"{stack}/forward_0/input/bias": tables.Entry(f"{theirs}_b_ih"),
        f"{stack}/forward_0/state_kernel": tables.Entry(f"{theirs}_w_hh", np.transpose),
        f"{stack}/forward_0/state_bias": tables.Entry(f"{theirs}_b_hh"),
    }


def reference_of(source, arrays, graphemes, phonemes):
    """Return the pronunciation of a word as the package's own class computes it, without what else it imports."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    found.body = [node for node in found.body if node.name in ("sigmoid", "grucell", "gru", "encode", "predict")]
    names = {"np": np}
    exec(compile(ast.Module([found], []), "g2p", "exec"), names)
    model = names[found.name].__new__(names[found.name])
    model.__dict__ |= {**arrays, "g2idx": {g: i for i, g in enumerate(graphemes)}, "idx2p": dict(enumerate(phonemes))}
    return model.predict


def lists_of(source, names):
    """Return the lists that a class assigns to its attributes."""
    found = {
        node.targets[0].attr: node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    }
    return [eval(compile(ast.Expression(found[name]), "g2p", "eval")) for name in names]


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in the package
def test_words_are_spoken_as_g2p_en_speaks_them(wheel):
    """A GRU encoder–decoder without attention (g2p-en 2.1.0, Apache-2.0), beside the NumPy code of its package."""
    with zipfile.ZipFile(wheel("g2p_en")) as package:
        source = package.read("g2p_en/g2p.py").decode()
        arrays = dict(np.load(package.open("g2p_en/checkpoint20.npz")))
        lines = package.read("g2p_en/homographs.en").decode().splitlines()
    graphemes, phonemes = lists_of(source, ("graphemes", "phonemes"))
    table = gru("encoder", "enc") | gru("decoder", "dec") | {
        "source_embedding/embedding": tables.Entry("enc_emb"),
        "target_embedding/embedding": tables.Entry("dec_emb"),
        "head/output/kernel": tables.Entry("fc_w", np.transpose),
        "head/bias": tables.Entry("fc_b"),
    }  # fmt: skip
    sides = (
        vocabulary(graphemes, "", pad=0, unk=1, bos=0, eos=2),
        vocabulary(phonemes, " ", pad=0, unk=1, bos=2, eos=3),
    )
    fields = {"d_model": 256, "num_layers": 1, "recurrent": RecurrentConfig("gru", bridge="copy")}
    run = run_of(fields, sides, table, arrays)
    speak = reference_of(source, arrays, graphemes, phonemes)
    words = sorted({line.split("|")[0].lower() for line in lines if not line.startswith("#")})
    expected = [" ".join(speak(word)) for word in words]
    assert len(words) > 300
    assert run.predict(words) == expected


def attention(ours, theirs):
    """Map an attention, and the norm behind it."""
    pairs = {"q": "fc_q", "k": "fc_k", "v": "fc_v", "o": "fc_o"}.items()
    return {path: entry for a, b in pairs for path, entry in tables.linear(f"{ours}/{a}", f"{theirs}.{b}").items()}


def post_norm_stack(stack, norms):
    """Map a stack of layers with a norm behind each sublayer, whose attentions are named in `norms`."""
    block, layer, feed = f"{stack}/block", f"{stack}.layers.{{}}", "positionwise_feedforward"
    table = tables.linear(f"{block}/feed_forward/up", f"{layer}.{feed}.fc_1")
    table |= tables.linear(f"{block}/feed_forward/down", f"{layer}.{feed}.fc_2")
    table |= tables.norm(f"{block}/feed_forward_norm", f"{layer}.ff_layer_norm")
    for ours, (theirs, norm) in norms.items():
        table |= attention(f"{block}/{ours}", f"{layer}.{theirs}") | tables.norm(
            f"{block}/{ours}_norm", f"{layer}.{norm}"
        )
    side = {"encoder": "source", "decoder": "target"}[stack]
    table |= tables.embedding(f"{side}_embedding", f"{stack}.tok_embedding")
    return table | tables.embedding(f"{side}_input/positions", f"{stack}.pos_embedding")


def test_molecules_are_written_as_annalog_writes_them(wheel, monkeypatch):
    """A Post-LN encoder–decoder with learned positions (ANNalog 1.0.6, MIT), beside the modules of its package."""
    torch = pytest.importorskip("torch", reason=WANTED)
    path = wheel("annalog")
    package = types.ModuleType("annalog")  # without what it imports
    package.__path__ = [f"{path}/annalog"]
    monkeypatch.setitem(sys.modules, "annalog", package)
    theirs = importlib.import_module("annalog.model_files.seq2seq_attention")
    with zipfile.ZipFile(path).open("annalog/ckpt_and_vocab/Lev_extended.pt") as file:
        state = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    sizes = (256, 3, 8, 512, 0.0, "cpu", 102)
    model = theirs.Seq2Seq(theirs.Encoder(59, *sizes), theirs.Decoder(59, *sizes), 1, 1, "cpu").eval()
    model.load_state_dict(state)
    attentions = {"self_attn": ("self_attention", "self_attn_layer_norm")}
    crossed = attentions | {"cross_attn": ("encoder_attention", "enc_attn_layer_norm")}
    table = post_norm_stack("encoder", attentions) | post_norm_stack("decoder", crossed)
    table |= tables.linear("head/output", "decoder.fc_out", bias=False)
    table |= {"head/bias": tables.Entry("decoder.fc_out.bias")}
    signs = [chr(0x4E00 + i) for i in range(59)]  # one for every id
    symbols = {"unk": 0, "pad": 1, "bos": 2, "eos": 3}
    sides = vocabulary(signs, "", **symbols, before=[2]), vocabulary(signs, "", **symbols)
    fields = {"d_model": 256, "d_ff": 512, "num_heads": 8, "num_layers": 3, "norm_epsilon": 1e-5,
              "positions": "learned", "max_length": 102}  # fmt: skip
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    run = run_of(fields, sides, table, arrays)
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 59, (30, 12))  # of one length, so that theirs answers them together
    texts = ["".join(signs[i] for i in row) for row in ids]
    source = np.pad(np.pad(ids, ((0, 0), (1, 0)), constant_values=2), ((0, 0), (0, 1)), constant_values=3)
    target = torch.full((len(ids), 1), 2)
    with torch.no_grad():
        for _ in range(20):
            logits, _ = model(torch.tensor(source), target)
            target = torch.cat([target, logits[:, -1:].argmax(dim=-1)], dim=1)
    written = ["".join(signs[i] for i in row[1:]).partition(signs[3])[0] for row in target.tolist()]
    assert run.predict(texts) == written


BERTS = {  # model → package, its folder there, options of its import
    "bert_ft_10k_25s": ("rxnfp", "rxnfp/models/transformers/bert_ft_10k_25s", []),
    "bert_ft": ("rxnfp", "rxnfp/models/transformers/bert_ft", ["--model_type=bert"]),
    "bert_pretrained": ("rxnfp", "rxnfp/models/transformers/bert_pretrained", ["--model_type=bert"]),
    "AntiBERTy_md_smooth": ("antiberty", "antiberty/trained_models/AntiBERTy_md_smooth", ["--tokenizer={}/.."]),
}


@pytest.mark.parametrize("name", BERTS)
def test_berts_of_packages_have_the_logits_of_transformers_and_go_out_as_they_came(name, wheel, tmp_path):
    """Pickles, with a vocab.txt alone and a config.json that lacks fields (rxnfp 0.1.0 and AntiBERTy 0.1.3, MIT)."""
    pytest.importorskip("torch", reason=WANTED)
    transformers = pytest.importorskip("transformers", reason=WANTED)
    package, inside, options = BERTS[name]
    with zipfile.ZipFile(wheel(package)) as files:
        files.extractall(tmp_path, [file for file in files.namelist() if file.startswith(str(Path(inside).parent))])
    folder = tmp_path / inside
    more = [option.format(folder) for option in ("--do_lower_case=false", *options)]
    assert main(["unpickle", str(folder)]) == 0
    assert main(["import", str(folder), f"--workdir={tmp_path / 'run'}", *more]) == 0
    run = load(tmp_path / "run", None, make_mesh(1))
    words = folder if (folder / "vocab.txt").exists() else folder.parent
    tokenizer = transformers.BertTokenizer.from_pretrained(words, do_lower_case=False)
    lines = [*documents(), "C C ( = O ) [N+] >> Br", "Q V Q [MASK] A"]
    assert [[*each] for each in run.inputs.side.encode(lines)] == tokenizer(lines)["input_ids"]
    ours, theirs = both_logits(folder, tmp_path / "run", Subject(run, run.config.decode))
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).all()
    export_model(str(tmp_path / "run"), tmp_path / "out")
    before, after = Tensors(folder), Tensors(tmp_path / "out")
    prefix = "" if "bert.pooler.dense.bias" in before.found else "bert."  # which files of a bare model leave out
    assert len(after.found) > 16 * run.config.model.num_layers
    for path in after.found:
        np.testing.assert_array_equal(after.read(path), before.read(path.removeprefix(prefix)))
