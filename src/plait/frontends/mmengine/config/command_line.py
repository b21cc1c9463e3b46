"""`--cfg-options key=value …`: changes of a configuration, from the command line."""

from __future__ import annotations

import ast
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from typing import Any


class DictAction(Action):
    """For argparse: gathers `key=value` pairs in a dict. `a=1,2` and `a=[1,2]` are lists, `a="(1,2)"` a tuple."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        """Take the pairs of one flag; those of several flags add up."""
        found = dict(getattr(namespace, self.dest, None) or {})
        for pair in [values] if isinstance(values, str) else values:
            key, equals, text = pair.partition("=")
            if not equals or not key:
                raise ArgumentError(self, f"{pair!r} is no `key=value`")
            found[key] = value_of(text)
        setattr(namespace, self.dest, found)


def value_of(text: str) -> Any:
    """A number, truth value, None, list or tuple where the text is one; the text otherwise."""
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        found = ast.literal_eval(text)
        return list(found) if isinstance(found, tuple) and not text.startswith("(") else found
    except (ValueError, SyntaxError):
        pass
    for opening, closing, kind in (("[", "]", list), ("(", ")", tuple)):
        if text.startswith(opening) and text.endswith(closing):
            return kind(value_of(part) for part in _parts(text[1:-1]))
    parts = _parts(text)
    return [value_of(part) for part in parts] if len(parts) > 1 else text


def _parts(text: str) -> list[str]:
    """Cut at commas that are in no bracket."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[(") - (sign in "])")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part for part in parts if part.strip()]
