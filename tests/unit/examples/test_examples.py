"""The examples run as they stand, only smaller."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL_CIFAR = ("--epochs", "1", "--samples", "40", "--batch", "16", "--width", "8")


def run(*arguments: str | Path, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A corpus that takes no time to tokenize."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"{number} and {each} are two numbers. " for each in range(60)))
    return folder


def small(texts: Path, vocabulary: int) -> list[str]:
    """Overrides that make a text run short."""
    settings = [
        f"{role}.{key}={value}"
        for role in ("data", "val_data")
        for key, value in (
            ("path", texts),
            ("limit_mb", "null"),
            ("vocab_size", vocabulary),
            ("seq_len", 32),
            ("cache", texts.parent / "cache"),
        )
    ]
    return [*settings, "log.every=1", "train.val_batches=1"]


def losses(output: str) -> list[str]:
    return re.findall(r"loss:? (\S+)", output)


def test_own_loop_gives_the_same_losses_by_hand_and_on_two_ranks(tmp_path: Path) -> None:
    script = (EXAMPLES / "own_loop.py", "--steps", "10")
    alone = losses(run(*script, folder=tmp_path))
    by_hand = losses(run(*script, "--by-hand", folder=tmp_path))
    together = losses(run(*TWO_RANKS, *script, "--strategy", "zero2", folder=tmp_path))
    assert len(alone) == 2
    assert by_hand == alone
    assert [float(loss) for loss in together] == pytest.approx([float(loss) for loss in alone], abs=2e-5)


def test_cifar_resnet_trains_validates_and_saves(tmp_path: Path) -> None:
    output = run(EXAMPLES / "cifar_resnet.py", *SMALL_CIFAR, "--work-dir", "here", folder=tmp_path)
    assert "accuracy/top1" in output
    assert (tmp_path / "here" / "checkpoints" / "best" / "manifest.json").is_file()


def test_gpt_trains_on_a_folder_of_texts(tmp_path: Path, texts: Path) -> None:
    settings = [*small(texts, 300), "train.max_steps=3", "train.val_every=3", "batch.total=2"]
    output = run("-m", "plait", "train", EXAMPLES / "gpt.yaml", *settings, folder=tmp_path)
    assert len(losses(output)) == 4
    assert (tmp_path / "runs" / "gpt" / "report.html").is_file()


def test_hf_finetune_trains_an_unedited_transformers_model(tmp_path: Path, texts: Path) -> None:
    pytest.importorskip("transformers")
    settings = [*small(texts, 300), "train.max_steps=2", "batch.total=2", "plan=off"]
    output = run("-m", "plait", "train", EXAMPLES / "hf_finetune.yaml", *settings, folder=tmp_path)
    assert len(losses(output)) == 3


def test_the_demo_starts_the_command_and_hears_what_it_says(capfd: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert demo.plait("--version", capture=True).strip()
    with pytest.raises(SystemExit, match="2"):
        demo.plait("train", "absent.yaml")
    assert "absent.yaml" in capfd.readouterr().err
