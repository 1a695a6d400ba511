"""JSON that everybody may write into a file of ours: of another shape, or with a key that occurs twice in it."""

import json
from pathlib import Path

import pytest

from jformer import storage
from jformer.errors import UserError
from tests.faults.readers import readers

SHAPES = ["[]", "7", '"x"', "null", "[[]]", "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200]
VALUES = [7, -1.5, "x", True, None, [], {}, [7], ["x"], [[]], [{}], {"x": 7}, {"x": []}]
SHOWN = {"heartbeat.json": False, "digests.json": ["digests.json"]}  # what is taken to be absent, or damaged
LIBRARY = ("questions, replace", "pairs as JSON, replace", "tagged words as JSON, replace")  # read as those that refuse
ELSEWHERE = {
    # What was just written, as it reads.
    "evaluation/results.py", "inference/output_file.py",
    "data/corpus.py", "data/sources/generated_cache.py",  # behind a digest of the file
    "data/tokenizers/pretrained.py",  # which the library of tokenizers has read before
    "parallel/processes/service.py", "parallel/processes/meeting.py",  # between processes
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return name -> reader and its text, of every file that is JSON or has JSON in its lines."""
    found = {}
    for name, reader in readers(tmp_path_factory.mktemp("readers").resolve()).items():
        content = reader.path.read_bytes()
        if content.startswith(b"{") and name not in LIBRARY:
            found[name] = reader, content.decode()
    return found


def first_object(text):
    """Return the first object of a text and what follows it."""
    content, end = json.JSONDecoder().raw_decode(text)
    content.pop("digest", None)  # as if it were written by hand
    return content, text[end:]


def ended(name, reader, content, placed=True):
    """Return whether a content is refused in one line, which names the place, is said to be absent, or is read."""
    whole = reader.path.read_bytes()
    reader.path.write_text(content)
    try:
        value = reader.read()
    except UserError as error:
        assert "\n" not in str(error), (name, content[:100], str(error))
        places = (reader.path.name, *map(str, reader.path.parents[:2]))
        assert not placed or any(place in str(error) for place in places), (name, str(error))
        return "refused"
    finally:
        reader.path.write_bytes(whole)
    return "absent" if name in SHOWN and value == SHOWN[name] else "read"


def test_json_is_parsed_in_one_place_but_for_what_is_ours_within_a_process_or_has_a_digest():
    package = Path(storage.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if "json.load" in path.read_text()}
    assert found == ELSEWHERE | {"integrity.py"}


def test_no_reader_of_json_is_left_out(whole):
    assert len(whole) > 20
    assert {"config.json", "results.json", "heartbeat.json", "sweep.json", "trials.journal", "manifest"} <= whole.keys()


def test_json_of_another_shape_is_refused_or_taken_to_be_absent(whole, capsys):
    for name, (reader, text) in whole.items():
        for shape in SHAPES:
            _, rest = first_object(text)
            assert ended(name, reader, shape + rest) != "read", (name, shape[:20])
    assert "heartbeat.json: cannot be read as a heartbeat (it must be a JSON object)" in capsys.readouterr().err


def test_a_key_that_stands_twice_is_refused_or_its_file_taken_to_be_absent(whole):
    for name, (reader, text) in whole.items():
        content, rest = first_object(text)
        for key, value in content.items():
            twice = json.dumps(content)[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}"
            assert ended(name, reader, twice + rest) != "read", (name, key)


def test_values_of_another_kind_end_in_no_traceback(whole):
    for name, (reader, text) in whole.items():
        content, rest = first_object(text)
        for key in content if name != "config.json" else ():  # whose keys tests/config goes through
            for value in VALUES:
                ended(name, reader, json.dumps(content | {key: value}) + rest, placed=False)
            missing = {other: inner for other, inner in content.items() if other != key}
            ended(name, reader, json.dumps(missing) + rest, placed=False)
