from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from plait.config.model import LlamaConfig
from plait.generate.conversation import Conversation, Turn
from plait.generate.generator import Generator
from plait.models import build_model
from plait.posttrain.data.template import ChatTokenizer, trained_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog", "a plait is several strands, worked into one — naïve café"]


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return trained_tokenizer(TEXTS * 20, 300)


@pytest.fixture
def speaker(tokenizer: ChatTokenizer, tmp_path: Path) -> Conversation:
    """An untrained model that never ends by itself, so that every answer is as long as asked for."""
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, dim=32, layers=1, heads=2, seq_len=256)
    model = build_model(config)
    with torch.no_grad():
        model.head.weight[tokenizer.end] = 0.0  # type: ignore[index, union-attr]
        model.embedding.weight.mul_(30)  # type: ignore[operator, union-attr]

    def write_down(turns: Sequence[Turn]) -> list[int]:
        return tokenizer.encode("\n".join(f"{turn.role}: {turn.content}" for turn in turns) + "\nassistant:")

    generator = Generator(model, decode=tokenizer.decode)
    return Conversation("tiny", generator, tokenizer, write_down, stop=())
