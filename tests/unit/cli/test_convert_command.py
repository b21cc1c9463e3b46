"""`plait convert` on real checkpoints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing
from tests.unit.checkpoint.samples import some_state, write_fsdp, write_hf, write_plait, write_torch_file

from plait.cli.main import main

Trained = tuple[Any, subprocess.CompletedProcess[str]]


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["plait", "convert", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def plait(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; gives its exit code, and what it said on both streams."""

    def run(*words: object) -> tuple[int, str, str]:
        code = call(monkeypatch, *words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_one_line_tells_what_was_written(plait: Any, tmp_path: Path) -> None:
    path = write_plait(tmp_path / "from", some_state())
    code, out, err = plait(path, tmp_path / "weights.pt", "--to", "torch")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1
    assert out.startswith(f"{tmp_path / 'weights.pt'}: 5 tensors, ")
    assert len(re.findall(r"\b\d+(?:\.\d+)? (?:[KMG]i)?B\b", out)) == 2
    assert torch.load(tmp_path / "weights.pt", weights_only=True).keys() == {
        name.removeprefix("model.") for name in some_state() if name.startswith("model.")
    }


def test_inspect_shows_facts_a_row_for_alike_tensors_and_totals(plait: Any, tmp_path: Path) -> None:
    state = {f"model.layers.{n}.experts.{m}.w": torch.zeros(4, 2) for n in range(12) for m in range(3)}
    state |= {f"optim.{name.removeprefix('model.')}.exp_avg": torch.zeros(4, 2) for name in list(state)}
    state |= {f"optim.{name.removeprefix('model.')}.step": torch.tensor(1.0) for name in list(state) if "model" in name}
    state |= {"model.layers.14.experts.0.w": torch.zeros(4, 2), "model.head": torch.zeros(3).bfloat16()}
    state |= {"rng.0.torch": torch.zeros(16, dtype=torch.uint8), "hook.ema.head": torch.zeros(3)}
    path = write_plait(tmp_path / "from", state)
    code, out, err = plait("--inspect", path)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["kind", "plait"] in lines
    assert ["step", "7"] in lines
    table = lines[lines.index(["tensor", "count", "shape", "dtype", "size"]) + 1 :]
    assert table[: table.index([])] == [
        ["hook.ema.head", "3", "float32", "12", "B"],
        ["model.head", "3", "bfloat16", "6", "B"],
        ["model.layers.{0..11}.experts.{0..2}.w", "×", "36", "4", "×", "2", "float32", "1.1", "KiB"],
        ["model.layers.14.experts.0.w", "4", "×", "2", "float32", "32", "B"],
        ["optim.layers.{0..11}.experts.{0..2}.w.exp_avg", "×", "36", "4", "×", "2", "float32", "1.1", "KiB"],
        ["optim.*.step", "×", "36", "scalar", "float32", "144", "B"],
        ["rng.0.torch", "16", "uint8", "16", "B"],
    ]
    assert table[table.index([]) + 2 :] == [
        ["hook", "1", "3", "12", "B"],
        ["model", "38", "299", "1.2", "KiB"],
        ["optim", "72", "324", "1.3", "KiB"],
        ["rng", "1", "16", "16", "B"],
    ]
    _, every, _ = plait("--inspect", path, "--all")
    assert sum(line.startswith(("model.", "optim.", "rng.", "hook.")) for line in every.splitlines()) == len(state)


@pytest.mark.parametrize(
    ("kind", "write"),
    [("hf", write_hf), ("dcp", write_fsdp), ("torch", lambda p, s: write_torch_file(p.with_suffix(".pt"), s))],
)
def test_inspect_takes_any_kind(plait: Any, tmp_path: Path, kind: str, write: Any) -> None:
    code, out, _ = plait("--inspect", write(tmp_path / "from", some_state()))
    assert code == 0
    assert ["kind", kind] in [line.split() for line in out.splitlines()]
    assert "model.model.layers.{0,1}.mlp.up_proj.weight" in out


def test_verify_says_what_was_compared(plait: Any, tmp_path: Path) -> None:
    code, out, err = plait("--inspect", write_plait(tmp_path / "from", some_state()), "--verify")
    assert (code, err) == (0, "")
    (verified,) = [line for line in out.splitlines() if line.startswith("verified")]
    assert "3 files" in verified
    code, out, _ = plait("--inspect", write_hf(tmp_path / "hf", some_state()), "--verify")
    assert code == 0
    assert "5 tensors" in out


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.json", "manifest.json"])
def test_verify_names_a_damaged_file_and_fails(plait: Any, tmp_path: Path, name: str) -> None:
    path = write_plait(tmp_path / "from", some_state())
    content = bytearray((path / name).read_bytes())
    content[-20] ^= 1
    (path / name).write_bytes(content)
    code, _, err = plait("--inspect", path, "--verify")
    assert code == 1
    assert f"{path / name} " in err


def test_a_run_goes_to_transformers_with_the_tokenizer_of_its_data(
    trained: Trained, plait: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(trained[0].folder)  # the description has paths from here
    code, _, err = plait("run", tmp_path / "out", "--to", "hf", "--dtype", "bf16")
    assert (code, err) == (0, "")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer("line 1: x").input_ids) == "line 1: x"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.eos_token == "<|endoftext|>"


def test_weights_of_an_unknown_model_take_the_description_of_a_folder(plait: Any, tmp_path: Path) -> None:
    state = some_state()
    path = write_fsdp(tmp_path / "from", state)
    code, _, err = plait(path, tmp_path / "out", "--to", "hf")
    assert code == 2
    assert not missing(err, "--model", path, "config.json")
    assert not (tmp_path / "out").exists()
    folder = write_hf(tmp_path / "model", some_state())
    assert plait(path, tmp_path / "out", "--to", "hf", "--model", folder)[0] == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out/tokenizer.json").is_file()
    code, _, err = plait(path, tmp_path / "other", "--to", "hf", "--model", tmp_path)
    assert code == 2
    assert not missing(err, "--model", f"'{tmp_path}'", "config.json")


def test_weights_of_transformers_become_a_model_of_our_own_with_their_optimizer(plait: Any, tmp_path: Path) -> None:
    weight, moment = torch.randn(8, 24), torch.randn(8, 24)  # as transformers has it: q, k and v, transposed
    state = {
        "model.transformer.h.0.attn.c_attn.weight": weight,
        "optim.transformer.h.0.attn.c_attn.weight.exp_avg": moment,
        "optim.transformer.h.0.attn.c_attn.weight.step": torch.tensor(4.0),
    }
    path = write_plait(tmp_path / "from", state)
    assert plait(path, tmp_path / "all.pt", "--to", "torch", "--model", "gpt", "--optimizer")[0] == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    for index, part in enumerate("qkv"):
        rows = slice(8 * index, 8 * (index + 1))
        name = f"blocks.0.attention.{part}.weight"
        assert torch.equal(found["model"][name], weight.t()[rows])
        assert torch.equal(found["optim"]["state"][name]["exp_avg"], moment.t()[rows])
        assert found["optim"]["state"][name]["step"] == 4


@pytest.mark.parametrize("model", [{"type": "resnet", "depth": 18}, {"type": "import", "target": "mine:Net"}])
def test_a_model_without_a_counterpart_is_refused_with_the_alternatives(
    plait: Any, tmp_path: Path, model: dict[str, Any]
) -> None:
    path = write_plait(tmp_path / "from", some_state(), config={"model": model})
    code, _, err = plait(path, tmp_path / "out", "--to", "hf")
    assert code == 2
    assert not missing(err, model["type"], "--to torch", "--to plait", "hf", "gpt", "llama", "moe")


def test_a_checkpoint_of_the_trained_part_alone_is_no_whole_model(plait: Any, tmp_path: Path) -> None:
    config = {"model": {"type": "gpt"}}
    frozen = {"names": ["model.embedding.weight"], "fingerprint": "0"}
    path = write_plait(tmp_path / "from", some_state(), config=config, frozen=frozen)
    code, _, err = plait(path, tmp_path / "out", "--to", "hf")
    assert code == 2
    assert not missing(err, path, "model.embedding.weight")


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], ["SRC DST", "--inspect", "--to"]),
    "no target": (["a"], ["DST"]),
    "no kind": (["a", "b"], ["--to", "hf, torch, plait, deepspeed"]),
    "all at once": (
        ["a", "b", "--to", "hff", "--dtype", "bf61", "--weights", "emma", "--shard-size", "big"],
        ["4 problems", "`hf`", "`bf16`", "`ema`", "'big'", "5GB"],
    ),
    "no size": (["a", "b", "--to", "hf", "--shard-size", f"{'9' * 500}GB"], ["--shard-size", "5GB"]),
    "optimizer": (["a", "b", "--to", "hf", "--optimizer"], ["--optimizer", "--to torch"]),
    "looking without a place": (
        ["a", "b", "--to", "hf", "--all", "--verify"],
        ["2 problems", "- --all: ", "- --verify: ", "--inspect PATH"],
    ),
    "looking and converting": (
        ["a", "b", "--to", "hf", "--dtype", "bf16", "--shard-size", "2GB", "--overwrite", "--inspect", "a"],
        ["5 problems", "SRC: 'a'", "--to: 'hf'", "--dtype: 'bf16'", "--shard-size: '2GB'", "- --overwrite: "],
    ),
}


def test_wrong_options_are_told_at_once_and_without_loading_torch(tmp_path: Path) -> None:
    script = (
        "import contextlib, io, json, sys\n"
        "from plait.cli.main import main\n"
        "answers = {}\n"
        "for name, words in json.loads(sys.argv[1]).items():\n"
        "    sys.argv = ['plait', 'convert', *words]\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        try: main()\n"
        "        except SystemExit as ended: answers[name] = [ended.code, err.getvalue(), 'torch' in sys.modules]\n"
        "print(json.dumps(answers))\n"
    )
    words = json.dumps({name: words for name, (words, _) in WRONG.items()})
    answers = json.loads(subprocess.check_output([sys.executable, "-c", script, words], text=True, cwd=tmp_path))
    for name, (_, expected) in WRONG.items():
        code, err, loaded = answers[name]
        assert code == 2, name
        assert all(each in err for each in expected), (name, err)
        assert not loaded


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    import os
    import pty

    path = write_torch_file(tmp_path / "all.pt", {"model.w": torch.zeros(512, 1024)})
    main_end, their_end = pty.openpty()
    command = [sys.executable, "-m", "plait", "convert", str(path), str(tmp_path / "out"), "--to", "plait"]
    ended = subprocess.run(command, stderr=their_end, stdout=subprocess.PIPE, text=True, timeout=120)
    os.close(their_end)
    shown = os.read(main_end, 65536).decode()
    os.close(main_end)
    assert ended.returncode == 0
    assert "━" in shown
    assert "1 tensor," in ended.stdout
