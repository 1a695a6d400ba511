"""How a line asks and how a line answers: plain text, TSV or JSON. No files and no models here."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jformer.data.text import admit
from jformer.requests import Output, Request, Scored


class Question(NamedTuple):
    """Targets to be scored, one or several, given one source."""

    source: str
    targets: tuple[str, ...]
    ranked: bool = False  # they came as a list, and go out in the order of their scores


def read_request(number: int, line: str, form: str, counts: Counter[str]) -> Request:
    """Read what line `number` (from 0) asks: the line itself, or {"source", "prefix", "constraints"} in JSON.

    Raises ValueError for what is no such object, for the caller to add the place.
    """
    if form == "text":
        return Request(line, line=number)
    record = _object(line, {"source": str, "prefix": str, "constraints": list}, ("source",), counts)
    return Request(record["source"], record.get("prefix", ""), record.get("constraints", ()), number)


def read_question(line: str, form: str, continues: bool, counts: Counter[str]) -> Question:
    """Read what is to be scored: source, one TAB, target; or {"source", "target"} or {"source", "targets"} in JSON.

    A model that continues texts has no source: the line itself is the target. Raises ValueError as `read_request`.
    """
    if form == "jsonl":
        source = {} if continues else {"source": str}
        record = _object(line, {**source, "target": str, "targets": list}, tuple(source), counts)
        if ("target" in record) == ("targets" in record):
            raise ValueError("wants one of 'target' and 'targets'")
        targets = (record["target"],) if "target" in record else record["targets"]
        return Question(record.get("source", ""), targets, "targets" in record)
    if continues:
        return Question("", (line,))
    texts = line.split("\t")
    if len(texts) != 2:
        raise ValueError(f"{len(texts) - 1} TABs; a line is source, one TAB, target")
    return Question(texts[0], (texts[1],))


def write_outputs(outputs: Sequence[Output], form: str, scores: bool, alignments: bool) -> str:
    """Return the line that answers a request.

    text   the best output
    tsv    text, its score and its alignment if asked for, and the same again for each further output
    jsonl  {"outputs": [{"text", "score", "alignment"}]}

    An alignment is written as in Pharaoh (Koehn 2004): pairs of source and target token, both counted from 0. TABs of
    a text become spaces in TSV. The score of an output that could not be found is null.
    """
    if form == "text":
        return outputs[0].text
    records = []
    for output in outputs:
        record: dict[str, Any] = {"text": output.text}
        if scores:
            record["score"] = _number(output.score)
        if alignments:
            record["alignment"] = " ".join(f"{source}-{target}" for source, target in output.alignment)
        records.append(record)
    return _columns(records) if form == "tsv" else _json({"outputs": records})


def write_scored(question: Question, scored: Sequence[Scored], form: str, token_scores: bool) -> str:
    """Return the line that answers a question.

    text   the log-probability
    tsv    log-probability, number of tokens and, if asked for, log-probabilities of the tokens with spaces between
    jsonl  {"score", "length"} and, if asked for, "log_probs" and "tokens"

    Ranked targets come best first, each with its text before the rest; in JSON as {"outputs": [...]}.
    """
    if form == "text":
        return str(_number(scored[0].log_prob))
    records = []
    for text, one in sorted(zip(question.targets, scored, strict=True), key=lambda pair: -pair[1].log_prob):
        record: dict[str, Any] = {"text": text} if question.ranked else {}
        record |= {"score": _number(one.log_prob), "length": len(one.tokens)}
        if token_scores:
            record["log_probs"] = [_number(log_prob) for log_prob in one.token_log_probs]
            if form == "jsonl":
                record["tokens"] = one.tokens
        records.append(record)
    if form == "tsv":
        return _columns(records)
    return _json({"outputs": records} if question.ranked else records[0])


def _object(line: str, kinds: Mapping[str, Any], needed: Sequence[str], counts: Counter[str]) -> dict[str, Any]:
    """Return a JSON object whose values are texts, or lists of texts where `kinds` says so."""
    record = json.loads(line)
    if not isinstance(record, dict) or not all(key in record for key in needed):
        raise ValueError(f"not a JSON object with {' and '.join(map(repr, needed or kinds))}")
    for key, value in record.items():
        if key not in kinds:
            raise ValueError(f"{key!r} is none of {', '.join(map(repr, kinds))}")
        if not isinstance(value, kinds[key]) or not all(isinstance(text, str) for text in value):
            raise ValueError(f"{key!r} must be {'a text' if kinds[key] is str else 'a list of texts'}")
        record[key] = _text(value, counts) if kinds[key] is str else tuple(_text(text, counts) for text in value)
    return record


def _text(text: str, counts: Counter[str]) -> str:
    text.encode()  # JSON can spell half a surrogate pair, which is no text
    return admit(text, counts)


def _columns(records: Sequence[Mapping[str, Any]]) -> str:
    return "\t".join(_column(value) for record in records for value in record.values())


def _column(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return " ".join(value.split("\t")) if isinstance(value, str) else str(value)


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)


def _number(score: float) -> float | None:
    return round(score, 5) if math.isfinite(score) else None
