"""The ASGI application: authorization, limits, timeouts, streaming, and the web page."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.errors import PlaitError
from plait.generate.conversation import Conversation, printable
from plait.generate.serve.api import ApiError, ChatRequest, Reply, TextRequest, prepare, read_json, read_request
from plait.generate.serve.scheduler import (
    AnswerUpdate,
    Event,
    JobDone,
    QueueFullError,
    RequestScheduler,
    ServerMetrics,
    StoppingError,
)

# The web page of `plait serve`: it loads no other files. A link to it may contain the token after a `#`: browsers do
# not send that part to the server.


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plait</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #2f6f4f; }
  * { box-sizing: border-box; }
  body { font: 16px/1.55 system-ui, sans-serif; margin: 0; height: 100dvh; display: flex; flex-direction: column; }
  header, form { padding: .75rem max(1rem, calc(50vw - 24rem)); display: flex; gap: .6rem; align-items: center; }
  header { border-bottom: 1px solid var(--line); }
  header b { margin-right: auto; }
  main { flex: 1; overflow-y: auto; padding: 1rem max(1rem, calc(50vw - 24rem)); }
  form { border-top: 1px solid var(--line); align-items: end; }
  .turn { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .9rem; border-radius: .8rem;
          margin: 0 0 .7rem; width: fit-content; max-width: 100%; border: 1px solid var(--line); }
  .user { background: var(--accent); color: #fff; margin-left: auto; border: 0; }
  .error { border-color: #c33; color: #c33; }
  textarea, input, button { font: inherit; color: inherit; border: 1px solid var(--line); border-radius: .6rem;
          padding: .5rem .75rem; background: var(--soft); }
  textarea { flex: 1; resize: none; }
  input { width: 9rem; } input[type=number] { width: 5rem; }
  button { cursor: pointer; } button[type=submit] { background: var(--accent); color: #fff; border: 0; }
  label { font-size: .85rem; opacity: .8; }
</style>
<header>
  <b id="model">Plait</b>
  <label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.8"></label>
  <input id="token" type="password" placeholder="token" aria-label="token" autocomplete="off">
  <button id="new" type="button">New</button>
</header>
<main id="log" aria-live="polite"></main>
<form id="form">
  <textarea id="text" rows="2" placeholder="Say something" aria-label="message" autofocus></textarea>
  <button type="submit" id="send">Send</button>
</form>
<script>
const $ = (id) => document.getElementById(id);
const hash = new URLSearchParams(location.hash.slice(1));
let turns = [], running = null;
$("token").value = hash.get("token") || sessionStorage.getItem("token") || "";
history.replaceState(null, "", location.pathname);

function show(role, text) {
  const box = document.createElement("div");
  box.className = "turn " + role;
  box.textContent = text;
  $("log").append(box);
  box.scrollIntoView({block: "end"});
  return box;
}
async function problem(answer) {
  try { return (await answer.json()).error.message; } catch { return answer.status + " " + answer.statusText; }
}
function headers() {
  sessionStorage.setItem("token", $("token").value);
  return {"Content-Type": "application/json", "Authorization": "Bearer " + $("token").value};
}
async function ask(text) {
  turns.push({role: "user", content: text});
  show("user", text);
  const box = show("assistant", "");
  let said = "";
  running = new AbortController();
  $("send").textContent = "Stop";
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({messages: turns, temperature: Number($("temperature").value), stream: true}),
    });
    if (!answer.ok) throw new Error(await problem(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        said += event.choices[0]?.delta?.content ?? "";
        box.textContent = said;
        box.scrollIntoView({block: "end"});
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") { show("error", error.message); }
  }
  if (said) turns.push({role: "assistant", content: said}); else { turns.pop(); box.remove(); }
  running = null;
  $("send").textContent = "Send";
}
$("form").onsubmit = (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("text").value.trim();
  if (text) { $("text").value = ""; ask(text); }
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
};
$("new").onclick = () => { if (running) running.abort(); turns = []; $("log").replaceChildren(); $("text").focus(); };
fetch("v1/models", {headers: headers()}).then(async (answer) => {
  if (!answer.ok) return;
  $("model").textContent = document.title = (await answer.json()).data[0].id;
  $("token").hidden = $("token").value === "";  // none was asked for
});
</script>
</html>
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server; docs/chat.md has a table of the status codes."""

    body_bytes: int = 1 << 20
    """The maximum size of a request's body."""
    messages: int = 2048
    """The maximum number of messages in one conversation."""
    batch_rows: int = 16
    """The maximum number of answers that are generated at the same time."""
    waiting: int = 256
    """The maximum number of requests in the queue."""
    connections: int = 512
    """The maximum number of open connections."""
    max_new_tokens: int = 1024
    """The maximum number of tokens in one answer."""
    request_s: float = 600.0
    """Seconds from the header of a request to the end of its answer."""
    header_s: float = 10.0
    """Seconds for the header of a request, and for the rest of a refused request's body."""
    body_s: float = 30.0
    """Seconds for the body of a request."""
    idle_s: float = 30.0
    """Seconds between two requests of one connection."""
    stop_s: float = 20.0
    """Seconds for answers in progress when the server is stopped."""


LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
"""The loopback host names."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The `Content-Security-Policy` of the page: it may run its own scripts, and send requests to this server only."""
DISCARDED = 16 << 20
"""The maximum of bytes of a refused request's body that are read and discarded.

Many clients read the response only after they have sent the whole body.
"""
REQUEST_TYPES: dict[str, type[ChatRequest] | type[TextRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": TextRequest,
}
STOPPING = "the server is being stopped"


class Application:
    """Serves one model by HTTP. With `token`, all paths except the web page and `/health` require that token."""

    def __init__(
        self, conversation: Conversation, *, token: str | None, limits: Limits, log: Callable[[str], None]
    ) -> None:
        self.conversation, self.token, self.limits, self._log = conversation, token, limits, log
        self.started = int(time.time())
        self.metrics = ServerMetrics()
        self.scheduler = RequestScheduler(
            conversation, max_batch=limits.batch_rows, waiting=limits.waiting, metrics=self.metrics, log=self.log
        )
        # One thread: the tokenizers of `transformers` are not thread-safe.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="plait-prepare")
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._models),
            *(Route(path, self._answer, methods=["POST"]) for path in REQUEST_TYPES),
        ]
        self._paths = {route.path for route in routes if "{" not in route.path}
        handlers: dict[Any, Any] = {HTTPException: self._refuse_http, ApiError: self._refuse, Exception: self._fail}
        inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        inner.router.redirect_slashes = False
        self.asgi: ASGIApp = self._watched(inner)

    def log(self, line: str) -> None:
        """Write a line to the log, with control characters escaped."""
        self._log(printable(line))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.scheduler.start()
        yield
        await asyncio.to_thread(self.scheduler.close)
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _watched(self, inner: ASGIApp) -> ASGIApp:
        """Return an application that runs `inner`, and logs and counts every request, without its content."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            scope["state"]["began"] = began = time.monotonic()
            scope["path"] = scope["path"].rstrip("/") or "/"
            status = 499  # nginx's status for a client that disconnected before it was answered

            async def watch(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await inner(scope, receive, watch)
            finally:
                path = scope["path"] if scope["path"] in self._paths else "other"
                self.metrics.requests.labels(path, str(status)).inc()
                self.metrics.latency.labels(path).observe(time.monotonic() - began)
                client = scope["client"][0] if scope["client"] else "?"
                self.log(f'{client} "{scope["method"]} {scope["path"]}" {status}')

        return app

    async def _page(self, _: Request) -> Response:
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def _health(self, _: Request) -> Response:
        return _Json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        self._authorize(request)
        return Response(self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        name, requested = self.conversation.name, request.path_params.get("name")
        if requested not in (None, name):
            raise ApiError(404, "model_not_found", f"unknown model {requested!r} here, only {name!r}")
        model = {"id": name, "object": "model", "created": self.started, "owned_by": "plait"}
        return _Json({"object": "list", "data": [model]} if requested is None else model)

    async def _answer(self, request: Request) -> Response:
        """Queue a request, and return the response that waits for its answers."""
        self._authorize(request)
        deadline = request.state.began + self.limits.request_s
        body = await self._read(request)
        waiting = _Waiting(self, deadline)
        try:
            self.scheduler.reserve()
        except QueueFullError:
            message = f"{self.scheduler.most_waiting} requests are waiting already; try again in a moment"
            raise ApiError(429, "rate_limit_exceeded", message) from None
        except StoppingError:
            raise _stopping() from None
        request_type = REQUEST_TYPES[request.scope["path"]]
        try:
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(self._preparing, self._prepare, request_type, body, waiting.deliver)
        except BaseException:
            self.scheduler.unreserve()
            raise
        waiting.reply = reply
        try:
            self.scheduler.submit(reply.job)
        except StoppingError:
            raise _stopping() from None
        return waiting

    def _prepare(
        self, request_type: type[ChatRequest] | type[TextRequest], body: bytes, deliver: Callable[[Event], None]
    ) -> Reply:
        request = read_request(request_type, read_json(body), self.limits.messages)
        most, rows = self.limits.max_new_tokens, self.limits.batch_rows
        return prepare(request, self.conversation, most=most, most_rows=rows, since=time.monotonic(), deliver=deliver)

    def _authorize(self, request: Request) -> None:
        if self.token is None and _name_of(request.headers.get("Host", "")) not in LOCAL_NAMES:
            # Against DNS rebinding: a foreign web page whose host name resolves to this machine could send requests.
            raise ApiError(403, "forbidden", f"without a token, the host must be one of {', '.join(LOCAL_NAMES)}")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.token is not None and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise ApiError(401, "invalid_api_key", "send the server's token as `Authorization: Bearer TOKEN`")

    async def _read(self, request: Request) -> bytes:
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            # Browsers send JSON to another origin only after a CORS preflight, which is not answered here.
            raise ApiError(415, "invalid_request_error", "send the body as Content-Type: application/json")
        most, length = self.limits.body_bytes, request.headers.get("Content-Length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise ApiError(413, "invalid_request_error", f"the body has {length} bytes, and {most} are taken at most")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        message = f"the body has more than {most} bytes, which are taken at most"
                        raise ApiError(413, "invalid_request_error", message)
        except ClientDisconnect:
            raise ApiError(400, "invalid_request_error", "the client left before its body was complete") from None
        except TimeoutError:
            message = f"the body did not come within {self.limits.body_s:g} seconds"
            raise ApiError(408, "request_timeout", message) from None
        return bytes(body)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _Refusal(error, self.limits.header_s)

    async def _refuse_http(self, request: Request, error: Exception) -> Response:
        """Return the response to an error of Starlette itself: an unknown path or method."""
        assert isinstance(error, HTTPException)
        known = ", ".join(sorted(self._paths))
        message = f"{request.method} {request.url.path} does not exist; there are {known}"
        if error.status_code not in (404, 405):
            message = error.detail or HTTPStatus(error.status_code).phrase
        return _Refusal(ApiError(error.status_code, "not_found", message), self.limits.header_s, error.headers)

    async def _fail(self, request: Request, error: Exception) -> Response:
        """Return the response to an error of the server."""
        self.log(f"{type(error).__name__}: {error}")
        return _Refusal(self.as_api_error(error), self.limits.header_s)

    def as_api_error(self, error: Exception) -> ApiError:
        """Return an error as the one that is sent to the client."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, StoppingError):
            return _stopping()
        if isinstance(error, PlaitError):
            return ApiError(500, "server_error", str(error))
        return ApiError(500, "server_error", f"{type(error).__name__}: {error}")


class _Json(JSONResponse):
    """JSON in ASCII: an error message may quote a lone surrogate, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        """Return the encoded body."""
        return json.dumps(content).encode()


class _Refusal(_Json):
    """An error in JSON. The rest of the request's body is read first, so that the client can read the error."""

    def __init__(self, error: ApiError, read_timeout_s: float, headers: Any = None) -> None:
        all_headers = dict(headers or {})
        if error.status == 401:
            all_headers["WWW-Authenticate"] = "Bearer"
        if error.status == 429:
            all_headers["Retry-After"] = "1"
        super().__init__(error.body, error.status, all_headers)
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        remaining = DISCARDED
        try:
            async with asyncio.timeout(self._read_timeout_s):
                while remaining > 0:
                    message = await receive()
                    remaining -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Waiting(Response):
    """The response to a queued request. Nothing, not even a status, is sent before the first event."""

    reply: Reply

    def __init__(self, app: Application, deadline: float) -> None:
        self._app, self._deadline = app, deadline
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._began = False

    def deliver(self, event: Event) -> None:
        """Pass an event on to the event loop; called in the model's thread."""
        if not self._loop.is_closed():  # as after a second Ctrl-C
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until the answer ends, the time is up, or the client disconnects."""
        answering = asyncio.create_task(self._answer(scope, receive, send))
        disconnecting = asyncio.create_task(_wait_for_disconnect(receive))
        remaining_s = max(self._deadline - time.monotonic(), 0.0)
        try:
            await asyncio.wait({answering, disconnecting}, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished, disconnected = answering.done(), disconnecting.done()
            self._app.scheduler.cancel(self.reply.job)
            for task in (answering, disconnecting):
                task.cancel()
            await asyncio.wait({answering, disconnecting})
        if finished:
            answering.result()
        elif not disconnected:
            message = f"the answer took longer than the {self._app.limits.request_s:g} seconds of a request"
            try:
                async with asyncio.timeout(1):
                    await self._fail(ApiError(504, "timeout", message), scope, receive, send)
            except TimeoutError:  # the client does not read what is sent
                scope["state"]["abort"]()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        updates: list[AnswerUpdate] = []
        stream = self.reply.request.stream
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                await self._fail(self._app.as_api_error(event), scope, receive, send)
                return
            if stream and not self._began:
                await self._begin(send)
            if isinstance(event, JobDone):
                break
            if stream:
                await self._send_events(send, self.reply.events(event))
            else:
                updates.append(event)
        if stream:
            await self._send_events(send, self.reply.closing(event.completion_tokens))
            await self._end(send)
        else:
            await _Json(self.reply.whole(updates, event.completion_tokens))(scope, receive, send)

    async def _begin(self, send: Send) -> None:
        self._began = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_events(send, self.reply.opening())

    async def _send_events(self, send: Send, events: list[dict[str, Any]]) -> None:
        if events:
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._began:  # the status has been sent already
            await self._send_events(send, [error.body])
            await self._end(send)
        else:
            await _Json(error.body, error.status)(scope, receive, send)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _stopping() -> ApiError:
    return ApiError(503, "server_stopping", STOPPING)


def _name_of(host: str) -> str:
    """Return the host name in a Host header, without the port."""
    return host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
