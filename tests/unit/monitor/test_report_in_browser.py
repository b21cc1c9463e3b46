"""The report as a real browser shows it: every card is there, and no text of a run becomes markup or script."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plait.monitor.report import write_report

PAYLOAD = "<script>document.title='RAN'</script><img src=x onerror=\"document.title='RAN'\">"

pytestmark = pytest.mark.real("chromium")


def shown(page: Path, folder: Path) -> str:
    """The document after its scripts, if it had any, have run."""
    offline = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *offline, f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_browser_shows_the_report_and_runs_nothing(tmp_path: Path, make_run: Any) -> None:
    rows = [{"step": step, "prompt": PAYLOAD, "answer": PAYLOAD, "reward": 0.5} for step in range(4)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page = tmp_path / "report.html"
    write_report(make_run(0, 8, segment=PAYLOAD), page, PAYLOAD, folder=tmp_path)
    dom = shown(page, tmp_path / "browser")
    assert "<title>RAN" not in dom
    assert "<script" not in dom
    assert dom.count("&lt;script&gt;") >= 2 * len(rows)
    assert "Answers over time" in dom
    assert dom.count("<svg") >= 2
