"""The section of a page on decisions: precision-recall curves, calibration and thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyphily.report.blocks import Figure, Section, Table, round_digits
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run
from polyphily.report.words import decimal, percent

MOST = 30  # clients in the table


def decisions_section(run_set: RunSet) -> Section | None:
    """Show what the best models are good for; None if no run has curves."""
    figures = [figure for figure in (_precision_recall(run_set), _reliability(run_set)) if figure]
    if not figures:
        return None
    tables = [_table(run_set.runs[0])] if run_set.single and run_set.runs[0].decision else []
    lead = (
        "Models of the best validation round, on test nodes. Temperatures and thresholds were "
        "chosen on validation nodes."
    )
    return Section("decisions", "Decisions and calibration", lead, (*figures, *tables))


def _precision_recall(run_set: RunSet) -> Figure | None:
    """Show the precision-recall curve of all test nodes for each run, with two classes."""
    panels: dict[str, Any] = {}
    for data, members in run_set.by_data().items():
        known = [
            (label, run.curves["precision_recall"])
            for label, run in members
            if "precision_recall" in run.curves
        ]
        if not known:
            continue
        first = known[0][1]
        panels[run_set.key(data)] = {
            "x": "recall, %",
            "y": "precision, %",
            "series": [
                {"name": label, "slot": run_set.slots[label], **_axes(found["pooled"])}
                for label, found in known
            ],
            "light": [_axes(own["points"]) for own in first["clients"]] if len(known) == 1 else [],
            "baseline": {"name": "random ranking", "y": round_digits(100 * first["share"])},
        }
    if not panels:
        return None
    light = " Pale lines are single clients." if any(p["light"] for p in panels.values()) else ""
    positives = {run.curves["precision_recall"]["positive"] for run in _with_curve(run_set)}
    return Figure(
        "precision-recall",
        "lines",
        "Precision and recall",
        f"Positive class: {', '.join(sorted(positives))}. Test nodes of all clients, ranked by its "
        f"probability.{light} The dotted line is the share of positive nodes.",
        panels,
        run_set.data_choice(panels),
        half=True,
    )


def _with_curve(run_set: RunSet) -> list[Run]:
    return [run for run in run_set.runs if "precision_recall" in run.curves]


def _axes(points: list[list[float]]) -> dict[str, list[float]]:
    return {
        "x": [round_digits(100 * recall) for recall, _ in points],
        "y": [round_digits(100 * precision) for _, precision in points],
    }


def _reliability(run_set: RunSet) -> Figure | None:
    """Show accuracy against confidence, before and after temperature scaling."""

    def panel(run: Run) -> dict[str, Any] | None:
        found = run.curves.get("reliability")
        if not found:
            return None
        series = []
        for slot, (moment, name) in enumerate(
            (("before", "as trained"), ("after", "with temperature"))
        ):
            bins = [(sure, right) for count, sure, right in found[moment] if count]
            series.append({"name": name, "slot": slot, **_axes([list(pair) for pair in bins])})
        name = found["of"]
        return {
            "x": "confidence, %" if name is None else f"probability of {name}, %",
            "y": "accuracy, %" if name is None else f"share of {name}, %",
            "series": series,
            "diagonal": True,
        }

    choices, panels = run_set.panels_by_run(panel)
    if not any(panels.values()):
        return None
    return Figure(
        "reliability",
        "lines",
        "Calibration",
        "Test nodes in bins of probability: of the positive class of two, or else of "
        "the predicted class. On the dotted line the probabilities are as high as the shares.",
        panels,
        choices,
        half=True,
    )


def _table(run: Run) -> Table:
    """Return the decision for all clients together, and of each client."""
    decision = run.decision
    two = decision["pooled"]["threshold"] is not None
    columns = ["client", "chosen on", "temperature", "ECE before", "ECE after"]
    columns += ["threshold", "precision", "recall", "above it"] if two else []
    rows = [("all clients", *_cells(decision["pooled"], two))]
    rows += [(own["client"], *_cells(own, two)) for own in decision["per_client"][:MOST]]
    rule = f" Rule for thresholds: {decision['pooled']['rule']}." if two else ""
    return Table(
        tuple(columns),
        tuple(rows),
        "Scores of test nodes in percent. ECE is the expected calibration error at temperature 1 "
        f"and at the chosen one.{rule} A client with fewer than 20 validation nodes takes the "
        "decision of all clients.",
        text_columns=2,
        strong=frozenset({0}),
    )


def _cells(own: Mapping[str, Any], two: bool) -> list[str]:
    test = own["test"]
    cells = [
        {"own": "own", "pooled": "all"}.get(own["source"], "default"),
        decimal(own["temperature"], 2),
        percent(test["ece_before"], 1),
        percent(test["ece_after"], 1),
    ]
    if two:
        cells += [decimal(own["threshold"]), percent(test["precision"], 1)]
        cells += [percent(test["recall"], 1), percent(test["flagged"], 1)]
    return cells
