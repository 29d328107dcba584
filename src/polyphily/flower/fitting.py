"""Find the sites that can train together: those that differ from most others are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyphily.core.method import Method
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.flower.joining import Emit, Policy, Transport, Troubles, dismiss, note_trouble
from polyphily.flower.plan import Schema, agree
from polyphily.runtime.network import build_network
from polyphily.runtime.server import Server

LEFT_OUT = "left out"
SEEDS = 16  # groups of equal sites that the search for the largest agreement begins with
PROBES = (8, 16, 24)  # widths at which sizes are measured


def choose_sites(
    schemas: Mapping[str, Schema], classes: Sequence[str] = ()
) -> tuple[Schema, dict[str, str]]:
    """Return the schema of the largest group of sites that agree, and why others do not fit.

    If two groups are equally large, the one with the site that the server's configuration names
    first is taken: list the sites that you trust most first.

    Args:
        schemas: by site, in the order of the server's configuration.
        classes: all label names. Without them, the sites of a group must have the same labels.

    Returns:
        The schema, and the reasons by site that is left out.

    Raises:
        UserError: if no two sites agree; for a single site, why it cannot be used.
    """
    try:
        return agree(schemas, classes), {}
    except UserError:
        if len(schemas) == 1:
            raise
    chosen = _largest_agreement(schemas, classes)
    if not chosen:
        raise UserError("no site has labels that are in the server's list of classes")
    found = agree({site: schemas[site] for site in chosen}, classes)
    return found, {
        site: _reason({chosen[0]: schemas[chosen[0]], site: schemas[site]}, classes)
        or _reason({s: schemas[s] for s in (*chosen, site)}, classes)
        for site in schemas
        if site not in chosen
    }


def _largest_agreement(schemas: Mapping[str, Schema], classes: Sequence[str]) -> list[str]:
    """Return the sites of the largest group that agrees, found by growing one from each schema."""
    groups: dict[Schema, list[str]] = {}
    for site, schema in schemas.items():
        groups.setdefault(schema, []).append(site)
    order = sorted(groups, key=lambda schema: -len(groups[schema]))  # stable: first site first
    best: list[str] = []
    for seed in order[:SEEDS]:
        members = [seed]
        if _reason({groups[seed][0]: seed}, classes):
            continue
        for other in order:
            tried = {groups[schema][0]: schema for schema in (*members, other)}
            if other != seed and not _reason(tried, classes):
                members.append(other)
        sites = {site for schema in members for site in groups[schema]}
        if len(sites) > len(best):
            best = [site for site in schemas if site in sites]
    return best


def _reason(schemas: Mapping[str, Schema], classes: Sequence[str]) -> str:
    """Return why sites do not agree; empty if they do."""
    try:
        agree(schemas, classes)
    except UserError as error:
        return str(error)
    return ""


def leave_out(
    reasons: Mapping[str, str],
    remaining: int,
    policy: Policy,
    transport: Transport,
    emit: Emit,
    troubles: Troubles,
) -> None:
    """Note which sites are left out and tell them why.

    Raises:
        UserError: if fewer than `min_sites` remain.
    """
    for site, reason in reasons.items():
        note_trouble(troubles, emit, 0, LEFT_OUT, site, reason)
    dismiss(transport, reasons)
    if remaining < policy.min_sites:
        why = "; ".join(f"{site}: {reason}" for site, reason in reasons.items())
        raise UserError(
            f"{remaining} of {remaining + len(reasons)} sites fit together, {policy.min_sites} are "
            f"needed ({why})"
        )


def too_large(
    schemas: Mapping[str, Schema], method: Method, settings: Settings, policy: Policy
) -> dict[str, str]:
    """Return why models for the schemas of some sites would be too large, by site."""
    sizes = {(schema.width, len(schema.classes)) for schema in schemas.values()}
    reasons = {size: reason_against_size(method, settings, *size, policy) for size in sizes}
    return {
        site: reason
        for site, schema in schemas.items()
        if (reason := reasons[schema.width, len(schema.classes)])
    }


def reason_against_size(
    method: Method, settings: Settings, width: int, classes: int, policy: Policy
) -> str:
    """Return why a model, or an upload of it, is too large; empty if it is not.

    Nothing of that size is allocated.
    """
    megabytes = _bytes_of(method, settings, width, max(classes, 2)) / 1e6
    if megabytes <= policy.max_model:
        return ""
    return (
        f"its {width:,} features and {classes:,} labels make a model of {megabytes:,.0f} MB, more "
        f"than max_model ({policy.max_model:g} MB) allows"
    )


def _bytes_of(method: Method, settings: Settings, width: int, classes: int) -> float:
    """Return the bytes of a model or an upload, whichever is more.

    Both are polynomials in the width, of degree two at most: they are measured at three small
    widths.
    """
    item = 8 if settings.dtype == "float64" else 4
    small = [_numbers(method, settings, probe, classes) for probe in PROBES]
    if width <= PROBES[-1]:
        return item * max(small[-1])
    return item * max(_extrapolated(values, width) for values in zip(*small, strict=True))


def _numbers(method: Method, settings: Settings, width: int, classes: int) -> tuple[int, int]:
    network = build_network(method, settings, width, classes, seed=0)
    model = sum(value.numel() for value in network.parameters())
    server = Server(method, network, settings, clients=2, seed=0)
    return model, max(server.upload_contract(index).numbers for index in (0, 1))


def _extrapolated(values: Sequence[float], width: int) -> float:
    """Return the value at a width of the parabola through values at `PROBES` (Lagrange)."""
    total = 0.0
    for i, value in enumerate(values):
        term = float(value)
        for j, other in enumerate(PROBES):
            if j != i:
                term *= (width - other) / (PROBES[i] - other)
        total += term
    return total
