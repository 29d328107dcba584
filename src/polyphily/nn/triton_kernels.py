"""The kernels themselves, in Triton's language: see `kernels` for what they are for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sparse_kernel(
    crow,
    col,
    value,
    dense,
    out,
    rows,
    width,
    HAS_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = row < rows, column < width
    start = tl.load(crow + row, mask=inside, other=0)
    stop = tl.load(crow + row + 1, mask=inside, other=0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    step = tl.arange(0, ENTRIES)
    for first in range(0, tl.max(stop - start, axis=0), ENTRIES):
        entry = start[:, None] + first + step[None, :]
        known = entry < stop[:, None]
        place = tl.load(col + entry, mask=known, other=0).to(tl.int64)
        where = dense + place[:, :, None] * width + column[None, None, :]
        found = tl.load(where, mask=known[:, :, None] & within[None, None, :], other=0.0)
        if HAS_VALUE:
            weight = tl.load(value + entry, mask=known, other=0.0)
            found = found * weight[:, :, None]
        total += tl.sum(found, axis=1)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, total, mask=inside[:, None] & within[None, :])


@triton.jit
def grouped_kernel(
    x,
    weight,
    out,
    tile_client,
    tile_start,
    tile_stop,
    inner,
    outer,
    stride_client,
    stride_inner,
    stride_outer,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    tile = tl.program_id(0)
    client = tl.load(tile_client + tile).to(tl.int64)
    row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
    inside = row < tl.load(tile_stop + tile)
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    within = column < outer
    total = tl.zeros((ROWS, OUTER), dtype=tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        known = k < inner
        left = tl.load(
            x + row.to(tl.int64)[:, None] * inner + k[None, :],
            mask=inside[:, None] & known[None, :],
            other=0.0,
        )
        right = tl.load(
            weight
            + client * stride_client
            + k[:, None] * stride_inner
            + column[None, :] * stride_outer,
            mask=known[:, None] & within[None, :],
            other=0.0,
        )
        total += tl.dot(left, right, input_precision=PRECISION)
    target = out + row.to(tl.int64)[:, None] * outer + column[None, :]
    tl.store(target, total, mask=inside[:, None] & within[None, :])


@triton.jit
def gradient_kernel(
    x,
    grad,
    out,
    pointers,
    inner,
    outer,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    client = tl.program_id(0)
    k = tl.program_id(1) * INNER + tl.arange(0, INNER)
    column = tl.program_id(2) * OUTER + tl.arange(0, OUTER)
    known, within = k < inner, column < outer
    start, stop = tl.load(pointers + client), tl.load(pointers + client + 1)
    total = tl.zeros((INNER, OUTER), dtype=tl.float32)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < stop
        left = tl.load(
            x + row.to(tl.int64)[None, :] * inner + k[:, None],
            mask=inside[None, :] & known[:, None],
            other=0.0,
        )
        right = tl.load(
            grad + row.to(tl.int64)[:, None] * outer + column[None, :],
            mask=inside[:, None] & within[None, :],
            other=0.0,
        )
        total += tl.dot(left, right, input_precision=PRECISION)
    target = out + (client.to(tl.int64) * inner + k[:, None]) * outer + column[None, :]
    tl.store(target, total, mask=known[:, None] & within[None, :])


@triton.jit
def sum_kernel(
    x,
    out,
    pointers,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    client = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < width
    start, stop = tl.load(pointers + client), tl.load(pointers + client + 1)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        where = x + row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(where, mask=(row < stop)[:, None] & within[None, :], other=0.0)
    target = out + client.to(tl.int64) * width + column
    tl.store(target, tl.sum(total, axis=0), mask=within)


@triton.jit
def scrambled(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=("call", "width", "threshold"))  # they change, or have a type
def dropout_kernel(
    x,
    out,
    owner,
    place,
    words,
    round_index,
    call,
    count,
    width,
    threshold,
    scale,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = index // width
    column = (index - row * width).to(tl.uint32)
    own = tl.load(owner + row, mask=inside, other=0).to(tl.int64)
    near = tl.load(place + row, mask=inside, other=0).to(tl.uint32)
    moment = tl.load(round_index).to(tl.uint32) * 0x9E3779B9 + call.to(tl.uint32)
    moment = scrambled(moment)
    first = tl.load(words + 2 * own, mask=inside, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(words + 2 * own + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    number = near * width.to(tl.uint32) + column + scrambled(first ^ moment)
    number = scrambled(scrambled(number) ^ scrambled(second ^ moment))
    kept = (number >> 16).to(tl.int32) >= threshold
    value = tl.load(x + index, mask=inside, other=0.0)
    tl.store(out + index, tl.where(kept, value * scale, 0.0), mask=inside)


@triton.jit
def entry_kernel(
    row,
    col,
    left,
    right,
    out,
    count,
    width,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    here = tl.load(row + entry, mask=inside, other=0).to(tl.int64)
    there = tl.load(col + entry, mask=inside, other=0).to(tl.int64)
    total = tl.zeros((ENTRIES,), dtype=tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        known = inside[:, None] & (column < width)[None, :]
        one = tl.load(left + here[:, None] * width + column[None, :], mask=known, other=0.0)
        two = tl.load(right + there[:, None] * width + column[None, :], mask=known, other=0.0)
        total += tl.sum(one * two, axis=1)
    tl.store(out + entry, total, mask=inside)
