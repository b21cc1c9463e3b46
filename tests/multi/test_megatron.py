"""What real Megatron Core saved computes the same here, in whichever format and from however many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.convert.detect import open_source
from plait.cli.convert import PLAIN, ConvertOptions, convert
from tests.multi import megatron_peer as peer
from tests.multi.ranks import RankPool

pytest.importorskip("megatron.core", reason="Megatron Core is not installed")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Ranks of their own: Megatron changes the processes that it is loaded into."""
    found = {size: RankPool(size, timeout_s=240.0, lasting=True) for size in (1, 2, 4)}
    yield found
    for pool in found.values():
        pool.close()


def saved(
    pools: dict[int, RankPool], root: Path, family: str, *, tp: int = 1, pp: int = 1, ep: int = 1, virtual: int = 1
) -> Tensor | None:
    """Save a model in both formats; its logits, where a rank has them."""
    answer: Tensor | None = pools[tp * pp * ep].run(peer.save, root, family, tp, pp, ep, virtual)[0]
    return answer


def converted(source: Path, target: Path, **options: Any) -> Any:
    """The model that `transformers` loads from what `plait convert` wrote."""
    from transformers import AutoModelForCausalLM

    convert(str(source), str(target), ConvertOptions(**{**vars(PLAIN), "to": "hf", **options}))
    model, found = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


def assert_same_tensors(one: Path, other: Path) -> None:
    with open_source(one) as first, open_source(other) as second:
        assert first.entries == second.entries
        assert first.state == second.state
        for name in first.entries:
            assert torch.equal(first.read(name), second.read(name)), name


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("llama", 2),
        ("tied", 2),
        ("scaled", 1),
        ("qwen2", 2),
        ("qwen3", 2),
        ("mixtral", 1),
        ("qwen3_moe", 1),
        ("gpt2", 2),
    ],
)
def test_transformers_computes_what_megatron_does(
    pools: dict[int, RankPool], tmp_path: Path, family: str, tp: int
) -> None:
    expected = saved(pools, tmp_path, family, tp=tp)
    assert expected is not None
    with torch.no_grad():
        found = converted(tmp_path / "torch_dist", tmp_path / "hf")(peer.tokens()).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same_tensors(tmp_path / "torch", tmp_path / "torch_dist")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("tied", {"tp": 2, "pp": 2}),
        ("llama", {"pp": 2, "virtual": 2}),
        ("mixtral", {"ep": 2}),
        ("mixtral", {"tp": 2}),
        ("qwen3_moe", {"pp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_both_formats_hold_the_same_model(
    pools: dict[int, RankPool], tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    saved(pools, tmp_path, family, **layout)
    assert_same_tensors(tmp_path / "torch", tmp_path / "torch_dist")


def test_words_that_only_fill_up_the_vocabulary_are_left_out(pools: dict[int, RankPool], tmp_path: Path) -> None:
    saved(pools, tmp_path, "llama")
    whole = converted(tmp_path / "torch", tmp_path / "whole")
    words = peer.VOCABULARY - 7
    whole.config.vocab_size = words
    whole.config.save_pretrained(tmp_path / "meant")
    model = converted(tmp_path / "torch", tmp_path / "hf", model=str(tmp_path / "meant"))
    tokens = peer.tokens() % words
    torch.testing.assert_close(model(tokens).logits, whole(tokens).logits[..., :words])


def test_plait_goes_on_with_it(pools: dict[int, RankPool], tmp_path: Path) -> None:
    saved(pools, tmp_path, "llama", tp=2)
    convert(
        str(tmp_path / "torch"),
        str(tmp_path / "own"),
        ConvertOptions(**{**vars(PLAIN), "to": "plait", "model": "llama"}),
    )
    with open_source(tmp_path / "own") as own:
        described = own.state["config"]["model"]
        assert (described["type"], described["dim"], described["kv_heads"]) == ("llama", peer.WIDTH, peer.GROUPS)
        assert own.entries["model.blocks.0.attention.k.weight"].shape == (peer.GROUPS * 8, peer.WIDTH)
