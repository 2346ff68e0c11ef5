"""A small Hugging Face hub on loopback, for the real `load_dataset` and `AutoTokenizer`; its faults can be chosen.

It knows datasets and models with one commit each. Set `HF_ENDPOINT` to its `url` before `huggingface_hub` is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Fault = Callable[["Request"], "int | str | None"]


class Request:
    """What a client asked for; a fault looks at it.

    Attributes:
        number: how many requests came before it.
        path: without query.
        file: path in the repository, where a file's content is asked for.
        first_byte: of the range asked for.
    """

    def __init__(self, number: int, method: str, path: str, first_byte: int) -> None:
        self.number, self.method, self.path, self.first_byte = number, method, path, first_byte
        match = re.search(r"/resolve/[^/]+/(.+)", path)
        self.file = match[1] if match else None


class LoopbackHub:
    """Serves `repositories`: "datasets/owner/name" or "models/owner/name" -> {path: content}.

    Attributes:
        fault: called with each Request; returns None to serve it, a status to answer with, `"cut"` to close the
            connection in the middle of the content, `"close"` to close it at once.
        requests: all that came.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.fault: Fault = lambda request: None
        self.requests: list[Request] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repository: str) -> str:
        """The commit of a repository: a hash of its content."""
        return hashlib.sha1(repr(sorted(self.repositories[repository].items())).encode()).hexdigest()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        url = urlsplit(handler.path)
        first_byte = int((re.match(r"bytes=(\d+)", handler.headers.get("Range", "")) or [0, 0])[1])
        request = Request(len(self.requests), handler.command, unquote(url.path), first_byte)
        self.requests.append(request)
        fault = self.fault(request)
        if fault == "close":
            handler.close_connection = True
        elif isinstance(fault, int):
            self._send(handler, fault, b'{"error": "a fault"}', {})
        else:
            status, content, headers = self._look_up(request, parse_qs(url.query), body)
            self._send(handler, status, content, headers, cut=fault == "cut")

    def _send(self, handler: Any, status: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
        whole = len(content)
        match = re.match(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        if match and status == 200:
            first, last = int(match[1]), min(int(match[2] or whole - 1), whole - 1)
            if first > last:
                status, content = 416, b""
            else:
                status, content = 206, content[first : last + 1]
                headers = {**headers, "Content-Range": f"bytes {first}-{last}/{whole}"}
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Accept-Ranges": "bytes", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content[: len(content) // 2] if cut else content)
        handler.close_connection = handler.close_connection or cut

    def _look_up(self, request: Request, query: dict[str, Any], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """(status, content, headers) of the answer of a hub without faults."""
        missing = (404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"})
        api = re.fullmatch(
            r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", request.path
        )
        if api:
            repository = f"{api[1]}/{api[2]}"
            if repository not in self.repositories:
                return missing
            files, commit = self.repositories[repository], self.commit(repository)
            if api[4] not in (None, "main", commit):
                return 404, b'{"error": "no such revision"}', {"X-Error-Code": "RevisionNotFound"}
            entries = [self._entry(path, content) for path, content in sorted(files.items())]
            if api[3] == "tree":
                answer: Any = self._tree(
                    entries, unquote(api[5]), "recursive" in query and query["recursive"] != ["False"]
                )
                if not answer:
                    return 404, b'{"error": "no such path"}', {"X-Error-Code": "EntryNotFound"}
            elif api[3] == "paths-info":
                wanted = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
                answer = [entry for entry in entries if entry["path"] in wanted]
            else:
                answer = {
                    "id": api[2],
                    "sha": commit,
                    "private": False,
                    "gated": False,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "siblings": [{"rfilename": path} for path in files],
                }
            return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path)
        if not file:
            return missing
        repository = f"{'datasets' if file[1] else 'models'}/{file[2]}"
        if repository not in self.repositories:
            return missing
        content = self.repositories[repository].get(file[4])
        if content is None:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit(repository)}
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.commit(repository)}
        return 200, content, headers

    @staticmethod
    def _tree(entries: list[dict[str, Any]], folder: str, is_recursive: bool) -> list[dict[str, Any]]:
        """The files below a folder, and the folders in it."""
        below = f"{folder}/" if folder else ""
        inside = [entry for entry in entries if entry["path"].startswith(below)]
        folders = {below + entry["path"][len(below) :].split("/")[0] for entry in inside} - {e["path"] for e in inside}
        files = [entry for entry in inside if is_recursive or "/" not in entry["path"][len(below) :]]
        return [*({"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)), *files]

    @staticmethod
    def _entry(path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
