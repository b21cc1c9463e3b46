"""A model behind real HTTP: OpenAI's words, and what is refused."""

from __future__ import annotations

import fcntl
import http.client
import json
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.generate.browser import Browser

from plait.errors import GenerateError
from plait.generate.options import Sampling
from plait.generate.serve import Limits, Server
from plait.generate.serve.server import _has_news
from plait.generate.speaker import Speaker, Turn

TOKEN = "let-me-in"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USUAL = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
HEADS = "".join(f"{name}: {value}\r\n" for name, value in USUAL.items())
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}


@contextmanager
def serving(speaker: Speaker, **limits: Any) -> Iterator[Server]:
    server = Server(
        speaker, port=0, token=TOKEN, limits=Limits(**{"max_new_tokens": 64, **limits}), log=lambda _line: None
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)  # type: ignore[arg-type]
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {**USUAL, **(headers or {})})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_answers_are_openais_whole_and_as_a_stream(speaker: Speaker) -> None:
    with serving(speaker) as server:
        status, _, body = ask(server, "POST", CHAT, HELLO)
        whole = json.loads(body)
        assert (status, whole["object"], whole["model"]) == (200, "chat.completion", "tiny")
        (choice,) = whole["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        prompt = len(speaker.ask([Turn("user", "hello")]).tokens)
        assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}

        streamed = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
        _, headers, body = ask(server, "POST", CHAT, streamed)
        assert headers["Content-Type"] == "text/event-stream"
        *events, usage = events_of(body)
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(pieces) == choice["message"]["content"]
        assert len(pieces) > 3
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"] == whole["usage"]

        text = {"prompt": "the quick", "max_tokens": 6, "temperature": 0, "n": 2}
        both = json.loads(ask(server, "POST", TEXT, text)[2])["choices"]
        assert both[0]["text"] == both[1]["text"]
        del text["n"]
        pieces = [e["choices"][0]["text"] for e in events_of(ask(server, "POST", TEXT, {**text, "stream": True})[2])]
        assert "".join(pieces) == both[0]["text"]

        assert json.loads(ask(server, "GET", "/v1/models")[2])["data"][0]["id"] == "tiny"
        assert json.loads(ask(server, "GET", "/v1/models/tiny")[2])["id"] == "tiny"
        assert ask(server, "GET", "/v1/models/other")[0] == 404
        assert ask(server, "GET", "/health", headers={"Authorization": ""})[::2] == (200, b'{"status": "ok"}')


def test_a_stop_text_ends_an_answer_and_is_not_in_it(speaker: Speaker) -> None:
    with serving(speaker) as server:
        free = json.loads(ask(server, "POST", TEXT, {"prompt": "the", "max_tokens": 20, "seed": 3})[2])
        text = free["choices"][0]["text"]
        stop = text[len(text) // 2 :][:2]
        wanted = {"prompt": "the", "max_tokens": 20, "seed": 3, "stop": stop}
        (cut,) = json.loads(ask(server, "POST", TEXT, wanted)[2])["choices"]
        assert (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
        events = events_of(ask(server, "POST", TEXT, {**wanted, "stream": True})[2])
        assert "".join(event["choices"][0]["text"] for event in events) == cut["text"]


WRONG: list[tuple[str, Any, dict[str, str], int, str]] = [
    (CHAT, HELLO, {"Authorization": "Bearer wrong"}, 401, "Bearer TOKEN"),
    (CHAT, HELLO, {"Authorization": ""}, 401, "Bearer TOKEN"),
    (CHAT, HELLO, {"Content-Type": "text/plain"}, 415, "application/json"),
    ("/v1/embeddings", HELLO, {}, 404, "/v1/embeddings"),
    (CHAT, b"{not json", {}, 400, "not JSON"),
    (CHAT, b"[" * 100_000, {}, 413, "100000 bytes"),
    (CHAT, b"[" * 9_000, {}, 400, "not JSON"),
    (CHAT, {}, {}, 400, "messages"),
    (CHAT, {"messages": []}, {}, 400, "messages"),
    (CHAT, [1], {}, 400, "body"),
    (CHAT, {**HELLO, "tempature": 1}, {}, 400, "tempature"),
    (CHAT, {**HELLO, "temperature": -1}, {}, 400, "temperature"),
    (CHAT, {**HELLO, "tools": [{"type": "function"}]}, {}, 400, "tools"),
    (CHAT, {**HELLO, "max_tokens": 65}, {}, 400, "max_tokens=65"),
    (CHAT, {**HELLO, "model": "gpt-4"}, {}, 404, "tiny"),
    (CHAT, {**HELLO, "stream": True, "n": 2}, {}, 400, "stream"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, {}, 400, "role"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, {}, 400, "sees 256"),
    (TEXT, {"prompt": "word " * 600}, {}, 400, "sees 256"),
    (TEXT, {"prompt": "x", "stop": [""]}, {}, 400, "stop"),
    (TEXT, {"prompt": "\ud83d"}, {}, 400, "half of a character"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, {}, 400, "half of a character"),
    (CHAT, {**HELLO, "stream": True, "stream_options": {"usage": True}}, {}, 400, "stream_options.usage"),
    (CHAT, {**HELLO, "stream_options": {"include_usage": True}}, {}, 400, "stream: true"),
    (CHAT, b"[" * 8_000_000, {"Authorization": "Bearer wrong"}, 401, "Bearer TOKEN"),
]


def test_what_is_wrong_is_named_in_json_and_the_server_goes_on(speaker: Speaker) -> None:
    with serving(speaker, body_bytes=50_000) as server:
        for path, body, headers, status, said in WRONG:
            found, sent, answer = ask(server, "POST", path, body, headers)
            assert found == status, (path, body if len(str(body)) < 200 else "…", answer)
            assert said in json.loads(answer)["error"]["message"]
            assert sent["Content-Type"] == "application/json"
        with socket.create_connection(server.server_address[:2]) as plain:  # type: ignore[arg-type]
            plain.sendall(f"POST {CHAT} HTTP/1.1\r\n{HEADS}\r\n".encode())
            assert b" 411 " in plain.recv(100)
        neutral = {"presence_penalty": 0, "logprobs": False, "tools": [], "max_completion_tokens": 3, "user": "me"}
        neutral |= dict.fromkeys(("temperature", "n", "stream", "stop", "seed", "stream_options", "tool_choice"))
        neutral |= {"metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "min_p": 0}
        assert ask(server, "POST", CHAT, {"messages": HELLO["messages"], **neutral})[0] == 200
        told = [{"role": role, "content": "be short"} for role in ("system", "developer")]
        asked = {"max_tokens": 3, "temperature": 0}
        both = [ask(server, "POST", CHAT, {**asked, "messages": [each, *HELLO["messages"]]}) for each in told]
        assert both[0][0] == both[1][0] == 200
        assert json.loads(both[0][2])["choices"] == json.loads(both[1][2])["choices"]


def test_what_is_no_request_of_ours_is_answered_in_json_too(speaker: Speaker) -> None:
    with serving(speaker) as server:
        status, sent, body = ask(server, "DELETE", "/v1/models")
        assert (status, sent["Content-Type"]) == (501, "application/json")
        assert "DELETE" in json.loads(body)["error"]["message"]
        assert ask(server, "HEAD", "/")[2] == b""
        with socket.create_connection(server.server_address[:2]) as plain:  # type: ignore[arg-type]
            plain.sendall(b"nobody knows HTTP/x\r\n\r\n")
            assert b'"type": "invalid_request_error"' in plain.makefile("rb").read()
        assert ask(server, "GET", "/health")[0] == 200


def test_what_goes_wrong_in_the_model_is_answered_too(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of something")

    with serving(speaker) as server:
        monkeypatch.setattr(type(speaker.generator), "generate", broken)
        monkeypatch.setattr(type(speaker.generator), "stream", broken)
        status, _, body = ask(server, "POST", CHAT, HELLO)
        assert (status, json.loads(body)["error"]["message"]) == (500, "RuntimeError: out of something")
        *_, last = events_of(ask(server, "POST", CHAT, {**HELLO, "stream": True})[2])
        assert last["error"]["type"] == "server_error"


def test_without_a_token_only_this_machine_may_ask(speaker: Speaker) -> None:
    with serving(speaker) as server:
        server.token = None
        assert ask(server, "GET", "/v1/models", headers={"Authorization": "", "Host": "localhost:1"})[0] == 200
        assert ask(server, "GET", "/v1/models", headers={"Authorization": "", "Host": "elsewhere.example"})[0] == 403


def test_those_who_would_wait_too_long_are_turned_away(speaker: Speaker) -> None:
    with serving(speaker, waiting=2, connections=2) as server:
        with server.line.turn(lambda: None):  # somebody's answer takes long
            found: list[Any] = []
            first = threading.Thread(target=lambda: found.append(ask(server, "POST", CHAT, HELLO)))
            first.start()
            while len(server.line) < 2:
                time.sleep(0.01)
            status, headers, body = ask(server, "POST", CHAT, HELLO)
            assert (status, headers["Retry-After"]) == (429, "1")
            assert "waiting already" in json.loads(body)["error"]["message"]
            with socket.create_connection(server.server_address[:2]) as one:  # type: ignore[arg-type]
                one.sendall(b"GET ")
                answers = [ask(server, "GET", "/health") for _ in range(20)]
                refused = next(body for status, _, body in answers if status == 503)
                assert json.loads(refused)["error"]["code"] == 503
        first.join()
        assert found[0][0] == 200


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\n{HEADS}Content-Length: {len(data)}\r\n\r\n".encode() + data


def test_a_client_that_leaves_in_the_middle_leaves_the_model_to_the_next(speaker: Speaker) -> None:
    with serving(speaker) as server:
        expected = json.loads(ask(server, "POST", CHAT, HELLO)[2])["choices"]
        with socket.create_connection(server.server_address[:2]) as leaving:  # type: ignore[arg-type]
            leaving.sendall(request_of({**HELLO, "max_tokens": 64, "stream": True}))
            leaving.recv(200)
        assert json.loads(ask(server, "POST", CHAT, HELLO)[2])["choices"] == expected


def until(said: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not said():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_leaves_before_its_whole_answer_is_answered_no_further(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = speaker.generator._decoder
    steps, may_go_on, step = [0], threading.Event(), type(decoder).draw

    def slow(*args: Any) -> Any:
        steps[0] += 1
        may_go_on.wait()
        return step(*args)

    monkeypatch.setattr(type(decoder), "draw", slow)
    with serving(speaker) as server:
        address: Any = server.server_address[:2]
        with socket.create_connection(address) as leaving, socket.create_connection(address) as waiting:
            leaving.sendall(request_of({**HELLO, "max_tokens": 64}))
            until(lambda: steps[0] == 1)
            waiting.sendall(request_of(HELLO))
            until(lambda: len(server.line) == 2)
            waiting.close()
            until(lambda: len(server.line) == 1)  # nor does one who waits in line keep a place there
        may_go_on.set()
        until(lambda: len(server.line) == 0)
        assert steps[0] < 4
        assert ask(server, "POST", CHAT, HELLO)[0] == 200


def test_a_client_is_looked_at_where_very_many_files_are_open() -> None:
    """`select` takes no file number above 1023."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("no file can have such a number here")
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1100)) as late:
        assert late.fileno() >= 1100
        assert not _has_news(late)
        theirs.close()
        assert _has_news(late)


def test_a_long_conversation_loses_its_beginning_and_keeps_what_the_system_said(speaker: Speaker) -> None:
    turns = [Turn("system", "be brief")]
    for number in range(40):
        turns += [Turn("user", f"question {number}"), Turn("assistant", "the quick brown fox")]
    asked = speaker.ask([*turns, Turn("user", "the last one")])
    text = speaker.tokenizer.decode(asked.tokens)
    assert asked.left_out > 40
    assert text.startswith("system: be brief")
    assert "the last one" in text
    assert "question 0" not in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_the_page_talks_in_a_real_browser(speaker: Speaker, tmp_path: Path) -> None:
    texts = "[...document.querySelectorAll('.turn')].map((box) => [box.className, box.textContent])"
    idle = "document.getElementById('send').textContent === 'Send'"
    browser = Browser(tmp_path)
    try:
        with serving(speaker) as server:
            browser.open(f"{server.url}/#token={TOKEN}")
            browser.wait("document.title === 'tiny'")
            assert TOKEN not in browser.value("location.href"), "the token stays in the address"
            for number, said in enumerate(("hello <b>you</b>", "and again"), 1):
                browser.value("document.getElementById('text').focus()")
                browser.type(said)
                browser.press_enter()
                browser.wait(f"{idle} && {texts}.length === {2 * number}")
            turns = browser.value(texts)
            assert [kind for kind, _ in turns] == ["turn user", "turn assistant"] * 2
            assert turns[0][1] == "hello <b>you</b>"  # shown as it was said, not as markup
            assert all(len(text) > 20 for kind, text in turns if kind == "turn assistant")
            browser.click("#new")
            assert browser.value(texts) == []

            browser.value("document.getElementById('token').value = 'wrong'")
            browser.value("document.getElementById('text').focus()")
            browser.type("hello")
            browser.press_enter()
            browser.wait(f"{idle} && {texts}.some(([kind]) => kind === 'turn error')")
            assert "token" in browser.value(texts)[-1][1]
    finally:
        browser.close()


def test_a_conversation_that_does_not_fit_is_refused_and_not_cut(speaker: Speaker) -> None:
    said = {"role": "user", "content": "the quick brown fox " * 20}, {"role": "assistant", "content": "yes"}
    talk = [{"role": "system", "content": "be short"}, *said, *said, {"role": "user", "content": "and then?"}]
    with serving(speaker) as server:
        status, _, body = ask(server, "POST", CHAT, {**HELLO, "messages": talk})
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (400, "context_length_exceeded")
        assert "256 tokens" in error["message"]
        assert "leave out the first 2" in error["message"]
        assert ask(server, "POST", CHAT, {**HELLO, "messages": [talk[0], talk[-1]]})[0] == 200
    turns = [Turn(turn["role"], turn["content"]) for turn in talk]
    assert speaker.ask(turns).left_out == 2  # and not 1: what is left begins with what a user said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_without_finite_numbers_says_so(speaker: Speaker, temperature: float) -> None:
    with torch.no_grad():
        speaker.generator.model.head.weight.fill_(float("nan"))  # type: ignore[operator, union-attr]
    prompt, sampling = speaker.encode("hello"), Sampling(4, temperature)
    with pytest.raises(GenerateError, match="not finite"):
        speaker.write([prompt], sampling)
    with pytest.raises(GenerateError, match="not finite"):
        list(speaker.tell(prompt, sampling))
