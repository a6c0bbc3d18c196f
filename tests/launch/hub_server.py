"""A small server on loopback that speaks the part of the hub's protocol that `datasets` uses."""

import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATA = "data/train-00000-of-00001.parquet"


@dataclass
class Hub:
    """One data set of one file, and the connections that are to be dropped."""

    name: str
    content: bytes
    drops: int = 0
    """How many downloads of the file end half way through what was asked for."""
    down: bool = False
    down_after_drop: bool = False
    ranges: list[str] = field(default_factory=list)
    """`Range` of each download of the file, empty where it was asked from its start."""
    url: str = ""


def parquet(texts: list[str], beside: int = 0) -> bytes:
    """A data set's file, as hubs hold them, with so many bytes of another column in each row."""
    buffer = io.BytesIO()
    columns = {"text": texts, "beside": [bytes([n % 256]) * beside for n in range(len(texts))]}
    pq.write_table(pa.table(columns), buffer, compression="none", use_dictionary=False)
    return buffer.getvalue()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve while the block runs; `hub.url` is the endpoint."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        known = [self._entry()] if DATA in asked else []
        self._json(known)

    def log_message(self, *arguments: object) -> None:
        """Quiet: the client under test says what matters."""

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if self.hub.down:
            self.close_connection = True
        elif path.endswith(f"/resolve/main/{DATA}") or path.endswith(f"/resolve/{COMMIT}/{DATA}"):
            self._file(with_body)
        elif re.fullmatch(rf"/api/datasets/{self.hub.name}(/revision/\w+)?", path):
            self._json({"id": self.hub.name, "sha": COMMIT, "siblings": [{"rfilename": DATA}]})
        elif path.endswith("/data") and "/tree/" in path:
            self._json([self._entry()])
        elif "/tree/" in path:
            folder = {"type": "directory", "oid": COMMIT, "size": 0, "path": "data"}
            self._json(
                [folder, self._entry()] if "recursive=true" in self.path.lower() else [folder]
            )
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)

    def _file(self, with_body: bool) -> None:
        hub, start = self.hub, 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
        body = hub.content[start:]
        headers = {"ETag": f'"{hashlib.sha256(hub.content).hexdigest()}"', "Accept-Ranges": "bytes"}
        headers |= {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(hub.content))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(hub.content) - 1}/{len(hub.content)}"
        if with_body:
            hub.ranges.append(self.headers.get("Range", ""))
        if with_body and hub.drops:
            hub.drops -= 1
            hub.down = hub.down_after_drop
            self._send(206 if start else 200, body, headers, True, upto=len(body) // 2)
            self.close_connection = True
            return
        self._send(206 if start else 200, body, headers, with_body)

    def _entry(self) -> dict[str, object]:
        return {"type": "file", "oid": COMMIT, "size": len(self.hub.content), "path": DATA}

    def _json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, True)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        with_body: bool,
        upto: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:upto])
