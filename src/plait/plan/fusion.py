"""Which operations of a graph become one kernel, and what memory and time the kernels take."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from plait.plan.kernels import body_of, hidden_bytes
from plait.plan.recorder import Recorder
from plait.plan.timing import Timing
from plait.plan.work import computes_in, flops_of
from plait.torch_internals import OpOverload, aten_unsafe_index_put, aten_unsafe_view, packet_of, tree_map

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
"""Elementwise or not, these are kernels of their own."""


_CHEAP_READS = 4
"""A result that takes at most so many reads is computed wherever it is wanted; so does Inductor by default."""


class FusedGraph:
    """A traced graph that is not run: calling it counts what its kernels would take, and makes its outputs.

    Takes its arguments as a list, and empties it, as compiled functions do: what nobody else holds is free once it is
    used.
    """

    _boxed_call = True

    def __init__(self, graph: fx.GraphModule, recorder: Recorder, timing: Timing) -> None:
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
        """Count one run, and give outputs of the right form."""
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
        """On which level a node is computed: what is on one level can be one kernel.

        Kernels that stand alone divide the levels: a node comes after as many of them as lie on the longest way to
        it. One that is fused waits until someone wants it.
        """
        levels: dict[fx.Node, int] = {}
        for node in self._nodes:
            above = (levels[each] + _is_extern(each) for each in node.all_input_nodes)
            levels[node] = max(above, default=0)
        for node in reversed(self._nodes):
            if node.op == "call_function" and not _is_extern(node) and node.users:
                wanted = min(levels[user] for user in node.users)
                if all(user.op != "output" for user in node.users):
                    levels[node] = max(levels[node], wanted)
        return levels

    def _is_kernel(self, node: fx.Node) -> bool:
        """Whether a node's result exists in memory."""
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
        # What is cheap to compute is computed again rather than kept.
        return later and (_is_reduction(node) or len(self._reads(node)) > _CHEAP_READS)

    def _users(self, node: fx.Node) -> Iterable[fx.Node]:
        """Who uses a node, looking through its views."""
        for user in node.users:
            if _is_part(user):
                yield from self._users(user)
            else:
                yield user

    def _base(self, node: fx.Node, *, whole: bool = True) -> fx.Node:
        """Whose memory a node is in; with `whole`, all results of a kernel are one."""
        while _is_part(node):
            source = node.all_input_nodes[0]
            if not whole and node.target is operator.getitem and not _is_part(source):
                break
            node = source
        return node

    # ---- what they take

    def _reads(self, node: fx.Node) -> frozenset[fx.Node]:
        """What lies in memory and is read to make a node."""
        if node not in self._known_reads:
            self._known_reads[node] = self._find_reads(node)
        return self._known_reads[node]

    def _find_reads(self, node: fx.Node) -> frozenset[fx.Node]:
        found: set[fx.Node] = set()
        for each in node.all_input_nodes:
            base = self._base(each)
            if base.op != "call_function" or self._is_kernel(base):
                found.add(base)
            else:
                found |= self._reads(base)
        return frozenset(found)

    def _traffic(self) -> dict[int, tuple[set[fx.Node], set[fx.Node]]]:
        """By level, what its fused kernels read and write."""
        found: dict[int, tuple[set[fx.Node], set[fx.Node]]] = defaultdict(lambda: (set(), set()))
        for node in self._kernels:
            if not _is_extern(node):
                reads, writes = found[self._levels[node]]
                reads |= self._reads(node)
                writes.add(node)
        return found

    def _find_rise(self) -> int:
        """How far memory rises above where it was at the call, while kernels run in their order."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._kernels:
            for each in self._reads(node):
                last[each] = node
        final = {self._base(out) for out in self._tensors_out()}
        ends: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, reader in last.items():
            # What the caller holds on to is not free: weights, the batch, and incoming gradients.
            owned = node.op == "placeholder" and node.name.startswith(("primals", "tangents"))
            if node not in final and not owned:
                ends[reader].append(node)
        now = rise = 0
        for node in self._kernels:
            now += _bytes(node)
            rise = max(rise, now + self._hidden(node))
            now -= sum(_bytes(each) for each in ends[node])
        return rise

    def _hidden(self, node: fx.Node) -> int:
        """What a kernel takes for itself."""
        body = body_of(node.target)
        args, kwargs = _values((node.args, node.kwargs))
        if body is None:
            return hidden_bytes(node.target, args) if _is_extern(node) else 0
        with self._recorder.aside() as inside:
            body(*args, **kwargs)
        return max(0, max(peak.bytes for peak in inside.peaks.values()) - _bytes(node))

    def _count_extern(self, phase: Any, node: fx.Node) -> None:
        func: Any = node.target
        args, kwargs = _values((node.args, node.kwargs))
        body = body_of(func)
        if body is not None:
            with self._recorder.aside(self._timing, phase=phase):
                body(*args, **kwargs)
            return
        out = node.meta["val"]
        flops, kind = flops_of(func, args, kwargs, out)
        moved = _bytes(node) + sum(_bytes(each) for each in node.all_input_nodes)
        self._timing.add(phase, kind, flops, moved, computes_in(func, args, out))


def _values(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, tree)


def _makes_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value))


def _is_extern(node: fx.Node) -> bool:
    """Whether a node is a kernel of its own, which nothing is fused with."""
    func = node.target
    if node.op != "call_function" or not isinstance(func, OpOverload):
        return False
    if func.namespace not in ("aten", "prims"):
        return True
    from torch.utils.flop_counter import flop_registry

    return func in _ALONE or packet_of(func) in flop_registry


def _is_reduction(node: fx.Node) -> bool:
    """Whether a node makes less out of more."""
    value = node.meta["val"]
    sizes = [each.meta["val"].numel() for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    return isinstance(value, Tensor) and value.numel() < max(sizes, default=0)


def _is_part(node: fx.Node) -> bool:
    """Whether a node is another look at memory that exists: a view, or one of several results."""
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
