"""What an online phase has made can be talked to, in a terminal and over HTTP, with the weights that it ended with."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.generate import open_conversation
from plait.generate.conversation import Turn
from plait.generate.options import Sampling
from plait.generate.serve import Limits, Server
from plait.posttrain.run import phase_runner

RUN: dict[str, Any] = {
    "device": "cpu",
    "model": {"type": "llama", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16},
    "posttrain": {"data": [{"type": "task", "samples": 60, "size": 1}], "val_fraction": 0.1},
    "plan": "off",
    "optim": {"lr": 3e-2},
    "train": {"max_steps": 1},
    "batch": {"total": 8},
    "log": {"console": "none"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    with phase_runner("sft", {**RUN, "work_dir": str(folder)}) as runner:
        runner.train()
    return str(folder)


@pytest.mark.parametrize(
    ("phase", "lora", "part"),
    [("ppo", False, False), ("ppo", True, True), ("grpo", True, False)],
    ids=["ppo", "ppo, adapter alone", "grpo, adapter inside"],
)
def test_a_result_answers_with_the_weights_that_training_ended_with(
    base: str, tmp_path: Path, phase: str, lora: bool, part: bool
) -> None:
    description = {
        **RUN,
        "work_dir": str(tmp_path),
        "posttrain": {**RUN["posttrain"], "start": base},
        "rollout": {"prompts": 8 if phase == "ppo" else 4, "max_new_tokens": 4},
        phase: {"reward": "task"} if phase == "ppo" else {"reward": "task", "group": 2},
        "checkpoint": {"trainable_only": part},
        **({"lora": {"rank": 2}} if lora else {}),
    }
    ids = torch.randint(1, 12, (1, 9))
    with phase_runner(phase, description) as runner:
        runner.train()
        model = runner.engine.model.eval()
        with torch.no_grad():
            expected = model(ids)
    speaker = open_conversation(str(tmp_path))
    with torch.no_grad():
        assert torch.allclose(speaker.generator.model(ids), expected, atol=1e-5)
    prompt = speaker.encode_conversation([Turn("user", "cab=")]).tokens
    ((answer, _),) = speaker.write([prompt], Sampling(4, temperature=0.0))
    server = Server(speaker, host="127.0.0.1", port=0, token=None, limits=Limits(), log=lambda _: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        asked = {"messages": [{"role": "user", "content": "cab="}], "temperature": 0, "max_tokens": 4}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            told = json.load(reply)["choices"][0]["message"]["content"]
    finally:
        server.stop()
        thread.join()
    assert told == answer
