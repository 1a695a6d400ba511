"""The interface as a page for people, written from its description, /openapi.json. It has no script, and loads nothing.

OpenAPI 3.1, as FastAPI describes an application with it.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]


def interface_page(description: Schema) -> str:
    """Return the page of a description in OpenAPI: every path with what it takes and gives, then the objects."""
    title = _text(f"{description['info']['title']} {description['info']['version']}: interface")
    paths = (
        _path(path, method, operation)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    )
    objects = description.get("components", {}).get("schemas", {})
    named = (_object(name, schema) for name, schema in objects.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="/page.css">
</head>
<body>
<header><h1>{title}</h1>
<p>For programs, the same is at <a href="/openapi.json">/openapi.json</a>. <a href="/">Try it</a>.</p></header>
<main>
<h2>Paths</h2>
{"".join(paths)}
<h2>Objects</h2>
{"".join(named)}
</main>
</body>
</html>
"""


def _path(path: str, method: str, operation: Schema) -> str:
    """Return the section of one path."""
    summary = _text(operation.get("summary", "")), _text(operation.get("description", ""))
    made = f"<section><h3><code>{_text(method.upper())} {_text(path)}</code></h3><p>{summary[0]}. {summary[1]}</p>"
    takes = operation.get("requestBody", {}).get("content", {})
    rows = [("takes", kind, _kind(content.get("schema", {}))) for kind, content in takes.items()]
    for status, answer in operation.get("responses", {}).items():
        gives = answer.get("content", {}) or {"": {}}
        rows += [(status, kind or answer["description"], _kind(each.get("schema", {}))) for kind, each in gives.items()]
    return made + _table(("", "content", "which is"), rows) + "</section>"


def _object(name: str, schema: Schema) -> str:
    """Return the section of one object, to which others refer."""
    required = schema.get("required", ())
    rows = [
        (_code(field), _kind(each), _default(each, field in required), _text(each.get("description", "")))
        for field, each in schema.get("properties", {}).items()
    ]
    made = f'<section><h3 id="{_text(name)}">{_text(name)}</h3><p>{_text(schema.get("description", ""))}</p>'
    return made + _table(("field", "is", "default", ""), rows) + "</section>"


def _kind(schema: Schema) -> str:
    """Return what a value is, in words; a named object is a link."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of ({_kind(schema.get('items', {}))})" + (", one or more" if schema.get("minItems") else "")
    return _text(str(schema.get("type", "anything")))


def _default(schema: Schema, required: bool) -> str:
    return "must be given" if required else _code(json.dumps(schema.get("default")))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML; nothing without rows."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f'<th scope="col">{cell}</th>' if cell else "<td></td>" for cell in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _text(text: str) -> str:
    return html.escape(text)
