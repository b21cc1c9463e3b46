"""The documentation says what the code does, as far as a test can tell."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from plait.config import parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
ENGLISH_ONLY = {"architecture.md", "models.md"}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_reference", DOCS / "generate_config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["configuration.md", "zh-CN/configuration.md"])
def test_the_configuration_reference_is_the_one_that_the_schema_gives(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == generator().with_reference(text), "run python docs/generate_config_reference.py"


def test_every_guide_is_there_in_both_languages() -> None:
    english = {path.name for path in DOCS.glob("*.md")} - ENGLISH_ONLY
    assert english == {path.name for path in (DOCS / "zh-CN").glob("*.md")}


def named_keys(page: Path) -> set[str]:
    """The keys, commands and classes that a page names between backquotes, outside blocks of code."""
    text = re.sub(r"^```\w*\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([A-Za-z0-9_.=/-]+)`", text))


ENGLISH_IS_NEWER = "英文页面较新"
"""A Chinese page that says this at its head (before its first section) need not name the keys of the English one."""


IN_TWO_LANGUAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.glob("*.md")) if page.name not in ENGLISH_ONLY)]


@pytest.mark.parametrize("english", IN_TWO_LANGUAGES, ids=lambda path: path.name)
def test_both_languages_name_the_same_keys(english: Path) -> None:
    chinese = ROOT / "README.zh-CN.md" if english.parent == ROOT else DOCS / "zh-CN" / english.name
    head = chinese.read_text(encoding="utf-8").partition("\n## ")[0]
    if ENGLISH_IS_NEWER not in head:
        assert named_keys(chinese) == named_keys(english)


HAN = r"[\u4e00-\u9fff]"
TOO_NEAR = rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9`]{HAN}"
HALF_WIDTH = rf'{HAN} ?[,;:!?()"]|[,;:!?()"] ?{HAN}'


@pytest.mark.parametrize(
    "page", [ROOT / "README.zh-CN.md", *sorted((DOCS / "zh-CN").glob("*.md"))], ids=lambda p: p.name
)
def test_chinese_text_has_its_own_punctuation_and_a_space_beside_latin_words(page: Path) -> None:
    text = re.sub(r"^```\w*\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`x`", text))
    assert [text[m.start() - 9 : m.end() + 9] for m in re.finditer(f"{TOO_NEAR}|{HALF_WIDTH}", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """What a link into `page` may name behind the `#`: its headings, as they are turned into addresses."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_a_heading_find_it(page: Path) -> None:
    found = re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [((page.parent / file) if file else page, anchor) for file, anchor in found]
    assert [(str(target), anchor) for target, anchor in targets if anchor not in anchors(target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_run_descriptions_shown_on_a_page_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text("{}")  # what a page may name
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        file = tmp_path / "run.yaml"
        file.write_text(block, encoding="utf-8")
        parse(file)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_run_descriptions_parse(path: Path) -> None:
    assert parse(path).config.model is not None


def test_files_that_pages_and_comments_name_are_there() -> None:
    """`engine/prepare.py` is the end of a path, `prepare.py` a name that some file has."""
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths = [path.relative_to(ROOT).as_posix() for path in files]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    missing = []
    for path in (*files, *pages):
        for name in re.findall(r"`((?:[\w.-]+/)*\w+\.py)`", path.read_text(encoding="utf-8")):
            if not any(f"/{each}".endswith(f"/{name}") for each in paths):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_the_map_of_the_source_has_its_folders_and_layers() -> None:
    tree, order = re.findall(r"```\n(.*?)```", (DOCS / "architecture.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    folders = {path.parent.name for path in (ROOT / "src" / "plait").glob("*/__init__.py")}
    assert set(re.findall(r"(?m)^  (\w+)/ ", tree)) == folders
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"][1:]  # `__main__` is above all
    assert [" | ".join(layer.split(" | ")) for layer in re.split(r"\s*>\s*", order.strip())] == layers
