"""What an operation does: its arithmetic, and the bytes that it moves."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from plait.torch_internals import aten_to_copy, packet_of, schema_of, storage_key, tree_leaves

aten = torch.ops.aten

_FREE = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::_local_scalar_dense",
    "aten::lift_fresh",
    "aten::resize_",
    "aten::set_",
    "aten::_unsafe_view",
}
"""Operations that start nothing on the device."""
_LOOKUPS = {aten.embedding.default, aten.index.Tensor, aten.gather.default}
_PRODUCTS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.matmul: 0,
    aten.linear: 0,
    aten.addmm: 1,
    aten.addmm_: 1,
    aten.baddbmm: 1,
}
"""Matrix products, and which argument is the left matrix."""


def starts_kernel(func: Any) -> bool:
    """Whether an operation starts something on the device."""
    return not func.is_view and func.namespace in ("aten", "prims") and schema_of(func).name not in _FREE


def crosses(func: Any, args: Any, out: Any) -> Literal["out", "in"] | None:
    """The way that an operation copies between device and host; None for all others."""
    if func is aten.copy_.default:
        source, target = args[1].device.type, args[0].device.type
    elif func is aten_to_copy.default:
        source, target = args[0].device.type, out.device.type
    else:
        return None
    if source == target:
        return None
    return "in" if source == "cpu" else "out"


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str]:
    """FLOPs of an operation, and its kind; 0 for those that memory holds up."""
    packet = packet_of(func)
    left = _PRODUCTS.get(packet)
    if left is not None:
        return 2 * int(out.numel()) * int(args[left].shape[-1]), "matmul"
    count = flop_registry.get(packet)
    if count is None and "attention_for_cpu" not in schema_of(func).name:  # which torch's own table leaves out
        return 0, "memory"
    if "attention" in schema_of(func).name:
        return _attention_flops(func, args), "attention"
    assert count is not None
    return int(count(*args, **kwargs, out_val=out)), "matmul"


def _attention_flops(func: Any, args: Any) -> int:
    """Two products forward; five back, one of which is made again. Half of it where attention is causal."""
    back = "backward" in schema_of(func).name
    q, k = (args[1], args[2]) if back else (args[0], args[1])
    named = {argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)}
    product = 2 * int(q.numel()) * int(k.shape[-2])
    return product * (5 if back else 2) // (2 if named.get("is_causal") or named.get("causal") else 1)


def computes_in(func: Any, args: Any, out: Any) -> torch.dtype:
    """The format whose speed an operation has."""
    left = _PRODUCTS.get(packet_of(func))
    tensors = [args[left]] if left is not None else [t for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
    return tensors[0].dtype if tensors else torch.float32


def bytes_moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operation reads and writes."""
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    if func in _LOOKUPS:
        return 2 * sum(map(_nbytes, made))  # of a table, only the rows that are asked for
    read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    moved = sum(map(_nbytes, read))
    known = {storage_key(each) for each in read}
    # What is changed in place is read and written; what is new is only written.
    moved += sum(_nbytes(each) for each in made if storage_key(each) not in known)
    if schema_of(func).is_mutable:
        moved += sum(map(_nbytes, _changed(func, args, kwargs)))
    return moved


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found


def _nbytes(tensor: Tensor) -> int:
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
