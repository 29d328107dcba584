"""What the advice says of our own results is what the studies found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from polyphily.heterogeneity import results
from polyphily.heterogeneity.advice import RULES, _strong
from polyphily.heterogeneity.results import Finding, findings, in_words, tried
from polyphily.studies import studies
from report.stories import call

PAGE = Path(__file__).parents[2] / results.WHERE
COMMAND = (
    f"polyphily study --no-run --out docs/results --write {results.WHERE} "
    f"--digest src/polyphily/heterogeneity/{results.FILE}"
)


def test_what_ships_is_what_the_page_says() -> None:
    """Row by row, in each method's own view; the command writes both."""
    if not PAGE.exists():
        pytest.skip(f"{results.WHERE} is not part of this tree")
    shipped = {
        (entry.method, entry.setting): (entry.difference, entry.p, entry.verdict)
        for own in findings().values()
        for entry in own
    }
    page = dict(_rows(PAGE.read_text(encoding="utf-8")))
    assert shipped.keys() == page.keys(), COMMAND
    for key, (difference, p, verdict) in shipped.items():
        assert page[key][0] == pytest.approx(difference, abs=0.0056), COMMAND
        assert page[key][1] == pytest.approx(p, abs=0.0056), COMMAND
        assert page[key][2] == verdict, COMMAND


def _rows(page: str) -> Iterator[tuple[tuple[str, str], tuple[float, float, str]]]:
    """(method, setting) and (difference, p, verdict) of the tables in the methods' own views."""
    for section in page.split("\n## ")[1:]:
        name = section.partition(":")[0]
        method = studies()[name].method if name in studies() else name
        for table in section.split("\n### ")[1:]:
            if "(the method's own view)" not in table.partition("\n")[0]:
                continue
            for line in table.splitlines():
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                found = re.fullmatch(r"([+-][\d.]+) \(p ([\d.]+)\) (\w+)", (cells + [""] * 10)[9])
                if found:
                    yield (method, cells[0]), (float(found[1]), float(found[2]), found[3])


def test_the_command_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "method": "fedspa",
        "setting": "cora louvain 10",
        "dataset": "cora",
        "view": "received",
        "metric": "accuracy",
        "difference": 0.5,
        "p": 0.01,
        "verdict": "better",
    }
    monkeypatch.setattr("polyphily.studies.results.digest", lambda *_: [entry, entry])
    file = tmp_path / "new" / "results.json"
    assert call("study", "--no-run", "--out", tmp_path, "--digest", file) == 0
    assert [Finding(**found) for found in json.loads(file.read_text(encoding="utf-8"))] == [
        Finding(**entry),
        Finding(**entry),
    ]


def test_every_finding_is_of_a_verdict_that_its_numbers_bear() -> None:
    for own in findings().values():
        for entry in own:
            sure = entry.p < 0.05
            wanted = ("better" if entry.difference > 0 else "worse") if sure else "level"
            assert entry.verdict in (wanted, "unclear")


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(dataset: str, difference: float, verdict: str) -> Finding:
        setting = f"{dataset} louvain 10"
        return Finding("a", setting, dataset, "received", "accuracy", difference, 0.5, verdict)

    known = {"a": (one("cora", 2.0, "better"), one("actor", -1.0, "worse"))}
    monkeypatch.setattr(results, "findings", lambda: known)
    assert in_words(["a", "b"], "cora") == (
        "Our results against FedAvg on the same backbone: a better in 1 of 2 settings, worse in 1, "
        "by +0.50 points on average (cora louvain 10: +2.00)."
    )
    assert "(" not in in_words(["a"], "csbm:gap=0.5")
    assert in_words(["b", "c"], "cora") == ""
    known["a"] = tuple(replace(f, against_best=-1.0, gain="is its leash's") for f in known["a"])
    assert in_words(["a"], "csbm") == (
        "Our results against FedAvg on the same backbone: a better in 1 of 2 settings, worse in 1, "
        "by +0.50 points on average (against FedAvg on its best backbone -1.00; the gain is its "
        "leash's)."
    )


def test_methods_that_the_rules_name_have_words() -> None:
    for rule in RULES:
        words = in_words(rule.methods, "cora")
        assert all((method in words) == (method in findings()) for method in rule.methods)


def test_every_study_says_where_its_gain_comes_from() -> None:
    assert all(entry.gain for own in findings().values() for entry in own)


def test_nothing_is_recommended_without_results() -> None:
    without = [rule for rule in RULES if not tried(rule.methods)]
    assert without, "every rule has results: this test needs another rule"
    for rule in RULES:
        advice = _strong(rule, 2 * rule.level, "cora", first=True)
        assert set(advice.methods) <= findings().keys()
        assert ("recommend none" in advice.text) == (rule in without)
