"""Texts in other encodings than UTF-8: which one it may be, and how it becomes UTF-8."""

from __future__ import annotations

_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""How a text in UTF-16 begins."""


def as_utf8(data: bytes) -> str:
    """What to do with bytes that are not UTF-8, as a part of a sentence. GBK and UTF-16 are recognised."""
    if data.startswith(_MARKS):
        return _recoded("UTF-16", "UTF-16")
    try:
        data.decode("gb18030")  # GBK, and all that it left out
    except UnicodeDecodeError:
        return "save it as UTF-8"
    return _recoded("GBK", "GB18030")


def _recoded(name: str, word: str) -> str:
    return f"save it as UTF-8; if it is {name}, `iconv -f {word} -t UTF-8 OLD > NEW` does that"


def half_character(text: str) -> str | None:
    """What is wrong with a text that no file can hold: JSON and a command line may bring half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ord(text[error.start])
        byte = " (or a byte that is no UTF-8)" if 0xDC80 <= found <= 0xDCFF else ""  # Python's way to keep such a byte
        return f"half of a character{byte}: \\u{found:04x} without what belongs to it"
    return None
