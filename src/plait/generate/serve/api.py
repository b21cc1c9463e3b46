"""Requests and responses of OpenAI's API. A key of a request that is not supported is an error, and never ignored."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from plait.config import lone_surrogate
from plait.errors import ContextError, DataError, GenerateError
from plait.generate.conversation import Conversation, ToolCall, ToolReader, Turn
from plait.generate.options import Sampling
from plait.generate.serve.scheduler import AnswerUpdate, Event, ServeRequest, TokenLogprobs

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "echo": (False,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "min_p": (0,),
    "suffix": ("",),
}
"""Keys that are not supported but that clients send, each with the values that are accepted: those without effect."""
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "annotations": ([],), "refusal": ("",)}
"""The same for the keys of messages: clients send a message of a response back, with all its keys."""
_UNSUPPORTED = {
    "response_format": "answers are not constrained to JSON here; ask for JSON in the prompt, and leave it out",
    "functions": "an older form of tools; use tools",
    "function_call": "an older form of tool_choice; use tool_choice",
    "presence_penalty": "not supported; write 0 or use repetition_penalty",
    "frequency_penalty": "not supported; write 0 or use repetition_penalty",
    "logit_bias": "not supported; leave it out",
    "echo": "not supported; leave it out",
    "best_of": "not supported; use n",
    "min_p": "not supported; use top_p or top_k",
}
"""Keys of the API that are not supported, and the advice in the error message."""
MOST_ANSWERS = 16
MOST_ALTERNATIVES = 20


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, error_type: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": None, "code": status}}


def invalid(message: str, error_type: str = "invalid_request_error") -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, error_type, message)


def read_json(body: bytes) -> Any:
    """Return a parsed JSON body; raise an `ApiError` if it is invalid, or has duplicate keys, NaN or infinities."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
        return unique

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not allowed in JSON")

    try:
        return json.loads(body, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error


def _without_neutral(data: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    if not isinstance(data, dict):
        return data
    given = {key: value for key, value in data.items() if value is not None}  # in OpenAI's API null means "not given"
    return {key: value for key, value in given.items() if not any(_same(value, n) for n in neutral.get(key, ()))}


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal; other than in Python, True does not equal 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _StreamOptions(_Strict):
    include_usage: bool = False


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class _Request(_Strict, ABC):
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    stop: Annotated[list[_StopText], Field(max_length=16), BeforeValidator(_listed)] = []
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return _without_neutral(data, _NEUTRAL)

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """The number of most likely tokens to report with each token; None: no log-probabilities at all."""

    @abstractmethod
    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt of this request, encoded."""

    def sampling(self, most: int) -> Sampling:
        """Return the sampling settings, with at most `most` new tokens; the default seed is the current time."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise invalid("max_tokens and max_completion_tokens are the same: give one of them")
        max_tokens = self.max_tokens or self.max_completion_tokens or most
        if max_tokens > most:
            key = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
            raise invalid(f"{key}={max_tokens} is more than this server's limit of {most}")
        seed = time.time_ns() if self.seed is None else self.seed
        try:
            return Sampling(
                max_tokens, self.temperature, self.top_k, self.top_p, self.repetition_penalty, tuple(self.stop), seed
            )
        except GenerateError as error:
            raise invalid(str(error)) from error


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _ToolFunction(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: Literal[False] = False
    """Only false is accepted: the arguments of calls are not constrained to their schema."""


class _Tool(_Strict):
    type: Literal["function"]
    function: _ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _drop_none(cls, data: Any) -> Any:
        function = data.get("function") if isinstance(data, dict) else None
        return {**data, "function": _without_neutral(function, {})} if isinstance(function, dict) else data


class _CalledFunction(_Strict):
    name: str
    arguments: str


class _Call(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction

    def as_template_has_it(self) -> dict[str, Any]:
        """Return the call in the form that chat templates expect: its arguments are an object, not a string."""
        try:
            arguments = read_json(self.function.arguments.encode(errors="surrogatepass"))
        except ApiError as error:
            raise invalid(f"tool_calls: the arguments of {self.function.name!r} are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise invalid(f"tool_calls: the arguments of {self.function.name!r} are not an object")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_TextPart], BeforeValidator(_as_parts)] = []
    name: str | None = None
    """The name of the participant; it is not used, because no chat template has a place for it."""
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return _without_neutral(data, _NEUTRAL_IN_MESSAGE)

    @model_validator(mode="after")
    def _check(self) -> _Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role assistant, not to {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the role tool, and is needed there")
        return self

    def turn(self) -> Turn:
        """Return the message as a turn of a conversation."""
        content = "".join(text_part.text for text_part in self.content)
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name of the role
        if self.tool_calls:
            return Turn(role, content, {"tool_calls": [call.as_template_has_it() for call in self.tool_calls]})
        return Turn(role, content, None if self.tool_call_id is None else {"tool_call_id": self.tool_call_id})


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: Annotated[list[_Tool], Field(max_length=128)] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    @property
    def alternatives(self) -> int | None:
        """The number of most likely tokens to report with each token, from `logprobs` and `top_logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_call(self) -> bool:
        """Whether the model may call tools in its answer."""
        return bool(self.tools) and self.tool_choice != "none"

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt of this request, encoded."""
        if self.tool_choice not in ("auto", "none"):
            raise invalid("tool_choice: calls cannot be forced, since decoding is not constrained; write auto or none")
        if self.may_call and not self.parallel_tool_calls:
            raise invalid("parallel_tool_calls: the number of calls cannot be constrained; leave it out")
        if self.may_call and self.logprobs:
            raise invalid("logprobs are not supported together with tools; leave out one of them")
        tools = [tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in self.tools]
        turns = [message.turn() for message in self.messages]
        as_json = json.dumps([tools, [turn.more for turn in turns]], ensure_ascii=False)
        if wrong := lone_surrogate(as_json):
            raise invalid(f"tools: {wrong}; leave it out")
        encoded = conversation.encode_conversation(turns, tools if self.may_call else ())
        if encoded.left_out:
            raise ContextError(
                f"messages: the conversation is longer than the model's context of {conversation.generator.context} "
                f"tokens; leave out the first {encoded.left_out} messages that are not the system's"
            )
        return encoded.tokens


class TextRequest(_Request):
    """`POST /v1/completions`."""

    prompt_text: Annotated[str, Field(alias="prompt")]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None

    @property
    def alternatives(self) -> int | None:
        """The number of most likely tokens to report with each token, from `logprobs`."""
        return self.logprobs

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt of this request, encoded."""
        return conversation.encode(self.prompt_text)


Request = ChatRequest | TextRequest


def read_request(request_type: type[Request], data: Any, most_messages: int) -> Request:
    """Return a validated request; raise an `ApiError` that names every invalid key."""
    messages = data.get("messages") if isinstance(data, dict) else None
    if isinstance(messages, list) and len(messages) > most_messages:
        raise invalid(f"messages: {len(messages)} are more than the limit of {most_messages}; leave out the oldest")
    try:
        return request_type.model_validate(data)
    except ValidationError as error:
        raise invalid("; ".join(dict.fromkeys(_describe(problem) for problem in error.errors()[:16]))) from error


def _describe(problem: Any) -> str:
    path = ".".join(map(str, problem["loc"])) or "body"
    remedy = _UNSUPPORTED.get(str(problem["loc"][-1])) if problem["loc"] else None
    if problem["type"] == "extra_forbidden" and remedy:
        return f"{path}: {remedy}"
    return f"{path}: {problem['msg']}"


@dataclass(frozen=True)
class Reply:
    """The response to one request, in the format of the API."""

    request: Request
    job: ServeRequest
    head: dict[str, Any]
    readers: Sequence[ToolReader]
    """One per answer, if tools may be called; else empty."""

    @property
    def _chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(self, pieces: Iterable[AnswerUpdate], completion_tokens: int) -> dict[str, Any]:
        """Return the response if it is not streamed. `pieces` has one update per answer."""
        choices = []
        for piece in sorted(pieces, key=lambda piece: piece.number):
            content_fields, reason = self._message(piece) if self._chat else ({"text": piece.text}, piece.finish_reason)
            logprobs = self._logprobs(piece.tokens)
            choices.append({"index": piece.number, **content_fields, "logprobs": logprobs, "finish_reason": reason})
        object_type = "chat.completion" if self._chat else "text_completion"
        return {**self.head, "object": object_type, "choices": choices, "usage": self._usage(completion_tokens)}

    def opening(self) -> list[dict[str, Any]]:
        """Return the first events of a stream."""
        if not self._chat:
            return []
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(index, role, None, None) for index in range(self.request.n)]

    def events(self, piece: AnswerUpdate) -> list[dict[str, Any]]:
        """Return the events for a piece of an answer: its new text and tool calls and, if it ends, the reason."""
        events, text, calls = [], piece.text, list[ToolCall]()
        if self.readers:
            text = self.readers[piece.number].push(text)
            if piece.finish_reason is not None:
                rest, calls = self.readers[piece.number].finish()
                text += rest
        if text or piece.tokens:
            content_fields: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
            events.append(self._event(piece.number, content_fields, None, self._logprobs(piece.tokens)))
        if calls:
            deltas = [{"index": index, **token} for index, token in enumerate(_calls(calls))]
            events.append(self._event(piece.number, {"delta": {"tool_calls": deltas}}, None, None))
        if piece.finish_reason is not None:
            content_fields = {"delta": {}} if self._chat else {"text": ""}
            reason = "tool_calls" if calls else piece.finish_reason
            events.append(self._event(piece.number, content_fields, reason, None))
        return events

    def closing(self, completion_tokens: int) -> list[dict[str, Any]]:
        """Return the last events of a stream: the token counts, if the request asks for them."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self.head, "object": self._object_type, "choices": [], "usage": self._usage(completion_tokens)}]

    @property
    def _object_type(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _event(self, index: int, content_fields: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
        choice = {"index": index, **content_fields, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head, "object": self._object_type, "choices": [choice]}

    def _message(self, piece: AnswerUpdate) -> tuple[dict[str, Any], str | None]:
        text, calls = piece.text, list[ToolCall]()
        if self.readers:
            text = self.readers[piece.number].push(text)
            rest, calls = self.readers[piece.number].finish()
            text += rest
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if not calls:
            return {"message": message}, piece.finish_reason
        return {"message": {**message, "content": text or None, "tool_calls": _calls(calls)}}, "tool_calls"

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.job.logprobs:
            return None
        if self._chat:
            content = [{**_likely(token), "top_logprobs": [_likely(other) for other in token.top]} for token in tokens]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _usage(self, new: int) -> dict[str, int]:
        prompt_tokens = len(self.job.rows[0].prompt)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]


def _likely(token: Any) -> dict[str, Any]:
    # A token may be part of a character; then its bytes cannot be computed from its text.
    encoded = None if "\ufffd" in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": encoded}


def prepare(
    request: Request,
    conversation: Conversation,
    *,
    most: int,
    most_rows: int,
    since: float,
    deliver: Callable[[Event], None],
) -> Reply:
    """Encode a request as rows of a batch, and return the object that makes its response.

    `since` is when the request was queued, `deliver` receives its events, `most` and `most_rows` are the server's
    limits of new tokens and of rows in a batch. Raise an `ApiError` if the request is invalid. Encoding a long prompt
    takes a while, so call this in a thread.
    """
    if request.model not in (None, conversation.name):
        raise ApiError(404, "model_not_found", f"unknown model {request.model!r} here, only {conversation.name!r}")
    if request.n > most_rows:
        raise invalid(f"n={request.n} is more than the {most_rows} answers that this server generates at once")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream: true; leave it out, or write stream: true")
    sampling, alternatives = request.sampling(most), request.alternatives
    try:
        prompt = request.prompt(conversation)
        context = conversation.generator.context
        if context is not None and len(prompt) >= context:
            raise ContextError(f"the prompt has {len(prompt)} tokens, and the context is {context}")
        rows = [conversation.row(prompt, sampling, key=key, top=alternatives or 0) for key in range(request.n)]
    except ContextError as error:
        raise invalid(str(error), "context_length_exceeded") from error
    except (GenerateError, DataError) as error:
        raise invalid(str(error)) from error
    job = ServeRequest(
        rows=rows,
        texts=[conversation.text_of(sampling) for _ in rows],
        deliver=deliver,
        stream=request.stream,
        logprobs=alternatives is not None,
        since=since,
    )
    prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": conversation.name}
    may_call = isinstance(request, ChatRequest) and request.may_call
    return Reply(request, job, head, [ToolReader() for _ in rows] if may_call else [])
