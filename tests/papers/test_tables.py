"""The papers' files: complete against the source of the figures, and fit to run."""

from __future__ import annotations

import csv
import itertools
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from polyphily.core.method import METHODS, create
from polyphily.core.settings import from_mapping
from polyphily.errors import UserError
from polyphily.graphs import splits
from polyphily.graphs.datasets import DATASETS
from polyphily.graphs.loading import NORMALIZATIONS
from polyphily.graphs.partitions import PARTITIONS
from polyphily.nn.backbones import BACKBONES
from polyphily.papers import plan, tables
from polyphily.papers.plan import Choice
from polyphily.papers.tables import AVERAGE, MEANS, METRICS, MOMENTS, PAPERS, VIEWS, Paper, Table
from polyphily.runs.folder import safe_name

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"
TABLES = [(name, table) for name in PAPERS for table in tables.paper(name).tables]
# Methods that printed rows stand for and the library does not have.
ABSENT = {
    *("adafgl", "fed-pub", "fedfa", "fedgnn", "fedgta", "fediih", "fedlit", "fedsage"),
    *("fedsage+", "fedstar", "fedtad", "fggp", "fgssl", "gcfl"),
}


@pytest.fixture(params=TABLES, ids=lambda pair: " ".join(pair))
def case(request: pytest.FixtureRequest) -> tuple[Paper, Table]:
    name, table = request.param
    paper = tables.paper(name)
    return paper, paper.tables[table]


@pytest.mark.parametrize("name", PAPERS)
def test_every_figure_of_the_source_is_there(name: str) -> None:
    file = PUBLISHED / f"{name}.csv"
    if not file.is_file():
        pytest.skip("the source of the figures is not here")
    paper = tables.paper(name)
    found = [
        (
            *(t.name, f.dataset, f.partition, str(f.clients or "")),
            *(t.protocol_of(f.dataset).metric, f.method, f.mean, f.std, f.note),
        )
        for t in paper.tables.values()
        for f in t.entries
        if t.name != "figure-4"  # it has no printed numbers
    ]
    with file.open(encoding="utf-8", newline="") as lines:
        wanted = [
            (
                *(row[n] for n in ("table", "dataset", "partition", "clients", "metric", "method")),
                *(float(row[n]) if row[n] else None for n in ("mean", "std")),
                row["note"],
            )
            for row in csv.DictReader(lines)
        ]
    assert found == wanted


def test_the_tables_that_each_paper_has() -> None:
    assert {name: list(tables.paper(name).tables) for name in PAPERS} == {
        "fedspa": ["1", "2", "3", "figure-4"],
        "fedgsp": ["II", "III", "IV", "V", "VI", "VII"],
        "fedhero": ["1", "3", "4", "5", "8", "9"],
        "s2fgl": ["1", "2"],
        "fedath": ["1", "2", "3", "4", "5", "6", "8", "9"],
    }


def test_protocols_are_sound(case: tuple[Paper, Table]) -> None:
    paper, table = case
    names = {entry.dataset for entry in table.entries}
    assert set(table.datasets) <= names
    for dataset in names:
        protocol = table.protocol_of(dataset)
        assert protocol.metric in METRICS
        assert protocol.view in VIEWS
        assert protocol.moment in MOMENTS
        assert protocol.over in MEANS
        assert protocol.normalize in NORMALIZATIONS
        assert set(protocol.marks) <= set(paper.marks)
        splits.parse_split(str(protocol.split))
        assert from_mapping(dict(protocol.settings)).backbone in BACKBONES


def test_figures_are_sound(case: tuple[Paper, Table]) -> None:
    paper, table = case
    for entry in table.entries:
        assert entry.partition in PARTITIONS
        assert entry.mean is None or entry.mean >= 0
        if entry.dataset != AVERAGE:
            DATASETS.find(entry.dataset.partition(":")[0])
        variant = paper.variant(entry.method)
        assert set(variant.marks) <= set(paper.marks)
        assert variant.method in plan.registered() | ABSENT | {AVERAGE}


def test_every_row_that_has_a_method_is_a_sound_run(case: tuple[Paper, Table]) -> None:
    paper, table = case
    for entry in table.entries:
        known = paper.variant(entry.method).method in plan.registered()
        if known and entry.dataset != AVERAGE:
            for job in plan.jobs(paper, table, entry, Choice(), ("paper", "default")).values():
                create(job.method, job.hyperparameters)
                from_mapping(job.settings)
                assert job.data["partition"] == "louvain-min" or job.data["clients"] > 0


def test_every_run_has_a_folder_of_its_own(case: tuple[Paper, Table]) -> None:
    _, table = case
    folders = [(safe_name(f.cell), safe_name(f.method)) for f in table.entries]
    assert len(set(folders)) == len(folders)


def test_every_row_that_is_explained_is_printed() -> None:
    for name in PAPERS:
        paper = tables.paper(name)
        printed = {entry.method for table in paper.tables.values() for entry in table.entries}
        assert set(paper.rows) <= printed


def test_names_of_methods_are_read_without_running_them() -> None:
    methods = METHODS.items()  # other tests may have registered some of their own
    own = {name for name, cls in methods if cls.__module__.startswith("polyphily.")}
    assert plan.registered() == own


def test_fedgsp_runs_with_its_authors_values() -> None:
    paper = tables.paper("fedgsp")
    table = paper.table("vi")
    rows = {f.method: f for f in table.entries if f.cell == "cora metis 5"}
    for form in ("paper", "default"):
        whole = plan.jobs(paper, table, rows["fedgsp"], Choice(), [form])[form]
        half = plan.jobs(paper, table, rows["fedgsp[sharing=off]"], Choice(), [form])[form]
        assert (whole.settings["lr"], whole.hyperparameters["sharing"]) == (0.149, 1.6)
        assert half.hyperparameters == {**whole.hyperparameters, "sharing": 0.0}


def test_rows_set_what_the_print_means_and_nothing_else() -> None:
    """The forms do the rest: a row never names a value that only one form has."""
    switches = {
        "fedspa": {"sfpd", "prior", "posterior"},
        "s2fgl": {"nlir", "fgma"},
        "fedath": {"use_entropy", "use_independence", "share"},
        "fedhero": {"learner", "dual_channel", "share", "latent"},
        "fedgsp": {"sharing", "complementing"},
    }
    for name, known in switches.items():
        assert {key for row in tables.paper(name).rows.values() for key in row.set} == known


def test_what_a_dataset_changes() -> None:
    fedspa, s2fgl = tables.paper("fedspa").table("1"), tables.paper("s2fgl").table("1")
    assert fedspa.protocol_of("arxiv-year").split == "0.05,0.475,0.475:client"
    assert fedspa.protocol_of("cora").split == "0.6,0.2,0.2:client"
    assert s2fgl.protocol_of("texas").settings["rounds"] == 100
    assert s2fgl.protocol_of("texas").settings["lr"] == s2fgl.protocol.settings["lr"]


def test_marks_of_rows_and_tables() -> None:
    paper = tables.paper("fedspa")
    table = paper.table("3")
    marks = {f.method: paper.marks_of(table, f) for f in table.entries}
    assert marks["fedspa"] == ["validation", "dropout", "labels", "order"]
    assert marks["fedspa[prior=off,posterior=on]"] == ["validation", "dropout", "labels"]
    assert marks["fedspa[sfpd=on,hbda=off]"] == ["validation", "dropout"]


def test_every_mark_is_used() -> None:
    for name in PAPERS:
        paper = tables.paper(name)
        pairs = [(t, f) for t in paper.tables.values() for f in t.entries]
        used = set(itertools.chain.from_iterable(paper.marks_of(t, f) for t, f in pairs))
        assert used == set(paper.marks)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'fedspa'"):
        tables.paper("fedsap")
    with pytest.raises(UserError, match="unknown table of fedgsp 'VIII': did you mean 'vii'"):
        tables.paper("fedgsp").table("VIII")


def test_files_are_toml_with_nothing_but_what_is_read() -> None:
    for name in PAPERS:
        text = resources.files("polyphily.papers").joinpath(f"{name}.toml").read_text("utf-8")
        data = tomllib.loads(text)
        assert set(data) <= {"paper", "cite", "protocol", "marks", "rows", "tables"}
        allowed = {"name", "title", "digits", "protocol", "datasets", "entries"}
        assert all(set(table) <= allowed for table in data["tables"])
