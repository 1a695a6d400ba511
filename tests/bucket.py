"""A bucket of Google's that is a folder: for paths through fsspec, for arrays through what TensorStore asks a server.

Only what jformer, Orbax and TensorStore use is here, and nothing of accounts, quotas or buckets with real folders.
"""

import http.server
import json
import os
import threading
import urllib.parse
from pathlib import Path

import fsspec
import tensorboardX.record_writer
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint._src.path import gcs_utils


def pretend(folder: Path) -> str:
    """Let gs:// mean the folder, from now on and in this process; return the address that TensorStore asks."""

    class Server(Objects):
        root = folder

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {"TENSORSTORE_GCS_HTTP_URL": address, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any"}

    class Folder(Bucket):
        root = folder

    for protocol in ("gs", "gcs"):
        fsspec.register_implementation(protocol, Folder, clobber=True)
    tensorboardX.record_writer.register_writer_factory("gs", Events())
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False  # would ask Google's own package
    return address


class Bucket(DirFileSystem):
    """What etils asks for: files by their names."""

    root: Path
    cachable = False

    def __init__(self, **options: object) -> None:
        super().__init__(path=str(self.root), fs=LocalFileSystem(auto_mkdir=True))

    def _join(self, path: object) -> object:
        return super()._join(self._strip_protocol(path) if isinstance(path, str | os.PathLike) else path)

    @classmethod
    def _strip_protocol(cls, path: object) -> str:
        return os.fspath(path).removeprefix("gs://").removeprefix("gcs://").rstrip("/")

    def open(self, path: object, mode: str = "rb", **options: object) -> object:
        """Objects of a bucket are never appended to."""
        assert "a" not in mode, path
        return super().open(path, mode, **options)

    def rename(self, path: object, target: object, **options: object) -> None:
        """Nor are they renamed."""
        raise AssertionError(path)


class Objects(http.server.BaseHTTPRequestHandler):
    """What TensorStore asks for: whole objects and ranges of them, a generation to compare with, names by prefix."""

    root: Path
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        file, query = self._asked()
        if file is None:
            bucket = self.root / self._bucket()
            names = [str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()]
            items = [{"name": name} for name in sorted(names) if name.startswith(query.get("prefix", ""))]
            return self._answer(200, json.dumps({"items": items}).encode())
        if not file.is_file():
            return self._answer(404)
        content, headers = file.read_bytes(), {"x-goog-generation": generation(file)}
        if "Range" not in self.headers:
            return self._answer(200, content, headers)
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        start = int(first) if first else len(content) - int(last)
        end = min(int(last) + 1 if first and last else len(content), len(content))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return self._answer(206, content[start:end], headers)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        query = self._asked()[1]
        file = self.root / self._bucket() / query["name"]
        if query.get("ifGenerationMatch", generation(file)) != generation(file):
            return self._answer(412)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return self._answer(200, json.dumps({"name": query["name"], "generation": generation(file)}).encode())

    def do_DELETE(self) -> None:
        file = self._asked()[0]
        if file is None or not file.is_file():
            return self._answer(404)
        file.unlink()
        return self._answer(204)

    def _bucket(self) -> str:
        return self.path.partition("/b/")[2].partition("/")[0]

    def _asked(self) -> tuple[Path | None, dict[str, str]]:
        address = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(address.path.partition("/o/")[2])
        return self.root / self._bucket() / name if name else None, dict(urllib.parse.parse_qsl(address.query))

    def _answer(self, code: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def generation(file: Path) -> str:
    """Return the number that Google gives every version of an object; 0 if there is none."""
    return str(file.stat().st_mtime_ns) if file.is_file() else "0"


class Events:
    """What tensorboardX asks for, which has its own way to a bucket: the curves go nowhere."""

    def open(self, path: str) -> "Events":
        """Need no file."""
        return self

    def directory_check(self, path: str) -> None:
        """Need no directory."""

    def write(self, content: bytes) -> None:
        """Drop it."""

    flush = close = lambda self: None
