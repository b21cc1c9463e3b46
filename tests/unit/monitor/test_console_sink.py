from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import textwrap

import pytest
from tests.refusals import missing

from plait.monitor.console import ConsoleSink, choose_mode
from plait.monitor.events import Event, EventKind
from plait.monitor.format import Table, plain, tables

SCRIPT = textwrap.dedent(
    """
    import sys, time
    from plait.monitor.console import ConsoleSink, choose_mode
    from plait.monitor.events import Event, EventKind

    sink = ConsoleSink(choose_mode("auto", sys.stdout), sys.stdout)
    rows = [("Model", "gpt · 1.2M parameters"), ("Strategy", "zero3")]
    sink.write(Event(EventKind.RUN_START, 0, 1, {"title": "This run", "rows": rows}))
    for step in range(1, 31):
        sink.tick(step)
        if step % 10 == 0:
            data = dict(lr=1e-3, loss=4.25, grad_norm=1.5, time=0.1, data_time=0.01, memory=970, eta=65.9,
                        step_in_epoch=step, steps_per_epoch=30, max_steps=30, by_epoch=True, max_epochs=1,
                        tokens_per_s=12345.0, samples_per_s=3.0, skipped=0)
            sink.write(Event(EventKind.TRAIN, step, 1, data))
    sink.write(Event(EventKind.MESSAGE, 30, 1, {"level": "warning", "text": "a rank is slow"}))
    summary = [("Measured", "0.100 s")]
    sink.write(Event(EventKind.RUN_END, 30, 1, dict(reason="finished", seconds=3.0, steps=30, summary=summary)))
    sink.close()
    """
)


def in_a_pipe() -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode()


def on_a_terminal() -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # what Linux says when the other end has closed
        pass
    os.close(ours)
    assert child.wait() == 0
    return seen.decode()


def test_a_pipe_gets_whole_lines_without_escape_codes() -> None:
    out = in_a_pipe()
    assert "\x1b" not in out
    assert "\r" not in out
    assert out.count("Epoch(train)") == 3
    assert "Epoch(train) [1][10/30]  lr: 1.0000e-03  eta: 0:01:05" in out


def test_a_pipe_gets_the_opening_table_the_warning_and_the_summary() -> None:
    lines = in_a_pipe().splitlines()
    assert lines[0] == "This run"
    assert "  Model     gpt · 1.2M parameters" in lines
    assert "  Strategy  zero3" in lines
    assert any(line.endswith("plait - WARNING - a rank is slow") for line in lines)
    assert any(not missing(line, "finished", "30 steps", "0:00:03") for line in lines)
    assert "  Measured  0.100 s" in lines


def test_a_terminal_gets_a_bar_below_the_lines_and_its_cursor_back() -> None:
    out = on_a_terminal()
    assert "━" in out
    assert "Epoch 1/1" in out
    assert "30/30" in out
    assert "loss 4.2500 · lr 1.00e-03 · 12.3k tok/s · grad norm 1.5000" in out
    assert "0:01:05 left" in out
    assert out.count("Epoch(train)") == 3
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l") >= 0
    assert out.rfind("Run ended (finished)") > out.rfind("━━")


def test_a_warning_is_coloured_on_a_terminal() -> None:
    assert "\x1b[33ma rank is slow" in on_a_terminal().replace("\x1b[0m\x1b[33m", "\x1b[33m")


@pytest.mark.parametrize(("terminal", "setting", "mode"), [
    (True, "auto", "bar"), (True, "bar", "bar"), (True, "plain", "plain"),
    (False, "auto", "plain"), (False, "bar", "plain"), (False, "plain", "plain"),
])  # fmt: skip
def test_a_bar_needs_a_terminal(terminal: bool, setting: str, mode: str) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    assert choose_mode(setting, stream) == mode  # type: ignore[arg-type]


def test_a_stream_in_an_old_encoding_shows_what_it_can() -> None:
    raw = io.BytesIO()
    sink = ConsoleSink("plain", io.TextIOWrapper(raw, encoding="ascii"))
    sink.write(Event(EventKind.MESSAGE, 0, 0, {"level": "info", "text": "zero3 · 2 ranks"}))
    assert raw.getvalue().endswith(b"INFO - zero3 ? 2 ranks\n")


def test_closing_leaves_the_stream_open() -> None:
    stream = io.StringIO()
    ConsoleSink("plain", stream).close()
    assert not stream.closed


def test_tables_are_found_in_the_event_and_in_its_sections() -> None:
    data = {"segment": "ddp", "title": "Run", "rows": [("a", 1)], "world": {"title": "World", "rows": [["ranks", 2]]}}
    assert tables(data) == (Table("Run", (("a", "1"),)), Table("World", (("ranks", "2"),)))
    assert plain(Table("Run", (("a", "1"), ("longer", "two\nlines")))).splitlines() == [
        "Run",
        "---------------",
        "  a       1",
        "  longer  two",
        "          lines",
    ]
