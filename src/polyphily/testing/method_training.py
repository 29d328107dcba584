"""Checks of a method: clients by themselves and together, seeds, resuming, awkward data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from polyphily.core.messages import Message, model_part
from polyphily.core.method import Method
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation
from polyphily.nn.backbones import BACKBONES
from polyphily.runtime.client import Clients
from polyphily.testing.cases import MethodCase, method_check, trained
from polyphily.testing.examples import (
    AWKWARD,
    awkward_graph,
    of_client,
    small_federation,
    usual_backbone,
    with_clients,
    with_other_labels_outside_training,
)

CLIENT_HOOKS = (
    "init_client_state",
    "receive",
    "prepare_round",
    "loss",
    "correct_gradients",
    "upload",
    "update_memory",
    "predict",
)
ROUNDS = 5
_ONE_BY_ONE = (
    "a client's values may depend on that client alone. Work client by client: "
    "`local.cohort.segments`, `train_segments`, `local.train_mean`, not a sum or mean over all rows"
)


# Clients by themselves and together --------------------------------------------------------------


@method_check("hooks-keep-clients-apart")
def _hooks_keep_clients_apart(case: MethodCase) -> None:
    together: list[tuple[str, Message]] = []
    simulation = case.simulate(0, method=_traced(case.method, together), dropout=0.3)
    for _ in range(2):
        clients, round_index = simulation.clients, simulation.round
        received = simulation.download(simulation.placement.members)
        together.clear()
        _call_hooks(clients, received, simulation.memory, round_index)
        for k in range(len(clients)):
            alone: list[tuple[str, Message]] = []
            single = dataclasses.replace(clients.take([k]), method=_traced(case.method, alone))
            own = of_client(received, k), of_client(simulation.memory, k)
            _call_hooks(single, *own, round_index)
            for (hook, stacked), (_, value) in zip(together, alone, strict=True):
                pairs = list(_rows(stacked, value, k, clients))
                if hook == "prepare_round":  # what stays with the clients may be padded
                    pairs = [pair for pair in pairs if pair[1].shape == pair[2].shape]
                case.compare(
                    f"its value for client {k} changes if the client trains by itself",
                    {name: first for name, first, _ in pairs},
                    {name: second for name, _, second in pairs},
                    1e-8,
                    _ONE_BY_ONE,
                    hook,
                )
        simulation.advance()


def _traced(method: Method, calls: list[tuple[str, Message]]) -> Method:
    """Return the method with a record of what its client hooks return, in order."""

    def recorded(hook: str) -> Callable[..., Any]:
        def call(self: Method, *arguments: Any) -> Any:
            value = getattr(super(traced, self), hook)(*arguments)
            kept = value if isinstance(value, Mapping) else {hook: value}
            calls.append((hook, {n: t.detach().clone() for n, t in kept.items()}))
            return value

        return call

    traced = type(type(method).__name__, (type(method),), {h: recorded(h) for h in CLIENT_HOOKS})
    found = copy.copy(method)
    object.__setattr__(found, "__class__", traced)
    return found


def _call_hooks(clients: Clients, received: Message, memory: Message, round_index: int) -> None:
    """Initialise clients, run a round, and predict."""
    clients.initial_memory(model_part(memory))
    trained = clients.train(received, memory, round_index)
    clients.predict(clients.trained(trained.memory, round_index + 1))


def _rows(
    stacked: Message, own: Message, k: int, clients: Clients
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a client's rows of stacked values beside its own, where it is clear which they are."""
    nodes = clients.cohort.segments.pointers
    train = clients.cohort.train_segments.pointers
    for name, value in stacked.items():
        other = own.get(name, value.new_zeros(0))
        for size, begin, end in (
            (len(clients), k, k + 1),
            (nodes[-1], nodes[k], nodes[k + 1]),
            (train[-1], train[k], train[k + 1]),
        ):
            if value.dim() and len(value) == size:
                if value.is_floating_point() or size == len(clients):  # others are positions
                    yield name, value[begin:end], other
                break


@method_check("memory-keeps-its-entries")
def _memory_keeps_its_entries(case: MethodCase) -> None:
    simulation = case.simulate(0)
    before, after = simulation.memory, trained(simulation).memory
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            kinds = ["nothing" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in (old, new)]
            raise case.fail(
                f"{name} in the memory is {kinds[0]} before the first round and {kinds[1]} after",
                "let `init_client_state` return every entry that `update_memory` changes, with "
                "the same shape and type",
                "init_client_state",
            )


@method_check("stacked-equals-sequential")
def _stacked_equals_sequential(case: MethodCase) -> None:
    _engines_agree(case, small_federation(), 1e-5)


@method_check("stacked-equals-sequential-with-dropout")
def _stacked_equals_sequential_with_dropout(case: MethodCase) -> None:
    chosen: dict[str, Any] = {
        "dropout": 0.5,
        "input_dropout": 0.3,
        "epochs": "1-4",
        "keep_optimizer": True,
    }
    _engines_agree(case, small_federation(sparse=True), 1e-7, **chosen)


def _engines_agree(
    case: MethodCase, federation: Federation, relative: float, **settings: Any
) -> None:
    stacked = case.simulate(ROUNDS, federation, **settings)
    sequential = case.simulate(ROUNDS, federation, engine="sequential", **settings)
    case.compare(
        f"clients that train together and one after another differ after {ROUNDS} rounds",
        stacked.tensors(),
        sequential.tensors(),
        relative,
        f"look at the client hooks: {_ONE_BY_ONE}; take random numbers from `local.draws`",
    )


@method_check("permuting-clients")
def _permuting_clients(case: MethodCase) -> None:
    if not case.permutes:
        return
    federation, order = small_federation(), [2, 0, 3, 1]
    permuted = with_clients(federation, [federation.clients[k] for k in order])
    straight, shuffled = (case.simulate(ROUNDS, data) for data in (federation, permuted))
    server, other = straight.servers[0], shuffled.servers[0]
    for hook, first, second in (
        ("aggregate", server.download(order), other.download(range(len(order)))),
        ("", {n: t[order] for n, t in straight.memory.items()}, shuffled.memory),
    ):
        case.compare(
            "clients in another order have other results",
            first,
            second,
            1e-8,
            "let no hook depend on a client's position, and let `aggregate` match rows by "
            "`uploads.clients`. If its random draws belong to client numbers: permutes=False",
            hook,
        )


@method_check("labels-outside-training")
def _labels_outside_training(case: MethodCase) -> None:
    federation = small_federation()
    others = [with_other_labels_outside_training(graph) for graph in federation.clients]
    settings: dict[str, Any] = {"dropout": 0.3, "dtype": "float32"}
    honest = case.simulate(ROUNDS, federation, **settings)
    other = case.simulate(ROUNDS, with_clients(federation, others), **settings)
    remedy = (
        "read labels through the cohort (`local.cohort.train_labels`, `labels`), which has those "
        "of train nodes only, never from `cohort.graphs`"
    )
    words = "labels of validation and test nodes change what is trained"
    case.compare(words, honest.tensors(), other.tensors(), 0.0, remedy)
    scores = [{"scores": s.predict(s.received())} for s in (honest, other)]
    words = "labels of validation and test nodes change predictions"
    case.compare(words, scores[0], scores[1], 0.0, remedy, "predict")


@method_check("seeds-side-by-side")
def _seeds_side_by_side(case: MethodCase) -> None:
    _seeds_agree(case, 1.0)


@method_check("seeds-side-by-side-with-some-clients-each-round")
def _seeds_side_by_side_with_some(case: MethodCase) -> None:
    _seeds_agree(case, 0.7)


def _seeds_agree(case: MethodCase, participation: float) -> None:
    federations = [small_federation(seed=1), small_federation((11, 5, 8), seed=2)]
    settings: dict[str, Any] = {"dropout": 0.4, "dtype": "float64", "keep_optimizer": True}
    settings["participation"] = participation
    together = case.simulate(4, federations, **settings)
    for s, federation in enumerate(federations):
        alone = case.simulate(4, federation, **settings)
        rows = slice(together.starts[s], together.starts[s + 1])
        for hook, first, second in (
            ("", {n: t[rows] for n, t in together.memory.items()}, alone.memory),
            ("aggregate", together.states[s], alone.states[0]),
        ):
            case.compare(
                "two seeds that run side by side differ from separate runs",
                first,
                second,
                1e-12,
                f"a cohort may hold clients of several federations: {_ONE_BY_ONE}",
                hook,
            )


# Training -----------------------------------------------------------------------------------------


@method_check("every-parameter-trains")
def _every_parameter_trains(case: MethodCase) -> None:
    simulation = case.simulate(0, weight_decay=0.0)
    before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
    simulation.advance()
    still = {}
    for name, value in model_part(simulation.memory).items():
        moved = (value - before[name]).flatten(1).abs().amax(dim=1)
        where = [k for k, length in enumerate(moved.tolist()) if not length > 0]
        if where and not name.startswith(case.untrained):
            still[name] = where
    if still:
        name, where = next(iter(still.items()))
        more = f" (and {len(still) - 1} more parameters)" if len(still) > 1 else ""
        raise case.fail(
            f"{name} did not change in the first round at clients {where}{more}",
            "it gets no gradient: use it in `loss`, leave it out of `build`, or, if that is "
            f"meant: untrained=({name!r},)",
            "loss",
        )


@method_check("resumes")
def _resumes(case: MethodCase) -> None:
    settings: dict[str, Any] = {"dropout": 0.5, "keep_optimizer": True, "participation": 0.6}
    straight = case.simulate(2, **settings)
    saved = {n: t.clone() for n, t in straight.tensors().items()}
    straight.advance()
    resumed = case.simulate(0, **settings)
    resumed.restore(saved, 2, [])
    resumed.advance()
    case.compare(
        "a run that goes on from a checkpoint differs from one that was not interrupted",
        straight.tensors(),
        resumed.tensors(),
        0.0,
        "keep everything in the memory or in the server's state, nothing in attributes or global "
        "variables",
    )


@method_check("trains-on-samples")
def _trains_on_samples(case: MethodCase) -> None:
    near = [n for n in case.method.supported_backbones() if BACKBONES.find(n).local_reach]
    if case.method.needs_whole_graph() or not near:
        return
    backbone = case.backbone or usual_backbone(case.method)
    chosen = backbone if backbone in near else near[0]
    try:
        _train_well(case, case.simulate(0, backbone=chosen, layers=2, sample="3,3", batch=4))
    except Exception as error:
        words = " ".join(str(error).split())
        raise case.fail(
            f"training on sampled subgraphs (--sample, --batch) failed: {words}",
            "mend it, or return from `needs_whole_graph` why a step needs all nodes",
            "needs_whole_graph",
        ) from error


@method_check("a-federation-of-one-client")
def _one_client(case: MethodCase) -> None:
    federation = small_federation()
    _train_well(case, case.simulate(0, with_clients(federation, federation.clients[:1])))


def _awkward(kind: str) -> None:
    @method_check(f"a-client-with-{kind.replace(' ', '-')}")
    def check(case: MethodCase) -> None:
        federation = small_federation()
        clients = (*federation.clients, awkward_graph(kind))
        _train_well(case, case.simulate(0, with_clients(federation, clients)))


for _kind in AWKWARD:
    _awkward(_kind)


def _train_well(case: MethodCase, simulation: Simulation) -> None:
    """Run some rounds and check that all numbers are finite."""
    remedy = "guard divisions with clamp(min=…)"
    names = [graph.name for graph in simulation.cohort.graphs]
    for _ in range(3):
        (refused,) = simulation.advance().refused
        if refused:
            raise case.fail(
                f"the loss or upload of client {refused[0]} ('{names[refused[0]]}') is not finite",
                remedy,
                "upload",
            )
    found = {**simulation.tensors(), "predictions": simulation.predict(simulation.received())}
    broken = [name for name, tensor in found.items() if not tensor.isfinite().all()]
    if broken:
        raise case.fail(f"{broken[0]} is not finite after {simulation.round} rounds", remedy)
