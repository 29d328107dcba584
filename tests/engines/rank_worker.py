"""What one rank does in the tests of `distributed`: `rank_worker.py rounds|late FOLDER`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import random_graphs, with_features
from cases import federation_of, usual_backbone
from polyphily.core.method import create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.engines.placement import ManyProcesses
from polyphily.engines.simulation import Simulation
from polyphily.engines.team import Team, joined
from polyphily.errors import PolyphilyError, UserError
from polyphily.runs.folder import save_tensors, write_text

ROUNDS = 3
SIZES = (17, 9, 24, 12, 30)


@dataclass(frozen=True)
class Case:
    """A run that one process and several are to agree on."""

    method: str
    seeds: tuple[int, ...] = (0,)
    clients: int = len(SIZES)
    broken: bool = False  # a client whose updates are not finite
    settings: dict[str, Any] = field(default_factory=dict)

    def simulation(self, team: Team | None = None) -> Simulation:
        federations = []
        for seed in self.seeds:
            graphs = random_graphs(SIZES, seed=seed, density=0.2)
            if self.broken:
                graphs[2] = with_features(graphs[2], np.full_like(graphs[2].features, np.inf))
            whole = federation_of(graphs, seed)
            federations.append(replace(whole, clients=whole.clients[: self.clients]))
        settings = Settings(
            **{
                "backbone": usual_backbone(create(self.method)),
                "hidden": 8,
                "rounds": ROUNDS,
                "dropout": 0.4,
                "input_dropout": 0.2,
                "dtype": "float64",
                "optimizer": "adam",
                "lr": 0.02,
                **self.settings,
            }
        )
        filled = fill(settings, "files", "accuracy")
        if team is None:
            return Simulation(create(self.method), federations, filled)
        return Simulation(
            create(self.method),
            federations,
            filled,
            placement=ManyProcesses(federations, team),
        )


UNEVEN = {"participation": 0.5, "failures": 0.3, "epochs": "1-3", "keep_optimizer": True}
CASES = {
    "fedavg": Case("fedavg"),
    "fedprox": Case("fedprox"),
    "fedspa": Case("fedspa"),
    "fedgsp": Case("fedgsp"),
    "s2fgl": Case("s2fgl"),
    "fedper": Case("fedper"),
    "local": Case("local"),
    "scaffold, seeds, some clients": Case("scaffold", (3, 1), settings=UNEVEN),
    "fedavg, one client a round": Case("fedavg", settings={"participation": 0.2}),
    "fedavg, sequential": Case("fedavg", settings={"engine": "sequential"}),
    "fedavg, a broken client": Case("fedavg", broken=True),
}


def rounds(folder: Path, team: Team) -> None:
    """Every case; rank 0 keeps what comes of it. More ranks than clients are refused."""
    with pytest.raises(UserError, match="ranks for 1 clients: start at most 1 with torchrun"):
        Case("fedavg", clients=1).simulation(team)
    for name, case in CASES.items():
        simulation = case.simulation(team)
        reports = [simulation.advance() for _ in range(ROUNDS)]
        tensors = simulation.tensors()
        if simulation.placement.leads:
            save_tensors(folder / f"{name}.safetensors", tensors, {})
            facts = [(r.refused, r.failed, r.bytes_up, r.bytes_down) for r in reports]
            write_text(folder / f"{name}.txt", repr(facts))
        for value in simulation.memory.values():
            assert len(value) == len(simulation.cohort) < len(SIZES) * len(case.seeds)


def late(folder: Path, team: Team) -> None:
    """Rank 1 is busy for longer than the others wait for it."""
    if team.rank == 1:
        time.sleep(1.2 * team.timeout)
    team.same("word")


if __name__ == "__main__":
    work, out = {"rounds": rounds, "late": late}[sys.argv[1]], Path(sys.argv[2])
    try:
        with joined() as ranks:
            assert ranks is not None
            work(out, ranks)
    except PolyphilyError as error:
        sys.exit(f"{type(error).__name__}: {error}")
