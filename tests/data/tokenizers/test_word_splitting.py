import random

import pytest

from jformer.data.tokenizers import word_splitting as words


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Doesn't", ["Does", "n't"]),
        ("can't WON'T couldn’t've", ["ca", "n't", "WO", "N'T", "could", "n’t", "'ve"]),
        ("it's we're I'll she'd I'm dog's", ["it", "'s", "we", "'re", "I", "'ll", "she", "'d", "I", "'m", "dog", "'s"]),
        ("O'Brien's rock'n'roll", ["O'Brien", "'s", "rock'n'roll"]),
        ("Hi, (all) of you!", ["Hi", ",", "(", "all", ")", "of", "you", "!"]),
        ("$3.50, 1,000 at 12:30.", ["$", "3.50", ",", "1,000", "at", "12:30", "."]),
        ("T-shirt, Rad- und -5 - x", ["T-shirt", ",", "Rad-", "und", "-5", "-", "x"]),
        ("the U.S. and AT&T", ["the", "U.S", ".", "and", "AT&T"]),
        ("wait... what?!", ["wait", "...", "what", "?", "!"]),
        ("„Straße“ ¿qué? हिन्दी e\u0301t", ["„", "Straße", "“", "¿", "qué", "?", "हिन्दी", "e\u0301t"]),
        (" a\t\u00a0 b\u2028c ", ["a", "b", "c"]),
        ("", []),
    ],
)
def test_split_takes_punctuation_and_clitics_off(text, tokens):
    assert words.split(text) == tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A man in a T-shirt doesn't see the dogs; they've run away (again)!",
        'He said: "Hello, world." Then she said, "No... I can\'t — it\'s 3:45."',
        "A sign that reads 'Tickets Available Here' and “Open”.",
        "Er sagte: „Ja, z.B. morgen.“, und ging zum „Open“-Schild.",
        "Rad- und Fußwege, -5 °C, 3,50 €, 100%, and/or $5 [sic].",
        "¿Qué? ¡No! «Oui», l'été; ‚so‘ ist es.",
    ],
)
def test_ordinary_sentences_come_back(text):
    assert words.join(words.split(text)) == text


@pytest.mark.parametrize(
    ("text", "back"),
    [("  a   b ", "a b"), ("5 % of $ 5", "5% of $5"), ("a / b", "a/b"), ("€5", "€ 5"), ("a man .", "a man.")],
)
def test_the_losses_are_the_documented_ones(text, back):
    assert words.join(words.split(text)) == back


def test_nothing_but_spacing_is_ever_lost():
    rng = random.Random(0)
    alphabet = ["n't", "'s", "ab", "S", "9", *" .,:;-'’\"“”„‘‚()/%$&@…ä\u0301"]
    for _ in range(2_000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        tokens = words.split(text)
        assert "".join(tokens) == text.replace(" ", "")
        assert words.join(tokens).replace(" ", "") == text.replace(" ", "")
