"""The command line: exit statuses, messages without a traceback, what is printed where."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import polyphily
from commands import Answer, Cli, caller
from polyphily.cli import main, terminal
from polyphily.core.method import METHODS
from polyphily.core.metrics import METRICS, register_metric
from polyphily.core.settings import Settings
from polyphily.graphs.datasets import DATASETS
from polyphily.graphs.partitions import PARTITIONS, Partition
from polyphily.nn.backbones import BACKBONES
from polyphily.registry import Registry
from polyphily.runs.folder import read_tensors

TINY = ["--dataset", "csbm:nodes=60,features=8", "--clients", "3"]
QUICK = [*TINY, "--rounds", "3", "--epochs", "1", "--backbone", "gcn", "--hidden", "8"]
DIVERGES = ["--optimizer", "sgd", "--lr", "1e4", "--weight-decay", "1", "--rounds", "50"]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command in this process, in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "200")
    return caller(tmp_path, monkeypatch, capsys)


def in_process_of_its_own(*arguments: str, cwd: Path) -> Answer:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def models(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "models").iterdir())}


def weights(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors of all models, without what the files say about the run."""
    files = sorted((folder / "models").iterdir())
    return {f.name: {n: t.tolist() for n, t in read_tensors(f)[0].items()} for f in files}


def assert_refused(answer: Answer, *words: str, status: int = 2) -> None:
    """Assert that there is one error message on standard error, and nothing else."""
    assert answer.status == status
    assert answer.out == ""
    message = answer.err[answer.err.index("error: ") :]
    assert message.count("error: ") == 1
    assert "Traceback" not in answer.err
    for word in words:
        assert word in message


# Help ------------------------------------------------------------------------------------------


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    script = """
import sys
from polyphily.cli import app
for name in ("", "run", "compare", "demo", "methods", "datasets", "partitions", "metrics"):
    try:
        app([*filter(None, [name]), "--help"])
    except SystemExit as stop:
        assert not stop.code, name
heavy = {"torch", "torch_geometric", "numpy", "scipy", "pandas", "sklearn", "networkx"}
print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
    answer = in_process_of_its_own("-c", script, cwd=tmp_path)
    assert answer.err.strip() == "[]"
    assert answer.out.count("Usage:") == 8


def test_every_setting_is_a_flag(cli: Cli) -> None:
    for command in ("run", "compare"):
        words = cli(command, "--help").out.replace(",", " ").split()
        for field in dataclasses.fields(Settings):
            assert f"--{field.name.replace('_', '-')}" in words
        for name in ("--dataset", "--partition", "--clients", "--split", "--normalize", "--out"):
            assert name in words


def test_without_a_command_there_is_a_welcome_and_the_version_is_told(cli: Cli) -> None:
    answer = cli()
    assert answer.status == 0
    commands = re.findall(r"^  (polyphily .*)$", answer.out, flags=re.MULTILINE)
    assert commands[0] == "polyphily demo"
    assert "polyphily --help" in answer.out
    assert len(answer.out.splitlines()) < 20
    assert cli("--version").out == f"polyphily {polyphily.__version__}\n"


def test_polyphony_is_run_unless_another_method_is_named(cli: Cli, tmp_path: Path) -> None:
    quick = [*TINY, "--rounds", "1", "--epochs", "1", "--hidden", "8", "--no-report"]
    answer = cli("run", *quick, "--json", "--out", str(tmp_path / "one"))
    assert json.loads(answer.out)["method"] == "polyphony"
    answer = cli("compare", *quick, "--json", "--out", str(tmp_path / "several"))
    assert answer.status == 0
    names = {path.name for path in (tmp_path / "several").iterdir() if path.is_dir()}
    assert {"local", "fedavg", "polyphony"} <= names


def test_words_are_taken_in_any_case(cli: Cli) -> None:
    words = ["--optimizer", "Adam", "--engine", "Stacked", "--device", "CPU", "--dp", "OFF"]
    words += ["--normalize", "Row", "--metric", "F1_Macro", "--memory", "Auto", "--backbone", "GCN"]
    summary = cli("run", "FedAvg", *QUICK, *words, "--json", "--no-report").json()
    assert (summary["backbone"], summary["selection"]["metric"]) == ("gcn", "f1_macro")


# Users' mistakes -------------------------------------------------------------------------------


MISTAKES = {
    "method": (["run", "fedavgg", *QUICK], ["unknown method 'fedavgg'", "'fedavg'?"]),
    "dataset": (["run", "fedavg", "--dataset", "cira"], ["unknown dataset 'cira'", "'cora'?"]),
    "option": (["run", "fedavg", "--dataset", "csbm:node=9"], ["node"]),
    "partition": (["run", "fedavg", *QUICK, "--partition", "louvian"], ["'louvain'?"]),
    "backbone": (["run", "fedavg", *QUICK, "--backbone", "gcnn"], ["'gcn'?"]),
    "bounds": (["run", "fedavg", *QUICK, "--lr", "0"], ["lr: 0.0 is out of bounds"]),
    "epochs": (["run", "fedavg", *QUICK, "--epochs", "3-1"], ["epochs: '3-1'"]),
    "engine": (["run", "fedavg", *QUICK, "--engine", "stack"], ["'stacked'?"]),
    "device": (["run", "fedavg", *QUICK, "--device", "tpu"], ["unknown device 'tpu'"]),
    "set": (["run", "fedprox", *QUICK, "--set", "mu"], ["--set mu: write name=value"]),
    "no name": (["run", "fedprox", *QUICK, "--set", "=1"], ["write name=value"]),
    "set name": (["run", "fedprox", *QUICK, "--set", "nu=1"], ["'nu'", "mu"]),
    "set value": (["run", "fedprox", *QUICK, "--set", "mu=big"], ["'mu' takes", "'big'"]),
    "split": (["run", "fedavg", *QUICK, "--split", "0.5,0.5"], ["cannot read split"]),
    "global split": (["run", "fedavg", *QUICK, "--split", "0.6,0.2,0.2:global"], ["one graph"]),
    "seeds": (["run", "fedavg", *QUICK, "--seeds", "a"], ["seeds: 'a'"]),
    "no seeds": (["run", "fedavg", *QUICK, "--seeds", ""], ["seeds: ''"]),
    "same seeds": (["run", "fedavg", *QUICK, "--seeds", "1,1"], ["different"]),
    "seeds twice": (["run", "fedavg", *QUICK, "--seeds", "0-2,1"], ["different"]),
    "a range to nowhere": (["run", "fedavg", *QUICK, "--seeds", "0-x"], ["0,1,2 or 0-4"]),
    "an empty range": (["run", "fedavg", *QUICK, "--seeds", "5-2"], ["smaller number first"]),
    "a negative seed": (["run", "fedavg", *QUICK, "--seeds", "-1"], ["0 or more"]),
    "normalize": (["run", "fedavg", *QUICK, "--normalize", "rows"], ["'row'?"]),
    "no config": (["run", "fedavg", "--config", "no.toml"], ["no configuration file no.toml"]),
    "folder": (["run", "fedavg", "--config", "."], ["cannot read ."]),
    "nothing there": (["run", "--resume", "nowhere"], ["nowhere holds no run"]),
    "resume and more": (["run", "--resume", "nowhere", "--lr", "1"], ["only --rounds"]),
    "no files": (["run", "fedavg", "--dataset", "./nowhere"], ["nowhere: no such file"]),
    "compare": (["compare", "fedavg", "fedavgg", *QUICK], ["'fedavg'?"]),
    "twice": (["compare", "fedavg", "FedAvg", *QUICK], ["named twice"]),
    "show": (["methods", "show", "fedavgg"], ["'fedavg'?"]),
    "dp": (["run", "fedavg", *QUICK, "--dp", "8"], ["as in epsilon=8"]),
    "noise": (["run", "fedavg", *QUICK, "--noise", "0.1"], ["write edges=0.1"]),
    "own graphs": (["run", "fedavg", "--dataset", "sitess"], ["give the path: ./sitess"]),
    "page": (["report", "r", "--out", "x.tex"], ["--out x.tex: the file must end in .html"]),
    "figure": (["plot", "ablation", "r", "--out", "x.doc"], [".pdf, .svg or .png"]),
    "table": (["compare", "fedavg", "--write", "x.doc", *QUICK], [".md, .csv or .tex"]),
    "study": (["study", "--no-run", "--write", "x.tex"], ["must end in .md"]),
    "bench": (["bench", "--write", "x.pdf"], ["must end in .md"]),
    "demo": (["demo", "--rounds", "0"], ["rounds: 0 is out of bounds"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_message(mistake: str, cli: Cli, tmp_path: Path) -> None:
    arguments, words = MISTAKES[mistake]
    assert_refused(cli(*arguments), *words)
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "fedavg", "--clients", "three"],
        ["run", "fedavg", "--no-such-flag"],
        ["run", "fedavg", "local"],
        ["frobnicate"],
        ["methods", "show"],
    ],
)
def test_what_does_not_parse_is_a_users_mistake(arguments: list[str], cli: Cli) -> None:
    answer = cli(*arguments)
    assert answer.status == 2
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert "Error" in answer.err


CONFIGS = {
    "syntax": ("rounds = ", "is not valid TOML"),
    "unknown": ("round = 3", "did you mean 'rounds'?"),
    "text for a number": ('rounds = "ten"', "'rounds' takes a whole number, not 'ten'"),
    "fraction": ("rounds = 2.5", "'rounds' takes a whole number, not 2.5"),
    "truth for a number": ("lr = true", "'lr' takes a number, not True"),
    "number for text": ("dataset = 3", "'dataset' takes text, not 3"),
    "number for a split": ("split = 0.6", "'split' takes text"),
    "text for clients": ('clients = "3"', "'clients' takes a whole number"),
    "list for epochs": ("epochs = [1, 2]", "'epochs' takes a whole number or text"),
    "text for truth": ('keep_optimizer = "yes"', "'keep_optimizer' takes true or false"),
    "number for a table": ("set = 3", "'set' takes a table"),
    "no seeds": ("seeds = []", "seeds: '[]'"),
    "seeds": ('seeds = [0, "x"]', "seeds:"),
    "bounds": ("rounds = 0", "rounds: 0 is out of bounds"),
    "hyperparameter": ("[set]\nmuh = 1", "unknown hyperparameter of fedavg 'muh'"),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_a_mistake_in_a_file_is_told(mistake: str, cli: Cli, tmp_path: Path) -> None:
    text, words = CONFIGS[mistake]
    (tmp_path / "mine.toml").write_text(text)
    dataset = [] if "dataset" in text else TINY[:2]
    assert_refused(cli("run", "fedavg", "--config", "mine.toml", *dataset), words)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.toml"]


def test_a_file_that_is_not_text_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    assert_refused(cli("run", "fedavg", "--config", "mine.toml"), "cannot read mine.toml")


def test_data_that_are_not_there_are_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(tmp_path / "data"))
    assert_refused(cli("run", "fedavg", "--dataset", "credit"), "credit", str(tmp_path / "data"))
    (tmp_path / "sites" / "north").mkdir(parents=True)
    (tmp_path / "sites" / "north" / "nodes.csv").write_text("id,label,x\na,0,1\n")
    assert_refused(cli("run", "fedavg", "--dataset", "./sites"), "no edges.csv")
    (tmp_path / "sites" / "north" / "edges.csv").write_text("source,target\na,b\n")
    assert_refused(cli("run", "fedavg", "--dataset", "./sites"), "edges.csv", "line 2", "'b'")
    assert not (tmp_path / "runs").exists()


@pytest.mark.data
def test_more_clients_than_nodes_are_refused(
    cli: Cli, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    answer = cli("run", "fedavg", "--dataset", "cora", "--clients", "5000")
    assert_refused(answer, "5000 clients", "2708 nodes")


def test_a_process_ends_with_the_status_of_its_mistake(tmp_path: Path) -> None:
    answer = in_process_of_its_own("-m", "polyphily", "run", "fedavgg", cwd=tmp_path)
    assert_refused(answer, "unknown method 'fedavgg': did you mean 'fedavg'?")


def test_a_folder_that_holds_a_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "fedavg", *QUICK, "--out", "mine").status == 0
    before = models(tmp_path / "mine")
    assert_refused(
        cli("run", "local", *QUICK, "--out", "mine"), "holds a run already", "--resume mine"
    )
    assert models(tmp_path / "mine") == before
    (tmp_path / "file").write_text("")
    assert_refused(cli("run", "local", *QUICK, "--out", "file"), "cannot write to file")


# Failures --------------------------------------------------------------------------------------


def test_a_run_that_diverges_keeps_the_last_good_models(cli: Cli, tmp_path: Path) -> None:
    flags = [*QUICK, *DIVERGES]
    answer = cli("run", "fedavg", *flags, "--out", "failed")
    assert_refused(answer, "not finite", "--lr", status=1)
    good = len((tmp_path / "failed" / "metrics.jsonl").read_text().splitlines())
    assert good > 1
    assert f"round {good + 1}:" in answer.err
    assert cli("run", "fedavg", *flags, "--rounds", str(good), "--out", "good").status == 0
    failed, fine = (weights(tmp_path / name) for name in ("failed", "good"))
    assert failed == fine != {}


def test_a_process_whose_run_fails_at_once_ends_with_status_1(tmp_path: Path) -> None:
    flags = [*QUICK, "--optimizer", "sgd", "--lr", "1e30", "--epochs", "3", "--out", "failed"]
    answer = in_process_of_its_own("-m", "polyphily", "run", "fedavg", *flags, cwd=tmp_path)
    assert_refused(answer, "not finite", status=1)
    assert models(tmp_path / "failed") == {}


def test_a_failure_of_ours_is_told_without_a_traceback_unless_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("no more [bold]luck[/bold]")

    monkeypatch.setattr("polyphily.graphs.prepared.load_seeds", broken)
    answer = cli("run", "fedavg", *QUICK)
    assert_refused(answer, "ZeroDivisionError: no more [bold]luck[/bold]", status=1)
    assert "POLYPHILY_DEBUG=1" in answer.err
    monkeypatch.setenv("POLYPHILY_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main()


def test_where_memory_runs_out_the_answer_says_what_needs_less(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has …")

    monkeypatch.setattr("polyphily.graphs.prepared.load_seeds", greedy)
    answer = cli("run", "fedavg", *QUICK)
    assert_refused(answer, "no memory left. CUDA out of memory.", status=1)
    assert "--memory" in answer.err
    assert "Tried" not in answer.err


# What is printed -------------------------------------------------------------------------------


def test_a_run_tells_its_outcome(cli: Cli, tmp_path: Path) -> None:
    answer = cli("run", "fedavg", *QUICK, "--out", "mine")
    assert answer.status == 0
    assert "note: synthetic: homophily 0.1 to 0.9" in answer.err
    assert "run folder: mine" in answer.out
    assert "fedavg on csbm:nodes=60,features=8, 3 clients (natural)" in answer.out
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    for view in ("received", "trained"):
        for moment in ("final", "last5", "best_val"):
            scores = summary["views"][view][moment]
            cells = [f"{100 * scores[split]['accuracy']:.2f}" for split in ("val", "test")]
            assert "".join(cells) in "".join(answer.out.split())


def test_json_is_one_object_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    answer = cli("run", "fedavg", *QUICK, "--json", "--out", "mine")
    assert answer.status == 0
    assert answer.out.count("\n") == 1
    assert json.loads(answer.out) == json.loads((tmp_path / "mine" / "summary.json").read_text())
    resumed = cli("run", "--resume", "mine", "--json")
    assert json.loads(resumed.out)["final"] == json.loads(answer.out)["final"]


def test_the_process_prints_json_and_nothing_else(tmp_path: Path) -> None:
    flags = [*QUICK, "--seeds", "0,1", "--json"]
    answer = in_process_of_its_own("-m", "polyphily", "run", "local", *flags, cwd=tmp_path)
    assert answer.status == 0
    summary = json.loads(answer.out)
    assert [run["seed"] for run in summary["per_seed"]] == [0, 1]
    assert "accuracy_std" in summary["final"]["test"]
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-local-csbm")


def test_runs_without_a_folder_of_their_own_do_not_meet(cli: Cli, tmp_path: Path) -> None:
    for _ in range(3):
        assert cli("run", "fedavg", *QUICK, "--rounds", "1").status == 0
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 3
    assert all((folder / "summary.json").exists() for folder in folders)


@pytest.mark.parametrize("name", ["a[bold]b", "a[/b]"])
def test_brackets_in_names_are_no_markup(name: str, cli: Cli, tmp_path: Path) -> None:
    for k in range(2):
        site = tmp_path / "d[red]" / f"site-{k}"
        site.mkdir(parents=True)
        rows = "".join(f"{i},{i % 2},{(i + k) % 3}\n" for i in range(12))
        (site / "nodes.csv").write_text("id,label,x\n" + rows)
        (site / "edges.csv").write_text("source,target\n0,1\n1,2\n")
        (site / "e[green].txt").write_text("")
    flags = ["--dataset", "./d[red]", "--rounds", "1"]
    answer = cli("run", "local", *flags, "--out", name)
    assert answer.status == 0, answer.err
    assert f"run folder: {name}" in answer.out
    assert "d[red]" in answer.out
    assert "e[green].txt" in answer.err
    assert cli("compare", "local", *flags, "--out", f"{name}-2").status == 0


def test_a_terminal_sees_the_rounds_go_by(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=screen, force_terminal=True, width=100))
    assert cli("run", "fedavg", *QUICK).status == 0
    assert "3/3" in screen.getvalue()
    assert "val accuracy" in screen.getvalue()


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_scores_that_do_not_exist_are_dashes(metric: str, cli: Cli, tmp_path: Path) -> None:
    """Every test node is of one class, and there is no validation node."""
    for k in range(2):
        site = tmp_path / "sites" / f"site-{k}"
        site.mkdir(parents=True)
        rows = [f"{i},{i % 2},train,{(i + k) % 3}" for i in range(8)]
        rows += [f"{i},0,test,{(i + k) % 3}" for i in range(8, 12)]
        (site / "nodes.csv").write_text("\n".join(["id,label,split,x", *rows]) + "\n")
        (site / "edges.csv").write_text("source,target\n0,1\n1,2\n")
    flags = ["--dataset", "./sites", "--rounds", "2", "--metric", metric]
    answer = cli("run", "fedavg", *flags, "--seeds", "0,1")
    assert answer.status == 0, answer.err
    answer = cli("compare", "fedavg", "local", *flags)
    assert answer.status == 0, answer.err
    row = next(line for line in answer.out.splitlines() if line.startswith("fedavg "))
    assert (row.split()[1] == "–") == (metric == "auc")


# Listings --------------------------------------------------------------------------------------

LISTINGS = {
    "methods": lambda: METHODS.keys(),
    "datasets": lambda: DATASETS.keys(),
    "partitions": lambda: PARTITIONS.keys(),
    "backbones": lambda: BACKBONES.keys(),
    "metrics": lambda: METRICS.keys(),
}


@pytest.mark.parametrize("listing", LISTINGS)
def test_listings_name_everything_there_is(listing: str, cli: Cli) -> None:
    names = set(LISTINGS[listing]())
    plain, data = cli(listing), cli(listing, "--json")
    assert (plain.status, data.status) == (0, 0)
    assert names <= set(plain.out.split())
    rows = json.loads(data.out)
    assert {row["name"] for row in rows} == names
    assert all(row.get("summary", row.get("title")) for row in rows)
    assert plain.err == data.err == ""


def test_metrics_tells_what_they_need_and_whether_they_select(cli: Cli) -> None:
    with METRICS.restored():
        register_metric("theirs", title="Their own", selects=False)(METRICS["accuracy"].function)
        rows = {row["name"]: row for row in json.loads(cli("metrics", "--json").out)}
        assert (rows["auc"]["classes"], rows["auc"]["selects"]) == (None, True)
        assert rows["theirs"] == {
            "name": "theirs",
            "title": "Their own",
            "summary": rows["accuracy"]["summary"],
            "classes": None,
            "selects": False,
        }
        lines = cli("metrics").out.splitlines()
    row = next(line for line in lines if line.startswith("theirs "))
    assert row.split()[-2:] == ["any", "no"]


# Plug-ins --------------------------------------------------------------------------------------

PLUGINS: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "backbones": BACKBONES,
    "metrics": METRICS,
}


def install(monkeypatch: pytest.MonkeyPatch, registry: Registry[Any], load: Any) -> None:
    """Make a package 'acme' with one plug-in appear as installed and not loaded yet."""
    point = SimpleNamespace(name="mine", load=load, dist=SimpleNamespace(name="acme"))
    monkeypatch.setattr(
        "polyphily.registry.entry_points",
        lambda *, group: [point] if group == registry.group else [],
    )
    monkeypatch.setattr(registry, "_loaded", False)


@pytest.mark.parametrize("listing", PLUGINS)
def test_listings_name_plug_ins(listing: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = PLUGINS[listing]
    entry = next(iter(registry.values()))
    if listing == "datasets":
        entry = dataclasses.replace(entry, name="theirs")
    with registry.restored():
        install(monkeypatch, registry, lambda: registry.add("theirs", entry))
        answer = cli(listing)
        assert (answer.status, answer.err) == (0, "")
        assert "theirs" in answer.out.split()
        assert "theirs" in [row["name"] for row in json.loads(cli(listing, "--json").out)]


@pytest.mark.parametrize("listing", PLUGINS)
def test_a_broken_plug_in_is_one_line_on_standard_error(
    listing: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ImportError("no module named '[bold]jax[/bold]'\nfor a long reason " + 200 * "x")

    registry = PLUGINS[listing]
    with registry.restored():
        install(monkeypatch, registry, fail)
        shown = warnings.showwarning
        answer = cli(listing, "--json")
        again = cli(listing)
    assert warnings.showwarning is shown
    assert (answer.status, again.status, again.err) == (0, 0, "")
    assert answer.err == (
        f"warning: {registry.kind} plug-in 'mine' of the package 'acme' is skipped: "
        "ImportError: no module named '[bold]jax[/bold]'\n"
    )
    assert json.loads(answer.out)


def test_other_warnings_are_shown_as_python_shows_them(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn() -> None:
        warnings.warn("beware", UserWarning, stacklevel=1)

    with METHODS.restored():
        install(monkeypatch, METHODS, warn)
        with pytest.warns(UserWarning, match="beware"):
            assert cli("methods").err == ""


def test_datasets_tells_which_files_are_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(tmp_path / "data"))
    rows = {row["name"]: row for row in json.loads(cli("datasets", "--json").out)}
    assert [name for name, row in rows.items() if row["present"]] == ["csbm", "payments"]
    for file in DATASETS["amazon-photo"].parts[""].files:
        (tmp_path / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / file).touch()
    rows = {row["name"]: row for row in json.loads(cli("datasets", "--json").out)}
    present = ["amazon-photo", "csbm", "payments"]
    assert [name for name, row in rows.items() if row["present"]] == present
    assert rows["cora"]["nodes"] == 2708
    assert str(tmp_path / "data") in cli("datasets").out


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_is_shown(name: str, cli: Cli) -> None:
    method = METHODS[name]
    plain, data = cli("methods", "show", name.upper()), cli("methods", "show", name, "--json")
    assert (plain.status, data.status) == (0, 0)
    facts = json.loads(data.out)
    assert facts["name"] == name
    assert facts["citation"] == method.cite
    assert {p["name"]: p["default"] for p in facts["hyperparameters"]} == {
        key: field.default for key, field in method.hyperparameters().items()
    }
    for parameter in facts["hyperparameters"]:
        assert parameter["name"] in plain.out
        assert all(choice in plain.out for choice in parameter["choices"])
        if parameter["paper"] is not None:
            assert f"paper: {parameter['paper']}" in plain.out
    for row in (*facts["uploaded"], *facts["downloaded"]):
        assert f"    {row['name']}  " in plain.out
        assert row["shape"] in plain.out
        assert row["meaning"] in plain.out
    refusal = facts["secure_aggregation"]["why_not"]
    assert refusal is None or plain.out.count(refusal) == 1
    for fact, reason in (("sampling", method().needs_whole_graph()), ("on_disk", None)):
        found = facts[fact]["why_not"]
        assert facts[fact]["possible"] is (found is None)
        assert found is None or " ".join(found.split()) in " ".join(plain.out.split())
        assert reason is None or found == reason
    assert bool(facts["uploaded"]) == (name != "local")
    assert plain.out.startswith(name)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_fits_a_narrow_terminal(
    name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer, data = cli("methods", "show", name), cli("methods", "show", name, "--json")
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    for row in (*json.loads(data.out)["uploaded"], *json.loads(data.out)["downloaded"]):
        assert f"    {row['name']}  " in answer.out


# Configuration files ---------------------------------------------------------------------------


def test_the_config_of_a_run_runs_again_to_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    flags = [*QUICK, "--seeds", "3,1", "--set", "mu=0.2", "--participation", "0.7"]
    flags += ["--split", "0.5,0.2,0.3:client", "--epochs", "1-2", "--normalize", "standard"]
    assert cli("run", "fedprox", *flags, "--out", "first").status == 0
    answer = cli("run", "--config", "first/config.toml", "--out", "second", "--json")
    assert answer.status == 0
    assert models(tmp_path / "first") == models(tmp_path / "second")
    texts = [(tmp_path / run / "config.toml").read_text() for run in ("first", "second")]
    assert texts[0] == texts[1]
    config = tomllib.loads(texts[0])
    assert config["set"]["mu"] == 0.2
    assert config["seeds"] == [3, 1]


def test_flags_win_over_the_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'method = "fedprox"\ndataset = "csbm:nodes=60,features=8"\nclients = 3\nseed = 4\n'
        "rounds = 2\nepochs = 1\nweight-decay = 0.01\nlr = 1\n[set]\nmu = 0.5\n"
    )
    first = json.loads(cli("run", "--config", "mine.toml", "--json").out)
    assert first["method"] == "fedprox"
    assert (first["rounds"], first["seeds"]) == (2, [4])
    assert (first["settings"]["weight_decay"], first["settings"]["lr"]) == (0.01, 1)
    assert first["hyperparameters"]["mu"] == 0.5
    over = ["--rounds", "3", "--seeds", "1,2", "--set", "mu=0.25", "--lr", "0.1"]
    second = json.loads(cli("run", "--config", "mine.toml", *over, "--json").out)
    assert (second["rounds"], second["seeds"]) == (3, [1, 2])
    assert second["hyperparameters"]["mu"] == 0.25
    assert (second["settings"]["weight_decay"], second["settings"]["lr"]) == (0.01, 0.1)
    (tmp_path / "plain.toml").write_text('method = "fedavg"\nrounds = 1\ndataset = "csbm:nodes=30"')
    third = json.loads(cli("run", "local", "--config", "plain.toml", "--json").out)
    assert third["method"] == "local"


@pytest.mark.parametrize("masks", [True, False])
def test_a_partition_file_beside_the_config_is_found(masks: bool, cli: Cli, tmp_path: Path) -> None:
    federation = polyphily.load("csbm:nodes=60,features=8", clients=3, seed=9)
    folder = tmp_path / "shelf"
    folder.mkdir()
    if masks:
        federation.partition.save(folder / "mine.npz")
    else:
        nodes = [np.arange(60) + 60 * k for k in range(3)]
        Partition.of("natural", nodes).save(folder / "mine.npz")
    (folder / "mine.toml").write_text(
        'method = "fedavg"\ndataset = "csbm:nodes=60,features=8"\nclients = 3\nrounds = 1\n'
        'seeds = [0, 1]\npartition = "mine.npz"\n'
    )
    first = json.loads(cli("run", "--config", "shelf/mine.toml", "--out", "a", "--json").out)
    same = federation.partition.sha256
    assert first["partition"]["sha256_per_seed"].count(same) == (2 if masks else 0)
    again = json.loads(cli("run", "--config", "a/config.toml", "--out", "b", "--json").out)
    assert again["partition"] == first["partition"]
    assert models(tmp_path / "a") == models(tmp_path / "b")


# Several methods -------------------------------------------------------------------------------


def test_methods_are_set_side_by_side(cli: Cli, tmp_path: Path) -> None:
    answer = cli("compare", "local", "FedAvg", "moon", *QUICK, "--out", "mine")
    assert answer.status == 0
    rows = [line.split() for line in answer.out.splitlines()]
    shown: dict[str, str] = {}
    for row in rows:  # the table comes first; its legend may begin a line with the word "local"
        if row and row[0] in ("local", "fedavg", "moon"):
            shown.setdefault(row[0], row[1])
    assert list(shown) == ["local", "fedavg", "moon"]
    for name, value in shown.items():
        summary = json.loads((tmp_path / "mine" / name / "summary.json").read_text())
        assert value == f"{100 * summary['best_val']['test']['accuracy']:.2f}"
    hashes = {
        json.loads((tmp_path / "mine" / name / "summary.json").read_text())["partition"]["sha256"]
        for name in shown
    }
    assert len(hashes) == 1
    assert cli("run", "moon", *QUICK, "--out", "alone").status == 0
    assert models(tmp_path / "mine" / "moon") == models(tmp_path / "alone")


def test_a_comparison_as_json_is_one_object(cli: Cli, tmp_path: Path) -> None:
    answer = cli("compare", "fedavg", "local", *QUICK, "--seeds", "0,1", "--json")
    found = json.loads(answer.out)
    assert list(found) == ["fedavg", "local"]
    [folder] = (tmp_path / "runs").iterdir()
    for name, summary in found.items():
        assert summary == json.loads((folder / name / "summary.json").read_text())


def test_the_full_demonstration_runs(cli: Cli, tmp_path: Path) -> None:
    answer = cli("demo", "--full", "--rounds", "2", "--json", "--out", "demo")
    assert answer.status == 0
    found: dict[str, Any] = json.loads(answer.out)
    assert list(found)[:3] == ["local", "fedavg", "fedprox"]
    assert set(found) >= {"fedspa", "fedgsp", "fedhero", "s2fgl", "fedath"}
    for summary in found.values():
        assert summary["rounds"] == 2
        assert summary["partition"]["clients"] == 10
    files = {"report.html", "board.md", "board.json"}
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {*found, *files}


def test_without_a_report_nothing_is_recorded_for_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --no-report the module that gathers what a page shows is not even imported."""
    monkeypatch.delitem(sys.modules, "polyphily.report.evidence", raising=False)
    assert cli("run", "fedavg", *QUICK, "--no-report", "--out", "run").status == 0
    assert "polyphily.report.evidence" not in sys.modules
    assert not (tmp_path / "run" / "collaboration.jsonl").exists()


def test_seeds_may_be_a_range() -> None:
    from polyphily.cli.options import gather

    assert gather(None, {"seeds": "0-2,5"}, [], None).seeds == [0, 1, 2, 5]


# Rare classes ----------------------------------------------------------------------------------

RARE = ["--dataset", "csbm:nodes=300,features=6,positives=0.05", "--clients", "2", "--rounds", "2"]


def test_a_rare_class_is_scored_by_auprc_beside_its_baseline(cli: Cli, tmp_path: Path) -> None:
    more = ["--hidden", "8", "--no-report", "--out", str(tmp_path / "run")]
    answer = cli("run", "fedavg", *RARE, *more)
    assert answer.status == 0
    assert answer.out.index("auprc in %") < answer.out.index("accuracy in %")
    words = " ".join(answer.out.split())
    assert answer.out.count("\nmajority  ") == 1
    assert answer.out.count("\nrandom  ") == 1
    assert "majority: each client's most frequent class for all its nodes" in words
    assert "random: nodes ranked by chance" in words
    assert "'+1' has 5.0 % of the train labels: the best round is chosen by auprc" in words
    assert "Chosen on the validation nodes of all clients: temperature" in words


def test_metrics_and_rules_are_taken_as_users_write_them(cli: Cli, tmp_path: Path) -> None:
    more = ["--hidden", "8", "--no-report", "--json", "--out", str(tmp_path / "run")]
    asked = ["--metric", "recall@precision=0.5", "--threshold-rule", "precision=0.5"]
    chosen = ["--class-weights", "balanced", "--loss", "focal=1", "--positive", "-1"]
    answer = cli("run", "fedavg", *RARE, *more, *asked, *chosen)
    assert answer.status == 0
    summary = json.loads(answer.out)
    assert summary["selection"]["metric"] == "recall_at_precision_0.5"
    assert summary["decision"]["pooled"]["positive"] == "-1"
    assert cli("run", "fedavg", *RARE, *more, "--threshold-rule", "often").status == 2
    assert cli("run", "fedavg", *RARE, *more, "--positive", "fraud").status == 2
