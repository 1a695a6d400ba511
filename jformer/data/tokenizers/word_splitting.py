"""Rules to split sentences into words and to join them again.

Written for languages that space their words. `join(split(text))` gives ordinary English and German sentences back;
see `join` for what it cannot know.
"""

import re
from collections.abc import Iterable

_MARK = (  # punctuation and symbols; every other character except white space belongs to a word, combining marks too
    r"!-/:-@\[-\^`{-~¡-©«¬®¯±´¶-¸»¿×÷‐-‧‰-⁞₠-⃀℀-⯿⸀-⹝、-〃〈-】〔-〟・！-／：-＠［-｀｛-･"
)
_LETTER = rf"[^\s{_MARK}]"
_CLITIC = rf"(?<={_LETTER})(?i:n['’]t|['’](?:s|re|ve|ll|d|m))(?!{_LETTER})"
_INNER = rf"[-'’.&@](?={_LETTER})|(?<=\d)[,:](?=\d)"  # T-shirt, O'Brien, z.B, AT&T, 3.50, 1,000, 12:30
_WORD = rf"-?{_LETTER}(?:(?!{_CLITIC})(?:{_LETTER}|{_INNER}))*(?:-(?![-\w]))?"  # -5, Rad- und Fußweg
TOKEN = re.compile(rf"{_CLITIC}|{_WORD}|\.{{2,}}|-{{2,}}|\S")

_NO_SPACE_BEFORE = re.compile(r"(?i:n['’]t|['’](?:s|re|ve|ll|d|m))|\.{2,}|[.,;:!?%)\]}…”’»/、。，！？：；）]")
_NO_SPACE_AFTER = frozenset("([{„‚«$£#¿¡/（")
_QUOTES = {'"': '"', "'": "'", "“": "„", "‘": "‚"}  # a mark that opens or closes → the opening mark that it closes
_CLOSING_QUOTES = frozenset("\"'“”‘’»")


def split(text: str) -> list[str]:
    """Split a sentence into words, punctuation marks and English clitics: "Doesn't" becomes "Does", "n't".

    White space only separates. Hyphens stay with their words, and so do marks inside a word or number; a run of
    periods or of hyphens is one token, every other mark is a token of its own.
    """
    return TOKEN.findall(text)


def join(tokens: Iterable[str]) -> str:
    """Join words into a sentence.

    One space separates two tokens, except: none before a clitic, closing punctuation, closing brackets or %; none
    after opening brackets, „ ‚ « $ £ # ¿ ¡; none around a slash; none between a closing quote and a hyphenated word.
    Straight quotes open and close in turn; “ and ‘ close an open German quotation, and otherwise open one.

    So some spacing is not restored: several spaces, or those at an end; "5 %", "$ 5" and "a / b" lose one, "€5" and
    »inverted guillemets« gain one; an apostrophe that ends a word counts as a quote; text already tokenised is joined.
    """
    pieces: list[str] = []
    opened: set[str] = set()
    previous, tight = "", True
    for token in tokens:
        closes = _QUOTES.get(token) in opened
        opens = not closes and token in _QUOTES
        tight |= closes or bool(_NO_SPACE_BEFORE.fullmatch(token))
        tight |= previous in _CLOSING_QUOTES and token[:1] == "-" and token[1:2].isalnum()  # „Open“-Schild
        pieces += [token] if tight else [" ", token]
        if closes:
            opened.remove(_QUOTES[token])
        elif opens or token in _QUOTES.values():
            opened.add(token)
        previous, tight = token, opens or token in _NO_SPACE_AFTER
    return "".join(pieces)
