"""The cross-client loss of NeighGen, without features that leave a site.

A client sends its feature generator with some embeddings and counts. The server hands them to
`partners` other clients. Each of these computes how far the generated features are from those of
neighbours in its own graph, and answers with the gradient of that in the generator's weights. The
server sums the answers for the generator's owner.

Partners rotate: in turn t, client j answers client j + s, where s runs through 1, …, M - 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import Dims, Message, State, Uploads, with_prefix
from polyphily.methods.fedsage.impaired import Impaired, dense_features
from polyphily.methods.fedsage.network import (
    FeatureGenerator,
    Generated,
    Widths,
    feature_errors,
    gate,
    normal,
)
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import StackedGraph

OWN, OTHERS = "generator/", "others/"  # weights, as sent and as handed on
EMBEDDINGS, COUNTS = "embeddings", "counts"  # follow either of them
ANSWERS, GRADIENT = "answers/", "gradient/"  # gradients, by partner and summed for the owner
SAMPLE = "sample"  # a constant of the round
ASKED = "asked"  # which of the partners there are
KNOWN, TURN = "known", "turn"  # in the server's state


def weight_shapes(widths: Widths, features: int) -> dict[str, Dims]:
    """Return the shapes of a feature generator's weights at one client."""
    with torch.device("meta"):
        generator = FeatureGenerator(widths, features)
    return {name: tuple(value.shape[1:]) for name, value in generator.named_parameters()}


# At the clients ----------------------------------------------------------------------------------


def sample(local: Local, rows: int) -> Message:
    """Draw which nodes a client asks about, before it trains: it may take fewer steps than others.

    Returns:
        Numbers in [0, 1), which `sampled` turns into nodes.
    """
    assert local.draws is not None
    return {SAMPLE: local.draws.uniform(rows, range(len(local.cohort) + 1))}


def sampled(local: Local, impaired: Impaired, generated: Generated) -> Message:
    """Return embeddings and predicted counts of the visible nodes that were drawn."""
    nodes = impaired.nodes[_places(local.constants[SAMPLE], impaired.rows)]
    return {OWN + EMBEDDINGS: generated.z[nodes], OWN + COUNTS: generated.count[nodes]}


def _places(drawn: Tensor, rows: Segments) -> Tensor:
    """Turn numbers in [0, 1) into rows of each client, `[K, …] -> [K, …]`."""
    shape = (-1, *[1] * (drawn.dim() - 1))
    sizes = rows.counts.view(shape)
    starts = (rows.counts.cumsum(0) - rows.counts).view(shape)
    return starts + (drawn * sizes).long().clamp(max=sizes - 1)


def answers(
    local: Local, generator: FeatureGenerator, *, slots: int, counting: str, distance: str
) -> Message:
    """Compute, for each partner, the gradient of the distance to features of this client.

    Every generated neighbour is compared with P neighbours of a random node of this client.

    Returns:
        Gradients `[K, partners, …]`, zero where there is no partner.
    """
    cohort, sent = local.cohort, with_prefix(local.received, OTHERS)
    z, counts = sent.pop(EMBEDDINGS), sent.pop(COUNTS)
    clients, partners, rows = counts.shape
    each: Segments = cohort.cached(
        ("fedsage+ partners", partners, rows),
        lambda whole: Segments((rows,) * (clients * partners), whole.device),
    )
    assert local.draws is not None
    noise = normal(local.draws, partners * rows * z.shape[-1], range(clients + 1))
    noisy = z.reshape(-1, z.shape[-1]) + noise.view(-1, z.shape[-1]).to(z.dtype)
    targets = dense_features(cohort)[drawn_neighbours(local, partners * rows, slots)]
    weights = {n: t.flatten(0, 1).detach().clone().requires_grad_() for n, t in sent.items()}
    generated: Tensor = functional_call(generator, weights, (noisy, each))
    errors = feature_errors(
        generated.view(len(noisy), slots, -1),
        gate(counts.flatten(), slots, counting),
        targets.flatten(0, 1),
        None,
        distance,
    )
    loss = each.mean(errors) * local.received[ASKED].flatten()
    grads = torch.autograd.grad(loss.sum(), tuple(weights.values()))
    return {
        ANSWERS + name: grad.view(clients, partners, *grad.shape[1:])
        for name, grad in zip(weights, grads, strict=True)
    }


def drawn_neighbours(local: Local, rows: int, slots: int) -> Tensor:
    """Draw nodes, and neighbours of each with replacement; a lone node stands for its own.

    Returns:
        Nodes, `[K, rows, slots]`.
    """
    cohort: StackedGraph = local.cohort
    assert local.draws is not None
    drawn = local.draws.uniform(rows * (1 + slots), range(len(cohort.segments) + 1))
    drawn = drawn.view(-1, rows, 1 + slots)
    node = _places(drawn[:, :, 0], cohort.segments).unsqueeze(2)
    if cohort.edges.nnz == 0:
        return node.expand(-1, -1, slots)
    degree = cohort.degrees.long()[node]
    entry = cohort.edges.crow.long()[node] + (drawn[:, :, 1:] * degree).long()
    near = cohort.edges.col_long[entry.clamp(max=cohort.edges.nnz - 1)]
    return torch.where(degree > 0, near, node)


def no_answers(local: Local, shapes: Mapping[str, Dims], partners: int) -> Message:
    """Return gradients of zero, for a round in which the server had nothing to hand on."""
    clients = len(local.cohort)
    return {
        ANSWERS + name: local.cohort.num_train.new_zeros(clients, partners, *shape)
        for name, shape in shapes.items()
    }


# At the server -----------------------------------------------------------------------------------


def pairing(turn: Tensor, clients: int, partners: int) -> tuple[Tensor, Tensor]:
    """Return whom each client answers, `[M, partners]`, and which of these there are."""
    number = torch.arange(partners, device=turn.device)
    step = (turn * partners + number) % max(clients - 1, 1) + 1
    owner = (torch.arange(clients, device=turn.device).unsqueeze(1) + step) % clients
    return owner, number < clients - 1


def initial(like: Tensor, clients: int) -> State:
    """Return the server's entries before the first round."""
    return {
        KNOWN: torch.zeros(clients, dtype=torch.bool, device=like.device),
        TURN: torch.zeros((), dtype=torch.int64, device=like.device),
    }


def exchanged(state: State, uploads: Uploads) -> State:
    """Return the entries of the state that change: generators to hand on, and summed answers.

    What is not renewed in a round is not needed any more and becomes empty.
    """
    clients = len(state[KNOWN])
    device = state[KNOWN].device
    everybody = torch.arange(clients, device=device)
    present = list(uploads.clients)
    complete = present == list(range(clients))
    here = everybody if complete else torch.tensor(present, dtype=torch.int64, device=device)
    after = {n: t.new_zeros(0) for n, t in state.items() if n.startswith((OWN, GRADIENT))}
    after[TURN] = state[TURN] + 1
    sent = with_prefix(uploads.tensors, OWN)
    for name, value in sent.items():
        last = state.get(OWN + name, value.new_zeros(0))
        table = last if len(last) else value.new_zeros(clients, *value.shape[1:])
        after[OWN + name] = table.index_copy(0, here, value)
    if sent:
        after[KNOWN] = state[KNOWN].index_fill(0, here, True)
    for name, value in with_prefix(uploads.tensors, ANSWERS).items():
        partners = value.shape[1]
        owner, _ = pairing(state[TURN], clients, partners)
        total = value.new_zeros(clients, *value.shape[2:])
        for r in range(partners):  # a rotation: each adds to owners of its own
            total = total.index_add(0, owner[here, r], value[:, r])
        after[GRADIENT + name] = total * (max(clients - 1, 1) / max(min(partners, clients - 1), 1))
    return after


def handed_on(state: State, clients: list[int], partners: int) -> Message:
    """Return the partners' generators and the summed answers for these clients, if any."""
    everyone = len(state[KNOWN])
    here: slice | list[int] = slice(None) if clients == list(range(everyone)) else clients
    found = {n: t[here] for n, t in state.items() if n.startswith(GRADIENT) and len(t)}
    generators = {n: t for n, t in with_prefix(state, OWN).items() if len(t)}
    if generators:
        owner, there = pairing(state[TURN], everyone, partners)
        owner = owner[here]
        asked = state[KNOWN][owner] & there
        found |= {OTHERS + n: t[owner] for n, t in generators.items()}
        found[ASKED] = asked.to(generators[COUNTS].dtype)
    return found
