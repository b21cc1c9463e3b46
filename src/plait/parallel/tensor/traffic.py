"""What tensor and sequence parallelism send, in theory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of the tensors that go through each kind of collective, on one rank.

    For an all-gather and a reduce-scatter that is the size of the whole; for an all-reduce and an all-to-all, of what
    a rank puts in.
    """

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    all_to_all: int = 0

    def sent(self, size: int) -> float:
        """Bytes that each of `size` ranks sends: an all-reduce goes around a ring twice, the others once."""
        once = self.all_gather + self.reduce_scatter + self.all_to_all
        return (2 * self.all_reduce + once) * (size - 1) / size


def tensor_traffic(
    *,
    tokens: int,
    dim: int,
    layers: int,
    sequence: bool,
    itemsize: int,
    recompute: bool = False,
    shared: int = 0,
    exchanged: int = 0,
    vocabulary: bool = True,
    mixtures: int = 0,
    top_k: int = 0,
    beside: bool = False,
) -> Traffic:
    """What one forward and backward pass over `tokens` tokens brings, for layers of two regions each.

    With A = tokens · dim · itemsize, the activations of one place:

    - tensor parallel alone, a layer: all-reduce 4 A (each region's sum, and its input's gradient);
    - with `sequence`, a layer: all-gather 4 A and reduce-scatter 4 A, which is as much as 4 A all-reduced; and
      all-gather 2 A in all, where the last block is left and, in the backward pass, where the first was entered;
    - `recompute` of every layer repeats its forward pass up to the last matrix product: all-reduce A a layer, or
      all-gather 2 A and reduce-scatter A;
    - `vocabulary` (embedding and head are split): all-reduce 2 A, for the embedding's sum and the gradient of the
      head's input, and 12 bytes a token for the loss (the largest logit, the sum, the target, in fp32);
    - `shared`: parameters of the whole model that all ranks have and whose gradients are summed, in fp32: all-reduce
      4 bytes each. These are, with `sequence`, the blocks' norms and the biases of row-parallel layers; and keys and
      values with fewer heads than ranks;
    - `exchanged`: parameters of fused projections that this rank has: all-to-all itemsize bytes each, forward (again
      with `recompute`) and backward;
    - `mixtures` of the layers have experts in place of their second region: all-reduce 2 A as there, and 4 bytes for
      each of the `top_k` weights of a token, whose gradient is summed. With `sequence` a mixture sees all tokens: to
      the all-reduces comes all-gather 2 A, and there is no reduce-scatter. Shared experts `beside` the others are a
      region more, on all tokens: all-reduce 2 A, and with `recompute` A, for the sum of the others.

    The number of ranks does not appear: `Traffic.sent` brings it in.
    """
    place = tokens * dim * itemsize
    again = 1 if recompute else 0
    all_reduce = 4 * shared
    all_gather = reduce_scatter = 0
    if sequence:
        all_gather = (4 + 2 * again) * layers * place + 2 * place
        reduce_scatter = ((4 + again) * layers - 2 * mixtures) * place
        all_reduce += 2 * mixtures * place
    else:
        all_reduce += (4 + again) * layers * place
    all_reduce += mixtures * (4 * top_k * tokens + (2 + again) * beside * place)
    if vocabulary:
        all_reduce += 2 * place + 12 * tokens
    return Traffic(all_reduce, all_gather, reduce_scatter, (2 + again) * exchanged * itemsize)
