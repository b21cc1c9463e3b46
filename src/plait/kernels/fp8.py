"""Linear layers whose three matrix multiplications take 8-bit inputs.

The three are: the output (input times weight), the input's gradient, and the weight's gradient.

[Note: numbers in 8 bits] The 8-bit formats represent few numbers, in a narrow range. So a tensor is first multiplied by
a *scale* that maps its largest absolute value (*amax*) to the largest number of the format, and then rounded; the
result of the matrix multiplication is divided by the scales of both inputs. The optimizer and the other layers have
16-bit tensors.

- `tensorwise`: one scale per tensor. Activations and weights are e4m3, gradients, which vary more, e5m2.
- `rowwise`: one scale for each row along the dim that the multiplication sums over, so an outlier affects its own row
  only; all are e4m3. The backward pass sums over other dims, so tensors are scaled again there.

[Note: layers of one input] Queries, keys and values have the same input, and so have gate and up. The input is cast
once for all of them. The same kernel also stores the transposed 8-bit copy that the weights' gradients need; that copy
is saved for the backward pass instead of the input, at half its size. In the backward pass the gradients of all outputs
are concatenated, so one multiplication gives the input's gradient, and one the gradients of all weights. Hence such
layers share one scale for their weights, and one for their gradients.

For `rowwise`, and under `torch.compile`, each layer is computed separately, with torch operations: the compiler fuses
these with the operations before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.fake_tensors import on_fake_tensors
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON, interprets, on_device_of
from plait.torch_internals import scaled_mm

# The kernels of `fp8_cast`: one reads a tensor to compute its amax, a second reads it again and stores both 8-bit
# copies, row by row and transposed.
#
# The first kernel reads the tensor from its end to its beginning, so the second finds the beginning in the L2 cache.
# With delayed scaling only the second runs, and also records the amax; see [Note: scales of earlier steps].
#
# [Note: transposed in words of four bytes] A tile is transposed through shared memory, which moves a word of 4 bytes as
# fast as a single byte. Four rows of a column are neighbours in the transposed copy. So a program loads its tile in
# four steps (rows 0, 4, 8, …; then rows 1, 5, 9, …; and so on), joins the four bytes of each column into one word, and
# transposes the words.


AMAX_PROGRAMS = 256
"""The maximum of programs that compute the amax of one tensor, two per SM; each stores the amax of its part."""
MOST_LAYERS = 4
"""The maximum of layers that are computed together; each has an amax from earlier steps."""
READ = 16384
"""Elements that such a program reads at a time."""
_TALL, _WIDE = 128, 64
"""Rows and columns of a tile: both its rows and its transposed rows are whole cache lines."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def size_bits(value):  # type: ignore[no-untyped-def]
        """Return the bits of the absolute values as integers, which compare like the values; NaN is the largest."""
        return tl.abs(value).to(tl.int32, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _amax_kernel(x, amax, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store one amax per program: that of every n-th block (n programs), read from the last block to the first."""
        program = tl.program_id(0)
        blocks = tl.cdiv(count, block)
        at = tl.arange(0, block)
        largest = tl.zeros((block,), dtype=tl.int32)
        for index in range(program, blocks, tl.num_programs(0)):
            offset = (blocks - 1 - index).to(tl.int64) * block + at
            value = tl.load(x + offset, mask=offset < count, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, size_bits(value))
        tl.store(amax + program, tl.max(largest, 0).to(tl.float32, bitcast=True))

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def scale_from(amax, count, smallest, limit, inverse, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the scale for the largest of `count` amax values; the first program stores its inverse."""
        at = tl.arange(0, block)
        candidates = tl.load(amax + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
        peak = tl.max(candidates, 0).to(tl.float32, bitcast=True)
        peak = tl.maximum(peak, smallest, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.math.div_rn(1.0, peak) * limit
        if tl.program_id(0) == 0:
            tl.store(inverse, tl.math.div_rn(1.0, scale))
        return scale

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def fitted(value, scale, limit, saturates: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return scaled values; with `saturates`, finite ones beyond the range are clamped, others become NaN."""
        scaled = value * scale
        if saturates:
            cut = tl.minimum(tl.maximum(scaled, -limit), limit)
            scaled = tl.where(tl.abs(value) < float("inf"), cut, float("nan"))
        return scaled

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def record_amax(bits, amax_bits, count: tl.constexpr):  # type: ignore[no-untyped-def]
        """Replace each of `count` recorded amax values by that of a tile, if that is larger; all are `size_bits`."""
        if count > 0:
            largest = tl.max(tl.max(bits, 1), 0)
            for at in tl.static_range(count):
                tl.atomic_max(amax_bits + at, largest, sem="relaxed")

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def pack_pair(first, second, like, by_hand: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return a word whose lowest byte is `first` and whose next byte is `second`, in the 8-bit dtype of `like`.

        `by_hand` is for Triton's interpreter, which cannot run inline assembly. On a device the assembly is needed:
        Triton 3.6 compiles the other operations to different bytes where the same values are also stored.
        """
        dtype: tl.constexpr = like.dtype.element_ty
        if by_hand:
            low = first.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)
            both = low | (second.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 8)
        elif dtype == tl.float8e5:
            both = tl.inline_asm_elementwise(
                "{ .reg .b16 two; cvt.rn.satfinite.e5m2x2.f32 two, $2, $1; cvt.u32.u16 $0, two; }",
                "=r,f,f",
                [first, second],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            both = tl.inline_asm_elementwise(
                "{ .reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, $2, $1; cvt.u32.u16 $0, two; }",
                "=r,f,f",
                [first, second],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        return both

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def store_transposed(  # type: ignore[no-untyped-def]
        packed, columns, stride, top, left, height, width, quarter: tl.constexpr, wide: tl.constexpr
    ):
        """Store a tile of words, transposed, into its place in `columns`, the transpose of a matrix (height, width)."""
        corner = (columns + left.to(tl.int64) * stride + top).to(tl.pointer_type(tl.int32))
        down, right = tl.arange(0, quarter)[None, :], tl.arange(0, wide)[:, None]
        inside = (right < width - left) & (down < (height - top) // 4)
        tl.store(corner + right * (stride // 4) + down, tl.trans(packed), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _fp8_cast_kernel(  # type: ignore[no-untyped-def]
        x,
        amax,
        amax_count,
        rows,
        columns,
        inverse,
        amax_bits,
        height,
        width,
        padded,
        rows_stride,
        columns_stride,
        smallest,
        limit,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        amax_bits_count: tl.constexpr,
        saturates: tl.constexpr,
        amax_block: tl.constexpr,
        by_hand: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """Cast one tile per program, and store it in `rows` and, transposed, in `columns`.

        See [Note: transposed in words of four bytes].
        """
        across = tl.cdiv(width, wide)
        top = (tl.program_id(0) // across).to(tl.int64) * tall
        left = (tl.program_id(0) % across) * wide
        quarter: tl.constexpr = tall // 4
        down, right = 4 * tl.arange(0, quarter)[:, None], left + tl.arange(0, wide)[None, :]
        x, rows, below = x + top * width, rows + top * rows_stride, height - top
        scale = scale_from(amax, amax_count, smallest, limit, inverse, amax_block)
        seen = tl.zeros((quarter, wide), dtype=tl.int32)
        packed = tl.zeros((quarter, wide), dtype=tl.int32)
        for step in tl.static_range(4):
            at = down + step
            inside = (at < below) & (right < width)
            value = tl.load(x + at * width + right, mask=inside, other=0.0).to(tl.float32)
            # With the tensor's own scale, a value exceeds the limit by its last bit at most, which rounding removes.
            scaled = fitted(value, scale, limit, saturates)
            seen = tl.maximum(seen, size_bits(value))
            if has_rows:
                tl.store(rows + at * rows_stride + right, scaled.to(rows.dtype.element_ty), mask=inside)
            if step % 2 == 0:
                before = scaled
            else:
                packed |= pack_pair(before, scaled, columns, by_hand) << (8 * (step - 1))
        record_amax(seen, amax_bits, amax_bits_count)
        if has_columns:
            store_transposed(packed, columns, columns_stride, top, left, padded, width, quarter, wide)


def _amax_fake(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.amax() for x in tensors]).float().repeat(AMAX_PROGRAMS)


@on_fake_tensors(_amax_fake)
def amax_triton(tensors: Sequence[Tensor]) -> Tensor:
    """Return partial amax values of contiguous tensors, fp32; the maximum of these is the amax of all tensors."""
    counts = [programs_for(x.numel(), READ) for x in tensors]
    amax = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    with on_device_of(amax):
        for x, count, tensor_amax in zip(tensors, counts, amax.split_with_sizes(counts), strict=True):
            _amax_kernel[(count,)](x, tensor_amax, x.numel(), block=READ, num_warps=16)
    return amax


def programs_for(numbers: int, block: int) -> int:
    """Return the number of programs that compute the amax of this many elements, each one block at a time."""
    return min(AMAX_PROGRAMS, max(1, -(-numbers // block)))


def amax_slots(amax: Tensor) -> int:
    """Return the block size with which a kernel loads these amax values.

    A kernel is compiled for each block size, so there are few: `MOST_LAYERS` for amax values of earlier steps, and one
    that fits partial amax values of almost all tensors.
    """
    return MOST_LAYERS if len(amax) <= MOST_LAYERS else int(max(AMAX_PROGRAMS, triton.next_power_of_2(len(amax))))


def _fp8_cast_fake(
    x: Tensor,
    amax: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    inverse: Tensor,
    smallest: float,
    *,
    amax_bits: Tensor | None,
    saturates: bool,
) -> None:
    if rows is not None:
        rows.copy_(x)
    if columns is not None:
        columns[:, : len(x)].copy_((x if rows is None else rows).t())


@on_fake_tensors(_fp8_cast_fake)
def fp8_cast_triton(
    x: Tensor,
    amax: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    inverse: Tensor,
    smallest: float,
    *,
    amax_bits: Tensor | None,
    saturates: bool,
) -> None:
    """Cast a contiguous matrix to 8 bits, and store it in `rows` and, transposed, in `columns`; both may be views.

    `columns` may have more columns than `x` has rows: the others become zero. The inverse scale is stored in `inverse`.
    Each of `amax_bits` is replaced by the amax of `x` if that is larger.
    """
    height, width = x.shape
    target = rows if columns is None else columns
    assert target is not None
    padded = height if columns is None else columns.shape[1]
    programs = triton.cdiv(padded, _TALL) * triton.cdiv(width, _WIDE)
    with on_device_of(x):
        _fp8_cast_kernel[(programs,)](
            x,
            amax,
            len(amax),
            target if rows is None else rows,
            target,
            inverse,
            amax if amax_bits is None else amax_bits,
            height,
            width,
            padded,
            target.stride(0) if rows is None else rows.stride(0),
            target.stride(0),
            smallest,
            torch.finfo(target.dtype).max,
            has_rows=rows is not None,
            has_columns=columns is not None,
            amax_bits_count=0 if amax_bits is None else len(amax_bits),
            saturates=saturates,
            amax_block=amax_slots(amax),
            by_hand=interprets(),
            tall=_TALL,
            wide=_WIDE,
            num_warps=4,
        )


# 8-bit matrices: their scale, and copies in row-major and column-major order.
#
# [Note: copies for three products] Both inputs of an 8-bit multiplication must be contiguous along the dim that it sums
# over. Each tensor is an input of two of the three multiplications of a linear layer, which sum over different dims, so
# it is needed both as it is and transposed. One kernel stores both copies.


E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MULTIPLE = 16
"""The numbers of rows and columns of an 8-bit matrix must be multiples of this."""
SMALLEST = 1e-12
"""A smaller amax is replaced by this one, so that a tensor of zeros has a finite scale."""


class Fp8Matrix(NamedTuple):
    """An 8-bit matrix."""

    rows: Tensor
    """The matrix; empty where it was not asked for."""
    columns: Tensor
    """Its transpose, rows padded with zeros to a multiple of 16; empty where it was not asked for."""
    inverse: Tensor
    """The inverse scale, fp32."""


def has_fp8_kernels(x: Tensor) -> bool:
    """Whether the kernels of this file can cast this tensor: its device must support the 8-bit dtypes."""
    return implementation("fp8_cast", x) == "plait"


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Return the scale, fp32, that maps a tensor (with `dim`, each slice along it) to the range of `dtype`."""
    return _scale(torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None).float(), dtype)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scaled tensor in 8 bits, row-major; clamped, since values beyond the range would become NaN."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype).contiguous()


def amax_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return partial amax values of tensors, fp32; their maximum is the amax of all, or NaN if a tensor has NaN."""
    if has_fp8_kernels(tensors[0]):
        return amax_triton([x.contiguous() for x in tensors])
    return amax_plain(tensors)


def amax_plain(tensors: Sequence[Tensor]) -> Tensor:
    """Return what `amax_of` returns, by torch operations."""
    return torch.stack([torch.linalg.vector_norm(x, float("inf")) for x in tensors]).float()


def fp8_cast(
    tensors: Sequence[Tensor],
    amax: Tensor,
    dtype: torch.dtype,
    *,
    dim: int = 0,
    rows: bool,
    columns: bool,
    amax_bits: Tensor | None = None,
    saturates: bool = False,
) -> Fp8Matrix:
    """Return matrices, concatenated along `dim`, in 8 bits with one scale: that for `amax`, from `amax_of`.

    `rows` and `columns` say which copies are needed. `saturates`: `amax` is from earlier steps, and values beyond it
    are clamped. `amax_bits` (int32, the bits of fp32 values) are recorded amax values: each is replaced by the amax of
    its matrix, if that is larger. There is one per matrix, or, for a single matrix, any number.
    """
    if not has_fp8_kernels(tensors[0]):
        return fp8_cast_plain(
            tensors, amax, dtype, dim=dim, rows=rows, columns=columns, amax_bits=amax_bits, saturates=saturates
        )
    sizes = [x.shape[dim] for x in tensors]
    other, total = tensors[0].shape[1 - dim], sum(sizes)
    height, width = (other, total) if dim else (total, other)
    by_row = tensors[0].new_empty((height, width) if rows else 0, dtype=dtype)
    by_column = tensors[0].new_empty((width, height + -height % MULTIPLE) if columns else 0, dtype=dtype)
    inverse = amax.new_empty(())
    amax_bits_of_each: Sequence[Tensor | None] = (
        [None] * len(tensors) if amax_bits is None else amax_bits.chunk(len(tensors))
    )
    start = 0
    for x, size, bits in zip(tensors, sizes, amax_bits_of_each, strict=True):
        # Only a single matrix, or several side by side, may need padding.
        column_size = size if len(tensors) > 1 or dim else by_column.shape[-1]
        row_part = by_row.narrow(dim, start, size) if rows else None
        column_part = by_column.narrow(1 - dim, start, column_size) if columns else None
        start += size
        fp8_cast_triton(
            x.contiguous(), amax, row_part, column_part, inverse, SMALLEST, amax_bits=bits, saturates=saturates
        )
    return Fp8Matrix(by_row, by_column, inverse)


def fp8_cast_plain(
    tensors: Sequence[Tensor],
    amax: Tensor,
    dtype: torch.dtype,
    *,
    dim: int = 0,
    rows: bool,
    columns: bool,
    amax_bits: Tensor | None = None,
    saturates: bool = False,
) -> Fp8Matrix:
    """Return what `fp8_cast` returns, by torch operations."""
    if amax_bits is not None:
        record_amax_plain(tensors, amax_bits)
    scale = _scale(amax.amax(), dtype)
    concatenated = torch.cat(tuple(tensors), dim)
    if saturates:  # infinities must not be clamped to finite values
        concatenated = concatenated.where(concatenated.isfinite(), torch.nan)
    cast = rounded(concatenated, scale, dtype)
    none = cast.new_empty(0)
    # As bytes, because not every operation supports the 8-bit dtypes.
    transposed = F.pad(cast.view(torch.uint8).t(), (0, -len(cast) % MULTIPLE)).contiguous().view(dtype)
    return Fp8Matrix(cast if rows else none, transposed if columns else none, scale.reciprocal())


def record_amax_plain(tensors: Sequence[Tensor], amax_bits: Tensor) -> None:
    """Replace each recorded amax, given as bits, by that of its tensor, or of the only tensor, if that is larger."""
    seen = amax_bits.view(torch.float32)
    seen.copy_(torch.maximum(seen, amax_plain(tensors)))


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp(min=SMALLEST).reciprocal() * torch.finfo(dtype).max


# Delayed scaling: scales from the amax of earlier steps, so that a tensor is read once.
#
# [Note: scales of earlier steps] With its own scale, a tensor has to be read twice: for its amax, and to be cast. But
# the amax of a layer's input, weight or gradient changes little from one step to the next. So a scale may come from the
# amax of the last few steps, with some headroom; values beyond it are clamped. The kernel that casts a tensor records
# its amax, and `precision.fp8` keeps the history and computes the amax values for the next step. They do not change
# within a step: all micro-batches and recomputed forward passes have the same scales, and recording the amax of a
# recomputed tensor again changes nothing.
#
# Every layer has an amax of its own. Layers that are computed together use the largest of theirs.


INPUT, WEIGHT, GRADIENT = range(3)
"""The indices of the tensors that a layer multiplies: its input, its weight, and the gradient of its output."""
FORMATS: tuple[torch.dtype, ...] = (E4M3, E4M3, E5M2)
"""The 8-bit dtype of each of these."""


class DelayedScales(NamedTuple):
    """The amax values of some layers: a row for each of `INPUT`, `WEIGHT` and `GRADIENT`, a column for each layer."""

    amax: Tensor | None = None
    """The values of earlier steps, which scales are computed from, fp32; None: each tensor's own amax is used."""
    amax_bits: Tensor | None = None
    """Where this step's amax values are recorded, as the bits of fp32 values, int32; None: they are not recorded."""

    @property
    def saturates(self) -> bool:
        """Whether a tensor may exceed the amax that its scale is for."""
        return self.amax is not None

    def of_layers(self, start: int, stop: int) -> DelayedScales:
        """Return the values of the layers from `start` up to `stop`."""
        amax, amax_bits = (None if values is None else values[:, start:stop] for values in self)
        return DelayedScales(amax, amax_bits)

    def amax_bits_of(self, operand: int) -> Tensor | None:
        """Return the row of `amax_bits` for this operand; None if no amax is recorded."""
        return None if self.amax_bits is None else self.amax_bits[operand]

    def amax_of(self, operand: int, tensors: Sequence[Tensor]) -> Tensor:
        """Return the amax values that the scale of these tensors is computed from."""
        return amax_of(tensors) if self.amax is None else self.amax[operand]

    def fp8_cast(
        self, operand: int, tensors: Sequence[Tensor], amax: Tensor, *, dim: int = 0, rows: bool, columns: bool
    ) -> Fp8Matrix:
        """Cast tensors by `fp8_cast` to the dtype of the operand, and record their amax."""
        return fp8_cast(
            tensors,
            amax,
            FORMATS[operand],
            dim=dim,
            rows=rows,
            columns=columns,
            amax_bits=self.amax_bits_of(operand),
            saturates=self.saturates,
        )


CURRENT_SCALES = DelayedScales()
"""Current scaling: every tensor's scale comes from its own amax."""


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, rowwise: bool, emulated: bool) -> Tensor:
    """Return `F.linear` of 16-bit tensors, computed in 8 bits; in and out features must be multiples of 16.

    `emulated`: tensors are cast to 8 bits as usual, but multiplied in fp32, on devices that cannot multiply in 8 bits.
    """
    return fp8_linears(x, [weight], [bias], rowwise=rowwise, emulated=emulated)[0]


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    rowwise: bool,
    emulated: bool,
    earlier: DelayedScales = CURRENT_SCALES,
) -> tuple[Tensor, ...]:
    """Return `fp8_linear` for each of several layers of the same input; see [Note: layers of one input].

    `earlier` has a column per layer. It is used for `tensorwise` without `torch.compile` only.
    """
    flat = x.flatten(0, -2)
    outputs: tuple[Tensor, ...]
    if rowwise or torch.compiler.is_compiling():
        outputs = tuple(_Linear.apply(flat, weight, rowwise, emulated) for weight in weights)  # type: ignore[no-untyped-call]
    else:
        keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        outputs = _Fp8Linears.apply(flat, keeps, emulated, earlier, *weights)  # type: ignore[no-untyped-call]
    shaped = [y.view(*x.shape[:-1], y.shape[-1]) for y in outputs]
    return tuple(y if bias is None else y + bias for y, bias in zip(shaped, biases, strict=True))


def scaled_product(
    a: Tensor, b: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool, emulated: bool
) -> Tensor:
    """Return `a @ b` in `dtype`, for 8-bit matrices with these inverse scales.

    `a` is row-major, `b` column-major. `fast` sums with fewer bits. `emulated` multiplies in fp32.
    """
    if not emulated:
        return scaled_mm(a, b, scale_a=inverses[0], scale_b=inverses[1], out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return (torch.mm(a.float(), b.float()) * inverses[0] * inverses[1]).to(dtype)


class _Fp8Linears(torch.autograd.Function):
    """Linear layers of the same input in 8 bits, with one scale per tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keeps: bool, emulated: bool, earlier: DelayedScales, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        cast_x = earlier.fp8_cast(INPUT, [x], earlier.amax_of(INPUT, [x]), rows=True, columns=keeps)
        amax = earlier.amax_of(WEIGHT, weights)
        stacked = earlier.fp8_cast(WEIGHT, weights, amax, rows=True, columns=False)
        # Weights are cast again in the backward pass: saved copies would keep sharded weights gathered.
        ctx.save_for_backward(cast_x.columns, cast_x.inverse, amax, *weights)
        ctx.emulated, ctx.earlier = emulated, earlier
        inverses = cast_x.inverse, stacked.inverse
        return tuple(
            scaled_product(cast_x.rows, stacked_weight.t(), inverses, x.dtype, fast=True, emulated=emulated)
            for stacked_weight in stacked.rows.split_with_sizes([len(weight) for weight in weights])
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, inverse, amax, *weights = ctx.saved_tensors
        needs_x, _, _, _, *needed = ctx.needs_input_grad
        earlier: DelayedScales = ctx.earlier
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        grads = tuple(grad.contiguous() for grad in grads)
        grad_amax = earlier.amax_of(GRADIENT, grads)
        cast_grads = earlier.fp8_cast(GRADIENT, grads, grad_amax, dim=1, rows=needs_x, columns=any(needed))
        if needs_x:
            stacked = fp8_cast(weights, amax, E4M3, rows=False, columns=True, saturates=earlier.saturates)
            inverses = cast_grads.inverse, stacked.inverse
            b = stacked.columns.t()
            grad_x = scaled_product(cast_grads.rows, b, inverses, grads[0].dtype, fast=False, emulated=ctx.emulated)
        if any(needed):
            inverses, dtype = (cast_grads.inverse, inverse), weights[0].dtype
            stacked_grad = scaled_product(
                cast_grads.columns, columns.t(), inverses, dtype, fast=False, emulated=ctx.emulated
            )
            pieces = stacked_grad.split_with_sizes([len(weight) for weight in weights])
            grad_weights = [piece if needs_grad else None for piece, needs_grad in zip(pieces, needed, strict=True)]
        return grad_x, None, None, None, *grad_weights


class _Linear(torch.autograd.Function):
    """One linear layer in 8 bits, in torch operations, which `torch.compile` can fuse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, emulated: bool) -> Tensor:
        along = 1 if rowwise else None
        x_scale, w_scale = scale_of(x, E4M3, along), scale_of(weight, E4M3, along)
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.rowwise, ctx.emulated = rowwise, emulated
        a, b = rounded(x, x_scale, E4M3), rounded(weight, w_scale, E4M3).t()
        return _product(a, x_scale, b, w_scale.t() if rowwise else w_scale, x.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, x_scale, w_scale = ctx.saved_tensors
        rowwise, emulated = ctx.rowwise, ctx.emulated
        small = E4M3 if rowwise else E5M2
        grad_x = grad_weight = None
        g_scale = scale_of(grad, small, 1 if rowwise else None)
        if ctx.needs_input_grad[0]:
            if rowwise:
                w_scale = scale_of(weight, E4M3, 0)
            a, b = rounded(grad, g_scale, small), _by_column(rounded(weight, w_scale, E4M3))
            grad_x = _product(a, g_scale, b, w_scale, x.dtype, fast=False, emulated=emulated)
        if ctx.needs_input_grad[1]:
            if rowwise:
                g_scale, x_scale = scale_of(grad, small, 0), scale_of(x, E4M3, 0)
            missing = -len(x) % MULTIPLE  # the reduced dim is that of the tokens
            if missing:
                grad, x = F.pad(grad, (0, 0, 0, missing)), F.pad(x, (0, 0, 0, missing))
            a, b = rounded(grad, g_scale, small).t().contiguous(), _by_column(rounded(x, x_scale, E4M3))
            scale = g_scale.t() if rowwise else g_scale
            grad_weight = _product(a, scale, b, x_scale, weight.dtype, fast=False, emulated=emulated)
        return grad_x, grad_weight, None, None


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool, emulated: bool
) -> Tensor:
    return scaled_product(a, b, (a_scale.reciprocal(), b_scale.reciprocal()), dtype, fast=fast, emulated=emulated)


def _by_column(x: Tensor) -> Tensor:
    """Return the same matrix in column-major order."""
    return x.t().contiguous().t()
