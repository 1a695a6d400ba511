"""Requests and answers as lines: plain text, TSV or JSON. No files and no models here."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jformer.data.spans import fault_of, joined_text
from jformer.data.text import admit
from jformer.inference.answers import Output, Request, Scored, TaggedWord
from jformer.integrity import parse_json
from jformer.tasks.span_scores import find_spans, mark_spans

LANGUAGES = ("source_language", "target_language")  # keys of a line in JSON, for a multilingual run
IN_JSON = ("tokens", "cut")  # of a scored target; TSV has no column for them


class Question(NamedTuple):
    """Targets to be scored, one or several, given one source."""

    source: str
    targets: tuple[str, ...]
    ranked: bool = False  # whether given as a list, and so written in the order of their scores
    languages: tuple[str, str] = ("", "")  # of source and targets


def read_request(number: int, line: str, form: str, counts: Counter[str], continues: bool = False) -> Request:
    """Read the request in a line: the line itself, or in JSON {"source", "prefix", "constraints"} and LANGUAGES.

    Args:
        number: of the line, from 0; random draws depend on it.
        line: without its line feed.
        form: "text" or "jsonl".
        counts: alterations of texts in JSON are counted here, by reason.
        continues: whether the model continues texts; if so, those in JSON keep their line breaks.

    Raises:
        ValueError: for anything else; the caller adds the file and the line.
    """
    if form == "text":
        return Request(line, line=number)
    kinds = {"source": str, "prefix": str, "constraints": list, **dict.fromkeys(LANGUAGES, str)}
    record = _object(line, kinds, ("source",), counts, lines=continues)
    languages = record.get(LANGUAGES[0], ""), record.get(LANGUAGES[1], "")
    constraints = record.get("constraints", ())
    return Request(record["source"], record.get("prefix", ""), constraints, line=number, languages=languages)


def read_asked(number: int, line: str, form: str, counts: Counter[str]) -> Request:
    """Read line `number` (from 0): question, one TAB, context; or {"question", "context"} in JSON.

    Raises ValueError for anything else; the caller adds the file and the line.
    """
    if form == "jsonl":
        kinds = {"question": str, "context": str}
        record = _object(line, kinds, tuple(kinds), counts, lines=False)
        return Request(joined_text(**record), line=number)
    if fault := fault_of(line):
        raise ValueError(fault)
    return Request(line, line=number)


def read_question(line: str, form: str, continues: bool, counts: Counter[str]) -> Question:
    """Read a line to be scored: source, one TAB, target; or {"source", "target"} or {"source", "targets"} in JSON.

    A source in JSON may have LANGUAGES beside it.
    A model that continues texts has no source: the line itself is the target. Raises ValueError as `read_request`.
    """
    if form == "jsonl":
        source = {} if continues else {"source": str}
        kinds = {**source, "target": str, "targets": list, **dict.fromkeys(LANGUAGES if source else (), str)}
        record = _object(line, kinds, tuple(source), counts, lines=continues)
        if ("target" in record) == ("targets" in record):
            raise ValueError("needs either 'target' or 'targets'")
        targets = (record["target"],) if "target" in record else record["targets"]
        languages = record.get(LANGUAGES[0], ""), record.get(LANGUAGES[1], "")
        return Question(record.get("source", ""), targets, "targets" in record, languages)
    if continues:
        return Question("", (line,))
    texts = line.split("\t")
    if len(texts) != 2:
        raise ValueError(f"{len(texts) - 1} TABs; a line is source, one TAB, target")
    return Question(texts[0], (texts[1],))


def write_outputs(outputs: Sequence[Output], form: str, scores: bool, alignments: bool) -> str:
    """Return the line, or lines, that answer a request, without the last line feed.

    text   the best output
    conll  a line for each word: the word, a TAB and its tag; then an empty line
    tsv    text, and on request the number it is ranked by and its alignment; the same for each further output
    jsonl  {"outputs": [{"text", "score" | "log_prob" | "utility", "labels", "alignment", "tokens"}], "source_tokens"};
           an answer in a context has "start" and "end", its first character there and the one after its last;
           a text whose masks are filled has the tokens in their places, "filled";
           an embedding is {"vector": [numbers]}

    For tagged words, an output in JSON has `tags`, the `spans` that they mark ({"type", "start", "end", "text"}, in
    words from 0, `end` exclusive) and with scores `probabilities`, a span's of all its tags. Numbers have the names
    of `Output`, and are null if no output was found. An alignment has the Pharaoh format (Koehn 2004): pairs of
    source and target token, both from 0, which index `source_tokens` and `tokens`. TABs in a text become spaces in TSV,
    and line breaks in every format but JSON.
    """
    if form == "text":
        return one_line(outputs[0].text)
    if form == "conll":
        return "".join(f"{word.word}\t{word.tag}\n" for word in outputs[0].tags or ())
    if form == "jsonl":
        return _json(answer_record(outputs, scores, alignments))
    columns: list[object] = []
    for output in outputs:
        number = [_number(output.rank)] if scores else []
        columns += [output.text, *number, *([_links(output)] if alignments else [])]
    return _columns(columns)


def answer_record(outputs: Sequence[Output], scores: bool, alignments: bool) -> dict[str, object]:
    """Return the object that `write_outputs` writes in JSON."""
    if outputs[0].vector is not None:
        return {"vector": [float(str(value)) for value in outputs[0].vector]}  # the shortest form of a float32
    records = []
    for output in outputs:
        record: dict[str, object] = {"text": output.text}
        if output.tags is not None:
            record |= _tagged(output.tags, scores)
        if output.filled is not None:
            record["filled"] = output.filled
        if output.span:
            record |= dict(zip(("start", "end"), output.span, strict=True))
        if scores:
            record |= _numbers(output)
        if alignments:
            record |= {"alignment": _links(output), "tokens": output.alignment.target if output.alignment else []}
        records.append(record)
    answer: dict[str, object] = {"outputs": records}
    if alignments:
        answer["source_tokens"] = outputs[0].alignment.source if outputs[0].alignment else []
    return answer


def write_scored(question: Question, scored: Sequence[Scored], form: str, token_scores: bool) -> str:
    """Return the line that answers a question.

    text   the log-probability
    tsv    log-probability, number of tokens and, on request, log-probabilities of the tokens, separated by spaces
    jsonl  {"log_prob", "length"} and, on request, "log_probs" and "tokens"; "cut": true if a side was cut

    Ranked targets come best first, each with its text before the rest; in JSON as {"outputs": [...]}.
    """
    if form == "text":
        return str(_number(scored[0].log_prob))
    records = []
    for text, one in sorted(zip(question.targets, scored, strict=True), key=lambda pair: -pair[1].log_prob):
        record: dict[str, object] = {"text": text} if question.ranked else {}
        records.append(record | scored_record(one, token_scores))
    if form == "tsv":
        return _columns([value for record in records for key, value in record.items() if key not in IN_JSON])
    return _json({"outputs": records} if question.ranked else records[0])


def scored_record(scored: Scored, token_scores: bool) -> dict[str, object]:
    """Return the object that `write_scored` writes in JSON."""
    record: dict[str, object] = {"log_prob": _number(scored.log_prob), "length": len(scored.tokens)}
    if token_scores:
        record |= {"log_probs": [_number(each) for each in scored.token_log_probs], "tokens": scored.tokens}
    return record | ({"cut": True} if scored.cut else {})


def _object(
    line: str, kinds: Mapping[str, Any], needed: Sequence[str], counts: Counter[str], lines: bool
) -> dict[str, Any]:
    """Return a JSON object of texts, or lists of them by `kinds`; with `lines`, texts keep their line breaks.

    Characters that JSON can spell but that are invalid in a text become U+FFFD and are counted.
    """
    record = parse_json(line)
    if not isinstance(record, dict) or not all(key in record for key in needed):
        raise ValueError(f"not a JSON object with {' and '.join(map(repr, needed or kinds))}")
    for key, value in record.items():
        if key not in kinds:
            raise ValueError(f"{key!r} is not one of {', '.join(map(repr, kinds))}")
        if not isinstance(value, kinds[key]) or not all(isinstance(text, str) for text in value):
            raise ValueError(f"{key!r} must be {'a text' if kinds[key] is str else 'a list of texts'}")
        texts = tuple(admit(text, counts, "replace", lines) for text in ([value] if kinds[key] is str else value))
        record[key] = texts[0] if kinds[key] is str else texts
    return record


def one_line(text: str) -> str:
    """Return a text with its line breaks replaced by spaces."""
    return " ".join(text.split("\n"))


def _links(output: Output) -> str:
    return " ".join(f"{s}-{t}" for s, t in output.alignment.pairs) if output.alignment else ""


def _columns(values: Sequence[object]) -> str:
    return "\t".join(map(_column, values))


def _column(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return one_line(" ".join(value.split("\t"))) if isinstance(value, str) else "" if value is None else str(value)


def _json(record: Mapping[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False)


def _numbers(output: Output) -> dict[str, Any]:
    """Return the numbers of an output by name."""
    values = {name: getattr(output, name) for name in ("score", "log_prob", "utility")}
    numbers: dict[str, Any] = {name: _number(value) for name, value in values.items() if value is not None}
    if output.labels is not None:
        numbers["labels"] = {label: _number(probability) for label, probability in output.labels.items()}
    return numbers


def _tagged(words: Sequence[TaggedWord], scores: bool) -> dict[str, Any]:
    """Return tags, spans and, with `scores`, probabilities of tagged words as in JSON."""
    tags, spans = [word.tag for word in words], []
    for span in find_spans(tags) if mark_spans(tags) else ():
        inside = words[span.start : span.end]
        record = {**span._asdict(), "text": " ".join(word.word for word in inside)}
        together = inside[0].probability * math.prod(word.follows for word in inside[1:])
        spans.append(record | ({"probability": _number(together)} if scores else {}))
    probabilities = {"probabilities": [_number(word.probability) for word in words]} if scores else {}
    return {"tags": tags, "spans": spans, **probabilities}


def _number(value: float | None) -> float | None:
    return round(value, 5) if value is not None and math.isfinite(value) else None
