"""FedGNN: FedAvg on graphs that are expanded by matched nodes of other clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    count,
    model_part,
    rows_of,
    statistic,
    with_rows,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fedgnn.matching import PIECES, Slots, match
from polyphily.methods.fedgnn.network import Expanded, ExpandedGCN
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.stacked import StackedGraph

KEYS, MEANS, COPIES = "keys", "embeddings", "copies"  # what a client sends
MATCHED, MATCHES = "matched embeddings", "matches"  # what it is sent
WHY = "a third party compares the keys of single clients; the server plays this role here"


@register(
    "fedgnn",
    cite="Wu et al., FedGNN: Federated Graph Neural Network for Privacy-Preserving "
    "Recommendation, 2021",
)
@dataclass(frozen=True)
class FedGNN(FedAvg):
    """FedAvg; a node also hears from nodes of other clients that have the same neighbours.

    The key of a node is a keyed hash of its neighbours' ids. A third party finds equal keys at
    several clients and hands out the hidden embeddings of the last round. They are constant further
    neighbours in the last layer. With local differential privacy gradients are clipped to ±δ, and
    Laplace noise of scale λ is added.

    Node ids must mean the same at all clients, as they do in the parts of one graph. Clients that
    share no node have no match. Without noise the method is then FedAvg to the bit.
    """

    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "The paper recommends items: users are clients, and a matched user becomes a neighbour of "
        "the item that both users know. For nodes of subgraphs the readers of the paper match "
        "nodes with exactly the same neighbours, and do not say where these are joined: to the "
        "node that they match, as neighbours in the last layer.",
        "The number of a matched node's own neighbours is not sent: its degree is taken to be that "
        "of the node that it matches.",
        "The paper's pseudo-interacted items hide which item embeddings a user trains. Nodes have "
        "no embedding table, so there are none here.",
        "A third party matches, which knows neither the model nor the key of the hash. Here the "
        "server does it and knows both, so that it could guess ids: this shows the method's "
        "accuracy, not its privacy.",
        "Matched copies of one node carry its features from one client to another.",
    )

    expand: bool = parameter(True, "whether graphs are expanded by matched nodes")
    slots: int = parameter(512, "how many distinct neighbourhoods of a client can be matched")
    most: int = parameter(
        100, "how many matched nodes a node hears from at most", search=Range(10, 200, log=True)
    )
    key: str = parameter("polyphily", "text that keys the hash of ids; the same at every site")
    gradient_noise: float = parameter(
        0.0, "scale of the Laplace noise on gradients; 0: none", symbol="λ", paper=0.2
    )
    gradient_clip: float = parameter(
        0.0, "bound of every entry of a gradient; 0: none", symbol="δ", paper=0.1
    )

    def __post_init__(self) -> None:
        if min(self.slots, self.most) < 1:
            raise UserError("fedgnn: 'slots' and 'most' must be at least 1")
        if min(self.gradient_clip, self.gradient_noise) < 0:
            raise UserError("fedgnn: 'gradient_clip' and 'gradient_noise' must not be negative")
        if self.gradient_noise and not self.gradient_clip:
            raise UserError(
                "fedgnn: noise on unbounded gradients hides nothing: set gradient_clip as well"
            )

    @property
    def epsilon(self) -> float:
        """The ε of local differential privacy that an entry of a gradient has in a step: 2δ/λ."""
        return 2 * self.gradient_clip / self.gradient_noise if self.gradient_noise else float("inf")

    def without_effect(self) -> Mapping[str, str]:
        if self.expand:
            return {}
        return dict.fromkeys(("slots", "most", "key"), "nothing is matched; set expand=on as well")

    def needs_symmetric_edges(self) -> str:
        return "matched nodes have the same neighbours, whichever way edges lead"

    def needs_whole_graph(self) -> str | None:
        return "nodes are matched by all of their neighbours" if self.expand else None

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return ("gcn",) if self.expand else super().supported_backbones()

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if not self.expand:
            return super().build(backbone, shape, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ExpandedGCN(shape)

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.expand:
            return super().uploads(sizes)
        use, slots = Individually(WHY), self.slots
        return (
            *super().uploads(sizes),
            statistic(KEYS, (slots, PIECES), use, meaning="hashes of nodes' neighbours"),
            statistic(
                MEANS,
                (slots, sizes.embedding),
                use,
                meaning="mean hidden embedding of the nodes with each key",
            ),
            count(COPIES, (slots,), use, meaning="nodes with each key"),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.expand:
            return super().downloads(sizes)
        return (
            *super().downloads(sizes),
            statistic(
                MATCHED,
                (self.slots, sizes.embedding),
                meaning="mean hidden embedding of the nodes with each key at other clients",
            ),
            count(MATCHES, (self.slots,), meaning="nodes with each key at other clients"),
        )

    # At the clients --------------------------------------------------------------------------

    def own_slots(self, graph: StackedGraph | TrainingGraph) -> Slots:
        """Return the keys of a graph's nodes."""
        return Slots.of(graph, self.slots, self.key)

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        if not self.expand:
            return {}
        keys = self.own_slots(cohort).keys
        matches = keys.new_zeros(keys.shape[:2])
        return {
            KEYS: keys,
            MATCHED: keys.new_zeros(*matches.shape, network.embedding_width),
            MATCHES: matches,
        }

    def forward(self, local: Local) -> Output:
        """Return the network's output on the expanded graph."""
        graph = local.cohort
        if not self.expand or local.network.shape.layers < 2:  # one layer: no hidden embedding
            return local.forward()
        slots, held = self.own_slots(graph), {**local.memory, **local.received}
        if not slots.members.nnz:
            return local.forward()
        same = (local.memory[KEYS] == slots.keys).all(dim=2)  # another graph may be predicted
        view = Expanded(graph, slots, held[MATCHED], held[MATCHES] * same)
        output: Output = functional_call(local.network, dict(local.params), (view, local.draws))
        return output

    def loss(self, local: Local) -> Tensor:
        return local.cross_entropy(self.forward(local).logits)

    def predict(self, local: Local) -> Tensor:
        return self.forward(local).logits

    def prediction_state(self) -> Sequence[str]:
        if not self.expand:
            return ()
        sent = (f"received/{name}" for name in (MATCHED, MATCHES))
        return (*(f"memory/{name}" for name in (KEYS, MATCHED, MATCHES)), *sent)

    def reach(self, network: Backbone) -> int | None:
        return None if self.expand else network.reach

    def correct_gradients(self, local: Local, grads: Message) -> Message:
        """Clip gradients and add noise: g̃ = clip(g, ±δ) + Laplace(0, λ)."""
        if self.gradient_clip:
            grads = {
                name: grad.clamp(-self.gradient_clip, self.gradient_clip)
                for name, grad in grads.items()
            }
        if self.gradient_noise:
            assert local.draws is not None
            grads = {n: g + laplace(self.gradient_noise, g, local.draws) for n, g in grads.items()}
        return grads

    def update_memory(self, local: Local) -> Message:
        return {n: local.received[n] for n in (MATCHED, MATCHES)} if self.expand else {}

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if not self.expand:
            return sent
        slots = self.own_slots(local.cohort)
        means = slots.means(local.frozen(local.params).embedding)
        return {**sent, KEYS: slots.keys, MEANS: means, COPIES: slots.copies}

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        state = super().init_server_state(shared, clients)
        if not self.expand:
            return state
        weight = shared["convs.0.weight"]
        slots = weight.new_zeros(clients, self.slots)
        means = weight.new_zeros(*slots.shape, weight.shape[1])
        keys = weight.new_zeros(*slots.shape, PIECES)
        return {**state, KEYS: keys, MEANS: means, COPIES: slots, MATCHED: means, MATCHES: slots}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if not self.expand:
            return after
        for name in (KEYS, MEANS, COPIES):  # absent clients keep what they sent last
            after[name] = with_rows(state[name], uploads.clients, uploads[name])
        matched, matches = match(after[KEYS], after[MEANS], after[COPIES])
        return {**after, MATCHED: matched, MATCHES: matches.clamp(max=self.most)}

    def download(self, state: State, clients: Sequence[int]) -> Message:
        sent = super().download(state, clients)
        if not self.expand:
            return sent
        return {**sent, **{name: rows_of(state[name], clients) for name in (MATCHED, MATCHES)}}

    def remarks(self, state: State) -> Sequence[str]:
        found = []
        if self.expand:
            used, matched = (int((state[name] > 0).sum()) for name in (COPIES, MATCHES))
            full = int((state[COPIES] > 0).all(dim=1).sum())
            plain = "" if self.gradient_clip else ": fedgnn trained as fedavg does"
            if "convs.1.weight" not in model_part(state):
                found.append(f"a network of one layer has no embedding to exchange{plain}")
            elif matched:
                found.append(f"{matched} of {used} keys have a match at another client")
            else:
                found.append(f"no node has the neighbours of a node at another client{plain}")
            if full:
                found.append(f"{full} clients use all {self.slots} slots: more may find more")
        if self.gradient_noise:
            found.append(f"each step spends ε = {self.epsilon:g} per entry of the gradient")
        return found


def laplace(scale: float, like: Tensor, draws: Draws) -> Tensor:
    """Draw Laplace noise in the shape `[K, …]` of a tensor, from the clients' own streams."""
    clients = len(like)
    uniform = draws.uniform(like[0].numel(), range(clients + 1)) + 2.0**-33 - 0.5
    noise = -scale * uniform.sign() * torch.log1p(-2 * uniform.abs())
    return noise.view(like.shape).to(like.dtype)
