"""One model of several pairs of languages: symbols around texts, mixtures, scores by pair, answers by line."""

import dataclasses
import json

import numpy as np
import pytest
from etils.epath import Path

from jformer import main
from jformer.config import as_config_dict, load_config, resolve
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers.pretrained import FastTokenizer
from jformer.data.vocabularies import VocabularySpec, directed, learn_tokenizers
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.inference import verify
from jformer.inference.answers import Request
from jformer.inference.predict import load
from jformer.inference.verify import Subject
from jformer.tasks.build import build_task
from jformer.tools.server.limits import Limits
from jformer.tools.sweep.experiment import reported
from jformer.training.corpora import open_data, segmentations
from tests import small_run
from tests.tools.hf import small_runs

LINES = {"aa": "ba da ga", "bb": "bo do go", "cc": "bu du gu"}
TRAINED, UNTRAINED = [("aa", "bb"), ("bb", "aa"), ("aa", "cc"), ("cc", "aa")], [("bb", "cc"), ("cc", "bb")]


def options(folder, place):
    """Return options of six pairs of languages, two of which are not trained."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for split, count in {"train": 60, "valid": 6, "test": 8}.items():
        words = rng.integers(0, 3, (count, 4))
        for language, line in LINES.items():
            text = "".join(" ".join(line.split()[i] for i in row) + "\n" for row in words)
            (folder / f"{split}.{language}").write_text(text)
    options = small_run.get_config()
    options.model.update(dropout=0.0, tied_output=False)
    options.data.update(source="files", dir=str(folder), tokenizer="bpe", vocab_size=60, language_symbols=place)
    options.data.update(source_language="aa", target_language="bb", test=("aa-bb=test",))
    options.data.cache_dir = str(folder / "cache")
    options.train.update(num_steps=2, eval_every=2, checkpoint_every=2, log_every=1)
    options.decode.update(batch_size=16, max_extra_length=2)
    corpora = []
    for source, target in [*TRAINED[1:], *UNTRAINED]:
        scored = {"valid": "valid"} if (source, target) in TRAINED else {"train": ""}
        languages = {"source_language": source, "target_language": target}
        corpora.append({"dir": str(folder), **languages, "test": (f"{source}-{target}=test",), **scored})
    options.data.mixture = tuple(corpora)
    return options


def opened(config, workdir):
    return open_data(config.data, config.train, config.seed, build_task(config), Path(workdir), False)


@pytest.mark.parametrize(
    ("place", "around"), [("source", (["__fr__"], [])), ("target", (["__en__"], ["__fr__"]))]
)  # Johnson et al. 2017; NLLB
def test_a_language_is_one_token_where_the_place_says_and_no_text_can_spell_it(tmp_path, place, around):
    data = DataConfig(vocab_size=60, language_symbols=place, source_language="en", target_language="fr")
    texts = Split("train", "1", lambda counts: iter([Pair("a cat fr", "un _chat_")] * 9))
    spec = {"shared": VocabularySpec("bpe", ("source", "target"))}
    plain = learn_tokenizers(Path(tmp_path / "t"), data, [texts], spec)
    tokenizers = directed(plain, data)
    dropping = next(segmentations(tokenizers, dataclasses.replace(data, bpe_dropout=0.1)))
    for tokenizer, symbols in zip([*tokenizers, *dropping], around * 2, strict=True):
        side = Side(tokenizer, 20)
        (ids,) = side.encode(["un chat __fr__"])
        written = [tokenizer.tokens[i] for i in ids]
        assert written[: len(symbols)] == symbols
        assert "__fr__" not in written[len(symbols) :]
        assert tokenizer.decode(ids) == "un chat __fr__"
    other = directed(plain, data, ("fr", "en"))
    encoders = [PairEncoder(Side(a, 20), Side(b, 20), "drop").fingerprint() for a, b in (plain, tokenizers, other)]
    assert len(set(encoders)) == 3  # which cached arrays are found by
    with pytest.raises(UserError, match="no symbol for the language 'de'"):
        directed(plain, data, ("en", "de"))
    for asked in (("", "fr"), ("fr", "")):
        with pytest.raises(UserError, match="into one language, so leave out 'fr'"):
            directed(plain, DataConfig(), asked)


def test_pairs_of_languages_are_trained_by_temperature_and_each_with_its_symbols(tmp_path):
    chosen = options(tmp_path / "text", "target")
    chosen.data.mixture_temperature = 100.0
    large = tmp_path / "text" / "large.aa"
    large.write_text((tmp_path / "text" / "train.aa").read_text() * 3)
    large.with_suffix(".bb").write_text((tmp_path / "text" / "train.bb").read_text() * 3)
    chosen.data.train = "large"
    data = opened(resolve(chosen), tmp_path / "run")
    assert list(data.valid) == ["aa-bb", "bb-aa", "aa-cc", "cc-aa"]
    drawn = np.array(data.batches.plan.weights) * [len(corpus) for corpus in data.corpora]
    np.testing.assert_allclose(drawn / drawn.sum(), 1 / 4, rtol=0.02)  # 180 examples and three times 60
    np.testing.assert_allclose(drawn.sum(), 360)
    tokens = data.tokenizers[0].tokens
    begun = [
        tuple(tokens[side.values[side.offsets[0]]] for side in (corpus.source, corpus.target))
        for corpus in data.corpora
    ]
    assert begun == [(f"__{source}__", f"__{target}__") for source, target in TRAINED]
    assert {"aa-bb", "valid_aa-bb", "mean", "zero-shot"} < reported(resolve(chosen)).keys()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["source", "target"])
def test_a_run_of_several_languages_is_scored_by_pair_and_answers_by_line_and_by_file(tmp_path, place, capsys):
    run, file = tmp_path / "run", tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\n\nfrom tests.test_languages import options\n\n\n"
        f"def get_config():\n    return options(Path({str(tmp_path / 'text')!r}), {place!r})\n"
    )
    assert main.main(["jformer", f"--config={file}", f"--workdir={run}"]) == 0
    printed = capsys.readouterr().out
    pairs = [f"{a}-{b}" for a, b in [*TRAINED, *UNTRAINED]]
    assert [*pairs, "mean", "zero-shot"] in [line.split() for line in printed.splitlines()]
    figures = records.metrics(Path(run))
    assert {name.partition("/")[0] for name in figures} == {*reported(load_config(Path(run) / "config.json")), "run"}
    each = [figures[f"{key}/perplexity"] for key in pairs]
    np.testing.assert_allclose(figures["mean/perplexity"], np.mean(each[:4]))
    np.testing.assert_allclose(figures["zero-shot/perplexity"], np.mean(each[4:]))
    losses = [figures[f"valid_{key}/loss"] for key in pairs[:4]]
    assert min(losses) < figures["valid/loss"] < max(losses)

    inputs = tmp_path / "in.jsonl"
    asked = [{"source": LINES[a], "source_language": a, "target_language": b} for a, b in UNTRAINED * 2]
    inputs.write_text("".join(json.dumps(each) + "\n" for each in asked))
    arguments = ["jformer", "--mode=predict", f"--workdir={run}", f"--output={tmp_path / 'out'}"]
    assert main.main([*arguments, f"--input={inputs}", "--config.decode.inputs=jsonl"]) == 0
    by_line = (tmp_path / "out").read_text().splitlines()
    for number, (a, b) in enumerate(UNTRAINED):
        (tmp_path / "in").write_text(LINES[a] + "\n")
        languages = [f"--config.decode.source_language={a}", f"--config.decode.target_language={b}"]
        assert main.main([*arguments, f"--input={tmp_path / 'in'}", *languages]) == 0
        assert (tmp_path / "out").read_text().splitlines() == [by_line[number]] == [by_line[number + 2]]
    predictor = load(str(run))
    alone = [predictor.score([Pair("ba da", "bu du", languages=pair)])[0] for pair in [*TRAINED, ("", "")]]
    assert alone[-1] == alone[0]  # the run's own pair
    assert len({scored.log_prob for scored in alone}) == 4 - (place == "source")  # into aa from both others is the same
    lines = {language: (tmp_path / "text" / f"test.{language}").read_text().splitlines() for language in LINES}
    for (a, b), perplexity in zip([*TRAINED, *UNTRAINED], each, strict=True):  # each test set in its own languages
        pairs = [Pair(*texts, languages=(a, b)) for texts in zip(lines[a], lines[b], strict=True)]
        found = np.concatenate([scored.token_log_probs for scored in predictor.score(pairs)])
        np.testing.assert_allclose(np.exp(-found.mean()), perplexity, rtol=1e-3)
    assert main.main(["jformer", "--mode=verify", f"--workdir={run}"]) == 0
    capsys.readouterr()
    assert main.main([*arguments, f"--input={inputs}", "--config.decode.target_language=zz"]) == 2
    assert "no symbol for the language 'zz'" in capsys.readouterr().err
    inputs.write_text(json.dumps(asked[0]) + "\n" + json.dumps({**asked[1], "target_language": "zz"}) + "\n")
    assert main.main([*arguments, f"--input={inputs}", "--config.decode.inputs=jsonl"]) == 2
    assert f"{inputs}:2: the vocabulary has no symbol for the language 'zz'" in capsys.readouterr().err
    assert main.main(["jformer", "--mode=evaluate", f"--workdir={run}", "--config.decode.target_language=bb"]) == 2
    assert "decode.target_language='bb': test sets have languages of their own (aa)" in capsys.readouterr().err


def test_a_server_takes_other_source_languages_of_a_model_whose_target_language_all_lines_share(tmp_path):
    pytest.importorskip("tokenizers")
    engine = pytest.importorskip("jformer.tools.server.engine")
    content, ids = small_runs._unigram()
    source, target = ids["eng_Latn"], ids["deu_Latn"]
    side = FastTokenizer(
        content, {"pad": 1, "bos": target, "eos": 2, "unk": 3, "after": [source]}
    )  # as the first mBART
    rows = {"vocab_size": len(ids), "target_vocab_size": len(ids)}
    run = small_runs.write_run(tmp_path / "run", "bart_base", "translate", (side, side), max_length=32, **rows)
    served = engine.Engine(load(str(run)), Limits())
    asked = {"source": "the cat", "source_language": "fra_Latn"}
    (request,) = served.requests(engine.schema.InputsBody(inputs=[asked]))
    assert request.languages == ("fra_Latn", "")
    with pytest.raises(UserError, match="so lines cannot choose it"):
        served.requests(engine.schema.InputsBody(inputs=[{**asked, "target_language": "fra_Latn"}]))


def test_an_imported_model_of_several_languages_answers_in_each_and_is_trained_in_each(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    run = small_runs.nllb(tmp_path / "run")  # of eng_Latn and deu_Latn
    predictor = load(str(run))
    ids = predictor.tokenizers[0].ids
    requests = [Request(small_runs.LINES[0], languages=("", name)) for name in ("", "deu_Latn", "fra_Latn")]
    pieces = [piece for group in predictor.inputs.pieces(requests) for piece in group]
    assert [predictor.inputs.begun(piece) for piece in pieces] == [
        (ids[name],) for name in ("deu_Latn", "deu_Latn", "fra_Latn")
    ]
    batch, _ = predictor.inputs.arrays(pieces, 4)
    assert batch["prompt"][:3].tolist() == [[2, ids[name]] for name in ("deu_Latn", "deu_Latn", "fra_Latn")]
    assert predictor.generate(requests)[0] == predictor.generate(requests)[1]

    chosen = as_config_dict(load_config(run / "config.json"))
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        (tmp_path / f"train.{language}").write_text("".join(f"{line}\n" for line in small_runs.LINES))
    languages = {"dir": str(tmp_path), "source_language": "deu_Latn", "target_language": "fra_Latn"}
    chosen.data.update(dir=str(tmp_path), source_language="eng_Latn", target_language="deu_Latn", test=())
    chosen.data.update(mixture=(languages,), language_symbols="target", cache_dir=str(tmp_path / "cache"))
    chosen.train.update(init_from=str(run), eval_every=0)
    data = opened(resolve(chosen), tmp_path / "child")
    first = [[side.values[0] for side in (corpus.source, corpus.target)] for corpus in data.corpora]
    assert first == [[ids["eng_Latn"], ids["deu_Latn"]], [ids["deu_Latn"], ids["fra_Latn"]]]
    scored = {**languages, "target_language": "xyz_Latn", "train": "", "test": ("other=train",)}
    chosen.data.mixture = (languages, scored)
    with pytest.raises(UserError, match="xyz_Latn"):  # before training, not when it is scored
        opened(resolve(chosen), tmp_path / "child")
    chosen.data.update(mixture=(), test=("train",))
    chosen.train.init_from = ""
    for name in ("deu_Latn", "fra_Latn"):
        chosen.decode.target_language = name if name == "fra_Latn" else ""
        config = resolve(chosen)
        found = []
        monkeypatch.setattr(verify, "Subject", lambda *given: found.append(Subject(*given)) or found[-1])  # noqa: B023
        monkeypatch.setattr(verify, "CHECKS", ())
        assert verify.verify(config, run)
        (verified,) = found
        assert verified.origin == "of test set 'train'"
        assert {verified.inputs.begun(piece) for piece in verified.pieces} == {(ids[name],)}
    chosen.data.update(mixture=(languages,), language_symbols="source")
    chosen.train.init_from = str(run)
    with pytest.raises(UserError, match="use 'target'"):
        opened(resolve(chosen), tmp_path / "other")
