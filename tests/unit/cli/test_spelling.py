"""Commands in places that do not speak UTF-8: other encodings of the console, of file names and of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.refusals import refused

from plait.cli.files import read_file
from plait.cli.generate import read_prompts
from plait.errors import ConfigError, DataError

HAN = "语料"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


def plait(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "plait", *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, timeout=240)


def described(folder: Path, path: str) -> None:
    text = f"data: {{type: text, path: {path}, vocab_size: 300, seq_len: 16}}\ntrain: {{max_steps: 1}}\nmodel: "
    model = "{type: gpt, vocab_size: 300, dim: 16, layers: 1, heads: 2, seq_len: 16}\n"
    (folder / "run.yaml").write_text(text + model, encoding="utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_console_shows_what_its_encoding_has_and_a_mark_for_the_rest(tmp_path: Path, encoding: str) -> None:
    (tmp_path / HAN).mkdir()
    described(tmp_path, HAN)
    (tmp_path / HAN / "a.txt").write_text("µ", encoding="utf-8")
    found = plait(tmp_path, "train", "run.yaml", "work_dir=µ", "--dry-run", PYTHONIOENCODING=encoding)
    shown = found.stdout.decode(encoding)
    assert found.returncode == 0, found.stderr.decode()
    assert ("work_dir" in shown, "µ" in shown, HAN in shown) == (True, False, encoding == "gbk")


def test_chinese_names_of_files_work_in_a_locale_of_ascii(tmp_path: Path) -> None:
    (tmp_path / HAN).mkdir()
    (tmp_path / HAN / "a.txt").write_text("text", encoding="utf-8")
    described(tmp_path, f"{HAN}/*.txt")
    found = plait(tmp_path, "train", "run.yaml", f"work_dir={HAN}", "--dry-run", **ASCII)
    assert found.returncode == 0, found.stderr.decode()
    assert b"work_dir" in found.stdout


def test_files_in_gbk_are_recognised_and_a_mark_at_the_start_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"{HAN}\n".encode("gbk"))
    with refused(DataError, file, "iconv -f GB18030 -t UTF-8"):
        read_prompts(file)
    with refused(ConfigError, "iconv -f GB18030 -t UTF-8", key="--file"):
        read_file(file, "--file")
    file.write_bytes(f"{HAN}\n".encode("utf-8-sig"))
    assert (read_prompts(file), read_file(file, "--file")) == ([HAN], f"{HAN}\n")


def test_a_prompt_with_more_than_its_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi", "id": 3}\n{"prompt": "hi", "system": "be short"}\n', encoding="utf-8")
    with refused(DataError, "line 2", "'system'"):
        read_prompts(file)
