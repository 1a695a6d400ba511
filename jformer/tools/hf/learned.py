"""Export tokenizers learned by jformer as a tokenizer.json that gives the same ids for the same text.

`differences` lists the few exceptions. A symbol such as </s> spelt in a text is text to our tokenizers; in theirs this
needs `split_special_tokens` in tokenizer_config.json, and no entry of the vocabulary that matches the symbol.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jformer.data.tokenizers import SYMBOLS, UNK, ByteTokenizer, ListTokenizer, SubwordTokenizer, Tokenizer
from jformer.data.tokenizers.word_splitting import TOKEN

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

SPACE = "▁"  # as sentencepiece writes it
NEVER = -1e6  # log-probability: below any other segmentation of a symbol's name
SPARE = 0xE000  # first private-use character; few of them occur in a vocabulary
MASK = "<mask>"
AROUND = {  # the templates of one text and of two
    "encdec": ("$A </s>", "$A </s> $B </s>"),
    "encoder": ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"),
    "decoder": ("<s> $A", "<s> $A $B"),
}


def to_json(tokenizer: Tokenizer, family: str, mask: bool, written: Sequence[int] = ()) -> str | None:
    """Return the content of a tokenizer.json, or None for a tokenizer that is not for texts.

    The `family` of the model determines the symbols around a text. With `mask`, the first id past the vocabulary is the
    mask. `written` are special ids that only outputs begin with.
    """
    from tokenizers import AddedToken, processors

    if isinstance(tokenizer, SubwordTokenizer) and not tokenizer.is_ours:
        return None  # an imported model, one with symbols that are never cut, or unigram with bytes: these would differ
    fast = _subwords(tokenizer) if isinstance(tokenizer, SubwordTokenizer) else _listed(tokenizer)
    if fast is None:
        return None
    before = [tokenizer.tokens[i] for i in tokenizer.symbols.before]  # a language
    spaced = isinstance(tokenizer, SubwordTokenizer)  # whose first piece after a space has that space
    masks = [AddedToken(MASK, lstrip=spaced, rstrip=spaced)] if mask else []
    fast.add_special_tokens([*SYMBOLS, *masks, *before, *(tokenizer.tokens[i] for i in written)])
    single, pair = (" ".join([*before, template]) for template in AROUND[family])
    ends = [(name, fast.token_to_id(name)) for name in ("<s>", "</s>", *before)]
    fast.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    content: str = fast.to_str()
    return content


def differences(tokenizer: Tokenizer) -> list[str]:
    """Return what a tokenizer.json does differently."""
    notes = []
    if isinstance(tokenizer, ListTokenizer) and tokenizer.kind == "word":
        notes.append("which words a text joins without a space")
    if isinstance(tokenizer, SubwordTokenizer) and tokenizer.kind == "unigram":
        notes.append("which of equally probable cuts of a text is taken")
    if getattr(tokenizer, "normalization", "identity") == "nfkc":
        notes.append("nfkc of rare signs and sequences of accents, in which libraries differ")
    return notes


def _subwords(tokenizer: SubwordTokenizer) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    written, reserved = tokenizer.tokens, tokenizer.reserved
    pieces = [piece for piece in written if piece not in reserved]
    steps: list[Any] = [normalizers.NFKC()] if tokenizer.normalization == "nfkc" else []
    steps += [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    if tokenizer.kind == "bpe":
        fast = _bpe(written, merges(pieces), fuse_unk=True, byte_fallback=tokenizer.byte_fallback)
    else:
        # Unlike sentencepiece, the library matches every entry in a text, symbols included.
        scored = zip(written, tokenizer.scores, strict=True)
        rows = [(piece, NEVER if piece in reserved else score) for piece, score in scored]
        fast = tokenizers.Tokenizer(models.Unigram(rows, unk_id=UNK))
        steps += unmatched(pieces)
    fast.normalizer = normalizers.Sequence(steps)
    joined: list[Any] = [decoders.ByteFallback()] if tokenizer.byte_fallback else []
    joined = [decoders.Replace(SPACE, " "), *joined, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(joined)
    return fast


def _bpe(written: Sequence[str], joined: Sequence[tuple[str, str]], **options: bool) -> Any:
    from tokenizers import Tokenizer, models

    ids = {token: i for i, token in enumerate(written)}
    return Tokenizer(models.BPE(ids, list(joined), unk_token=SYMBOLS[UNK], **options))


def merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges that make each piece; sentencepiece merges in the order of the pieces."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    found = []
    for piece in pieces:
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        made = [(ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
        found += [(pieces[left], pieces[right]) for left, right in sorted(made)]
    return found


def unmatched(pieces: Sequence[str]) -> "Sequence[Normalizer]":
    """Return rules that keep names of symbols in a text from matching, where one of their characters is unknown.

    An unknown character costs more than `NEVER`, so the whole name would match; replacing it by another unknown
    character prevents that and changes no id.
    """
    from tokenizers import normalizers

    known = {character for piece in pieces for character in piece}
    spare = next(character for code in range(SPARE, SPARE + 0x1900) if (character := chr(code)) not in known)
    rules = []
    for name in SYMBOLS:
        unknown = [character for character in name if character not in known]
        if unknown:
            rules.append(normalizers.Replace(name, name.replace(unknown[0], spare, 1)))
    return rules


def _listed(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer of bytes, characters or words; None for another one."""
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    if isinstance(tokenizer, ByteTokenizer):
        fast = _bpe(tokenizer.tokens, [], byte_fallback=True)
        fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    elif not isinstance(tokenizer, ListTokenizer):
        return None
    elif tokenizer.kind == "char":
        fast = _bpe(tokenizer.tokens, [], fuse_unk=False)
        fast.decoder = decoders.Fuse()
    elif tokenizer.kind == "word":
        ids = {token: i for i, token in enumerate(tokenizer.tokens)}
        fast = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=SYMBOLS[UNK]))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern()), "removed", invert=True)
    else:
        return None
    if tokenizer.normalization == "nfkc":
        fast.normalizer = normalizers.Sequence([normalizers.NFKC()])
    return fast


def _pattern() -> str:
    """Return the pattern of words with character classes spelt out, as Oniguruma's differ from Python's."""
    spelt = ((r"\s", r"\s\x1c-\x1f"), (r"\S", r"[^\s\x1c-\x1f]"), (r"[-\w]", r"[-\p{L}\p{N}_]"))
    pattern = TOKEN.pattern
    for python, oniguruma in spelt:
        pattern = pattern.replace(python, oniguruma)
    return pattern
