"""Products for which torch has no single kernel, as Triton kernels: one launch for all clients.

`available(x)` tells whether a tensor can use them: float32 on a CUDA device, with Triton installed
(it comes with torch's CUDA builds). Every caller has an implementation in plain torch, too. Sums
run in a fixed order, so results are deterministic.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

try:
    from polyphily.nn import triton_kernels
except ImportError:  # torch without CUDA, or a platform without Triton
    TRITON = False
else:
    TRITON = True

if TYPE_CHECKING:
    from polyphily.nn.segments import Segments

TILE, LARGE_TILE = 32, 64  # rows of a client that a program multiplies at a time
LARGE = 256  # mean number of rows of a client from which tiles are large
SHORT_TILE = 16  # rows that a program mixes from many matrices
TALL_TILE = 256  # rows that a program sums
BLOCK = 1024  # entries of a matrix that a program changes one by one
MANY = 1 << 16  # numbers from which a tensor has an optimiser's step of its own
MOST_CLASSES = 1024  # up to which a program holds all logits of a node
MOST_WIDTH = 1024  # up to which a program normalises whole rows
ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own interpreter, for tests


def available(x: Tensor) -> bool:
    """Return whether the kernels can be used for a tensor."""
    return TRITON and x.dtype == torch.float32 and (x.is_cuda or ON_CPU)


def _power(number: int, least: int, most: int) -> int:
    """Return the smallest power of two that is not below a number, within bounds."""
    return min(max(1 << (max(number, 1) - 1).bit_length(), least), most)


def _blocks(width: int, degree: float) -> tuple[int, int, int]:
    """Return the columns, rows and entries that a program of a sparse product handles at a time."""
    height, entries = (8, 4) if degree < 6 else (4, 8) if degree < 64 else (1, 32)
    return _power(width, 16, 64), height, entries


def sparse_product(
    crow: Tensor,
    col: Tensor,
    value: Tensor | None,
    rows: int,
    dense: Tensor,
    bias: Tensor | None = None,
    owner: Tensor | None = None,
) -> Tensor:
    """Return CSR times dense, `[rows, width]`, plus the bias of each row's owner if given."""
    dense = dense.contiguous()
    if bias is not None and bias.stride(1) != 1:
        bias = bias.contiguous()
    width = dense.shape[1]
    out = dense.new_empty(rows, width)
    if out.numel() == 0:
        return out
    columns, height, entries = _blocks(width, len(col) / rows)
    grid = (-(-rows // height), -(-width // columns))
    triton_kernels.sparse_kernel[grid](
        crow, col, col if value is None else value.contiguous(), dense,
        dense if bias is None else bias, col if owner is None else owner, out, rows, width,
        0 if bias is None else bias.stride(0),
        HAS_VALUE=value is not None, HAS_BIAS=bias is not None,
        ROWS=height, ENTRIES=entries, COLUMNS=columns,
    )  # fmt: skip
    return out


def adam_step(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
    decoupled: bool,
) -> None:
    """Take a step of Adam, or with decoupled decay of AdamW, in place.

    torch's fused step gives 65,536 numbers to a program, which leaves most of a GPU idle if a few
    tensors are large.

    Args:
        param: contiguous, as are the gradient and the moments.
        grad: its gradient.
        mean: the first moment.
        square: the second moment.
        step: the number of this step, from 1, on the device.
        lr: learning rate.
        decay: coefficient of the decay.
        betas: of the moments.
        epsilon: added to the root of the second moment.
        decoupled: whether the decay shrinks the parameter (AdamW) or is added to the gradient.
    """
    count = param.numel()
    triton_kernels.adam_kernel[(-(-count // BLOCK),)](
        param, grad, mean, square, step, count, lr, decay,
        DECOUPLED=decoupled, BETA1=betas[0], BETA2=betas[1],
        LOG1=math.log(betas[0]), LOG2=math.log(betas[1]), EPSILON=epsilon, BLOCK=BLOCK,
    )  # fmt: skip


def entry_products(row: Tensor, col: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return left · right^T at the given rows and columns, `[entries]`."""
    left, right = left.contiguous(), right.contiguous()
    out = left.new_empty(len(row))
    if len(row):
        columns = _power(left.shape[1], 16, 64)
        entries = 2048 // columns
        triton_kernels.entry_kernel[(-(-len(row) // entries),)](
            row, col, left, right, out, len(row), left.shape[1], ENTRIES=entries, COLUMNS=columns
        )
    return out


def _tile(segments: Segments) -> int:
    return LARGE_TILE if segments.rows >= LARGE * len(segments) else TILE


def grouped_product(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """Return each client's rows times that client's matrix (`Segments.matmul`)."""
    inner, outer = weight.shape[1], weight.shape[2]
    out = x.new_empty(segments.rows, outer)
    if out.numel() == 0:
        return out
    tile = _tile(segments)
    client, start, stop = segments.tiles(tile)
    columns = _power(outer, 16, 64)
    triton_kernels.grouped_kernel[(len(client), -(-outer // columns))](
        x, weight, out, client, start, stop, inner, outer, *weight.stride(),
        PRECISION=precision(), ROWS=tile, INNER=_power(inner, 16, 32), OUTER=columns,
    )  # fmt: skip
    return out


def grouped_gradient(x: Tensor, grad: Tensor, segments: Segments) -> Tensor:
    """Return x^T grad over each client's rows, `[clients, inner, outer]`."""
    inner, outer = x.shape[1], grad.shape[1]
    out = x.new_empty(len(segments), inner, outer)
    if out.numel() == 0:
        return out
    tile = _tile(segments)
    height, columns = _power(inner, 16, tile), _power(outer, 16, tile)
    triton_kernels.gradient_kernel[(len(segments), -(-inner // height), -(-outer // columns))](
        x, grad, out, segments.starts, inner, outer,
        PRECISION=precision(), ROWS=TILE, INNER=height, OUTER=columns,
    )  # fmt: skip
    return out


def segment_sum(x: Tensor, segments: Segments) -> Tensor:
    """Return the sum of the rows of each client, `[rows, width] -> [clients, width]`."""
    x = x.contiguous()
    width = x.shape[1]
    out = x.new_empty(len(segments), width)
    if out.numel() == 0:
        return out
    columns = _power(width, 1, 32)
    triton_kernels.sum_kernel[(len(segments), -(-width // columns))](
        x, out, segments.starts, width, ROWS=max(2048 // columns, 16), COLUMNS=columns
    )
    return out


class Hashes(NamedTuple):
    """The seeds that decide which entries consecutive calls of dropout keep, from `call` on."""

    words: Tensor
    round_index: Tensor
    call: int
    threshold: int
    scale: float


Places: TypeAlias = tuple[Tensor, Tensor]
"""The owner of every row, and the row's number among those of its owner."""


def dropout(x: Tensor, places: Places, hashes: Hashes) -> Tensor:
    """Zero the entries whose hash is below the threshold and scale the others; differentiable."""
    dropped: Tensor = _Dropout.apply(x, places, hashes)  # type: ignore[no-untyped-call]
    return dropped


def activation(x: Tensor, places: Places, hashes: Hashes) -> tuple[Tensor, Tensor]:
    """Return ReLU(x) and the same after dropout, in one pass; differentiable."""
    both: tuple[Tensor, Tensor] = _Activation.apply(x, places, hashes)  # type: ignore[no-untyped-call]
    return both


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return _drop(x, None, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(grad, None, *ctx.how), None, None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        rectified = torch.empty_like(x, memory_format=torch.contiguous_format)
        dropped = _drop(x, rectified, *how)
        ctx.save_for_backward(rectified)
        return rectified, dropped

    @staticmethod
    def backward(ctx: Any, direct: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (rectified,) = ctx.saved_tensors
        if grad is None:
            return None if direct is None else direct * (rectified > 0), None, None
        grad = grad.contiguous()
        out = torch.empty_like(rectified)
        if out.numel():
            triton_kernels.activation_gradient_kernel[_grid(out)](
                rectified, grad if direct is None else direct.contiguous(), grad, out,
                *_hashed(out, *ctx.how), DIRECT=direct is not None, BLOCK=BLOCK,
            )  # fmt: skip
        return out, None, None


def _drop(x: Tensor, rectified: Tensor | None, places: Places, hashes: Hashes) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        triton_kernels.dropout_kernel[_grid(out)](
            x, out if rectified is None else rectified, out,
            *_hashed(out, places, hashes), RELU=rectified is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // BLOCK),)


def _hashed(x: Tensor, places: Places, hashes: Hashes) -> tuple[Any, ...]:
    """Return the arguments by which a kernel finds out what dropout keeps."""
    words, round_index, call, threshold, scale = hashes
    count = x.numel()
    return *places, words, round_index, call, count, count // len(x), threshold, scale


def holds_logits(logits: Tensor) -> bool:
    """Return whether `cross_entropy` can be used for logits."""
    return available(logits) and 0 < logits.shape[1] <= MOST_CLASSES


def cross_entropy(logits: Tensor, nodes: Tensor, labels: Tensor, segments: Segments) -> Tensor:
    """Return each client's mean cross-entropy at its train nodes, `[clients]`; differentiable.

    Args:
        logits: of all nodes, `[N, classes]`.
        nodes: the train nodes, none of them twice.
        labels: their labels.
        segments: how they are divided among clients. A client without any has the mean zero.
    """
    means: Tensor = _CrossEntropy.apply(logits.contiguous(), nodes, labels, segments)  # type: ignore[no-untyped-call]
    return means


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, nodes: Tensor, labels: Tensor, segments: Segments
    ) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(logits, nodes, labels)
        out = logits.new_empty(len(segments))
        if len(segments):
            triton_kernels.entropy_kernel[(len(segments),)](
                logits, nodes, labels, segments.starts, out, logits.shape[1],
                **_entropy_blocks(logits),
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, nodes, labels = ctx.saved_tensors
        segments: Segments = ctx.segments
        out = torch.zeros_like(logits)
        if segments.rows:
            blocks = _entropy_blocks(logits)
            triton_kernels.entropy_gradient_kernel[(-(-segments.rows // blocks["ROWS"]),)](
                logits, nodes, labels, segments.owner, segments.starts, grad.contiguous(), out,
                segments.rows, logits.shape[1], **blocks,
            )  # fmt: skip
        return out, None, None, None


def _entropy_blocks(logits: Tensor) -> dict[str, int]:
    classes = _power(logits.shape[1], 2, MOST_CLASSES)
    return {"ROWS": 2048 // classes, "CLASSES": classes}


def holds_rows(x: Tensor) -> bool:
    """Return whether `layer_norm` can be used for a tensor."""
    return available(x) and 0 < x.shape[1] <= MOST_WIDTH


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, segments: Segments) -> Tensor:
    """Normalise every row, then scale and shift it with its client's numbers; differentiable.

    torch's own kernel gives a program to each row, which is slow if rows are short, and numbers of
    clients would have to be copied for every row.

    Args:
        x: `[rows, width]`.
        weight: the scales, `[clients, width]`.
        bias: the shifts, `[clients, width]`.
        segments: how the rows are divided among clients.
    """
    found: Tensor = _LayerNorm.apply(x.contiguous(), weight.contiguous(), bias, segments)  # type: ignore[no-untyped-call]
    return found


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x)
        if x.numel():
            triton_kernels.norm_kernel[_row_grid(x)](
                x, weight, bias.contiguous(), segments.owner, out, *x.shape, **_row_blocks(x)
            )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        segments: Segments = ctx.segments
        grad = grad.contiguous()
        out, of_scale = torch.empty_like(x), torch.empty_like(x)
        if x.numel():
            triton_kernels.norm_gradient_kernel[_row_grid(x)](
                x, weight, segments.owner, grad, out, of_scale, *x.shape, **_row_blocks(x)
            )
        return out, segment_sum(of_scale, segments), segment_sum(grad, segments), None


def _row_blocks(x: Tensor) -> dict[str, int]:
    columns = _power(x.shape[1], 16, MOST_WIDTH)
    return {"ROWS": max(2048 // columns, 1), "COLUMNS": columns}


def _row_grid(x: Tensor) -> tuple[int]:
    return (-(-len(x) // _row_blocks(x)["ROWS"]),)


def sum_by_kind(
    crow: Tensor, col: Tensor, kind: Tensor, hom: Tensor, het: Tensor, alpha: Tensor
) -> Tensor:
    """Sum messages over neighbours by kind of edge; differentiable.

    Homophilic edges carry `hom`, heterophilic ones `het`, and edges of unknown kind carry
    alpha hom + (1 - alpha) het, with alpha of the target.

    Args:
        crow: row pointers of a symmetric pattern in CSR form.
        col: its columns.
        kind: the kind of every entry, the same for an edge and its reverse.
        hom: messages of the homophilic channel, `[nodes, width]`.
        het: messages of the heterophilic channel, `[nodes, width]`.
        alpha: share of the homophilic channel at unknown edges, `[nodes, 1]`.
    """
    summed: Tensor = _SumByKind.apply(crow, col, kind, hom, het, alpha)  # type: ignore[no-untyped-call]
    return summed


class _SumByKind(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, crow: Tensor, col: Tensor, kind: Tensor, hom: Tensor, het: Tensor, alpha: Tensor
    ) -> Tensor:
        hom, het, alpha = hom.contiguous(), het.contiguous(), alpha.contiguous()
        rows, width = hom.shape
        out = torch.empty_like(hom)
        keep = bool(ctx.needs_input_grad[5])
        gap = torch.empty_like(hom) if keep else out
        if out.numel():
            columns, height, entries = _blocks(width, len(col) / rows)
            triton_kernels.kinds_kernel[(-(-rows // height), -(-width // columns))](
                crow, col, kind, hom, het, alpha, out, gap, rows, width,
                KEEP=keep, ROWS=height, ENTRIES=entries, COLUMNS=columns,
            )  # fmt: skip
        ctx.save_for_backward(crow, col, kind, alpha, gap if keep else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        crow, col, kind, alpha, gap = ctx.saved_tensors
        grad = grad.contiguous()
        rows, width = grad.shape
        to_hom, to_het = torch.empty_like(grad), torch.empty_like(grad)
        if grad.numel():
            columns, height, entries = _blocks(width, len(col) / rows)
            triton_kernels.kinds_gradient_kernel[(-(-rows // height), -(-width // columns))](
                crow, col, kind, grad, alpha, to_hom, to_het, rows, width,
                ROWS=height, ENTRIES=entries, COLUMNS=columns,
            )  # fmt: skip
        to_alpha = None if gap is None else (grad * gap).sum(dim=1, keepdim=True)
        return None, None, None, to_hom, to_het, to_alpha


def mixed_channels(
    own: Tensor,
    pair: Tensor,
    near: Tensor,
    scales: Tensor | None,
    attend: Tensor,
    mix: Tensor,
    segments: Segments,
) -> Tensor:
    """Compute `layers.mixed_channels` in one pass; differentiable in all but the scales."""
    mixed: Tensor = _MixedChannels.apply(own, pair, near, scales, attend, mix, segments)  # type: ignore[no-untyped-call]
    return mixed


class _MixedChannels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        pair: Tensor,
        near: Tensor,
        scales: Tensor | None,
        attend: Tensor,
        mix: Tensor,
        segments: Segments,
    ) -> Tensor:
        own, pair = (x if x.stride(1) == 1 else x.contiguous() for x in (own, pair))
        near, attend, mix = (x.contiguous() for x in (near, attend, mix))
        ctx.segments = segments
        ctx.save_for_backward(own, pair, near, attend, mix, scales)
        out = own.new_empty(own.shape)
        if out.numel():
            client, start, stop = segments.tiles(SHORT_TILE)
            triton_kernels.channel_kernel[(len(client),)](
                own, pair, near, own if scales is None else scales, attend, mix, out,
                client, start, stop, own.shape[1], own.stride(0), pair.stride(0),
                SCALED=scales is not None, ROWS=SHORT_TILE, COLUMNS=_power(own.shape[1], 16, 64),
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, pair, near, attend, mix, scales = ctx.saved_tensors
        segments: Segments = ctx.segments
        width = own.shape[1]
        to_own, to_pair, to_near = (x.new_empty(x.shape) for x in (own, pair, near))
        client, start, stop = segments.tiles(SHORT_TILE)
        part_attend = own.new_empty(len(client), width * 3)
        part_mix = own.new_empty(len(client), 9)
        if own.numel():
            triton_kernels.channel_gradient_kernel[(len(client),)](
                own, pair, near, own if scales is None else scales, attend, mix,
                grad.contiguous(), to_own, to_pair, to_near, part_attend, part_mix,
                client, start, stop, width, own.stride(0), pair.stride(0),
                SCALED=scales is not None, ROWS=SHORT_TILE, COLUMNS=_power(width, 16, 64),
            )  # fmt: skip
        tiles = segments.tiled(SHORT_TILE)
        to_attend = segment_sum(part_attend, tiles).view(attend.shape)
        to_mix = segment_sum(part_mix, tiles).view(mix.shape)
        return to_own, to_pair, to_near, None, to_attend, to_mix, None


def precision() -> str:
    """Return how float32 products are computed.

    "tf32x3" is three TF32 products, which together are accurate to all but the last bits of
    float32. "tf32" is one, used if torch is set to allow TF32.
    """
    allowed = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "tf32x3"


def mixture(bases: Tensor, weight: Tensor, segments: Segments, hashes: Hashes | None) -> Tensor:
    """Return sum_k weight[client, k] ∘ bases[k] at each row, `[orders, rows, F] -> [rows, F]`.

    If hashes are given, each basis has a call of dropout of its own. The bases are read once and
    no tensor of their size is made. Differentiable in the weights, `[clients, orders, F]`.
    """
    mixed: Tensor = _Mixture.apply(weight, bases.contiguous(), segments, hashes)  # type: ignore[no-untyped-call]
    return mixed


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return _mix(weight, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _mixture_gradient(grad.contiguous(), *ctx.how), None, None, None


def _mix(weight: Tensor, bases: Tensor, segments: Segments, hashes: Hashes | None) -> Tensor:
    orders, rows, width = bases.shape
    out = bases.new_empty(rows, width)
    if out.numel():
        tiles, columns = segments.tiles(SHORT_TILE), _power(width, 16, 64)
        triton_kernels.mixture_kernel[(len(tiles[0]) * -(-width // columns),)](
            bases, weight, out, *tiles, segments.starts, *(hashes or _no_hashes(bases)),
            width, bases.stride(0), *weight.stride(),
            DROPS=hashes is not None, ORDERS=orders, ROWS=SHORT_TILE, COLUMNS=columns,
        )  # fmt: skip
    return out


def _mixture_gradient(
    grad: Tensor, bases: Tensor, segments: Segments, hashes: Hashes | None
) -> Tensor:
    """Sum within every tile, then over each client's tiles, so that large clients are split."""
    orders, _, width = bases.shape
    tiles = segments.tiles(TALL_TILE)
    sums = bases.new_empty(len(tiles[0]), orders, width)
    if sums.numel():
        columns, together = _power(width, 16, 64), _power(orders, 1, 4)
        programs = len(sums) * -(-width // columns) * -(-orders // together)
        triton_kernels.mixture_gradient_kernel[(programs,)](
            bases, grad, sums, *tiles, segments.starts, *(hashes or _no_hashes(bases)),
            orders, width, bases.stride(0),
            DROPS=hashes is not None, TILE=TALL_TILE, ORDERS=together, ROWS=8, COLUMNS=columns,
        )  # fmt: skip
    summed = segment_sum(sums.view(len(sums), orders * width), segments.tiled(TALL_TILE))
    return summed.view(len(segments), orders, width)


def _no_hashes(unused: Tensor) -> Hashes:
    return Hashes(unused, unused, 0, 0, 1.0)
