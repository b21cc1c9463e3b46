"""Predict memory and time of a module under `torch.compile`, without compiling it.

[Note: compiling in a fake world] Inductor needs a compiler, a GPU and half a minute. The decisions that matter here are
made before it, by code that a plan runs as it is: AOTAutograd traces forward and backward into one graph, and the
min-cut partitioner chooses which tensors are saved for the backward pass. Inductor then fuses elementwise operations
and reductions with their neighbours into one kernel, so intermediate results inside a kernel take no memory and no
time. A tensor exists only if a matrix multiplication, attention or the graph's output needs it. A `FusedGraph` counts
memory and time by these rules when it is called.

A module is traced once for each combination of input shapes and dtypes. Blocks with equal parameters and inputs share a
trace.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from plait.config import CompileConfig
from plait.distributed import WrapUnit, compile, is_sharded, kept_operations, replaced
from plait.plan.recorder import MemoryRecorder
from plait.plan.timing import Timing, body_of, computes_in, flops_of, hidden_bytes
from plait.torch_internals import (
    OpOverload,
    aten_unsafe_index_put,
    aten_unsafe_view,
    compiled_call_set,
    packet_of,
    set_compiled_call,
    tree_map,
)

# Which operations of a graph are fused into one kernel, and the memory and time of the kernels.


aten = torch.ops.aten

_ALONE = {
    aten.embedding_dense_backward.default,
    aten.index_put.default,
    aten_unsafe_index_put.default,
    aten.index_add.default,
    aten.scatter_add.default,
    aten.sort.default,
    aten.topk.default,
}
"""Operations that Inductor does not fuse with others, whether they are elementwise or not."""


_CHEAP_READS = 4
"""A result that needs at most 4 reads is recomputed in each kernel that uses it, as Inductor does by default."""


class FusedGraph:
    """A traced graph that is not run: a call adds the memory and time of its kernels, and allocates its outputs.

    A call takes its arguments as a list and empties it, as compiled functions do, so that arguments without other
    references are freed.
    """

    _boxed_call = True

    def __init__(self, graph: fx.GraphModule, recorder: MemoryRecorder, timing: Timing) -> None:
        self._recorder, self._timing = recorder, timing
        self._nodes = list(graph.graph.nodes)
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        self._outputs = list(self._nodes[-1].args[0])
        self._levels = self._find_levels()
        self._known_reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._known_kernels: dict[fx.Node, bool] = {}
        self._kernels = [node for node in self._nodes if self._is_kernel(node)]
        self._rise = self._find_rise()

    def __call__(self, args: list[Any]) -> list[Any]:
        """Add the memory and time of one run; return outputs with the right shapes, strides and dtypes."""
        self._recorder.paused = False  # tracing is over
        phase = self._recorder.current_phase()
        for node in self._kernels:
            if _is_extern(node):
                self._count_extern(phase, node)
        for reads, writes in self._traffic().values():
            moved = sum(_bytes(node) for node in {*reads, *writes})
            self._timing.add(phase, "memory", 0, moved, torch.float32, kernels=max(1, len(writes) // 2))
        self._recorder.rise(self._rise)
        given = dict(zip(self._inputs, args, strict=True))
        kept = {node: given[node] for node in (self._base(out) for out in self._tensors_out()) if node in given}
        del given
        args.clear()
        made: dict[fx.Node, Tensor] = {}
        return [self._output(out, made, kept) for out in self._outputs]

    def _tensors_out(self) -> list[fx.Node]:
        return [out for out in self._outputs if isinstance(out, fx.Node)]

    def _output(self, out: Any, made: dict[fx.Node, Tensor], kept: dict[fx.Node, Any]) -> Any:
        if not isinstance(out, fx.Node):
            return out
        value = out.meta["val"]
        if not isinstance(value, Tensor):
            return value
        base = self._base(out, whole=False)
        if out in kept:
            return kept[out]
        if base not in made:
            whole = base.meta["val"]
            made[base] = (
                kept[base]
                if base in kept
                else torch.empty_strided(whole.size(), whole.stride(), dtype=whole.dtype, device=whole.device)
            )
        if out is base:
            return made[base]
        return torch.as_strided(made[base], value.size(), value.stride(), value.storage_offset())

    # ---- which nodes are kernels

    def _find_levels(self) -> dict[fx.Node, int]:
        """Return node → level; nodes that can be fused and have the same level can be one kernel.

        The level of a node is the largest number of kernels that are not fused (`_is_extern`) on a path to it. A node
        that is fused moves up to the lowest level of its users.
        """
        levels: dict[fx.Node, int] = {}
        for node in self._nodes:
            above = (levels[source] + _is_extern(source) for source in node.all_input_nodes)
            levels[node] = max(above, default=0)
        for node in reversed(self._nodes):
            if node.op == "call_function" and not _is_extern(node) and node.users:
                wanted = min(levels[user] for user in node.users)
                if all(user.op != "output" for user in node.users):
                    levels[node] = max(levels[node], wanted)
        return levels

    def _is_kernel(self, node: fx.Node) -> bool:
        """Return whether a node's result is written to memory."""
        if node not in self._known_kernels:
            self._known_kernels[node] = self._find_kernel(node)
        return self._known_kernels[node]

    def _find_kernel(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not _makes_tensor(node):
            return False
        if _is_extern(node):
            return True
        if _is_part(node):
            return False
        users = list(self._users(node))
        if any(user.op == "output" or _is_extern(user) for user in users):
            return True
        later = any(self._levels[user] > self._levels[node] for user in users)
        # Results that are cheap to compute are recomputed and not stored.
        return later and (_is_reduction(node) or len(self._reads(node)) > _CHEAP_READS)

    def _users(self, node: fx.Node) -> Iterable[fx.Node]:
        """Yield the users of a node; instead of its views, their users."""
        for user in node.users:
            if _is_part(user):
                yield from self._users(user)
            else:
                yield user

    def _base(self, node: fx.Node, *, whole: bool = True) -> fx.Node:
        """Return the node whose memory a node is a view of; with `whole`, all results of a kernel count as one node."""
        while _is_part(node):
            source = node.all_input_nodes[0]
            if not whole and node.target is operator.getitem and not _is_part(source):
                break
            node = source
        return node

    # ---- their memory and time

    def _reads(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes in memory that are read to compute a node."""
        if node not in self._known_reads:
            self._known_reads[node] = self._find_reads(node)
        return self._known_reads[node]

    def _find_reads(self, node: fx.Node) -> frozenset[fx.Node]:
        reads: set[fx.Node] = set()
        for source in node.all_input_nodes:
            base = self._base(source)
            if base.op != "call_function" or self._is_kernel(base):
                reads.add(base)
            else:
                reads |= self._reads(base)
        return frozenset(reads)

    def _traffic(self) -> dict[int, tuple[set[fx.Node], set[fx.Node]]]:
        """Return level → (nodes that its fused kernels read, nodes that they write)."""
        traffic: dict[int, tuple[set[fx.Node], set[fx.Node]]] = defaultdict(lambda: (set(), set()))
        for node in self._kernels:
            if not _is_extern(node):
                reads, writes = traffic[self._levels[node]]
                reads |= self._reads(node)
                writes.add(node)
        return traffic

    def _find_rise(self) -> int:
        """Return the most bytes that the kernels, run in order, have in use beyond those at the call."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._kernels:
            for source in self._reads(node):
                last[source] = node
        final = {self._base(out) for out in self._tensors_out()}
        last_uses: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, reader in last.items():
            # The caller keeps references to weights, the batch and incoming gradients, so these are not freed.
            owned = node.op == "placeholder" and node.name.startswith(("primals", "tangents"))
            if node not in final and not owned:
                last_uses[reader].append(node)
        now = rise = 0
        for node in self._kernels:
            now += _bytes(node)
            rise = max(rise, now + self._hidden(node))
            now -= sum(_bytes(source) for source in last_uses[node])
        return rise

    def _hidden(self, node: fx.Node) -> int:
        """Return the bytes that a kernel allocates while it runs, beside its result."""
        body = body_of(node.target)
        args, kwargs = _values((node.args, node.kwargs))
        if body is None:
            return hidden_bytes(node.target, args) if _is_extern(node) else 0
        with self._recorder.nested() as inside:
            body(*args, **kwargs)
        return max(0, max(peak.bytes for peak in inside.peaks.values()) - _bytes(node))

    def _count_extern(self, phase: Any, node: fx.Node) -> None:
        func: Any = node.target
        args, kwargs = _values((node.args, node.kwargs))
        body = body_of(func)
        if body is not None:
            with self._recorder.nested(self._timing, phase=phase):
                body(*args, **kwargs)
            return
        out = node.meta["val"]
        flops, operation = flops_of(func, args, kwargs, out)
        moved = _bytes(node) + sum(_bytes(source) for source in node.all_input_nodes)
        self._timing.add(phase, operation, flops, moved, computes_in(func, args, out))


def _values(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, tree)


def _makes_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value))


def _is_extern(node: fx.Node) -> bool:
    """Return whether a node is a kernel that Inductor does not fuse with others."""
    func = node.target
    if node.op != "call_function" or not isinstance(func, OpOverload):
        return False
    if func.namespace not in ("aten", "prims"):
        return True
    from torch.utils.flop_counter import flop_registry

    return func in _ALONE or packet_of(func) in flop_registry


def _is_reduction(node: fx.Node) -> bool:
    """Return whether a node's result has fewer elements than its largest input."""
    value = node.meta["val"]
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    sizes = [tensor.numel() for tensor in inputs if isinstance(tensor, Tensor)]
    return isinstance(value, Tensor) and value.numel() < max(sizes, default=0)


def _is_part(node: fx.Node) -> bool:
    """Return whether a node allocates nothing: it is a view, or one of several results of another node."""
    if node.op != "call_function":
        return False
    func = node.target
    if func is operator.getitem:
        return True
    return isinstance(func, OpOverload) and (func.is_view or func is aten_unsafe_view.default)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@contextmanager
def compiled_units(recorder: MemoryRecorder, timing: Timing, log: Callable[[str], None]) -> Iterator[None]:
    """Until the block ends, compiling a module replaces it by fused graphs that only count memory and time."""

    def compile_units(
        model: nn.Module, units: Sequence[WrapUnit], config: CompileConfig, *, sharded: bool
    ) -> list[nn.Module]:
        whole = config.scope == "model" or (config.scope == "auto" and (not sharded or not units))
        blocks = [unit.module for unit in units]
        if any(is_sharded(param) for param in model.parameters()):
            log("compiled modules with tensor-parallel parameters are planned as if they were not compiled")
            return []
        traces: dict[Any, Any] = {}
        fused = partial(_Fused, traces=traces, recorder=recorder, timing=timing)
        again = {block: kept_operations(block) or frozenset() for block in blocks if "forward" in vars(block)}
        for block, kept in again.items():
            written = fused(block, forward=inspect.unwrap(block.forward), kept=kept)
            # If some of its operations are kept, the partitioner decides what is recomputed.
            block.forward = written if kept else _Recomputed(written)
        for module in [model] if whole and not again else [block for block in blocks if block not in again]:
            set_compiled_call(module, fused(module))
        return []

    with (
        replaced(compile, "compile_wrapped_modules", compile_units),
        replaced(compile, "reason_not_to_compile", lambda *_: None),
    ):
        yield


class _Recomputed:
    """A compiled block whose forward pass is recomputed in the backward pass."""

    def __init__(self, fused: _Fused) -> None:
        self._fused = fused

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._fused(*args, **kwargs)
        return checkpoint(self._fused, *args, use_reentrant=False, **kwargs)


class _Fused:
    """Replaces a compiled module: its first call traces it, and every call counts memory and time."""

    def __init__(
        self,
        module: nn.Module,
        *,
        traces: dict[Any, Any],
        recorder: MemoryRecorder,
        timing: Timing,
        forward: Callable[..., Any] | None = None,
        kept: frozenset[Any] = frozenset(),
    ) -> None:
        """`forward`: the module's original one, if it was replaced; `kept`: see `kept_operations`."""
        self._module, self._forward, self._kept = module, forward, kept
        self._traces, self._recorder, self._timing = traces, recorder, timing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = list(_tensors_in((args, kwargs)))
        named = dict(self._module.named_parameters())

        def function(params: list[Tensor], tensors: list[Tensor]) -> Any:
            # A copy of the arguments in which the traced tensors replace the given ones.
            traced = {id(old): new for old, new in zip(given, tensors, strict=True)}
            inputs, options = copy.deepcopy((args, kwargs), traced)
            with self._as_written():
                return functional_call(self._module, dict(zip(named, params, strict=True)), inputs, options)

        forms = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*named.values(), *given))
        key = torch.is_grad_enabled(), tuple(named), forms, self._kept
        if key not in self._traces:
            self._traces[key] = self._trace(function)
            self._recorder.paused = True  # until `FusedGraph.__call__`: do not record the operations of tracing
        return self._traces[key](list(named.values()), given)

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """Until the block ends, the module runs its original forward, uncompiled."""
        with ExitStack() as stack:
            if self._forward is None:
                stack.enter_context(compiled_call_set(self._module, None))
            else:
                stack.enter_context(replaced(self._module, "forward", self._forward))
            yield

    def _trace(self, function: Callable[..., Any]) -> Any:
        # This import loads Inductor, which takes one or two seconds.
        from plait.torch_internals import aot_function, min_cut_rematerialization_partition, select_decomp_table

        def count(gm: fx.GraphModule, example_inputs: Any) -> Any:
            return FusedGraph(gm, self._recorder, self._timing)

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            if self._kept:
                _mark(joint, self._kept)
            return min_cut_rematerialization_partition(joint, inputs, **options)

        return aot_function(
            function,
            fw_compiler=count,
            bw_compiler=count,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )


def _mark(joint: fx.GraphModule, kept: frozenset[Any]) -> None:
    """Mark which results of the forward graph are saved and which may be recomputed, as a checkpoint policy does."""
    behind: set[fx.Node] = set()  # what the backward part computes
    for node in joint.graph.nodes:
        if node.op == "placeholder" and "tangent" in str(node.target):
            behind.add(node)
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function" and node not in behind:
            whole = node.args[0] if node.target is operator.getitem else node
            wanted = isinstance(whole, fx.Node) and whole.target in kept
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a call's arguments, also those in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _tensors_in(vars(value))
