"""Latent types of links: embeddings of links, their clusters, and one graph for all types."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

KMEANS = 10  # iterations of k-means in the first round


@dataclass(frozen=True)
class Links:
    """The undirected links of a stacked graph.

    Attributes:
        low: the end of each link with the smaller node number.
        high: its other end.
        segments: the links of each client.
        of_entry: the link of each stored entry of the adjacency.
    """

    low: Tensor
    high: Tensor
    segments: Segments
    of_entry: Tensor

    @classmethod
    def of(cls, graph: StackedGraph) -> Links:
        edges = graph.edges
        first = torch.nonzero(edges.row < edges.col_long).view(-1)
        low, high = edges.row[first], edges.col_long[first]
        of_entry = torch.empty(edges.nnz, dtype=torch.int64, device=low.device)
        numbers = torch.arange(len(first), device=low.device)
        of_entry[first] = numbers
        of_entry[edges.permutation[first]] = numbers  # the pattern is symmetric
        owner = graph.segments.owner[low]
        sizes = owner.bincount(minlength=len(graph.segments)).tolist()
        return cls(low, high, Segments(tuple(sizes), graph.device), of_entry)

    def embed(self, h: Tensor, form: str) -> Tensor:
        """Return e of every link from the embeddings of its ends, `[N, h] -> [links, 2h]`.

        "symmetric" is [h_u + h_v || |h_u - h_v|]; "ordered" is [h_u || h_v] with u < v.
        """
        one, two = h[self.low], h[self.high]
        parts = [one, two] if form == "ordered" else [one + two, (one - two).abs()]
        return torch.cat(parts, dim=1)


def links_of(graph: StackedGraph) -> Links:
    """Return the links of a graph, found once."""
    return graph.cached("fedlit/links", Links.of)


# Clusters of links -------------------------------------------------------------------------------


def assign(e: Tensor, centroids: Tensor, links: Segments) -> Tensor:
    """Return the type of every link: the centroid c_t with the largest cos(e, c_t)."""
    directions = F.normalize(centroids, dim=2).transpose(1, 2)
    return links.matmul(e, directions).argmax(dim=1)  # the norm of e does not matter


def means(e: Tensor, types: Tensor, centroids: Tensor, links: Segments) -> Tensor:
    """Return the mean e of every type; a type without links keeps its centroid."""
    found = []
    for t in range(centroids.shape[1]):
        inside = (types == t).to(e.dtype).unsqueeze(1)
        number = links.sum(inside)
        mean = links.sum(e * inside) / number.clamp(min=1)
        found.append(torch.where(number > 0, mean, centroids[:, t]))
    return torch.stack(found, dim=1)


def refine(e: Tensor, centroids: Tensor, links: Segments, iterations: int) -> tuple[Tensor, Tensor]:
    """Assign links and recompute centroids, some times; return the last types and centroids."""
    types = assign(e, centroids, links)
    centroids = means(e, types, centroids, links)
    for _ in range(iterations - 1):
        types = assign(e, centroids, links)
        centroids = means(e, types, centroids, links)
    return types, centroids


def kmeans(e: Tensor, types: int, links: Segments) -> Tensor:
    """Cluster each client's links by their directions; zeros for a client without links.

    The first centroid is the link that is least like the mean, each further one the link that is
    least like the centroids before it.
    """
    unit = F.normalize(e)
    chosen: list[Tensor] = []
    closest = (unit * links.expand(F.normalize(links.mean(unit)))).sum(dim=1)
    for _ in range(types):
        chosen.append(_at_lowest(unit, closest, links))
        like = (unit * links.expand(chosen[-1])).sum(dim=1)
        closest = like if len(chosen) == 1 else torch.maximum(closest, like)
    _, centroids = refine(e, torch.stack(chosen, dim=1), links, KMEANS)
    return centroids


def _at_lowest(x: Tensor, score: Tensor, links: Segments) -> Tensor:
    """Return each client's row of x with the lowest score, the first of equals; zeros if none."""
    owner, count = links.owner, len(links)
    lowest = score.new_full((count,), torch.inf).scatter_reduce(0, owner, score, "amin")
    place = torch.arange(len(score), device=score.device)
    place = torch.where(score <= lowest[owner], place, len(score))
    first = place.new_full((count,), len(score)).scatter_reduce(0, owner, place, "amin")
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[first]


# One graph for all types -------------------------------------------------------------------------


def typed_graph(graph: StackedGraph, link_types: Tensor, types: int) -> SparseMatrix:
    """Return the graph in which node v has a copy vT + t for each type t.

    A link (u, v) of type t joins uT + t and vT + t with 1 / sqrt(d_t(u) d_t(v)), where d_t counts
    links of type t. It has as many entries as the adjacency, and is symmetric like it.

    Args:
        graph: the clients' graphs.
        link_types: the type t of each link.
        types: T.
    """
    edges, kind = graph.edges, link_types[links_of(graph).of_entry]
    size = edges.shape[0] * types
    rows, order = (edges.row * types + kind).sort(stable=True)
    cols = edges.col_long[order] * types + kind[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    bounds = torch.arange(size + 1, device=order.device)
    crow = torch.searchsorted(rows, bounds, out_int32=True)
    matrix = SparseMatrix(
        shape=(size, size),
        crow=crow,
        col=cols.int(),
        crow_t=crow,
        col_t=cols.int(),
        permutation=place[edges.permutation[order]],
    )
    scale = degrees_of(matrix).clamp(min=1).to(graph.dtype).rsqrt()
    return matrix.with_value(scale[rows] * scale[cols])


def degrees_of(matrix: SparseMatrix) -> Tensor:
    """Return the number of entries of every row."""
    return matrix.crow[1:] - matrix.crow[:-1]
