"""Requests and answers of the HTTP endpoint. Nothing in a request is ignored: what is not understood is refused."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plait.errors import ContextError, DataError, GenerateError
from plait.generate.options import Completion, Sampling
from plait.generate.speaker import Piece, Speaker, Turn

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "logit_bias": ({},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "min_p": (0,),
}
"""What clients send though it changes nothing: accepted with a value that asks for nothing."""


class ApiError(Exception):
    """What a client did wrong, or what went wrong for it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "code": status}}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        said = {key: value for key, value in data.items() if value is not None}  # OpenAI's word for "not given"
        kept = {key: value for key, value in said.items() if key not in _NEUTRAL or value not in _NEUTRAL[key]}
        if "max_completion_tokens" in kept and "max_tokens" not in kept:
            kept["max_tokens"] = kept.pop("max_completion_tokens")
        return kept

    def sampling(self, most: int) -> Sampling:
        """How to answer; with no seed, each request gets another text."""
        wanted = most if self.max_tokens is None else self.max_tokens
        if wanted > most:
            raise ApiError(400, "invalid_request_error", f"max_tokens={wanted} is more than this server's {most}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = time.time_ns() if self.seed is None else self.seed
        try:
            return Sampling(
                wanted, self.temperature, self.top_k, self.top_p, self.repetition_penalty, tuple(stop), seed
            )
        except GenerateError as error:
            raise ApiError(400, "invalid_request_error", str(error)) from error


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Text]

    def turn(self) -> Turn:
        """As a turn of a conversation."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Turn("system" if self.role == "developer" else self.role, content)  # OpenAI's newer word for it


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]

    def prompt(self, speaker: Speaker) -> list[int]:
        """What the model is given."""
        asked = speaker.ask([message.turn() for message in self.messages])
        if asked.left_out:
            raise ContextError(
                f"messages: the conversation does not fit into the {speaker.generator.context} tokens that the model "
                f"sees; leave out the first {asked.left_out} of those that are not the system's"
            )
        return asked.tokens


class TextRequest(_Request):
    """`POST /v1/completions`."""

    prompt_text: Annotated[str, Field(alias="prompt")]

    def prompt(self, speaker: Speaker) -> list[int]:
        """What the model is given."""
        return speaker.encode(self.prompt_text)


Request = ChatRequest | TextRequest


def read_request(kind: type[Request], data: Any) -> Request:
    """A request that was checked; an `ApiError` names every key that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        raise ApiError(400, "invalid_request_error", problems) from error


class Reply:
    """The answer to one request, whole or as a stream of events."""

    def __init__(self, request: Request, speaker: Speaker, most: int) -> None:
        if request.model not in (None, speaker.name):
            raise ApiError(404, "model_not_found", f"there is no model {request.model!r} here, only {speaker.name!r}")
        if request.stream and request.n > 1:
            raise ApiError(400, "invalid_request_error", "n: a stream has one answer; leave out n or stream")
        if request.stream_options is not None and not request.stream:
            message = "stream_options: an answer that is no stream has none; leave them out, or write stream: true"
            raise ApiError(400, "invalid_request_error", message)
        self._request, self._speaker = request, speaker
        self._sampling = request.sampling(most)
        try:
            self._prompt = request.prompt(speaker)
        except ContextError as error:
            raise ApiError(400, "context_length_exceeded", str(error)) from error
        except (GenerateError, DataError) as error:
            raise ApiError(400, "invalid_request_error", str(error)) from error
        context = speaker.generator.context
        if context is not None and len(self._prompt) >= context:
            message = f"the prompt has {len(self._prompt)} tokens, and the model sees {context}"
            raise ApiError(400, "context_length_exceeded", message)
        self._chat = isinstance(request, ChatRequest)
        prefix, self._object = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": speaker.name}

    def whole(self, between: Callable[[], object]) -> dict[str, Any]:
        """All of it at once; `between` is called before each token."""
        found = self._speaker.write([self._prompt] * self._request.n, self._sampling, between)
        choices = [
            {"index": index, **self._said(text), "finish_reason": completion.finish_reason}
            for index, (text, completion) in enumerate(found)
        ]
        usage = self._usage([completion for _, completion in found])
        return {**self._head, "object": self._object, "choices": choices, "usage": usage}

    def events(self) -> Generator[dict[str, Any], None, None]:
        """Piece by piece."""
        if self._chat:
            yield self._event({"delta": {"role": "assistant", "content": ""}}, None)
        last: Piece | None = None
        for last in self._speaker.tell(self._prompt, self._sampling):
            if last.text:
                yield self._event({"delta": {"content": last.text}} if self._chat else {"text": last.text}, None)
        assert last is not None, "a stream has at least one piece"
        yield self._event({"delta": {}} if self._chat else {"text": ""}, last.so_far.finish_reason)
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield {**self._head, "object": self._kind(), "choices": [], "usage": self._usage([last.so_far])}

    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else self._object

    def _event(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {**self._head, "object": self._kind(), "choices": [{"index": 0, **said, "finish_reason": reason}]}

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}

    def _usage(self, found: list[Completion]) -> dict[str, int]:
        new = sum(len(completion.tokens) for completion in found)
        asked = len(self._prompt)
        return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}
