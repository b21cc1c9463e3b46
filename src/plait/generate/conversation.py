"""A model with its tokenizer and chat template; decoding answers token by token; and tool calls."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from plait.config import lone_surrogate
from plait.data import TextTokenizer
from plait.errors import ContextError, GenerateError
from plait.generate.batch import GenerationRow
from plait.generate.generator import Generator
from plait.generate.options import Completion, Sampling

MIN_NEW_TOKENS = 16
"""The number of tokens of the context that are kept free for the answer. If a conversation is so long that fewer
remain, its earliest turns are left out."""
_INCOMPLETE = "\ufffd"
"""The text that tokenizers return for bytes that are not (yet) a complete character."""
_MOST_PENDING = 8
"""The maximum of tokens that are held back until their bytes form a character; a character has at most 4 bytes."""


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str
    """`system`, `user` or `assistant`; `tool` where tools are used."""
    content: str
    more: Mapping[str, Any] | None = None
    """Further keys of the message where tools are used: `tool_calls`, `tool_call_id`."""


class AnswerPiece(NamedTuple):
    """A piece of a streamed answer."""

    text: str
    """The new text."""
    finish_reason: Literal["stop", "length"] | None
    """None except in the last piece."""


class EncodedPrompt(NamedTuple):
    """A conversation encoded as a prompt."""

    tokens: list[int]
    left_out: int
    """The number of earliest turns that were left out."""


@dataclass(frozen=True)
class Conversation:
    """A model that answers conversations: used by `plait chat`, `plait serve` and `plait generate`."""

    name: str
    generator: Generator
    tokenizer: TextTokenizer
    write_down: Callable[[Sequence[Turn]], list[int]]
    """The chat template: returns the prompt's tokens for a conversation."""
    stop: tuple[int | str, ...]
    """Tokens and texts that always end an answer."""
    write_with_tools: Callable[[Sequence[Turn], Sequence[Mapping[str, Any]]], list[int]] | None = None
    """The chat template with tools that the model may call; None if it does not support tools."""
    begin: tuple[int, ...] = ()
    """The tokens (such as BOS) before a text that is not a conversation, if the model was trained with them."""
    template: str = "own"
    """The name of the chat template, to display."""

    def encode(self, text: str) -> list[int]:
        """Return a text encoded as a prompt; for an empty text, the tokens that begin a document."""
        return [*self.begin, *self.tokenizer.encode(text)] or [self.tokenizer.end]

    def encode_conversation(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> EncodedPrompt:
        """Return a conversation encoded as a prompt. If it exceeds the context, its earliest turns are left out.

        The system message is always kept. `tools` are those that the model may call, in the format of OpenAI's API.
        Raise a `ContextError` if the last turn alone is too long, and a `GenerateError` for an invalid conversation.
        """
        write_down = self.write_down
        if tools or any(turn.more for turn in turns):
            if (with_tools := self.write_with_tools) is None:
                raise GenerateError(
                    "tools: the chat template of this model does not write calls as <tool_call>; leave out tools, "
                    "tool_calls and messages of the role tool"
                )

            def write_down(turns: Sequence[Turn]) -> list[int]:
                return with_tools(turns, tools)

        if not turns:
            raise GenerateError("the conversation is empty: say something first")
        if wrong := next(filter(None, (lone_surrogate(turn.content) for turn in turns)), None):
            raise GenerateError(f"{wrong}; leave it out")
        system = [turn for turn in turns[:1] if turn.role == "system"]
        rest, context = list(turns[len(system) :]), self.generator.context

        def prompt_tokens(left_out: int) -> list[int]:
            tokens = write_down([*system, *rest[left_out:]])
            if not tokens:
                raise GenerateError("the model's tokenizer encodes this text to no tokens; write another text")
            return tokens

        def fits(tokens: list[int]) -> bool:
            return context is None or len(tokens) + MIN_NEW_TOKENS <= context

        if fits(tokens := prompt_tokens(0)):
            return EncodedPrompt(tokens, 0)
        # What is kept begins with a user's message, as some templates require. The number of user messages that fit is
        # found by bisection, so that the template need not be applied once per turn.
        questions = [index for index in range(1, len(rest)) if rest[index].role == "user"]
        most, too_many, middle = 0, len(questions) + 1, 1
        while too_many - most > 1:
            shorter = prompt_tokens(questions[-middle])
            if fits(shorter):
                most, tokens = middle, shorter
            else:
                too_many = middle
            middle = min(2 * most, len(questions)) if too_many > len(questions) else (most + too_many) // 2
        if most:
            return EncodedPrompt(tokens, questions[-most])
        left_out = questions[-1] if questions else 0
        tokens = prompt_tokens(left_out)
        if context is not None and len(tokens) < context:
            return EncodedPrompt(tokens, left_out)
        raise ContextError(f"the last turn takes {len(tokens)} tokens, and the context is {context}; shorten it")

    def write(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[tuple[str, Completion]]:
        """Generate an answer to each prompt, and return for each its text without the stop text, and its tokens."""
        sampling = self._with_stops(sampling)
        completions = self.generator.generate(prompts, sampling)
        for completion in completions:
            refuse_no_numbers(completion.logprobs[-1:])
        texts = (cut(self.tokenizer.decode(completion.tokens), sampling.stop_texts) for completion in completions)
        return list(zip(texts, completions, strict=True))

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[AnswerPiece]:
        """Yield the answer to one prompt in pieces. Text that may be the beginning of a stop text is held back."""
        row, text = self.row(prompt, sampling), self.text_of(sampling)
        with self.generator.continuous() as batch:
            (token,) = batch.add([row])
            for number in range(1, row.max_new_tokens + 1):
                refuse_no_numbers([token.logprob])
                if new := text.push(token.id):
                    yield AnswerPiece(new, None)
                if text.stopped or number == row.max_new_tokens:
                    break
                (token,) = batch.step()
        yield AnswerPiece(text.finish(), "stop" if text.stopped else "length")

    def row(self, prompt: Sequence[int], sampling: Sampling, *, key: int = 0, top: int = 0) -> GenerationRow:
        """Return a prompt as a row of a batch. When its answer ends, the object from `text_of` decides."""
        return self.generator.row(prompt, self._with_stops(sampling), key=key, top=top)

    def text_of(self, sampling: Sampling) -> AnswerText:
        """Return the object that decodes one answer token by token."""
        sampling = self._with_stops(sampling)
        return AnswerText(self.tokenizer.decode, sampling.stop_tokens, sampling.stop_texts)

    def _with_stops(self, sampling: Sampling) -> Sampling:
        stops = (*sampling.stop, *self.stop)
        # Special tokens are left out when an answer is decoded: of a stop text that is such a token, the id is added.
        special = [self.tokenizer.special_token(stop) for stop in stops if isinstance(stop, str)]
        return replace(
            sampling, stop=tuple(dict.fromkeys([*stops, *(token for token in special if token is not None)]))
        )


def refuse_no_numbers(logprobs: Sequence[float]) -> None:
    """Raise a `GenerateError` if a log-probability is NaN, as it is for damaged or diverged weights."""
    if any(map(math.isnan, logprobs)):
        raise GenerateError(
            "the model's log-probabilities are not finite: its weights are damaged or diverged in training; open an "
            "earlier checkpoint, or use another --dtype where fp16 overflows"
        )


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to its first stop text."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


class AnswerText:
    """Decodes one answer token by token, without any part of a stop text.

    A part of the text is *final* if no later token can change it. A token is decoded together with only a few tokens
    before it, so that the time is linear in the length of the answer.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop_tokens: Sequence[int], stops: Sequence[str]
    ) -> None:
        self._decode, self._stop_tokens, self._stops = decode, frozenset(stop_tokens), stops
        self._window: list[int] = []
        """The last tokens: first those whose text became final last, which are kept because a tokenizer may put a space
        between them and the next ones; then those whose text is not final."""
        self._settled = 0
        """The number of tokens in the window whose text is final."""
        self._shown = 0
        """The number of characters of their text."""
        self._held = ""
        """Final text that is held back because it may be the beginning of a stop text."""
        self.is_cut = False
        """Whether the answer ended with a stop text, at which it was cut."""
        self.length = 0
        """The number of final characters, including those held back."""
        self.stopped = False
        """Whether the answer ended with a stop token or a stop text."""

    @property
    def held(self) -> int:
        """The number of final characters that are held back."""
        return len(self._held)

    def push(self, token: int) -> str:
        """Add the next token; return the text that becomes final by it and is not held back."""
        assert not self.stopped, "the answer has ended"
        if token in self._stop_tokens:
            self.stopped = True
            return ""
        self._window.append(token)
        ready, text = len(self._window), self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            if ready - self._settled < _MOST_PENDING:
                return ""
            ready -= _MOST_PENDING // 2  # invalid bytes, but the last ones may still begin a character
            text = self._decode(self._window[:ready])
        new = text[self._shown :]
        if not new:  # a token without text, such as a special one
            del self._window[self._settled : ready]
            return ""
        self._window, self._settled = self._window[self._settled :], ready - self._settled
        self._shown = len(self._decode(self._window[: self._settled]))
        return self._release(new)

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.is_cut:
            return ""
        new = self._release(self._decode(self._window)[self._shown :])
        if not self.is_cut:
            new, self._held = new + self._held, ""
        return new

    def _release(self, new: str) -> str:
        before, text = self.length - len(self._held), self._held + new
        kept = cut(text, self._stops)
        if len(kept) < len(text):
            self.stopped = self.is_cut = True
            self.length, self._held = before + len(kept), ""
            return kept
        self.length = before + len(text)
        held = _held(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _held(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a stop text."""
    most = max((len(stop) for stop in stops), default=0)
    lengths = range(min(most, len(text)), 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)


# Tool calls in the Hermes format, which Qwen and others use: JSON between `<tool_call>` and `</tool_call>`.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A function call that a model requests."""

    name: str
    arguments: dict[str, Any]


def read_calls(text: str) -> list[ToolCall] | None:
    """Return the tool calls in a text that consists of nothing else; None if it has other content or is invalid."""
    calls, rest = [], text.strip()
    while rest:
        inner, closed, after = rest.removeprefix(OPEN).partition(CLOSE)
        if not rest.startswith(OPEN) or not closed:
            return None
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(name, arguments))
        rest = after.strip()
    return calls


class ToolReader:
    """Separates the content of a streamed answer from the tool calls at its end."""

    def __init__(self) -> None:
        self._pending: list[str] = []
        """The text from the position on at which tool calls may begin."""
        self._is_open = False

    def push(self, text: str) -> str:
        """Add text; return what is certainly content and not part of a tool call."""
        if self._is_open:
            self._pending.append(text)
            return ""
        text_so_far = "".join([*self._pending, text])
        begin = text_so_far.find(OPEN)
        self._is_open = begin >= 0
        if not self._is_open:  # the end of the text may be the beginning of "<tool_call>"
            last = range(max(len(text_so_far) - len(OPEN) + 1, 0), len(text_so_far))
            begin = next((at for at in last if OPEN.startswith(text_so_far[at:])), len(text_so_far))
        self._pending = [text_so_far[begin:]]
        return text_so_far[:begin]

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the remaining content, and the tool calls. Text that is not a valid call is returned as content."""
        rest = "".join(self._pending)
        calls = read_calls(rest)
        return (rest, []) if calls is None else ("", calls)


# Making untrusted text safe for a log or a terminal.


_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, among them those that begin an escape sequence
    "\u2028\u2029"  # ends of lines
    "\u202a-\u202e\u2066-\u2069"  # the direction of writing
    "\ud800-\udfff]"  # halves of characters, which no file takes
)


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with control characters escaped (as `\x1b`), except those in `keep`.

    Unescaped, they could fake a line of a log, or send commands to a terminal.
    """
    return _STEERING.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
