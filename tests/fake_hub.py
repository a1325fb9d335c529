"""A Hugging Face hub on the loopback interface: repositories in memory, and faults on request."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Commits, each a set of files; `refs` maps branches to commits, `gated` asks for terms."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False


@dataclass
class FakeHub:
    """`url` goes into HF_ENDPOINT. `cut`: after so many bytes the connection breaks."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], *, gated: bool = False) -> str:
        """A new commit on the main branch of a repository; its id."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}, gated))
        repository.commits[commit] = files
        repository.refs["main"] = commit
        return commit


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A hub that runs until the block ends."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """A server that says nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._fail(404, "EntryNotFound")

    def _commit(self, name: str, revision: str) -> str | None:
        """The commit of a revision; answers with the error where there is none."""
        repository = self.state.repositories.get(name)
        if repository is None:
            self._fail(401, "RepoNotFound")
        elif repository.gated:
            self._fail(403, "GatedRepo")
        elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
            self._fail(404, "RevisionNotFound")
        else:
            return commit
        return None

    def _info(self, name: str, revision: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        files = self.state.repositories[name].commits[commit]
        siblings = [
            {"rfilename": file, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            for file, data in files.items()
        ]
        body = {"_id": "0", "id": name, "modelId": name, "sha": commit, "siblings": siblings}
        self._send(json.dumps({**body, "tags": [], "downloads": 0, "likes": 0}).encode())

    def _file(self, name: str, revision: str, file: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        data = self.state.repositories[name].commits[commit].get(file)
        if data is None:
            self._fail(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        self._send(data, headers, file)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, headers: dict[str, str] | None = None, file: str = "") -> None:
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
        self.send_response(206 if start else 200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.state.cut.get(file, len(data))
        self.wfile.write(data[start:limit])
        if limit < len(data):
            self.wfile.flush()
            self.close_connection = True
