"""`make matrix`: a part of the tests with each release of torch, transformers and Python that Plait promises.

Each row has a virtual environment of its own, in `.matrix/`, which is made, used and removed: with the CUDA builds of
torch it takes 5 GB, of which two never exist at the same time. The releases of other packages are those of
`constraints.txt`, but in the row that installs Plait as a user without constraints would.

    python tests/matrix.py                    all rows; the results are kept in .matrix/results.json
    python tests/matrix.py "torch 2.11" …     these rows; those of the others stay
    python tests/matrix.py --table            writes what was found into docs/versions.md and docs/zh-CN/versions.md

What a cell says: how many tests passed; how many failed; how many were refused by name (`UnsupportedVersionError`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".matrix"
RESULTS = WORK / "results.json"
PAGES = (ROOT / "docs" / "versions.md", ROOT / "docs" / "zh-CN" / "versions.md")

_PARITY = "tests/multi/test_parity.py"
_LAYOUT = "tests/multi/test_parity_layouts.py"
_STAGES = "tests/multi/test_pipeline_parity.py"
_TECHNIQUES = "tests/multi/test_parity_techniques.py"
COLUMNS: Mapping[str, Sequence[str]] = {
    "data parallel": (
        *(
            f"{_PARITY}::test_two_ranks_equal_one_process[{word}]"
            for word in (
                "ddp-fp32-4",
                "zero1-fp32-4",
                "zero2-fp16-1",
                "zero3-fp32-4",
                "zero3-bf16-4",
                "fsdp-prefetch-fp32-4",
            )
        ),
        f"{_PARITY}::test_four_ranks_equal_one_process[hsdp-fp32-4]",
        "tests/multi/test_manual.py::test_sixteen_bits_train_the_fp32_weights_behind_them",
        "tests/multi/test_offload_parity.py::test_frozen_and_unused_parameters_are_as_in_the_resident_run",
    ),
    "layouts": (
        *(
            f"{_LAYOUT}::test_a_layout_equals_one_process[{word}]"
            for word in ("tp2 sp", "cp2 ring", "cp2 ulysses", "pp2", "dp2 tp2 sp zero3")
        ),
        f"{_LAYOUT}::test_experts_that_are_spread_equal_one_process[ep2 zero3]",
        f"{_STAGES}::test_sharded_stages[interleaved_zb-whole]",
        f"{_STAGES}::test_sharded_stages[dualpipev-resharded]",
    ),
    "checkpoint": ("tests/multi/test_checkpoint_pairs.py",),
    "plan": (
        "tests/unit/distributed/test_pretend.py",
        "tests/unit/distributed/test_torch_internals.py",
        "tests/unit/plan/test_plan.py::test_a_few_layers_and_micro_batches_give_the_same_account_as_all[compiled]",
        "tests/unit/plan/test_plan.py::test_a_few_layers_and_micro_batches_give_the_same_account_as_all[zero3]",
    ),
    "compile": (
        f"{_TECHNIQUES}::test_compiled_blocks_under_sharding",
        "tests/unit/distributed/test_compiling.py",
    ),
    "hf models": (
        "tests/unit/models/test_hf_models.py",
        *(
            f"{_LAYOUT}::test_unedited_transformers_models_equal_one_process[{word}]"
            for word in ("llama-tp", "llama-pp", "llama-cp", "mixtral-ep")
        ),
        f"{_STAGES}::test_sharded_stages_of_a_transformers_model[zbv]",
    ),
}


@dataclass(frozen=True)
class Row:
    """What is installed."""

    name: str
    python: str = "3.11"
    pins: Mapping[str, str] = field(default_factory=dict)
    """In place of those of `constraints.txt`; of torch `2.13.0`, so that another build of it will do as well."""
    constrained: bool = True


ROWS = (
    *(
        Row(f"torch {release}", pins={"torch": f"=={release}.*"})
        for release in ("2.11", "2.12", "2.13", "2.14", "2.15")
    ),
    # A release of transformers says which tokenizers it takes.
    *(
        Row(f"transformers {release}", pins={"transformers": f"=={release}.*", "tokenizers": ""})
        for release in ("5.0", "5.4", "5.8", "5.12", "5.16", "5.20")
    ),
    Row("Python 3.12", python="3.12"),
    Row("Python 3.13", python="3.13"),
    Row("pip install plait", constrained=False),
)


def interpreter(python: str) -> str | None:
    """An interpreter that works, from the path or from pyenv."""
    places = [shutil.which(f"python{python}"), *map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))]
    for place in filter(None, places):
        said = subprocess.run([place, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
        if said.stdout.startswith(f"{python}."):
            return place
    return None


def install(row: Row, python: str, folder: Path) -> None:
    """Make the environment of a row."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
    pip.append("--disable-pip-version-check")
    tests = ["pytest", "pytest-timeout", "hypothesis"]
    if not row.constrained:
        subprocess.run([*pip, f"{ROOT}[hf]", *tests], check=True)
        return
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if re.split("[=<>]", line)[0] not in row.pins]
    limits = WORK / f"{folder.name}.txt"
    limits.write_text("\n".join([*kept, *(f"{name}{pin}" for name, pin in row.pins.items())]), encoding="utf-8")
    subprocess.run([*pip, "-c", str(limits), f"{ROOT}[hf]", *tests], check=True)


def versions(python: Path) -> dict[str, str]:
    """What is installed."""
    code = (
        "import json, platform; from importlib.metadata import version as v; "
        "print(json.dumps({'Python': platform.python_version(), **{n: v(n) for n in ('torch', 'transformers')}}))"
    )
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


def judge(python: Path, tests: Sequence[str], report: Path) -> dict[str, int]:
    """Run tests, and count how they ended. Ends this program where pytest did not run them all: a test that is not
    there any more is no test that passed.
    """
    report.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "600",
        f"--junitxml={report}",
        *tests,
    ]
    log = report.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode not in (0, 1) or not report.exists():  # 1: some failed
        raise SystemExit(f"pytest did not run: {log.read_text(encoding='utf-8')[-2000:]}")
    counts = {"passed": 0, "failed": 0, "refused": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [each for each in case if each.tag in ("failure", "error")]
        refused = any("UnsupportedVersionError" in (each.text or "") for each in wrong)
        skipped = case.find("skipped") is not None
        counts["refused" if refused else "failed" if wrong else "skipped" if skipped else "passed"] += 1
    if not sum(counts.values()):
        raise SystemExit(f"no test ran of {' '.join(tests)}")
    return counts


def run(row: Row, *, keep: bool) -> dict[str, Any]:
    """One row: install, test, remove."""
    folder = WORK / row.name.replace(" ", "-")
    python = interpreter(row.python)
    if python is None:
        return {"not run": f"no Python {row.python} on this machine"}
    try:
        ready = folder / "ready"
        if not keep or not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            install(row, python, folder)
            ready.touch()
        own = folder / "bin" / "python"
        found: dict[str, Any] = {"versions": versions(own), "columns": {}}
        print(row.name, found["versions"], flush=True)
        for column, tests in COLUMNS.items():
            found["columns"][column] = judge(own, tests, WORK / f"{folder.name}-{column.replace(' ', '-')}.xml")
            print(f"  {column}: {found['columns'][column]}", flush=True)
        return found
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def table(results: Mapping[str, Any], words: Mapping[str, str], before: str = "") -> str:
    """The rows in Markdown; those without a result stay as they are in the table `before`, if it has these columns."""
    heads = [words["row"], "Python", "torch", "transformers", *(words.get(each, each) for each in COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    old = before.splitlines()
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in old} if old[:1] == lines[:1] else {}
    for row in ROWS:
        found = results.get(row.name)
        if found is None or "not run" in found:
            lines += [kept[row.name]] if row.name in kept else []
            continue
        named = found["versions"]
        cells = [_cell(found["columns"][each], words) for each in COLUMNS]
        lines.append(
            "| " + " | ".join([row.name, named["Python"], named["torch"], named["transformers"], *cells]) + " |"
        )
    return "\n".join(lines)


def _cell(counts: Mapping[str, int], words: Mapping[str, str]) -> str:
    parts = [str(counts["passed"])]
    parts += [f"**{counts[each]} {words[each]}**" for each in ("failed", "refused") if counts[each]]
    return ", ".join(parts)


ENGLISH = {"row": "row", "failed": "failed", "refused": "refused"}
CHINESE = {
    "row": "组合",
    "failed": "失败",
    "refused": "拒绝",
    "data parallel": "数据并行",
    "layouts": "并行布局",
    "checkpoint": "检查点",
    "plan": "规划",
    "compile": "编译",
    "hf models": "hf 模型",
}


def write_tables(results: Mapping[str, Any]) -> None:
    """Put the rows between the marks of both pages; a row that has no result stays as it was."""
    for page, words in zip(PAGES, (ENGLISH, CHINESE), strict=True):
        text = page.read_text(encoding="utf-8")
        before, rest = text.split("<!-- matrix -->\n", 1)
        old, after = rest.split("<!-- end of matrix -->", 1)
        text = f"{before}<!-- matrix -->\n{table(results, words, old)}\n<!-- end of matrix -->{after}"
        page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests with every release that Plait promises.")
    parser.add_argument("rows", nargs="*", choices=[[], *(row.name for row in ROWS)], help="all, where none is named")
    parser.add_argument("--table", action="store_true", help="write what was found into the pages, and run nothing")
    parser.add_argument("--keep", action="store_true", help="use the environments that are there, and leave them there")
    options = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for row in () if options.table else ROWS:
        if not options.rows or row.name in options.rows:
            results[row.name] = run(row, keep=options.keep)
            RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
            write_tables(results)
    write_tables(results)
    if any(counts["failed"] for found in results.values() for counts in found.get("columns", {}).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
