"""Commands that open what others have made run none of their code, unless the user says `--trust-code`."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused

from plait.checkpoint.save import write_single_process
from plait.cli.main import main
from plait.config import parse, to_dict

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 0, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"},
}  # fmt: skip
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Config: pass\nclass Net: pass\nclass Words: pass\n"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plait", *words])
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asked on the terminal"))
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that code of others makes when it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "it-ran"


def checkpoint(folder: Path, **sections: Any) -> str:
    """A checkpoint that says it is of such a run."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    state = {"config": {**to_dict(parse({}).config), **sections}}
    weight = torch.zeros(1, 4)
    tensors = {"model.head.weight": ((1, 4), torch.float32)}
    write_single_process(folder / "step-00000001", tensors, lambda _: weight, state, step=1)
    return str(folder / "step-00000001")


def evil(marker: Path) -> dict[str, Any]:
    return {"type": "import", "target": "os:system", "args": {"command": f"touch {marker}"}}


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_model_that_a_checkpoint_names_is_not_run(
    command: str, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "run", model=evil(marker), trust_code=True)
    assert call(monkeypatch, command, path) == 2
    said = capsys.readouterr().err
    assert not marker.exists()
    for word in ("model.target", "os:system", "manifest.json", "--trust-code"):
        assert word in said.replace("\n", "")


def test_it_is_run_for_a_user_who_trusts_it(marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "run", model=evil(marker))
    assert call(monkeypatch, "generate", path, "--trust-code") == 2  # it is no model
    assert marker.exists()


def test_what_is_trusted_is_not_looked_for_in_the_current_folder(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lies_here.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    path = checkpoint(tmp_path / "run", model={"type": "import", "target": "lies_here:Net"})
    assert call(monkeypatch, "generate", path, "--trust-code") == 2
    assert not marker.exists()
    assert "PYTHONPATH" in capsys.readouterr().err


def test_a_reward_model_that_judges_is_not_run(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = checkpoint(tmp_path / "judge", model=evil(marker), phase="reward")
    assert call(monkeypatch, "generate", judge, "--reward", judge) == 2
    assert not marker.exists()
    assert "os:system" in capsys.readouterr().err


def hf_folder(folder: Path, marker: Path, **config: Any) -> str:
    """A Hugging Face folder with a Python file of its author's."""
    from safetensors.torch import save_file

    folder.mkdir()
    described = {
        "model_type": "of_its_author",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Net"},
    }
    (folder / "config.json").write_text(json.dumps({**described, **config}), encoding="utf-8")
    (folder / "code.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    save_file({"head.weight": torch.zeros(1, 4)}, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("words", [("generate",), ("chat",), ("generate", "--reward", "theirs")])
def test_code_in_a_hugging_face_folder_is_not_run(
    words: tuple[str, ...],
    marker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = hf_folder(tmp_path / "theirs", marker)
    assert call(monkeypatch, words[0], path, *words[1:]) == 2
    said = capsys.readouterr().err
    assert not marker.exists()
    assert "code.Config" in said
    assert "--trust-code" in said


def test_a_run_on_such_a_folder_is_refused_too(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"model": {"type": "hf", "path": hf_folder(tmp_path / "theirs", marker)}, "device": "cpu"}
    (tmp_path / "text.txt").write_text("a few words. " * 200, encoding="utf-8")
    data = {"type": "text", "path": "text.txt", "vocab_size": 260, "seq_len": 8, "cache": "cache"}
    run = {**described, "data": data, "batch": {"total": 2}, "train": {"max_steps": 1}, "work_dir": "run"}
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    assert call(monkeypatch, "train", "run.yaml", "plan.gate=off") == 2
    assert "code.Config" in capsys.readouterr().err
    assert not marker.exists()
    assert call(monkeypatch, "train", "run.yaml", "plan.gate=off", "--trust-code") == 2
    assert marker.exists()
    assert "register_for_auto_class" in capsys.readouterr().err  # theirs is no class of transformers


def test_code_of_a_tokenizer_is_not_run(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plait.config.posttrain import TemplateConfig
    from plait.errors import ConfigError
    from plait.posttrain.data.template import make_template, read_tokenizer

    folder = Path(hf_folder(tmp_path / "theirs", marker))
    (folder / "config.json").unlink()
    words = {"auto_map": {"AutoTokenizer": ["code.Words", None]}, "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asked on the terminal"))
    with refused(ConfigError, "'code.Words'", "tokenizer_config.json", key="posttrain.tokenizer"):
        make_template(TemplateConfig(kind="tokenizer"), read_tokenizer(folder), folder)
    assert not marker.exists()


def test_convert_runs_no_code_of_an_adapters_model(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "run", model={"type": "hf", "path": hf_folder(tmp_path / "theirs", marker)})
    assert call(monkeypatch, "convert", path, str(tmp_path / "out"), "--to", "hf") == 2
    assert "code.Config" in capsys.readouterr().err
    assert not marker.exists()


def test_names_in_a_checkpoint_are_shown_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"[link=file:///etc/passwd]weight[/red]": torch.zeros(2)}, tmp_path / "them.pt")
    assert call(monkeypatch, "convert", "--inspect", str(tmp_path / "them.pt")) == 0
    assert "[link=file:///etc/passwd]weight[/red]" in capsys.readouterr().out


@pytest.mark.parametrize("trust_code", [False, True])
def test_a_reward_model_of_a_run_is_code_of_others(marker: Path, tmp_path: Path, trust_code: bool) -> None:
    from plait.config.trust import StoredName
    from plait.posttrain.rl.roles import described_in

    judge = checkpoint(tmp_path / "judge", model=evil(marker), phase="reward")
    run = parse({"phase": "ppo", "ppo": {"reward_model": judge}, "model": {"type": "gpt"}, "trust_code": trust_code})
    described: Any = described_in(judge, run.config)
    assert isinstance(described.target, StoredName) is not trust_code


def test_resuming_compares_what_the_checkpoint_says_and_runs_none_of_it(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from plait.checkpoint import read_manifest

    (tmp_path / "text.txt").write_text("a few words, again and again. " * 100, encoding="utf-8")
    data = {"type": "text", "path": "text.txt", "vocab_size": 260, "seq_len": 8, "cache": "cache"}
    model = {"type": "gpt", "vocab_size": 260, "dim": 8, "layers": 1, "heads": 1, "seq_len": 8}
    run = {"model": model, "data": data, "batch": {"total": 2}, "train": {"max_steps": 2}, "work_dir": "run"}
    (tmp_path / "run.yaml").write_text(json.dumps({**run, "device": "cpu", "plan": "off"}), encoding="utf-8")
    assert call(monkeypatch, "train", "run.yaml", "train.stop_after=1") == 0
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    manifest = read_manifest(folder)
    hook = {"type": "import", "target": "os:system", "args": {"command": f"touch {marker}"}}
    config = {**manifest.state["config"], "model": evil(marker), "data": evil(marker), "hooks": [hook]}
    replace(manifest, state={**manifest.state, "config": config}).write(folder)
    assert call(monkeypatch, "train", "run.yaml", "checkpoint.resume=auto") == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert not marker.exists()
    assert call(monkeypatch, "report", "run") == 0
    assert call(monkeypatch, "convert", "--inspect", "run") == 0
    assert not marker.exists()
