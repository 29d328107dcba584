"""Agreement of the sites of a run on an encoding: by statistics of train nodes, or without."""

from __future__ import annotations

from dataclasses import replace

from polyphily.errors import TrainingError, UserError, unknown
from polyphily.flower.collecting import Exchange
from polyphily.flower.joining import Answer, Emit, Policy, Transport
from polyphily.flower.plan import Plan
from polyphily.flower.wire import HEADER, MEASURE, WireError
from polyphily.graphs.encoding import (
    MODES,
    NORMALIZATIONS,
    Encoding,
    choose_normalization,
)
from polyphily.graphs.statistics import Statistics


def check_wishes(normalize: object, mode: object, *, private: bool) -> None:
    """Check the entries `normalize` and `encoding` of a run.

    Raises:
        UserError: for unknown names, or "agreed" in a run that keeps statistics private.
    """
    if normalize not in (None, *NORMALIZATIONS):
        raise unknown("normalization", str(normalize), NORMALIZATIONS)
    if mode not in (None, *MODES):
        raise unknown("encoding", str(mode), MODES)
    if private and mode == "agreed":
        raise UserError(
            "encoding 'agreed' sends statistics of the sites' columns in clear, which differential "
            "privacy and secure aggregation are to prevent: use 'home'"
        )


def agree_encoding(
    plan: Plan,
    normalize: str | None,
    mode: str | None,
    transport: Transport,
    policy: Policy,
    emit: Emit,
) -> Plan:
    """Return the plan with an encoding, and with the sites that have sent what it needs.

    Under differential privacy and secure aggregation no site is asked for statistics: the encoding
    leaves means and deviations to each site.

    Args:
        plan: without an encoding.
        normalize: as for `load`; None to choose by the columns.
        mode: "agreed" or "home"; None: "home" under differential privacy and secure aggregation,
            otherwise "agreed".
        transport: sends messages to the sites.
        policy: timeouts and the like.
        emit: writes events.

    Raises:
        UserError: for unknown names, or "agreed" in a run that keeps statistics private.
        TrainingError: if too few sites have sent their statistics.
    """
    private = plan.settings.private
    check_wishes(normalize, mode, private=private)
    columns = plan.schema.columns or plan.schema.width
    if private or mode == "home" or (isinstance(columns, int) and normalize != "standard"):
        how = normalize or choose_normalization(columns)
        return replace(plan, normalize=how, encoding=Encoding.at_home(columns, how))
    parts = _collect(plan, transport, policy, emit)
    sites = tuple(site for site in plan.sites if site in parts)
    together = Statistics.merged([parts[site] for site in sites])
    how = normalize or choose_normalization(columns, together)
    encoding = Encoding.learn(together, columns, how)
    return replace(plan, sites=sites, normalize=how, encoding=encoding)


def _collect(plan: Plan, transport: Transport, policy: Policy, emit: Emit) -> dict[str, Statistics]:
    """Ask every site for the statistics of its train nodes."""
    exchange = Exchange(plan, transport, policy, emit)
    found: dict[str, Statistics] = {}
    for site, answer in exchange.ask(MEASURE, {site: {} for site in plan.sites}, {}):
        try:
            found[site] = _read(exchange, plan, answer)
        except WireError as error:
            exchange.note_trouble(0, "refused", site, str(error))
    if len(found) < policy.min_sites:
        raise TrainingError(
            f"{len(found)} of {len(plan.sites)} sites sent the statistics of their columns, "
            f"{policy.min_sites} are needed{exchange.reasons(0)}"
        )
    return found


def _read(exchange: Exchange, plan: Plan, answer: Answer) -> Statistics:
    facts = exchange.read(answer, MEASURE, 0, HEADER * 64).facts
    categories = sum(column.kind == "category" for column in plan.schema.columns)
    try:
        return Statistics.from_json(
            facts.get("statistics"),
            numbers=plan.schema.width - categories,
            categories=categories,
            where="its statistics",
        )
    except UserError as error:
        raise WireError(str(error)) from None
