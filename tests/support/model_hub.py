"""A hub for tests that receives models: the answers that `huggingface_hub` needs to create, fill and read a repository.

Names are owned by `somebody`, the owner of the token `TOKEN`. Only the standard library is used here.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from .hub import Hub

TOKEN = "hf_" + "aVerySecret1" * 3
READ_ONLY_TOKEN = "hf_" + "onlyReading2" * 3
OWNER = "somebody"


@dataclass
class Repository:
    """The files of one model, whether it is private, and the first lines of its commits."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class ModelHub:
    """Repositories by name, the contents of large files, and the requests in order, without their bodies."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.address = ""
        self.refused = ""  # a part of a path whose requests the hub answers with an internal error
        self.message = "the hub is on fire"  # of that error

    def environment(self, home: str, token: str = TOKEN) -> dict[str, str]:
        """Return the environment variables that make a process use this hub."""
        shared = Hub.environment(self, home)  # type: ignore[arg-type]
        return shared | ({"HF_TOKEN": token} if token else {})


@contextmanager
def receiving() -> Iterator[ModelHub]:
    """Serve a hub for models while the block runs."""
    hub = ModelHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ModelHub

    def do_GET(self) -> None:
        path = self._begin()
        name, _, rest = path.removeprefix("/api/models/").partition("/tree/")
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._answer(404, {}, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif rest:
            self._answer(200, [_entry(file, content) for file, content in repository.files.items()])
        else:
            siblings = [{"rfilename": file} for file in repository.files]
            self._answer(200, {"id": name, "sha": "0" * 40, "private": repository.private, "siblings": siblings})

    def do_POST(self) -> None:
        path = self._begin()
        if self.hub.refused and self.hub.refused in path:
            self._answer(500, {"error": self.hub.message})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create()
        elif path.endswith("/info/lfs/objects/batch"):
            address = {"href": f"{self.hub.address}/objects/"}
            objects = [
                item | {"actions": {"upload": {"href": address["href"] + item["oid"]}}} for item in self.body["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif "/preupload/" in path:
            large = "*.safetensors"
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if fnmatch.fnmatch(file["path"], large) else "regular",
                    "shouldIgnore": False,
                }
                for file in self.body["files"]
            ]
            self._answer(200, {"files": modes})
        else:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0])

    def do_PUT(self) -> None:
        path = self._begin()
        self.hub.objects[path.removeprefix("/objects/")] = self.content
        self._answer(200, {})

    def _begin(self) -> str:
        """Read the request; return its path."""
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    @property
    def body(self) -> Any:
        return json.loads(self.content)

    def _create(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        owner, name = self.body.get("organization") or OWNER, self.body["name"]
        full = f"{owner}/{name}"
        if token not in (TOKEN, READ_ONLY_TOKEN):
            self._answer(401, {"error": f"Invalid credentials: {token}"})
        elif token == READ_ONLY_TOKEN or owner != OWNER:
            self._answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        else:
            known = full in self.hub.repositories
            private = self.body.get("private") or self.body.get("visibility") == "private"
            self.hub.repositories.setdefault(full, Repository(private=bool(private)))
            self._answer(409 if known else 200, {"url": f"{self.hub.address}/{full}", "name": full})

    def _commit(self, name: str) -> None:
        repository = self.hub.repositories[name]
        for line in self.content.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                repository.commits.append(value["summary"])
            elif key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                del repository.files[value["path"]]
        commit = hashlib.sha1(self.content).hexdigest()
        self._answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def _entry(file: str, content: bytes) -> dict[str, Any]:
    """Return the hub's description of a file."""
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
