"""From a conversation to tokens, of which some are to be learned."""

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

# The tokenizer of a phase: from a file, from a folder, or of single characters.


NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
"""Where a Hugging Face folder says which token is the end."""


class ChatTokenizer(TextTokenizer):
    """A tokenizer that also knows which texts are tokens of their own."""

    def __init__(self, backend: Any, origin: str, named_end: str | None = None) -> None:
        super().__init__(backend, origin, named_end)
        self._named_end = named_end

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`, and beside it what the end is called where that cannot be seen from it."""
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
        """Ids by token."""
        vocabulary: dict[str, int] = self.backend.get_vocab()
        return vocabulary


def read_tokenizer(path: str | Path) -> ChatTokenizer:
    """Read a `tokenizer.json`, given itself or the folder that it lies in."""
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
    """The settings of a tokenizer; none where the file is not there."""
    return read_json_object(file, DataError) if file.is_file() else {}


def _named_end(settings: Path) -> str | None:
    """The end token of a tokenizer's settings: a text, or an object with it."""
    entry = read_settings(settings).get("eos_token")
    token = entry.get("content") if isinstance(entry, dict) else entry
    if token is not None and not isinstance(token, str):
        raise DataError(f"{settings} has the eos_token {entry!r:.80}, expected a token")
    return token


class CharacterTokenizer(ChatTokenizer):
    """One token a character. A character that it does not know is an error; the library would leave it out."""

    def unknown_in(self, text: str) -> str | None:
        """None: it is an error as soon as it is encoded."""
        return None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        tokens = super().encode(text)
        if len(tokens) != len(text):
            strange = sorted({character for character in text if self.token_id(character) is None})
            raise DataError(f"the characters {''.join(strange)!r} are not in the vocabulary of the made-up task")
        return tokens


def character_tokenizer(alphabet: str, marks: Sequence[str] = ()) -> ChatTokenizer:
    """One token for each character, and the end token first; `marks` are tokens too."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {END: 0, **{character: index for index, character in enumerate(sorted(set(alphabet)), start=1)}}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END, *marks])
    return CharacterTokenizer(backend, "characters")


def trained_tokenizer(texts: Iterable[str], vocab_size: int, marks: Sequence[str] = ()) -> ChatTokenizer:
    """A byte-level BPE of these texts with so many tokens, `marks` among them; the same texts give the same one."""
    from tokenizers import Tokenizer

    with TemporaryDirectory() as folder:
        file = Path(folder) / NAME
        train_tokenizer(texts, vocab_size - len(marks)).save(file)
        backend: Any = Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(marks))
    return ChatTokenizer(backend, "trained tokenizer")


CHAT_TEMPLATE = "chat_template.jinja"
"""Where a Hugging Face folder keeps its chat template, if not in the settings of the tokenizer."""

_ESCAPES = 0xF0000
"""The first of the private-use characters that stand for texts of control tokens while a template is rendered."""

RENDERING_S = 10.0
"""Of a processor, for one conversation: a template takes some thousandths of a second, and one that was made to, years.
"""


class UnwritableError(DataError):
    """A conversation that a template does not write down, or not so that its answers can be found again."""


class ChatTokens(NamedTuple):
    """A conversation as tokens; one is learned where `learned` says so."""

    ids: list[int]
    learned: list[bool]

    def extend(self, ids: Sequence[int], *, learned: bool) -> None:
        """Add tokens at the end."""
        self.ids.extend(ids)
        self.learned.extend([learned] * len(ids))


class Template(ABC):
    """How conversations are written down."""

    kind: ClassVar[str]
    ends: tuple[int | str, ...]
    """What ends an answer: tokens, and a text where the mark of a template is none."""
    _tokenizer: ChatTokenizer

    @abstractmethod
    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """All of it; only what the assistant says is learned, and that it ends there."""

    @abstractmethod
    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """What a model is given when it is to answer."""

    @property
    @abstractmethod
    def jinja(self) -> str:
        """The same as a chat template of `transformers`."""

    def unfinished(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation whose last answer was cut off: without an end mark."""
        return self.prompt(messages[:-1]) + self._tokenizer.encode(messages[-1].content)

    def _refuse_reasoning(self, messages: Sequence[ChatMessage]) -> None:
        if any(message.reasoning for message in messages):
            raise UnwritableError(
                f"an answer has reasoning_content, which posttrain.template.kind: {self.kind} does not write down; use "
                "kind: tokenizer with a chat template that does, or put it into the content"
            )


class Plain(Template):
    """Texts one after another, an end token after each answer."""

    kind = "plain"

    def __init__(self, tokenizer: ChatTokenizer, *, end_token: bool) -> None:
        self._tokenizer = tokenizer
        self._end = [tokenizer.end] if end_token else []
        self.ends = (tokenizer.end,)

    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """All of it."""
        self._refuse_reasoning(messages)
        tokens = ChatTokens([], [])
        tokens.extend(self._tokenizer.begin, learned=False)
        for message in messages:
            answer = message.role == "assistant"
            ids = self._tokenizer.encode(message.content)
            tokens.extend(ids + self._end if answer else ids, learned=answer and message.learned)
        return tokens

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """All of it, with nothing behind."""
        return self.conversation(messages).ids

    @property
    def jinja(self) -> str:
        """The same as a chat template of `transformers`."""
        end = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}" if self._end else ""
        return f"{_begin(self._tokenizer)}{{% for m in messages %}}{{{{ m['content'] }}}}{end}{{% endfor %}}"


class Marked(Template):
    """Each turn between two marks, with its role first."""

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
        """All of it."""
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
        """All of it, and the beginning of the assistant's turn."""
        return self.conversation(messages).ids + self._opening("assistant")

    @property
    def jinja(self) -> str:
        """The same as a chat template of `transformers`."""
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
    """The template that came with a Hugging Face tokenizer.

    [Note: texts of control tokens in a conversation]
    A template makes one text of marks and of what people wrote, and the tokenizer takes `<|im_end|>` in it for the end
    of a turn, whoever wrote it. So texts of control tokens in contents are replaced by private-use characters before
    the template is rendered, and encoded as plain text behind it.
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
        except Exception as error:  # the library raises whatever its files made it do
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
        """The token that the template puts behind an answer, where it puts one; it need not be the tokenizer's end."""
        spoken = (ChatMessage("user", "a"), ChatMessage("assistant", "7351"))  # which no mark has in it
        behind = self._text(spoken, asks=False).rpartition("7351")[2]
        return [token for token in self._encode(behind)[:1] if token in self._transformers.added_tokens_decoder]

    @property
    def jinja(self) -> str:
        """The same as a chat template of `transformers`."""
        template = chat_template_in(self._folder)
        assert template is not None, "a folder without one was refused"
        return template

    def conversation(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """All of it. Where an answer begins and ends is found by writing the conversation down to there."""
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
        """Append to `tokens`, the encoding of `done`, the rest of `text`.

        It is taken from the encoding of the whole text, as the model is prompted with it; if a token would span the
        boundary, the rest is encoded separately.
        """
        whole, count = self._encode(text), len(tokens.ids)
        behind = whole[count:] if whole[:count] == tokens.ids else self._encode(text[len(done) :])
        tokens.extend(behind, learned=learned)

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """All of it, and the beginning of the assistant's turn."""
        text = self._text(messages, asks=True)
        _check_written(_asked(messages), self._escaped_back(text))
        return self._encode(text)

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

    def _text(self, messages: Sequence[ChatMessage], *, asks: bool) -> str:
        """The conversation as the template writes it, with texts of control tokens as private-use characters."""
        turns = []
        for message in messages:
            turn = {"role": message.role, "content": message.content}
            if message.reasoning:  # templates have no common name for it
                turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
            turns.append(turn)
        return self._rendered(turns, asks=asks)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], *, asks: bool, tools: list[Mapping[str, Any]] | None = None
    ) -> str:
        escaped, escaped_tools = self._escaped(list(messages)), self._escaped(tools)
        try:  # in a sandbox of `transformers`: a template reads messages, and reaches nothing else
            with limited(RENDERING_S):
                text: str = self._transformers.apply_chat_template(
                    escaped, tools=escaped_tools, tokenize=False, add_generation_prompt=asks
                )
        except _TooLongError:
            raise UnwritableError(
                f"the chat template in {self._folder} is not done with this conversation after {RENDERING_S:g} s of "
                "computing; look for loops within loops in it, or use posttrain.template.kind: marked"
            ) from None
        except Exception as error:  # whatever a template of its author's raises, on purpose or not
            reason = f"{type(error).__name__}: {error}"
            message = f"the chat template in {self._folder} does not take this conversation: {reason}"
            raise UnwritableError(message) from error
        return text

    def _escaped(self, content: Any) -> Any:
        """The same with other texts in it; see [Note: texts of control tokens in a conversation]."""
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
    """What is limited has taken too long. No `except Exception` on the way takes it for something else."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise in the block, between two operations of Python, once its thread has computed for so long."""
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
        raise_in(ctypes.c_ulong(thread), None)  # takes back what has not been raised yet


def has_powers(template: str) -> bool:
    """Whether a chat template has `a ** b`, one operation that no limit ends; `f(**names)` is something else."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        lexed = Environment().lex(template)  # noqa: S701  # nothing is rendered
        tokens = [(name, value) for _, name, value in lexed if name != "whitespace"]
    except TemplateSyntaxError:  # said where it is used
        return False
    return any(now == ("operator", "**") and before[1] not in ("(", ",") for before, now in pairwise(tokens))


def _check_written(messages: Iterable[ChatMessage], text: str) -> None:
    """Refuse a text that lacks some of what was said; spaces may differ."""
    squeezed = "".join(text.split())
    for message in messages:
        for what, said in (("content", message.content), ("reasoning_content", message.reasoning)):
            if said and "".join(said.split()) not in squeezed:
                raise UnwritableError(
                    f"the chat template of the tokenizer leaves out the {what} of the {message.role}'s message "
                    f"{said[:40]!r}; leave it out of the data too, or use another posttrain.template.kind"
                )


def _asked(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """What the others say; of earlier answers, a template may leave out the thoughts."""
    return (message for message in messages if message.role != "assistant")


def chat_template_in(folder: Path | None) -> str | None:
    """The chat template of a Hugging Face tokenizer in this folder; None where it has none."""
    if folder is None:
        return None
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_settings(folder / SETTINGS).get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template or None


def tokenizer_folder(source: str | Path | None) -> Path | None:
    """The folder of a tokenizer that is given by its folder or by its `tokenizer.json`."""
    if source is None:
        return None
    path = Path(source)
    if path.is_dir():
        return path
    return path.parent if path.name == NAME and path.is_file() else None


def template_of_run(
    config: TemplateConfig, tokenizer: ChatTokenizer, sources: Sequence[Path], *, trust_code: bool = False
) -> Template:
    """Return the template of a finished run. The tokenizer that it kept is the first of `sources`."""
    source = sources[0]
    if config.kind == "tokenizer":
        source = next((path for path in sources if chat_template_in(tokenizer_folder(path)) is not None), source)
    return make_template(config, tokenizer, source, trust_code=trust_code)


def make_template(
    config: TemplateConfig, tokenizer: ChatTokenizer, source: str | Path | None, *, trust_code: bool = False
) -> Template:
    """The template that a section describes; `source` is the file or folder of the tokenizer, if it has one.

    `trust_code`: that folder may bring classes of its own, which are then run.
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
