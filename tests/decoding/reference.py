"""What searches should find, in plain Python over the toy model: every hypothesis that the rules allow, ranked."""

import numpy as np

from .conftest import EOS, PAD, VOCABULARY


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def hypotheses(found, sentence):
    """Return the existing hypotheses of a sentence as (tokens, score)."""
    rows = zip(found.tokens[sentence], found.lengths[sentence], found.scores[sentence], strict=True)
    return [(tuple(tokens[:length].tolist()), score) for tokens, length, score in rows if length]


def assert_same(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=2e-5)


def contains(tokens, phrase):
    """Return whether the tokens hold a phrase, or one of its spellings if it is a list of them."""
    if isinstance(phrase, list):
        return any(contains(tokens, spelling) for spelling in spelt(phrase))
    return any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens) - len(phrase) + 1))


def counts(
    toy,
    sentence,
    tokens,
    *,
    allowed=(True,) * VOCABULARY,
    min_length=0,
    no_repeat_ngram=0,
    repetition_penalty=1.0,
    prefix=(),
    prompt=(),
    last=None,
    renormalize=False,
):
    """Return what each token counts after `tokens` under the rules; prefix, prompt, last are the sentence's."""
    log_probs = toy.log_probs(sentence, tokens)
    if len(tokens) < len(prefix):
        return np.where(np.arange(VOCABULARY) == prefix[len(tokens)], log_probs, -np.inf)
    said = (*prompt, *tokens)
    for token in range(VOCABULARY):
        run = (*said, token)[-no_repeat_ngram:]
        repeated = no_repeat_ngram and len(run) == no_repeat_ngram and contains(said, run)
        early = token == EOS and len(tokens) < min_length
        if token == PAD or not allowed[token] or early or repeated:
            log_probs[token] = -np.inf
        elif token in said:
            log_probs[token] *= repetition_penalty
    if last is not None and len(tokens) >= last:  # no matter what was forbidden
        log_probs = np.where(np.arange(VOCABULARY) == EOS, 0.0, -np.inf)
    return log_probs - np.logaddexp.reduce(log_probs) if renormalize and log_probs.max() > -np.inf else log_probs


def every(toy, sentence, limit, tokens=(), score=0.0, **rules):
    """Yield every hypothesis that starts with `tokens` and its sum: those that end and those that the limit cuts."""
    if len(tokens) == limit or tokens[-1:] == (EOS,):
        yield tokens, score
        return
    for token, count in enumerate(counts(toy, sentence, tokens, **rules)):
        if count > -np.inf:
            yield from every(toy, sentence, limit, (*tokens, token), score + count, **rules)


def exhaustive(toy, sentence, limit, alpha, coverage=lambda tokens: 0.0, phrases=(), **rules):
    """Rank every hypothesis there is: the ended ones that have all phrases, then those that the limit cuts."""

    def rank(one):
        tokens, score = one
        return (0, 0, -score) if tokens[-1] == EOS else (1, -constraint_tokens(tokens, phrases), -score)

    scored = []
    for tokens, score in every(toy, sentence, limit, **rules):
        score /= penalty(len(tokens), alpha)
        if tokens[-1] != EOS:
            scored.append((tokens, score))
        elif all(contains(tokens, phrase) for phrase in phrases):
            scored.append((tokens, score + coverage(tokens[:-1])))
    return sorted(scored, key=rank)


def constraint_tokens(tokens, phrases):
    """Count the tokens of phrases that a hypothesis has or, of phrases it lacks, ends with.

    Of several spellings, the shortest one's tokens less those that the nearest one still lacks.
    """
    total = 0
    for phrase in phrases:
        spellings = spelt(phrase if isinstance(phrase, list) else [phrase])
        lacks = [next(n for n in range(len(one) + 1) if n == len(one) or tokens[n - len(one) :] == one[: len(one) - n])
                 for one in spellings]  # fmt: skip
        shortest = min(map(len, spellings), default=0)
        total += shortest - (0 if not spellings or contains(tokens, spellings) else min(lacks))
    return total


def spelt(phrase):
    return [spelling for spelling in phrase if spelling]


def patient(toy, sentence, limit, alpha, n, groups=1, diversity=0.0, enough=np.inf, ended_first=True, **rules):
    """Search as beam_search does, but to the very limit, or until so many as are `enough` have ended: no safe stop."""
    size = n // groups
    live, ended = [[((), 0.0)] for _ in range(groups)], [[] for _ in range(groups)]
    for length in range(1, limit + 1):
        taken = []
        for group in range(groups):
            grown = [
                ((*tokens, token), score + count)
                for tokens, score in live[group]
                for token, count in enumerate(counts(toy, sentence, tokens, **rules))
                if count > -np.inf
            ]
            grown.sort(key=lambda one: -one[1] + diversity * taken.count(one[0][-1]))
            ended[group] += [(t, score / penalty(length, alpha)) for t, score in grown[:size] if t[-1] == EOS]
            live[group] = [one for one in grown if one[0][-1] != EOS][:size]
            taken += [tokens[-1] for tokens, _ in live[group]]
        if sum(map(len, ended)) >= enough:
            live = live if length == limit else [[]]
            break
    best = [one for group in ended for one in sorted(group, key=lambda one: -one[1])[:size]]
    cut = [(tokens, score / penalty(limit, alpha)) for group in live for tokens, score in group]
    if not ended_first:
        return sorted(best + cut, key=lambda one: -one[1])[:n]
    return (sorted(best, key=lambda one: -one[1]) + sorted(cut, key=lambda one: -one[1]))[:n]
