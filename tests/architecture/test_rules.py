"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

SOURCES = sorted((Path(__file__).parents[2] / "src" / "plait").rglob("*.py"))
MAY_READ_ENVIRONMENT = {"launch", "distributed", "cli", "testing"}
READ_DATA_OF_OTHERS = {
    "datasets", "h11", "jinja2", "numpy", "pillow", "pyarrow", "pyyaml", "safetensors", "starlette", "tokenizers",
    "torch", "transformers", "uvicorn",
}  # fmt: skip
"""Packages to which Plait hands files and requests that somebody else may have written."""


def room(path: Path) -> str:
    return path.relative_to(SOURCES[0].parent).parts[0]


def test_only_who_starts_ranks_or_is_one_reads_the_environment() -> None:
    offenders = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        if room(path) not in MAY_READ_ENVIRONMENT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert offenders == []


def test_text_files_are_utf8_whatever_the_locale_says() -> None:
    """`read_text`, `write_text` and `open` name their encoding; a mode with `b` has none."""
    offenders = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            named = any(word.arg == "encoding" for word in node.keywords)
            mode = next((a.value for a in node.args[:1] if isinstance(a, ast.Constant)), "")
            places = {"read_text": 1, "write_text": 2}.get(node.func.attr)
            bare = places is not None and len(node.args) < places
            opened = node.func.attr == "open" and isinstance(mode, str) and mode in {"r", "w", "a", "x", "a+", "r+"}
            if (bare or opened) and not named:
                offenders.append(f"{path.name}:{node.lineno}")
    assert offenders == []


def requirements(project: dict[str, Any], extra: str | None = None) -> set[str]:
    """Names of the packages that `pip install plait[extra]` asks for itself."""
    names: set[str] = set()
    for requirement in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        name, *extras = re.findall(r"[\w.-]+", re.split(r"[<>=;]", requirement)[0])
        names |= {name} if name != "plait" else set().union(*(requirements(project, each) for each in extras))
    return {name.lower().replace("_", "-") for name in names}


def test_what_make_installs_has_one_version_each() -> None:
    root = SOURCES[0].parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = [re.fullmatch(r"([\w.-]+)==\d[\w.]*", line) for line in lines]
    assert all(pins), "a constraint is one version"
    pinned = {pin[1].lower().replace("_", "-") for pin in pins if pin}
    assert pinned == requirements(project) | requirements(project, "dev")


def test_packages_that_read_data_of_others_have_the_floors_of_the_table() -> None:
    """docs/versions.md says of each floor which known faults it is above."""
    root = SOURCES[0].parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    floors = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"([\w-]+)>=([\d.]+)", line))}
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([\w.]+)$", (root / "constraints.txt").read_text().lower()))
    for page in ("docs/versions.md", "docs/zh-CN/versions.md"):
        part = (root / page).read_text(encoding="utf-8").partition("<!-- floors -->")[2].partition("<!-- end")[0]
        table = dict(re.findall(r"(?m)^\| ([\w-]+) \| ([\d.]+) \|", part))
        assert table == {name: floors.get(name) for name in READ_DATA_OF_OTHERS}
        assert [name for name in pins.keys() & table.keys() if _numbers(pins[name]) < _numbers(table[name])] == []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def test_every_exception_to_a_rule_of_security_has_its_reason() -> None:
    silenced = [line for path in SOURCES for line in path.read_text().splitlines() if re.search(r"noqa:.*\bS\d", line)]
    assert silenced
    assert [line for line in silenced if not re.search(r"# noqa: [A-Z0-9, ]+  # \w", line)] == []


def test_programs_that_tests_need_are_named_by_the_mark_alone() -> None:
    """`real` fails where `.ci/run` has installed everything, where a `skipif` of one's own would skip for ever."""
    tests = SOURCES[0].parents[2] / "tests"
    asking = {"real.py", "matrix.py", "multi/hosts.py", "multi/slurm.py"}  # what stands behind the mark
    machine = {
        "unit/checkpoint/test_checkpoint_files.py",
        "unit/distributed/test_compiling.py",
    }  # mount, and a compiler
    places = {
        path.relative_to(tests).as_posix()
        for path in tests.rglob("*.py")
        if any(
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith("which")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }
    assert places == asking | machine


def test_tests_with_the_mark_skip_by_it_alone() -> None:
    """`pytest.skip` would hide that a program does not work where it must: see `tests.real.unavailable`."""
    tests = SOURCES[0].parents[2] / "tests"
    offenders, marked = [], []
    for path in sorted(tests.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        names = {ast.unparse(node.func) for node in calls}
        if "pytest.mark.real" in names:
            marked.append(path.name)
            offenders += [path.name for name in names if name in {"pytest.skip", "skip", "pytest.importorskip"}]
    assert marked
    assert offenders == []


def test_an_extra_that_a_message_names_is_there() -> None:
    project = tomllib.loads((SOURCES[0].parents[2] / "pyproject.toml").read_text())
    named = {
        node.args[2].value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "MissingExtraError"
        if isinstance(node.args[2], ast.Constant)
    }
    assert named
    assert named <= project["project"]["optional-dependencies"].keys()


def test_a_note_that_is_cited_is_written_somewhere() -> None:
    texts = [path.read_text() for path in SOURCES]
    page = (SOURCES[0].parents[2] / "docs" / "architecture.md").read_text()
    cited = {
        note
        for text in (*texts, page)
        for note in re.findall(r"\[Note: ([^\]…]+)\]", re.sub(r"\s*\n\s*(?:# )?", " ", text))
    }
    written = {note for text in texts for note in re.findall(r'(?m)^\s*(?:# |""")?\[Note: ([^\]]+)\]', text)}
    assert cited - written == set()


def test_no_module_changes_a_global() -> None:
    offenders = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert offenders == []
