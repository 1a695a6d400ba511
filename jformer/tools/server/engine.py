"""Connect a server to a Predictor: request bodies to requests, answers to plain JSON, and warming up."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jformer.data.data_config import Languages
from jformer.data.sources.split import Pair
from jformer.data.spans import joined_text
from jformer.data.text import admit
from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.errors import UserError
from jformer.inference.answers import Attended, Output, Piece, Request
from jformer.inference.batching import FEW, SMALL_BATCH
from jformer.inference.formats import answer_record, scored_record
from jformer.inference.one_pass import HEADS
from jformer.inference.predict import Predictor
from jformer.inference.streaming import Programs, Streaming, make_stream, refuse_streaming
from jformer.tasks.noise import mask_of
from jformer.tasks.task import MASKS, SPAN, VECTOR
from jformer.tools.server import schema
from jformer.tools.server.limits import Limits

ROUTES = {  # a task's answer → its path
    "text": "translate",
    "continuation": "continue",
    "label": "label",
    "labels": "label",
    "number": "estimate",
    "tags": "tag",
    SPAN: "answer",
    VECTOR: "embeddings",
    MASKS: "fill",
}
WARM_LENGTHS = (4, 20, 30)  # tokens of the texts that `warm_up` answers


class Engine:
    """Answers, scores and looks into texts.

    One thread advances streams and another does everything else; on several devices one thread does both.
    """

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        """Hold a model, to embed texts if decode.pooling is set.

        Raises UserError for a task without answers to texts, and for one whose inputs are files.
        """
        predictor = predictor.embedder if predictor.config.decode.pooling else predictor
        self.predictor, self._limits = predictor, limits
        task = predictor.config.task
        if predictor.task.answer not in ROUTES:
            raise UserError(
                f"task={task!r} has no answer to a text; --mode=evaluate scores it, and decode.pooling='mean' serves "
                "vectors of texts"
            )
        if predictor.config.model.reads_images:
            raise UserError("a run of images reads them from files, which no client may name: use --mode=predict")
        self.route = ROUTES[predictor.task.answer]
        self.takes_lines = predictor.task.answer in ("continuation", VECTOR)
        self.scores = predictor.task.answer not in HEADS  # whether it can score given targets
        self._programs: Programs | None = None
        with contextlib.suppress(UserError):
            refuse_streaming(predictor.task.answer, predictor.config.decode)
            self._programs = make_stream(predictor.setup)
        self.streams = self._programs is not None  # whether answers can be streamed

    def facts(self) -> dict[str, object]:
        """Return facts about the model."""
        config = self.predictor.config
        languages = (config.data.source_language, config.data.target_language) if self.route == "translate" else ()
        return {
            "task": config.task,
            "route": f"/v1/{self.route}",
            "languages": [language for language in languages if language],
            "family": config.model.family,
            "updates": list(self.predictor.steps),
            "streams": self.streams,
        }

    def requests(self, body: schema.InputsBody) -> list[Request]:
        """Return the requests of a body; raise UserError for invalid or too long texts, and for too many phrases."""
        self._check_count(body.inputs)
        limits = self._limits
        asked = [self._asked(each) for each in body.inputs]
        requests = []
        for line, each in enumerate(asked):
            if len(each.constraints) > limits.constraints:
                raise UserError(f"{len(each.constraints)} constraints are more than the {limits.constraints} of a text")
            phrases = [self._text(phrase, limits.phrase) for phrase in each.constraints]
            text, prefix = self._text(each.source), self._text(each.prefix, limits.prefix)
            requests.append(Request(text, prefix, phrases, line=line, languages=self._languages(each)))
        return requests

    def _asked(self, given: str | schema.Asked | schema.InContext) -> schema.Asked:
        if isinstance(given, schema.InContext):
            if self.route != ROUTES[SPAN]:
                raise UserError(f"task={self.predictor.config.task!r} reads no context: send texts")
            return schema.Asked(source=joined_text(given.question, given.context))
        return schema.Asked(source=given) if isinstance(given, str) else given

    def pairs(self, body: schema.PairsBody) -> list[Pair]:
        """Return the pairs to score; raise UserError as `requests` does."""
        self._check_count(body.pairs)
        if self.predictor.inputs.continues and (sources := [each.source for each in body.pairs if each.source]):
            raise UserError(f"source={sources[0][:40]!r}: a language model reads none, send the whole text as target")
        return [
            Pair(self._text(each.source), self._text(each.target), languages=self._languages(each))
            for each in body.pairs
        ]

    def watched(self, body: schema.WatchedBody) -> tuple[str, str | None]:
        """Return the source and target to look into; raise UserError as `requests` does."""
        return self._text(body.source), None if body.target is None else self._text(body.target)

    def answer(self, requests: Sequence[Request]) -> Iterator[dict[int, dict[str, object]]]:
        """Yield number of a request → its answer, batch by batch."""
        for some in self.predictor.arriving(requests):
            yield {number: self.record(outputs) for number, outputs in some.items()}

    def check_streamed(self, requests: Sequence[Request]) -> None:
        """Raise UserError for requests that cannot be streamed, or not together."""
        refuse_streaming(self.predictor.task.answer, self.predictor.config.decode)
        if len(requests) > self._limits.streams:
            raise UserError(f"{len(requests)} texts are more than the {self._limits.streams} of a stream; send several")

    def grow(self, groups: Sequence[Sequence[Piece]]) -> Streaming:
        """Begin to answer requests, each given as its pieces."""
        assert self._programs
        return Streaming(self.predictor, self._programs, groups)

    def record(self, outputs: Sequence[Output]) -> dict[str, object]:
        """Return an answer as --mode=predict writes it with decode.outputs=jsonl and decode.scores."""
        return answer_record(outputs, True, self.predictor.config.decode.alignments)

    def score(self, pairs: Sequence[Pair]) -> Iterator[dict[int, dict[str, object]]]:
        """Yield number of a pair → its score, as --mode=score has it with decode.scores."""
        yield dict(enumerate(scored_record(each, token_scores=True) for each in self.predictor.score(pairs)))

    def look_into(self, pairs: Sequence[tuple[str, str | None]]) -> Iterator[dict[int, dict[str, object]]]:
        """Yield number of a pair → its target's tokens, the likeliest alternatives, and attention to the source."""
        found = self.predictor.attend(pairs)
        yield {i: {**_watched_record(each), "prefixes": self._prefixes(each)} for i, each in enumerate(found)}

    def _prefixes(self, attended: Attended) -> list[list[str | None]]:
        """Return, for each place and each likely token there, the prefix of a translation that takes this token.

        It is None for tokens that no text expresses: symbols such as the end, languages, rows past the vocabulary, and
        bytes that do not complete a character.
        For tasks that take no prefix, the list is empty.
        """
        if self.route != ROUTES["text"]:
            return []
        target, prefixes = self.predictor.tokenizers[1], list[list[str | None]]()
        written = [self._numbers.get(choice.token, target.symbols.unk) for choice in attended.choices]
        for place, choice in enumerate(attended.choices):
            before = target.decode(written[:place])
            numbers = [self._numbers.get(token, target.symbols.unk) for token, _ in choice.likeliest]
            begun = [None if i in target.symbols.ids else target.decode([*written[:place], i]) for i in numbers]
            lost = "\N{REPLACEMENT CHARACTER}"
            prefixes.append([None if text is None or text == before or lost in text else text for text in begun])
        return prefixes

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """Token of the target vocabulary → its id."""
        return {token: number for number, token in enumerate(self.predictor.tokenizers[1].tokens)}

    def warm_up(self) -> None:
        """Compile the programs for the usual lengths and batch sizes, so that the first clients need not wait."""
        tokenizer = self.predictor.tokenizers[0]
        for length in WARM_LENGTHS:
            text = tokenizer.decode([NUM_SYMBOLS + i % (tokenizer.vocab_size - NUM_SYMBOLS) for i in range(length)])
            text = "".join(each if each.isprintable() else "a" for each in " ".join(text.split()))  # bytes have a NUL
            asked = {ROUTES[SPAN]: joined_text(text, text), ROUTES[MASKS]: f"{mask_of(tokenizer)[1]} {text}"}
            for count in (*FEW, SMALL_BATCH + 1):
                self.predictor.generate([asked.get(self.route, text)] * count)
        self.predictor.forget()

    def _languages(self, each: schema.Asked | schema.PairToScore) -> Languages:
        """Return the languages of a text; raise UserError here, before others wait for the same batch."""
        languages = each.source_language, each.target_language
        self.predictor.inputs.towards(languages)
        return languages

    def _check_count(self, items: Sequence[Any]) -> None:
        if len(items) > self._limits.texts:
            raise UserError(f"{len(items)} texts are more than the {self._limits.texts} of a request; send several")

    def _text(self, text: str, most: int = 0) -> str:
        most = most or self._limits.characters
        if len(text) > most:
            raise UserError(f"a text of {len(text):,} characters is over the limit of {most:,}: {text[:40]!r}")
        if "\n" in text and not self.takes_lines:
            raise UserError(f"a text has a line break, send each line as a separate text: {text[:40]!r}")
        try:
            return admit(text, Counter(), lines=self.takes_lines)
        except ValueError as error:
            raise UserError(str(error)) from error


def _watched_record(attended: Attended) -> dict[str, Any]:
    cross = attended.cross
    return {
        "target": attended.target,
        "tokens": [
            {
                "token": choice.token,
                "probability": round(choice.probability, 4),
                "likeliest": [[token, round(probability, 4)] for token, probability in choice.likeliest],
            }
            for choice in attended.choices
        ],
        "source_tokens": list(cross.columns) if cross else [],
        "attention": np.round(cross.weights.mean(axis=(0, 1)).astype(float), 3).tolist() if cross else [],
    }
