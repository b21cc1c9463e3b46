"""FP8: linear layers of a model's blocks multiply in 8 bits; see [Note: numbers in 8 bits] in `kernels/fp8.py`.

A tensor is multiplied by a *scale* and cast to 8 bits. A scale is computed from a largest absolute value (*amax*): a
*current* one from that of the tensor itself, a *delayed* one from those in the same layer in the last steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config import Fp8Config
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import is_like, on_fake_tensors
from plait.kernels import (
    CURRENT_SCALES,
    FORMATS,
    MULTIPLE,
    DelayedScales,
    fp8_feed_forward,
    fp8_linears,
    is_plain,
    is_untouched,
    swiglu,
)
from plait.kernels import apply_linears as apply_plain_linears
from plait.kernels import bypassed_layers as bypassed_plain_layers
from plait.kernels import feed_forward as plain_feed_forward

# Delayed scaling: the amax values of the last steps, for all layers that multiply in 8 bits.
#
# [Note: what is kept of a step] See [Note: scales of earlier steps] in `kernels/fp8.py`. The amax values of a step are
# maximized over the ranks with other data, in one all-reduce for all layers, so that all ranks use the same scales, and
# the same as one process would. Values that are not finite are left out; otherwise a step that is skipped because of an
# overflow counts like any other, so the history does not depend on whether a step was skipped. Until the history is
# full, scales are current ones: values change most in the beginning, and the gradients of a first step may be zero. A
# run that resumes from a checkpoint without a history, or with that of other layers, begins with current scales too.


class AmaxHistory:
    """The amax history of some layers: for each 8-bit format and layer, the amax of each of the last steps."""

    def __init__(self, names: Sequence[str], *, history: int, headroom: float, device: torch.device) -> None:
        """`names` are those of the layers. Values may grow by the factor `headroom` before they are clipped."""
        self._names = list(names)
        self._headroom = headroom
        shape = len(FORMATS), len(self._names)
        self._history = torch.zeros(history, *shape, device=device)
        self._recorded = torch.zeros(shape, dtype=torch.int32, device=device)
        limits = [[torch.finfo(dtype).max] for dtype in FORMATS]
        self._limits = torch.tensor(limits, device=device)
        self._steps = _steps_seen(self._history)
        self._peaks = self._compute_peaks()

    def of(self, rows: Sequence[int], x: Tensor) -> DelayedScales:
        """Return the scales of the layers with these numbers, for a forward pass with the input `x` in training."""
        first, count = rows[0], len(rows)
        # A slice has consecutive layers, as those of one module are. Others, and fake tensors, use current scales.
        if list(rows) != list(range(first, first + count)) or not is_like(x, self._recorded):
            return CURRENT_SCALES
        peaks = self._peaks if self._steps == len(self._history) else None
        whole = DelayedScales(peaks, self._recorded if torch.is_grad_enabled() else None)
        return whole.of_layers(first, first + count)

    @torch.no_grad()
    def after_step(self, group: dist.ProcessGroup | None) -> None:
        """Add the amax values of a step; `group`: the ranks with other data. The host does not wait for the device."""
        seen = self._recorded.view(torch.float32)
        seen = seen.where(seen.isfinite(), 0.0)
        if group is not None:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
        self._recorded.zero_()
        self._history = torch.cat((self._history[1:], seen[None]))
        self._peaks = self._compute_peaks()
        self._steps = min(self._steps + 1, len(self._history))

    def _compute_peaks(self) -> Tensor:
        """Return, for each format and layer, the largest value to be represented, from which its scale is computed.

        A layer without history has a scale of one. The tensor is always a new one: a backward pass needs the scales of
        its own forward pass.
        """
        largest = self._history.amax(0)
        return torch.where(largest > 0, largest * self._headroom, self._limits)

    def state(self) -> dict[str, list[list[float]]]:
        """Return, for each layer and format, the amax values of the last steps, the latest one last."""
        known = self._history[len(self._history) - self._steps :].permute(2, 1, 0).tolist()
        return dict(zip(self._names, known, strict=True))

    @torch.no_grad()
    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Load a `state`, which may have other layers and another number of steps."""
        history = torch.zeros(self._history.shape)
        length, steps = len(history), len(history)
        for column, name in enumerate(self._names):
            maxima = state.get(name, [[]])
            count = min(length, min(map(len, maxima)))
            steps = min(steps, count)
            if count:
                history[-count:, :, column] = torch.tensor([row[-count:] for row in maxima]).t()
        self._history, self._steps = history.to(self._history.device), steps
        self._recorded.zero_()
        self._peaks = self._compute_peaks()


@on_fake_tensors(lambda history: len(history))  # a simulated run has a full history
def _steps_seen(history: Tensor) -> int:
    return 0


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits. The weight, its name and its dtype are those of `nn.Linear`."""

    rowwise: bool
    emulated: bool
    scales: AmaxHistory | None = None
    """The history for delayed scaling; None: scales are current ones."""
    row: int
    """This layer's number in `scales`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what `nn.Linear` returns for `x`, up to the rounding to 8 bits."""
        return apply_fp8_linears(x, [self])[0]


def are_fp8(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[Fp8Linear]]:
    """Return whether these layers multiply in 8 bits with one scale per tensor, and have no hooks."""
    return all(type(layer) is Fp8Linear and not layer.rowwise and is_untouched(layer) for layer in layers)


def apply_fp8_linears(x: Tensor, layers: Sequence[Fp8Linear]) -> tuple[Tensor, ...]:
    """Return the output of each layer for `x`, which is cast to 8 bits once for all layers."""
    dtype = _format(x, layers[0])
    weights = [layer.weight.to(dtype) for layer in layers]
    biases = [None if layer.bias is None else layer.bias.to(dtype) for layer in layers]
    return fp8_linears(
        x.to(dtype),
        weights,
        biases,
        rowwise=layers[0].rowwise,
        emulated=layers[0].emulated,
        earlier=_earlier(x, layers),
    )


def feed_forward_fp8(x: Tensor, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear) -> Tensor:
    """Return `down(silu(gate(x)) * up(x))`.

    It is one operation (`fp8_feed_forward`) unless a layer has a bias, only some are trained, or torch.compile runs.
    """
    layers = gate, up, down
    learning = {layer.weight.requires_grad for layer in layers}
    if any(layer.bias is not None for layer in layers) or len(learning) > 1 or torch.compiler.is_compiling():
        return down(swiglu(*apply_fp8_linears(x, (gate, up))))  # type: ignore[no-any-return]
    dtype = _format(x, gate)
    weights = (layer.weight.to(dtype) for layer in layers)
    return fp8_feed_forward(x.to(dtype), *weights, emulated=gate.emulated, earlier=_earlier(x, layers))


def _earlier(x: Tensor, layers: Sequence[Fp8Linear]) -> DelayedScales:
    scales = layers[0].scales
    if scales is None or not layers[0].training:  # evaluation data may differ from the data of the history
        return CURRENT_SCALES
    return scales.of([layer.row for layer in layers], x)


def _format(x: Tensor, layer: Fp8Linear) -> torch.dtype:
    # The dtype in which `nn.Linear` would compute under autocast.
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype


def apply_fp8(blocks: Iterable[tuple[str, nn.Module]], config: Fp8Config, device: torch.device) -> dict[str, Fp8Linear]:
    """Make linear layers inside these blocks multiply in 8 bits; return these layers by name.

    `blocks` are (name, module). Embedding and head are outside of blocks, and are not changed. A model without blocks
    is one block with the name ""; its last linear layer is taken to be its head. The layers' class is changed in place,
    so no parameter changes its name. Layers whose sizes are not multiples of 16, and frozen ones, are not changed; if
    no layer is left, a `ModelError` is raised.
    """
    if config.recipe == "none":
        return {}
    if not config.emulate:
        _require(device)
    linears: dict[str, nn.Linear] = {}
    for prefix, block in blocks:
        candidates = [(name, module) for name, module in block.named_modules() if type(module) is nn.Linear]
        if not prefix:
            candidates = candidates[:-1]
        linears |= {".".join(filter(None, (prefix, name))): module for name, module in candidates}
    chosen = {name: module for name, module in linears.items() if _wanted(name, config) and _fits(module)}
    if not chosen:
        raise ModelError(
            f"precision.fp8 applies to no linear layer: of {len(linears)} inside the blocks, none has sizes "
            f"that are multiples of {MULTIPLE} and a name that `modules` and `skip` let through. Name the blocks with "
            "strategy.wrap, or write precision: bf16"
        )
    layers: dict[str, Fp8Linear] = {}
    for name, module in chosen.items():
        module.__class__ = Fp8Linear
        assert isinstance(module, Fp8Linear)
        module.rowwise, module.emulated = config.recipe == "rowwise", config.emulate
        layers[name] = module
    return layers


def enable_delayed_scaling(
    layers: Mapping[str, Fp8Linear], config: Fp8Config, device: torch.device
) -> AmaxHistory | None:
    """Use delayed scaling if `config` sets it; return the history, to be saved in checkpoints, or None."""
    if not layers or config.scales != "earlier":
        return None
    scales = AmaxHistory(list(layers), history=config.history, headroom=config.headroom, device=device)
    for row, layer in enumerate(layers.values()):
        layer.scales, layer.row = scales, row
    return scales


def _wanted(name: str, config: Fp8Config) -> bool:
    fits = any(fnmatchcase(name, pattern) for pattern in config.modules)
    return fits and not any(fnmatchcase(name, pattern) for pattern in config.skip)


def _fits(module: nn.Linear) -> bool:
    sizes = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
    return sizes and module.weight.requires_grad


def _require(device: torch.device) -> None:
    """Raise a `ConfigError` for a device without matrix multiplication in 8 bits."""
    if device.type != "cuda":
        reason = f"{device.type} has none"
    elif torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        reason = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and they begin with 8.9"
    else:
        return
    raise ConfigError(
        Problem(
            "precision.fp8",
            f"8-bit matrix products need a GPU that has them: {reason}",
            "Write `precision: bf16`; or `precision.fp8.emulate: true`, to see what the rounding does, slowly.",
        )
    )


# Layers that are computed together, in 8 bits or not; see `kernels/linears.py` and `kernels/fp8.py`.


def are_fusable(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers that share an input can be computed in one operation; otherwise each is called."""
    return all(map(is_plain, layers)) or are_fp8(layers)


def apply_linears(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return the output of each layer for `x`, computed in one operation; the layers must be `are_fusable`."""
    return apply_fp8_linears(x, layers) if are_fp8(layers) else apply_plain_linears(x, layers)


def feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Return `down(silu(gate(x)) * up(x))`."""
    layers = gate, up, down
    return feed_forward_fp8(x, *layers) if are_fp8(layers) else plain_feed_forward(x, gate, up, down)


def bypassed_layers(model: nn.Module) -> set[nn.Module]:
    """Return the layers that are not called: the module that lists them in `together` computes their outputs."""
    bypassed = bypassed_plain_layers(model)
    for module in model.modules():
        layers = [module.get_submodule(name) for names in getattr(type(module), "together", ()) for name in names]
        if are_fp8(layers):
            bypassed.update(layers)
    return bypassed
