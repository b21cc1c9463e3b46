"""The HTTP server: who may ask, how much, and how many at once.

The standard library's server is enough here: the model answers one request at a time, and what a server can do for it
is to keep others waiting in order, and to turn away those that would wait too long.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

from plait.errors import PlaitError
from plait.generate.serve.api import ApiError, ChatRequest, Reply, Request, TextRequest, read_request
from plait.generate.serve.line import Line, LineFullError
from plait.generate.serve.page import PAGE
from plait.generate.speaker import Speaker

HERE = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""What the page may load: itself, and answers of this server."""

DISCARDED = 16 << 20
"""Bytes of a refused request that are read and thrown away, so that its client comes to read why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the server takes on."""

    body_bytes: int = 1 << 20
    """Of one request."""
    waiting: int = 8
    """Requests that are answered or wait for their turn; further ones are refused with 429."""
    connections: int = 64
    """Open at the same time; further ones are refused with 503."""
    max_new_tokens: int = 1024
    """Of one answer."""
    idle_s: float = 30.0
    """A connection that sends nothing for so long is closed."""


class Server(ThreadingHTTPServer):
    """One model behind HTTP. With `token`, everything but the page and `/health` asks for it."""

    daemon_threads = True

    def __init__(
        self,
        speaker: Speaker,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        limits: Limits | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Bind to `host` and `port`; 0 takes any free one. `serve_forever` does the rest."""
        self.speaker, self.token, self.log = speaker, token, log
        self.limits = Limits() if limits is None else limits
        self.line = Line(self.limits.waiting)
        self.started = int(time.time())
        self._connections = threading.BoundedSemaphore(self.limits.connections)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there are not too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):  # gone already
            request.sendall(_too_many())
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; anything else is told in one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            self.log(f"{client_address[0]}: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    _unread = 0
    """Bytes of the request that nobody has looked at yet."""
    _streaming = False
    """Whether an answer has begun whose parts are events."""

    def setup(self) -> None:
        """Let no silent connection hold its place for ever."""
        super().setup()
        self.connection.settimeout(self.server.limits.idle_s)

    def do_GET(self) -> None:
        """The page, health, and the list of models."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """An answer of the model."""
        self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself, an unknown method or a request that is none: told like all else."""
        self._fail(ApiError(int(code), "invalid_request_error", message or HTTPStatus(code).phrase))

    def _answer(self, handle: Callable[[str], None]) -> None:
        path = self.path.split("?", 1)[0].rstrip("/") or "/"
        length = self.headers.get("Content-Length", "")
        self._unread = int(length) if length.isdecimal() and len(length) < 20 else 0
        try:
            handle(path)
        except ApiError as error:
            self._fail(error)
        except PlaitError as error:
            self._fail(ApiError(500, "server_error", str(error)))
        except (ConnectionError, TimeoutError):  # nobody is there to be told
            raise
        except Exception as error:
            self.server.log(f"{self.address_string()}: {type(error).__name__}: {error}")
            self._fail(ApiError(500, "server_error", f"{type(error).__name__}: {error}"))

    def _fail(self, error: ApiError) -> None:
        self.close_connection = True
        if self._streaming:  # too late for a status
            self.wfile.write(f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode())
            return
        self._send(error.status, json.dumps(error.body).encode(), "application/json")
        # A client that is still sending reads no answer before it is done, and would find the connection gone.
        left = min(self._unread, DISCARDED)
        while left > 0 and (piece := self.rfile.read1(min(left, 1 << 16))):
            left -= len(piece)

    def _get(self, path: str) -> None:
        if path == "/":
            self._send(200, PAGE.encode(), "text/html; charset=utf-8")
        elif path == "/health":
            self._send(200, b'{"status": "ok"}', "application/json")
        elif path in ("/v1/models", f"/v1/models/{quote(self.server.speaker.name)}"):
            self._authorize()
            name, whole = self.server.speaker.name, path == "/v1/models"
            model = {"id": name, "object": "model", "created": self.server.started, "owned_by": "plait"}
            found = {"object": "list", "data": [model]} if whole else model
            self._send(200, json.dumps(found).encode(), "application/json")
        else:
            self._refuse_path(path)

    def _post(self, path: str) -> None:
        kinds: dict[str, type[Request]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": TextRequest}
        if path not in kinds:
            self._refuse_path(path)
        self._authorize()
        data = self._read()
        server = self.server
        request = read_request(kinds[path], data)
        reply = Reply(request, server.speaker, server.limits.max_new_tokens)
        try:
            with server.line.turn(self._check_client):
                if request.stream:
                    self._stream(reply)
                else:
                    whole = reply.whole(self._check_client)
        except LineFullError:
            message = f"{server.line.most} requests are waiting already; try again in a moment"
            raise ApiError(429, "rate_limit_exceeded", message) from None
        if not request.stream:
            self._send(200, json.dumps(whole).encode(), "application/json")

    def _check_client(self) -> None:
        """Answer nobody: a connection that its client has ended says so, before anything is written to it."""
        if _has_news(self.connection) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client has left")

    def _authorize(self) -> None:
        token = self.server.token
        if token is None and _name_of(self.headers.get("Host", "")) not in HERE:
            # A page elsewhere whose name was made to lead here could ask in the name of whoever reads it.
            raise ApiError(403, "forbidden", f"without a token, only {', '.join(HERE)} are names of this server")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise ApiError(401, "invalid_api_key", "send the server's token as `Authorization: Bearer TOKEN`")

    def _read(self) -> Any:
        if self.headers.get_content_type() != "application/json":
            # Browsers ask before they send JSON to another site, and here nobody says yes.
            raise ApiError(415, "invalid_request_error", "send the body as Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise ApiError(411, "invalid_request_error", "send the body with a Content-Length")
        if int(length) > self.server.limits.body_bytes:
            message = f"the body has {length} bytes, and {self.server.limits.body_bytes} are taken at most"
            raise ApiError(413, "invalid_request_error", message)
        try:
            self._unread = 0
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "invalid_request_error", f"the body is not JSON: {error}") from error

    def _refuse_path(self, path: str) -> None:
        known = "/, /health, /v1/models, /v1/chat/completions and /v1/completions"
        raise ApiError(404, "not_found", f"there is nothing for {self.command} {path}; there are {known}")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if kind.startswith("text/html"):
            self.send_header("Content-Security-Policy", POLICY)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 429:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self, reply: Reply) -> None:
        """Events as they come. The length is not known, so the connection ends with them."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        self._streaming = True
        # Closed here, not whenever: a client may go away in the middle, and the next one needs the model.
        with closing(reply.events()) as events:
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """One line a request, without what was said in it."""
        self.server.log(f"{self.address_string()} {format % args}")


def _has_news(connection: socket.socket) -> bool:
    """Whether something, or the end, can be read from it without waiting."""
    if not hasattr(select, "poll"):  # Windows, whose `select` knows no limit of this kind
        return bool(select.select([connection], [], [], 0)[0])
    waiting = select.poll()  # not `select`, which takes no file number above 1023
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    return host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]


def _too_many() -> bytes:
    """The answer to a connection for which nothing is done, as there are others enough."""
    body = json.dumps(ApiError(503, "server_overloaded", "too many connections; try again later").body).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
