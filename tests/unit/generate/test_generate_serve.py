"""A model behind real HTTP: OpenAI's words and OpenAI's client, what is refused, and who is let wait how long."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.refusals import missing, refused
from tests.unit.generate.browser import Browser

from plait.errors import GenerateError
from plait.generate.conversation import Conversation, Turn, cut
from plait.generate.options import Sampling
from plait.generate.serve import Limits, Server

TOKEN = "let-me-in"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USUAL = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
HEADS = "".join(f"{name}: {value}\r\n" for name, value in USUAL.items())
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}


@contextmanager
def serving(
    speaker: Conversation, *, log: Callable[[str], None] = lambda _line: None, token: str | None = TOKEN, **limits: Any
) -> Iterator[Server]:
    limited = Limits(**{"max_new_tokens": 64, "stop_s": 5.0, **limits})
    server = Server(speaker, port=0, token=token, limits=limited, log=log)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@contextmanager
def asking(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0, timeout=120) as client:
        yield client


def ask(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection(*server.address, timeout=120)) as connection:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {**USUAL, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, {name.title(): value for name, value in answer.getheaders()}, answer.read()


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def request_of(body: dict[str, Any], path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{HEADS}Content-Length: {len(data)}\r\n\r\n".encode() + data


def until(said: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end
        time.sleep(0.01)


def metric(server: Server, name: str, **labels: str) -> float:
    text = ask(server, "GET", "/metrics")[2].decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


class Gate:
    """Holds every step of the model until it is opened."""

    def __init__(self, speaker: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = type(speaker.generator._decoder)
        self.steps, self._open, step = 0, threading.Event(), decoder.step_sample

        def held(*args: Any) -> Any:
            self.steps += 1
            self._open.wait()
            return step(*args)

        monkeypatch.setattr(decoder, "step_sample", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(speaker: Conversation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(speaker, monkeypatch)
    yield gate
    gate.open()


def test_answers_are_openais_whole_and_as_a_stream(speaker: Conversation) -> None:
    with serving(speaker) as server, asking(server) as client:
        whole = client.chat.completions.create(model="tiny", **HELLO)
        (choice,) = whole.choices
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        prompt = speaker.encode_conversation([Turn("user", "hello")]).tokens
        ((expected, _),) = speaker.write([prompt], Sampling(8, seed=1))
        assert choice.message.content == expected
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 8)

        stream = client.chat.completions.create(
            model="tiny", stream=True, stream_options={"include_usage": True}, **HELLO
        )
        *events, usage = list(stream)
        pieces = [event.choices[0].delta.content or "" for event in events]
        assert "".join(pieces) == expected
        assert len(pieces) > 3
        assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == ["length"]
        assert usage.usage == whole.usage

        text: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "max_tokens": 6, "temperature": 0}
        both = client.completions.create(n=2, **text).choices
        assert [each.index for each in both] == [0, 1]
        assert both[0].text == both[1].text
        assert "".join(each.choices[0].text for each in client.completions.create(stream=True, **text)) == both[0].text

        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        assert ask(server, "GET", "/health", headers={"Authorization": ""})[::2] == (200, b'{"status": "ok"}')


def test_several_answers_come_together_whole_or_as_a_stream(speaker: Conversation) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "n": 3, **HELLO}
    with serving(speaker) as server, asking(server) as client:
        whole = [each.message.content for each in client.chat.completions.create(**wanted).choices]
        assert len(set(whole)) == 3
        found = ["", "", ""]
        for event in client.chat.completions.create(stream=True, **wanted):
            found[event.choices[0].index] += event.choices[0].delta.content or ""
        assert found == whole
        prompt = speaker.encode_conversation([Turn("user", "hello")]).tokens
        assert [text for text, _ in speaker.write([prompt] * 3, Sampling(8, seed=1))] == whole


def test_what_a_client_sends_back_of_an_answer_is_understood(speaker: Conversation) -> None:
    with serving(speaker) as server, asking(server) as client:
        first = client.chat.completions.create(model="tiny", **HELLO).choices[0].message
        parts = [{"type": "text", "text": "and"}, {"type": "text", "text": " then?"}]
        plain = [*HELLO["messages"], {"role": "assistant", "content": first.content}]
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        found = {
            client.chat.completions.create(
                messages=[*HELLO["messages"], answer, {"role": "user", "content": said, "name": "me"}], **asked
            )
            .choices[0]
            .message.content
            for answer in (first, first.model_dump(), plain[-1])
            for said in (parts, "and then?")
        }
        assert len(found) == 1
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.0"):
            client.chat.completions.create(messages=[{"role": "user", "content": [image]}], **asked)  # type: ignore[list-item,misc]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_models_own(speaker: Conversation, stream: bool) -> None:
    with serving(speaker) as server, asking(server) as client:
        wanted: dict[str, Any] = {"model": "tiny", "logprobs": True, "top_logprobs": 3, **HELLO}
        if stream:
            events = list(client.chat.completions.create(stream=True, **wanted))
            tokens = [token for e in events if e.choices[0].logprobs for token in e.choices[0].logprobs.content or []]
        else:
            (choice,) = client.chat.completions.create(**wanted).choices
            assert choice.logprobs is not None
            tokens = choice.logprobs.content or []
        prompt = speaker.encode_conversation([Turn("user", "hello")]).tokens
        ((_, completion),) = speaker.write([prompt], Sampling(8, seed=1))
        assert [token.logprob for token in tokens] == pytest.approx(completion.logprobs, abs=1e-5)
        assert [token.token for token in tokens] == [speaker.tokenizer.decode([each]) for each in completion.tokens]
        for token in tokens:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob >= token.logprob
            assert token.bytes is None or bytes(token.bytes).decode() == token.token
        if not stream:
            old = client.completions.create(model="tiny", prompt="the", max_tokens=6, logprobs=2, seed=3).choices[0]
            assert old.logprobs is not None
            assert old.logprobs.text_offset is not None
            offsets, texts = old.logprobs.text_offset, old.logprobs.tokens or []
            assert len(offsets) == len(texts) == 6
            for offset, before, said in zip(offsets, ["", *texts], texts, strict=False):
                assert "\ufffd" in before + said or old.text[offset:].startswith(said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_and_no_part_of_it_shows(speaker: Conversation, stream: bool) -> None:
    with serving(speaker) as server, asking(server) as client:
        wanted: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 40, "seed": 3}
        free = client.completions.create(logprobs=0, **wanted).choices[0]
        assert free.logprobs is not None
        begins = list(zip(free.logprobs.tokens or [], free.logprobs.text_offset or [], strict=True))
        text = free.text
        for stop in ([text[9:16]], [text[20:23], "never"], text[12:14]):
            if stream:
                events = list(client.completions.create(stream=True, stop=stop, logprobs=0, **wanted))
                found, reason = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
                every = [event.choices[0].logprobs for event in events]
                tokens = [token for each in every if each for token in each.tokens or []]
            else:
                (choice,) = client.completions.create(stop=stop, logprobs=0, **wanted).choices
                found, reason = choice.text, choice.finish_reason
                tokens = choice.logprobs.tokens or [] if choice.logprobs else []
            assert (found, reason) == (cut(text, [stop] if isinstance(stop, str) else stop), "stop")
            assert tokens == [token for token, begin in begins if begin < len(found)]


def test_rows_of_a_batch_are_what_they_are_alone(speaker: Conversation, gate: Gate) -> None:
    """Requests come while others run, each with its own way of choosing."""
    ways: list[dict[str, Any]] = [
        {"temperature": 1, "seed": 5, "max_tokens": 30},
        {"temperature": 0, "max_tokens": 20},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2, "max_tokens": 25},
        {"temperature": 1, "seed": 5, "max_tokens": 10, "stop": ["e"]},
        {"temperature": 1.2, "seed": 8, "max_tokens": 12, "n": 2},
        {"temperature": 1, "seed": 9, "max_tokens": 15, "repetition_penalty": 1.3},
    ]
    bodies = [{"prompt": "the quick " * (1 + index), **way} for index, way in enumerate(ways)]
    with serving(speaker) as server:
        found: dict[int, Any] = {}

        def one(index: int) -> None:
            found[index] = json.loads(ask(server, "POST", TEXT, bodies[index])[2])["choices"]

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(bodies))]
        threads[0].start()
        until(lambda: gate.steps == 1)
        for thread in threads[1:]:
            thread.start()
        until(lambda: server.app.scheduler.waiting == len(bodies) - 1)
        gate.open()
        for thread in threads:
            thread.join()
        assert metric(server, "plait_batch_size_sum") > metric(server, "plait_batch_size_count"), "rows went together"
        together = dict(found)
        for index in range(len(bodies)):
            one(index)
        assert found == together


WRONG: list[tuple[str, Any, dict[str, str], int, str]] = [
    (CHAT, HELLO, {"Authorization": "Bearer wrong"}, 401, "Bearer TOKEN"),
    (CHAT, HELLO, {"Authorization": ""}, 401, "Bearer TOKEN"),
    (CHAT, HELLO, {"Content-Type": "text/plain"}, 415, "application/json"),
    ("/v1/embeddings", HELLO, {}, 404, "/v1/embeddings"),
    (CHAT, b"{not json", {}, 400, "not JSON"),
    (CHAT, b'{"messages": [], "messages": []}', {}, 400, "'messages'"),
    (CHAT, b'{"temperature": NaN}', {}, 400, "NaN"),
    (CHAT, b"[" * 100_000, {}, 413, "100000 bytes"),
    (CHAT, b"[" * 9_000, {}, 400, "not JSON"),
    (CHAT, {}, {}, 400, "messages"),
    (CHAT, {"messages": []}, {}, 400, "messages"),
    (CHAT, [1], {}, 400, "body"),
    (CHAT, {**HELLO, "tempature": 1}, {}, 400, "tempature"),
    (CHAT, {**HELLO, "temperature": -1}, {}, 400, "temperature"),
    (CHAT, {**HELLO, "temperature": True}, {}, 400, "temperature"),
    (CHAT, {**HELLO, "max_tokens": True}, {}, 400, "max_tokens"),
    (CHAT, {**HELLO, "n": True}, {}, 400, "n:"),
    (CHAT, {**HELLO, "seed": False}, {}, 400, "seed"),
    (CHAT, {**HELLO, "stream": 1}, {}, 400, "stream"),
    (CHAT, {**HELLO, "presence_penalty": False}, {}, 400, "presence_penalty"),
    (CHAT, {**HELLO, "logprobs": 1}, {}, 400, "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": True}, {}, 400, "logprobs"),
    (CHAT, {**HELLO, "top_logprobs": 2}, {}, 400, "logprobs: true"),
    (CHAT, {**HELLO, "response_format": {"type": "json_object"}}, {}, 400, "response_format"),
    (CHAT, {**HELLO, "response_format": {"type": "json_schema", "json_schema": {}}}, {}, 400, "response_format"),
    (CHAT, {**HELLO, "max_tokens": 65}, {}, 400, "max_tokens=65"),
    (CHAT, {**HELLO, "max_completion_tokens": 9}, {}, 400, "max_completion_tokens"),
    (CHAT, {**HELLO, "model": "gpt-4"}, {}, 404, "tiny"),
    (CHAT, {**HELLO, "n": 5}, {}, 400, "n=5"),
    (CHAT, {**HELLO, "stop": ["x"] * 17}, {}, 400, "stop"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, {}, 400, "role"),
    (CHAT, {"messages": HELLO["messages"] * 33}, {}, 400, "33"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, {}, 400, "256"),
    (TEXT, {"prompt": "word " * 600}, {}, 400, "256"),
    (TEXT, {"prompt": "x", "stop": [""]}, {}, 400, "stop"),
    (TEXT, {"prompt": "\ud83d"}, {}, 400, "half of a character"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, {}, 400, "half of a character"),
    (CHAT, {**HELLO, "stream": True, "stream_options": {"usage": True}}, {}, 400, "stream_options.usage"),
    (CHAT, {**HELLO, "stream_options": {"include_usage": True}}, {}, 400, "stream: true"),
    (CHAT, b"[" * 8_000_000, {"Authorization": "Bearer wrong"}, 401, "Bearer TOKEN"),
    (CHAT, b"[" * 8_000_000, {}, 413, "8000000 bytes"),
    (CHAT, b"[" * 8_000_000, {"Connection": "close"}, 413, "8000000 bytes"),
]


def test_what_is_wrong_is_named_in_json_and_the_server_goes_on(speaker: Conversation) -> None:
    with serving(speaker, body_bytes=50_000, messages=32, batch_rows=4) as server:
        for path, body, headers, status, said in WRONG:
            found, sent, answer = ask(server, "POST", path, body, headers)
            assert found == status, (path, body if len(str(body)) < 200 else "…", answer)
            assert said in json.loads(answer)["error"]["message"], answer
            assert sent["Content-Type"] == "application/json"
        neutral: dict[str, Any] = {"presence_penalty": 0, "logprobs": False, "tools": [], "user": "me"}
        neutral |= dict.fromkeys(("temperature", "n", "stream", "stop", "seed", "stream_options", "tool_choice"))
        neutral |= {"metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "min_p": 0}
        neutral |= {"max_completion_tokens": 3, "response_format": {"type": "text"}}
        assert ask(server, "POST", CHAT, {"messages": HELLO["messages"], **neutral})[0] == 200
        told = [{"role": role, "content": "be short"} for role in ("system", "developer")]
        asked = {"max_tokens": 3, "temperature": 0}
        both = [ask(server, "POST", CHAT, {**asked, "messages": [each, *HELLO["messages"]]}) for each in told]
        assert both[0][0] == both[1][0] == 200
        assert json.loads(both[0][2])["choices"] == json.loads(both[1][2])["choices"]


def test_a_body_without_a_length_is_bounded_too_while_it_is_sent(speaker: Conversation) -> None:
    with serving(speaker, body_bytes=50_000) as server, socket.create_connection(server.address) as plain:
        plain.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{HEADS}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"4000\r\n" + b"[" * 0x4000 + b"\r\n"
        for _ in range(500):  # far more than is taken, and all of it is sent before anything is read
            plain.sendall(chunk)
        plain.sendall(b"0\r\n\r\n")
        assert plain.recv(12) == b"HTTP/1.1 413"
        text = plain.recv(1 << 16)
        assert b"50000" in text


def test_requests_that_come_before_the_answer_to_the_last_one_are_answered_in_order(speaker: Conversation) -> None:
    with serving(speaker) as server, socket.create_connection(server.address) as plain:
        second = request_of({**HELLO, "max_tokens": 3})
        plain.sendall(request_of(HELLO) + second[:-20])
        found = plain.makefile("rb")
        for tokens in (8, 3):
            head = list(iter(found.readline, b"\r\n"))
            (length,) = [int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length")]
            assert json.loads(found.read(length))["usage"]["completion_tokens"] == tokens
            if tokens == 8:
                time.sleep(3)  # a body that is on its way is not one that nobody wants
                plain.sendall(second[-20:])


def test_what_is_no_request_of_ours_is_answered_in_json_too(speaker: Conversation) -> None:
    with serving(speaker) as server:
        status, sent, body = ask(server, "DELETE", "/v1/models")
        assert (status, sent["Content-Type"]) == (405, "application/json")
        assert "DELETE" in json.loads(body)["error"]["message"]
        assert ask(server, "HEAD", "/")[2] == b""
        with socket.create_connection(server.address) as plain:
            plain.sendall(b"nobody knows HTTP/x\r\n\r\n")
            assert b'"type": "invalid_request_error"' in plain.makefile("rb").read()
        assert ask(server, "GET", "/health")[0] == 200


def test_what_goes_wrong_in_the_model_is_answered_too(speaker: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, lines = type(speaker.generator._decoder), list[str]()
    with serving(speaker, log=lines.append) as server:
        expected = json.loads(ask(server, "POST", CHAT, HELLO)[2])["choices"]

        def broken(*_: Any) -> Any:
            raise RuntimeError("out of something")

        for place in ("begin", "step_sample"):
            with monkeypatch.context() as patch:
                patch.setattr(decoder, place, broken)
                status, _, body = ask(server, "POST", CHAT, HELLO)
                assert (status, json.loads(body)["error"]["message"]) == (500, "RuntimeError: out of something")
                streamed = ask(server, "POST", CHAT, {**HELLO, "stream": True})
                if place == "begin":
                    assert streamed[0] == 500
                else:
                    assert events_of(streamed[2])[-1]["error"]["type"] == "server_error"
            assert json.loads(ask(server, "POST", CHAT, HELLO)[2])["choices"] == expected
    assert any("out of something" in line for line in lines)


def test_without_a_token_only_this_machine_may_ask(speaker: Conversation) -> None:
    with serving(speaker, token=None) as server:
        assert ask(server, "GET", "/v1/models", headers={"Authorization": "", "Host": "localhost:1"})[0] == 200
        assert ask(server, "GET", "/v1/models", headers={"Authorization": "", "Host": "elsewhere.example"})[0] == 403


def test_two_hundred_clients_at_once_are_all_answered(speaker: Conversation) -> None:
    def one(server: Server, found: list[Any]) -> None:
        try:
            found.append(ask(server, "POST", CHAT, {**HELLO, "max_tokens": 2}))
        except OSError as error:
            found.append((repr(error),))

    for waiting, statuses in ((256, {200}), (4, {200, 429})):
        with serving(speaker, waiting=waiting) as server:
            found: list[Any] = []
            threads = [threading.Thread(target=one, args=(server, found)) for _ in range(200)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 200
            assert {status for status, *_ in found} <= statuses
            assert len({body for status, _, body in found if status == 200 for body in [_answer(body)]}) == 1


def _answer(body: bytes) -> str:
    content: str = json.loads(body)["choices"][0]["message"]["content"]
    return content


def test_those_who_would_wait_too_long_are_turned_away(speaker: Conversation, gate: Gate) -> None:
    with serving(speaker, waiting=1, batch_rows=1) as server:
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(ask(server, "POST", CHAT, HELLO))) for _ in range(2)]
        threads[0].start()
        until(lambda: gate.steps == 1)
        threads[1].start()
        until(lambda: server.app.scheduler.waiting == 1)
        status, headers, body = ask(server, "POST", CHAT, HELLO)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "1 request" in json.loads(body)["error"]["message"]
        assert metric(server, "plait_requests_waiting") == 1
        gate.open()
        for thread in threads:
            thread.join()
        assert [status for status, *_ in found] == [200, 200]


def test_connections_beyond_the_limit_are_told_so(speaker: Conversation) -> None:
    with serving(speaker, connections=2) as server, ExitStack() as open_ones:
        for _ in range(2):
            open_ones.enter_context(socket.create_connection(server.address)).sendall(b"GET ")
        for _ in range(5):
            status, _, body = ask(server, "GET", "/health")
            assert (status, json.loads(body)["error"]["code"]) == (503, 503)
        open_ones.close()
        until(lambda: ask(server, "GET", "/health")[0] == 200)


def test_slow_clients_neither_block_the_others_nor_stay(speaker: Conversation) -> None:
    """64 send half a header and 16 half a body, a byte at a time and without a token; nobody else notices."""
    with serving(speaker, header_s=1.0, body_s=1.0) as server, ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.address)) for _ in range(80)]
        for number, each in enumerate(slow):
            each.sendall(b"POST /v1/ch" if number < 64 else request_of(HELLO)[:-5])
        began = time.monotonic()
        assert ask(server, "POST", CHAT, HELLO)[0] == 200
        done = [False]

        def trickle() -> None:
            while not done[0]:
                for each in slow[:32]:
                    with suppress(OSError):
                        each.sendall(b"a")
                time.sleep(0.2)

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            for each in slow[32:]:
                each.settimeout(30)
                assert each.recv(12) == b"HTTP/1.1 408"
            until(lambda: metric(server, "plait_requests_total", status="408") == 16)
            until(lambda: len(server._uvicorn.server_state.connections) <= 2, 20)
        finally:
            done[0] = True
            thread.join()
        assert time.monotonic() - began < 45


def test_a_request_has_a_time_waiting_included(speaker: Conversation, gate: Gate) -> None:
    with serving(speaker, request_s=0.5, batch_rows=1) as server:
        found: list[Any] = []
        bodies = [{**HELLO, "stream": True}, HELLO]
        threads = [threading.Thread(target=lambda b=b: found.append(ask(server, "POST", CHAT, b))) for b in bodies]  # type: ignore[misc]
        threads[0].start()
        until(lambda: gate.steps == 1)
        threads[1].start()
        for thread in threads:
            thread.join()
        (streamed, waited) = sorted(found, key=lambda each: int(each[0]))
        assert events_of(streamed[2])[-1]["error"]["code"] == 504
        assert (waited[0], json.loads(waited[2])["error"]["code"]) == (504, 504)
        gate.open()
        until(lambda: server.app.scheduler.running == 0)


def test_a_client_that_does_not_read_its_answer_is_cut_off(speaker: Conversation) -> None:
    long = {"prompt": "x", "max_tokens": 200, "logprobs": 20, "stream": True, "n": 16}
    with serving(speaker, request_s=4.0, max_new_tokens=200) as server, socket.socket() as deaf:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those that it accepts have the same
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(server.address)
        deaf.sendall(request_of(long, TEXT))
        until(lambda: server.app.scheduler.running > 0)
        began = time.monotonic()
        until(lambda: len(server._uvicorn.server_state.connections) == 0)
        assert time.monotonic() - began < 20, "that was the time of an idle connection"
        until(lambda: server.app.scheduler.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row_and_its_place_in_line(
    speaker: Conversation, gate: Gate, stream: bool
) -> None:
    with serving(speaker, batch_rows=1) as server:
        scheduler = server.app.scheduler
        with socket.create_connection(server.address) as leaving, socket.create_connection(server.address) as waiting:
            leaving.sendall(request_of({**HELLO, "max_tokens": 64, "stream": stream}))
            until(lambda: gate.steps == 1)
            waiting.sendall(request_of({**HELLO, "stream": stream}))
            until(lambda: scheduler.waiting == 1)
            waiting.close()
            until(lambda: scheduler.waiting == 0)
        until(lambda: len(server._uvicorn.server_state.tasks) == 0)
        gate.open()
        until(lambda: scheduler.running == 0)
        assert gate.steps < 4
        assert ask(server, "POST", CHAT, HELLO)[0] == 200


def test_twenty_thousand_turns_are_refused_at_once(speaker: Conversation) -> None:
    turns = [{"role": role, "content": "a word"} for _ in range(10_000) for role in ("user", "assistant")]
    body = json.dumps({**HELLO, "messages": [*turns, *HELLO["messages"]]}).encode()
    for most, kind in ((2048, "invalid_request_error"), (30_000, "context_length_exceeded")):
        with serving(speaker, messages=most, body_bytes=2 * len(body)) as server:
            began = time.process_time()  # of all threads, the server's too: a busy machine does not count
            status, _, answer = ask(server, "POST", CHAT, body)
            assert (status, json.loads(answer)["error"]["type"]) == (400, kind)
            assert time.process_time() - began < 6  # 2 on a quiet machine; for each turn anew it were minutes
            assert ask(server, "GET", "/health")[0] == 200


def test_nothing_in_a_request_can_fake_or_steer_the_log(speaker: Conversation) -> None:
    lines: list[str] = []
    with serving(speaker, log=lines.append) as server:
        assert ask(server, "GET", "/%0d%0afake%20line%1b[2J%E2%80%AE?x=%0a")[0] == 404
        with socket.create_connection(server.address) as plain:
            plain.sendall(b"GET /\x1b[31m HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            plain.makefile("rb").read()
        assert ask(server, "GET", "/health")[0] == 200
    assert any(r"/\r\nfake line\x1b[2J\u202e" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_metrics_are_prometheus_and_need_the_token(speaker: Conversation) -> None:
    with serving(speaker) as server:
        assert ask(server, "GET", "/metrics", headers={"Authorization": ""})[0] == 401
        for _ in range(3):
            usage = json.loads(ask(server, "POST", CHAT, HELLO)[2])["usage"]
        ask(server, "POST", CHAT, {})
        ask(server, "GET", "/no-such-path")
        assert metric(server, "plait_requests_total", path=CHAT, status="200") == 3
        assert metric(server, "plait_requests_total", path=CHAT, status="400") == 1
        assert metric(server, "plait_requests_total", path="other", status="404") == 1
        assert metric(server, "plait_prompt_tokens_total") == 3 * usage["prompt_tokens"]
        assert metric(server, "plait_generation_tokens_total") == 3 * usage["completion_tokens"]
        assert metric(server, "plait_time_to_first_token_seconds_count") == 3
        assert metric(server, "plait_request_seconds_count", path=CHAT) == 4
        assert metric(server, "plait_batch_size_count") == 3 * 7
        assert metric(server, "plait_requests_waiting") == metric(server, "plait_batch_rows") == 0


def test_a_server_that_stops_lets_answers_end_and_tells_who_waits(speaker: Conversation, gate: Gate) -> None:
    found: dict[str, Any] = {}
    with serving(speaker, batch_rows=1) as server:

        def one(name: str) -> None:
            found[name] = ask(server, "POST", CHAT, {**HELLO, "stream": True})

        threads = [threading.Thread(target=one, args=(name,)) for name in ("running", "waiting")]
        threads[0].start()
        until(lambda: gate.steps == 1)
        threads[1].start()
        until(lambda: server.app.scheduler.waiting == 1)
        server.stop()
        threads[1].join()
        assert found["waiting"][0] == 503
        gate.open()
        threads[0].join()
    assert events_of(found["running"][2])[-1]["choices"][0]["finish_reason"] == "length"


def test_answers_that_do_not_end_in_time_are_told_when_the_server_stops(speaker: Conversation, gate: Gate) -> None:
    found: list[Any] = []
    with serving(speaker, stop_s=0.5) as server:
        bodies = [{**HELLO, "stream": True}, HELLO]
        threads = [threading.Thread(target=lambda b=b: found.append(ask(server, "POST", CHAT, b))) for b in bodies]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        until(lambda: server.app.scheduler.waiting + server.app.scheduler.running == 2)
        server.stop()
        time.sleep(1.0)
        gate.open()  # the step under way ends; no further one follows
        for thread in threads:
            thread.join()
    assert all(b"stopped" in body for _, _, body in found)


def test_a_long_conversation_loses_its_beginning_and_keeps_what_the_system_said(speaker: Conversation) -> None:
    turns = [Turn("system", "be brief")]
    for number in range(40):
        turns += [Turn("user", f"question {number}"), Turn("assistant", "the quick brown fox")]
    asked = speaker.encode_conversation([*turns, Turn("user", "the last one")])
    text = speaker.tokenizer.decode(asked.tokens)
    assert asked.left_out > 40
    assert text.startswith("system: be brief")
    assert "the last one" in text
    assert "question 0" not in text


@pytest.mark.real("chromium")
def test_the_page_talks_in_a_real_browser(speaker: Conversation, tmp_path: Path) -> None:
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


def test_a_conversation_that_does_not_fit_is_refused_and_not_cut(speaker: Conversation) -> None:
    said = {"role": "user", "content": "the quick brown fox " * 20}, {"role": "assistant", "content": "yes"}
    talk = [{"role": "system", "content": "be short"}, *said, *said, {"role": "user", "content": "and then?"}]
    with serving(speaker) as server:
        status, _, body = ask(server, "POST", CHAT, {**HELLO, "messages": talk})
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (400, "context_length_exceeded")
        assert not missing(error["message"], "256 tokens", " 2")
        assert ask(server, "POST", CHAT, {**HELLO, "messages": [talk[0], talk[-1]]})[0] == 200
    turns = [Turn(turn["role"], turn["content"]) for turn in talk]
    assert speaker.encode_conversation(turns).left_out == 2  # and not 1: what is left begins with what a user said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_without_finite_numbers_says_so(speaker: Conversation, temperature: float) -> None:
    with torch.no_grad():
        speaker.generator.model.head.weight.fill_(float("nan"))  # type: ignore[operator, union-attr]
    prompt, sampling = speaker.encode("hello"), Sampling(4, temperature)
    with refused(GenerateError, "finite", "--dtype"):
        speaker.write([prompt], sampling)
    with refused(GenerateError, "finite", "--dtype"):
        list(speaker.stream(prompt, sampling))
    with serving(speaker) as server:
        status, _, body = ask(server, "POST", CHAT, HELLO)
    assert status == 500
    assert not missing(json.loads(body)["error"]["message"], "finite", "--dtype")
