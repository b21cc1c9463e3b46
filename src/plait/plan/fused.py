"""What `torch.compile` makes of a module, without compiling it.

[Note: compiling in a fake world] Inductor needs a compiler, a GPU and half a minute. What matters here it decides
earlier, and that part is run as it is: AOTAutograd traces forward and backward into one graph, and the min-cut
partitioner chooses what is kept for the backward pass. After that, elementwise operations and reductions become one
kernel with their neighbours, so what passes between them takes no memory and no time; a tensor exists only where a
matrix product, attention or the outside wants it. That is what a `FusedGraph` counts when it is called.

A module is traced once for every form of its inputs. Blocks that are alike in parameters and inputs share a trace.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from plait.config import CompileConfig
from plait.parallel import Unit, compiling, kept_operations
from plait.plan.fusion import FusedGraph
from plait.plan.recorder import Recorder
from plait.plan.timing import Timing
from plait.torch_internals import compiled_call_set, set_compiled_call
from plait.world import is_sharded, replaced


@contextmanager
def compiled_units(recorder: Recorder, timing: Timing, say: Callable[[str], None]) -> Iterator[None]:
    """Compiling makes fused graphs that only count, until the block ends."""

    def compile_units(
        model: nn.Module, units: Sequence[Unit], config: CompileConfig, *, sharded: bool
    ) -> list[nn.Module]:
        whole = config.scope == "model" or (config.scope == "auto" and (not sharded or not units))
        blocks = [unit.module for unit in units]
        if any(is_sharded(param) for param in model.parameters()):
            say("compiled modules with tensor-parallel parameters are planned as if they were not compiled")
            return []
        traces: dict[Any, Any] = {}
        fused = partial(_Fused, traces=traces, recorder=recorder, timing=timing)
        again = {block: kept_operations(block) or frozenset() for block in blocks if "forward" in vars(block)}
        for block, kept in again.items():
            written = fused(block, forward=inspect.unwrap(block.forward), kept=kept)
            # What is kept of a block that keeps something is up to the partitioner.
            block.forward = written if kept else _Recomputed(written)
        for module in [model] if whole and not again else [block for block in blocks if block not in again]:
            set_compiled_call(module, fused(module))
        return []

    with replaced(compiling, "compile_units", compile_units), replaced(compiling, "why_not", lambda *_: None):
        yield


class _Recomputed:
    """A compiled block that runs again in its backward pass."""

    def __init__(self, fused: _Fused) -> None:
        self._fused = fused

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._fused(*args, **kwargs)
        return checkpoint(self._fused, *args, use_reentrant=False, **kwargs)


class _Fused:
    """What a compiled module does: it is traced the first time, and counted every time."""

    def __init__(
        self,
        module: nn.Module,
        *,
        traces: dict[Any, Any],
        recorder: Recorder,
        timing: Timing,
        forward: Callable[..., Any] | None = None,
        kept: frozenset[Any] = frozenset(),
    ) -> None:
        """`forward` is the module's own, where that was replaced; `kept` as in `recompute.kept_operations`."""
        self._module, self._forward, self._kept = module, forward, kept
        self._traces, self._recorder, self._timing = traces, recorder, timing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = list(_tensors_in((args, kwargs)))
        named = dict(self._module.named_parameters())

        def function(params: list[Tensor], tensors: list[Tensor]) -> Any:
            # A copy of the arguments, with the traced tensors in the places of the others.
            traced = {id(old): new for old, new in zip(given, tensors, strict=True)}
            inputs, options = copy.deepcopy((args, kwargs), traced)
            with self._as_written():
                return functional_call(self._module, dict(zip(named, params, strict=True)), inputs, options)

        forms = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*named.values(), *given))
        key = torch.is_grad_enabled(), tuple(named), forms, self._kept
        if key not in self._traces:
            self._traces[key] = self._trace(function)
            self._recorder.paused = True  # while it traces, which the first call begins with
        return self._traces[key](list(named.values()), given)

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """The module as it is without this."""
        with ExitStack() as stack:
            if self._forward is None:
                stack.enter_context(compiled_call_set(self._module, None))
            else:
                stack.enter_context(replaced(self._module, "forward", self._forward))
            yield

    def _trace(self, function: Callable[..., Any]) -> Any:
        # Inductor's part of torch is loaded here, and takes a second or two.
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
    """Say which results of the forward part are kept and which may be computed again, as a checkpoint's policy does."""
    behind: set[fx.Node] = set()  # what the backward part computes
    for node in joint.graph.nodes:
        if node.op == "placeholder" and "tangent" in str(node.target):
            behind.add(node)
        if any(each in behind for each in node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function" and node not in behind:
            whole = node.args[0] if node.target is operator.getitem else node
            wanted = isinstance(whole, fx.Node) and whole.target in kept
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a call's arguments, those inside objects among them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors_in(each)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _tensors_in(vars(value))
