"""Triton kernels; `polyphily.nn.kernels` documents and calls them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sparse_kernel(
    crow,
    col,
    value,
    dense,
    bias,
    owner,
    out,
    rows,
    width,
    stride_bias,
    HAS_VALUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    stored = inside[:, None] & within[None, :]
    if HAS_BIAS:
        own = tl.load(owner + row, mask=inside, other=0).to(tl.int64)
        total += tl.load(
            bias + own[:, None] * stride_bias + column[None, :], mask=stored, other=0.0
        )
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, total, mask=stored)


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


@triton.jit
def reaches(number, first, second, moment, threshold):
    """Return whether the hash of a number at a moment reaches a threshold."""
    number = scrambled(number + scrambled(first ^ moment))
    number = scrambled(number ^ scrambled(second ^ moment))
    return (number >> 16).to(tl.int32) >= threshold


@triton.jit
def keeps(index, inside, owner, place, words, round_index, call, width, threshold):
    """Return which entries of a matrix dropout keeps, by their indices."""
    row = index // width
    column = (index - row * width).to(tl.uint32)
    own = tl.load(owner + row, mask=inside, other=0).to(tl.int64)
    near = tl.load(place + row, mask=inside, other=0).to(tl.uint32)
    moment = tl.load(round_index).to(tl.uint32) * 0x9E3779B9 + call.to(tl.uint32)
    moment = scrambled(moment)
    first = tl.load(words + 2 * own, mask=inside, other=0).to(tl.uint32, bitcast=True)
    second = tl.load(words + 2 * own + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    return reaches(near * width.to(tl.uint32) + column, first, second, moment, threshold)


# Without `do_not_specialize` a changed value is compiled anew, and a 1 becomes an untyped constant.
@triton.jit(do_not_specialize=("call", "width", "threshold"))
def dropout_kernel(
    x,
    rectified,
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
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    kept = keeps(index, inside, owner, place, words, round_index, call, width, threshold)
    value = tl.load(x + index, mask=inside, other=0.0)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # unlike a maximum, keeps NaN
        tl.store(rectified + index, value, mask=inside)
    tl.store(out + index, tl.where(kept, value * scale, 0.0), mask=inside)


@triton.jit(do_not_specialize=("call", "width", "threshold"))
def activation_gradient_kernel(
    rectified,
    direct,
    grad,
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
    DIRECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    kept = keeps(index, inside, owner, place, words, round_index, call, width, threshold)
    flow = tl.load(grad + index, mask=inside, other=0.0)
    flow = tl.where(kept, flow * scale, 0.0)
    if DIRECT:
        flow += tl.load(direct + index, mask=inside, other=0.0)
    value = tl.load(rectified + index, mask=inside, other=0.0)
    tl.store(out + index, tl.where(value <= 0, 0.0, flow), mask=inside)


@triton.jit
def adam_kernel(
    param,
    grad,
    mean,
    square,
    step,
    count,
    lr,
    decay,
    DECOUPLED: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG1: tl.constexpr,
    LOG2: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    p = tl.load(param + index, mask=inside, other=0.0)
    g = tl.load(grad + index, mask=inside, other=0.0)
    if DECOUPLED:
        p -= lr * decay * p
    else:
        g += decay * p
    m = BETA1 * tl.load(mean + index, mask=inside, other=0.0) + (1 - BETA1) * g
    v = BETA2 * tl.load(square + index, mask=inside, other=0.0) + (1 - BETA2) * g * g
    time = tl.load(step).to(tl.float64)  # in double precision: 1 - 0.999 loses half of its digits
    first = (1 - tl.exp(time * LOG1)).to(tl.float32)
    second = tl.sqrt(1 - tl.exp(time * LOG2)).to(tl.float32)
    p -= lr / first * m / (tl.sqrt(v) / second + EPSILON)
    tl.store(param + index, p, mask=inside)
    tl.store(mean + index, m, mask=inside)
    tl.store(square + index, v, mask=inside)


@triton.jit
def log_sums(logits, node, inside, classes, CLASSES: tl.constexpr):
    """Return the logits of some nodes, the largest of each and the log of their summed exps."""
    column = tl.arange(0, CLASSES)[None, :]
    where = logits + node.to(tl.int64)[:, None] * classes + column
    score = tl.load(where, mask=inside[:, None] & (column < classes), other=0.0)
    score = tl.where(column < classes, score, float("-inf"))
    peak = tl.max(score, axis=1)
    return score, peak, tl.log(tl.sum(tl.exp(score - peak[:, None]), axis=1))


@triton.jit
def entropy_kernel(
    logits,
    nodes,
    labels,
    pointers,
    out,
    classes,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    client = tl.program_id(0)
    start, stop = tl.load(pointers + client), tl.load(pointers + client + 1)
    column = tl.arange(0, CLASSES)[None, :]
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < stop
        node = tl.load(nodes + row, mask=inside, other=0)
        label = tl.load(labels + row, mask=inside, other=0)
        score, peak, spread = log_sums(logits, node, inside, classes, CLASSES)
        own = tl.sum(tl.where(column == label[:, None], score, 0.0), axis=1)
        total += tl.where(inside, spread - (own - peak), 0.0)
    count = tl.maximum(stop - start, 1).to(tl.float32)
    tl.store(out + client, tl.sum(total, axis=0) / count)


@triton.jit
def entropy_gradient_kernel(
    logits,
    nodes,
    labels,
    owner,
    pointers,
    grad,
    out,
    rows,
    classes,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, CLASSES)[None, :]
    node = tl.load(nodes + row, mask=inside, other=0)
    label = tl.load(labels + row, mask=inside, other=0)
    own = tl.load(owner + row, mask=inside, other=0)
    first = tl.load(pointers + own, mask=inside, other=0)
    last = tl.load(pointers + own + 1, mask=inside, other=1)
    flow = tl.load(grad + own, mask=inside, other=0.0) / (last - first).to(tl.float32)
    score, peak, spread = log_sums(logits, node, inside, classes, CLASSES)
    share = tl.exp(score - peak[:, None] - spread[:, None])
    found = flow[:, None] * (share - tl.where(column == label[:, None], 1.0, 0.0))
    target = out + node.to(tl.int64)[:, None] * classes + column
    tl.store(target, found, mask=inside[:, None] & (column < classes))


@triton.jit
def normalised(x, row, inside, width, COLUMNS: tl.constexpr):
    """Return some rows with mean 0 and variance 1, and by what they were divided."""
    column = tl.arange(0, COLUMNS)[None, :]
    within = inside[:, None] & (column < width)
    value = tl.load(x + row.to(tl.int64)[:, None] * width + column, mask=within, other=0.0)
    apart = tl.where(within, value - tl.sum(value, axis=1)[:, None] / width, 0.0)
    spread = tl.sqrt(tl.sum(apart * apart, axis=1) / width + 1e-5)
    return apart / spread[:, None], spread


@triton.jit
def norm_kernel(
    x,
    weight,
    bias,
    owner,
    out,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    within = inside[:, None] & (column < width)
    own = tl.load(owner + row, mask=inside, other=0).to(tl.int64)[:, None] * width + column
    value, _ = normalised(x, row, inside, width, COLUMNS)
    scale = tl.load(weight + own, mask=within, other=0.0)
    shift = tl.load(bias + own, mask=within, other=0.0)
    target = out + row.to(tl.int64)[:, None] * width + column
    tl.store(target, value * scale + shift, mask=within)


@triton.jit
def norm_gradient_kernel(
    x,
    weight,
    owner,
    grad,
    out,
    of_scale,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    within = inside[:, None] & (column < width)
    own = tl.load(owner + row, mask=inside, other=0).to(tl.int64)[:, None] * width + column
    where = row.to(tl.int64)[:, None] * width + column
    value, spread = normalised(x, row, inside, width, COLUMNS)
    arriving = tl.load(grad + where, mask=within, other=0.0)
    tl.store(of_scale + where, arriving * value, mask=within)
    flow = arriving * tl.load(weight + own, mask=within, other=0.0)
    mean = tl.sum(flow, axis=1)[:, None] / width
    along = tl.sum(flow * value, axis=1)[:, None] / width
    tl.store(out + where, (flow - mean - value * along) / spread[:, None], mask=within)


@triton.jit
def kinds_kernel(
    crow,
    col,
    kind,
    hom,
    het,
    alpha,
    out,
    gap,
    rows,
    width,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = row < rows, column < width
    start = tl.load(crow + row, mask=inside, other=0)
    stop = tl.load(crow + row + 1, mask=inside, other=0)
    fixed = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    between = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    step = tl.arange(0, ENTRIES)
    for first in range(0, tl.max(stop - start, axis=0), ENTRIES):
        entry = start[:, None] + first + step[None, :]
        known = entry < stop[:, None]
        place = tl.load(col + entry, mask=known, other=0).to(tl.int64)
        what = tl.load(kind + entry, mask=known, other=0)
        where = place[:, :, None] * width + column[None, None, :]
        wanted = (known & (what > 0))[:, :, None] & within[None, None, :]
        one = tl.load(hom + where, mask=wanted, other=0.0)
        wanted = (known & (what != 1))[:, :, None] & within[None, None, :]
        two = tl.load(het + where, mask=wanted, other=0.0)
        unknown = (what == 2)[:, :, None]
        fixed += tl.sum(tl.where(unknown, two, one + two), axis=1)
        between += tl.sum(tl.where(unknown, one - two, 0.0), axis=1)
    share = tl.load(alpha + row, mask=inside, other=0.0)
    target = row.to(tl.int64)[:, None] * width + column[None, :]
    stored = inside[:, None] & within[None, :]
    tl.store(out + target, fixed + share[:, None] * between, mask=stored)
    if KEEP:
        tl.store(gap + target, between, mask=stored)


@triton.jit
def kinds_gradient_kernel(
    crow,
    col,
    kind,
    grad,
    alpha,
    to_hom,
    to_het,
    rows,
    width,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = row < rows, column < width
    start = tl.load(crow + row, mask=inside, other=0)
    stop = tl.load(crow + row + 1, mask=inside, other=0)
    hom = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    step = tl.arange(0, ENTRIES)
    for first in range(0, tl.max(stop - start, axis=0), ENTRIES):
        entry = start[:, None] + first + step[None, :]
        known = entry < stop[:, None]
        place = tl.load(col + entry, mask=known, other=0).to(tl.int64)
        what = tl.load(kind + entry, mask=known, other=0)
        share = tl.load(alpha + place, mask=known & (what == 2), other=0.0)
        share = tl.where(what == 1, 1.0, share)
        where = grad + place[:, :, None] * width + column[None, None, :]
        found = tl.load(where, mask=known[:, :, None] & within[None, None, :], other=0.0)
        total += tl.sum(found, axis=1)
        hom += tl.sum(share[:, :, None] * found, axis=1)
    target = row.to(tl.int64)[:, None] * width + column[None, :]
    stored = inside[:, None] & within[None, :]
    tl.store(to_hom + target, hom, mask=stored)
    tl.store(to_het + target, total - hom, mask=stored)


@triton.jit
def channel_messages(
    own,
    pair,
    near,
    own_stride,
    pair_stride,
    by,
    times,
    row,
    column,
    stored,
    width,
    SCALED: tl.constexpr,
):
    """Compute the low-pass, high-pass and identity messages of a tile before their ReLUs."""
    there = near + row * (2 * width) + column
    here = pair + row * pair_stride + column
    low = tl.load(there, mask=stored, other=0.0)
    high = tl.load(there + width, mask=stored, other=0.0)
    if SCALED:
        low = by * (low + tl.load(here, mask=stored, other=0.0))
        high = times * tl.load(here + width, mask=stored, other=0.0) - by * high
    else:
        high = tl.load(here + width, mask=stored, other=0.0) - high
    return low, high, tl.load(own + row * own_stride + column, mask=stored, other=0.0)


@triton.jit
def channel_weights(s0, s1, s2, mix):
    """Return softmax(sigmoid(scores) W_mix / 3), and the sigmoids."""
    g0, g1, g2 = tl.sigmoid(s0), tl.sigmoid(s1), tl.sigmoid(s2)
    l0 = (g0 * tl.load(mix) + g1 * tl.load(mix + 3) + g2 * tl.load(mix + 6)) / 3
    l1 = (g0 * tl.load(mix + 1) + g1 * tl.load(mix + 4) + g2 * tl.load(mix + 7)) / 3
    l2 = (g0 * tl.load(mix + 2) + g1 * tl.load(mix + 5) + g2 * tl.load(mix + 8)) / 3
    peak = tl.maximum(tl.maximum(l0, l1), l2)
    e0, e1, e2 = tl.exp(l0 - peak), tl.exp(l1 - peak), tl.exp(l2 - peak)
    total = e0 + e1 + e2
    return e0 / total, e1 / total, e2 / total, g0, g1, g2


@triton.jit
def channel_kernel(
    own,
    pair,
    near,
    scales,
    attend,
    mix,
    out,
    tile_client,
    tile_start,
    tile_stop,
    width,
    own_stride,
    pair_stride,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    client = tl.load(tile_client + tile).to(tl.int64)
    row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
    inside = row < tl.load(tile_stop + tile)
    place = row.to(tl.int64)
    by = tl.load(scales + 2 * place, mask=inside, other=0.0)[:, None] if SCALED else 1.0
    times = tl.load(scales + 2 * place + 1, mask=inside, other=0.0)[:, None] if SCALED else 1.0
    s0 = tl.zeros((ROWS,), dtype=tl.float32)
    s1 = tl.zeros((ROWS,), dtype=tl.float32)
    s2 = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        within = column < width
        stored = inside[:, None] & within[None, :]
        low, high, same = channel_messages(
            own, pair, near, own_stride, pair_stride, by, times,
            place[:, None], column[None, :], stored, width, SCALED,
        )  # fmt: skip
        vector = attend + (client * width + column) * 3
        s0 += tl.sum(
            tl.maximum(low, 0.0) * tl.load(vector, mask=within, other=0.0)[None, :], axis=1
        )
        s1 += tl.sum(
            tl.maximum(high, 0.0) * tl.load(vector + 1, mask=within, other=0.0)[None, :], axis=1
        )
        s2 += tl.sum(
            tl.maximum(same, 0.0) * tl.load(vector + 2, mask=within, other=0.0)[None, :], axis=1
        )
    w0, w1, w2, _, _, _ = channel_weights(s0, s1, s2, mix + client * 9)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        within = column < width
        stored = inside[:, None] & within[None, :]
        low, high, same = channel_messages(
            own, pair, near, own_stride, pair_stride, by, times,
            place[:, None], column[None, :], stored, width, SCALED,
        )  # fmt: skip
        mixed = w0[:, None] * tl.maximum(low, 0.0) + w1[:, None] * tl.maximum(high, 0.0)
        mixed += w2[:, None] * tl.maximum(same, 0.0)
        tl.store(out + place[:, None] * width + column[None, :], 3 * mixed, mask=stored)


@triton.jit
def channel_gradient_kernel(
    own,
    pair,
    near,
    scales,
    attend,
    mix,
    grad,
    grad_own,
    grad_pair,
    grad_near,
    part_attend,
    part_mix,
    tile_client,
    tile_start,
    tile_stop,
    width,
    own_stride,
    pair_stride,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    client = tl.load(tile_client + tile).to(tl.int64)
    row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
    inside = row < tl.load(tile_stop + tile)
    place = row.to(tl.int64)
    by = tl.load(scales + 2 * place, mask=inside, other=0.0)[:, None] if SCALED else 1.0
    times = tl.load(scales + 2 * place + 1, mask=inside, other=0.0)[:, None] if SCALED else 1.0
    s0 = tl.zeros((ROWS,), dtype=tl.float32)
    s1 = tl.zeros((ROWS,), dtype=tl.float32)
    s2 = tl.zeros((ROWS,), dtype=tl.float32)
    d0 = tl.zeros((ROWS,), dtype=tl.float32)
    d1 = tl.zeros((ROWS,), dtype=tl.float32)
    d2 = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        within = column < width
        stored = inside[:, None] & within[None, :]
        low, high, same = channel_messages(
            own, pair, near, own_stride, pair_stride, by, times,
            place[:, None], column[None, :], stored, width, SCALED,
        )  # fmt: skip
        low, high, same = tl.maximum(low, 0.0), tl.maximum(high, 0.0), tl.maximum(same, 0.0)
        flow = tl.load(grad + place[:, None] * width + column[None, :], mask=stored, other=0.0)
        vector = attend + (client * width + column) * 3
        s0 += tl.sum(low * tl.load(vector, mask=within, other=0.0)[None, :], axis=1)
        s1 += tl.sum(high * tl.load(vector + 1, mask=within, other=0.0)[None, :], axis=1)
        s2 += tl.sum(same * tl.load(vector + 2, mask=within, other=0.0)[None, :], axis=1)
        d0 += tl.sum(low * flow, axis=1)
        d1 += tl.sum(high * flow, axis=1)
        d2 += tl.sum(same * flow, axis=1)
    own_mix = mix + client * 9
    w0, w1, w2, g0, g1, g2 = channel_weights(s0, s1, s2, own_mix)
    mean = w0 * d0 + w1 * d1 + w2 * d2
    l0, l1, l2 = w0 * (d0 - mean), w1 * (d1 - mean), w2 * (d2 - mean)  # 3 and 1/3 cancel
    told = part_mix + tile * 9
    tl.store(told, tl.sum(g0 * l0, axis=0))
    tl.store(told + 1, tl.sum(g0 * l1, axis=0))
    tl.store(told + 2, tl.sum(g0 * l2, axis=0))
    tl.store(told + 3, tl.sum(g1 * l0, axis=0))
    tl.store(told + 4, tl.sum(g1 * l1, axis=0))
    tl.store(told + 5, tl.sum(g1 * l2, axis=0))
    tl.store(told + 6, tl.sum(g2 * l0, axis=0))
    tl.store(told + 7, tl.sum(g2 * l1, axis=0))
    tl.store(told + 8, tl.sum(g2 * l2, axis=0))
    s0 = l0 * tl.load(own_mix) + l1 * tl.load(own_mix + 1) + l2 * tl.load(own_mix + 2)
    s1 = l0 * tl.load(own_mix + 3) + l1 * tl.load(own_mix + 4) + l2 * tl.load(own_mix + 5)
    s2 = l0 * tl.load(own_mix + 6) + l1 * tl.load(own_mix + 7) + l2 * tl.load(own_mix + 8)
    s0, s1, s2 = s0 * g0 * (1 - g0), s1 * g1 * (1 - g1), s2 * g2 * (1 - g2)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        within = column < width
        stored = inside[:, None] & within[None, :]
        low, high, same = channel_messages(
            own, pair, near, own_stride, pair_stride, by, times,
            place[:, None], column[None, :], stored, width, SCALED,
        )  # fmt: skip
        flow = 3 * tl.load(grad + place[:, None] * width + column[None, :], mask=stored, other=0.0)
        vector = attend + (client * width + column) * 3
        a0 = tl.load(vector, mask=within, other=0.0)[None, :]
        a1 = tl.load(vector + 1, mask=within, other=0.0)[None, :]
        a2 = tl.load(vector + 2, mask=within, other=0.0)[None, :]
        to_low = tl.where(low > 0, w0[:, None] * flow + s0[:, None] * a0, 0.0)
        to_high = tl.where(high > 0, w1[:, None] * flow + s1[:, None] * a1, 0.0)
        to_same = tl.where(same > 0, w2[:, None] * flow + s2[:, None] * a2, 0.0)
        single = place[:, None] * width + column[None, :]
        double = place[:, None] * (2 * width) + column[None, :]
        tl.store(grad_own + single, to_same, mask=stored)
        tl.store(grad_near + double, by * to_low, mask=stored)
        tl.store(grad_near + double + width, -by * to_high, mask=stored)
        tl.store(grad_pair + double, by * to_low if SCALED else 0.0 * to_low, mask=stored)
        tl.store(grad_pair + double + width, times * to_high, mask=stored)
        part = part_attend + (tile * width + column) * 3
        tl.store(part, tl.sum(s0[:, None] * tl.maximum(low, 0.0), axis=0), mask=within)
        tl.store(part + 1, tl.sum(s1[:, None] * tl.maximum(high, 0.0), axis=0), mask=within)
        tl.store(part + 2, tl.sum(s2[:, None] * tl.maximum(same, 0.0), axis=0), mask=within)


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


@triton.jit(do_not_specialize=("call", "threshold"))
def mixture_kernel(
    bases,
    weight,
    out,
    tile_client,
    tile_start,
    tile_stop,
    pointers,
    words,
    round_index,
    call,
    threshold,
    scale,
    width,
    stride_basis,
    stride_client,
    stride_order,
    stride_column,
    DROPS: tl.constexpr,
    ORDERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    client = tl.load(tile_client + tile).to(tl.int64)
    start = tl.load(tile_start + tile)
    step = tl.arange(0, ROWS)
    known = (start + step < tl.load(tile_stop + tile))[:, None] & (column < width)[None, :]
    where = step[:, None] * width + column[None, :]
    there = start.to(tl.int64) * width
    own = client * stride_client
    if DROPS:
        place = start - tl.load(pointers + client) + step
        number = place.to(tl.uint32)[:, None] * width + column.to(tl.uint32)[None, :]
        first = tl.load(words + 2 * client).to(tl.uint32, bitcast=True)
        second = tl.load(words + 2 * client + 1).to(tl.uint32, bitcast=True)
        moment = tl.load(round_index).to(tl.uint32) * 0x9E3779B9 + call.to(tl.uint32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for order in tl.static_range(ORDERS):
        value = tl.load(bases + there + where, mask=known, other=0.0)
        if DROPS:
            kept = reaches(number, first, second, scrambled(moment + order), threshold)
            value = tl.where(kept, value * scale, 0.0)
        factor = tl.load(weight + own + column * stride_column, mask=column < width, other=0.0)
        total += value * factor[None, :]
        there += stride_basis  # in 64 bits, unlike a product of two of the arguments
        own += stride_order
    tl.store(out + start.to(tl.int64) * width + where, total, mask=known)


@triton.jit(do_not_specialize=("call", "threshold"))
def mixture_gradient_kernel(
    bases,
    grad,
    out,
    tile_client,
    tile_start,
    tile_stop,
    pointers,
    words,
    round_index,
    call,
    threshold,
    scale,
    orders,
    width,
    stride_basis,
    DROPS: tl.constexpr,
    TILE: tl.constexpr,
    ORDERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks, groups = tl.cdiv(width, COLUMNS), tl.cdiv(orders, ORDERS)
    tile = tl.program_id(0) // blocks // groups
    order = tl.program_id(0) // blocks % groups * ORDERS + tl.arange(0, ORDERS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    known, within = order < orders, column < width
    client = tl.load(tile_client + tile).to(tl.int64)
    start = tl.load(tile_start + tile)
    stop = tl.minimum(tl.load(tile_stop + tile), start + TILE)
    basis = bases + order.to(tl.int64)[:, None, None] * stride_basis
    if DROPS:
        begin = tl.load(pointers + client)
        first = tl.load(words + 2 * client).to(tl.uint32, bitcast=True)
        second = tl.load(words + 2 * client + 1).to(tl.uint32, bitcast=True)
        moment = tl.load(round_index).to(tl.uint32) * 0x9E3779B9 + call.to(tl.uint32)
        moment = scrambled(moment + order.to(tl.uint32))[:, None, None]
    total = tl.zeros((ORDERS, ROWS, COLUMNS), dtype=tl.float32)
    for top in range(start, stop, ROWS):
        row = top + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & within[None, :]
        where = row.to(tl.int64)[:, None] * width + column[None, :]
        there = known[:, None, None] & inside[None, :, :]
        value = tl.load(basis + where[None, :, :], mask=there, other=0.0)
        if DROPS:
            place = (row - begin).to(tl.uint32)[:, None]
            number = (place * width + column.to(tl.uint32)[None, :])[None, :, :]
            kept = reaches(number, first, second, moment, threshold)
            value = tl.where(kept, value * scale, 0.0)
        total += value * tl.load(grad + where, mask=inside, other=0.0)[None, :, :]
    target = out + (tile.to(tl.int64) * orders + order)[:, None] * width + column[None, :]
    tl.store(target, tl.sum(total, axis=1), mask=known[:, None] & within[None, :])
