"""Checks of a method: what travels, and what the server does with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from polyphily.core.declarations import describe
from polyphily.core.messages import (
    MODEL,
    Contract,
    Message,
    MessageError,
    State,
    Uploads,
    model_part,
)
from polyphily.core.method import sizes_of, travels
from polyphily.privacy.differential import unweighed, weighed
from polyphily.testing.cases import MethodCase, method_check, trained


@method_check("declares-what-it-sends")
def _declares_what_it_sends(case: MethodCase) -> None:
    simulation = case.simulate(0)
    server, clients = simulation.servers[0], len(simulation.cohort)
    for hook, declared in (
        ("uploads", server.declared_uploads),
        ("downloads", server.declared_downloads),
    ):
        names = [name for entry in declared for name in entry.shapes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise case.fail(f"{twice[0]} is declared twice", "declare every tensor once", hook)
    for entry in server.declared_uploads:
        by = getattr(entry.server, "by", None)
        weights = {n: s for own in server.declared_uploads for n, s in own.shapes.items()}
        if by is not None and by not in weights:
            raise case.fail(
                f"{entry.name} is averaged by {by}, which is not uploaded",
                f"declare {by}, too, as count({by!r}, …, Sum())",
                "uploads",
            )
    for number in range(3):
        received = server.download(range(clients))
        _obeys(case, "download", server.download_contract(number), received, number, clients)
        uploads = trained(simulation).uploads
        _obeys(case, "upload", server.upload_contract(number), uploads, number, clients)
        simulation.advance()
    describe(case.method, case.backbone)


def _obeys(
    case: MethodCase, hook: str, contract: Contract, message: Message, number: int, clients: int
) -> None:
    """Check a message against its declaration, and that it has a row per client."""
    try:
        contract.check(message)
    except MessageError as error:
        raise case.fail(
            f"its message of round {number + 1} {error}",
            f"let `{hook}s` declare exactly what `{hook}` returns, in the rounds in which it does",
            hook,
        ) from None
    for name, tensor in message.items():
        if len(tensor) != clients:
            raise case.fail(
                f"{name} has {len(tensor)} rows for {clients} clients",
                "return one row per client, in the order in which they are given",
                hook,
            )


@method_check("download-of-some")
def _download_of_some(case: MethodCase) -> None:
    simulation = case.simulate(2)
    server = simulation.servers[0]
    everything, some = server.download(range(len(simulation.cohort))), [2, 0]
    case.compare(
        "what clients 2 and 0 are sent depends on who else is asked",
        {name: tensor[some] for name, tensor in everything.items()},
        server.download(some),
        1e-12,
        "return a row for each of `clients`, in the order given",
        "download",
    )


@method_check("private-parameters-stay")
def _private_parameters_stay(case: MethodCase) -> None:
    simulation = case.simulate(0)
    private = {
        MODEL + name
        for name in model_part(simulation.memory)
        if not travels(case.method, simulation.network, name)
    }
    for hook, message in (
        ("upload", trained(simulation).uploads),
        ("download", simulation.download(simulation.placement.members)),
    ):
        leaked = sorted(private & message.keys())
        if leaked:
            raise case.fail(
                f"{leaked[0]} travels, although `shares` says that it stays with the client",
                "leave it out, or let `shares` return True for it",
                hook,
            )


# The server ---------------------------------------------------------------------------------------


@method_check("server-is-pure")
def _server_is_pure(case: MethodCase) -> None:
    for state, uploads in _server_rounds(case):
        before = {n: t.clone() for n, t in state.items()}
        sent = {n: t.clone() for n, t in uploads.tensors.items()}
        first, second = (_aggregated(case, state, uploads) for _ in range(2))
        inputs = "return new tensors; change neither the state nor the uploads in place"
        case.compare(
            "it changes the state that it is given", before, state, 0.0, inputs, "aggregate"
        )
        case.compare(
            "it changes the uploads that it is given",
            sent,
            uploads.tensors,
            0.0,
            inputs,
            "aggregate",
        )
        case.compare(
            "two calls with the same arguments differ",
            first,
            second,
            0.0,
            "depend on the arguments alone, and draw random numbers from `rng`",
            "aggregate",
        )
        lost = sorted(state.keys() - first.keys())
        if lost:
            raise case.fail(
                f"{lost[0]} is missing in the new state",
                "return the whole state: {**state, …}",
                "aggregate",
            )


@method_check("sums-are-enough")
def _sums_are_enough(case: MethodCase) -> None:
    simulation = case.simulate(0)
    sizes = sizes_of(case.method, simulation.network, len(simulation.cohort))
    if case.method.reason_against_sums(sizes) is not None or not case.method.uploads(sizes):
        return
    weights = simulation.servers[0].weights_of_means()
    for state, uploads in _server_rounds(case):
        sums = {n: t.sum(0, keepdim=True) for n, t in weighed(uploads.tensors, weights).items()}
        summed = Uploads((), unweighed(sums, weights))
        case.compare(
            "the state from sums of uploads differs from the state from all uploads",
            _aggregated(case, state, uploads),
            _aggregated(case, state, summed),
            1e-8,
            "let `uploads` declare Individually(why) for what the server looks at client by "
            "client, instead of Mean or Sum",
            "aggregate",
        )


def _server_rounds(case: MethodCase) -> Iterator[tuple[State, Uploads]]:
    """Yield the server's state and what clients upload, in the first three rounds."""
    simulation = case.simulate(0)
    everyone = tuple(range(len(simulation.cohort)))
    for _ in range(3):
        uploads = trained(simulation).uploads
        yield simulation.states[0], Uploads(everyone, uploads, simulation.network)
        simulation.advance()


def _aggregated(case: MethodCase, state: State, uploads: Uploads) -> State:
    with torch.no_grad():
        return case.method.aggregate(state, uploads, np.random.default_rng(0))
