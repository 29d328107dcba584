"""Spectra of similarity graphs: nearest neighbours by cosine, and the Laplacian's extremes.

Rows of several clients are processed together. Each client has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.nn import cores
from polyphily.nn.segments import Segments

DENSE_CPU, DENSE_GPU = 256, 4096  # rows of a client up to which a dense eigensolver is faster
BATCH = 1 << 24  # entries of dense Laplacians, or of a block of similarities, held at a time
ZERO = 1e-6  # norm below which a row counts as zero


def unit(x: Tensor) -> Tensor:
    """Scale rows to unit length, so that their products are cosines; zero rows stay zero."""
    return F.normalize(x, dim=-1, eps=ZERO)


@torch.no_grad()
def extremes(x: Tensor, rows: Segments, neighbours: int, count: int, tie_break: float) -> Tensor:
    """Compute eigenvectors of each client's similarity Laplacian at both ends of the spectrum.

    S_uv = cos(x_u, x_v) if v is among the nearest `neighbours` of u, made symmetric by the mean of
    S and its transpose; negative cosines count as zero. L = D - S.

    Equal eigenvalues (every component of the graph adds a zero) leave their eigenvectors
    undetermined. `tie_break` times a fixed slope over the rows is added to L's diagonal:
    eigenvectors of a pair of graphs then come in the same order, and rounding errors do not rotate
    them.

    Args:
        x: features of the clients' rows, `[rows, features]`.
        rows: the rows of each client.
        neighbours: of each row.
        count: eigenvectors at each end.
        tie_break: small against the eigenvalues; 0 leaves L as it is.

    Returns:
        `[rows, 2·count]`: the `count` smallest, then the `count` largest. They are unit vectors
        over each client's rows, by ascending eigenvalue within each half. Columns that a client
        has too few rows for are zero.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("eigenvectors are computed on the host")
    found = x.new_zeros(len(x) + 1, 2 * count)  # the last row takes the padding
    directions = torch.cat([unit(x), x.new_zeros(1, x.shape[1])])
    sizes = rows.counts
    limit = max(4 * count, DENSE_GPU if x.is_cuda else DENSE_CPU)
    for gather, clients in _groups(rows, limit):
        if clients is None:
            vectors = _sparse(directions[gather], neighbours, count, tie_break)
        else:
            vectors = _dense(directions[gather], sizes[clients], neighbours, count, tie_break)
        found[gather] = vectors
    return found[:-1]


def projections(x: Tensor, basis: Tensor, rows: Segments) -> Tensor:
    """Compute each client's basis^T x, `[clients, vectors, features]`; gradients reach `x`."""
    padded, turned = F.pad(x, (0, 0, 0, 1)), F.pad(basis, (0, 0, 0, 1))
    buckets, _ = rows.buckets
    parts = [
        torch.bmm(
            turned[bucket.gather].view(-1, bucket.size, basis.shape[1]).transpose(1, 2),
            padded[bucket.gather].view(-1, bucket.size, x.shape[1]),
        )
        for bucket in buckets
    ]
    order = torch.cat([bucket.clients for bucket in buckets]).argsort()
    return torch.cat(parts)[order]


def _groups(rows: Segments, limit: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (padded rows, clients) that are solved together; (rows, None) for a large client."""
    buckets, _ = rows.buckets
    for bucket in buckets:
        gather = bucket.gather.view(-1, bucket.size)
        if bucket.size > limit:
            yield from ((own[own < rows.rows], None) for own in gather)
            continue
        together = max(1, BATCH // max(bucket.size, 1) ** 2)
        yield from zip(
            torch.split(gather, together), torch.split(bucket.clients, together), strict=True
        )


def _slope(index: Tensor, size: Tensor) -> Tensor:
    """Return values in (0, 1] over a client's rows whose means over sets of rows differ."""
    return ((index + 1) / size).sqrt()


def _nearest(similarity: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return cosines and columns of each row's largest entries; ties go to the earlier column."""
    columns = similarity.shape[-1]
    order = torch.linspace(0, 1, columns, device=similarity.device, dtype=similarity.dtype)
    tie = 512 * torch.finfo(similarity.dtype).eps * order  # above rounding, below differences
    column = (similarity - tie).topk(min(neighbours, columns), dim=-1).indices
    return similarity.gather(-1, column).clamp(min=0), column


def _dense(x: Tensor, sizes: Tensor, neighbours: int, count: int, tie_break: float) -> Tensor:
    """Compute `extremes` of a batch of padded clients, `[clients, rows, features]`."""
    clients, size, _ = x.shape
    index = torch.arange(size, device=x.device)
    absent = index >= sizes.unsqueeze(1)
    cosine = x @ x.transpose(1, 2)
    cosine.diagonal(dim1=1, dim2=2).fill_(-2)  # no row is its own neighbour
    cosine.masked_fill_(absent.unsqueeze(1), -2)
    value, column = _nearest(cosine, neighbours)
    value.masked_fill_(absent.unsqueeze(2), 0)
    weights = torch.zeros_like(cosine).scatter_(2, column, value).double()
    weights = (weights + weights.transpose(1, 2)) / 2
    degree = weights.sum(dim=2)
    diagonal = degree + tie_break * _slope(index, sizes.double().unsqueeze(1))
    beyond = 2 * degree.amax(dim=1, keepdim=True) + 2 * tie_break + 1  # above every eigenvalue
    diagonal = torch.where(absent, beyond, diagonal)
    vectors = _eigenvectors(torch.diag_embed(diagonal) - weights)
    # Padding sorts last, so that a client's own eigenvectors are the first `sizes`.
    kept = sizes.clamp(max=count).unsqueeze(1)
    slot = torch.arange(count, device=x.device)
    low = slot.expand(clients, -1)
    high = sizes.unsqueeze(1) - kept + slot
    chosen = torch.cat([low, high], dim=1).clamp(max=size - 1)
    picked = vectors.gather(2, chosen.unsqueeze(1).expand(-1, size, -1))
    missing = (slot >= kept).repeat(1, 2)
    kept_only: Tensor = picked.masked_fill(missing.unsqueeze(1), 0).to(x.dtype)
    return kept_only


def _eigenvectors(matrices: Tensor) -> Tensor:
    """Compute the eigenvectors of a batch of symmetric matrices.

    A GPU solves them slowly, one after the other. The cores of the host solve them in parallel.
    """
    if not matrices.is_cuda:
        alone: Tensor = torch.linalg.eigh(matrices).eigenvectors
        return alone
    parts = np.array_split(matrices.cpu().numpy(), min(cores.count(), len(matrices)))
    solved = cores.each(lambda part: np.linalg.eigh(part)[1], parts)
    return torch.from_numpy(np.concatenate(solved)).to(matrices.device)


def _sparse(x: Tensor, neighbours: int, count: int, tie_break: float) -> Tensor:
    """Compute `extremes` of one large client: similarities by blocks, then Lanczos on the host."""
    size = len(x)
    block = max(1, BATCH // size)
    values, columns = [], []
    for start in range(0, size, block):
        cosine = x[start : start + block] @ x.T
        cosine.diagonal(offset=start).fill_(-2)
        value, column = _nearest(cosine, neighbours)
        values.append(value)
        columns.append(column)
    value, column = torch.cat(values).double().cpu(), torch.cat(columns).cpu()
    pointers = np.arange(size + 1) * column.shape[1]
    weights = sp.csr_array(
        (value.numpy().ravel(), column.numpy().ravel(), pointers), shape=(size, size)
    )
    weights = (weights + weights.T) / 2
    index = torch.arange(size)
    slope = tie_break * _slope(index, torch.tensor(float(size))).double().numpy()
    laplacian = sp.csc_array(sp.diags_array(weights.sum(axis=1) + slope) - weights)
    start_vector = np.cos(np.arange(size) ** 2)  # any fixed vector that is no eigenvector
    ends = [
        _lanczos(laplacian, count, start_vector, sigma=-0.01, which="LM"),
        _lanczos(laplacian, count, start_vector, which="LA"),
    ]
    return torch.from_numpy(np.concatenate(ends, axis=1)).to(x)


def _lanczos(laplacian: sp.csc_array, count: int, start: np.ndarray, **end: object) -> np.ndarray:
    """Compute eigenvectors at one end, by ascending eigenvalue; zero columns if not converged."""
    try:
        values, vectors = scipy.sparse.linalg.eigsh(
            laplacian, count, v0=start, tol=1e-6, maxiter=6000, **end
        )
    except scipy.sparse.linalg.ArpackNoConvergence as partial:
        values, vectors = partial.eigenvalues, partial.eigenvectors
    ordered = vectors[:, np.argsort(values)]
    return np.pad(ordered, ((0, 0), (0, count - ordered.shape[1])))
