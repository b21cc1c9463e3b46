"""The HTTP server: uvicorn, with additional timeouts and with error responses in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from plait.generate.conversation import Conversation
from plait.generate.serve.api import ApiError
from plait.generate.serve.app import Application, Limits

BACKLOG = 2048
"""The backlog of the listening socket."""
LINGER_S = 2.0
"""Seconds that a rejected client has to read the response before its connection is closed."""


class Server:
    """Serves one model by HTTP. With `token`, all paths except the web page and `/health` require that token."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        limits: Limits | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Bind to `host` and `port` (0: any free one). Requests are answered only once `run` is called."""
        self.limits = Limits() if limits is None else limits
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.app = Application(conversation, token=token, limits=self.limits, log=log)

        def protocol(**options: Any) -> asyncio.Protocol:
            return _Protocol(self.limits, **options)

        config = uvicorn.Config(
            self.app.asgi,
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level=logging.CRITICAL,  # the application writes its own log
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(self.limits.idle_s),
            timeout_graceful_shutdown=int(self.limits.stop_s) + 5,
        )
        self._uvicorn = _Uvicorn(config, self.app, self.limits)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that it listens on."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """The URL that it listens on."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until `stop`, Ctrl-C or SIGTERM; then wait at most `Limits.stop_s` seconds for answers in progress."""
        self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `run` end. May be called from any thread."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn's server; when it stops, it refuses queued requests, and does not raise the signal again.

    So the command determines the exit status.
    """

    def __init__(self, config: uvicorn.Config, app: Application, limits: Limits) -> None:
        super().__init__(config)
        self._app, self._limits = app, limits

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on Ctrl-C or SIGTERM; after a second signal, do not wait for answers."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for answers in progress, for at most `Limits.stop_s` seconds."""
        self._app.scheduler.stop()
        timer = asyncio.get_running_loop().call_later(self._limits.stop_s, self._app.scheduler.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


class _Protocol(H11Protocol):
    """One connection, with a timeout for the header of a request, and JSON responses to invalid requests."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._rejected = False
        self.app_state = {**self.app_state, "abort": lambda: self.transport.abort()}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the header, or reject the connection if there are too many."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._limits.connections:
            self._reject(ApiError(503, "server_overloaded", "too many connections; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._wait_no_longer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data on to uvicorn, and start the header timeout unless a request is being read or answered."""
        if self._rejected:
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_longer()
        elif self._timer is None:
            self._wait()

    def on_response_complete(self) -> None:
        """Close the connection after a refused request whose body has not been read."""
        super().on_response_complete()
        refused = self.cycle.response_complete and self.cycle.more_body  # else the next request has begun
        if refused and self._timer is None:
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP."""
        if self.cycle is None or self.cycle.response_complete:
            self._reject(ApiError(400, "invalid_request_error", msg))
        else:  # in the middle of a body
            self.transport.close()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_s, self._too_late)

    def _wait_no_longer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self.cycle is None:
            message = f"the header of the request was not received within {self._limits.header_s:g} seconds"
            self._reject(ApiError(408, "request_timeout", message))
        else:
            self.transport.close()

    def _reject(self, error: ApiError) -> None:
        """Send an error, and close once the client has closed, or after `LINGER_S`.

        If the server closed at once, the connection would be reset before the client has read the error.
        """
        self._rejected = True
        body = json.dumps(error.body).encode()
        head = f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait_no_longer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)
