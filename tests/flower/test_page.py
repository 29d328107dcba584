"""The run folder and the page of a deployed run: configuration, sites, the command to repeat it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib.resources import files
from typing import Any

import pytest
from typer.testing import CliRunner

from flower.federations import Wires, federation, sites_of
from polyphily.cli import app
from polyphily.core.settings import names
from polyphily.errors import UserError
from polyphily.flower import control
from polyphily.flower.deployment import Deployment
from polyphily.flower.wire import Parcel
from polyphily.report.content import content
from polyphily.report.page import render
from polyphily.report.runs import Run
from polyphily.runs.folder import RunFolder

GIVEN = {"rounds": 4, "min_sites": 2, "timeout": 5.0, "lr": 0.02, "max_update": "off"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A server with a run in which a site was away once."""
    place = tmp_path_factory.mktemp("deployed")
    data = federation()
    own = Deployment.create(place / "server", [g.name for g in data.clients], "localhost", 1, 2)

    def away(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        return None if name == "client-2" and asked.facts.get("round") == 2 else reply

    name = own.new_run("fedprox", {**GIVEN, "seed": 3}, {"mu": 0.2})
    own.conduct(name, Wires(sites_of(data, place), away))
    return own


def test_the_configuration_is_complete(own: Deployment) -> None:
    folder = own.run_folder()
    config = tomllib.loads((folder.path / "config.toml").read_text())
    plan = json.loads((folder.path / "plan.json").read_text())
    for name in names() - {"engine"}:
        if plan["settings"][name] is not None:
            assert config[name] == plan["settings"][name], name
    assert {"lr", "backbone", "metric", "normalize", "hidden"} <= config.keys()
    assert (config["method"], config["lr"], config["seeds"]) == ("fedprox", 0.02, [3])
    assert config["set"]["mu"] == 0.2


def page_of(own: Deployment) -> str:
    return render(content([Run.read(own.run_folder().path)]))


def test_the_page_shows_the_scores_of_every_site(own: Deployment) -> None:
    text = page_of(own)
    table = text[text.index("<h2>Sites") :].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2])
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert [row[0] for row in cells] == own.sites
    assert all(re.fullmatch(r"\d+\.\d\d", cell) for row in cells for cell in row[1:5])
    assert [row[5:] for row in cells] == [["0", "0"], ["0", "0"], ["1", "0"]]
    assert "1 of 4 rounds lack the scores of some sites (client-2)" in text
    assert "round 2: client-2 late: no answer within 5 s" in text
    assert '"name":"client-2"' in text.replace(" ", "")  # its curve
    assert "to measure them" not in text


def test_a_row_that_the_server_cannot_know_is_not_explained(own: Deployment) -> None:
    assert "No model" not in page_of(own)


def test_text_in_troubles_is_no_markup(own: Deployment) -> None:
    run = Run.read(own.run_folder().path)
    nasty = {"round": 1, "site": "client-1", "what": "refused", "reason": "<script>alert(1)"}
    run.summary["troubles"].append(nasty)
    assert "<script>alert(1)" not in render(content([run]))


def test_the_command_that_repeats_a_run_makes_the_same_request(
    own: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page_of(own)
    command = shlex.split(re.search(r"repeat with</dt><dd>([^<]*)", text)[1])  # type: ignore[index]
    assert command[:3] == ["polyphily", "server", "run"]
    monkeypatch.setattr(control, "start", lambda *_: None)
    monkeypatch.setattr("polyphily.cli.deploying._follow", lambda *_: None)
    monkeypatch.setattr("polyphily.cli.deploying._check_idle", lambda *_: None)
    before = own.run_folder()
    found = CliRunner().invoke(app, command[1:])
    assert found.exit_code == 0, found.output
    after = own.run_folder()
    assert after.path != before.path

    def request(folder: RunFolder) -> Any:
        return json.loads((folder.path / "request.json").read_text())

    assert request(after) == request(before)
    shutil.rmtree(after.path)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run JavaScript with")
def test_no_tick_of_a_chart_repeats() -> None:
    """Scores of few rounds lie close together: ticks need as many digits as they differ in."""
    source = files("polyphily.report").joinpath("assets/charts.js").read_text(encoding="utf-8")
    functions = "".join(
        re.search(rf"^function {name}\(.*?^}}", source, re.DOTALL | re.MULTILINE)[0] + "\n"  # type: ignore[index]
        for name in ("ticks", "show")
    )
    ranges = [
        (low, low + span)
        for low in (0, 0.5, 63.415, 82.759, 99.999)
        for span in (0, 1e-6, 1e-3, 0.01, 0.3, 7, 40)
    ]
    script = (
        f"{functions}console.log(JSON.stringify({json.dumps(ranges)}"
        ".map(([a, b]) => ticks(a, b, 4).map((t) => show(t, 12)))))"
    )
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    for labels in json.loads(found.stdout):
        assert len(set(labels)) == len(labels)
    assert sum(len(labels) > 1 for labels in json.loads(found.stdout)) >= len(ranges) - 5


def test_an_unfinished_run_says_how_to_go_on(own: Deployment) -> None:
    folder = own.run_folder().path
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match=f"server resume {own.path} {folder.name}"):
        Run.read(folder)
