"""Names in the source are the field's, and say one thing each."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "plait"
PRIVATE_WORDS = frozenset(
    [
        "adopt",
        "aside",
        "asking",
        "beside",
        "chance",
        "crew",
        "desk",
        "draft",
        "drafts",
        "each",
        "entrances",
        "evidence",
        "expectation",
        "fanout",
        "forecast",
        "foresight",
        "found",
        "here",
        "imported",
        "in_a_child",
        "judge",
        "ladder",
        "lane",
        "lanes",
        "late",
        "make_room",
        "moving",
        "news",
        "outbox",
        "own",
        "part",
        "parts",
        "passage",
        "place",
        "places",
        "pretend",
        "roller",
        "room",
        "rooms",
        "say",
        "seats",
        "shelf",
        "skinny",
        "speaker",
        "starving",
        "suspects",
        "tell",
        "tiles",
        "told",
        "verdict",
        "viewless",
        "visit",
        "wholes",
        "within",
        "witness",
        "word",
        "words",
        "worth",
    ]
)
"""Words for which engineers have a better one: what the thing is (`path`, `param`, `stage`, `buffer`, `matches`, …)."""
PUBLIC = {
    ("__init__.py", "part"): "plait.part, for parts of one's own",
    ("__init__.py", "Tiles"): "the class of the section strategy.tiles",
    ("config/strategy.py", "tiles"): "the key strategy.tiles",
    ("cli/doctor.py", "verdict"): "a key of `plait doctor --json`",
    ("launch/probe.py", "words"): "a key of what hosts send each other",
    ("prove/certificate.py", "verdict"): "Certificate.verdict, PASS or FAIL of a proof",
}
"""Names that users write, with what they are."""
MOST_OF_ONE_NAME = 3


def names_defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Functions, classes, arguments, variables, attributes and names of imports, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


def private_words(source: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in names_defined(ast.parse(source)) if name.strip("_").lower() in PRIVATE_WORDS]


def files() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def test_names_are_those_of_the_field() -> None:
    wrong = [
        f"{file}:{line}: {name}"
        for file, source in files().items()
        for name, line in private_words(source)
        if (file, name) not in PUBLIC
    ]
    assert wrong == []


def test_every_exception_is_needed() -> None:
    sources = files()
    assert [key for key in PUBLIC if key[1] not in dict(private_words(sources[key[0]]))] == []


def test_the_search_sees_every_way_to_define_a_name() -> None:
    source = """
def found(each, *, part=1): ...
class Room: self._place = 1
for told in x: here = [own for own in x]
import a as lanes
try: ...
except E as late: ...
match x:
    case [wholes, *seats]: ...
"""
    names = {name.strip("_").lower() for name, _ in private_words(source)}
    assert names == {
        "found",
        "each",
        "part",
        "room",
        "place",
        "told",
        "here",
        "own",
        "lanes",
        "late",
        "wholes",
        "seats",
    }


def test_a_class_name_exists_once() -> None:
    classes = Counter(
        node.name
        for source in files().values()
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_few_files_share_a_name() -> None:
    names = Counter(Path(file).name for file in files())
    del names["__init__.py"]
    assert [name for name, count in names.items() if count > MOST_OF_ONE_NAME] == []
