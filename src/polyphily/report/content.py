"""What the page of one or several runs shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyphily.report.blocks import Content, Entries, Fact, Item, Section
from polyphily.report.cast import Cast
from polyphily.report.clients import (
    clients,
    differences,
    homophily,
    label_mix,
    measures,
    of_models,
    spectra,
)
from polyphily.report.models import collaboration, confusion, traffic
from polyphily.report.runs import Run, plain, show
from polyphily.report.scores import convergence, result, with_deviation
from polyphily.report.words import duration, percent, size


def content(runs: Sequence[Run]) -> Content:
    """The page of one or several runs."""
    cast = Cast(runs)
    sections = [
        result(cast),
        convergence(cast),
        clients(cast),
        _pairs(cast),
        _models(cast),
        _making(cast),
    ]
    return Content(
        title=_title(cast),
        subtitle=_subtitle(cast),
        facts=_facts(cast),
        sections=tuple(section for section in sections if section is not None),
        notes=_notes(cast),
    )


def inspection_content(inspection: Mapping[str, Any], advice: Sequence[str]) -> Content:
    """The page of a federation that was measured, before training or after it.

    Args:
        inspection: `Inspection.to_dict`, null where a measure is not defined.
        advice: sentences.
    """
    nobody, measured = Cast([]), {"": inspection}
    members = inspection["clients"]
    against = differences(nobody, measured)
    sections = [
        Section("measures", "Graphs", items=(measures(inspection),)),
        Section(
            "clients",
            "Clients",
            "Labels count whatever the split; docs/measures.md has every formula.",
            (homophily(nobody, measured), label_mix(nobody, measured), spectra(inspection)),
        ),
        Section(
            "pairs",
            "How clients differ",
            items=(*([against] if against else []), *of_models(inspection)),
            points=tuple(advice),
        ),
    ]
    values = [client["edge_homophily"] for client in members]
    known = [value for value in values if value is not None]
    facts = [
        Fact("nodes", f"{sum(client['nodes'] for client in members):,}", "of all clients"),
        Fact("edges", f"{sum(client['edges'] for client in members):,}", "within clients"),
    ]
    if known:
        facts.append(Fact("edge homophily", f"{min(known):.2f} – {max(known):.2f}", "by client"))
    lost = inspection["lost"]
    if lost and lost["edges_share"] is not None:
        signal = percent(lost["label_signal_share"], 0)
        note = f"and {signal} % of the label signal, between clients"
        facts.append(Fact("lost edges", f"{percent(lost['edges_share'], 1)} %", note))
    words = f"{len(members)} clients ({inspection['partition']}) · split {inspection['split']}"
    return Content(
        title=f"{_short(inspection['dataset'])}, {len(members)} clients",
        subtitle=f"{inspection['dataset']} · {words} · seed {inspection['seed']}",
        facts=tuple(facts),
        sections=tuple(sections),
        notes=tuple(inspection["notes"]),
    )


def _title(cast: Cast) -> str:
    datasets = list(dict.fromkeys(_short(run.summary["dataset"]) for run in cast.runs))
    where = show(datasets) if len(datasets) < 4 else f"{len(datasets)} datasets"
    methods = list(dict.fromkeys(run.method for run in cast.runs))
    if len(methods) > 3:
        return f"{len(methods)} methods on {where}"
    return f"{' · '.join(methods)} on {where}"


def _short(dataset: str) -> str:
    """A dataset's name without its options, or a path's last part."""
    return dataset.partition(":")[0].rstrip("/").rpartition("/")[2]


def _subtitle(cast: Cast) -> str:
    first = cast.runs[0].summary
    words: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "dataset": lambda s: s["dataset"] if ":" in str(s["dataset"]) else "",
        "clients": lambda s: f"{s['partition']['clients']} clients ({s['partition']['name']})",
        "split": lambda s: f"split {s['split']}",
        "backbone": lambda s: str(s["backbone"]),
        "rounds": lambda s: f"{s['rounds']} rounds of {s['epochs']} epochs",
        "seeds": lambda s: ("seed " if len(s["seeds"]) == 1 else "seeds ") + show(s["seeds"]),
    }
    same = [
        made(first)
        for made in words.values()
        if all(made(run.summary) == made(first) for run in cast.runs)
    ]
    return " · ".join(filter(None, same))


def _facts(cast: Cast) -> tuple[Fact, ...]:
    if cast.single:
        return _facts_of_one(cast.runs[0])
    facts = []
    for data, members in list(cast.by_data().items())[:3]:
        known = [(label, run) for label, run in members if run.score is not None]
        if len(known) < 2:
            continue
        known.sort(key=lambda entry: -(entry[1].score or 0))
        (best, first), (second, other) = known[:2]
        ahead = 100 * ((first.score or 0) - (other.score or 0))
        where = f" on {data}" if len(cast.settings) > 1 else ""
        behind = f"{ahead:.1f} points behind" if ahead >= 0.05 else "level with it"
        note = f"{best}{where}; {second} is {behind}"
        facts.append(Fact(f"best test {first.metric}", with_spread(first), note))
    if len(cast.settings) == 1:
        cheap = min(cast.runs, key=lambda run: run.summary["seconds_per_round_median"])
        facts.append(_seconds(cheap, cast.labels[cast.runs.index(cheap)]))
        sending = [run for run in cast.runs if run.summary["bytes_up_per_round"]]
        if sending:
            least = min(sending, key=lambda run: run.summary["bytes_up_per_round"])
            facts.append(_sent(least, cast.labels[cast.runs.index(least)]))
    return tuple(facts)


def _facts_of_one(run: Run) -> tuple[Fact, ...]:
    known = [value for value in run.per_client if value is not None]
    best = run.summary["best_val"]["round"]
    at = f"round {best:.0f}" if isinstance(best, int | float) else "each client's best round"
    over = ", mean ± deviation over seeds" if len(run.seeds) > 1 else ""
    facts = [Fact(f"test {run.metric}", with_spread(run), f"best validation: {at}{over}")]
    if len(known) > 1:
        span = f"{percent(min(known))} – {percent(max(known))}"
        facts.append(
            Fact("from client to client", span, f"mean {percent(statistics.fmean(known))}")
        )
    facts.append(_seconds(run, f"{run.summary['rounds']} rounds"))
    facts.append(_sent(run, f"{size(run.summary['bytes_down_per_round'])} come back"))
    return (*facts, *_privacy(run))


def _privacy(run: Run) -> list[Fact]:
    """What the uploads of the client with the most of them told, under differential privacy."""
    dp = run.summary.get("dp")
    if not dp:
        return []
    note = f"of {dp['target_epsilon']:g}, at delta {dp['delta']:g}, by all uploads of a client"
    return [Fact("epsilon spent", f"{dp['epsilon']:.3g}", note)]


def _seconds(run: Run, note: str) -> Fact:
    seeds = f", {len(run.seeds)} seeds side by side" if len(run.seeds) > 1 else ""
    return Fact("a round takes", duration(run.summary["seconds_per_round_median"]), note + seeds)


def _sent(run: Run, note: str) -> Fact:
    return Fact("clients send", f"{size(run.summary['bytes_up_per_round'])} a round", note)


def _notes(cast: Cast) -> tuple[str, ...]:
    lines = [note for run in cast.runs for note in run.summary.get("notes", [])]
    lines += [
        f"{label}: {run.summary['refused_updates']} updates were not finite and were refused"
        for label, run in zip(cast.labels, cast.runs, strict=True)
        if run.summary.get("refused_updates")
    ]
    lines += [note for found in cast.inspections().values() for note in found.get("notes", [])]
    without = [r for r in cast.runs if "inspection" not in r.evidence]
    if without:
        where = without[0].path if len(without) == 1 else f"{len(without)} runs"
        lines.append(f"clients were not measured: {where}. `polyphily report` measures them")
    return tuple(dict.fromkeys(lines))


def _pairs(cast: Cast) -> Section | None:
    figures = [
        figure for figure in (differences(cast, cast.inspections()), collaboration(cast)) if figure
    ]
    if not figures:
        return None
    advice = {entry["text"]: None for run in cast.runs for entry in run.evidence.get("advice", [])}
    points = tuple(advice) if len(cast.inspections()) == 1 else ()
    title = "How clients differ, and who learns from whom"
    return Section("pairs", title, items=tuple(figures), points=points)


def _models(cast: Cast) -> Section | None:
    silent = [
        label
        for label, run in zip(cast.labels, cast.runs, strict=True)
        if "sent" in run.evidence and not any(entry["tensors"] for entry in run.evidence["sent"])
    ]
    lead = f"Nothing leaves a site with {show(silent)}." if silent else ""
    figures = [figure for figure in (confusion(cast), traffic(cast)) if figure]
    if not figures and not lead:
        return None
    return Section("models", "What was mistaken, and what left each site", lead, tuple(figures))


def _making(cast: Cast) -> Section:
    facts = [_provenance(run) for run in cast.runs]
    names = list(dict.fromkeys(name for own in facts for name in own))
    same = {n: facts[0][n] for n in names if len({own.get(n) for own in facts}) == 1}
    items: list[Item] = [Entries("" if cast.single else "In all runs", same)]
    many = len(cast.settings) > 1
    for label, run, own in zip(cast.labels, cast.runs, facts, strict=True):
        rest = {n: v for n, v in own.items() if n not in (*same, "method", "peak memory")}
        if rest:
            items.append(Entries(f"{label} · {cast.settings[run.data]}" if many else label, rest))
    return Section("making", "How it was made", items=tuple(items))


def _provenance(run: Run) -> dict[str, str]:
    """Configuration, versions, seeds, commit: what one needs to make the run again."""
    summary = run.summary
    hyper = {plain(n): v for n, v in run.config.items() if n.startswith("set.")}
    found = {n: show(v) for n, v in run.config.items() if not n.startswith("set.")}
    if hyper:
        found["hyperparameters"] = ", ".join(f"{n} {show(v)}" for n, v in hyper.items())
    found["partition sha256"] = str(summary["partition"]["sha256"])[:16]
    found["polyphily"] = str(summary["polyphily"])
    if run.evidence.get("commit"):
        found["commit"] = str(run.evidence["commit"])
    found |= {f"{name}": str(value) for name, value in summary.get("versions", {}).items()}
    found["peak memory"] = size(summary["peak_memory_mb"] * 2**20)
    found["again"] = f"polyphily run --config {run.path / 'config.toml'}"
    return found


def with_spread(run: Run) -> str:
    return with_deviation(run.test, run.metric, 1) + " %"
