"""Predict the time of a step, as the sum over operations: of arithmetic, memory traffic or communication.

[Note: what overlaps] The host starts operations ahead of the device, so a step takes as long as the slower of the two.
Communication between data-parallel ranks overlaps with computation, and lengthens a step only if it takes longer.
Communication inside a layer (tensor, context and expert parallelism) and between pipeline stages does not overlap.
Copies between device and host overlap too, also those in opposite directions with each other. For offload see also
`ledger`, [Note: what an offloaded step waits for].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from plait.config import Layout, RunConfig
from plait.distributed import replaced
from plait.launch import Phase
from plait.models import attention
from plait.plan.hardware import Hardware
from plait.plan.ledger import PER_MICRO_BATCH, PER_STEP
from plait.precision import make_policy
from plait.torch_internals import (
    aten_cudnn,
    aten_cudnn_backward,
    aten_efficient,
    aten_efficient_backward,
    aten_flash,
    aten_flash_backward,
    aten_plain_efficient_backward,
    aten_plain_flash_backward,
    aten_to_copy,
    body_of_custom_op,
    group_by_name,
    is_group_name,
    packet_of,
    schema_of,
    storage_key,
    tree_leaves,
)

# The FLOPs of an operation, and the bytes that it reads and writes.


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
"""Operations that start no kernel on the device."""
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
"""Matrix multiplications, and the index of the argument that is the left matrix."""


def starts_kernel(func: Any) -> bool:
    """Return whether an operation starts a kernel on the device."""
    return not func.is_view and func.namespace in ("aten", "prims") and schema_of(func).name not in _FREE


def crosses(func: Any, args: Any, out: Any) -> Literal["out", "in"] | None:
    """Return `in` for a copy from host to device, `out` for one from device to host, None for other operations."""
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
    """Return (FLOPs of an operation, its kind); 0 FLOPs for kind `memory`: its time depends on the bytes only."""
    packet = packet_of(func)
    left = _PRODUCTS.get(packet)
    if left is not None:
        return 2 * int(out.numel()) * int(args[left].shape[-1]), "matmul"
    count = flop_registry.get(packet)
    if count is None and "attention_for_cpu" not in schema_of(func).name:  # torch's own table does not have it
        return 0, "memory"
    if "attention" in schema_of(func).name:
        return _attention_flops(func, args), "attention"
    assert count is not None
    return int(count(*args, **kwargs, out_val=out)), "matmul"


def _attention_flops(func: Any, args: Any) -> int:
    """Return the FLOPs: two matrix multiplications forward, five backward (one recomputed); half if it is causal."""
    back = "backward" in schema_of(func).name
    q, k = (args[1], args[2]) if back else (args[0], args[1])
    named = {argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)}
    product = 2 * int(q.numel()) * int(k.shape[-2])
    return product * (5 if back else 2) // (2 if named.get("is_causal") or named.get("causal") else 1)


def computes_in(func: Any, args: Any, out: Any) -> torch.dtype:
    """Return the number format whose peak rate limits an operation."""
    left = _PRODUCTS.get(packet_of(func))
    tensors = [args[left]] if left is not None else [t for t in tree_leaves((args, out)) if isinstance(t, Tensor)]
    return tensors[0].dtype if tensors else torch.float32


def bytes_moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
    if func in _LOOKUPS:
        return 2 * sum(map(_nbytes, made))  # only the looked-up rows of a table are read
    read = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
    moved = sum(map(_nbytes, read))
    known = {storage_key(tensor) for tensor in read}
    # Tensors that are changed in place are read and written; new ones are only written.
    moved += sum(_nbytes(tensor) for tensor in made if storage_key(tensor) not in known)
    if schema_of(func).is_mutable:
        moved += sum(map(_nbytes, _changed(func, args, kwargs)))
    return moved


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    tensors = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors += [tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor)]
    return tensors


def _nbytes(tensor: Tensor) -> int:
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


# The bytes that a collective sends, and the axes of the layout that its ranks lie along.


_COLLECTIVES = {
    "allgather": "gather",
    "_allgather_base": "gather",
    "allgather_into_tensor_coalesced": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter": "scatter",
    "_reduce_scatter_base": "scatter",
    "reduce_scatter_tensor_coalesced": "scatter",
    "reduce_scatter_tensor": "scatter",
    "allreduce": "reduce",
    "allreduce_coalesced": "reduce",
    "all_reduce": "reduce",
    "alltoall": "exchange",
    "alltoall_base": "exchange",
    "all_to_all_single": "exchange",
    "broadcast": "send",
    "send": "send",
    "recv_": "",
    "recv_any_source_": "",
    "barrier": "",
    "wait_tensor": "",
    "_wrap_tensor_autograd": "",
}
"""Names of torch's collectives → their kind; empty for those that send nothing: a receive is counted by its sender."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective, as one rank sees it."""

    kind: str
    bytes: int
    """Bytes of the whole tensor that is gathered, scattered, reduced or exchanged; or of the tensor that is sent."""
    kept: float
    """How many of these bytes do not leave this rank."""
    ranks: int
    stride: int
    """The difference between the numbers of neighbouring ranks of the group."""
    axes: tuple[str, ...]

    @property
    def axis(self) -> str:
        """The axes of the layout along which its ranks differ, joined by `+`."""
        return "+".join(self.axes)

    @property
    def is_data_parallel(self) -> bool:
        """Whether it gathers parameters or reduces gradients, between ranks with different samples."""
        others = set(self.axes) - {"dp_replicate", "dp_shard"}
        return len(others) < len(self.axes) or (others <= {"cp", "ep"} and self.kind in ("gather", "scatter", "reduce"))

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, with the best algorithm: a reduction is a reduce-scatter and an all-gather."""
        return (2 if self.kind == "reduce" else 1) * (self.bytes - self.kept)

    def seconds(self, hardware: Hardware) -> float:
        """Return its seconds if no other communication is running."""
        link = hardware.link_between(self.ranks, self.stride)
        hops = {"reduce": 2 * (self.ranks - 1), "send": 1}.get(self.kind, self.ranks - 1)
        # With many ranks the latency does not grow with every hop: collectives use trees instead of rings.
        return self.sent / (link.gbps * 1e9) + min(hops, 16) * link.latency_us * 1e-6


def kind_of(func: Any) -> str | None:
    """Return the kind of a collective; empty if it sends nothing, None if it is not known."""
    name = schema_of(func).name.split("::")[1]
    return _COLLECTIVES.get(name.rstrip("_"), _COLLECTIVES.get(name))


def message_of(func: Any, args: Any, out: Any, layout: Layout | None = None) -> CollectiveCall | None:
    """Return the call of a collective that sends something, else None. Without a layout it has no axes."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    kind = kind_of(func)
    group = _group_of(args) if kind else None
    if not kind or group is None or group.size() == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    if kind == "exchange":
        size, kept = _exchanged(func, args, group)
    else:
        size = max(tensor.nbytes for tensor in tree_leaves((args, out)) if isinstance(tensor, Tensor))
        kept = 0.0 if kind == "send" else size / len(ranks)
    axes = () if layout is None else axes_of(layout, ranks)
    return CollectiveCall(kind, size, kept, len(ranks), ranks[1] - ranks[0], axes)


def _exchanged(func: Any, args: Any, group: dist.ProcessGroup) -> tuple[int, float]:
    """Return (bytes of a rank's input to an all-to-all, how many it keeps: 1/size of them unless there are splits)."""
    named = {argument.name: value for argument, value in zip(schema_of(func).arguments, args, strict=False)}
    given = named["input"] if "input" in named else named["input_tensors"]
    splits = named.get("input_split_sizes")
    if isinstance(given, Tensor):
        rows = len(given)
        own_rows = splits[group.rank()] if splits else rows / group.size()
        return given.nbytes, given.nbytes * own_rows / rows if rows else 0.0
    return sum(argument.nbytes for argument in given), float(given[group.rank()].nbytes)


def axes_of(layout: Layout, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the axes of the layout along which these ranks differ."""
    axes, inner = [], layout.size
    for axis, size in layout.sizes().items():
        inner //= size
        if len({rank // inner % size for rank in ranks}) > 1:
            axes.append(axis)
    return tuple(axes)


def _group_of(args: Any) -> dist.ProcessGroup | None:
    for leaf in tree_leaves(args):
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
        if isinstance(leaf, str) and is_group_name(leaf):
            return group_by_name(leaf)
        if type(leaf).__name__ == "ScriptObject":
            return dist.ProcessGroup.unbox(leaf)
    return None


_KERNEL_S = 2e-6
"""Seconds that the smallest kernel takes on the device."""
_SUSTAINED = 0.95
"""The fraction of the rate of short runs (`Hardware.rate`) that a device sustains in training."""
_EDGES = 0.3
"""The fraction of a matrix multiplication's memory traffic that does not overlap with its arithmetic."""
_POLICY = 2.0
"""Selective recomputation calls a policy for every operation, which multiplies the host's time by this."""
_FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


class Timing:
    """Sums the predicted times of all operations that the recorder reports to it."""

    def __init__(self, hardware: Hardware, config: RunConfig, layout: Layout) -> None:
        self._hardware, self._layout = hardware, layout
        self._fp32 = "tf32" if make_policy(config.precision).tf32 else "fp32"
        self._stage = config.strategy.stage
        selective = config.strategy.recompute.mode == "selective" and not config.strategy.compile.enabled
        self._start_s = hardware.launch_us * 1e-6 * (_POLICY if selective else 1.0)
        # All kernels of a CUDA graph are started at once.
        records = config.strategy.graphs is True and hardware.kind == "cuda"
        self._recorded = (Phase.FORWARD, Phase.BACKWARD) if records else ()
        self._watching = True
        self.numbers: dict[str, float] = defaultdict(float)
        """The sums so far, by their names in `Ledger`."""

    def restart(self) -> None:
        """Set all sums to zero."""
        self.numbers.clear()

    def stop(self) -> None:
        """Ignore all later operations."""
        self._watching = False

    def saw(self, phase: Phase, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the time of one operation, which was run in `phase`."""
        if not self._watching:
            return
        message = message_of(func, args, out, self._layout)
        if message is not None:
            self._count_message(phase, message)
        elif (way := crosses(func, args, out)) is not None:
            self._count_copy(phase, way, out.nbytes)
        elif starts_kernel(func):
            flops, kind = flops_of(func, args, kwargs, out)
            self.add(phase, kind, flops, bytes_moved(func, args, kwargs, out), computes_in(func, args, out))

    def add(self, phase: Phase, kind: str, flops: int, moved: int, dtype: torch.dtype, kernels: int = 1) -> None:
        """Add an operation of `flops` FLOPs that reads and writes `moved` bytes, as `kernels` kernels."""
        if not self._watching:
            return
        self.numbers[f"compute.{phase}.{kind}"] += self.seconds(kind, flops, moved, dtype)
        self._count_starts(phase, kernels)
        self.numbers["flops"] += flops

    def _count_starts(self, phase: Phase, kernels: int = 1) -> None:
        if phase not in self._recorded:
            self.numbers[f"host.{phase}"] += kernels * self._start_s

    def seconds(self, kind: str, flops: int, moved: int, dtype: torch.dtype) -> float:
        """Return the seconds of an operation on the device."""
        machine = self._hardware
        travel = moved / (machine.memory_gbps * 1e9 * machine.memory_efficiency)
        if not flops:
            return max(travel, _KERNEL_S)
        dtype_name = _FORMATS.get(dtype, "fp32")
        rate = machine.rate(self._fp32 if dtype_name == "fp32" else dtype_name) * _SUSTAINED
        if kind == "attention":
            return max(flops / (rate * machine.attention_efficiency), travel, _KERNEL_S)
        return flops / rate + _EDGES * travel + _KERNEL_S

    def _count_message(self, phase: Phase, message: CollectiveCall) -> None:
        how = "hidden" if message.is_data_parallel else "waited"
        when = PER_MICRO_BATCH if self._comes_again(message) else PER_STEP
        self.numbers[f"{how}.{message.axis}.{when}"] += message.seconds(self._hardware)
        self.numbers[f"sent.{message.axis}.{when}"] += message.sent
        self._count_starts(phase)

    def _count_copy(self, phase: Phase, way: Literal["out", "in"], size: int) -> None:
        # Gradients are copied out with the last micro-batch only; activations and weights are copied with each.
        per_micro_batch = phase is Phase.FORWARD or (phase is Phase.BACKWARD and way == "in")
        self.numbers[f"link.{way}.{PER_MICRO_BATCH if per_micro_batch else PER_STEP}"] += size / (
            self._hardware.pcie_gbps * 1e9
        )
        self._count_starts(phase)

    def _comes_again(self, message: CollectiveCall) -> bool:
        """Return whether every micro-batch has it; for data parallelism this depends on the ZeRO stage."""
        if not message.is_data_parallel:
            return True
        return self._stage == 3 or (self._stage == 2 and message.kind != "gather")


# Kernels that torch chooses only on a GPU, and the memory that kernels allocate for themselves.
#
# That memory was measured on an H200 (torch 2.11): the peak during a call, less its arguments and results.


aten = torch.ops.aten

MATMUL_WORKSPACE = 32 * 2**20
"""Bytes that cuBLAS keeps for each thread that multiplies: that of the forward and that of the backward pass."""


@contextmanager
def kernels_of_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Until the block ends, attention calls the kernel that torch chooses on a GPU of this compute capability."""
    cudnn = capability[0] >= 9

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if q.device.type != "cuda":
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        wide = q.dtype == torch.float32
        if wide and enable_gqa and k.shape[1] != q.shape[1]:
            # No fast kernel has a grouped form in fp32: torch computes all scores.
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.empty(bias.shape, dtype=q.dtype, device=q.device)
        if wide or (bias is not None and not cudnn):
            op = aten_efficient
            return _first(op(q, k, v, bias, True, dropout_p, is_causal, scale=scale))
        if cudnn:
            op = aten_cudnn
            return _first(op(q, k, v, bias, True, dropout_p, is_causal, False, scale=scale))
        op = aten_flash
        return _first(op(q, k, v, dropout_p, is_causal, False, scale=scale))

    def attend_blocks(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
        return attend(q, k, v, is_causal=True, enable_gqa=enable_gqa)

    plain = F.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attend))
        stack.enter_context(replaced(attention, "_compiled_flex_attention", attend_blocks))
        yield


def _first(results: tuple[Tensor, ...]) -> Tensor:
    return results[0]


_BACKWARD_ATTENTION = {
    aten_cudnn_backward.default,
    aten_flash_backward.default,
    aten_plain_flash_backward.default,
}
_BACKWARD_EFFICIENT = {
    aten_efficient_backward.default,
    aten_plain_efficient_backward.default,
}


def hidden_bytes(func: Any, args: Any) -> int:
    """Return the bytes that a kernel allocates while it runs, beside its arguments and results."""
    if func in _BACKWARD_ATTENTION:
        _, q, k = args[:3]
        rows = q.numel() // q.shape[-1]
        # The gradient of the queries is summed in fp32, and there is an fp32 sum per row. With grouped queries,
        # gradients of keys and values are first computed for each query head.
        spread = 2 * q.numel() * q.element_size() if k.numel() < q.numel() and k.shape[1] < q.shape[1] else 0
        return 4 * int(q.numel()) + 4 * int(rows) + int(spread)
    if func in _BACKWARD_EFFICIENT:
        q = args[1]
        return int(q.numel() * max(4, q.element_size()) + 4 * (q.numel() // q.shape[-1]))
    return 0


def body_of(func: Any) -> Callable[..., Any] | None:
    """Return the function behind one of Plait's own operators, whose operations are recorded one by one; else None."""
    if getattr(func, "namespace", None) != "plait":
        return None
    return body_of_custom_op(func)
