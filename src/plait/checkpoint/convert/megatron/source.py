"""A checkpoint of Megatron, opened as the model of `transformers` that computes the same."""

from __future__ import annotations

from pathlib import Path

from plait.checkpoint.convert.megatron.distributed import read_distributed
from plait.checkpoint.convert.megatron.folder import check_backend, iteration, rank_files
from plait.checkpoint.convert.megatron.gpt2 import as_gpt2
from plait.checkpoint.convert.megatron.llama import as_llama
from plait.checkpoint.convert.megatron.ranks import read_ranks
from plait.checkpoint.convert.megatron.whole import Whole
from plait.checkpoint.convert.source import Source
from plait.checkpoint.convert.view import View, first_rows
from plait.errors import CheckpointError

_POSITIONS = "embedding.position_embeddings.weight"
_WORDS = ("model.model.embed_tokens.weight", "model.transformer.wte.weight", "model.lm_head.weight")
"""What has a row for each word."""


def open_megatron(path: Path) -> Source:
    """The weights, under the names of `transformers`; `state["config"]` describes the model.

    Megatron need not be installed, and nothing in the files is executed. The optimizer's state is left out.
    """
    folder = iteration(path)
    if rank_files(folder):
        whole = read_ranks(folder)
    else:
        check_backend(folder)
        whole = read_distributed(folder)
    described = as_gpt2(whole) if f"model.{_POSITIONS}" in whole.entries else as_llama(whole)
    _refuse_the_rest(whole, {part for parts, _ in described.recipes.values() for part in parts})
    model = {"type": "hf", "config": described.config}
    return View(whole, described.recipes, state={"config": {"model": model}})


def _refuse_the_rest(whole: Whole, used: set[str]) -> None:
    copied = {"model.output_layer.weight"} if whole.tied else set()
    left = sorted(name.removeprefix("model.") for name in whole.entries.keys() - used - copied)
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise CheckpointError(f"{whole.path} holds what no model has that is known here: {shown}")


def without_padding(source: Source, words: int) -> Source:
    """The first so many rows of the vocabulary: Megatron adds some, so that ranks can share it evenly."""
    return first_rows(source, [name for name in _WORDS if name in source.entries], words)
