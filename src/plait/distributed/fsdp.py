"""ZeRO 1, 2 and 3, FSDP and HSDP: one mechanism, `fully_shard`.

| stage | parameters after forward | gradients while accumulating         | optimizer |
|-------|--------------------------|--------------------------------------|-----------|
| 1     | whole until the step     | whole, scattered on the last backward | sharded   |
| 2     | whole until the step     | scattered on every backward          | sharded   |
| 3     | resharded                | scattered on every backward          | sharded   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
    fsdp_has_all_gather_result,
    fsdp_in_forward_or_backward,
    fsdp_is_root,
    fsdp_is_sharded,
    fsdp_is_unsharded,
    fsdp_lazy_init,
    fsdp_module_param,
    fsdp_param_group,
    fsdp_param_groups,
    fsdp_params,
    fsdp_reduces_grads,
    fsdp_register_post_backward_final_callback,
    fsdp_register_pre_backward_hook,
    fsdp_reset_pre_backward_states,
    fsdp_reshard,
    fsdp_root_in_forward,
    fsdp_set_module_param,
    fsdp_sharded_param,
    fsdp_state,
    fsdp_state_dict_hooks,
    fsdp_unshard,
    fsdp_unsharded_param,
    fsdp_wait_for_unshard,
    fsdp_wrap_backward_callbacks,
    fsdp_wrap_post_backward,
    fsdp_wrap_register_pre_backward_hook,
    is_view,
    tree_map_only,
)
from plait.transformers_internals import generate_alone

# What `fully_shard` gathers and scatters over gloo: each rank sends every other one its piece, and nothing else.
#
# [Note: gloo's own gather and scatter]
# gloo copies what it is given, and passes it around a ring. For 14 MB and two ranks, a scatter takes almost three times
# the processor time of sending one half and adding the other's, and a gather twice that of sending one's own half. So
# both are put together here from messages between two ranks, which go from where a piece is to where it belongs.
# Memory is held on to where it may be: taken anew in every step, each page of it would have to be cleared by the system
# first, which costs more than a copy.
#
# A plan, in which nobody is there to exchange with, has the same memory, and counts the collective that was meant.


_FAKE = "fake"
"""The backend of ranks that are not there."""


def exchange_directly(modules: Iterable[FSDPModule], mesh: DeviceMesh, *, keep: bool) -> None:
    """Have sharded modules exchange their pieces directly, where the ranks talk by way of gloo.

    `keep`: hold on to the memory that gathers need, too, as much as the parameters take.
    """
    if mesh.device_type != "cpu" or dist.get_backend(mesh.get_group(mesh.ndim - 1)) not in ("gloo", _FAKE):
        return
    scatter = _Scatter()  # modules scatter one after the other, in the same memory
    for module in modules:
        module.set_custom_all_gather(_ParameterGather(keep=keep))  # type: ignore[arg-type]  # its base has no public name
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


class _ReusedBuffer:
    """Memory to be used again where the size is the same."""

    def __init__(self) -> None:
        self._spare: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for so many numbers, whatever they are."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == size and spare.dtype == dtype:
            return spare
        return torch.empty(size, dtype=dtype, device=device)

    def leave(self, space: Tensor) -> None:
        """Nobody will look at it any more when the next is taken."""
        self._spare = space


class _ParameterGather:
    """The all-gather of one group of parameters, which are copied out of it before the next one begins."""

    def __init__(self, *, keep: bool) -> None:
        self._keep, self._room = keep, _ReusedBuffer()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._room.take(size[0], dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if dist.get_backend(group) == _FAKE:
            all_gather_flat(output_tensor, input_tensor, group=group)
        else:
            pieces = output_tensor.chunk(group.size())
            own = pieces[group.rank()]
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor)
            peers = _peers(group)
            what = f"all_gather of {own.numel()}"
            _swap(peers, [own] * len(peers), [pieces[peer] for peer in peers], group, what)
        if self._keep:
            self._room.leave(output_tensor)


class _Scatter:
    """The reduce-scatter of a group of gradients: what it adds up is void afterwards, the sum stays."""

    def __init__(self) -> None:
        self._room, self._inbox = _ReusedBuffer(), _ReusedBuffer()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._room.take(size[0], dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "ranks only sum, as `shard` says"
        pieces, peers = input_tensor.chunk(group.size()), _peers(group)
        inbox = self._inbox.take(len(peers) * output_tensor.numel(), output_tensor.dtype, output_tensor.device)
        if dist.get_backend(group) == _FAKE:
            reduce_scatter_flat(output_tensor, input_tensor, op=op, group=group)
        else:
            first, *others = places = inbox.chunk(len(peers))
            what = f"reduce_scatter of {input_tensor.numel()}"
            _swap(peers, [pieces[peer] for peer in peers], places, group, what)
            torch.add(pieces[group.rank()], first, out=output_tensor)
            for place in others:
                output_tensor += place
        self._inbox.leave(inbox)
        self._room.leave(input_tensor)


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, by their numbers in it."""
    return [rank for rank in range(group.size()) if rank != group.rank()]


def _swap(
    peers: Sequence[int], outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup, what: str
) -> None:
    """Send each peer something, and put what comes from it into its place; `what` is done so."""
    works = [dist.irecv(place, group=group, group_src=peer) for peer, place in zip(peers, incoming, strict=True)]
    works += [dist.isend(given, group=group, group_dst=peer) for peer, given in zip(peers, outgoing, strict=True)]
    wait_for(works, what)


# Parts of a sharded model that are called by themselves, and not by the model.
#
# `fully_shard` gathers what belongs to none of its units when the model is called, and only then. Scripts also call a
# head, a trunk, or a method of the model that goes through both: at stage 3 they would find parts of weights. So each
# module outside of the units gathers for itself, unless the model, or a module around it, has done so.


def add_fsdp_roots(model: nn.Module, before: Callable[[], None]) -> None:
    """Let parts of a sharded model be called by themselves; `before` is done first, each time."""
    fsdp_lazy_init(model)
    if fsdp_param_group(model) is not None:
        entrance = _ExtraRoot(model, before)
        for module in _outside_of_units(model):
            module.register_forward_pre_hook(entrance.enter)
            module.register_forward_hook(entrance.leave, always_call=True)


def _outside_of_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not hasattr(child, "unshard"):
            yield child
            yield from _outside_of_units(child)


class _ExtraRoot:
    """To what a model gathers when it is called: the weights that belong to none of its units."""

    def __init__(self, model: nn.Module, before: Callable[[], None]) -> None:
        self._state = fsdp_state(model)
        self._group = fsdp_param_group(model)
        self._before = before
        self._inside = 0
        """How many modules that were entered here have yet to be left."""

    @property
    def _in_use(self) -> bool:
        """Whether the model itself runs, forwards or backwards."""
        return fsdp_in_forward_or_backward(self._state)

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        """Gather, before a module is called from outside."""
        self._inside += 1
        if self._inside == 1 and not self._in_use:
            self._before()
        if not fsdp_is_unsharded(self._group):
            fsdp_unshard(self._group)

    def leave(self, module: nn.Module, _inputs: Any, answer: Any) -> None:
        """Let go, and gather again in the backward pass."""
        self._inside -= 1
        if not self._inside and not self._in_use:
            fsdp_register_pre_backward_hook(self._state, answer)
            fsdp_reshard(self._group)


# Outputs of sharded modules that may be changed in place.
#
# [Note: no views] `fully_shard` gathers a unit's weights again when the gradient of its output comes, told by a hook on
# that output. A view loses its hooks when somebody adds to it in place, as `x = block(x); x += shortcut` does, and the
# backward pass then finds no weights. Most layers answer with views: a linear one does for any input of three
# dimensions. So what a module returns is taken out of the family of its views first, at the price of a node in the
# graph and of no memory.


def clone_outputs_out_of_views(modules: Iterable[FSDPModule]) -> None:
    """See that sharded modules return tensors of their own; see [Note: no views]."""
    for module in modules:
        fsdp_wrap_register_pre_backward_hook(fsdp_state(module), _first_apart)


def _first_apart(register: Any) -> Any:
    def registered(output: Any) -> Any:
        return register(tree_map_only(Tensor, _apart, output) if torch.is_grad_enabled() else output)

    return registered


def _apart(tensor: Tensor) -> Tensor:
    if not is_view(tensor) or not tensor.requires_grad:
        return tensor
    out: Tensor = _Apart.apply(tensor)  # type: ignore[no-untyped-call]
    return out


class _Apart(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is nobody's view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# Backward passes within a forward pass of a sharded model: for a penalty on gradients, or for inputs that deceive.
#
# [Note: a pass within a pass] After a backward pass `fully_shard` lets go of what was gathered, and reduces gradients.
# A model may go backwards while it goes forwards, to learn how its answer depends on its inputs. Then the forward pass
# goes on with weights that are gone; and what such a pass has itself recorded (`create_graph`) needs them once more in
# the pass that counts. So a pass within leaves everything as it is, and the one that counts cleans up for both.


def allow_double_backward(modules: Sequence[FSDPModule]) -> None:
    """Let a model that consists of these sharded modules go backwards before its own backward pass."""
    passes = _Passes()
    for module in modules:
        passes.watch(fsdp_state(module))


class _Passes:
    """Knows which backward pass is under way."""

    def __init__(self) -> None:
        self._within = False

    def watch(self, state: Any) -> None:
        """Tell the passes through one sharded module apart."""

        def begin(pre_backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def begun(grad: Tensor) -> Tensor:
                # A pass that is recorded will be gone through.
                self._within = fsdp_root_in_forward(state) or torch.is_grad_enabled()
                return pre_backward(grad)

            return begun

        def end(finish: Callable[[], None]) -> Callable[[], None]:
            return lambda: fsdp_reset_pre_backward_states(state) if self._within else finish()

        fsdp_wrap_backward_callbacks(state, begin, end)
        for group in fsdp_param_groups(state):
            self._watch_group(group)

    def _watch_group(self, group: Any) -> None:
        def around(post_backward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: None if self._within else post_backward(*args)

        fsdp_wrap_post_backward(group, around)


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """How `shard` cuts a model."""

    stage: int
    reshard_after_forward: bool | int | None
    forward_prefetch: int
    backward_prefetch: int


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """Modules whose parameters are spread over ranks already, and which fewer ranks have in common."""

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    placement: Callable[[nn.Parameter], Shard | None]
    """Along which dimension each of their parameters is cut."""


class ShardedGradients:
    """Tells a sharded model, before each micro-batch, what to do with gradients and parameters."""

    def __init__(self, root: FSDPModule, stage: int) -> None:
        self._root = root
        self._stage = stage
        self._was_last: bool | None = None

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; `last` is the one before the optimizer steps."""
        if last == self._was_last:
            return
        self._was_last = last
        if self._stage == 1:
            self._root.set_requires_gradient_sync(last)
        if self._stage < 3:
            # Whole until the step: gathered once a step, not once a micro-batch.
            self._root.set_reshard_after_backward(last)
        self._root.set_is_last_backward(last)

    def finish(self) -> None:
        """Nothing is left to wait for: the backward pass itself waits for its reductions."""


def shard(
    model: nn.Module,
    units: Sequence[WrapUnit],
    *,
    mesh: DeviceMesh,
    policy: Policy,
    options: ShardingOptions,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    experts: ExpertModules | None = None,
    at_once: bool = False,
) -> ShardedGradients:
    """Shard the units, then the rest of the model, over the last axis of the mesh; copies along the first of two.

    `placement` says along which dimension a parameter is cut; absent: the first. `at_once`: the model is small enough
    to be gathered as one, and to hold on to the memory which that takes.
    """
    scalar = next((name for name, param in model.named_parameters() if param.ndim == 0), None)
    if scalar is not None:
        raise ModelError(
            f"the parameter {scalar!r} is a scalar, which strategy.zero={options.stage} cannot cut: make it a vector "
            "of one number (`torch.ones(1)`), or set strategy.zero: 0"
        )
    reshard = options.stage == 3 if options.reshard_after_forward is None else options.reshard_after_forward
    common: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard, "shard_placement_fn": placement}
    casting = MixedPrecisionPolicy(
        param_dtype=policy.compute if policy.mixed and policy.master else None,
        reduce_dtype=policy.reduce,
        # Inputs are cast once, for the whole model, by the engine: a cast at every unit would also
        # round what a model passes between its blocks on purpose in fp32.
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
    for unit in () if at_once else units:
        if not isinstance(unit.module, FSDPModule):  # experts, or a norm that stays in fp32, may be units too
            fully_shard(unit.module, mp_policy=casting, **common)
    root = fully_shard(model, mp_policy=casting, **common)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # The engine divides, by the global count; ranks only sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    exchange_directly(sharded, mesh, keep=at_once)
    clone_outputs_out_of_views(sharded)
    _reduce_unused(root, policy)
    _pass_over_idle(sharded)
    allow_double_backward(sharded)
    if not at_once:
        _prefetch([u.module for u in units], options)
    return ShardedGradients(root, options.stage)


def carry_attributes(model: nn.Module, names: AbstractSet[str]) -> None:
    """Give whole parameters, once they are gathered, these attributes of the sharded ones."""

    def give(part: Tensor, whole: nn.Parameter) -> None:
        own = vars(part)
        vars(whole).update({name: own[name] for name in names if name in own})

    for module in model.modules():
        group = fsdp_param_group(module)
        for param in () if group is None else fsdp_params(group):
            fsdp_after_init_unsharded_param(param, give)


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


def _reduce_unused(root: FSDPModule, policy: Policy) -> None:
    """Have parameters that took no part reduced as zeros: other ranks may have used them, and would wait."""
    # From torch 2.13 on it does so itself; until 2.14 not where some gradients are in the format of the sum already.
    does_so = hasattr(root, "set_reduce_scatter_unused_params")
    if does_so and (policy.reduce == policy.compute or fsdp_accumulates_mixed_dtypes()):
        root.set_reduce_scatter_unused_params(True)
        return
    assert isinstance(root, nn.Module)
    for module in root.modules():
        group = fsdp_param_group(module)
        if group is not None:
            fsdp_wrap_post_backward(group, partial(_with_zeros, group))


def _pass_over_idle(sharded: Sequence[FSDPModule]) -> None:
    """Let a unit that nobody has called yet keep nothing from one micro-batch to the next.

    torch looks for its gradients all the same, where it was gathered ahead, and finds no parameters.
    """
    for group in map(fsdp_param_group, sharded):
        if group is not None:
            fsdp_wrap_post_backward(group, partial(_unless_idle, group))


def _unless_idle(group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
    def kept(*args: Any) -> Any:
        called = any(fsdp_unsharded_param(each) is not None for each in fsdp_params(group))
        return post_backward(*args) if called or fsdp_reduces_grads(group) else None

    return kept


def _with_zeros(group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch alone leaves such parameters out, each rank its own; so they get zeros before anything is reduced.

    What earlier micro-batches left is in the format of the sum already, and torch reduces one format at a time: then
    the gradients of parameters that took part in the last one alone, or in none, are given that format too.
    """

    def filled(*args: Any) -> Any:
        if fsdp_reduces_grads(group):
            fsdp_fill_unused_grads(group)
        return post_backward(*args)

    return filled


def _prefetch(modules: Sequence[nn.Module], options: ShardingOptions) -> None:
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        if options.forward_prefetch:
            ahead = modules[index + 1 : index + 1 + options.forward_prefetch]
            module.set_modules_to_forward_prefetch([m for m in ahead if isinstance(m, FSDPModule)])
        if options.backward_prefetch:
            behind = modules[max(index - options.backward_prefetch, 0) : index][::-1]
            module.set_modules_to_backward_prefetch([m for m in behind if isinstance(m, FSDPModule)])


# The whole weights of sharded modules, of which each rank owns a part: when they are there, and who sees them.
#
# `fully_shard` gathers them when the model runs, and puts them in the place of the parts. Below stage 3 they stay until
# the last backward pass of a step. Nothing but the parts is updated, saved and loaded.


class UnshardedParams:
    """The sharded modules of one model. Without any, there is nothing to do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
        self.kept = False
        """Whether they are there between steps, too."""

    def keep(self) -> None:
        """Have them between steps, too, from now on; every rank must call it.

        `state_dict` then gives them, on any rank alone: what the model computes with, in its format. What is written
        into them is gone after the next update.
        """
        if not self._modules:
            return
        self.kept = True
        for module in self._modules:
            fsdp_lazy_init(module)
        for group in self._groups():  # hooks by which `state_dict` shows the parts
            for handle in fsdp_state_dict_hooks(group):
                handle.remove()
        for module in self._model.modules():
            if hasattr(module, "generate"):
                generate_alone(module)
        self.renew()

    def expect(self, loss: Tensor) -> None:
        """A backward pass begins at this loss: have the gradients of all modules completed at its end.

        torch learns of a pass from what its modules have answered. A loss may come from a part of the model that was
        called by itself, of which torch knows nothing; the gradients would stay where they are, and be lost.
        """
        state = fsdp_state(self._modules[0]) if self._modules else None
        if state is not None and fsdp_is_root(state) and loss.requires_grad:
            finish = fsdp_register_post_backward_final_callback(state)
            loss.register_hook(lambda _grad: finish())  # type: ignore[no-untyped-call]

    def renew(self) -> None:
        """The parts have changed: let go of what was gathered before, and gather it anew where it is kept."""
        if not self._modules:
            return
        self._let_go()
        if self.kept:
            for module in self._modules:
                module.unshard()

    def let_go(self) -> None:
        """Let go of those that a forward pass without a backward pass has left, unless they are kept.

        They would hide the parts, and the next step would compute with them even if the parts have changed since.
        """
        if not self.kept:
            self._let_go()

    def _let_go(self) -> None:
        for group in self._groups():
            # Gathered ahead for a module that did not come next: still to arrive, and old when it is used.
            if fsdp_has_all_gather_result(group):
                fsdp_wait_for_unshard(group)
        for module in self._modules:
            module.reshard()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While this lasts, the modules hold the parts; the model must not run."""
        held = [
            (param, fsdp_module_param(param))
            for group in self._groups()
            if not fsdp_is_sharded(group)
            for param in fsdp_params(group)
        ]
        for param, _ in held:
            fsdp_set_module_param(param, fsdp_sharded_param(param))
        try:
            yield
        finally:
            for param, shown in held:
                fsdp_set_module_param(param, shown)

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            group = fsdp_param_group(module)
            if group is not None:
                yield group
