"""A run between sites, followed while it goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.report.following import FINISHED, STARTING, STOPPED, Follower
from polyphily.report.serving import LivePage
from polyphily.runs.folder import SUMMARY, RunFolder


def test_the_page_of_a_run_that_is_not_finished_shows_its_sites(tmp_path: Path) -> None:
    data = federation()
    plan = plan_for(data, "fedavg")
    server = tmp_path / "server"
    folder = server / "runs" / "a-run"
    conductor = coordinate(plan, Wires(sites_of(data, tmp_path)), folder, 3)
    settings = {k: v for k, v in dataclasses.asdict(plan.settings).items() if v is not None}
    RunFolder(folder).amend_config(method="fedavg", dataset="sites", **settings)
    (server / "config.toml").touch()  # that of the server: its latest run is followed
    (folder / "request.json").touch()
    conductor.emit("waiting", sites=list(plan.sites))
    conductor.emit("joined", site=plan.sites[0])
    [standing] = Follower(server).standings()
    assert standing.state == STARTING
    assert standing.words == f"waiting for {', '.join(plan.sites[1:])}"
    conductor.go()
    assert [s.state for s in Follower(server).standings()] == [FINISHED]

    (folder / SUMMARY).unlink()
    conductor.emit("late", round=2, site=plan.sites[1], reason="no answer in time")
    [standing] = Follower(server).standings()
    assert standing.state == STOPPED
    assert standing.words.endswith(f"polyphily server resume {server} a-run")
    page = LivePage(server).page()
    assert '<section id="sites">' in page
    assert f"round 2: {plan.sites[1]} late: no answer in time" in page
    for site in plan.sites:
        assert site in page

    conductor.emit("failed", reason="too few sites")
    assert "too few sites" in Follower(server).standings()[0].words
