"""From a conversation to tokens, of which some are to be learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plait.config.posttrain import TemplateConfig
from plait.config.trust import transformers_code
from plait.errors import DataError, MissingExtraError, PlaitError
from plait.posttrain.data.records import Message
from plait.posttrain.data.tokenizer import ChatTokenizer


class Tokens(NamedTuple):
    """A conversation as tokens; one is learned where `learned` says so."""

    ids: list[int]
    learned: list[bool]

    def extend(self, ids: Sequence[int], *, learned: bool) -> None:
        """Add tokens at the end."""
        self.ids.extend(ids)
        self.learned.extend([learned] * len(ids))


class Template(ABC):
    """How conversations are written down."""

    ends: tuple[int | str, ...]
    """What ends an answer: tokens, and a text where the mark of a template is none."""

    @abstractmethod
    def conversation(self, messages: Sequence[Message]) -> Tokens:
        """All of it; only what the assistant says is learned, and that it ends there."""

    @abstractmethod
    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """What a model is given when it is to answer."""


class Plain(Template):
    """Texts one after another, an end token after each answer."""

    def __init__(self, tokenizer: ChatTokenizer, *, end_token: bool) -> None:
        self._tokenizer = tokenizer
        self._end = [tokenizer.end] if end_token else []
        self.ends = (tokenizer.end,)

    def conversation(self, messages: Sequence[Message]) -> Tokens:
        """All of it."""
        found = Tokens([], [])
        for message in messages:
            answer = message.role == "assistant"
            ids = self._tokenizer.encode(message.content)
            found.extend(ids + self._end if answer else ids, learned=answer)
        return found

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """All of it, with nothing behind."""
        return self.conversation(messages).ids


class Marked(Template):
    """Each turn between two marks, with its role first."""

    def __init__(self, tokenizer: ChatTokenizer, config: TemplateConfig) -> None:
        self._tokenizer = tokenizer
        self._words = {"system": config.system, "user": config.user, "assistant": config.assistant}
        self._start, self._stop = (self._mark(text) for text in (config.start, config.end))
        self._end = [tokenizer.end] if config.end_token else []
        mark = tokenizer.token_id(config.end)
        self.ends = (tokenizer.end, config.end if mark is None else mark)

    def _mark(self, text: str) -> list[int]:
        token = self._tokenizer.token_id(text)
        return self._tokenizer.encode(text) if token is None else [token]

    def _opening(self, role: str) -> list[int]:
        return self._start + self._tokenizer.encode(f"{self._words[role]}\n")

    def conversation(self, messages: Sequence[Message]) -> Tokens:
        """All of it."""
        line, found = self._tokenizer.encode("\n"), Tokens([], [])
        for message in messages:
            answer = message.role == "assistant"
            found.extend(self._opening(message.role), learned=False)
            found.extend(self._tokenizer.encode(message.content) + self._stop, learned=answer)
            found.extend(line, learned=False)
        if messages[-1].role == "assistant":
            found.extend(self._end, learned=True)
        return found

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """All of it, and the beginning of the assistant's turn."""
        return self.conversation(messages).ids + self._opening("assistant")


class OfTokenizer(Template):
    """The template that came with a Hugging Face tokenizer."""

    def __init__(
        self, tokenizer: ChatTokenizer, folder: str | Path, *, end_token: bool, trust_code: bool = False
    ) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtraError("transformers", "posttrain.template.kind: tokenizer", "hf") from error
        self._folder = folder
        try:
            with transformers_code(folder, trust_code=trust_code, key="posttrain.tokenizer") as trusted:
                self._tokenizer: Any = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=trusted
                )
        except PlaitError:
            raise
        except Exception as error:  # the library raises whatever its files made it do
            raise DataError(f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {error})") from error
        if self._tokenizer.chat_template is None:
            raise DataError(f"the tokenizer in {folder} has no chat template; use posttrain.template.kind: marked")
        end = self._tokenizer.eos_token_id
        self._end = [end] if end_token and end is not None else []
        self.ends = tuple(dict.fromkeys((tokenizer.end, *([] if end is None else [end]), *self._mark())))

    def _mark(self) -> list[int]:
        """The token that the template puts behind an answer, where it puts one; it need not be the tokenizer's end."""
        spoken = (Message("user", "a"), Message("assistant", "7351"))  # which no mark has in it
        behind = self._text(spoken, asks=False).rpartition("7351")[2]
        return [token for token in self._encode(behind)[:1] if token in self._tokenizer.added_tokens_decoder]

    def conversation(self, messages: Sequence[Message]) -> Tokens:
        """All of it. Where an answer begins and ends is found by writing the conversation down to there."""
        found, done, answer = Tokens([], []), "", list[int]()
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            asked = self._text(messages[:index], asks=True)
            answered = self._text(messages[: index + 1], asks=False)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise DataError(
                    "the chat template of the tokenizer writes earlier turns differently once later ones follow, so "
                    "what is learned cannot be told apart; use posttrain.template.kind: marked"
                )
            found.extend(self._encode(asked[len(done) :]), learned=False)
            answer = self._encode(answered[len(asked) :])
            found.extend(answer, learned=True)
            done = answered
        if messages[-1].role != "assistant":
            found.extend(self._encode(self._text(messages, asks=False)[len(done) :]), learned=False)
        else:
            found.extend([end for end in self._end if end not in answer], learned=True)
        return found

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """All of it, and the beginning of the assistant's turn."""
        return self._encode(self._text(messages, asks=True))

    def prompt_with_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Like `prompt`, of messages that may have `tool_calls`, with the tools that may be called."""
        return self._encode(self._rendered(messages, asks=True, tools=list(tools) or None))

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """How an assistant's tool call is written down; None where the template leaves out something of it."""
        function = {"name": name, "description": "d7351", "parameters": {"type": "object", "properties": {}}}
        tools: list[Mapping[str, Any]] = [{"type": "function", "function": function}]
        called = {"id": "call0", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "u7351"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call0", "name": name, "content": "r7351"},
        ]
        try:
            asked = self._rendered(messages[:1], asks=False, tools=tools)
            whole = self._rendered(messages, asks=False, tools=tools)
        except DataError:  # it knows no tools, or others
            return None
        _, begun, behind = whole.partition("u7351")
        call, answered, _ = behind.partition("r7351")
        return call if "d7351" in asked and begun and answered else None

    def _text(self, messages: Sequence[Message], *, asks: bool) -> str:
        return self._rendered([{"role": each.role, "content": each.content} for each in messages], asks=asks)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], *, asks: bool, tools: list[Mapping[str, Any]] | None = None
    ) -> str:
        try:  # in a sandbox of `transformers`: a template reads messages, and reaches nothing else
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # whatever a template of its author's raises, on purpose or not
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template in {self._folder} does not take this conversation: {reason}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def make_template(
    config: TemplateConfig, tokenizer: ChatTokenizer, folder: str | Path | None, *, trust_code: bool = False
) -> Template:
    """The template that a section describes; `folder` is where the tokenizer lies, if it came from one.

    `trust_code`: that folder may bring classes of its own, which are then run.
    """
    if config.kind == "plain":
        return Plain(tokenizer, end_token=config.end_token)
    if config.kind == "marked":
        return Marked(tokenizer, config)
    if folder is None or not Path(folder).is_dir():
        raise DataError(
            "posttrain.template.kind: tokenizer needs the folder of a Hugging Face tokenizer; name it as "
            "posttrain.tokenizer, or use kind: marked"
        )
    return OfTokenizer(tokenizer, folder, end_token=config.end_token, trust_code=trust_code)
