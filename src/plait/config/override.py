"""Overrides: `strategy.zero=3`, as they stand on a command line."""

from __future__ import annotations

from typing import Any

from plait.config.encoding import half_character
from plait.config.read import texts_in
from plait.errors import ConfigError, Problem

_FORM = "Write `section.key=value`, for example `strategy.zero=3`, `optim.betas=[0.9, 0.95]` or `hooks.0.decay=0.9`."


def split_override(text: str) -> tuple[tuple[str, ...], Any]:
    """The keys on the way to a value, and the value, read as YAML.

    A value that opens with a bracket or a quote is YAML to its end; any other is one plain scalar, so that
    `data.path=*.txt` and `x=a: b` are the text they look like.
    """
    path, equals, value = text.partition("=")
    path, value = path.strip(), value.strip()
    if not equals:
        raise _malformed(text, "there is no `=` in it")
    if path.startswith("-"):
        raise _malformed(text, "it starts with a dash", f"Write `{text.lstrip('-')}`, without dashes.")
    keys = tuple(path.split("."))
    if not all(key and key == key.strip() for key in keys):
        raise _malformed(text, "a key before the `=` is empty" if path else "there is no key before the `=`")
    if not value:
        raise _malformed(text, "there is no value", f"Write `{path}=null` for none, `{path}=''` for empty text.")
    return keys, _value(text, value)


def _value(text: str, value: str) -> Any:
    import yaml

    from plait.config import dialect

    try:
        found = dialect.load(value) if value[0] in "[{\"'" else dialect.scalar(value)
        if wrong := half_character("\n".join(texts_in(found))):
            raise _malformed(ascii(text)[1:-1], f"its value has {wrong}", "Write the character itself.")
        return found
    except RecursionError:
        raise _malformed(
            text, "its value is nested too deeply to be read", "Nothing that is set goes so deep."
        ) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "not YAML"
        remedy = 'Close every bracket, and quote text that has other signs than letters: `names=["layers.*"]`.'
        raise _malformed(text, f"its value cannot be read ({reason})", remedy) from None


def _malformed(text: str, reason: str, remedy: str = _FORM) -> ConfigError:
    return ConfigError(Problem(text, f"not an override: {reason}", remedy, "override"))
