"""A Hub on this machine: serves repositories from folders as far as huggingface_hub asks, and breaks down on request.

Weights lie on another host than the rest, as they do on the Hub.
"""

import contextlib
import hashlib
import json
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CHUNK = 1 << 16
STALL_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """One request, and how many bytes of the body were sent in answer."""

    method: str
    path: str
    first: int  #: byte of the file
    last: int | None  #: byte of the file, None for its last
    sent: int

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class Fault:
    """What goes wrong with answers about a file.

    kind: "status", "cut" (the connection ends in the body), "reset" (by force), "stall" (nothing more comes), "flip"
    (other bytes), "size" (the file has another size now). at: byte of the file where it happens. times: how often.
    """

    kind: str
    at: int = 0
    times: int = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    sha256: str
    blob: str

    @property
    def lfs(self) -> bool:
        return self.path.suffix == ".safetensors"


class HubEndpoint:
    """Runs between `start` and `stop`; the address is the same each time.

    on_request: called with method, path and first byte before each answer. refusal: part of a path, and status and
    headers of the answer where it occurs.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            self.port = reserved.getsockname()[1]
        self.home = Path(tempfile.mkdtemp(prefix="m3-hub-"))
        self.reset()
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Makes huggingface_hub, if it is not imported yet, ask this endpoint and nothing else."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "hf_secret",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    @property
    def cache(self) -> Path:
        return self.home / "hub"

    def reset(self) -> None:
        """Forgets everything: repositories, faults, the client's cache."""
        self.requests: list[Request] = []
        self.faults: dict[str, list[Fault]] = {}
        self.on_request: Callable[[str, str, int], None] = lambda method, path, first: None
        self.refusal: tuple[str, int, dict[str, str]] | None = None
        self._commits: dict[str, dict[str, dict[str, _File]]] = {}
        self._heads: dict[str, str] = {}
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()

    def add(self, repository: str, folder: Path) -> str:
        """The files of a folder as the newest commit of a repository; they must not change. Returns the commit."""
        files = {}
        for path in sorted(p for p in folder.iterdir() if p.is_file()):
            content = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            files[path.name] = _File(path, len(content), hashlib.sha256(content).hexdigest(), blob)
        commit = hashlib.sha1(json.dumps({n: f.sha256 for n, f in files.items()}).encode()).hexdigest()
        self._commits.setdefault(repository, {})[commit] = files
        self._heads[repository] = commit
        return commit

    def fail(self, name: str, kind: str, **fault: Any) -> Fault:
        """Something goes wrong with a file from now on; see `Fault`."""
        self.faults.setdefault(name, []).append(made := Fault(kind, **fault))
        return made

    def sent(self, suffix: str = ".safetensors") -> int:
        """Bytes of files of that kind that were sent."""
        return sum(r.sent for r in self.requests if r.path.endswith(suffix))

    def asked(self, name: str) -> list[Request]:
        """The requests for parts of a file."""
        return [r for r in self.requests if r.method == "GET" and r.name == name and r.path.startswith("/cdn/")]

    def start(self) -> None:
        if self._server is None:
            self._server = _Server(self)
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more, and open connections are cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.cut()
            self._server = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def lookup(self, repository: str, revision: str) -> tuple[str, dict[str, _File]] | None:
        commit = self._heads.get(repository, "") if revision == "main" else revision
        files = self._commits.get(repository, {}).get(commit)
        return None if files is None else (commit, files)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, endpoint: HubEndpoint) -> None:
        self.endpoint = endpoint
        self.stopped = threading.Event()
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", endpoint.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error of the server."""

    def cut(self) -> None:
        self.stopped.set()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Tests look at `HubEndpoint.requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        endpoint = self.server.endpoint
        url = urlsplit(self.path)
        path, self._sent = unquote(url.path), 0
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), int(wanted[2]) if wanted[2] else None) if wanted else (0, None)
        endpoint.on_request(self.command, path, first)
        try:
            if path.startswith("/cdn/"):
                self._weights(path, first, last, ranged=bool(wanted))
            elif endpoint.refusal is not None and endpoint.refusal[0] in path:
                self._status(*endpoint.refusal[1:])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
                self._api(match[1], match[2] or "revision", match[3] or "main", "blobs" in parse_qs(url.query))
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(match[1], match[2], match[3])
            else:
                self._status(404)
        finally:
            endpoint.requests.append(Request(self.command, path, first, last, self._sent))

    def _api(self, repository: str, kind: str, revision: str, blobs: bool) -> None:
        found = self.server.endpoint.lookup(repository, revision)
        if found is None:
            self._status(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        commit, files = found
        if kind == "tree":
            self._json([_tree_entry(name, file) for name, file in files.items()])
            return
        siblings = [{"rfilename": name, **(_sibling(file) if blobs else {})} for name, file in files.items()]
        self._json({"id": repository, "modelId": repository, "sha": commit, "tags": [], "siblings": siblings})

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        found = self.server.endpoint.lookup(repository, revision)
        if found is None or name not in found[1]:
            code = "RepoNotFound" if found is None else "EntryNotFound"
            self._status(404, {"X-Error-Code": code, "X-Error-Message": "not found"})
            return
        commit, files = found
        file = files[name]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if file.lfs:
            host = f"http://localhost:{self.server.endpoint.port}"
            headers["X-Linked-Size"], headers["X-Linked-Etag"] = str(file.size), f'"{file.sha256}"'
            self._status(302, {**headers, "Location": f"{host}/cdn/{repository}/{commit}/{name}"})
            return
        self._head(200, {**headers, "ETag": f'"{file.blob}"', "Content-Length": str(file.size)})
        self._body(file.path.read_bytes())

    def _weights(self, path: str, first: int, last: int | None, *, ranged: bool) -> None:
        if "authorization" in self.headers:
            self._status(400, {"X-Error-Message": "a token was sent to another host"})
            return
        owner, name, commit, file_name = path.removeprefix("/cdn/").split("/")
        found = self.server.endpoint.lookup(f"{owner}/{name}", commit)
        assert found is not None
        file = found[1][file_name]
        last = file.size - 1 if last is None else min(last, file.size - 1)
        with file.path.open("rb") as opened:
            opened.seek(first)
            content = opened.read(last + 1 - first)
        fault = self._fault(file_name, first, last)
        if fault is not None and fault.kind == "status":
            self._status(fault.status, fault.headers)
            return
        size = file.size + 1 if fault is not None and fault.kind == "size" else file.size
        headers = {"Content-Length": str(len(content)), "ETag": f'"{file.sha256}"'}
        if ranged:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._head(206 if ranged else 200, headers)
        if fault is None or fault.kind == "size":
            self._body(content)
            return
        at = max(fault.at - first, 0)
        if fault.kind == "flip":
            self._body(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            return
        self._body(content[:at])
        if fault.kind == "stall":
            self.server.stopped.wait(STALL_SECONDS)
        if fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True

    def _fault(self, name: str, first: int, last: int) -> Fault | None:
        for fault in self.server.endpoint.faults.get(name, ()):
            if fault.times > 0 and self.command == "GET" and first <= fault.at <= last:
                fault.times -= 1
                return fault
        return None

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(content))})
        self._body(content)

    def _status(self, status: int, headers: dict[str, str] | None = None) -> None:
        self._head(status, {"Content-Length": "0", **(headers or {})})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def _body(self, content: bytes) -> None:
        if self.command == "HEAD":
            return
        for start in range(0, len(content), CHUNK):
            self.wfile.write(content[start : start + CHUNK])
            self._sent += len(content[start : start + CHUNK])


def _sibling(file: _File) -> dict[str, Any]:
    lfs = {"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 134}} if file.lfs else {}
    return {"size": file.size, "blobId": file.blob, **lfs}


def _tree_entry(name: str, file: _File) -> dict[str, Any]:
    lfs = {"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}} if file.lfs else {}
    return {"type": "file", "path": name, "size": file.size, "oid": file.blob, **lfs}


def main() -> None:
    """Serves a folder as OWNER/NAME until it is interrupted: hub_endpoint.py OWNER/NAME FOLDER."""
    import sys

    endpoint = HubEndpoint()
    endpoint.add(sys.argv[1], Path(sys.argv[2]))
    endpoint.start()
    for key, value in endpoint.environment.items():
        print(f"export {key}={value}", flush=True)
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        endpoint.remove()


if __name__ == "__main__":
    main()
