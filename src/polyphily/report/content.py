"""The content of the page of one or several runs, and of an inspection."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyphily.report.blocks import Content, Entries, Fact, Item, Section
from polyphily.report.clients import (
    LEAD,
    clients_section,
    differences_figure,
    homophily_figure,
    label_mix_figure,
    measures_table,
    model_figures,
    spectra_figure,
)
from polyphily.report.decisions import decisions_section
from polyphily.report.models import collaboration_figure, confusion_figure, traffic_figure
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run, option_name, show
from polyphily.report.scores import convergence_section, result_section, with_deviation
from polyphily.report.sites import sites_section
from polyphily.report.trials import tuning_section
from polyphily.report.words import duration, in_warm_up, length, percent, size
from polyphily.runs.assessment import baseline_name


def content(runs: Sequence[Run]) -> Content:
    """Return the page of one or several runs."""
    run_set = RunSet(runs)
    sections = [
        _with_unfinished(result_section(run_set), run_set),
        sites_section(run_set),
        tuning_section(run_set),
        convergence_section(run_set),
        clients_section(run_set),
        _pairs_section(run_set),
        decisions_section(run_set),
        _models_section(run_set),
        _provenance_section(run_set),
    ]
    return Content(
        title=_title(run_set),
        subtitle=_subtitle(run_set),
        facts=_facts(run_set),
        sections=tuple(section for section in sections if section is not None),
        notes=_notes(run_set),
    )


def _with_unfinished(section: Section, run_set: RunSet) -> Section:
    """Say above a section which runs are not finished."""
    going = [
        f"{label} after {run.summary['rounds']} of {run.config['rounds']} rounds"
        for label, run in zip(run_set.labels, run_set.runs, strict=True)
        if not run.finished
    ]
    if not going:
        return section
    return replace(section, lead=f"Scores so far, not final: {'; '.join(going)}.")


def inspection_content(inspection: Mapping[str, Any], advice: Sequence[str]) -> Content:
    """Return the page of an inspected federation, before or after training.

    Args:
        inspection: the result of `Inspection.to_dict`; undefined measures are None.
        advice: sentences to show.
    """
    no_runs, measured = RunSet([]), {"": inspection}
    members = inspection["clients"]
    differences = differences_figure(no_runs, measured)
    figures = (
        homophily_figure(no_runs, measured),
        label_mix_figure(no_runs, measured),
        spectra_figure(inspection),
    )
    sections = [
        Section("measures", "Graphs", items=(measures_table(inspection),)),
        Section("clients", "Clients", LEAD, figures),
        Section(
            "pairs",
            "How clients differ",
            items=(*([differences] if differences else []), *model_figures(inspection)),
            points=tuple(advice),
        ),
    ]
    values = [client["edge_homophily"] for client in members]
    known = [value for value in values if value is not None]
    facts = [
        Fact("nodes", f"{sum(client['nodes'] for client in members):,}", "over all clients"),
        Fact("edges", f"{sum(client['edges'] for client in members):,}", "within clients"),
    ]
    if known:
        facts.append(
            Fact("edge homophily", f"{min(known):.2f} – {max(known):.2f}", "range over clients")
        )
    lost = inspection["lost"]
    if lost and lost["edges_share"] is not None:
        signal = percent(lost["label_signal_share"], 0)
        note = f"edges between clients, with {signal} % of the label signal"
        facts.append(Fact("lost edges", f"{percent(lost['edges_share'], 1)} %", note))
    setting = f"{len(members)} clients ({inspection['partition']}) · split {inspection['split']}"
    return Content(
        title=f"{_short(inspection['dataset'])}, {len(members)} clients",
        subtitle=f"{inspection['dataset']} · {setting} · seed {inspection['seed']}",
        facts=tuple(facts),
        sections=tuple(sections),
        notes=tuple(inspection["notes"]),
    )


def _title(run_set: RunSet) -> str:
    datasets = list(dict.fromkeys(_short(run.summary["dataset"]) for run in run_set.runs))
    where = show(datasets) if len(datasets) < 4 else f"{len(datasets)} datasets"
    methods = list(dict.fromkeys(run.method for run in run_set.runs))
    if len(methods) > 3:
        return f"{len(methods)} methods on {where}"
    return f"{' · '.join(methods)} on {where}"


def _short(dataset: str) -> str:
    """Return a dataset's name without its options, or the last part of a path."""
    return dataset.partition(":")[0].rstrip("/").rpartition("/")[2]


def _subtitle(run_set: RunSet) -> str:
    """Return the parts of the configuration that all runs share."""
    first = run_set.runs[0].summary
    parts: list[Callable[[Mapping[str, Any]], str]] = [
        lambda s: s["dataset"] if ":" in str(s["dataset"]) else "",
        lambda s: f"{s['partition']['clients']} clients ({s['partition']['name']})",
        lambda s: f"split {s['split']}",
        lambda s: str(s["backbone"]),
        lambda s: length(s["rounds"], s["epochs"]),
        lambda s: ("seed " if len(s["seeds"]) == 1 else "seeds ") + show(s["seeds"]),
    ]
    shared = [
        part(first)
        for part in parts
        if all(part(run.summary) == part(first) for run in run_set.runs)
    ]
    return " · ".join(filter(None, shared))


def _facts(run_set: RunSet) -> tuple[Fact, ...]:
    if run_set.single:
        return _facts_of_one(run_set.runs[0])
    facts = []
    for data, members in list(run_set.by_data().items())[:3]:
        known = [(label, run) for label, run in members if run.score is not None]
        if len(known) < 2:
            continue
        known.sort(key=lambda entry: -(entry[1].score or 0))
        (best, first), (second, other) = known[:2]
        lead = 100 * ((first.score or 0) - (other.score or 0))
        where = f" on {data}" if len(run_set.settings) > 1 else ""
        behind = f"{lead:.1f} points behind" if lead >= 0.05 else "equally good"
        note = f"{best}{where}; {second} is {behind}"
        facts.append(Fact(f"best test {first.metric}", _score(first), note))
    if len(run_set.settings) == 1:
        fastest = min(run_set.runs, key=lambda run: run.summary["seconds_per_round_median"])
        facts.append(_round_time(fastest, run_set.labels[run_set.runs.index(fastest)]))
        sending = [run for run in run_set.runs if run.summary["bytes_up_per_round"]]
        if sending:
            least = min(sending, key=lambda run: run.summary["bytes_up_per_round"])
            facts.append(_upload_size(least, run_set.labels[run_set.runs.index(least)]))
    return tuple(facts)


def _facts_of_one(run: Run) -> tuple[Fact, ...]:
    known = [value for value in run.per_client if value is not None]
    best = run.summary["best_val"]["round"]
    at = f"round {best:.0f}" if isinstance(best, int | float) else "each client's best round"
    at += ", in the warm-up" if in_warm_up(run.summary) else ""
    over = ", mean ± standard deviation over seeds" if len(run.seeds) > 1 else ""
    facts = [Fact(f"test {run.metric}", _score(run), f"best validation: {at}{over}")]
    if (trivial := run.baseline()) is not None:
        name = baseline_name(run.metric)
        facts.append(Fact(name, f"{percent(trivial, 1)} %", f"test {run.metric} without a model"))
    if len(known) > 1:
        span = f"{percent(min(known))} – {percent(max(known))}"
        facts.append(Fact("range over clients", span, f"mean {percent(statistics.fmean(known))}"))
    facts.append(_round_time(run, f"{run.summary['rounds']} rounds"))
    facts.append(_upload_size(run, f"download: {size(run.summary['bytes_down_per_round'])}"))
    return (*facts, *_privacy(run))


def _privacy(run: Run) -> list[Fact]:
    """Return the privacy budget spent by the client with the most uploads, if there is one."""
    dp = run.summary.get("dp")
    if not dp:
        return []
    if not run.finished:
        return [Fact("epsilon spent", f"{dp['epsilon']:.3g}", "so far, by a client")]
    note = f"of {dp['target_epsilon']:g}, at delta {dp['delta']:g}, for all uploads of a client"
    return [Fact("epsilon spent", f"{dp['epsilon']:.3g}", note)]


def _round_time(run: Run, note: str) -> Fact:
    seeds = f", {len(run.seeds)} seeds at once" if len(run.seeds) > 1 else ""
    return Fact("time per round", duration(run.summary["seconds_per_round_median"]), note + seeds)


def _upload_size(run: Run, note: str) -> Fact:
    return Fact("upload per round, all clients", size(run.summary["bytes_up_per_round"]), note)


def _notes(run_set: RunSet) -> tuple[str, ...]:
    lines = [note for run in run_set.runs for note in run.summary.get("notes", [])]
    lines += [
        f"{label}: {run.summary['refused_updates']} updates were refused: they were not finite"
        for label, run in zip(run_set.labels, run_set.runs, strict=True)
        if run.summary.get("refused_updates") and "troubles" not in run.summary
    ]
    lines += [note for found in run_set.inspections().values() for note in found.get("notes", [])]
    without = [
        run
        for run in run_set.runs
        if "inspection" not in run.evidence
        and "command" not in run.summary  # of sites elsewhere
        and run.finished
    ]
    if without:
        where = without[0].path if len(without) == 1 else f"{len(without)} runs"
        lines.append(f"clients were not measured: {where}. Run `polyphily report` to measure them")
    return tuple(dict.fromkeys(lines))


def _pairs_section(run_set: RunSet) -> Section | None:
    differences = differences_figure(run_set, run_set.inspections())
    figures = [figure for figure in (differences, collaboration_figure(run_set)) if figure]
    if not figures:
        return None
    advice = {
        entry["text"]: None for run in run_set.runs for entry in run.evidence.get("advice", [])
    }
    points = tuple(advice) if len(run_set.inspections()) == 1 else ()
    title = "Differences and collaboration between clients"
    return Section("pairs", title, items=tuple(figures), points=points)


def _models_section(run_set: RunSet) -> Section | None:
    silent = [
        label
        for label, run in zip(run_set.labels, run_set.runs, strict=True)
        if "sent" in run.evidence and not any(entry["tensors"] for entry in run.evidence["sent"])
    ]
    lead = f"With {show(silent)}, clients send nothing." if silent else ""
    figures = [figure for figure in (confusion_figure(run_set), traffic_figure(run_set)) if figure]
    if not figures and not lead:
        return None
    return Section("models", "Errors by class, and data sent by each client", lead, tuple(figures))


def _provenance_section(run_set: RunSet) -> Section:
    facts = [_provenance(run) for run in run_set.runs]
    names = list(dict.fromkeys(name for own in facts for name in own))
    shared = {n: facts[0][n] for n in names if len({own.get(n) for own in facts}) == 1}
    items: list[Item] = [Entries("" if run_set.single else "All runs", shared)]
    several = len(run_set.settings) > 1
    for label, run, own in zip(run_set.labels, run_set.runs, facts, strict=True):
        rest = {n: v for n, v in own.items() if n not in (*shared, "method", "peak memory")}
        if rest:
            items.append(
                Entries(f"{label} · {run_set.settings[run.data]}" if several else label, rest)
            )
    return Section("provenance", "Configuration and versions", items=tuple(items))


def _provenance(run: Run) -> dict[str, str]:
    """Return what is needed to repeat a run: configuration, seeds, versions, commit."""
    summary = run.summary
    hyper = {option_name(n): v for n, v in run.config.items() if n.startswith("set.")}
    found = {n: show(v) for n, v in run.config.items() if not n.startswith("set.")}
    if hyper:
        found["hyperparameters"] = ", ".join(f"{n} {show(v)}" for n, v in hyper.items())
    found["partition sha256"] = str(summary["partition"]["sha256"])[:16]
    if "polyphily" in summary:  # of a finished run
        found["polyphily"] = str(summary["polyphily"])
    if run.evidence.get("commit"):
        found["commit"] = str(run.evidence["commit"])
    found |= {name: str(value) for name, value in summary.get("versions", {}).items()}
    if "peak_memory_mb" in summary:
        found["peak memory"] = size(summary["peak_memory_mb"] * 2**20)
    again = f"polyphily run --config {run.path / 'config.toml'}"
    found["repeat with"] = str(summary.get("command", again))
    return found


def _score(run: Run) -> str:
    return with_deviation(run.test, run.metric, 1) + " %"
