"""Unedited models of transformers over pipeline stages: what one process does, for each way in which layers are called.

All other architectures are held against one process in `tests/unit/distributed/test_pipeline_calls.py`, without ranks.
"""

from __future__ import annotations

import pytest

from tests.multi.pipelines import Way, assert_parity
from tests.multi.ranks import RankPool


@pytest.mark.parametrize(
    "name",
    [
        "causal-lm/granite",  # scales its embeddings and logits
        "causal-lm/jamba",  # unlike layers
        "causal-lm/gemma3n_text",  # inputs of each layer from an embedding
        "masked-lm/deberta-v2",  # positions that all layers read, from a weight outside of them
        "seq2seq-lm/t5",  # an encoder and a decoder; position biases that the first layer of each computes
        "contrastive/clip",  # two towers
    ],
)
def test_two_stages(two_ranks: RankPool, name: str) -> None:
    assert_parity(two_ranks, name, 2, Way("1f1b"), tolerance=1e-4)


@pytest.mark.parametrize(
    ("name", "schedule"), [("seq2seq-lm/t5", "interleaved_1f1b"), ("seq2seq-lm/bart", "interleaved_1f1b")]
)
def test_several_stages_per_rank(two_ranks: RankPool, name: str, schedule: str) -> None:
    assert_parity(two_ranks, name, 4, Way(schedule), tolerance=1e-4)


def test_sharded_stages(four_ranks: RankPool) -> None:
    assert_parity(four_ranks, "seq2seq-lm/t5", 4, Way("1f1b", replicas=2, reshard=True), tolerance=1e-4)
