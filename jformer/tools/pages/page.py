"""HTML pages in one file: headings, text, tables, pictures, and drawings by our programs; they load nothing."""

import base64
import hashlib
import html
import itertools
import json
import os
import pathlib
import urllib.parse
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files

import numpy as np
from etils.epath import Path

from jformer.errors import UserError
from jformer.storage import in_bucket, refuse_special, replace_content, writing


def page(
    title: str,
    parts: Sequence[str],
    programs: tuple[str, ...] = (),
    data: object = None,
    refresh: float = 0.0,
    packed: Sequence[str] = (),
) -> str:
    """Return a complete HTML file of parts made by the functions below; it loads nothing from elsewhere.

    A content security policy allows only the named programs to run. Texts are data, never read as HTML or code.

    Args:
        title: of the window, and as the heading.
        parts: HTML.
        programs: names of programs that draw the data, in this order: PROGRAM.js next to this file, and for the style
            PROGRAM.css where there is one.
        data: any JSON value.
        refresh: seconds after which a browser reloads the page; 0 = never.
        packed: further data, from `pack`, each in a comment after the programs, which they look up by number.

    Raises:
        ValueError: for a number in the data that is not finite.
    """
    again = f'<meta http-equiv="refresh" content="{refresh:g}">\n' if refresh else ""
    drawing = ""
    style = ""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    if programs:
        here = files("jformer.tools.pages")
        script = "\n".join(here.joinpath(f"{program}.js").read_text("utf-8") for program in programs)
        sheets = (here.joinpath(f"{program}.css") for program in programs)
        style = "".join(sheet.read_text("utf-8") for sheet in sheets if sheet.is_file())
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text = text.replace("<", "\\u003c")  # so that no text can close the script element
        apart = "\n".join(f"<!--{each}-->" for each in packed)
        drawing = f"""<noscript><p>This page draws with JavaScript, which is switched off.</p></noscript>
<script type="application/json" id="data">{text}</script>
<script>{script}</script>
{apart}"""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{again}<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head>
<body><header><h1>{html.escape(title)}</h1></header>
<main>
{chr(10).join(parts)}
</main>
{drawing}
</body></html>
"""


def pack(values: np.ndarray) -> str:
    """Return an array of bytes as text for `page`: deflated (RFC 1950), in base64.

    zlib's strategy for filtered data makes noisy maps of weights 11 % smaller than the default, smooth ones as small.
    """
    packer = zlib.compressobj(strategy=zlib.Z_FILTERED)
    return base64.b64encode(packer.compress(values.astype(np.uint8).tobytes()) + packer.flush()).decode()


def heading(text: str, anchor: str = "") -> str:
    """Return a heading that links can lead to, by its anchor."""
    name = f' id="{html.escape(anchor)}"' if anchor else ""
    return f"<h2{name}>{html.escape(text)}</h2>"


def contents(titles: Mapping[str, str]) -> str:
    """Return the links to headings, anchor → title."""
    links = (f'<li><a href="#{html.escape(anchor)}">{html.escape(title)}</a></li>' for anchor, title in titles.items())
    return f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>'


def paragraph(text: str) -> str:
    """Return a paragraph; it keeps line breaks, and runs from right to left if its first letter does."""
    return f'<p dir="auto">{html.escape(text)}</p>'


def table(rows: Sequence[Sequence[str]], left: int = 1, links: Sequence[str] = ()) -> str:
    """Return a table whose first row is its head; the first `left` columns are text, the others numbers.

    `links` are the targets for the first cells of the other rows.
    """
    kinds = [' class="text" dir="auto"' if i < left else "" for i in range(len(rows[0]))]

    def line(cells: Sequence[str], tag: str, link: str = "") -> str:
        texts = [html.escape(cell) for cell in cells]
        if link:
            texts[0] = f'<a href="{html.escape(urllib.parse.quote(link))}">{texts[0]}</a>'
        # An empty corner is not a heading.
        tags = ["td" if not text else tag for text in texts]
        return "".join(f"<{t}{kind}>{text}</{t}>" for t, kind, text in zip(tags, kinds, texts, strict=True))

    linked = itertools.zip_longest(rows[1:], links, fillvalue="")
    body = "\n".join(f"<tr>{line(row, 'td', link)}</tr>" for row, link in linked)
    head = f"<thead><tr>{line(rows[0], 'th')}</tr></thead>"
    return f'<div class="wide" tabindex="0"><table>{head}\n<tbody>{body}</tbody></table></div>'


def image(png: bytes, description: str) -> str:
    """Return an embedded picture."""
    data = base64.b64encode(png).decode()
    return f'<img width="640" alt="{html.escape(description)}" src="data:image/png;base64,{data}">'


def visible(token: str) -> str:
    """Return a token, or visible marks for one of white space and invisible characters alone.

    >>> visible("a b"), visible(" "), visible("\\n"), visible("\\u200b")
    ('a b', '␣', '↵', '<U+200B>')
    """
    if any(sign.isprintable() and sign != " " for sign in token):
        return token
    return "".join(SPACES.get(sign, f"<U+{ord(sign):04X}>") for sign in token)


def check_output(mode: str, output: str) -> None:
    """Raise UserError for an --output that cannot be written."""
    if output == "-":
        raise UserError(f"--mode={mode} writes a page: name a file as --output, such as --output={mode}.html")
    path = pathlib.Path(output)
    refuse_special(path)
    if not in_bucket(Path(output)) and (path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
        raise UserError(f"--output={output}: cannot be written; name a file in a folder that can")


def write_page(output: str, content: bytes) -> None:
    """Write a page or a figure to a file, whole or not at all; raise UserError if that fails."""
    with writing(f"--output={output}"):
        replace_content(Path(output), content)


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files, name → content, into a folder, which is created; raise UserError if that fails."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            whole = content.encode() if isinstance(content, str) else content
            replace_content(folder / name, whole, shared=True)  # several machines may finish a sweep at once


SPACES = {" ": "␣", "\n": "↵", "\t": "⇥"}  # as keyboards and editors show them
STYLE = """
:root { color-scheme: light dark; background: Canvas }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em }
p { white-space: pre-wrap }
h1, h2, p { overflow-wrap: anywhere }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; margin: .5em .5em .5em 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .8em; border-bottom: 1px solid #8885; text-align: right; vertical-align: top }
.text { text-align: left; overflow-wrap: anywhere; min-width: 8em }
td.text { white-space: pre-wrap }
@media print { :root { color-scheme: light } }
"""
