"""Quantized weights in folders are computed back to the numbers that the library which wrote them would use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.refusals import refused
from torch import Tensor

from plait.checkpoint import open_source
from plait.errors import CheckpointError, ModelError
from plait.models.common.weights import StoredWeights


def folder(path: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return path


def read(path: Path) -> dict[str, Tensor]:
    """Both readers of folders, which have to agree."""
    with StoredWeights(path) as stored, open_source(path) as source:
        values = {name: stored.read(name) for name in stored.shapes}
        assert {f"model.{name}" for name in values} == source.entries.keys()
        for name, value in values.items():
            assert value.shape == stored.shapes[name] == source.entries[f"model.{name}"].shape
            assert torch.equal(value, source.read(f"model.{name}"))
            row = (slice(1, 2), *(slice(0, size) for size in value.shape[1:]))
            assert torch.equal(stored.read(name, row), value[row])
    return values


def test_blocks_of_8_bits_as_deepseek_publishes_them(tmp_path: Path) -> None:
    codes, scales = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "norm.weight": torch.randn(7)}
    values = read(folder(tmp_path, tensors, quant_method="fp8", weight_block_size=[2, 4]))
    expected = torch.stack(
        [torch.stack([codes[i, j].float() * scales[i // 2, j // 4] for j in range(7)]) for i in range(5)]
    )
    assert torch.equal(values["a.weight"], expected)
    assert torch.equal(values["norm.weight"], tensors["norm.weight"])


def test_scales_that_fit_no_blocks_are_named(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(5, 7).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}
    folder(tmp_path, tensors, quant_method="fp8", weight_block_size=[2, 4])
    with refused(ModelError, "a.weight_scale_inv", (1, 1), (2, 4)):
        StoredWeights(tmp_path)


def test_four_bits_of_gpt_oss(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 132, (3, 4, 2), dtype=torch.uint8)
    tensors = {"experts.up_blocks": blocks, "experts.up_scales": scales}
    values = read(folder(tmp_path, tensors, quant_method="mxfp4"))
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(values["experts.up"], expected)


@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_of_bitsandbytes(tmp_path: Path, nested: bool) -> None:
    levels, codes = torch.linspace(-1, 1, 16), torch.randint(0, 16, (6, 8), dtype=torch.uint8)
    scales = torch.rand(6) + 0.5  # one for each block of 8
    state = {"quant_type": "nf4", "blocksize": 8, "shape": [6, 8], "dtype": "bfloat16"}
    tensors = {
        "a.weight": (codes.flatten()[::2] * 16 + codes.flatten()[1::2]).view(-1, 1),
        "a.weight.quant_map": levels,
    }
    if nested:
        table, index, outer = torch.linspace(-1, 1, 256), torch.randint(0, 256, (6,)), torch.tensor([2.0, 3.0])
        scales = table[index] * outer.repeat_interleave(4)[:6] + 0.25
        state |= {"nested_blocksize": 4, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors |= {
            "a.weight.absmax": index.to(torch.uint8),
            "a.weight.nested_absmax": outer,
            "a.weight.nested_quant_map": table,
        }
    else:
        tensors["a.weight.absmax"] = scales
    packed = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = packed
    values = read(folder(tmp_path, tensors, quant_method="bitsandbytes", load_in_4bit=True))
    assert values.keys() == {"a.weight"}
    assert torch.equal(values["a.weight"], levels[codes.int()] * scales[:, None])


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    codes, scales = torch.randint(-127, 128, (4, 6), dtype=torch.int8), torch.rand(4)
    tensors = {"a.weight": codes, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    values = read(folder(tmp_path, tensors, quant_method="bitsandbytes", load_in_8bit=True))
    assert values.keys() == {"a.weight"}
    torch.testing.assert_close(values["a.weight"], codes.float() * scales[:, None] / 127)


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    folder(tmp_path, {"a.qweight": torch.zeros(2, 2, dtype=torch.int32)}, quant_method="gptq")
    with refused(ModelError, "quantization_config.quant_method='gptq'"):
        StoredWeights(tmp_path)
    with refused(CheckpointError, "quantization_config.quant_method='gptq'"):
        open_source(tmp_path)
