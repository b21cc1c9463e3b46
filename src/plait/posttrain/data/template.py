"""Templates: write conversations as tokens, and mark those that are trained on; the tokenizer of a phase."""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

from plait.config import TemplateConfig, read_json_object, transformers_code
from plait.data import END, TextTokenizer, train_tokenizer
from plait.errors import DataError, MissingExtraError, PlaitError
from plait.posttrain.data.records import ChatMessage

# The tokenizer of a phase: read from a file or folder, trained, or with one token per character.


NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
"""The file of a Hugging Face folder that names the end token."""


class ChatTokenizer(TextTokenizer):
    """A tokenizer that can look up tokens by their text."""

    def __init__(self, backend: Any, origin: str, named_end: str | None = None) -> None:
        super().__init__(backend, origin, named_end)
        self._named_end = named_end

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`; and a `tokenizer_config.json` with the end token, if that came from such a file."""
        super().save(path)
        if self._named_end is not None:
            settings = json.dumps({"eos_token": self._named_end}, ensure_ascii=False, indent=2)
            Path(path).with_name(SETTINGS).write_text(settings + "\n", encoding="utf-8")

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text; None if the tokenizer has no such token."""
        token: int | None = self.backend.token_to_id(text)
        return token

    @property
    def controls(self) -> tuple[str, ...]:
        """The texts of control tokens; in a message they are encoded as plain text."""
        return tuple(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, by its text."""
        vocabulary: dict[str, int] = self.backend.get_vocab()
        return vocabulary


def read_tokenizer(path: str | Path) -> ChatTokenizer:
    """Return the tokenizer of a `tokenizer.json`, or of the folder that contains one."""
    from tokenizers import Tokenizer

    source = Path(path)
    file = source / NAME if source.is_dir() else source
    if not file.is_file():
        raise DataError(f"tokenizer {str(path)!r}: no {file.name if source.is_dir() else 'such file'}")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is not a tokenizer.json: {error}") from error
    return ChatTokenizer(backend, str(file), _named_end(file.with_name(SETTINGS)))


def read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`; empty if the file does not exist."""
    return read_json_object(file, DataError) if file.is_file() else {}


def _named_end(settings: Path) -> str | None:
    """Return the end token of a `tokenizer_config.json`, where it is a text or an object with `content`; or None."""
    entry = read_settings(settings).get("eos_token")
    token = entry.get("content") if isinstance(entry, dict) else entry
    if token is not None and not isinstance(token, str):
        raise DataError(f"{settings} has the eos_token {entry!r:.80}, expected a token")
    return token


class CharacterTokenizer(ChatTokenizer):
    """A tokenizer with one token per character. Unknown characters raise a `DataError`; the library would drop them."""

    def unknown_in(self, text: str) -> str | None:
        """Return None: an unknown character raises an error when it is encoded."""
        return None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens; raise a `DataError` for an unknown character."""
        tokens = super().encode(text)
        if len(tokens) != len(text):
            strange = sorted({character for character in text if self.token_id(character) is None})
            raise DataError(f"the characters {''.join(strange)!r} are not in the vocabulary of the made-up task")
        return tokens


def character_tokenizer(alphabet: str, marks: Sequence[str] = ()) -> ChatTokenizer:
    """Return a tokenizer with one token per character; the end token has id 0, and `marks` are tokens too."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {END: 0, **{character: index for index, character in enumerate(sorted(set(alphabet)), start=1)}}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END, *marks])
    return CharacterTokenizer(backend, "characters")


def trained_tokenizer(texts: Iterable[str], vocab_size: int, marks: Sequence[str] = ()) -> ChatTokenizer:
    """Return a byte-level BPE tokenizer trained on texts, with at most `vocab_size` tokens, `marks` included.

    The same texts give the same tokenizer.
    """
    from tokenizers import Tokenizer

    with TemporaryDirectory() as folder:
        file = Path(folder) / NAME
        train_tokenizer(texts, vocab_size - len(marks)).save(file)
        backend: Any = Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(marks))
    return ChatTokenizer(backend, "trained tokenizer")


CHAT_TEMPLATE = "chat_template.jinja"
"""The file of a Hugging Face folder with its chat template, if that is not in `tokenizer_config.json`."""

_ESCAPES = 0xF0000
"""The first of the private-use characters that stand for texts of control tokens while a template is rendered."""

RENDERING_S = 10.0
"""Limit of the CPU time to render one conversation. A usual template needs milliseconds; a malicious one, any time."""


class UnwritableError(DataError):
    """A conversation that a template cannot write, or in whose text its answers cannot be located."""


class ChatTokens(NamedTuple):
    """A conversation as tokens; `learned` says for each token whether it is trained on."""

    ids: list[int]
    learned: list[bool]

    def extend(self, ids: Sequence[int], *, learned: bool) -> None:
        """Add tokens at the end."""
        self.ids.extend(ids)
        self.learned.extend([learned] * len(ids))


class Template(ABC):
    """Writes conversations as tokens."""

    kind: ClassVar[str]
    ends: tuple[int | str, ...]
    """What ends an answer: ids of tokens, and the end mark as text if it is not a token."""
    _tokenizer: ChatTokenizer

    @abstractmethod
    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """Return the tokens of a conversation; only answers and their end tokens are trained on."""

    @abstractmethod
    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens with which a model is prompted for an answer."""

    @property
    @abstractmethod
    def jinja(self) -> str:
        """This template as a Jinja chat template of `transformers`."""

    def unfinished(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation whose last answer was cut off, so without an end mark."""
        return self.prompt(messages[:-1]) + self._tokenizer.encode(messages[-1].content)

    def _refuse_reasoning(self, messages: Sequence[ChatMessage]) -> None:
        if any(message.reasoning for message in messages):
            raise UnwritableError(
                f"an answer has reasoning_content, which posttrain.template.kind: {self.kind} does not write down; use "
                "kind: tokenizer with a chat template that does, or put it into the content"
            )


class Plain(Template):
    """The texts of all messages one after another, with an end token after each answer."""

    kind = "plain"

    def __init__(self, tokenizer: ChatTokenizer, *, end_token: bool) -> None:
        self._tokenizer = tokenizer
        self._end = [tokenizer.end] if end_token else []
        self.ends = (tokenizer.end,)

    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """Return the tokens of a conversation; only answers and their end tokens are trained on."""
        self._refuse_reasoning(messages)
        tokens = ChatTokens([], [])
        tokens.extend(self._tokenizer.begin, learned=False)
        for message in messages:
            answer = message.role == "assistant"
            ids = self._tokenizer.encode(message.content)
            tokens.extend(ids + self._end if answer else ids, learned=answer and message.learned)
        return tokens

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of the conversation; nothing is added for the answer."""
        return self.conversation(messages).ids

    @property
    def jinja(self) -> str:
        """This template as a Jinja chat template of `transformers`."""
        end = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}" if self._end else ""
        return f"{_begin(self._tokenizer)}{{% for m in messages %}}{{{{ m['content'] }}}}{end}{{% endfor %}}"


class Marked(Template):
    """Each message between a start and an end mark, beginning with its role (as in ChatML)."""

    kind = "marked"

    def __init__(self, tokenizer: ChatTokenizer, config: TemplateConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._roles = {"system": config.system, "user": config.user, "assistant": config.assistant}
        self._start, self._stop = (self._mark(text) for text in (config.start, config.end))
        self._end = [tokenizer.end] if config.end_token else []
        mark = tokenizer.token_id(config.end)
        self.ends = (tokenizer.end, config.end if mark is None else mark)

    def _mark(self, text: str) -> list[int]:
        token = self._tokenizer.token_id(text)
        return self._tokenizer.encode(text) if token is None else [token]

    def _opening(self, role: str) -> list[int]:
        return self._start + self._tokenizer.encode(f"{self._roles[role]}\n")

    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """Return the tokens of a conversation; only answers and their end tokens are trained on."""
        self._refuse_reasoning(messages)
        line, tokens = self._tokenizer.encode("\n"), ChatTokens([], [])
        tokens.extend(self._tokenizer.begin, learned=False)
        for message in messages:
            answer = message.role == "assistant"
            tokens.extend(self._opening(message.role), learned=False)
            text = self._tokenizer.encode(message.content) + self._stop
            tokens.extend(text, learned=answer and message.learned)
            tokens.extend(line, learned=False)
        last = messages[-1]
        if last.role == "assistant":
            tokens.extend(self._end, learned=last.learned)
        return tokens

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of the conversation, and of the beginning of the assistant's turn."""
        return self.conversation(messages).ids + self._opening("assistant")

    @property
    def jinja(self) -> str:
        """This template as a Jinja chat template of `transformers`."""
        roles, marks = json.dumps(self._roles), (json.dumps(self._config.start), json.dumps(self._config.end))
        start, end = (f"{{{{ {mark} }}}}" for mark in marks)
        behind = (
            "{% if messages[-1]['role'] == 'assistant' and not add_generation_prompt %}{{ eos_token }}{% endif %}"
            if self._end
            else ""
        )
        return (
            f"{{% set roles = {roles} %}}{_begin(self._tokenizer)}{{% for m in messages %}}"
            f"{start}{{{{ roles[m['role']] + '\\n' + m['content'] }}}}{end}{{{{ '\\n' }}}}{{% endfor %}}{behind}"
            f"{{% if add_generation_prompt %}}{start}{{{{ roles['assistant'] + '\\n' }}}}{{% endif %}}"
        )


def _begin(tokenizer: ChatTokenizer) -> str:
    return f"{{{{ {json.dumps(tokenizer.decode(tokenizer.begin, keep_special=True))} }}}}" if tokenizer.begin else ""


class OfTokenizer(Template):
    """The chat template of a Hugging Face tokenizer.

    [Note: texts of control tokens in a conversation]
    A chat template renders marks and messages into one text, and the tokenizer encodes every `<|im_end|>` in it as the
    end of a turn, also one that a user wrote. So the texts of control tokens in messages are replaced by private-use
    characters before the template is rendered; afterwards these are encoded as the plain text that they stand for.
    """

    kind = "tokenizer"

    def __init__(self, tokenizer: ChatTokenizer, folder: Path, *, end_token: bool, trust_code: bool = False) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtraError("transformers", "posttrain.template.kind: tokenizer", "hf") from error
        self._tokenizer, self._folder = tokenizer, folder
        try:
            with transformers_code(folder, trust_code=trust_code, key="posttrain.tokenizer") as trusted:
                self._transformers: Any = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=trusted
                )
        except PlaitError:
            raise
        except Exception as error:  # files may cause exceptions of any class
            raise DataError(f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {error})") from error
        if self._transformers.chat_template is None:
            raise DataError(f"the tokenizer in {folder} has no chat template; use posttrain.template.kind: marked")
        if has_powers(str(self._transformers.chat_template)):
            raise DataError(
                f"the chat template in {folder} computes powers (`**`), with which a few characters take all time and "
                "memory; remove them, or use posttrain.template.kind: marked"
            )
        added = self._transformers.added_tokens_decoder.values()
        controls = {*tokenizer.controls, *(str(token) for token in added if token.special)}
        self._controls = sorted(controls, key=lambda text: (-len(text), text))
        end = self._transformers.eos_token_id
        self._end = [end] if end_token and end is not None else []
        self.ends = tuple(dict.fromkeys((tokenizer.end, *([] if end is None else [end]), *self._mark())))

    def _mark(self) -> list[int]:
        """Return the token that the template writes after an answer, in a list; empty if it writes none.

        It may differ from the tokenizer's end token.
        """
        spoken = (ChatMessage("user", "a"), ChatMessage("assistant", "7351"))  # a text that no mark contains
        behind = self._text(spoken, asks=False).rpartition("7351")[2]
        return [token for token in self._encode(behind)[:1] if token in self._transformers.added_tokens_decoder]

    @property
    def jinja(self) -> str:
        """This template as a Jinja chat template of `transformers`."""
        template = chat_template_in(self._folder)
        assert template is not None, "a folder without one was refused"
        return template

    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """Return the tokens of a conversation; only answers and their end tokens are trained on.

        An answer is located by rendering the conversation up to its start, and up to its end. Raise an
        `UnwritableError` if the former text is not a prefix of the latter.
        """
        tokens, done, answer = ChatTokens([], []), "", list[int]()
        for index, message in enumerate(messages):
            if message.role != "assistant" or not message.learned:
                continue
            asked = self._text(messages[:index], asks=True)
            answered = self._text(messages[: index + 1], asks=False)
            if not asked.startswith(done):
                raise UnwritableError(
                    f"the chat template of the tokenizer writes the turns before message {index} differently once it "
                    "follows, so its earlier answers would be learned as the model never sees them; write `train: "
                    "false` on them, or use posttrain.template.kind: marked"
                )
            if not answered.startswith(asked):
                raise UnwritableError(
                    f"the chat template of the tokenizer writes message {index} differently than it asks for an "
                    "answer, so where the answer begins cannot be told; use posttrain.template.kind: marked"
                )
            _check_written(_asked(messages[:index]), self._escaped_back(asked))
            _check_written([message], self._escaped_back(answered[len(asked) :]))
            self._continue(tokens, done, asked, learned=False)
            before = len(tokens.ids)
            self._continue(tokens, asked, answered, learned=True)
            answer, done = tokens.ids[before:], answered
        if messages[-1].role == "assistant" and messages[-1].learned:
            tokens.extend([end for end in self._end if end not in answer], learned=True)
            return tokens
        whole = self._text(messages, asks=False)
        if not whole.startswith(done):
            raise UnwritableError(
                "the chat template of the tokenizer writes the learned answers differently once the last message "
                "follows; leave out what follows the last learned answer, or use posttrain.template.kind: marked"
            )
        self._continue(tokens, done, whole, learned=False)
        return tokens

    def _continue(self, tokens: ChatTokens, done: str, text: str, *, learned: bool) -> None:
        """Append the tokens of the rest of `text` to `tokens`, which encode its beginning `done`.

        They are taken from the encoding of the whole text, as in a prompt; if a token would span the boundary, the rest
        is encoded separately.
        """
        whole, count = self._encode(text), len(tokens.ids)
        behind = whole[count:] if whole[:count] == tokens.ids else self._encode(text[len(done) :])
        tokens.extend(behind, learned=learned)

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of the conversation, and of the beginning of the assistant's turn."""
        text = self._text(messages, asks=True)
        _check_written(_asked(messages), self._escaped_back(text))
        return self._encode(text)

    def prompt_with_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a prompt whose messages may have `tool_calls`; `tools` are those that may be called."""
        return self._encode(self._rendered(messages, asks=True, tools=list(tools) or None))

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return the text of a tool call between question and result; None if the template does not support tools."""
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
        except DataError:  # the template does not support these messages
            return None
        _, begun, behind = whole.partition("u7351")
        call, answered, _ = behind.partition("r7351")
        return call if "d7351" in asked and begun and answered else None

    def _text(self, messages: Sequence[ChatMessage], *, asks: bool) -> str:
        """Return the rendered conversation, with private-use characters for the texts of control tokens in messages."""
        turns = []
        for message in messages:
            turn = {"role": message.role, "content": message.content}
            if message.reasoning:  # templates use different names for it
                turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
            turns.append(turn)
        return self._rendered(turns, asks=asks)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], *, asks: bool, tools: list[Mapping[str, Any]] | None = None
    ) -> str:
        escaped, escaped_tools = self._escaped(list(messages)), self._escaped(tools)
        try:  # `transformers` renders in a sandbox: a template can access only its arguments
            with limited(RENDERING_S):
                text: str = self._transformers.apply_chat_template(
                    escaped, tools=escaped_tools, tokenize=False, add_generation_prompt=asks
                )
        except _TooLongError:
            raise UnwritableError(
                f"the chat template in {self._folder} is not done with this conversation after {RENDERING_S:g} s of "
                "computing; look for loops within loops in it, or use posttrain.template.kind: marked"
            ) from None
        except Exception as error:  # a template may raise anything
            reason = f"{type(error).__name__}: {error}"
            message = f"the chat template in {self._folder} does not take this conversation: {reason}"
            raise UnwritableError(message) from error
        return text

    def _escaped(self, content: Any) -> Any:
        """Return the content with private-use characters for the texts of control tokens.

        See [Note: texts of control tokens in a conversation].
        """
        if isinstance(content, Mapping):
            return {key: self._escaped(value) for key, value in content.items()}
        if isinstance(content, list):
            return [self._escaped(item) for item in content]
        if not isinstance(content, str):
            return content
        if any(_ESCAPES <= ord(character) < _ESCAPES + len(self._controls) for character in content):
            raise UnwritableError(f"a message has private-use characters from U+{_ESCAPES:X} on; leave them out")
        for number, control in enumerate(self._controls):
            if control in content:
                content = content.replace(control, chr(_ESCAPES + number))
        return content

    def _escaped_back(self, text: str) -> str:
        return "".join(
            self._controls[ord(c) - _ESCAPES] if 0 <= ord(c) - _ESCAPES < len(self._controls) else c for c in text
        )

    def _encode(self, text: str) -> list[int]:
        last = chr(_ESCAPES + len(self._controls))
        pieces = re.split(f"([{chr(_ESCAPES)}-{last}])", text)
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids += self._tokenizer.encode(self._controls[ord(piece) - _ESCAPES])
            elif piece:
                ids += self._transformers(piece, add_special_tokens=False)["input_ids"]
        return ids


class _TooLongError(BaseException):
    """The time limit of `limited` is exceeded. A `BaseException`, so that no `except Exception` catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a `_TooLongError` in the block, between two bytecodes, when its thread has used `seconds` of CPU time."""
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else time.CLOCK_MONOTONIC
    until = time.clock_gettime(clock) + seconds
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        while not done.wait(max(until - time.clock_gettime(clock), 0.01)):
            if time.clock_gettime(clock) >= until:
                with lock:
                    if not done.is_set():
                        raise_in(ctypes.c_ulong(thread), ctypes.py_object(_TooLongError))
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
        raise_in(ctypes.c_ulong(thread), None)  # cancel an exception that is set and not yet raised


def has_powers(template: str) -> bool:
    """Whether a chat template has a power `a ** b`, which `limited` cannot interrupt; `f(**names)` is allowed."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        lexed = Environment().lex(template)  # noqa: S701  # nothing is rendered
        tokens = [(name, value) for _, name, value in lexed if name != "whitespace"]
    except TemplateSyntaxError:  # reported when the template is used
        return False
    return any(now == ("operator", "**") and before[1] not in ("(", ",") for before, now in pairwise(tokens))


def _check_written(messages: Iterable[ChatMessage], text: str) -> None:
    """Raise an `UnwritableError` if the content of a message is not in the text; white space is ignored."""
    squeezed = "".join(text.split())
    for message in messages:
        for what, said in (("content", message.content), ("reasoning_content", message.reasoning)):
            if said and "".join(said.split()) not in squeezed:
                raise UnwritableError(
                    f"the chat template of the tokenizer leaves out the {what} of the {message.role}'s message "
                    f"{said[:40]!r}; leave it out of the data too, or use another posttrain.template.kind"
                )


def _asked(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Return the messages that are not answers; a template may leave out the reasoning of earlier answers."""
    return (message for message in messages if message.role != "assistant")


def chat_template_in(folder: Path | None) -> str | None:
    """Return the chat template of a Hugging Face tokenizer in a folder; None if there is none."""
    if folder is None:
        return None
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_settings(folder / SETTINGS).get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template or None


def tokenizer_folder(source: str | Path | None) -> Path | None:
    """Return the folder of a tokenizer, given the folder or its `tokenizer.json`; None for anything else."""
    if source is None:
        return None
    path = Path(source)
    if path.is_dir():
        return path
    return path.parent if path.name == NAME and path.is_file() else None


def template_of_run(
    config: TemplateConfig, tokenizer: ChatTokenizer, sources: Sequence[Path], *, trust_code: bool = False
) -> Template:
    """Return the template of a finished run.

    `sources` are files or folders of tokenizers, the one in the run's folder first; with `kind: tokenizer` the first
    that has a chat template is used.
    """
    source = sources[0]
    if config.kind == "tokenizer":
        source = next((path for path in sources if chat_template_in(tokenizer_folder(path)) is not None), source)
    return make_template(config, tokenizer, source, trust_code=trust_code)


def make_template(
    config: TemplateConfig, tokenizer: ChatTokenizer, source: str | Path | None, *, trust_code: bool = False
) -> Template:
    """Return the template that a section describes; `source` is the file or folder of the tokenizer, if it has one.

    `trust_code` allows Python code in that folder to be run.
    """
    folder = tokenizer_folder(source)
    kind = config.kind
    if kind == "auto":
        kind = "plain" if chat_template_in(folder) is None else "tokenizer"
    if kind == "plain":
        return Plain(tokenizer, end_token=config.end_token)
    if kind == "marked":
        return Marked(tokenizer, config)
    if folder is None:
        raise DataError(
            "posttrain.template.kind: tokenizer needs the folder of a Hugging Face tokenizer; name it as "
            "posttrain.tokenizer, or use kind: marked"
        )
    return OfTokenizer(tokenizer, folder, end_token=config.end_token, trust_code=trust_code)
