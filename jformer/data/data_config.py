"""All options of the data room with their defaults. Plain dataclasses: no JAX, no I/O."""

import dataclasses
import re
from collections.abc import Sequence

from jformer.data.text import INVALID
from jformer.errors import UserError, check_choice, check_choices, check_least, check_range
from jformer.plugins import check_part

SOURCES = {
    "files": "jformer.data.sources.text_files:open_files",
    "labelled": "jformer.data.sources.text_files:open_labelled",
    "text": "jformer.data.sources.documents:open_split",
    "images": "jformer.data.sources.images:open_split",
    "captions": "jformer.data.sources.captions:open_split",
    "tables": "jformer.data.sources.tables:open_split",
    "tfds": "jformer.data.sources.tfds:open_split",
    "generated": "jformer.data.sources.generated:open_split",
    "conll": "jformer.data.sources.conll:open_split",
    "squad": "jformer.data.sources.squad:open_split",
}
RESERVED = ("schema", "run", "earlier", "digest")  # keys of results.json that are not test sets
TOKENIZERS = ("word", "char", "byte", "bpe", "unigram", "image")
SOURCE_CHOICES = {
    "document": ("line", "paragraph", "file"),
    "share_of": ("lines", "characters"),
    "labels": ("one", "several", "number"),
    "invalid": INVALID,
}
CHOICES = {
    "batching": ("buckets", "packed"),
    "overlong": ("drop", "cut", "split"),
    "piece_start": ("bos", "previous"),
    "noise": ("t5", "bart"),
    "label_weights": ("none", "balanced"),
    "normalization": ("identity", "nfkc"),
    "language_symbols": ("", "source", "target"),
}
OF_VOCABULARY = (  # options of DataConfig that say how a vocabulary is learned
    *("tokenizer", "vocab_size", "vocab_temperature", "vocabulary", "character_coverage", "byte_fallback", "symbols"),
    *("normalization", "split_digits"),
)
AUGMENTS = ("flip", "crop", "color", "randaugment")
CLEANING = (
    r"characters=\d+-\d+|ratio=\d+(\.\d+)?|(source|target)_script=\w+(\+\w+)*|identical|invalid|control|duplicates"
)
COMPARED = ("ratio", "identical", "source_script")
READ_TARGETS = ("ratio", "identical", "target_script")  # rules that need targets that are texts, not labels
LACKING = {  # data.source → prefixes of the rules that read a text it lacks
    "text": COMPARED,
    "images": ("",),  # all rules
    "captions": ("characters", *COMPARED),
    **dict.fromkeys(("labelled", "conll", "squad"), READ_TARGETS),
}
ROWS_DIVIDE_BY = 8  # with data.row_multiple=0: an update is the same on 1, 2, 4 or 8 devices

Languages = tuple[str, str]
"""The language of the source and that of the target; "" = that of the run, or none."""


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where one corpus comes from, and how often an epoch passes over it."""

    # files: sentence pairs | labelled: texts and labels | text | images (with labels) | captions | tables: Parquet and
    # Arrow | tfds | generated |
    # conll: words and tags | squad: questions | package.module:function, your own (docs/parts.md)
    source: str = "files"
    # The folder of the texts or images; in data.mixture, "" = data.dir. tfds: its data_dir ("" = its default)
    dir: str = ""
    name: str = ""  # tfds: builder[/config]; generated: quickstart | copy | reverse | sort
    source_language: str = "en"  # files: the suffix or the JSON key of the source side; tfds: its feature, "" = none
    target_language: str = "de"  # the same of the target side
    document: str = "line"  # text: an example is a line | a paragraph (between empty lines) | the whole file
    share_of: str = "lines"  # text: what a share in a split's name counts: lines | characters (document=file)
    labels: str = "one"  # classify: an example has one label | several, comma-separated, or none | a number
    invalid: str = "refuse"  # invalid characters (bytes that are not UTF-8, NUL): refuse | replace, counted
    # Training pairs to drop, all counted, with examples in cleaned.jsonl: characters=1-500 | ratio=3 (of characters) |
    # identical | invalid (characters, which `invalid` replaced) | control (characters) | source_script=LATIN,
    # target_script=CJK+HIRAGANA (half of the letters, by their Unicode names) | duplicates
    clean: tuple[str, ...] = ()
    # The split's name: a file stem, optionally with a share (text, tfds), as in "train[:10%]". In data.mixture, "" =
    # none: a corpus that is only scored, such as a language pair that is never trained
    train: str = "train"
    valid: str = ""  # the split, named as `train` is, that is scored while training; never trained on; "" = none
    test: tuple[str, ...] = ()  # "split" or "key=split"; the key names the row in results.json
    num_pairs: int = 20_000  # generated, except quickstart: training pairs to draw
    # Passes over this corpus per epoch. 2.0 = each pair twice; 0.5 = each in one of two epochs, 0.05 in one of 20:
    # each epoch draws a random share, and after 20 epochs all pairs have been drawn equally often.
    weight: float = 1.0

    def several_lines(self) -> bool:
        """Return whether a text may have several lines."""
        if self.source == "text":
            return self.document != "line"
        return self.source in ("tables", "tfds") and not self.source_language

    def check_source(self, name: str) -> None:
        """Raise UserError for the first invalid option of this corpus, whose section is `name`."""
        check_part(f"{name}.source", self.source, SOURCES)
        check_choices(name, self, SOURCE_CHOICES)
        if self.share_of == "characters" and self.document != "file":
            kind = f"{name}.document='file', not {self.document!r}"
            raise UserError(f"{name}.share_of='characters' may cut a line: it needs {kind}")
        for rule in self.clean:
            if not re.fullmatch(CLEANING, rule):
                raise UserError(
                    f"{name}.clean: {rule!r} is not one of 'characters=1-500', 'ratio=3', 'source_script=LATIN', "
                    "'target_script=CJK+HIRAGANA', 'identical', 'invalid', 'control' or 'duplicates'"
                )
            key, _, value = rule.partition("=")
            least, _, most = value.partition("-")
            if key == "characters" and int(least) > int(most):
                raise UserError(f"{name}.clean: {rule!r} admits no text: write characters=LEAST-MOST")
            if key == "ratio" and float(value) < 1:
                raise UserError(f"{name}.clean: {rule!r} must be at least 1: no text is longer than the longer one")
            if rule.startswith(LACKING.get(self.source, ())):
                raise UserError(f"{name}.clean: {rule!r} reads a text that source={self.source!r} lacks: leave it out")
        check_least(name, self, ("num_pairs",), 1)
        if not 0 < self.weight <= 100:
            raise UserError(f"{name}.weight={self.weight} must be above 0 and at most 100 passes an epoch")


@dataclasses.dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The training corpus, its evaluation splits, its tokens and its batches."""

    valid: str = "valid"  # the split, named as `train` is, that is scored while training; never trained on; "" = none
    test: tuple[str, ...] = ("test",)  # "split" or "key=split"; the key names the row in results.json
    mixture: tuple[SourceConfig, ...] = ()  # further corpora, with their own validation and test sets
    # T of Arivazhagan et al. 2019: an epoch draws from a corpus of n examples in proportion to weight x n ** (1 / T);
    # 1 = each example `weight` times, 5 = the paper's, 100 = nearly the same from each corpus
    mixture_temperature: float = 1.0
    # translate: a symbol names the target language, so that one model serves several: "" = none | source: it begins the
    # source (Johnson et al. 2017) | target: it begins the target, and a symbol of the source language the source (NLLB
    # team 2022). Languages are source_language and target_language of each corpus.
    language_symbols: str = ""

    # word | char | byte | bpe (Sennrich et al. 2016) | unigram (Kudo 2018), learned from the training split; image:
    # pixels
    tokenizer: str = "bpe"
    vocab_size: int = 8_000  # for each vocabulary, the 4 special tokens included; char and byte need no size
    vocab_shared: bool = True  # one vocabulary learned on both sides, or one for each side
    # word, bpe, unigram or your own: as mixture_temperature, for the text that the vocabulary is learned from
    vocab_temperature: float = 1.0
    vocabulary: str = ""  # bpe, unigram: a sentencepiece model to use instead; its pieces are renumbered
    character_coverage: float = 1.0  # bpe, unigram: the share of the text's characters that the vocabulary covers
    byte_fallback: bool = False  # bpe, unigram: unknown characters are split into bytes
    symbols: tuple[str, ...] = ()  # bpe, unigram: strings that are always single tokens, such as "<BT>"
    normalization: str = "identity"  # identity | nfkc, applied to both sides before tokenization
    # bpe, translate and lm: the share of merges dropped at each step when training text is segmented (Provilkov et al.
    # 2020 used 0.1)
    bpe_dropout: float = 0.0
    segmentations: int = 10  # bpe_dropout: segmentations of the training text; each epoch draws from all of them
    split_digits: bool = False  # not for word: every digit is a token of its own, so numbers generalise

    # classify, one label: none | balanced: examples weighted so that labels count equally, in losses and their accuracy
    label_weights: str = "none"
    # Side in pixels of the square that images are brought to: the shorter side is resized, the longer one
    # center-cropped. 0 = all images must have one size already.
    image_size: int = 0
    # Random augmentations of training images, in this order: flip | crop | color | randaugment (Cubuk et al. 2020).
    augment: tuple[str, ...] = ()

    max_source_length: int = 256  # tokens, the end symbol included
    max_target_length: int = 256  # the same of the target side
    # qa: a context too long for one window of max_source_length is read in several; the tokens from the start of one to
    # the start of the next, at most a whole window (the published code of Devlin et al. 2019 uses 128)
    doc_stride: int = 128
    # Training and validation examples over these limits: drop | cut | split them (lm, denoise, tag); all counted. Test
    # sets drop none.
    overlong: str = "drop"
    piece_start: str = "bos"  # lm, overlong=split: a piece is read after bos | the previous token of its text

    # denoise: t5: spans become sentinels, which the target spells out (Raffel et al. 2020) | bart: spans become masks
    # (Lewis et al. 2020)
    noise: str = "t5"
    noise_density: float = 0.15  # denoise, mlm: the share of tokens that is hidden (Devlin et al. 2019); BART used 0.3
    mean_span: float = 3.0  # denoise: tokens of a corrupted span, on average (Raffel et al. 2020); bart: Poisson

    batching: str = "buckets"  # buckets: few shapes, one pair a row; packed: one shape, several pairs a row
    num_buckets: int = 8  # each is one compiled shape
    packed_length: int = 256  # tokens a packed row holds on its larger side
    tokens_per_update: int = 8_192  # computed (padded) tokens of one update, counted on its larger side
    # The rows of a batch are a multiple of it: any number of devices times train.accumulation that divides it gives the
    # same updates. 0 = the least multiple of 8 that the devices of the first start divide; config.json records it.
    row_multiple: int = 0
    # Lengths of shapes are multiples of it, except for labels. 0 = what the fused attention kernel needs on the devices
    # of the first start, 8 on GPUs and 128 on TPUs, or 1 without a kernel; config.json records it.
    length_multiple: int = 0
    cache_dir: str = "~/.cache/jformer"  # tokenized corpora, looked up by fingerprint, and compiled programs

    def rows_divide_by(self) -> int:
        """Return the divisor of the rows of every batch: row_multiple if set, or what suits a few devices."""
        return self.row_multiple or ROWS_DIVIDE_BY

    def lengths_divide_by(self) -> int:
        """Return the divisor of the lengths of every batch."""
        return self.length_multiple or 1

    def parts(self) -> tuple[SourceConfig, ...]:
        """Return every corpus, this one first; those with the same source and no folder use this one's."""
        return (self, *map(self._placed, self.mixture))

    def _placed(self, part: SourceConfig) -> SourceConfig:
        here = not part.dir and part.source == self.source != "tfds"
        return dataclasses.replace(part, dir=self.dir) if here else part

    def of(self, part: SourceConfig) -> "DataConfig":
        """Return these options with another corpus as the first one."""
        own = {field.name: getattr(part, field.name) for field in dataclasses.fields(SourceConfig)}
        return dataclasses.replace(self, **own)

    def trained(self) -> list[SourceConfig]:
        """Return the corpora that are trained on."""
        return [part for part in self.parts() if part.train]

    def languages(self, part: SourceConfig) -> Languages:
        """Return the languages of a corpus, both empty if languages have no symbols."""
        return (part.source_language, part.target_language) if self.language_symbols else ("", "")

    def language_names(self) -> list[str]:
        """Return all languages that have symbols, sorted."""
        return sorted({name for part in self.parts() for name in self.languages(part) if name})

    def validation_sets(self) -> dict[str, SourceConfig]:
        """Map a name to each corpus with a validation set: its languages, or the number of the corpus."""
        found: dict[str, SourceConfig] = {}
        for number, part in enumerate(self.parts(), start=1):
            name = "-".join(filter(None, self.languages(part))) or str(number)
            if part.valid:
                found[name if name not in found else f"{name}-{number}"] = part
        return found

    def test_sets(self) -> dict[str, tuple[SourceConfig, str]]:
        """Map the key of every test set in results.json to its corpus and the name of its split."""
        entries = [(part, entry.partition("=")) for part in self.parts() for entry in part.test]
        return {key: (part, split or key) for part, (key, _, split) in entries}

    def test_splits(self) -> dict[str, str]:
        """Map the key of every test set in results.json to its split name."""
        return {key: split for key, (_, split) in self.test_sets().items()}

    def check(self) -> None:
        """Raise UserError for the first invalid option."""
        check_part("data.tokenizer", self.tokenizer, TOKENIZERS)
        check_choices("data", self, CHOICES)
        one_label = f" needs one label per example, not data.labels={self.labels!r}"
        self._check_unset(self.labels != "one", ("label_weights",), one_label)
        if not 0 < self.noise_density < 1:
            raise UserError(f"data.noise_density={self.noise_density} must be above 0 and below 1")
        check_range("data", self, ("bpe_dropout",), 0, 1)
        self._check_subwords()
        for key in ("mixture_temperature", "vocab_temperature"):
            if not 1 <= getattr(self, key) <= 100:
                raise UserError(f"data.{key}={getattr(self, key)} must be from 1 (in proportion to size) to 100")
        if not 1 <= self.num_buckets <= 8:
            raise UserError(f"data.num_buckets={self.num_buckets} must be 1 to 8: each is a compiled shape")
        check_least("data", self, ("row_multiple", "length_multiple", "image_size"), 0)
        counts = ("vocab_size", "packed_length", "tokens_per_update", "doc_stride", "segmentations", "mean_span")
        check_least("data", self, counts, 1)
        check_least("data", self, ("max_source_length", "max_target_length"), 2)  # a token and the end symbol
        if self.batching == "packed" and self.packed_length % self.lengths_divide_by():
            raise UserError(
                f"data.length_multiple={self.length_multiple} must divide data.packed_length={self.packed_length} of "
                "packed rows"
            )
        for name in self.augment:
            check_choice("data.augment", name, AUGMENTS)
        tests = tuple(entry for part in self.parts() for entry in part.test)
        if len(self.test_splits()) < len(tests):
            raise UserError(f"data.test={tests} names a key twice: give each set its own, as in 'key=split'")
        for key in self.test_splits():
            if not re.fullmatch(r"[\w.-]+", key) or key in RESERVED:
                raise UserError(f"data.test={tests}: {key!r} cannot be a key; name the set, as in 'name={key}'")
        for name, part in [("data", self), *((f"data.mixture[{i}]", part) for i, part in enumerate(self.mixture))]:
            part.check_source(name)
            if part.labels != self.labels:
                raise UserError(f"{name}.labels={part.labels!r} but data.labels={self.labels!r}: make them equal")
            if not part.train and (part is self or not (part.valid or part.test)):
                raise UserError(f"{name}.train='': name a split to train on, or in data.mixture one to score")

    def _check_subwords(self) -> None:
        """Raise UserError for subword options that are invalid, or that the tokenizer does not use."""
        if not 0.98 <= self.character_coverage <= 1:  # sentencepiece refuses less
            raise UserError(f"data.character_coverage={self.character_coverage} must be from 0.98 to 1 (all)")
        for symbol in self.symbols:
            taken = re.search(r"[\s▁]", symbol) or re.fullmatch(r"<(pad|/?s|unk|0x\w\w)>|__.*__", symbol)
            if not symbol or taken or self.symbols.count(symbol) > 1:
                raise UserError(f"data.symbols: {symbol!r} is empty, reserved, repeated or has a space: name another")
        ours = self.tokenizer in ("bpe", "unigram")
        learned = ("character_coverage", "byte_fallback", "split_digits", "normalization")
        kind = f"data.tokenizer='bpe' or 'unigram', not {self.tokenizer!r}"
        self._check_unset(not ours, ("vocabulary", "symbols", *learned[:2]), f" needs {kind}")
        self._check_unset(
            self.tokenizer != "bpe", ("bpe_dropout",), f" needs data.tokenizer='bpe', not {self.tokenizer!r}"
        )
        self._check_unset(not self.bpe_dropout, ("segmentations",), " needs data.bpe_dropout, which is 0")
        self._check_unset(self.vocabulary != "", learned, " has no effect on data.vocabulary, which is already learned")

    def refuse_unread(self) -> None:
        """Raise UserError for an option that the vocabulary ignores; saved runs may have it."""
        self._check_unset(self.tokenizer == "word", ("split_digits",), " needs subwords or characters, not 'word'")

    def _check_unset(self, needed: bool, keys: Sequence[str], why: str) -> None:
        """Raise UserError for the first of some options that is set although the default is `needed`."""
        for key in keys:
            if needed and getattr(self, key) != getattr(DataConfig, key):
                raise UserError(f"data.{key}={getattr(self, key)!r}{why}: leave it out")
