"""Groups of clients that train together: as many as memory and caches allow, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

from polyphily.core.settings import Settings
from polyphily.runtime.client import Clients
from polyphily.runtime.machine import HELD, cache_size, free_memory

ACTIVATIONS = 16  # numbers kept per node and hidden unit in a layer's forward and backward pass


class Groups:
    """Splits clients into groups that train in one pass.

    Who trains beside a client changes the client's numbers by rounding at most, and the time. A GPU
    gains until its memory is full. A CPU gains from stacked federations only while the numbers of
    a group stay in its cache, whose size is measured (`cache_size`), and from clients of one
    federation only while malloc keeps what a step frees for the next (`keep_freed_memory`).

    Args:
        clients: all clients of the process.
        settings: of the run.
        sharing: how many processes use the same memory.
    """

    def __init__(self, clients: Clients, settings: Settings, sharing: int = 1) -> None:
        self.clients, self.settings = clients, settings
        half = free_memory(clients.cohort.device) // 2 // sharing
        self.budget = settings.memory_limit() or half

    def split(self, active: Sequence[int]) -> list[range]:
        """Return groups of consecutive places in `active`."""
        if self.settings.engine == "sequential":
            return [range(i, i + 1) for i in range(len(active))]
        groups: list[range] = []
        start = end = used = 0
        for members in self._federations(active):
            needs = [self._bytes_to_train[client] for client in members]
            if end > start and used + sum(needs) > self.limit:
                groups.append(range(start, end))
                start, used = end, 0
            for need in needs:
                if end > start and used + need > self.most:
                    groups.append(range(start, end))
                    start, used = end, 0
                end, used = end + 1, used + need
        return [*groups, range(start, end)]

    def _federations(self, active: Sequence[int]) -> list[list[int]]:
        """Return the active clients of each federation."""
        owner = self.clients.cohort.federations
        return [list(own) for _, own in groupby(active, key=lambda client: owner[client])]

    @property
    def most(self) -> int:
        """The bytes that a group may have, unless it is a single client."""
        on_cpu = self.clients.cohort.device.type == "cpu"
        return min(HELD, self.budget) if on_cpu else self.budget

    @property
    def limit(self) -> int:
        """The bytes up to which stacked federations gain."""
        cohort = self.clients.cohort
        if cohort.device.type != "cpu" or len(cohort.blocks) == 1:
            return self.most
        return min(cache_size(), self.most)

    def to_predict(self) -> list[range]:
        """Return the groups in which all clients are scored: one, if memory allows it."""
        everybody = range(len(self.clients))
        return [everybody] if self.settings.engine == "sequential" else self.split(everybody)

    @property
    def room(self) -> int:
        """The number of simulations like this one that gain by training together, at least 1."""
        on_cpu = self.clients.cohort.device.type == "cpu"
        limit = min(cache_size(), self.budget) if on_cpu else self.budget
        return max(1, limit // sum(self._bytes_to_train))

    @cached_property
    def _bytes_to_train(self) -> list[int]:
        """A rough estimate per client: features, edges, activations with gradients, weights."""
        settings, cohort = self.settings, self.clients.cohort
        weights = 6 * sum(p.numel() for p in self.clients.network.parameters())
        found = []
        for graph in cohort.graphs:
            sampling = cohort.sampling
            nodes = graph.num_nodes if sampling is None else sampling.most_nodes(graph)
            edges = graph.edges.shape[1] * nodes / max(graph.num_nodes, 1)
            layers = settings.layers or 1
            numbers = ACTIVATIONS * layers * (settings.hidden or 1) * nodes
            numbers += int(edges) * (layers * ACTIVATIONS // 2)
            numbers += 2 * graph.features.size + weights
            found.append(int(numbers * cohort.dtype.itemsize))
        return found
