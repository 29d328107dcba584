"""Agreement of the sites of a run on an encoding: by statistics of train nodes, or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from polyphily.errors import TrainingError, UserError, unknown
from polyphily.flower.bounds import drowning
from polyphily.flower.collecting import Exchange
from polyphily.flower.fitting import LEFT_OUT
from polyphily.flower.joining import Answer, Emit, Policy, Transport, Troubles, dismiss, refusing
from polyphily.flower.plan import Plan
from polyphily.flower.wire import HEADER, MEASURE
from polyphily.graphs.encoding import (
    MODES,
    NORMALIZATIONS,
    Encoding,
    choose_normalization,
)
from polyphily.graphs.statistics import Doubles, Moments, Statistics


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
    troubles: Troubles | None = None,
) -> Plan:
    """Return the plan with an encoding, and with the sites that have sent what it needs.

    The other sites are left out and told why.

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
        troubles: where sites that are left out are noted.

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
    parts = _collect(plan, transport, policy, emit, [] if troubles is None else troubles)
    sites = tuple(site for site in plan.sites if site in parts)
    together = Statistics.merged([parts[site] for site in sites])
    how = normalize or choose_normalization(columns, together)
    encoding = Encoding.learn(together, columns, how)
    return replace(plan, sites=sites, normalize=how, encoding=encoding)


def _collect(
    plan: Plan, transport: Transport, policy: Policy, emit: Emit, troubles: Troubles
) -> dict[str, Statistics]:
    """Ask every site for the statistics of its train nodes."""
    exchange = Exchange(plan, transport, policy, emit, troubles)
    found: dict[str, Statistics] = {}
    left_out = dict.fromkeys(plan.sites, f"no statistics within {policy.timeout:g} s")

    def refuse(reason: str) -> None:
        left_out[site] = reason

    for site, answer in exchange.ask(MEASURE, {site: {} for site in plan.sites}, {}):
        with refusing(refuse):
            found[site] = _read(exchange, plan, site, answer)
            del left_out[site]
    for site, reason in strange(found, policy.max_weight).items():
        del found[site]
        left_out[site] = reason
    for site, reason in left_out.items():
        exchange.note_trouble(0, LEFT_OUT, site, reason)
    dismiss(transport, left_out)
    if len(found) < policy.min_sites:
        raise TrainingError(
            f"{len(found)} of {len(plan.sites)} sites sent the statistics of their columns, "
            f"{policy.min_sites} are needed{exchange.reasons(0)}"
        )
    return found


def strange(parts: Mapping[str, Statistics], factor: float) -> dict[str, str]:
    """Return which sites have statistics that would drown those of the others, and why.

    A site's number of train nodes, and the mean and the deviation of each of its columns, may be
    `factor` times those of the others (their upper median). Means are compared with deviations,
    too, because a mean may be near zero. A column in which all others are zero is not compared, and
    at least two others are needed.
    """
    found = drowning({site: _nodes(part) for site, part in parts.items()}, factor)
    found = {site: f"its number of train nodes {why} (max_weight)" for site, why in found.items()}
    sizes = {
        site: (np.abs(part.numbers.mean), _deviations(part.numbers)) for site, part in parts.items()
    }
    for site, (mean, deviation) in sizes.items():
        others = [sizes[other] for other in parts if other != site]
        if len(others) < 2:
            continue
        middle = len(others) // 2
        scale = np.maximum(*(np.sort(v, axis=0)[middle] for v in np.stack(others, axis=1)))
        odd = ((mean > factor * scale) | (deviation > factor * scale)) & (scale > 0)
        if odd.any():
            found[site] = (
                f"the mean or deviation of its column {int(np.argmax(odd)) + 1} is more than "
                f"{factor:g} times that of the other sites (max_weight)"
            )
    return found


def _nodes(part: Statistics) -> float:
    """Return the number of train nodes that statistics claim to be about."""
    seen = part.numbers.count + part.numbers.missing
    counted = [sum(c.values.values()) + c.rest + c.missing for c in part.categories]
    return float(max([*seen.tolist(), *counted], default=0))


def _deviations(moments: Moments) -> Doubles:
    return np.asarray(np.sqrt(moments.squares / np.maximum(moments.count, 1)))


def _read(exchange: Exchange, plan: Plan, site: str, answer: Answer) -> Statistics:
    facts = exchange.read(site, answer, MEASURE, 0, HEADER * 64).facts
    categories = sum(column.kind == "category" for column in plan.schema.columns)
    return Statistics.from_json(
        facts.get("statistics"),
        numbers=plan.schema.width - categories,
        categories=categories,
        where="its statistics",
    )
