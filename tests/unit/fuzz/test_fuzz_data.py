"""Data, records and other files that a command reads, with something wrong in them: no traceback, and no hang."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.unit.fuzz.mutate import bounded, damaged_json, draws, spoiled
from torch import nn

from plait.cli.files import read_file
from plait.cli.generate import read_prompts
from plait.cli.main import report
from plait.config import parse
from plait.data.sources import build_dataset
from plait.data.tokenizer import load_tokenizer, train_tokenizer
from plait.data.tokens import TokenFile, TokenWriter
from plait.errors import PlaitError
from plait.frontends.mmengine.config import Config
from plait.launch.heartbeat import SIZE, read_beat
from plait.launch.hostfile import read_hostfile
from plait.launch.prepare import read_env_file
from plait.plan.hardware import find_hardware
from plait.posttrain.data.prepare import prepare_data
from plait.posttrain.data.template import read_tokenizer
from plait.posttrain.lora import read_adapter
from plait.tune.config import TuneConfig
from plait.tune.search import TrialRecords

LINES = [{"prompt": f"question {n}", "completion": f"answer {n}", "text": f"some text {n}"} for n in range(6)]
PAIRS = [{"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(6)]
TALKS = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(6)]
STEP = {"lr": 0.01, "eta": 0.1, "memory": 296.7, "step_in_epoch": 1, "steps_per_epoch": 6, "max_steps": 12, "loss": 1.4}
START = {"title": "plait", "rows": [["model", "Net"], ["device", "CPU"]], "segment": "one rank", "resumed": False}
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("run_start", {**START, "max_steps": 12}),
    ("message", {"level": "warning", "text": "plan: 0.37 of 23.5 GiB"}),
    *(("train", {**STEP, "grad_norm": 1.1, "time": 0.01, "samples_per_s": 500.0, "skipped": 0}) for _ in range(3)),
    ("train", {**STEP, "loss": "nan"}),
    ("validate", {"loss": 2.0, "accuracy": 0.5}),
    ("checkpoint", {"path": "checkpoints/step-1", "bytes": 12, "seconds": 0.1, "blocked": 0.1}),
    ("run_start", {**START, "resumed": True, "max_steps": 12}),
    ("train", STEP),
    ("run_end", {"reason": "finished", "steps": 12, "seconds": 3.0}),
]


def jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_text(folder: Path) -> None:
    (folder / "a.txt").write_text("some words. " * 200)


def read_text(folder: Path) -> None:
    data = {"type": "text", "path": str(folder / "a.txt"), "vocab_size": 260, "seq_len": 8, "cache": str(folder / "c")}
    first(data)


def first(data: dict[str, Any]) -> None:
    config = parse({"data": data, "train": {"max_steps": 1}}).config
    assert config.data is not None
    found = build_dataset(config.data, training=True, seed=1)
    for index in range(len(found)):
        found[index]


def write_lines(folder: Path) -> None:
    jsonl(folder / "a.jsonl", LINES)


def read_lines(folder: Path) -> None:
    keys = {"prompt_key": "prompt", "completion_key": "completion", "vocab_size": 260, "seq_len": 8}
    first({"type": "jsonl", "path": str(folder / "a.jsonl"), **keys, "cache": str(folder / "c")})


def write_tokens(folder: Path) -> None:
    with TokenWriter(folder / "t", vocab_size=300, masked=True) as writer:
        for length in (5, 9, 30):
            writer.add(list(range(length)), [1] * length)


def read_tokens(folder: Path) -> None:
    tokens = TokenFile(folder / "t")
    for index in range(tokens.meta.documents):
        tokens.document(index)
    first({"type": "tokens", "path": str(folder / "t.bin"), "seq_len": 8})


def write_images(folder: Path) -> None:
    for name, kind in (("cat/1.png", "PNG"), ("dog/2.jpg", "JPEG")):
        (folder / name).parent.mkdir()
        pixels = np.random.default_rng(1).integers(0, 255, (9, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name, kind)


def read_images(folder: Path) -> None:
    first({"type": "image_folder", "path": str(folder), "size": 8})


def write_cifar(folder: Path) -> None:
    numbers = np.random.default_rng(1)
    for number in range(1, 6):
        content = {
            b"data": numbers.integers(0, 255, (2, 3072), dtype=np.uint8),
            b"labels": [int(each) for each in numbers.integers(0, 10, 2)],
        }
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(content, protocol=2))


def read_cifar(folder: Path) -> None:
    first({"type": "cifar10", "path": str(folder), "split": "train"})


def write_examples(folder: Path) -> None:
    jsonl(folder / "answers.jsonl", LINES + TALKS)
    jsonl(folder / "pairs.jsonl", PAIRS)
    (folder / "list.json").write_text(json.dumps(PAIRS))


def read_examples(folder: Path) -> None:
    model = {"type": "gpt", "vocab_size": 400, "dim": 8, "layers": 1, "heads": 1, "seq_len": 64}
    for phase, file in (
        ("sft", "answers.jsonl"),
        ("dpo", "pairs.jsonl"),
        ("reward", "list.json"),
        ("grpo", "list.json"),
    ):
        section = {"data": [{"type": "file", "path": str(folder / file)}], "val_fraction": 0.0}
        run = {"model": model, "phase": phase, "posttrain": section, "train": {"max_steps": 1}}
        prepare_data(parse(run).config)


def write_tokenizer(folder: Path) -> None:
    train_tokenizer(["some words"], 260).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))


def read_tokenizers(folder: Path) -> None:
    for read in (read_tokenizer(folder), load_tokenizer(folder / "tokenizer.json")):
        assert read.decode(read.encode("some words")) is not None


def write_record(folder: Path) -> None:
    rows = [
        {"kind": kind, "step": number, "epoch": 0, "time": 1e9 + number, "rank": 0, "data": data}
        for number, (kind, data) in enumerate(EVENTS)
    ]
    jsonl(folder / "events-rank0.jsonl", rows)
    jsonl(folder / "samples.jsonl", [{"step": 1, "prompt": "q", "answer": "a", "reward": 0.5}])


def read_record(folder: Path) -> None:
    report(str(folder), None, [])
    (folder / "report.html").read_text()


def write_words(folder: Path) -> None:
    (folder / "hostfile").write_text("# hosts\nworker-0 slots=4\n[fd00::1] slots=2 max_slots=3\n")
    (folder / ".deepspeed_env").write_text("export A=1\nB='two'\n")
    (folder / "sample.txt").write_text("words\n")
    jsonl(folder / "prompts.jsonl", LINES)


def read_words(folder: Path) -> None:
    read_hostfile(folder / "hostfile")
    read_env_file(folder / ".deepspeed_env")
    read_file(folder / "sample.txt", "--sample")
    read_prompts(folder / "prompts.jsonl")


def write_adapter(folder: Path) -> None:
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none", "rank_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    names = {"lora_A": (2, 4), "lora_B": (3, 2)}
    weights = {f"base_model.model.0.{key}.weight": torch.zeros(shape) for key, shape in names.items()}
    save_file(weights, folder / "adapter_model.safetensors")


def read_an_adapter(folder: Path) -> None:
    read_adapter(folder, nn.Sequential(nn.Linear(4, 3)))


def write_search(folder: Path) -> None:
    book = TrialRecords(folder, parse({}).config, TuneConfig())
    assert not book.records
    row = {"settings": {"strategy.zero": 1}, "status": "ok", "seconds": 3.0, "reason": "", "tokens_per_s": 10.0}
    jsonl(folder / "results.jsonl", [{**row, "value": 10.0}])


def read_search(folder: Path) -> None:
    book = TrialRecords(folder, parse({}).config, TuneConfig())
    assert book.since_best >= 0
    book.add(*book.records)


def write_machine(folder: Path) -> None:
    link = {"kind": "nvlink", "gbps": 100.0, "latency_us": 5.0}
    machine = {
        "name": "box",
        "kind": "cuda",
        "memory_gib": 80.0,
        "context_gib": 0.5,
        "flops": {"bf16": 1e15, "fp32": 1e14},
        "memory_gbps": 3000.0,
        "per_host": 8,
    }
    host = {"host_memory_gib": 100.0, "pcie_gbps": 20.0, "disk_gbps": 2.0, "launch_us": 5.0}
    (folder / "machine.json").write_text(json.dumps({**machine, **host, "link": link, "network": link}))


def read_machine(folder: Path) -> None:
    find_hardware(folder / "machine.json")


def write_mmengine(folder: Path) -> None:
    (folder / "base.yaml").write_text("optim: {type: SGD, lr: 0.1}\n")
    (folder / "config.json").write_text(json.dumps({"model": {"type": "Net", "depth": 3}, "seed": 1}))


def read_mmengine(folder: Path) -> None:
    Config.fromfile(folder / "base.yaml")
    Config.fromfile(folder / "config.json")


def write_beat(folder: Path) -> None:
    (folder / "beat").write_bytes(b"PLAIT\x01" + bytes(SIZE))


def read_a_beat(folder: Path) -> None:
    read_beat(folder / "beat")


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "text": (write_text, read_text),
    "jsonl": (write_lines, read_lines),
    "tokens": (write_tokens, read_tokens),
    "images": (write_images, read_images),
    "cifar": (write_cifar, read_cifar),
    "examples": (write_examples, read_examples),
    "tokenizer": (write_tokenizer, read_tokenizers),
    "record": (write_record, read_record),
    "words": (write_words, read_words),
    "adapter": (write_adapter, read_an_adapter),
    "search": (write_search, read_search),
    "machine": (write_machine, read_machine),
    "mmengine": (write_mmengine, read_mmengine),
    "beat": (write_beat, read_a_beat),
}


def damage(folder: Path, random: Random) -> Path:
    file = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = file.read_bytes()
    if file.suffix == ".json" and random.random() < 0.7:
        data = damaged_json(json.loads(data), random)
    elif file.suffix == ".jsonl" and random.random() < 0.7:
        lines = data.splitlines()
        number = random.randrange(len(lines))
        lines[number] = damaged_json(json.loads(lines[number]), random)
        data = b"\n".join(lines) + b"\n"
    else:
        data = spoiled(data, random)
    file.write_bytes(data)
    return file


def whole(kind: str, folder: Path) -> Path:
    folder.mkdir()
    write, read = KINDS[kind]
    write(folder)
    kept = folder.with_name(f"{folder.name}-kept")
    shutil.copytree(folder, kept)
    read(folder)  # undamaged it is read
    return kept


def test_no_file_ends_in_a_traceback(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    wholes = {kind: whole(kind, tmp_path / kind) for kind in KINDS}
    seen: Counter[str] = Counter()
    for name, random in draws(request, "data", 80, 250):
        kind = random.choice(sorted(KINDS))
        folder = tmp_path / "damaged"
        shutil.copytree(wholes[kind], folder)
        file = damage(folder, random)
        try:
            with bounded():
                KINDS[kind][1](folder)
        except PlaitError as error:
            str(error).encode()
            seen["refused"] += 1
        except BaseException:
            print(f"{name}: {kind}, {file.name}: {file.read_bytes()!r:.2000}")
            raise
        else:
            seen["read"] += 1
        shutil.rmtree(folder)
    assert min(seen["refused"], seen["read"]) > 4
