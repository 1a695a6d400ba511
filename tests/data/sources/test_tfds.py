import io
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums
from tensorflow_datasets.translate import Wmt14Translate
from tensorflow_datasets.translate.wmt import DATASET_MAP

from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from tests.data.sources.test_sources import read

PAIRS = [(f"line {i} “x”", f"Zeile {i} äöü") for i in range(1100)]  # more than are read at once


class TinyPairs(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    texts = tuple(PAIRS)

    def _info(self):
        text, number = tfds.features.Text(), tfds.features.Scalar(dtype=np.int64)
        features = tfds.features.FeaturesDict({"en": text, "de": text, "row": number})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(self.texts), "test": self._generate_examples(self.texts[:5])}

    def _generate_examples(self, texts):
        for row, (source, target) in enumerate(texts):
            yield row, {"en": source, "de": target, "row": row}


class HandFetched(TinyPairs):
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put pairs.tsv there."

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(dl_manager.manual_dir / "pairs.tsv")}


class OddTexts(TinyPairs):
    texts = (("a\r", "b\nc"), (b"\xff", "d"))


class Reviews(TinyPairs):
    texts = (("good\nfilm", 1), ("bad film", 0))

    def _info(self):
        label = tfds.features.ClassLabel(names=["negative", "positive"])
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _generate_examples(self, texts):
        for row, (text, label) in enumerate((*texts, ("no label", -1))):
            yield row, {"text": text, "label": label}


def config(data_dir, name="tiny_pairs", **options):
    return SourceConfig(source="tfds", dir=str(data_dir), name=name, **options)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    TinyPairs(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_prepared_pairs_come_back_in_order(prepared):
    pairs, counts = read(open_split(config(prepared), "train"))
    assert pairs == [Pair(*texts) for texts in PAIRS]
    assert not counts


def test_a_set_is_prepared_when_first_opened(tmp_path):
    pairs, _ = read(open_split(config(tmp_path), "test"))
    assert pairs == [Pair(*texts) for texts in PAIRS[:5]]


def test_a_set_that_several_open_at_once_is_prepared_once(tmp_path, monkeypatch):
    made, generate = [], TinyPairs._split_generators
    monkeypatch.setattr(
        TinyPairs, "_split_generators", lambda self, manager: made.append(time.sleep(0.3)) or generate(self, manager)
    )
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: read(open_split(config(tmp_path), "test"))[0], range(2)))
    assert found == [[Pair(*texts) for texts in PAIRS[:5]]] * 2
    assert len(made) == 1
    monkeypatch.setattr(tfds.core.registered, "_DATASET_REGISTRY", {})  # the files alone, a lock among them
    assert read(open_split(config(tmp_path), "test"))[0] == found[0]


def test_classes_are_read_by_name_and_texts_for_themselves(tmp_path):
    labelled = config(tmp_path, "reviews", source_language="text", target_language="label")
    pairs, counts = read(open_split(labelled, "train[:2]"))
    assert pairs == [Pair("good film", "positive"), Pair("bad film", "negative")]
    assert counts.total() == 1
    with pytest.raises(UserError, match="reviews train, example 2: 'label' has no class"):
        read(open_split(labelled, "train"))
    alone = config(tmp_path, "reviews", source_language="", target_language="text")
    assert read(open_split(alone, "train"))[0] == [Pair("", text) for text in ("good\nfilm", "bad film", "no label")]
    with pytest.raises(UserError, match="has the texts label, text, not '' and ''"):
        open_split(config(tmp_path, "reviews", source_language="", target_language=""), "train")


def test_subsplits_are_read_and_fingerprinted_apart(prepared):
    names = ("train", "train[:10%]", "train[90%:]", "train[:10%]+test")
    splits = {name: open_split(config(prepared), name) for name in names}
    assert read(splits["train[:10%]"])[0] == [Pair(*texts) for texts in PAIRS[:110]]
    assert read(splits["train[90%:]"])[0] == [Pair(*texts) for texts in PAIRS[990:]]
    assert len(read(splits["train[:10%]+test"])[0]) == 115
    assert len({split.fingerprint for split in splits.values()}) == 4
    assert open_split(config(prepared), "train").fingerprint == splits["train"].fingerprint


def test_the_fingerprint_sees_content_under_the_same_name(prepared, tmp_path, monkeypatch):
    before = open_split(config(prepared), "train").fingerprint
    monkeypatch.setattr(TinyPairs, "texts", [("Line", "Zeile"), *PAIRS[1:]])
    assert open_split(config(tmp_path), "train").fingerprint != before


def test_files_alone_are_enough_and_tensorflow_is_not_imported(prepared):
    code = (
        "import sys; from collections import Counter\n"
        "from jformer.data.data_config import SourceConfig; from jformer.data.sources import open_split\n"
        f"split = open_split(SourceConfig(source='tfds', dir={str(prepared)!r}, name='tiny_pairs'), 'train')\n"
        f"assert list(split.read(Counter()))[7][:2] == {PAIRS[7]!r}\n"
        "from jformer.data.sources import tfds\n"
        "assert tfds._find(SourceConfig(name='wmt14_translate/de-en')).name == 'wmt14_translate'\n"
        "assert not {'tensorflow', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_texts_are_checked_like_those_of_files(tmp_path):
    pairs, counts = [], Counter()
    with pytest.raises(UserError, match="odd_texts train, example 1: invalid UTF-8"):
        pairs.extend(open_split(config(tmp_path, "odd_texts"), "train").read(counts))
    assert pairs == [Pair("a", "b c")]
    assert sorted(counts.values()) == [1, 1]


@pytest.mark.parametrize(
    ("options", "split", "message"),
    [
        ({"name": "wmt14_translat/de-en"}, "train", "no such data set.* did you mean wmt14_translate"),
        ({"name": "wmt14_translate/en-de"}, "train", "data.name='wmt14_translate/en-de': .*en-de not found.* de-en"),
        ({"name": ""}, "train", "data.name=''"),
        ({"name": "hand_fetched"}, "train", "could not prepare it in .*Put pairs.tsv there"),
        ({"target_language": "fr"}, "train", "has the texts de, en, not 'en' and 'fr'"),
        ({"target_language": "row"}, "train", "has the texts de, en, not 'en' and 'row'"),
        ({}, "valid", "no split 'valid'; choose from: train, test"),
        ({}, "train[:10", "no split"),
    ],
)
def test_what_tfds_lacks_is_one_line_with_a_remedy(prepared, options, split, message):
    with pytest.raises(UserError, match=message) as caught:
        open_split(config(prepared, **options), split)
    assert "\n" not in str(caught.value)


def test_a_set_prepared_for_tensorflow_is_refused(prepared, tmp_path):
    for path in (prepared / "tiny_pairs" / "1.0.0").iterdir():
        folder = tmp_path / "tiny_pairs" / "1.0.0"
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath(path.name).write_bytes(path.read_bytes().replace(b'"array_record"', b'"tfrecord"'))
    with pytest.raises(UserError, match=r"as tfrecord; .* prepared as array_record"):
        open_split(config(tmp_path), "train")


def test_wmt14_is_prepared_from_its_archives_without_tensorflow(tmp_path, monkeypatch):
    """The real builder, down to checksums and extraction; only the archives are small and already fetched."""
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    infos = {}
    for number, (url, files) in enumerate(_wmt14_archives(tmp_path).items()):
        archive = manual / f"{number}.tgz"
        with tarfile.open(archive, "w:gz") as tar:
            for path, text in files.items():
                content = text.encode()
                member = tarfile.TarInfo(path)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        infos[url] = checksums.compute_url_info(archive)
    monkeypatch.setattr(checksums, "get_all_url_infos", lambda: infos)
    monkeypatch.setattr(Wmt14Translate, "url_infos", None)

    wmt = config(tmp_path, "wmt14_translate/de-en")
    subsets = {"train": ("europarl_v7", "commoncrawl", "newscommentary_v9"), "test": ("newstest2014",)}
    for split, names in subsets.items():
        pairs, _ = read(open_split(wmt, split))
        assert sorted(pairs) == sorted(Pair(f"{name} en {i}", f"{name} de {i}") for name in names for i in range(3))
    assert "tensorflow" not in sys.modules


def _wmt14_archives(folder):
    """Return {url: {path: text}} with three lines for every file of wmt14_translate/de-en."""
    archives = defaultdict(dict)
    for names in Wmt14Translate(config="de-en", data_dir=folder).subsets.values():
        for name in names:
            subset = DATASET_MAP[name]
            urls, paths = subset.get_url("de"), subset.get_path("de")
            for url, path, language in zip(urls * len(paths), paths, ("de", "en"), strict=False):
                lines = [f"{name} {language} {i}" for i in range(3)]
                if path.endswith(".sgm"):
                    lines = [f'<seg id="{i}">{line}</seg>' for i, line in enumerate(lines, start=1)]
                archives[url][path] = "\n".join(lines) + "\n"
    return archives
