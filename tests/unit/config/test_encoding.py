"""What to do with a text that is not UTF-8."""

from __future__ import annotations

import subprocess

import pytest
from tests.refusals import missing, refused

from plait.config.read import as_utf8, read
from plait.errors import ConfigError

HAN = "春眠不觉晓，处处闻啼鸟。"


@pytest.mark.parametrize("encoding", ["gbk", "gb18030", "utf-16"])
def test_the_remedy_for_a_known_encoding_does_what_it_says(tmp_path, encoding):
    old, new = tmp_path / "OLD", tmp_path / "NEW"
    old.write_bytes(HAN.encode(encoding))
    _, command, _ = as_utf8(old.read_bytes()).split("`")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert new.read_text(encoding="utf-8").lstrip("\ufeff") == HAN


def test_other_bytes_are_not_taken_for_chinese():
    assert not missing(as_utf8("café".encode("latin-1")), "UTF-8")
    assert "iconv" not in as_utf8("café".encode("latin-1"))


def test_a_run_description_in_gbk_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(f"work_dir: runs  # {HAN}\n".encode("gbk"))
    with refused(ConfigError, "GBK", "iconv -f GB18030 -t UTF-8", key=str(path)):
        read(path)
