"""A server of objects for the shared tier, which can be slow, refuse, and cut its answers."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """GET, HEAD and PUT of objects in a dictionary; `conditional` as Apache and S3, else as Bazel's servers."""

    daemon_threads = True

    def __init__(self, *, conditional: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.conditional = conditional
        self.status: int | None = None  #: answered to everything
        self.delay = 0.0
        self.truncate = False
        self.guard = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/ac"

    def handle_error(self, *_: object) -> None:
        """A client that has gone is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _begin(self) -> bool:
        self.server.asked.append((self.command, self.path))
        self.server.headers.append(dict(self.headers))
        time.sleep(self.server.delay)
        if self.server.status is not None:
            self._answer(self.server.status)
        return self.server.status is None

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.server.truncate else body)

    def do_GET(self) -> None:
        if self._begin():
            body = self.server.objects.get(self.path)
            self._answer(404 if body is None else 200, body or b"")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._begin():
            return
        with self.server.guard:
            exists = self.path in self.server.objects
            if self.server.conditional and exists and self.headers["If-None-Match"] == "*":
                self._answer(412)
                return
            self.server.objects[self.path] = data
        self._answer(201)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""
