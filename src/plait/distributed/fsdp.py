"""FSDP: ZeRO 1, 2 and 3 and HSDP, all with `torch.distributed.fsdp.fully_shard` (FSDP2).

A *unit* is a module, such as a transformer block, whose parameters are all-gathered ("unsharded") and freed
("resharded") together; the root module has the parameters outside of the units.

| stage | parameters after forward  | gradients while accumulating                 | optimizer |
|-------|---------------------------|----------------------------------------------|-----------|
| 1     | unsharded until the step  | unsharded, reduced on the last backward pass | sharded   |
| 2     | unsharded until the step  | reduced on every backward pass               | sharded   |
| 3     | resharded                 | reduced on every backward pass               | sharded   |

Scalars (parameters of shape `()`, such as the temperature of CLIP) cannot be sharded. They stay replicated, and their
gradients are summed in buckets, as in `ddp`.

`apply_fsdp` changes a model in this order:

1. `fully_shard` on modules that stay in fp32, on experts, on each wrap unit, on the root;
2. collectives: sums in place of means; over gloo, point-to-point messages (`use_point_to_point_collectives`);
3. outputs: no module returns a view ([Note: no views]);
4. torch's `post_backward` of each parameter group is wrapped: it is skipped in a nested backward pass ([Note: nested
   backward passes]) and for a group that was not used, and parameters without a gradient get zeros before it;
5. prefetching.

Other files change the model afterwards: `offload.params` wraps unsharding (shards are copied from the host),
`offload.gradients` takes the reduced gradients, and `add_fsdp_roots` adds forward hooks to modules outside of units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from plait.distributed.collectives import all_gather_flat, reduce_scatter_flat
from plait.distributed.heartbeat import wait_for
from plait.distributed.wrap import WrapUnit
from plait.errors import ModelError
from plait.precision import FP32_MODULES, Policy
from plait.torch_internals import (
    fsdp_accumulates_mixed_dtypes,
    fsdp_after_init_unsharded_param,
    fsdp_fill_unused_grads,
    fsdp_in_forward_or_backward,
    fsdp_is_unsharded,
    fsdp_lazy_init,
    fsdp_param_group,
    fsdp_param_groups,
    fsdp_params,
    fsdp_reduces_grads,
    fsdp_register_pre_backward_hook,
    fsdp_reset_pre_backward_states,
    fsdp_reshard,
    fsdp_root_in_forward,
    fsdp_state,
    fsdp_unshard,
    fsdp_unsharded_param,
    fsdp_wrap_backward_callbacks,
    fsdp_wrap_post_backward,
    fsdp_wrap_register_pre_backward_hook,
    is_view,
    tree_map_only,
)


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """How `apply_fsdp` shards a model: the ZeRO stage, and how many units it prefetches in each direction."""

    stage: int
    reshard_after_forward: bool | int | None
    forward_prefetch: int
    backward_prefetch: int


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """Modules whose parameters expert parallelism has sharded already, so that they are sharded over a smaller mesh."""

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    placement: Callable[[nn.Parameter], Shard | None]
    """A function that returns the dimension along which a parameter is sharded."""


class ShardedGradients:
    """Sets, before each micro-batch, whether its backward pass reduces gradients and reshards parameters."""

    def __init__(self, root: FSDPModule, stage: int) -> None:
        self._root = root
        self._stage = stage
        self._was_last: bool | None = None

    def before_backward(self, *, last: bool) -> None:
        """Prepare for the backward pass of one micro-batch; `last`: it is the last one before the optimizer's step."""
        if last == self._was_last:
            return
        self._was_last = last
        if self._stage == 1:
            self._root.set_requires_gradient_sync(last)
        if self._stage < 3:
            # Parameters stay unsharded until the step: they are gathered once per step, not once per micro-batch.
            self._root.set_reshard_after_backward(last)
        self._root.set_is_last_backward(last)

    def finish(self) -> None:
        """Do nothing: the backward pass itself waits for its reductions."""


def apply_fsdp(
    model: nn.Module,
    units: Sequence[WrapUnit],
    *,
    mesh: DeviceMesh,
    policy: Policy,
    options: ShardingOptions,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    experts: ExpertModules | None = None,
    as_one_unit: bool = False,
) -> ShardedGradients:
    """Shard a model over the last axis of the mesh, in place; return the collector of its gradients.

    A mesh of two axes has replicas along the first (HSDP). `placement` returns the dimension along which a parameter is
    sharded; None: the first. `as_one_unit`: the model is small, so it is gathered in one collective, whose buffer is
    reused. The steps, in order, are listed at the head of this file.
    """
    scalars = {param for param in model.parameters() if param.ndim == 0}
    if experts is not None:
        _refuse_scalars(experts.modules)
    reshard = options.stage == 3 if options.reshard_after_forward is None else options.reshard_after_forward
    common: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "shard_placement_fn": placement,
        "ignored_params": scalars,
    }
    casting = MixedPrecisionPolicy(
        param_dtype=policy.compute if policy.mixed and policy.master else None,
        reduce_dtype=policy.reduce,
        # The engine casts inputs once, for the whole model. A cast at every unit would also round
        # tensors that a model passes between its blocks in fp32 on purpose.
        cast_forward_inputs=False,
    )
    _shard_fp32_modules(model, common, policy)
    if experts is not None:
        for module in experts.modules:
            fully_shard(
                module,
                mp_policy=casting,
                mesh=experts.mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=experts.placement,
            )
    for unit in () if as_one_unit else units:
        if not isinstance(unit.module, FSDPModule):  # experts, or a norm that stays in fp32, may be units too
            fully_shard(unit.module, mp_policy=casting, **common)
    root = fully_shard(model, mp_policy=casting, **common)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Ranks only sum; the engine divides by the number of targets or samples of all ranks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    use_point_to_point_collectives(sharded, mesh, keep=as_one_unit)
    for module in sharded:
        fsdp_wrap_register_pre_backward_hook(fsdp_state(module), _hook_no_view)
    _wrap_backward_passes(root, sharded, policy)
    if not as_one_unit:
        _prefetch([u.module for u in units], options)
    return ShardedGradients(root, options.stage)


def _refuse_scalars(experts: Sequence[nn.Module]) -> None:
    """Raise `ModelError` if an expert has a scalar: it would be replicated, and each rank has other experts."""
    for module in experts:
        for name, param in module.named_parameters():
            if param.ndim == 0:
                raise ModelError(
                    f"strategy.zero cannot shard the parameter {name!r} of the experts in {type(module).__name__}, "
                    "which is a scalar: make it a vector of one number (`torch.ones(1)`), or set strategy.layout.ep: 1"
                )


def _shard_fp32_modules(model: nn.Module, common: dict[str, Any], policy: Policy) -> None:
    if not policy.mixed:
        return
    keep = [m for m in model.modules() if isinstance(m, FP32_MODULES) and any(True for _ in m.parameters())]
    for module in keep:
        fully_shard(
            module,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
            **common,
        )


def _prefetch(modules: Sequence[nn.Module], options: ShardingOptions) -> None:
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        if options.forward_prefetch:
            following = modules[index + 1 : index + 1 + options.forward_prefetch]
            module.set_modules_to_forward_prefetch([m for m in following if isinstance(m, FSDPModule)])
        if options.backward_prefetch:
            preceding = modules[max(index - options.backward_prefetch, 0) : index][::-1]
            module.set_modules_to_backward_prefetch([m for m in preceding if isinstance(m, FSDPModule)])


def carry_attributes(model: nn.Module, names: AbstractSet[str]) -> None:
    """Copy these Python attributes from sharded parameters to unsharded ones each time they are created."""

    def give(shard: Tensor, unsharded: nn.Parameter) -> None:
        attributes = vars(shard)
        vars(unsharded).update({name: attributes[name] for name in names if name in attributes})

    for module in model.modules():
        group = fsdp_param_group(module)
        for param in () if group is None else fsdp_params(group):
            fsdp_after_init_unsharded_param(param, give)


# ---- 2. all-gather and reduce-scatter over gloo as point-to-point messages
#
# [Note: gloo's own gather and scatter]
# gloo's own all-gather and reduce-scatter copy their input, and send it around a ring. With 14 MB and two ranks, a
# reduce-scatter takes almost three times as much CPU time as sending one half to the other rank and adding the half
# that is received; an all-gather takes twice as much as sending one half. So both are replaced by messages between
# pairs of ranks, which are received directly into the output. Buffers are reused where possible: the system clears each
# page of a newly allocated one, which costs more than a copy.
#
# With a fake process group (in a plan) the same buffers are allocated, and torch's collective is called in place of the
# messages, so that it is counted.


_FAKE = "fake"
"""The backend of a fake process group."""


def use_point_to_point_collectives(modules: Iterable[FSDPModule], mesh: DeviceMesh, *, keep: bool) -> None:
    """Replace the collectives of sharded modules by point-to-point messages, where the backend is gloo.

    `keep`: also reuse the output buffer of the all-gather, which is as large as the parameters.
    """
    if mesh.device_type != "cpu" or dist.get_backend(mesh.get_group(mesh.ndim - 1)) not in ("gloo", _FAKE):
        return
    reduce_scatter = _ReduceScatter()  # shared: modules reduce one after the other, with the same buffers
    for module in modules:
        module.set_custom_all_gather(_AllGather(keep=keep))  # type: ignore[arg-type]  # its base has no public name
        module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]


class _ReusedBuffer:
    """A buffer that is used again if the next request has the same size and dtype."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor; it belongs to the caller until `give_back`."""
        free, self._free = self._free, None
        if free is not None and free.numel() == size and free.dtype == dtype:
            return free
        return torch.empty(size, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Release a tensor: the next `take` may return it."""
        self._free = buffer


class _AllGather:
    """The all-gather of one parameter group; torch copies the output before the next all-gather begins."""

    def __init__(self, *, keep: bool) -> None:
        self._keep, self._output = keep, _ReusedBuffer()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._output.take(size[0], dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if dist.get_backend(group) == _FAKE:
            all_gather_flat(output_tensor, input_tensor, group=group)
        else:
            chunks = output_tensor.chunk(group.size())
            local = chunks[group.rank()]
            if local.data_ptr() != input_tensor.data_ptr():
                local.copy_(input_tensor)
            peers = _peers(group)
            what = f"all_gather of {local.numel()}"
            _send_and_receive(peers, [local] * len(peers), [chunks[peer] for peer in peers], group, what)
        if self._keep:
            self._output.give_back(output_tensor)


class _ReduceScatter:
    """The reduce-scatter of the gradients of one parameter group; its input buffer is reused afterwards."""

    def __init__(self) -> None:
        self._input, self._received = _ReusedBuffer(), _ReusedBuffer()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._input.take(size[0], dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "ranks only sum, as `apply_fsdp` sets"
        chunks, peers = input_tensor.chunk(group.size()), _peers(group)
        buffer = self._received.take(len(peers) * output_tensor.numel(), output_tensor.dtype, output_tensor.device)
        if dist.get_backend(group) == _FAKE:
            reduce_scatter_flat(output_tensor, input_tensor, op=op, group=group)
        else:
            first, *others = received = buffer.chunk(len(peers))
            what = f"reduce_scatter of {input_tensor.numel()}"
            _send_and_receive(peers, [chunks[peer] for peer in peers], received, group, what)
            torch.add(chunks[group.rank()], first, out=output_tensor)
            for other in others:
                output_tensor += other
        self._received.give_back(buffer)
        self._input.give_back(input_tensor)


def _peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks in a group other than this one, numbered in the group."""
    return [rank for rank in range(group.size()) if rank != group.rank()]


def _send_and_receive(
    peers: Sequence[int], outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup, what: str
) -> None:
    """Send one tensor to each peer, receive one from each, and wait for all; `what` is for error messages."""
    works = [dist.irecv(tensor, group=group, group_src=peer) for peer, tensor in zip(peers, incoming, strict=True)]
    works += [dist.isend(tensor, group=group, group_dst=peer) for peer, tensor in zip(peers, outgoing, strict=True)]
    wait_for(works, what)


# ---- 3. outputs that may be changed in place
#
# [Note: no views] In the backward pass `fully_shard` gathers a unit's weights again in a hook on the unit's output,
# which is called with the output's gradient. If the output is a view and is changed in place, as by `x = block(x);
# x += shortcut`, it loses its hooks, and the backward pass finds no weights. Most layers return views; a linear layer
# does if its input has three dimensions. So outputs that are views are replaced by tensors with the same memory that
# are not views, which costs a node in the graph and no memory.


def _hook_no_view(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def registered(output: Any) -> Any:
        return register(tree_map_only(Tensor, _without_view, output) if torch.is_grad_enabled() else output)

    return registered


def _without_view(tensor: Tensor) -> Tensor:
    if not is_view(tensor) or not tensor.requires_grad:
        return tensor
    out: Tensor = _WithoutView.apply(tensor)  # type: ignore[no-untyped-call]
    return out


class _WithoutView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is not a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# ---- 4. backward passes
#
# [Note: nested backward passes] After a backward pass `fully_shard` reshards parameters and reduces gradients. But a
# model may run a backward pass inside its forward pass, for the gradient of its output by its inputs (a gradient
# penalty, adversarial inputs). Then the forward pass would continue without weights; and a backward pass that is itself
# recorded by autograd (`create_graph`) needs its weights again in the outer backward pass. So after a nested backward
# pass nothing is resharded or reduced; the outer one does it for both.


class _NestedBackward:
    """Tracks (`active`) whether the running backward pass is inside a forward or backward pass of the same model."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self.active = False
        for module in modules:
            self._watch(fsdp_state(module))

    def _watch(self, state: Any) -> None:
        def begin(pre_backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def begun(grad: Tensor) -> Tensor:
                # With gradients enabled autograd records this backward pass: another one will differentiate it.
                self.active = fsdp_root_in_forward(state) or torch.is_grad_enabled()
                return pre_backward(grad)

            return begun

        def end(finish: Callable[[], None]) -> Callable[[], None]:
            return lambda: fsdp_reset_pre_backward_states(state) if self.active else finish()

        fsdp_wrap_backward_callbacks(state, begin, end)


def _wrap_backward_passes(root: FSDPModule, sharded: Sequence[FSDPModule], policy: Policy) -> None:
    """Wrap `post_backward` of each parameter group, as step 4 at the head of this file says."""
    # From 2.13 on torch adds the zeros itself; up to 2.14 not if some gradients are accumulated in another dtype.
    by_torch = hasattr(root, "set_reduce_scatter_unused_params")
    by_torch = by_torch and (policy.reduce == policy.compute or fsdp_accumulates_mixed_dtypes())
    if by_torch:
        root.set_reduce_scatter_unused_params(True)
    nested = _NestedBackward(sharded)
    for group in (group for module in sharded for group in fsdp_param_groups(fsdp_state(module))):
        fsdp_wrap_post_backward(group, _PostBackward(group, nested, fill=not by_torch))


@dataclass(frozen=True, slots=True)
class _PostBackward:
    """Wraps `post_backward` of one parameter group."""

    group: Any
    nested: _NestedBackward
    fill: bool
    """Whether parameters without a gradient get zeros: other ranks may have used them, and wait for the reduction.

    Gradients accumulated over earlier micro-batches are in the reduce dtype, and torch reduces gradients of one dtype
    only. So the zeros, and gradients of the last micro-batch alone, are cast to that dtype too.
    """

    def __call__(self, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if self.nested.active:
                return None
            reduces = fsdp_reduces_grads(self.group)
            # The unit was prefetched but never called: it has no unsharded parameters, with which torch would fail.
            if not reduces and all(fsdp_unsharded_param(param) is None for param in fsdp_params(self.group)):
                return None
            if reduces and self.fill:
                fsdp_fill_unused_grads(self.group)
            return post_backward(*args)

        return wrapped


# ---- modules outside of the units that scripts call directly
#
# `fully_shard` gathers the parameters of the root when the model is called, and only then. But scripts also call a head
# or a trunk directly, or a method of the model that calls both: at stage 3 these would compute with shards. So a call
# of any module outside of the units gathers the root's parameters, unless they are gathered already.


def add_fsdp_roots(model: nn.Module, before: Callable[[], None]) -> None:
    """Make it possible to call modules outside of the units directly; each such call first calls `before`."""
    fsdp_lazy_init(model)
    if fsdp_param_group(model) is not None:
        extra = _ExtraRoot(model, before)
        for module in _outside_of_units(model):
            module.register_forward_pre_hook(extra.pre_forward)
            module.register_forward_hook(extra.post_forward, always_call=True)


def _outside_of_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not hasattr(child, "unshard"):
            yield child
            yield from _outside_of_units(child)


class _ExtraRoot:
    """Unshards and reshards the root's own parameter group around calls of modules outside of the units."""

    def __init__(self, model: nn.Module, before: Callable[[], None]) -> None:
        self._state = fsdp_state(model)
        self._group = fsdp_param_group(model)
        self._before = before
        self._depth = 0
        """How many calls of such modules are running, nested in each other."""

    def pre_forward(self, module: nn.Module, _inputs: Any) -> None:
        """Unshard the root's parameters before a call, if they are not; call `before` if the call is a direct one."""
        self._depth += 1
        if self._depth == 1 and not fsdp_in_forward_or_backward(self._state):
            self._before()
        if not fsdp_is_unsharded(self._group):
            fsdp_unshard(self._group)

    def post_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """Reshard after a direct call, and have the backward pass unshard again."""
        self._depth -= 1
        if not self._depth and not fsdp_in_forward_or_backward(self._state):
            fsdp_register_pre_backward_hook(self._state, output)
            fsdp_reshard(self._group)
