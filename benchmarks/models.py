"""What Plait does with every architecture of `transformers`: `docs/models.md` is made by this.

    python -m benchmarks.models --json models.json --table docs/models.md     # hours; goes on where it stopped
    python -m benchmarks.models --models llama,gemma3_text --cells tp,pp --json models.json
    python -m benchmarks.models --json models.json --table docs/models.md --no-run

A cell is measured by `tests/hf_cells.py` on a tiny model with random weights (`tests/hf_models.py`). Finished cells
stay X
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.hf_cells import CELLS, Outcome, Pools, measure
from tests.hf_models import model_types

ROOT = Path(__file__).resolve().parent.parent

FAMILIES = {
    "causal-lm": "Causal language models",
    "masked-lm": "Masked language models",
    "seq2seq-lm": "Encoder-decoders",
    "image-text": "Image and text",
}
MARKS = {"equal": "=", "n/a": "–", "wrong": "wrong", "traceback": "error"}


def main() -> None:
    """Measure what is asked for, and write the table."""
    given = _arguments()
    file = Path(given.json)
    cells: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not given.no_run:
        keep = partial(_keep, file, cells, _git("rev-parse", "--short", "HEAD"))
        with Pools(given.limit) as pools:
            for kind, model_type, missing in _missing(given, cells):
                measure(kind, model_type, missing, pools, partial(keep, kind, model_type))
    if given.table:
        Path(given.table).write_text(page(cells))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="of " + ", ".join(FAMILIES))
    parser.add_argument("--models", help="model types; default: all of the families")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--json", default="models.json", help="finished cells are kept here")
    parser.add_argument("--table", help="the page to write")
    parser.add_argument("--again", default="", help="outcomes to measure anew, or all")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for a cell")
    parser.add_argument("--no-run", action="store_true", help="write the table of what is there")
    return parser.parse_args()


def _missing(given: argparse.Namespace, cells: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    asked, again = given.cells.split(","), given.again.split(",")
    for kind in given.families.split(","):
        known = model_types(kind)
        for model_type in given.models.split(",") if given.models else known:
            if model_type not in known:
                continue
            there = cells.get(kind, {}).get(model_type, {})
            missing = [c for c in asked if c not in there or "all" in again or there[c]["outcome"] in again]
            if missing:
                yield kind, model_type, missing


def _keep(
    file: Path, cells: dict[str, Any], commit: str, kind: str, model_type: str, cell: str, outcome: Outcome
) -> None:
    entry = {"outcome": outcome.outcome, "detail": outcome.detail, "commit": commit}
    cells.setdefault(kind, {}).setdefault(model_type, {})[cell] = entry
    print(f"{kind} {model_type} {cell}: {outcome.outcome} {_short(outcome)}", flush=True)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")
    draft.replace(file)


def _short(outcome: Outcome) -> str:
    return outcome.detail.replace("\n", " ")[:150]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page(cells: dict[str, Any]) -> str:
    """Return the page of all cells that were measured."""
    reasons: dict[str, int] = {}
    lines = [
        "# Models",
        "",
        "What Plait does with the architectures of `transformers` "
        f"{metadata.version('transformers')}, each as a tiny model with random weights, on two gloo ranks.",
        "",
        f"Made on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} by `python -m benchmarks.models`, "
        f"commit {', '.join(_commits(cells))}.",
        "",
        "- `=`: losses, gradient norms and all parameters after two steps are those of one process; under load, train, "
        "generate and export: what `transformers` computes",
        "- a number: refused, for the reason below",
        "- `–`: does not apply",
        "- `wrong`, `error`: a fault that is open",
        "- load: a folder of `save_pretrained`; train: the loss against that of `transformers`; zero3, tp, pp, cp, ep: "
        "two ranks; pack: two documents in a row against each alone; lora: adapters under ZeRO 3; generate: greedy, "
        "token by token; export: training from a folder of `transformers` to one that it reads back",
    ]
    for kind, title in FAMILIES.items():
        found = {name: there for name, there in cells.get(kind, {}).items() if not _absent(there)}
        if not found:
            continue
        lines += ["", f"## {title}", "", f"| model type | {' | '.join(CELLS)} |", f"|---|{'---|' * len(CELLS)}"]
        for name in sorted(found):
            marks = [_mark(found[name].get(cell), reasons) for cell in CELLS]
            lines.append(f"| {name} | {' | '.join(marks)} |")
        counts = [Counter(there[cell]["outcome"] for there in found.values() if cell in there) for cell in CELLS]
        lines.append(f"| equal of {len(found)} | {' | '.join(_share(count) for count in counts)} |")
        absent = {name: there for name, there in cells[kind].items() if _absent(there)}
        if absent:
            lines += ["", "Not built: " + "; ".join(f"{name} ({_why(there)})" for name, there in absent.items()) + "."]
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _commits(cells: dict[str, Any]) -> list[str]:
    return sorted({e["commit"] for models in cells.values() for there in models.values() for e in there.values()})


NOT_BUILT = "transformers does not build or run it: "


def _absent(there: dict[str, Any]) -> bool:
    return all(entry["detail"].startswith(NOT_BUILT) for entry in there.values())


def _why(there: dict[str, Any]) -> str:
    return _plain(next(iter(there.values()))["detail"].removeprefix(NOT_BUILT))


def _mark(entry: dict[str, str] | None, reasons: dict[str, int]) -> str:
    if entry is None:
        return ""
    if entry["outcome"] != "refused":
        return MARKS[entry["outcome"]]
    return str(reasons.setdefault(_reason(entry["detail"]), len(reasons) + 1))


def _share(count: Counter[str]) -> str:
    asked = sum(count.values()) - count["n/a"]
    return f"{count['equal']}/{asked}" if asked else "–"


def _plain(text: str) -> str:
    """One line, without what markdown would read."""
    return " ".join(text.split()).replace("|", "/").replace("<", "‹").replace(">", "›")[:300]


SAME = (
    (r"'/tmp/[^']*'", "'…'"),
    (r"\(model_type '[^']*'\)", ""),
    (r"\b(?:a |an )?[A-Z]\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ForMaskedLM|Model)\b", "the model"),
    (r"\b\w+(?:\.\w+)*\.\d+(?:\.\w+)*", "…"),
    (r"model\.config=\{.*?(?= for model\.task)", "model.config"),
)
"""What differs from model to model in the same sentence."""


def _reason(text: str) -> str:
    """A refusal without the names of one model."""
    for pattern, same in SAME:
        text = re.sub(pattern, same, " ".join(text.split()))
    return _plain(text)


if __name__ == "__main__":
    main()
