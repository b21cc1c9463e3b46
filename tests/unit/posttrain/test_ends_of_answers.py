"""Which tokens end an answer, as a Hugging Face folder says it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.refusals import refused

from plait.cli.converted_model import _with_tokenizer
from plait.config.posttrain import TemplateConfig
from plait.errors import DataError
from plait.posttrain.data.records import ChatMessage
from plait.posttrain.data.template import make_template, read_tokenizer, trained_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<stop>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPOKEN = (
    ChatMessage("user", "q"),
    ChatMessage("assistant", "one"),
    ChatMessage("user", "r"),
    ChatMessage("assistant", "two"),
)


def folder_of(path: Path, eos: str) -> Path:
    transformers = pytest.importorskip("transformers")
    trained_tokenizer(["a conversation about nothing"], 300, MARKS).save(path / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), eos_token=eos)
    fast.chat_template = CHATML
    fast.save_pretrained(str(path))
    return path


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>", "<stop>"])
def test_an_answer_ends_where_the_template_and_the_tokenizer_say(eos: str, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    tokenizer = read_tokenizer(folder_of(tmp_path, eos))
    assert tokenizer.end == tokenizer.token_id(eos)
    template = make_template(TemplateConfig(kind="tokenizer"), tokenizer, tmp_path)
    assert set(template.ends) == {tokenizer.token_id(eos), tokenizer.token_id("<|im_end|>")}
    found = template.conversation(SPOKEN)
    kept = tokenizer.decode([t for t, wanted in zip(*found, strict=True) if wanted], keep_special=True)
    more = "" if eos == "<|im_end|>" else eos  # one end of an answer is enough
    assert kept == f"one<|im_end|>\ntwo<|im_end|>\n{more}"


def test_marked_answers_end_with_their_mark(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(["a conversation"], 300, MARKS)
    mark = tokenizer.token_id("<|im_end|>")
    assert make_template(TemplateConfig(kind="marked"), tokenizer, None).ends == (tokenizer.end, mark)
    assert make_template(TemplateConfig(kind="marked", end="##"), tokenizer, None).ends == (tokenizer.end, "##")


@pytest.mark.parametrize("eos", ["<stop>", {"content": "<stop>", "special": True}])
def test_the_end_of_a_tokenizer_is_kept_with_it(eos: Any, tmp_path: Path) -> None:
    trained_tokenizer(["a conversation"], 300, MARKS).save(tmp_path / "tokenizer.json")
    settings = tmp_path / "tokenizer_config.json"
    assert not settings.exists()
    settings.write_text(json.dumps({"eos_token": eos}))
    found = read_tokenizer(tmp_path)
    kept = tmp_path / "run"
    kept.mkdir()
    found.save(kept / "tokenizer.json")
    assert found.end == read_tokenizer(kept).end == found.token_id("<stop>")
    settings.write_text(json.dumps({"eos_token": "<nowhere>"}))
    with refused(DataError, str(tmp_path / "tokenizer.json"), "'<nowhere>'"):
        read_tokenizer(tmp_path)
    settings.write_text("[]")
    with refused(DataError, str(settings), "list"):
        read_tokenizer(tmp_path)


def test_a_run_that_kept_the_tokenizer_of_its_model_is_exported_with_all_of_it(tmp_path: Path) -> None:
    model, run = folder_of(tmp_path, "<|im_end|>"), tmp_path / "run"
    run.mkdir()
    file = model / "tokenizer.json"
    read_tokenizer(file).save(run / "tokenizer.json")
    written = json.loads(file.read_text())
    written["model"]["merges"] = [" ".join(pair) for pair in written["model"]["merges"]]  # as it used to be written
    written["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(written))
    source: Any = SimpleNamespace(path=run, state={"config": {}})
    found = _with_tokenizer({"eos_token_id": 7}, model, source)
    assert found.config["eos_token_id"] == 7
    assert {"chat_template.jinja", "tokenizer_config.json", "tokenizer.json"} <= set(found.files)
    end = read_tokenizer(run).end
    (model / "tokenizer.json").unlink()
    other = _with_tokenizer({"eos_token_id": 7}, model, source)
    assert other.config["eos_token_id"] == end
    assert json.loads(other.texts["tokenizer_config.json"])["eos_token"] == "<|im_end|>"
