"""Read the tokenizer files of a model's directory as our tokenizers, and write them.

The family determines the ids around a text: the decoder's first token, and the language.
"""

import base64
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from etils.epath import Path as AnyPath

from jformer.data.tokenizers import Tokenizer
from jformer.data.tokenizers.pretrained import FastTokenizer, PiecesTokenizer, library
from jformer.data.tokenizers.symbols import Symbols
from jformer.errors import UserError
from jformer.integrity import parse_object
from jformer.tools.hf import learned
from jformer.tools.hf.families import Fields

FAST, CONFIG, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
WORDS, MERGES = "vocab.txt", "merges.txt"  # of WordPiece, a token a line; of byte-level BPE, beside vocab.json
ADDED = "added_tokens.json"  # ids of further tokens of both
IDS, TARGET_IDS = "vocab.json", "target_vocab.json"  # of sentencepieces; the second with `separate_vocabs` (Marian)
PIECES = {"marian": ("source.spm", "target.spm"), "m2m_100": ("sentencepiece.bpe.model",) * 2}  # of source, of target
WORDPIECE = ("bert", "distilbert")  # families whose texts begin with [CLS] and end with [SEP]
NORMALIZER = {  # of WordPiece: field of tokenizer.json → of tokenizer_config.json, which comes first in transformers
    "lowercase": "do_lower_case", "strip_accents": "strip_accents", "handle_chinese_chars": "tokenize_chinese_chars",
}  # fmt: skip
SPACED = "add_prefix_space"  # of byte-level BPE: whether a text is read as if it began with a space
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that read tokenizer.json alone
BYTE_LEVEL = ("gpt2", "roberta", "bart")
LANGUAGES = ("mbart", "m2m_100")  # families whose texts have a language beside them
SPECIAL = ("pad_token", "bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_T5 = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_BART = {**_T5, "bos": "<s>", "sep": "</s>", "cls": "<s>", "mask": "<mask>"}
TOKENS = {  # family → the special tokens of its tokenizer's class, which files need not name
    "gpt2": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "llama": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    **dict.fromkeys(WORDPIECE, _BERT), **dict.fromkeys(("t5", "mt5", "marian"), _T5),
    **dict.fromkeys(("roberta", "bart", "mbart", "m2m_100"), _BART),
}  # fmt: skip
FAR = 10  # at most this many ids per token: lists of all ids would exhaust the memory
CLASSES = {"marian": "MarianTokenizer", "m2m_100": "M2M100Tokenizer"}
# Languages that a tokenizer_config.json of transformers 5 only refers to by a name, in the order of their ids.
LANGUAGE_CODES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr "
    "ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa "
    "pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
}
PROBLEMS = {
    "one": "single_label_classification",
    "several": "multi_label_classification",
    "number": "regression",
}  # data.labels → theirs

Pretrained = FastTokenizer | PiecesTokenizer


class TokenizerFiles:
    """The tokenizer files of a directory."""

    def __init__(
        self, directory: Path, model_type: str, fields: Fields, listed: str = IDS, lowercase: bool | None = None
    ) -> None:
        """Read the files. Raise UserError if there are none that we can read.

        Args:
            directory: of the files.
            model_type: the family, which determines their kind.
            fields: of config.json.
            listed: the file with the ids of pieces.
            lowercase: whether WordPiece lowercases texts; None = as the files say.
        """
        self.directory, self.model_type, self.fields, self.listed = directory, model_type, fields, listed
        named = {f"{name}_token": token for name, token in TOKENS.get(model_type, {}).items()}
        self.config = {**named, **read_json(directory / SPECIALS, {}), **read_json(directory / CONFIG, {})}
        self.without_row, self.lowercase = list[str](), lowercase
        known = [FAST, *([WORDS] if model_type in WORDPIECE else [MERGES] if model_type in BYTE_LEVEL else [])]
        self.file = next((directory / name for name in known if (directory / name).is_file()), None)
        self.fast = self.file is not None
        if not self.fast and not (model_type in PIECES and (directory / PIECES[model_type][0]).is_file()):
            raise UserError(
                f"{directory}: has no {' or '.join(known)}; name the directory that has it with --tokenizer, or make "
                "one where transformers is installed, with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        self.ids = self._fast_ids(self.file) if self.file else self._piece_ids()
        largest = max(self.ids.values(), default=-1)
        if not 0 <= largest < FAR * (len(self.ids) + FAR):
            raise UserError(
                f"{directory}: its tokenizer has {len(self.ids)} tokens and ids up to {largest}; fetch it again"
            )

    def of_target(self) -> "TokenizerFiles":
        """Return the files of the target side: these ones, unless the two sides have separate lists."""
        if not self.config.get("separate_vocabs") or self.fast:
            return self
        own = {key: value for key, value in self.fields.items() if key not in ("pad_token_id", "vocab_size")}
        return TokenizerFiles(self.directory, self.model_type, own, TARGET_IDS)

    def _fast_ids(self, path: Path) -> dict[str, int]:
        library()  # its absence is not an error in the file
        try:
            content = path.read_text("utf-8") if path.name == FAST else self._made_of(path)
            stored = parse_object(content)  # refuses duplicate keys; the library would take the last
            added = self._added(stored, FastTokenizer(content, {}).ids)
            whole = {**stored, "added_tokens": added, **self._overridden(stored)}
            self.content = content if whole == stored else json.dumps(whole, ensure_ascii=False)
            self._is_bpe = "merges" in stored["model"]  # transformers 5 does not clean up their texts
            return FastTokenizer(self.content, {}).ids
        except UserError:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{path}: is not a tokenizer ({error}); fetch it again") from error

    def _made_of(self, path: Path) -> str:
        """Return the tokenizer.json that transformers makes of a vocab.txt, or of a merges.txt and its vocab.json."""
        from tokenizers import AddedToken

        special = {*map(self._written, SPECIAL), *map(str, self._listed())}
        fast = self._wordpiece(path, special) if path.name == WORDS else self._byte_level(path)
        listed = self.config.get("added_tokens_decoder") or {}
        for token, i in sorted(read_json(self.directory / ADDED, {}).items(), key=lambda item: item[1]):
            plain = {"content": token, "normalized": token not in special, "special": token in special}
            fast.add_tokens([AddedToken(**listed.get(str(i), plain))])
        return str(fast.to_str())

    def _required(self, path: Path, ids: Mapping[str, int], *names: str) -> list[tuple[str, int]]:
        """Return special tokens with their ids; raise UserError for one that is missing."""
        tokens = [self._written(f"{name}_token") for name in names]
        if missing := [token for token in tokens if token not in ids]:
            raise UserError(f"{path}: has no {missing[0]!r}; name the token that stands for it in {CONFIG}")
        return [(token, ids[token]) for token in tokens]

    def _byte_level(self, path: Path) -> Any:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, processors

        fast = tokenizers.Tokenizer(models.BPE.from_file(str(path.parent / IDS), str(path)))
        spaced = bool(self.config.get(SPACED, False))
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=spaced), decoders.ByteLevel()
        if self.model_type != "gpt2":
            sep, cls = self._required(path, fast.get_vocab(), "sep", "cls")
            fast.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=spaced)
        return fast

    def _wordpiece(self, path: Path, special: Collection[str]) -> Any:
        """Return the tokenizer of a vocab.txt.

        Raises UserError where special tokens are missing, and where it is unknown whether texts are lowercased: a
        vocabulary has capitals, and transformers would lowercase texts by default.
        """
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

        lines = path.read_bytes().decode().removesuffix("\n").split("\n")
        ids = {line.rstrip(): i for i, line in enumerate(lines)}
        unk, cls, sep = self._required(path, ids, "unk", "cls", "sep")
        capitals = [token for token in ids if token not in special and token != token.lower()]
        if capitals and self.lowercase is None and NORMALIZER["lowercase"] not in self.config:
            raise UserError(
                f"{path}: {len(capitals):,} of its tokens have capitals, such as {capitals[0]!r}, and no {CONFIG} "
                "says whether texts are lowercased: add --do_lower_case=false or, transformers' default, true"
            )
        fast = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unk[0]))
        fast.normalizer, fast.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        fast.decoder, fast.post_processor = decoders.WordPiece(), processors.BertProcessing(sep, cls)
        return fast

    def _overridden(self, stored: Fields) -> dict[str, Fields]:
        """Return the parts of a tokenizer.json that other settings override: those of WordPiece and byte-level BPE."""
        config = {} if self.config.get("tokenizer_class") in GENERIC else self.config
        normalizer, splitter = (stored.get(part) or {} for part in ("normalizer", "pre_tokenizer"))
        if self.model_type in WORDPIECE and normalizer.get("type") == "BertNormalizer":
            own = {field: config[key] for field, key in NORMALIZER.items() if key in config}
            own |= {} if self.lowercase is None else {"lowercase": self.lowercase}
            return {"normalizer": {**normalizer, **own}}
        if self.lowercase is not None:
            raise UserError(f"--do_lower_case: {self.file} does not normalize texts as BERT's does; leave it out")
        if self.model_type in BYTE_LEVEL and splitter.get("type") == "ByteLevel" and config:
            return {"pre_tokenizer": {**splitter, SPACED: bool(config.get(SPACED, False))}}
        return {}

    def _added(self, stored: Mapping[str, Any], ids: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return the added tokens of a tokenizer.json, with the special ones that it leaves to the other files.

        Those without a row in the model's table are left out: they are text, and listed in `self.without_row`.
        """
        added = list(stored.get("added_tokens") or [])
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        listed = self.config.get("added_tokens_decoder") or {}
        named = [token for name in SPECIAL if (token := self.config.get(name))]
        more = self.config.get("additional_special_tokens") or self.config.get("extra_special_tokens") or []
        for token in [*listed.values(), *named, *more]:
            entry = {**plain, **token} if isinstance(token, dict) else {**plain, "content": token}
            text = str(entry["content"])
            if text in ids and text not in {each["content"] for each in added}:
                added.append({"id": ids[text], "content": text} | {key: bool(entry[key]) for key in plain})
        rows = self.fields.get("vocab_size")
        inside = {token for token, i in ids.items() if type(rows) is not int or i < rows}
        if {*ids} - inside <= {each["content"] for each in added}:  # otherwise the files belong to different models
            self.without_row = [each["content"] for each in added if each["content"] not in inside]
        return [each for each in added if each["content"] not in self.without_row]

    def _piece_ids(self) -> dict[str, int]:
        path = self.directory / self.listed
        ids = read_json(path)
        if not ids or not all(type(i) is int and i >= 0 for i in ids.values()):
            raise UserError(f"{path}: must map pieces to ids; fetch it again")
        size = len(ids)
        return {**{str(token): size + i for i, token in enumerate(self._listed()) if token not in ids}, **ids}

    def _listed(self) -> list[str]:
        """Return the additional special tokens: languages."""
        listed = self.config.get("additional_special_tokens") or self.config.get("extra_special_tokens")
        codes = LANGUAGE_CODES.get(str(self.config.get("language_codes")), "")
        return listed or [f"__{code}__" for code in codes.split()]

    def special(self, name: str) -> int:
        """Return the id of a special token such as 'cls_token', or -1."""
        token = self._written(name)
        return self.ids.get(token, -1) if token else -1

    def _written(self, name: str) -> str:
        """Return a special token such as 'cls_token', or ""."""
        token = self.config.get(name)
        return str(token["content"] if isinstance(token, dict) else token or "")

    def language(self, name: str, flag: str) -> int:
        """Return the id of a language."""
        for token in (f"__{name}__", name):  # in this order: "en" is also an ordinary piece of many vocabularies
            if name and token in self.ids:
                return self.ids[token]
        raise UserError(
            f"--{flag}={name!r} is not a language of this vocabulary, which writes them as its tokenizer does"
        )

    def symbols(self, side: str, language: str, start: int) -> Symbols:
        """Return the symbols of the texts of one side."""
        bos, eos = (self._role(name) for name in ("bos", "eos"))
        noise = [self.special("mask_token")] if self.special("mask_token") >= 0 else []
        if self.model_type in WORDPIECE:
            bos, eos = self.special("cls_token"), self.special("sep_token")
        elif self.model_type in ("t5", "mt5"):
            spelt = (f"{space}<extra_id_{i}>" for i in range(100) for space in ("", "▁"))  # mT5's have a space
            noise = [self.ids[token] for token in spelt if token in self.ids]
        around: dict[str, tuple[int, ...]] = {}
        if self.model_type == "roberta":
            around["between"] = (eos,)
        elif self.model_type == "bart":
            around["before"] = (bos,)
        elif self.model_type in LANGUAGES:
            code = self.language(language, f"{side}_language")
            named = str(self.config.get("tokenizer_class", ""))
            mbart = self.model_type == "mbart" and not named.startswith("MBart50")
            start = code if mbart and side == "target" else start
            nllb = named.startswith("Nllb") and bool(self.config.get("legacy_behaviour"))  # of sources alone
            if side == "source" and (mbart or nllb):
                around["after"] = (code,)
            elif not mbart:
                around["before"] = (code,)
        bos = start if start >= 0 else bos
        if bos < 0 or eos < 0:
            raise UserError(
                f"{self.directory}: neither config.json nor {CONFIG} names the tokens texts begin and end with"
            )
        unk = self.special("unk_token")
        unk = -1 if unk == eos else unk
        if unk < 0 and not self.fast:
            raise UserError(
                f"{self.directory}: its vocabulary has no {self.config.get('unk_token')!r} for unknown text: name the "
                f"unk_token of {self.listed} in {CONFIG}"
            )
        pad = self._pad(self._role("pad"), bos, eos)
        return Symbols(pad=pad, bos=bos, eos=eos, unk=unk, noise=tuple(noise), **around)

    def _role(self, name: str) -> int:
        """Return the id that config.json gives to "pad", "bos" or "eos", or else the tokenizer, or -1."""
        ids = self.fields.get(f"{name}_token_id")
        found = ids[0] if isinstance(ids, list) and ids else ids
        return found if type(found) is int and found >= 0 else self.special(f"{name}_token")

    def _pad(self, pad: int, bos: int, eos: int) -> int:
        """Return an id for padding that no text needs: the given one, or one past the vocabulary."""
        past = max(max(self.ids.values()) + 1, self.fields.get("vocab_size") or 0)
        return past if pad < 0 or pad == eos or (pad == bos and self.model_type == "gpt2") else pad

    def tokenizer(self, side: str, symbols: Symbols, prefix: str) -> Pretrained:
        """Return the tokenizer of one side ("source" or "target")."""
        stored = symbols._asdict()
        if self.fast:
            cleanup = bool(self.config.get("clean_up_tokenization_spaces", False)) and not self._is_bpe
            split = bool(self.config.get("split_special_tokens", False))
            return FastTokenizer(self.content, stored, prefix, cleanup, split_specials=split)
        path = self.directory / PIECES[self.model_type][side == "target"]
        ids, listed = [self.special(name) for name in SPECIAL], self._listed()
        specials = [token for token, i in self.ids.items() if token in listed or i in ids]
        try:
            model = base64.b64encode(path.read_bytes()).decode()
            return PiecesTokenizer(model, self.ids, stored, specials, prefix)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: is not a sentencepiece model ({error}); fetch it again") from error


def write(
    directory: Path,
    model_type: str,
    tokenizers: tuple[Tokenizer, Tokenizer],
    family: str = "",
    mask: bool = False,
    facts: Fields = MappingProxyType({}),
    kept: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Write the tokenizer files of a run and return whether transformers has an equivalent.

    Args:
        directory: of the exported model, beside its config.json.
        model_type: their name of the architecture; it determines the names of the files.
        tokenizers: the source's, and that of the texts which are written or, by a classifier, read.
        family: the model's family here, for tokenizers that jformer learned.
        mask: as in `learned.to_json`.
        facts: further fields of tokenizer_config.json.
        kept: the content of files that are written back unchanged.
    """
    source, target = cast(tuple[Any, Any], tokenizers)  # attributes depend on the kind
    kinds = {FastTokenizer: "fast", PiecesTokenizer: "pieces"}
    other = getattr(target, "kept", ()) or getattr(target, "added", ())  # pruned or extended, which theirs cannot store
    other = other or (type(target) is PiecesTokenizer and model_type not in PIECES)  # nor read with that architecture
    kind = "" if other else kinds.get(type(target))
    written = target.tokens
    named = {
        f"{name}_token": written[i] for name, i in _named(model_type, target.symbols).items() if 0 <= i < len(written)
    }
    content = target.content if kind == "fast" else None
    if not kind and not other and source.tokens == written:  # theirs has one vocabulary
        content = learned.to_json(source, family, mask, target.symbols.before)
    if content:
        (directory / FAST).write_text(content, "utf-8")
        config = {**named, "tokenizer_class": "PreTrainedTokenizerFast"}
        if kind != "fast" or target.split_specials:
            config["split_special_tokens"] = True
        if kind != "fast" and mask:
            config["mask_token"] = learned.MASK
    elif kind == "pieces":
        files = PIECES[model_type]
        for file, tokenizer in zip(files, (source, target), strict=True):
            (directory / file).write_bytes(base64.b64decode(tokenizer.model))
        separate = {"separate_vocabs": True} if source.ids != target.ids else {}
        codes, languages = _languages_after(target.ids) if model_type == "m2m_100" else ("", [])
        for file, tokenizer in ((IDS, source), (TARGET_IDS, target)) if separate else ((IDS, target),):
            ids = {token: i for token, i in tokenizer.ids.items() if token not in languages}
            (directory / file).write_text(json.dumps(ids, ensure_ascii=False, indent=2), "utf-8")
        config = {**named, "tokenizer_class": CLASSES[model_type], **separate}
        config |= {"language_codes": codes} if codes else {}
    else:
        config = {}
    if config:
        written = json.dumps({**config, **facts}, ensure_ascii=False, indent=2) + "\n"
        for file, text in (kept if CONFIG in kept else {CONFIG: written}).items():
            (directory / file).write_text(text, "utf-8")
    return bool(config)


def _languages_after(ids: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return the name of the language list that has the last ids, in its order, and its tokens, or neither.

    M2M100Tokenizer numbers them itself, from the number of the listed tokens on.
    """
    for name, codes in LANGUAGE_CODES.items():
        tokens = [f"__{code}__" for code in codes.split()]
        if [ids.get(token) for token in tokens] == [*range(len(ids) - len(tokens), len(ids))]:
            return name, tokens
    return "", []


def _named(model_type: str, symbols: Symbols) -> dict[str, int]:
    first, last = ("cls", "sep") if model_type in WORDPIECE else ("bos", "eos")
    mask = {"mask": symbols.noise[0]} if len(symbols.noise) == 1 else {}
    return {"pad": symbols.pad, first: symbols.bos, last: symbols.eos, "unk": symbols.unk, **mask}


def read_kind(fields: Fields, classes: int) -> str:
    """Return the kind of labels of a classifier of texts or images, as `data.labels` names it.

    One class is a number, the logit, as transformers has it; a probability if sentence-transformers makes it one.
    """
    problem = fields.get("problem_type")
    later = fields.get("sbert_ce_default_activation_function") or (fields.get("sentence_transformers") or {}).get(
        "activation_fn", ""
    )
    if problem == PROBLEMS["several"] or (classes == 1 and str(later).endswith("Sigmoid")):
        return "several"
    if classes == 1:
        return "number"
    if problem not in (None, PROBLEMS["one"]):
        raise UserError(f"config.json: problem_type={problem!r} with {classes} labels: a regression gives one number")
    return "one"


def read_labels(fields: Fields, classes: int) -> list[str]:
    """Return the labels in the order of the classes, which the head's tensors count; those without a name are numbered.

    Raises UserError for more names than classes, and for two classes of one name.
    """
    labels = fields.get("id2label") or {}
    if any(not str(i).isdigit() or int(i) >= classes for i in labels):
        raise UserError(f"config.json: id2label must name the classes 0 to {classes - 1}, of which there are tensors")
    ordered = [str(labels.get(str(i), f"LABEL_{i}")) for i in range(classes)]
    if len({*ordered}) < len(ordered):
        raise UserError("config.json: id2label gives two classes one name")
    return ordered


def read_json(path: Path | AnyPath, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or `otherwise` if there is no file. Raise UserError for an invalid file."""
    if otherwise is not None and not path.is_file():
        return otherwise
    try:
        return parse_object(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: is not there; name the folder of a model") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not a JSON object ({error}); fetch it again") from error
