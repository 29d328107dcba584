"""GCFL: clusters of clients are split in two while their members' updates disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    as_model,
    model,
    model_part,
    rows_of,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import WEIGHT, FedAvg
from polyphily.methods.gcfl.partition import PARTITIONS, FloatArray
from polyphily.nn.backbones import Backbone
from polyphily.nn.sparse import flat

CLUSTER, ROUNDS = "cluster", "rounds"  # the cluster of each client, and how many rounds there were
SPLITTABLE = 3  # the fewest clients of a cluster that is split


@register("gcfl", cite="Xie et al., Federated Graph Classification over Non-IID Graphs, 2021")
@dataclass(frozen=True)
class GCFL(FedAvg):
    """FedAvg within clusters; a cluster whose members' updates disagree is split in two.

    All clients start in one cluster. With the updates Δ_i = w_i - w of a cluster's n members, a
    cluster of more than two clients is split after the warm-up if

        δ_mean = ||sum_i Δ_i / n|| < ε1  and  δ_max = max_i ||Δ_i|| > ε2        (the paper)
        δ_mean < ratio * δ_max                                                  (the default)

    that is, if its model has stopped moving while single clients still pull. The members are split
    by the similarities 1 + cos(Δ_i, Δ_j). Each part is a cluster from then on, and its next model
    is the mean of its own members' models.
    """

    labels_can_be_inputs: ClassVar[bool] = True
    evaluated = "global"  # the model of its cluster, as the server sends it
    left_open: ClassVar[Sequence[str]] = (
        "The method is written for graph classification; here a client's graph is a graph of nodes "
        "to classify, and its weight is what FedAvg counts.",
        "The thresholds ε1 and ε2 are norms, which grow with the learning rate, the steps of a "
        "round and the number of parameters. At node level the authors' values never hold under "
        "Adam with a rate of 0.01, and the method is FedAvg; by default δ_mean is compared with "
        "δ_max instead.",
        "The minimum cut nearly always separates a single client; by default complete linkage "
        "splits a cluster, which an early text of the paper names.",
        "Networks for nodes need not have a readout that stays with the client; by default all "
        "parameters are shared, and with share=conv all but those of the last layer.",
        "The authors' code never splits in the first 20 rounds; so it is here.",
        "All clients take part in every round of the authors' code. Here a cluster is split only "
        "in a round in which all of its members answered.",
    )

    share: str = parameter(
        "all",
        "which parameters travel, are compared and averaged: all, or conv, those of all layers but "
        "the last",
        choices=("all", "conv"),
        paper="conv",
    )
    criterion: str = parameter(
        "ratio",
        "when a cluster is split: ratio, δ_mean is small relative to δ_max; absolute, δ_mean is "
        "below epsilon1 and δ_max above epsilon2",
        choices=("ratio", "absolute"),
        paper="absolute",
    )
    ratio: float = parameter(
        0.3,
        "a cluster is split if δ_mean / δ_max is smaller; 0 never splits, as in FedAvg. Unrelated "
        "updates of n clients have a ratio of about 1 / sqrt(n)",
        search=Range(0.05, 0.9),
    )
    epsilon1: float = parameter(
        0.01,
        "a cluster is split if δ_mean is smaller; 0 never splits, as in FedAvg",
        symbol="ε1",
        search=Range(1e-3, 0.1, log=True),
    )
    epsilon2: float = parameter(
        0.1,
        "a cluster is split only if δ_max is larger",
        symbol="ε2",
        search=Range(0.01, 1.0, log=True),
    )
    partition: str = parameter(
        "linkage",
        "how a cluster is split: linkage, complete linkage; mincut, the minimum cut of Stoer and "
        "Wagner; random, at random into parts of the sizes that linkage finds; singletons, each "
        "client by itself",
        choices=tuple(PARTITIONS),
        paper="mincut",
    )
    warm_up: int = parameter(20, "rounds, from the first, in which no cluster is split")

    def rounds_before_it_acts(self) -> int:
        return self.warm_up if self.splits else 0

    @property
    def splits(self) -> bool:
        """True if a cluster can be split at all."""
        return (self.ratio if self.criterion == "ratio" else self.epsilon1) > 0

    def without_effect(self) -> Mapping[str, str]:
        if self.criterion == "ratio":
            idle = ("epsilon1", "epsilon2")
            found = dict.fromkeys(
                idle, "updates are compared by their ratio; set criterion=absolute"
            )
            threshold = "ratio"
        else:
            found = {"ratio": "the norms of updates are compared; set criterion=ratio"}
            threshold = "epsilon1"
        if not self.splits:
            reason = f"no cluster is ever split; set {threshold} above 0"
            found |= dict.fromkeys(("partition", "warm_up"), reason)
            if self.criterion == "absolute":
                found["epsilon2"] = reason
        return found

    # What travels ----------------------------------------------------------------------------

    def shares(self, network: Backbone, parameter: str) -> bool:
        return self.share == "all" or not network.is_classifier(parameter)

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        alone = Individually("the server compares the updates of single clients to cluster them")
        return tuple(replace(entry, server=alone) for entry in super().uploads(sizes))

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (model(sizes, meaning="the model of the client's cluster"),)

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        """Return one cluster of all clients; models have a leading axis of clusters."""
        device = next((value.device for value in shared.values()), torch.device("cpu"))
        return {
            **as_model({name: value.unsqueeze(0) for name, value in shared.items()}),
            CLUSTER: torch.zeros(clients, dtype=torch.int64, device=device),
            WEIGHT: torch.ones(clients, dtype=torch.float64, device=device),
            ROUNDS: torch.zeros((), dtype=torch.int64, device=device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        """Split clusters, then average within each: w = sum_i n_i w_i / sum_i n_i."""
        # Which clients are together decides what is computed, so the host looks at numbers.
        state = {**state, ROUNDS: state[ROUNDS] + 1}
        parts = list(self.regrouped(state, uploads, rng))
        before, counts = model_part(state), uploads[WEIGHT].tolist()
        row_of = {k: row for row, k in enumerate(uploads.clients)}
        models, weights = [], state[WEIGHT].clone()
        for origin, members in parts:
            rows = [row_of[k] for k in members if k in row_of]
            if not any(counts[row] for row in rows):  # nobody answered, or none has train nodes
                models.append({name: value[origin] for name, value in before.items()})
                continue
            sent = {name: value[rows] for name, value in uploads.model.items()}
            models.append(uploads.mean(sent, uploads[WEIGHT][rows]))
            weights[members] = 0
            weights[[uploads.clients[row] for row in rows]] = uploads[WEIGHT][rows].to(weights)
        cluster = torch.empty(len(weights), dtype=torch.int64)
        for number, (_, members) in enumerate(parts):
            cluster[members] = number
        return {
            **state,
            **as_model({name: torch.stack([m[name] for m in models]) for name in before}),
            CLUSTER: cluster.to(weights.device),
            WEIGHT: weights,
        }

    def regrouped(
        self, state: State, uploads: Uploads, rng: np.random.Generator
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each new cluster: the number of the one it comes from, and its clients."""
        groups = clusters_of(state)
        early = int(state[ROUNDS]) <= self.warm_up
        if early or not self.splits or max(map(len, groups)) < SPLITTABLE:
            yield from enumerate(groups)
            return
        products = update_products(state, uploads)
        row_of = {k: row for row, k in enumerate(uploads.clients)}
        for number, members in enumerate(groups):
            parts = [members]
            if len(members) >= SPLITTABLE and all(k in row_of for k in members):
                rows = [row_of[k] for k in members]
                own = products[np.ix_(rows, rows)]
                if self.disagree(own) and self.comparable(state, members):
                    similarity = self.similarity(state, members, own)
                    found = PARTITIONS[self.partition](similarity, rng)
                    parts = [[members[i] for i in part] for part in found]
            yield from ((number, part) for part in parts)

    def disagree(self, products: FloatArray) -> bool:
        """Return whether the updates of a cluster cancel out, from their products `[n, n]`."""
        mean = np.sqrt(max(products.mean(), 0.0))
        largest = np.sqrt(products.diagonal().max())
        if self.criterion == "ratio":
            return bool(mean < self.ratio * largest)
        return bool(mean < self.epsilon1 and largest > self.epsilon2)

    def comparable(self, state: State, members: Sequence[int]) -> bool:
        """Return whether the server knows enough of these clients to compare them."""
        return True

    def similarity(self, state: State, members: Sequence[int], products: FloatArray) -> FloatArray:
        """Return 1 + cos(Δ_i, Δ_j), `[n, n]`, from the products of updates."""
        norms = np.sqrt(products.diagonal())
        found: FloatArray = 1 + products / np.maximum(np.outer(norms, norms), 1e-12)
        return found

    def download(self, state: State, clients: Sequence[int]) -> Message:
        own = rows_of(state[CLUSTER], clients)
        return as_model({name: value[own] for name, value in model_part(state).items()})

    def collaboration(self, state: State) -> Tensor:
        """Return the weights of the mean within each cluster, and 0 between clusters."""
        together = state[CLUSTER].unsqueeze(1) == state[CLUSTER]
        weights = together * state[WEIGHT]
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)

    def remarks(self, state: State) -> Sequence[str]:
        sizes = sorted((len(members) for members in clusters_of(state)), reverse=True)
        if len(sizes) == 1:
            return (f"no cluster was split: the {sizes[0]} clients have one model, as in FedAvg",)
        return (f"{len(sizes)} clusters of {', '.join(map(str, sizes))} clients at the end",)


def clusters_of(state: State) -> list[list[int]]:
    """Return the clients of each cluster."""
    numbers = state[CLUSTER].tolist()
    found: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for client, number in enumerate(numbers):
        found[number].append(client)
    return found


def update_products(state: State, uploads: Uploads) -> FloatArray:
    """Return the inner products of all updates Δ_i, `[K, K]`: norms, cosines and means follow."""
    before, own = model_part(state), state[CLUSTER][list(uploads.clients)]
    products = torch.zeros(len(own), len(own), dtype=torch.float64, device=own.device)
    for name, value in uploads.model.items():
        update = flat(value - before[name][own])
        products += (update @ update.T).double()
    found: FloatArray = products.cpu().numpy()
    return found
