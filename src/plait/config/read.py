"""Reads a run description from a file: YAML, TOML, JSON, or JSON with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from plait.config.text import listed, nearest, show
from plait.errors import ConfigError, PlaitError, Problem

_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16."""


def as_utf8(data: bytes) -> str:
    """Return a remedy for text that is not UTF-8, as a part of a sentence. GBK and UTF-16 are recognised."""
    if data.startswith(_MARKS):
        return _recoding_remedy("UTF-16", "UTF-16")
    try:
        data.decode("gb18030")  # a superset of GBK
    except UnicodeDecodeError:
        return "save it as UTF-8"
    return _recoding_remedy("GBK", "GB18030")


def _recoding_remedy(name: str, encoding: str) -> str:
    return f"save it as UTF-8; if it is {name}, `iconv -f {encoding} -t UTF-8 OLD > NEW` does that"


def lone_surrogate(text: str) -> str | None:
    """Return a message about a lone surrogate in a text, from JSON or a command line; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = ord(text[error.start])
        # Python's way to keep a byte that is not UTF-8.
        byte = " (or a byte that is not UTF-8)" if 0xDC80 <= code_point <= 0xDCFF else ""
        return f"half of a character{byte}: \\u{code_point:04x} is a lone surrogate"
    return None


_JSON = (".json", ".jsonc", ".json5")
_YAML = (".yaml", ".yml")
SUFFIXES = (*_YAML, ".toml", *_JSON)
MAX_DEPTH = 100
"""The most levels of nesting: more than any description has, and less than Python's stack."""


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values in `source`, unchecked. An empty file is an empty run description."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        raise ConfigError(Problem(str(path), "this is a folder", _files_in(path)))
    if path.suffix.lower() not in SUFFIXES:
        remedy = f"A run description is a file ending in {listed(SUFFIXES, 'or')}."
        raise ConfigError(Problem(str(path), f"the ending {show(path.suffix)} is not a known format", remedy))
    data = parse_text(path, text_of(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        message = f"expected keys and values at the top, found {show(data)}"
        raise ConfigError(Problem(str(path), message, "Write sections, for example `strategy: ddp`."))
    return data


def text_of(path: Path) -> str:
    """Return the text of a file of settings. Raises `ConfigError` where it is missing, or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(Problem(str(path), "no such file", _similar_files(path))) from None
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8 text"
        remedy = as_utf8(error.object)
        raise ConfigError(Problem(str(path), message, f"{remedy[0].upper()}{remedy[1:]}.")) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError(Problem(str(path), message, "Give a file that can be read.")) from None


def _similar_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"The folder {folder} does not exist either."
    stems = {file.stem: file.name for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES}
    meant = nearest(path.stem, stems)  # without the suffix: two names with the same one would seem similar
    return (f"Did you mean `{stems[meant]}`? " if meant else "") + _files_in(folder)


def _files_in(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not names:
        return f"The folder {folder.resolve()} has no run description."
    return f"The folder has {', '.join(names) if len(names) <= 8 else ', '.join(names[:8]) + ' and more'}."


def parse_text(path: Path, text: str) -> Any:
    """Return the data in the text of a file, by its ending. Raises `ConfigError` with the position of an error."""
    ending = path.suffix.lower()
    parse = _parse_yaml if ending in _YAML else _parse_json if ending in _JSON else _parse_toml
    try:
        data = parse(path, text)
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:  # Python's int() refuses numbers of thousands of digits
        raise ConfigError(
            Problem(str(path), f"a number in it cannot be read: {error}", "Write fewer digits.")
        ) from None
    if depth_of(data) > MAX_DEPTH:
        raise _too_deep(path)
    if wrong := lone_surrogate("\n".join(texts_in(data))):
        raise ConfigError(Problem(str(path), wrong, "Write the character itself."))
    return data


def texts_in(data: Any) -> Iterator[str]:
    """Yield every text in lists and mappings, keys included."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from texts_in(key)
            yield from texts_in(value)
    elif isinstance(data, list):
        for entry in data:
            yield from texts_in(entry)


def depth_of(data: Any) -> int:
    """Return the levels of nested lists and mappings, at most one more than `MAX_DEPTH`. Without recursion."""
    depth, layer = 0, [data]
    while layer := [value for value in layer if isinstance(value, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            break
        layer = [inner for value in layer for inner in (value.values() if isinstance(value, dict) else value)]
    return depth


def _too_deep(path: Path) -> ConfigError:
    message = f"lists and keys are nested more than {MAX_DEPTH} deep"
    return ConfigError(Problem(str(path), message, "Look for a bracket that is not closed where it should be."))


def _parse_yaml(path: Path, text: str) -> Any:
    import yaml

    from plait.config import yaml_io

    try:
        return yaml_io.load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        tab = "'\\t'" in (error.problem or "")
        remedy = "YAML is indented with spaces, never with tabs." if tab else ""
        raise _syntax(path, text, line, column, error.problem or "not YAML", remedy) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise _syntax(path, text, line, column, error.reason) from None


def _parse_json(path: Path, text: str) -> Any:
    if not text.strip():
        return None
    try:
        return load_jsonc(text)
    except json.JSONDecodeError as error:
        message = error.msg[0].lower() + error.msg[1:]
        raise _syntax(path, text, error.lineno, error.colno, message) from None


_JSONC_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|[{}\[\],:]|[^\s"/{}\[\],:]+', re.DOTALL)


def load_jsonc(text: str) -> Any:
    """Return the value of JSON with comments and trailing commas. Raises `json.JSONDecodeError` with the position.

    A key that an object has twice is an error.
    """
    plain = _standard_json(text)
    try:
        return json.loads(plain)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's int() refuses numbers of thousands of digits
        raise json.JSONDecodeError("a number has thousands of digits", text, 0) from None


def _standard_json(text: str) -> str:
    """Return `text` as standard JSON: comments and trailing commas are replaced by blanks, to keep positions."""
    pieces = list(text)
    keys: list[set[str] | None] = []  # one entry per open bracket; None for a list
    before, position = "", 0
    comma: int | None = None
    for match in _JSONC_TOKEN.finditer(text):
        symbol, start = match.group(), match.start()
        if symbol.startswith("/"):
            pieces[start : match.end()] = re.sub(r"[^\n]", " ", symbol)
            continue
        if symbol in "}]" and comma is not None:
            pieces[comma] = " "
        comma = start if symbol == "," and before not in "{[,:" else None
        if symbol == ":" and before.startswith('"') and keys and keys[-1] is not None:
            if before in keys[-1]:
                raise json.JSONDecodeError(f"the key {before} is repeated", text, position)
            keys[-1].add(before)
        if symbol in "{[":
            if len(keys) >= MAX_DEPTH:
                raise json.JSONDecodeError(f"more than {MAX_DEPTH} brackets are open here", text, start)
            keys.append(set() if symbol == "{" else None)
        elif symbol in "}]" and keys:
            keys.pop()
        before, position = symbol, start
    return "".join(pieces)


def _parse_toml(path: Path, text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, where = str(error).partition(" (at ")
        numbers = [int(number) for number in re.findall(r"\d+", where)]
        last = text.count("\n") + 1
        line, column = numbers if len(numbers) == 2 else (last, len(text.splitlines()[-1]) + 1)
        raise _syntax(path, text, line, column, message[0].lower() + message[1:]) from None


def _syntax(path: Path, text: str, line: int, column: int, message: str, remedy: str = "") -> ConfigError:
    """Return a syntax error with its line quoted and a caret under the position."""
    lines = text.splitlines()
    quoted = lines[line - 1] if 0 < line <= len(lines) else ""
    start = max(0, column - 60)  # of a long line, quote only the part around the position
    excerpt = quoted[start : start + 100].replace("\t", " ")
    gutter = " " * len(str(line))
    picture = f"{line} | {excerpt}\n      {gutter} | {' ' * (column - 1 - start)}^"
    return ConfigError(Problem(f"{path}:{line}:{column}", message, f"{remedy}\n      {picture}" if remedy else picture))


# Files of other programs: their content is not trusted.


def parse_json(text: str | bytes, *, allow_surrogates: bool = False) -> Any:
    """Return the value of JSON text. Raises `ValueError` for all that is not valid, and for what Python's parser
    misses.

    That raises a `RecursionError` for deep nesting, keeps the last of two values for one key, and accepts lone
    surrogates, which cannot be written to files and terminals; these are allowed with `allow_surrogates`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep") from None
    if depth_of(value) > MAX_DEPTH:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    # Lone surrogates can only be written as `\\u…`.
    escaped = "\\u" in text if isinstance(text, str) else b"\\u" in text
    if not allow_surrogates and escaped and (wrong := lone_surrogate(json.dumps(value, ensure_ascii=False))):
        raise ValueError(wrong)
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is repeated in an object")
    return mapping


def read_json_object(path: Path, error: Callable[[str], PlaitError], remedy: str = "copy it again") -> dict[str, Any]:
    """Return the JSON object in a file; for anything else raise an `error` that names the file."""
    try:
        value = parse_json(path.read_bytes())
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None
    except ValueError as reason:
        raise error(f"{path} is not JSON ({reason}); {remedy}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, expected a JSON object; {remedy}")
    return value


def read_lines(path: Path, error: Callable[[str], PlaitError]) -> list[str]:
    """Return the lines of a text file; raise an `error` that names the file where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not UTF-8 text (byte {reason.start}): {as_utf8(reason.object)}") from None


def read_name(path: Path, error: Callable[[str], PlaitError]) -> str:
    """Return the name in a file such as `latest`: of a file or folder beside it, or below."""
    name = "\n".join(read_lines(path, error)).strip()
    if not name or not name.isprintable() or not is_below(name):
        raise error(f"{path} contains {name[:80]!r}, expected the name of a file or folder beside it")
    return name


def is_below(name: str) -> bool:
    """Whether a relative path stays within its folder. Links are not followed."""
    names = PurePath(name).parts
    short = len(name) <= 1000 and all(len(component.encode(errors="replace")) <= 255 for component in names)
    return bool(names) and short and "\0" not in name and not PurePath(name).is_absolute() and ".." not in names


def weight_map(index: Path, error: Callable[[str], PlaitError]) -> dict[str, str]:
    """Return tensor name → file of a `model.safetensors.index.json`."""
    files = read_json_object(index, error).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise error(f"{index} has no `weight_map` from names to files; copy it again")
    if wrong := [file for file in files.values() if not is_below(file)]:
        raise error(f"{index} names the file {wrong[0]!r}, which is not in its folder; get the model elsewhere")
    return files


# Overrides on a command line, such as `strategy.zero=3`.


_FORM = "Write `section.key=value`, for example `strategy.zero=3`, `optim.betas=[0.9, 0.95]` or `hooks.0.decay=0.9`."


def split_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split an override into its keys and its value, read as YAML.

    A value that starts with a bracket or a quote is YAML; any other is one plain scalar, so that `data.path=*.txt` and
    `x=a: b` are text.
    """
    path, equals, value = text.partition("=")
    path, value = path.strip(), value.strip()
    if not equals:
        raise _malformed(text, "it has no `=`")
    if path.startswith("-"):
        raise _malformed(text, "it starts with a dash", f"Write `{text.lstrip('-')}`, without dashes.")
    keys = tuple(path.split("."))
    if not all(key and key == key.strip() for key in keys):
        raise _malformed(text, "a key before the `=` is empty" if path else "unknown key before the `=`")
    if not value:
        raise _malformed(text, "missing value", f"Write `{path}=null` for none, `{path}=''` for empty text.")
    return keys, _value(text, value)


def _value(text: str, value: str) -> Any:
    import yaml

    from plait.config import yaml_io

    try:
        parsed = yaml_io.load(value) if value[0] in "[{\"'" else yaml_io.scalar(value)
        if wrong := lone_surrogate("\n".join(texts_in(parsed))):
            raise _malformed(ascii(text)[1:-1], f"its value has {wrong}", "Write the character itself.")
        return parsed
    except RecursionError:
        raise _malformed(
            text, "its value is nested too deeply to be read", "Write a value with fewer levels."
        ) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "not YAML"
        remedy = 'Close every bracket, and quote text that has other signs than letters: `names=["layers.*"]`.'
        raise _malformed(text, f"its value cannot be read ({reason})", remedy) from None


def _malformed(text: str, reason: str, remedy: str = _FORM) -> ConfigError:
    return ConfigError(Problem(text, f"not an override: {reason}", remedy, "override"))
