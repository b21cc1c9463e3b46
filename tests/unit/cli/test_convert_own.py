"""`plait convert` with readers and writers of one's own, by name and as plug-ins of an installed package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.samples import model_of, some_state, write_plait

from plait.cli.main import main
from plait.config.trust import entry_points_of

CODE = '''
import json
import torch
from plait.checkpoint.convert import Source, TensorEntry


class Lines(Source):
    """One JSON line a tensor; read when it is asked for."""

    kind = "lines"

    def __init__(self, path):
        self.path, self.state, self.facts = path, {}, {"holds": "lines"}
        self._lines = dict(line.split(" ", 1) for line in (path / "lines").read_text().splitlines())
        shapes = json.loads((path / "shapes").read_text())
        self.entries = {name: TensorEntry(torch.Size(shapes[name]), torch.float32) for name in self._lines}

    def read(self, name):
        return torch.tensor(json.loads(self._lines[name])).reshape(self.entries[name].shape)

    def close(self):
        pass


def write(source, target):
    names = [name for name in source.entries if name.startswith("model.")]
    target.mkdir()
    (target / "lines").write_text("".join(f"{n} {json.dumps(source.read(n).flatten().tolist())}\\n" for n in names))
    (target / "shapes").write_text(json.dumps({name: list(source.entries[name].shape) for name in names}))


def weights(path):
    return {"w": torch.arange(4.0)}


def nothing(*_):
    return None
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    info = tmp_path / "site" / "lines_format-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[plait.converter]\nlines = lines_format:Lines\nto_lines = lines_format:write\n"
    )
    (tmp_path / "site" / "lines_format.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    entry_points_of.cache_clear()
    yield
    entry_points_of.cache_clear()
    sys.modules.pop("lines_format", None)


def convert(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["plait", "convert", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_format_of_ones_own_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = some_state()
    lines = tmp_path / "lines"
    assert convert(monkeypatch, write_plait(tmp_path / "from", state), lines, "--to", "to_lines") == 0
    assert json.loads((lines / "shapes").read_text())["model.lm_head.weight"] == [11, 6]
    assert convert(monkeypatch, lines, tmp_path / "back.pt", "--from", "lines", "--to", "torch") == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == model_of(state).keys()
    for name, tensor in model_of(state).items():
        assert torch.equal(back[name], tensor.float()), name


def test_weights_by_name_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("anything")
    words = [tmp_path / "mine", tmp_path / "out.pt", "--from", "lines_format:weights", "--to", "torch"]
    assert convert(monkeypatch, *words) == 0
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"], torch.arange(4.0))


def test_a_format_of_ones_own_can_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("anything")
    assert convert(monkeypatch, "--inspect", tmp_path / "mine", "--from", "lines_format:weights") == 0
    assert "lines_format:weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--from", "lins", "--to", "torch"], "--from"),
        (["--from", "lines_format:nothing", "--to", "torch"], "--from"),
        (["--to", "to_lins"], "--to"),
        (["--to", "lines_format:nothing"], "--to"),
        (["--from", "lines", "--to", "yaml"], "--from"),
    ],
    ids=str,
)
def test_what_is_no_converter_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    key: str,
) -> None:
    path = write_plait(tmp_path / "from", some_state())
    assert convert(monkeypatch, path, tmp_path / "out", *words) != 0
    assert f"- {key}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
