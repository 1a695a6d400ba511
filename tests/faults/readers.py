"""Every kind of file that jformer reads: a small one that is whole, and what reads it."""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from etils import epath
from PIL import Image

from jformer import integrity
from jformer.checkpoints import word_vectors
from jformer.checkpoints.checkpoint import Checkpoints
from jformer.checkpoints.manifest import Manifest
from jformer.config import load_config
from jformer.data import image_files, tokenizers
from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.evaluation import records
from jformer.inference import output_file
from jformer.tools.hf import tensors, vocabulary
from jformer.tools.sweep import store
from jformer.training import trackers
from jformer.training.record import JsonlWriter
from tests.data.tokenizers.test_pretrained import pieces
from tests.stored_run import store_run

TEXT = "a house\tein Haus\nthe end\tdas Ende\n" * 20
CONLL = "-DOCSTART-\tO\n\nIn\tO\nNew\tB-place\nYork\tI-place\n\nthe\tO\nend\tO\n\n" * 10
TAGGED = '{"words": ["In", "New", "York"], "tags": ["O", "B-place", "I-place"]}\n' * 10
QUESTION = {"id": "q1", "question": "Where?", "answers": [{"text": "York", "answer_start": 7}]}
PARAGRAPH = {
    "context": "In New York.",
    "qas": [QUESTION, QUESTION | {"id": "q2", "is_impossible": True, "answers": []}],
}
SQUAD = json.dumps({"version": "v2.0", "data": [{"title": "places", "paragraphs": [PARAGRAPH] * 5}]})
CAPTIONS = "one.png\ta cat\none.jpg\tone cat\nmany.npy#1\tnoise\n" * 5
SAMPLE = '{"step": 10, "sample": 1, "source": "a", "reference": "b", "answer": "c"}\n' * 3
BEAT = '{"step": 10, "time": 1.5, "loss": null, "phase": "updating"}\n'
SWEEP = '{"experiment": "small", "metric": "valid/loss", "study": "small", "id": "0123456789abcdef"}'
JSONL = '{"en": "a house", "de": "ein Haus"}\n{"en": "the end", "de": "das \\u00c4nde"}\n' * 10


class Reader(NamedTuple):
    """A file, and what reads it."""

    path: Path
    read: Callable[[], Any]


def readers(folder: Path) -> dict[str, Reader]:
    """Write a file of every kind below a folder, and return what reads each."""
    return dict((*of_runs(folder), *of_texts(folder), *of_arrays(folder), *of_vocabularies(folder)))


def of_runs(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the files of a run."""
    run = epath.Path(store_run(folder / "run"))
    yield "config.json", Reader(run / "config.json", lambda: load_config(run / "config.json"))
    yield "metrics.jsonl", Reader(run / "metrics.jsonl", lambda: records.rows(run))
    yield "results.json", Reader(run / "results.json", lambda: records.metrics(run))
    yield "outputs", Reader(run / "outputs" / "test.txt", lambda: records.outputs(run, "test"))
    for name, content, read in (
        ("samples.jsonl", SAMPLE, lambda: records.samples(run)),
        ("heartbeat.json", BEAT, lambda: records.is_training(run)),
        ("trackers.json", '{"wandb": "abc", "mlflow": "def"}', lambda: trackers.run_ids(run)),
        ("sweep.json", SWEEP, lambda: store.read_record(run / "sweep.json")),
    ):
        (run / name).write_text(content)
        yield name, Reader(run / name, read)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=store.open_storage(run, ""), study_name="small")
    study.optimize(lambda trial: trial.suggest_float("lr", 0.0, 1.0), 2)
    yield "trials.journal", Reader(run / "trials.journal", lambda: store.open_storage(run, "").get_all_studies())
    rows = run / "rows.jsonl"
    writer = JsonlWriter(rows)
    for step in range(20):
        writer.write({"step": step, "split": "train", "loss": 1.0 / (step + 1)})
    writer.close()
    yield "metrics.jsonl to go on with", Reader(rows, lambda: JsonlWriter.truncate_after(rows, 10))
    step = run / "checkpoints" / "7" / "manifest"
    step.mkdir(parents=True)
    manifest = Manifest({"step": 7}, 1.0, {"params": {}}).to_json()
    (step / "metadata").write_text(json.dumps(manifest))
    yield "manifest", Reader(step / "metadata", lambda: progress(run))
    answers = folder / "answers.txt"
    settings = {"mode": "predict", "beams": 4}
    output_file.open_output(answers, False, settings).close()
    answers.write_text("one\n")
    record = folder / "answers.txt.settings.json"
    yield "record of an output", Reader(record, lambda: output_file.lines_to_keep(answers, settings))
    sealed = run / "tokenizer"
    sealed.mkdir()
    (sealed / "shared.json").write_text("{}")
    integrity.seal(sealed)
    yield "digests.json", Reader(sealed / "digests.json", lambda: integrity.damaged(sealed))


def progress(run: epath.Path) -> dict[str, Any]:
    """Read a checkpoint's manifest anew."""
    with Checkpoints(run / "checkpoints", clean=False) as checkpoints:
        return checkpoints.manifest(7).progress


def of_texts(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield the files of corpora."""
    for name, suffix, source, content in (
        ("pairs", "tsv", "files", TEXT.encode()),
        ("pairs as JSON", "jsonl", "files", JSONL.encode()),
        ("compressed text", "txt.gz", "text", gzip.compress(TEXT.encode())),
        ("text", "txt", "text", TEXT.encode()),
        ("labelled text", "tsv", "labelled", TEXT.encode()),
        ("tagged words", "conll", "conll", CONLL.encode()),
        ("tagged words as JSON", "jsonl", "conll", TAGGED.encode()),
        ("questions", "json", "squad", SQUAD.encode()),
    ):
        here = folder / name.replace(" ", "_")
        here.mkdir()
        path = here / f"train.{suffix}"
        path.write_bytes(content)
        for invalid in ("refuse", "replace"):
            config = SourceConfig(source=source, dir=str(here), invalid=invalid)
            yield f"{name}, {invalid}", Reader(path, lambda config=config: all_of(config))


def all_of(config: SourceConfig) -> list[Any]:
    """Read a split to its end."""
    return list(open_split(config, "train").read(Counter()))


def of_arrays(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield pictures, labels, word vectors and weights."""
    here = folder / "arrays"
    here.mkdir()
    np.save(here / "train.npy", np.zeros((4, 3, 3), np.uint8))
    np.save(here / "train.labels.npy", np.arange(4))
    config = SourceConfig(source="images", dir=str(here))
    yield "images", Reader(here / "train.npy", lambda: all_of(config))
    yield "labels", Reader(here / "train.labels.npy", lambda: all_of(config))
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(here / "one.png")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(here / "one.jpg")
    for name in ("one.png", "one.jpg"):
        yield f"picture {name}", Reader(here / name, lambda name=name: pixels([str(here / name)]))
    np.save(here / "many.npy", np.zeros((2, 3, 3), np.uint8))
    (here / "train.tsv").write_text(CAPTIONS)
    captions = SourceConfig(source="captions", dir=str(here))
    for name in ("train.tsv", "many.npy"):
        yield f"captions: {name}", Reader(here / name, lambda: pixels(pair.source for pair in all_of(captions)))
    vectors = here / "vectors.txt"
    vectors.write_text("3 4\nhouse 1 2 3 4\nend 0.5 1e-3 -2 0\nHaus 1 1 1 1\n")
    yield "word vectors", Reader(vectors, lambda: word_vectors.read_vectors(vectors, {"house", "end"}, 4))
    binary = here / "vectors.bin"
    entries = (name + b" " + np.arange(4, dtype=np.float32).tobytes() for name in (b"house", b"end"))
    binary.write_bytes(b"2 4\n" + b"\n".join(entries) + b"\n")
    yield "word vectors, binary", Reader(binary, lambda: word_vectors.read_vectors(binary, {"house", "end"}, 4))
    model = folder / "model"
    tensors.write(model_folder(model), {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float32)}.items())
    yield "safetensors", Reader(model / tensors.WHOLE, lambda: read_tensors(model))
    shards = folder / "shards"
    tensors.write(model_folder(shards), {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float32)}.items(), 24)
    yield "index of tensors", Reader(shards / tensors.INDEX, lambda: read_tensors(shards))
    fields = model / "config.json"
    fields.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    yield "fields of a model", Reader(fields, lambda: vocabulary.read_json(fields))


def pixels(names: Iterable[str]) -> list[Any]:
    """Read images by their names."""
    return list(image_files.read_images(list(names)))


def model_folder(path: Path) -> Path:
    """Make a folder."""
    path.mkdir()
    return path


def read_tensors(folder: Path) -> list[Any]:
    """Read all tensors of a model."""
    found = tensors.Tensors(folder)
    return [found.read(name) for name in found.found]


def of_vocabularies(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Yield tokenizers of every kind."""
    here = epath.Path(folder / "tokenizers")
    here.mkdir()
    texts = [line.split("\t")[0] for line in TEXT.splitlines()]
    for kind in ("word", "char", "byte", "bpe", "unigram", "label"):
        tokenizers.learn(kind, texts, 40, "identity", False).save(here, kind)
    pieces([]).save(here, "pieces")
    for path in sorted(here.iterdir()):
        yield f"tokenizer {path.name}", Reader(path, lambda name=path.stem: use(tokenizers.load(here, name)))


def use(tokenizer: tokenizers.Tokenizer) -> str:
    """Cut a text and join its pieces."""
    return tokenizer.decode(tokenizer.encode(["a house"])[0]) if tokenizer.vocab_size else ""
