"""A hub for tests: data sets, served over HTTP on this machine with the few answers that readers need.

The answers follow the requests of `huggingface_hub` and `datasets`. Only the standard library is used here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The files of one data set by path, and the requests to the server in order."""

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name, self.files, self.requests = name, files, list[str]()
        self.address, self.commit = "", COMMIT
        self.history = {COMMIT: files}  # commit -> its files

    def publish(self, commit: str, files: dict[str, bytes]) -> None:
        """Move the branch main to another commit. Earlier commits stay available."""
        self.files, self.commit = files, commit
        self.history[commit] = files

    def at(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return (commit, its files by path) of a revision: a commit, or any branch, which is the newest commit."""
        commit = revision if revision in self.history else self.commit
        return commit, self.history[commit]

    def environment(self, home: str) -> dict[str, str]:
        """Return the environment variables that make a process use this hub, with its cache in `home`."""
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        return {"HF_ENDPOINT": self.address, "HF_HOME": home, "HF_HUB_OFFLINE": "0", **quiet}

    def info_of(self, path: str, files: dict[str, bytes]) -> dict[str, Any]:
        """Return the hub's description of a file."""
        content = files[path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def listed(self, folder: str, files: dict[str, bytes], *, recursive: bool) -> list[dict[str, Any]] | None:
        """Return the entries of a folder; None where there is none."""
        prefix = f"{folder}/" if folder else ""
        below = [path for path in sorted(files) if path.startswith(prefix)]
        folders = {path[: path.index("/", len(prefix))] for path in below if "/" in path[len(prefix) :]}
        entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        entries += [self.info_of(path, files) for path in below if recursive or "/" not in path[len(prefix) :]]
        return entries or None


@contextmanager
def serving(hub: Hub, *others: Hub) -> Iterator[Hub]:
    """Serve a hub while the block runs, and other data sets at its address; its `address` is known inside."""

    class Handler(_Handler):
        pass

    Handler.hubs = (hub, *others)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hubs: tuple[Hub, ...]

    @property
    def hub(self) -> Hub:
        """The requested data set; the first one if the path names none of them."""
        path = unquote(urlsplit(self.path).path) + "/"
        return next((hub for hub in self.hubs if f"/datasets/{hub.name}/" in path), self.hubs[0])

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path, name = unquote(address.path), self.hub.name
        self.hub.requests.append(f"GET {self.path} {self.headers.get('Range', '')}".strip())
        if path.startswith(f"/datasets/{name}/resolve/"):
            self._file()
        elif path.startswith(f"/api/datasets/{name}/tree/"):
            revision, _, folder = path.removeprefix(f"/api/datasets/{name}/tree/").partition("/")
            recursive = parse_qs(address.query).get("recursive", ["false"])[0].lower() == "true"
            self._json(self.hub.listed(folder, self.hub.at(revision)[1], recursive=recursive))
        elif path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/revision/"):
            commit, files = self.hub.at(path.rpartition("/")[2])
            siblings = [{"rfilename": file} for file in sorted(files)]
            self._json({"id": name, "sha": commit, "private": False, "gated": False, "siblings": siblings})
        else:
            self._missing("RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.hub.requests.append(f"POST {self.path} {body}")
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        _, files = self.hub.at(urlsplit(self.path).path.rpartition("/")[2])
        self._json([self.hub.info_of(path, files) for path in paths if path in files])

    def _file(self) -> None:
        path_and_revision = unquote(urlsplit(self.path).path).removeprefix(f"/datasets/{self.hub.name}/resolve/")
        revision, _, path = path_and_revision.partition("/")
        commit, files = self.hub.at(revision)
        if path not in files:
            self._missing("EntryNotFound", commit)
            return
        content = files[path]
        first, last = 0, len(content) - 1
        if expected := self.headers.get("Range"):
            begin, _, end = expected.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
        more = {"Content-Range": f"bytes {first}-{last}/{len(content)}"} if expected else {}
        tag = hashlib.sha1(content).hexdigest()
        self._answer(
            206 if expected else 200,
            content[first : last + 1],
            {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes", **more},
        )

    def _json(self, value: Any) -> None:
        if value is None:
            self._missing("EntryNotFound")
        else:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str, commit: str = "") -> None:
        there = {"X-Repo-Commit": commit or self.hub.commit}
        self._answer(404, b"", {"X-Error-Code": code, "X-Error-Message": "not here", **there})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""
