"""The part of a Weights & Biases server that wandb's own client needs to log a run, on loopback."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Received:
    """What a client has sent."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}  # id -> the newest value of each variable of its upserts
        self.history: dict[str, list[dict[str, Any]]] = {}  # id -> rows
        self.files: dict[str, bytes] = {}  # name -> content
        self.artifacts: list[str] = []  # their types
        self.resumed: list[str] = []  # ids that a client asked for before it went on with them


class Handler(BaseHTTPRequestHandler):
    """Answers `/graphql`, the stream of rows and uploads of files; other requests get an empty object."""

    protocol_version = "HTTP/1.1"
    received: Received

    def log_message(self, *args: Any) -> None:
        """Keeps the tests quiet."""

    def _answer(self) -> None:
        with suppress(ConnectionResetError):  # a client may leave without a word
            self._reply()

    def _reply(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        reply: Any = {}
        if self.path == "/graphql":
            reply = {"data": self._graphql(**json.loads(body))}
        elif self.path.endswith("/file_stream"):
            rows = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            history = self.received.history.setdefault(self.path.split("/")[-2], [])
            history.extend(map(json.loads, rows))
        elif self.path.startswith("/upload/"):
            self.received.files[self.path.removeprefix("/upload/")] = body
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer

    def _graphql(self, query: str, variables: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        sent = {name: value for name, value in (variables or {}).items() if value is not None}
        project = {"id": "1", "name": sent.get("project"), "entity": {"id": "2", "name": "me"}}
        if "upsertBucket" in query:
            is_new = sent["name"] not in self.received.runs
            run = self.received.runs.setdefault(sent["name"], {})
            run.update(sent)
            bucket = {"id": "3", "name": sent["name"], "displayName": "a run", "historyLineCount": 0}
            return {
                "upsertBucket": {
                    "bucket": {**bucket, "config": "{}", "sweepName": None, "project": project},
                    "inserted": is_new,
                }
            }
        if "RunResumeStatus" in query:
            self.received.resumed.append(sent["name"])
            run = self.received.runs.get(sent["name"])
            history = self.received.history.get(sent["name"], [])
            bucket = run and {
                "id": "3",
                "name": sent["name"],
                "summaryMetrics": "{}",
                "displayName": "a run",
                "logLineCount": 0,
                "historyLineCount": len(history),
                "eventsLineCount": 0,
                "historyTail": json.dumps([json.dumps(row) for row in history[-1:]]),
                "eventsTail": "[]",
                "config": run.get("config", "{}"),
                "tags": run.get("tags", []),
                "wandbConfig": '{"t": 1}',
            }
            return {"model": {"id": "1", "name": sent.get("project"), "entity": project["entity"], "bucket": bucket}}
        if "createRunFiles" in query:
            host, port = self.server.server_address[:2]
            urls = [{"name": name, "uploadUrl": f"http://{host}:{port}/upload/{name}"} for name in sent["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": urls}}
        if "createArtifact(" in query:  # said to be complete, so that the client has nothing to send
            self.received.artifacts.append(sent["input"]["artifactTypeName"])
            artifact = {"id": "5", "state": "COMMITTED", "artifactSequence": {"id": "6", "latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if "project(" in query:
            return {"project": None}
        return {"viewer": {"id": "4", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}


@contextmanager
def server() -> Iterator[tuple[str, Received]]:
    """Gives the URL of a server and what it has received so far."""
    received = Received()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"received": received}))
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", received
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
