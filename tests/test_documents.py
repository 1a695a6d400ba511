"""Documents speak of what there is: links, files, modules and config keys they name exist."""

import ast
import dataclasses
import fnmatch
import importlib
import itertools
import re
from pathlib import Path

from jformer.config.options import Config, flatten
from jformer.main import MODES
from jformer.models.model_config import CHOICES

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "map.md"
# Decision records speak of the day they were made: the files they name may have moved since.
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/**/*.md")])
FOLDERS = ("jformer", "configs", "experiments", "tests", "docs", ".ci")
FILES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
ANSWERS = ("text", "continuation", "label", "tags", "span")  # keys of a table of tasks, not of a file
INVENTED = (
    "mine.py",
    "my_parts.py",
    "comet22.py",
    "dates.py",
    "parts.py",
    "X.py",
    "NAME.py",
    "NAME.md",
    "models.py",
)  # of examples, and of flax examples/wmt
KEYS = {*flatten(dataclasses.asdict(Config())), *vars(Config())}
SECTIONS = "|".join(name for name, value in vars(Config()).items() if dataclasses.is_dataclass(value))

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)")
NAMED = re.compile(r"(?<![\w/.*-])[\w*-][\w/.*-]*\.(?:py|sh|md|sbatch|yaml)\b(?![\w/(-])")
MODULE = re.compile(r"(?<![\w/.@-])(?:jformer|experiments)(?:\.\w+)+")
KEY = re.compile(
    rf"--config\.([a-z_.]+)|`((?:{SECTIONS})\.(?!(?:py|en|fr|tsv|jsonl|conll|labels\.txt|txt|npy)`)[a-z_0-9.]+)[`=]"
)
CODE = re.compile(r"^ *```.*?^ *```|^\n(?:(?: {4}[^\n]*)?\n)+", re.MULTILINE | re.DOTALL)  # fenced, or indented
MISSPELT = ("section.key", "model.num_layer")  # on purpose: what a command line looks like, and what it refuses


def texts():
    """Yield every document: its path and its text."""
    for path in DOCUMENTS:
        yield path, path.read_text(encoding="utf-8")


def slugs(text):
    """Return what a document's headings are called in links, as GitHub has it."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_module(name):
    """Tell whether a dotted name is a module, or something in one."""
    for depth in range(name.count(".") + 1):
        module, *rest = name.rsplit(".", depth)
        if (ROOT / module.replace(".", "/")).is_dir() or (ROOT / (module.replace(".", "/") + ".py")).exists():
            return not rest or hasattr(importlib.import_module(module), rest[0])
    return False


def test_links_lead_somewhere():
    broken = []
    for path, text in texts():
        for target, anchor in LINK.findall(text):
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and anchor not in slugs(file.read_text(encoding="utf-8"))):
                broken.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken, broken


def is_file(name):
    """Tell whether a name, perhaps without its first folders, perhaps with stars, is one of our files."""
    invented = name.rpartition("/")[2] in INVENTED
    return invented or (ROOT / name).exists() or any(fnmatch.fnmatch(f"/{file}", f"*/{name}") for file in FILES)


def test_files_that_are_named_are_there():
    found = {(path.name, name) for path, text in texts() for name in NAMED.findall(re.sub(r"https?://\S+", "", text))}
    wrong = sorted(pair for pair in found if not is_file(pair[1]))
    assert not wrong, wrong


def test_modules_that_are_named_are_there():
    found = {(path.name, name) for path, text in texts() for name in MODULE.findall(text)}
    wrong = sorted(pair for pair in found if not is_module(pair[1]))
    assert not wrong, wrong


def is_key(name):
    return name in (*KEYS, *MISSPELT) or any(key.startswith(f"{name}.") for key in KEYS)


def test_config_keys_that_are_named_are_there():
    found = {(path.name, (a or b).rstrip(".")) for path, text in texts() for a, b in KEY.findall(text)}
    wrong = sorted(pair for pair in found if not is_key(pair[1]))
    assert not wrong, wrong


def test_modes_that_are_named_are_there():
    found = {(path.name, mode) for path, text in texts() for mode in re.findall(r"--mode=([a-z]+)", text)}
    assert not sorted(pair for pair in found if pair[1] not in MODES)


def test_wrapped_commands_can_be_pasted():
    files = [*DOCUMENTS, *ROOT.glob("docs/*/*.md"), *ROOT.glob(".github/*.md")]
    wrapped = [
        (path.relative_to(ROOT), before, line.strip())
        for path in files
        for block in CODE.findall(path.read_text(encoding="utf-8"))
        for before, line in itertools.pairwise(block.splitlines())
        if line.lstrip().startswith(("--", '"--', "'--"))
    ]
    assert wrapped
    wrong = [f"{path}: {line}" for path, before, line in wrapped if not before.endswith("\\")]
    assert not wrong, "\n".join(wrong)


def test_the_guide_lists_every_choice_of_models():
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for key, choices in CHOICES.items():
        missing = [choice for choice in choices if not re.search(rf"\b{choice}\b", guide)]
        assert not missing, f"{key}: {missing}"


def test_decisions_have_numbers_of_their_own():
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]
    for name in names:
        assert (ROOT / "docs" / "decisions" / name).read_text(encoding="utf-8").startswith(f"# {name[:4]} "), name


def test_what_the_map_says_to_change_is_there():
    table = MAP.read_text(encoding="utf-8").partition("## Where a change goes")[2].partition("\n\nA change")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) > 20
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        texts = [
            (ROOT / file).read_text() for file in FILES if any(fnmatch.fnmatch(f"/{file}", f"*/{q}") for q in quoted)
        ]
        for name in quoted:
            if "/" not in name and not name.endswith((".py", ".md")):
                assert any(
                    re.search(rf"\b{re.escape(name.partition('(')[0].rpartition('.')[2])}\b", t) for t in texts
                ), row


def test_the_reference_has_every_field_that_is_written():
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for file in ("training/log.py", "evaluation/evaluate.py"):
        dicts = [n for n in ast.walk(ast.parse((ROOT / "jformer" / file).read_text())) if isinstance(n, ast.Dict)]
        keys = {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
        missing = sorted(key for key in keys if f"`{key}`" not in reference and key not in ANSWERS)
        assert len(keys) > 10
        assert not missing, f"{file}: {missing}"


def test_some_document_leads_to_every_page():
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".sbatch", ".yaml")}
    linked = {Path(target).name for _, text in texts() for target, _ in LINK.findall(text)}
    assert not sorted(pages - linked)


def test_the_glossary_explains_every_axis_of_the_code():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Axis letters")[2]
    rows = re.findall(r"^\| ([\w, ]+) \|(?:[^|]+\| (\w) \|)?", glossary.partition("\n## ")[0], re.MULTILINE)
    explained = {letter.strip() for row in rows for cell in row for letter in cell.split(",")}
    for path in (ROOT / "jformer").rglob("*.py"):
        for shape in re.findall(r"\[(?:Array|np\.ndarray), \"([^\"]+)\"\]", path.read_text(encoding="utf-8")):
            axes = {axis for axis in re.findall(r"[^\s*#]+", shape) if axis.isidentifier() and axis != "_"}
            assert axes <= explained, f"{path.relative_to(ROOT)}: {sorted(axes - explained)}"


def test_the_glossarys_types_are_where_it_says():
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("| type | file |")[2]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `([\w/.]+)` \|", table, re.MULTILINE)
    assert len(rows) > 10
    for types, file in rows:
        code = (ROOT / "jformer" / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", types):
            assert re.search(rf"^class {name}\b", code, re.MULTILINE), f"{file} has no class {name}"
