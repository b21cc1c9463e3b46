"""Reads and writes YAML: executes no tags, avoids the surprises of YAML 1.1 below, and refuses repeated keys.

Imported only where YAML is read or written, as PyYAML is slow to import.

`3e-4` and `1e5` are numbers here (text in YAML 1.1); dates, sexagesimal and leading-zero octal numbers are text (in
YAML 1.1 `2024-01-01` is a date, `1:30` is 90 and `012` is 10).
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

_REDEFINED = {"float", "int", "timestamp"}
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+$")


def _resolvers() -> dict[Any, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's table of patterns for plain values, with our own patterns for numbers."""
    table = {
        first: [(tag, pattern) for tag, pattern in rules if tag.rpartition(":")[2] not in _REDEFINED]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    text = ("tag:yaml.org,2002:str", _LEADING_ZERO)
    for first in "-+.0123456789":
        table[first] = [text, *_NUMBERS.items(), *table.get(first, [])]
    return table


MAX_ALIASED = 10_000
"""The most values that aliases (`*name`) may add: more than any description has."""


class YamlLoader(yaml.SafeLoader):
    """Reads Plait's YAML."""

    yaml_implicit_resolvers = _resolvers()

    def construct_document(self, node: Any) -> Any:
        """Refuse nested aliases whose expansion would not fit into memory."""
        sizes: dict[int, int] = {}
        if _size(node, sizes) > len(sizes) + MAX_ALIASED:
            message = f"its aliases expand to more than {MAX_ALIASED} values"
            raise ConstructorError(None, None, message, node.start_mark)
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Refuse a value that is not of its tag's type, such as `!!int x`, with its position."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):  # PyYAML does not catch these
            tag = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"this cannot be read as {tag}", node.start_mark) from None


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Return how many values a node has if all aliases are expanded. Each node is visited only once."""
    if id(node) not in sizes:
        sizes[id(node)] = 1  # ends the recursion if a node contains itself; building it raises an error
        inner = [child for pair in node.value for child in pair] if isinstance(node, MappingNode) else node.value
        inside = inner if isinstance(node, (MappingNode, SequenceNode)) else []
        sizes[id(node)] += sum(_size(child, sizes) for child in inside)
    return sizes[id(node)]


class Dumper(yaml.SafeDumper):
    """Writes YAML that `YamlLoader` reads back unchanged: text that looks like one of our numbers is quoted."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write no aliases."""
        return True


def _represent_text(dumper: Dumper, text: str) -> ScalarNode:
    # PyYAML writes these line breaks unescaped and reads them as `\n`. In double quotes it escapes them.
    style = '"' if any(sign in text for sign in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _mapping(loader: YamlLoader, node: MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        name = key.value if isinstance(key, ScalarNode) else None
        if name is not None and name in seen and name != "<<":
            raise ConstructorError(None, None, f"the key `{name}` is repeated", key.start_mark)
        seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _float(loader: YamlLoader, node: ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _sequence(loader: YamlLoader, node: SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


# PyYAML first makes an empty container, then fills it. Here it is built in one step, so that a node that contains
# itself is an error.
YamlLoader.add_constructor("tag:yaml.org,2002:map", _mapping)
YamlLoader.add_constructor("tag:yaml.org,2002:seq", _sequence)
YamlLoader.add_constructor("tag:yaml.org,2002:float", _float)
Dumper.add_representer(str, _represent_text)


def load(text: str) -> Any:
    """Return the document in `text`."""
    return yaml.load(text, YamlLoader)  # noqa: S506  # a subclass of SafeLoader


def scalar(text: str) -> Any:
    """Return `text` as an unquoted YAML scalar, whatever characters it has: `3e-4` is a number, `*.txt` is text."""
    loader = YamlLoader("")
    tag = str(loader.resolve(ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]
    plain = tag.rpartition(":")[2] in ("null", "bool", "int", "float")
    return loader.construct_object(ScalarNode(tag, text)) if plain else text


def dump(data: Any) -> str:
    """Return `data` as YAML, with keys in their order."""
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))
