"""How much context parallelism sends, as a function of sizes alone."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from plait.parallel.context.split import Kind, padded_length


class Traffic(NamedTuple):
    """Bytes that one rank sends for one micro-batch."""

    forward: int
    backward: int


def context_traffic(
    kind: Kind,
    *,
    size: int,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    element_size: int,
    recompute: bool = False,
    documents: bool = False,
) -> Traffic:
    """What one rank of `size` sends for a micro-batch of `batch` rows of `tokens` (of the whole row).

    `heads` and `kv_heads` are those that this rank has (after tensor parallelism). `element_size` is that of keys
    and values in bytes, 2 for bf16. With L = tokens / size (rows filled up until they divide), e = element_size,
    f = max(e, 4), KV = 2 · batch · kv_heads · L · head_dim, a layer sends

    | kind      | forward                  | backward                     |
    |-----------|--------------------------|------------------------------|
    | ring      | (size - 1) · KV · e      | (size - 1) · KV · (e + f)    |
    | allgather | (size - 1) · KV · e      | (size - 1) · KV · f          |
    | ulysses   | (size - 1) / size · A · e | the same                    |

    where A = 2 · batch · L · head_dim · (heads + lcm(kv_heads, size)): queries, keys, values and output, keys and
    values repeated where ranks share a head. A collective counts as what its best algorithm sends: an
    all-gather or reduce-scatter (size - 1) parts, an all-to-all (size - 1) of `size` parts.

    With `recompute` the backward pass does the layers' forward again. With `documents` the forward pass adds, once
    for all layers, the document ids: (size - 1) · batch · L · 8.
    """
    local = padded_length(tokens, size, kind) // size
    others = size - 1
    summed = max(element_size, 4)
    if kind == "ulysses":
        elements = 2 * batch * local * head_dim * (heads + lcm(kv_heads, size))
        forward = backward = others * elements // size * element_size
    else:
        message = 2 * batch * kv_heads * local * head_dim
        forward = others * message * element_size
        backward = others * message * (summed + element_size if kind == "ring" else summed)
    if recompute:
        backward += forward
    ids = others * batch * local * 8 if documents else 0
    return Traffic(layers * forward + ids, layers * backward)
