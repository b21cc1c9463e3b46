"""Quantized weights in `transformers` folders, computed back to full ones when they are read.

A quantized tensor is stored as several: codes, scales, tables. `quantized_tensors` finds them by their names and by the
`quantization_config` of the folder, and presents each as one tensor of the original name and shape. Formats:

| `quant_method`             | stored as                                                            |
|----------------------------|----------------------------------------------------------------------|
| `fp8`                      | 8-bit floats, `…_scale_inv` with a scale per block (DeepSeek)        |
| `mxfp4`                    | `…_blocks` and `…_scales`: 4-bit floats, a power of 2 per 32 (GPT-OSS) |
| `bitsandbytes`, 4 bits     | two codes per byte, `.absmax`, `.quant_map`, `.quant_state` (nf4, fp4) |
| `bitsandbytes`, 8 bits     | int8 and `.SCB`, a scale per row                                     |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.errors import PlaitError

_SCALE_OF_BLOCKS = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_STATE = ".quant_state.bitsandbytes__"
_ROW_SCALES = ".SCB"
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of a float with 2 bits of exponent and 1 of mantissa."""


class StoredShape(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A full tensor that is computed from stored ones."""

    sources: tuple[str, ...]
    """The names of the stored tensors, in the order in which `make` takes them."""
    shape: torch.Size
    make: Callable[..., Tensor]
    """A function that returns the full tensor in fp32."""
    by_rows: bool = False
    """Whether `make` takes some rows of every source (slices of dimension 0) and returns those of the full tensor."""


def quantized_tensors(
    stored: Mapping[str, StoredShape],
    config: Mapping[str, Any] | None,
    read: Callable[[str], Tensor],
    error: Callable[[str], PlaitError],
) -> tuple[dict[str, QuantizedTensor], frozenset[str]]:
    """Return the quantized tensors of a folder by name, and the names of all stored tensors that belong to them.

    `config` is the `quantization_config` of the folder; `read` returns a small stored tensor. Raise `error` for a
    format that is not in the table above.
    """
    config = config or {}
    method = str(config.get("quant_method") or "")
    quantized: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    for name in stored:
        if name.endswith(_SCALE_OF_BLOCKS) and (weight := name.removesuffix(_SCALE_OF_BLOCKS)) in stored:
            quantized[weight] = _blocks_of_8_bits(weight, stored, config.get("weight_block_size"), error)
            used |= {weight, name}
        elif name.endswith(_BLOCKS) and (scales := name.removesuffix(_BLOCKS) + _SCALES) in stored:
            *front, groups, size = stored[name].shape
            shape = torch.Size([front[0], groups * size * 2, *front[1:]])
            quantized[name.removesuffix(_BLOCKS)] = QuantizedTensor((name, scales), shape, _from_mxfp4, by_rows=True)
            used |= {name, scales}
        elif _STATE in name:
            weight = name.partition(_STATE)[0]
            quantized[weight] = _packed_in_4_bits(weight, stored, json.loads(bytes(read(name).tolist())))
            used |= {other for other in stored if other == weight or other.startswith(f"{weight}.")}
        elif name.endswith(_ROW_SCALES) and (weight := name.removesuffix(_ROW_SCALES) + ".weight") in stored:
            quantized[weight] = QuantizedTensor((weight, name), stored[weight].shape, _from_int8, by_rows=True)
            used |= {weight, name, f"{name.removesuffix(_ROW_SCALES)}.weight_format"} & stored.keys()
    if method == "fp8":  # scales of activations, which only arithmetic in 8 bits needs
        used |= {name for name in stored if name.endswith((".activation_scale", ".input_scale"))}
    odd = [name for name, entry in stored.items() if entry.dtype in _EIGHT_BITS and name not in used]
    if odd or (method and not quantized):
        example = f" (such as {odd[0]})" if odd else ""
        raise error(
            f"quantization_config.quant_method={method or None!r}: weights in this format{example} cannot be computed "
            "back to full ones here; take the folder of the model in full precision, or write one with "
            "`AutoModel.from_pretrained(path).dequantize()` and `save_pretrained`"
        )
    return quantized, frozenset(used)


def _blocks_of_8_bits(
    weight: str, stored: Mapping[str, StoredShape], block: Sequence[int] | None, error: Callable[[str], PlaitError]
) -> QuantizedTensor:
    name = f"{weight}{_SCALE_OF_BLOCKS}"
    shape, grid = stored[weight].shape, stored[name].shape
    if stored[weight].dtype not in _EIGHT_BITS:
        raise error(
            f"{weight} has {name} and the dtype {stored[weight].dtype}, which is not an 8-bit float; take the folder "
            "of the model in full precision"
        )
    if len(grid) < 2 or len(shape) < 2:
        return QuantizedTensor((weight, name), shape, partial(_from_blocks, None))
    # Without a size in the config, blocks are as large as the numbers of scales say.
    sizes = tuple(block) if block else tuple(math.ceil(a / b) for a, b in zip(shape[-2:], grid[-2:], strict=True))
    if tuple(math.ceil(a / b) for a, b in zip(shape[-2:], sizes, strict=True)) != tuple(grid[-2:]):
        raise error(
            f"{name} has the shape {tuple(grid)}, which does not fit blocks of {sizes} of {weight} {tuple(shape)}; "
            "copy the folder again"
        )
    return QuantizedTensor((weight, name), shape, partial(_from_blocks, sizes))


def _from_blocks(sizes: Sequence[int] | None, codes: Tensor, scales: Tensor) -> Tensor:
    factors = _as_factors(scales)
    if sizes is not None:
        rows, columns = codes.shape[-2:]
        factors = factors.repeat_interleave(sizes[0], -2)[..., :rows, :]
        factors = factors.repeat_interleave(sizes[1], -1)[..., :columns]
    return codes.float() * factors


def _as_factors(scales: Tensor) -> Tensor:
    # Scales that are powers of 2 may be stored as their exponents.
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    values = torch.tensor(_FP4)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    full = values[codes.int()] * _as_factors(scales).unsqueeze(-1)
    return full.flatten(-2).transpose(1, 2).contiguous()


def _from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * (scales.float() / 127).unsqueeze(-1)


def _packed_in_4_bits(weight: str, stored: Mapping[str, StoredShape], state: Mapping[str, Any]) -> QuantizedTensor:
    nested = f"{weight}.nested_absmax" in stored
    tables = [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"] if nested else []
    sources = (weight, f"{weight}.absmax", f"{weight}.quant_map", *tables)
    return QuantizedTensor(sources, torch.Size(state["shape"]), partial(_from_4_bits, dict(state)))


def _from_4_bits(state: Mapping[str, Any], codes: Tensor, absmax: Tensor, levels: Tensor, *nested: Tensor) -> Tensor:
    scales = absmax.float().flatten()
    if nested:
        outer, map_ = nested
        per_block = outer.float().repeat_interleave(int(state["nested_blocksize"]))[: len(scales)]
        scales = map_.float()[absmax.flatten().int()] * per_block + float(state.get("nested_offset", 0.0))
    flat = codes.flatten()
    values = levels.float()[torch.stack((flat >> 4, flat & 15), -1).flatten().int()]
    shape = torch.Size(state["shape"])
    values = values[: shape.numel()]
    return (values * scales.repeat_interleave(int(state["blocksize"]))[: len(values)]).view(shape)
