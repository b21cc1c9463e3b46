"""The YAML that run descriptions are written in: safe, without YAML 1.1's traps, with every key once.

Imported only where YAML is read or written, so that nothing else pays for PyYAML.

`3e-4` and `1e5` are numbers here (YAML 1.1 takes them for text); dates, sexagesimal and leading-zero octal
numbers are text (YAML 1.1 makes `2024-01-01` a date, `1:30` ninety and `012` ten).
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
    """PyYAML's table of implicit types, with our numbers in the place of its own."""
    table = {
        first: [(tag, pattern) for tag, pattern in rules if tag.rpartition(":")[2] not in _REDEFINED]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    text = ("tag:yaml.org,2002:str", _LEADING_ZERO)
    for first in "-+.0123456789":
        table[first] = [text, *_NUMBERS.items(), *table.get(first, [])]
    return table


MAX_ALIASED = 10_000
"""Values that aliases (`*name`) may add to those that are written: more than any description has."""


class YamlLoader(yaml.SafeLoader):
    """Reads Plait's YAML."""

    yaml_implicit_resolvers = _resolvers()

    def construct_document(self, node: Any) -> Any:
        """Refuse aliases of aliases of aliases: a few lines of them stand for more values than fit into memory."""
        sizes: dict[int, int] = {}
        if _size(node, sizes) > len(sizes) + MAX_ALIASED:
            message = f"its aliases stand for more than {MAX_ALIASED} values"
            raise ConstructorError(None, None, message, node.start_mark)
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value that is not of the type that its tag says, `!!int x`, is an error with a place as any other."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):  # PyYAML lets through whatever int() and its own tables raise
            tag = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"this cannot be read as {tag}", node.start_mark) from None


def _size(node: Any, sizes: dict[int, int]) -> int:
    """How many values a node stands for, with every alias written out; each node is looked at once."""
    if id(node) not in sizes:
        sizes[id(node)] = 1  # of a node within itself, which is refused where it is built
        inner = [child for pair in node.value for child in pair] if isinstance(node, MappingNode) else node.value
        inside = inner if isinstance(node, (MappingNode, SequenceNode)) else []
        sizes[id(node)] += sum(_size(child, sizes) for child in inside)
    return sizes[id(node)]


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back as it was: text that looks like one of our numbers is quoted."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Two equal lists stay two lists."""
        return True


def _represent_text(dumper: Dumper, text: str) -> ScalarNode:
    # PyYAML writes these line breaks as they are, and reads them back as plain ones; in double quotes it escapes them.
    style = '"' if any(sign in text for sign in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _mapping(loader: YamlLoader, node: MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        name = key.value if isinstance(key, ScalarNode) else None
        if name is not None and name in seen and name != "<<":
            raise ConstructorError(None, None, f"the key `{name}` stands here a second time", key.start_mark)
        seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _float(loader: YamlLoader, node: ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _sequence(loader: YamlLoader, node: SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


# Built at once rather than in PyYAML's two steps: a node that contains itself is then an error.
YamlLoader.add_constructor("tag:yaml.org,2002:map", _mapping)
YamlLoader.add_constructor("tag:yaml.org,2002:seq", _sequence)
YamlLoader.add_constructor("tag:yaml.org,2002:float", _float)
Dumper.add_representer(str, _represent_text)


def load(text: str) -> Any:
    """The one document in `text`."""
    return yaml.load(text, YamlLoader)  # noqa: S506  # ours is made from SafeLoader


def scalar(text: str) -> Any:
    """`text` as an unquoted YAML scalar, whatever characters it has: `3e-4` is a number, `*.txt` is text."""
    loader = YamlLoader("")
    tag = str(loader.resolve(ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]
    plain = tag.rpartition(":")[2] in ("null", "bool", "int", "float")
    return loader.construct_object(ScalarNode(tag, text)) if plain else text


def dump(data: Any) -> str:
    """`data` as YAML, keys in their own order."""
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))
