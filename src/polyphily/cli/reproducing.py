"""`polyphily reproduce`: the tables and figures of a paper, beside what it printed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from polyphily.cli import completion, options, sheets, training
from polyphily.cli.jobs import Jobs, train_ahead
from polyphily.core.settings import from_mapping
from polyphily.errors import PolyphilyError, UserError, unknown
from polyphily.papers import contents, pages, plan, report, tables
from polyphily.papers.exhibits import RUNS, Exhibit, Made, Wanted
from polyphily.papers.plan import DEFAULT, FORMS, Choice
from polyphily.papers.report import Line, Result
from polyphily.papers.tables import Entry, Paper, Table

FAILED = "failed"
BOTH = ("paper", DEFAULT)


@dataclass(frozen=True)
class Task:
    """The user's request.

    Attributes:
        paper: the paper.
        choice: the cells, seeds, rounds and device.
        forms: the forms to run.
        given: hyperparameters of the paper's method that the user set.
        out: the folder of runs and files.
        jobs: how many runs train at once.
    """

    paper: Paper
    choice: Choice
    forms: tuple[str, ...]
    given: Mapping[str, Any]
    out: Path
    jobs: int = 1


def add_to(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    paper: Annotated[
        str | None,
        typer.Argument(
            help="The paper: fedspa, fedgsp, fedhero, s2fgl, fedath.",
            autocompletion=completion.words(tables.PAPERS),
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List tables and figures with their state, and exit.")
    ] = False,
    table: Annotated[
        str | None,
        typer.Option("--table", help="The number of one table; all tables of scores unless given."),
    ] = None,
    figure: Annotated[
        str | None, typer.Option("--figure", help="The number of a figure to draw: 2b.")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--form",
            help="Forms of the methods: paper, default, code (that of the authors' code), "
            "several as in paper,code, or both (paper,default).",
        ),
    ] = "both",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A hyperparameter of the paper's method, name=value; repeat for more."
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", help="Cells: cora,texas or 'cora 10,louvain 5'.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Rows: fedavg,fedspa.")] = None,
    clients: Annotated[str | None, typer.Option("--clients", help="Numbers: 5,10.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", "--seed", help="Seeds: 0,1,2; unless given, as many as the paper."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Rounds, instead of the paper's.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"Try with one seed and {plan.QUICK_ROUNDS} rounds."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for runs and tables. [dim]\\[reproduce/…][/dim]"),
    ] = None,
    write: Annotated[
        list[Path] | None,
        typer.Option("--write", help="Write the result to a file, .md, .csv or .tex; repeatable."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="Write the paper's page from the results in --out, and exit."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    partitions: Annotated[
        Path | None,
        typer.Option("--partitions", help="Folder of partition files; missing ones are written."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Write the partition files of tables, and exit.")
    ] = False,
    jobs: Jobs = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run a paper's tables and figures again, beside what it printed.

    Methods run in the paper's form and in this library's default form. Finished runs are not
    repeated, so a command that was stopped can be started again.
    """
    if list_ or paper is None:
        _list(paper, as_json)
        return
    source = tables.paper(paper)
    folder = out or Path("reproduce") / source.name
    if page is not None:
        options.check_output("--page", page, (".md",))
        _write_page(source, folder, page)
        return
    if table and figure:
        raise UserError("--table and --figure: give one of them")
    sheets.check_files(write or [])
    choice = Choice(
        datasets=_names(only),
        methods=_names(methods),
        clients=_numbers("clients", clients),
        seeds=None if seeds is None else tuple(_seeds(seeds)),
        rounds=rounds,
        quick=quick,
        device=device,
        partitions=partitions,
    )
    from_mapping({"device": device} | ({} if rounds is None else {"rounds": rounds}))
    name = table or figure
    item = contents.find_item(source, name, figure=bool(figure)) if name else None
    scores = item.table if item and (table or not item.exhibit) else None
    if item is None or scores:
        plan.check_choice(source, [scores] if scores else [*source.tables.values()], choice)
    _check_device(device)
    given = options.gather(None, {}, set_ or [], None).hyperparameters
    task = Task(source, choice, _forms(form), given, folder, jobs)
    plan.check_forms(source, task.forms, given)
    if prepare:
        _prepare(task, item, [scores] if scores else [*source.tables.values()])
    elif item and item.exhibit and not scores:
        if jobs > 1:
            raise UserError("--jobs is for tables of scores: leave it out for figures")
        _exhibit(task, item.exhibit, write or [], as_json)
    else:
        _scores(task, [scores] if scores else [*source.tables.values()], write or [], as_json)


# Tables of scores ---------------------------------------------------------------------------------


def _scores(task: Task, wanted: Sequence[Table], write: Sequence[Path], as_json: bool) -> None:
    results = [_reproduce(task, table) for table in wanted]
    results = [result for result in results if result["rows"]]
    if not results:
        raise UserError(
            "no cell is asked for: no cell fits --table, --only, --methods and --clients together"
        )
    for file in write:
        sheets.write(file, sheets.scores_as(file.suffix.lower(), results))
    if as_json:
        typer.echo(json.dumps(results if len(wanted) > 1 else results[0], indent=2))
    else:
        for i, result in enumerate(results):
            Console().print("\n" * min(i, 1), end="")
            sheets.print_scores(result)
    if any(row["failed"] for result in results for row in result["rows"]):
        raise typer.Exit(1)


def _reproduce(task: Task, table: Table) -> dict[str, Any]:
    """Run a table's cells, and write the files after every row so that a kill loses none."""
    before = report.read_lines(table, task.out)
    lines: list[Line] = []
    for line in _run_lines(task, table, before):
        lines.append(line)
        if line.results:
            _write(task, table, report.merge(table, before, lines))
    if lines:
        _write(task, table, report.merge(table, before, lines))
    return report.as_data(task.paper, table, lines, task.forms)


def _write(task: Task, table: Table, lines: Sequence[Line]) -> None:
    known = {*task.forms, *(form for line in lines for form in line.results)}
    data = report.as_data(task.paper, table, lines, [form for form in FORMS if form in known])
    file = task.out / report.stem_of(table.name)
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    sheets.write(file.with_name(f"{file.name}.json"), text)
    sheets.write(file.with_name(f"{file.name}.md"), report.as_markdown(data))


def _run_lines(task: Task, table: Table, before: Sequence[Line]) -> Iterator[Line]:
    """Run the selected entries; results of the same request in `before` are used again."""
    from polyphily.papers import runner

    known = {r.key: r for line in before for r in line.results.values()}
    _train_ahead(task, table, known)
    finished = runner.finished_runs(task.out)

    def run(job: plan.Job) -> Result:
        key = plan.key_of(job.request())
        if key not in known:
            known[key] = _run(job, finished.get(key) or runner.folder_of(task.out, table.name, job))
        return known[key]

    for entry in plan.select(task.paper, table, task.choice):
        reason = plan.obstacle(task.paper, entry)
        yield Line(entry, skipped=reason) if reason else _run_line(task, table, entry, run)


def _train_ahead(task: Task, table: Table, known: Collection[str]) -> None:
    """With `--jobs`, train the runs of a table whose results are not known in several processes."""
    from polyphily.papers import runner

    finished = runner.finished_runs(task.out)
    orders: dict[str, tuple[Path, plan.Job]] = {}
    for entry in plan.select(task.paper, table, task.choice) if task.jobs > 1 else ():
        if plan.obstacle(task.paper, entry) is not None:
            continue
        jobs = plan.jobs(task.paper, table, entry, task.choice, task.forms, task.given)
        for job in jobs.values():
            key = plan.key_of(job.request())
            if key not in known and key not in finished:
                orders.setdefault(key, (runner.folder_of(task.out, table.name, job), job))
    train_ahead(dict(orders.values()), task.jobs, report=False)


def _run_line(task: Task, table: Table, entry: Entry, run: Callable[[plan.Job], Result]) -> Line:
    """Run an entry in each form."""
    results, failed = {}, {}
    jobs = plan.jobs(task.paper, table, entry, task.choice, task.forms, task.given)
    for form, job in jobs.items():
        try:
            result = run(job)
        except PolyphilyError as error:
            failed[form] = str(error)
            continue
        own = task.given if job.method == task.paper.name else {}
        changed = tuple(report.changes(job.protocol, task.choice))
        results[form] = replace(result, changed=changed, set=own)
    reason = None if results else f"{FAILED}: {'; '.join(dict.fromkeys(failed.values()))}"
    return Line(entry, results, reason, failed)


def _run(job: plan.Job, folder: Path) -> Result:
    """Run a job in a folder, or read its result there."""
    from polyphily.papers import runner

    if not runner.is_finished(job, folder):
        what = f"{job.entry.cell}, {job.entry.method}, {FORMS[job.form]}"
        Console(stderr=True, highlight=False).print(f"[dim]{escape(what)}[/dim]", soft_wrap=True)
    summary = runner.run(job, folder, training.train)
    mean, std = runner.outcome(job, summary)
    return Result(
        mean,
        std,
        job.seeds,
        job.request(),
        remark=runner.remark(job, summary),
        device=summary["device"],
        folder=str(folder),
    )


def _prepare(task: Task, item: contents.Item | None, wanted: Sequence[Table]) -> None:
    """Write the partition files of the selected cells, for machines without the partitioners."""
    from polyphily.papers import runner

    if task.choice.partitions is None:
        raise UserError("--prepare writes partition files: name their folder with --partitions")
    if item and not item.table:
        raise UserError(
            "--prepare is for tables of scores: for a figure, run it once with --rounds 1, the "
            "same --seeds and another --out; its partition files are then written"
        )
    for table in wanted:
        for entry in plan.select(task.paper, table, task.choice):
            if plan.obstacle(task.paper, entry) is None:
                [job] = plan.jobs(task.paper, table, entry, task.choice).values()
                runner.federations_of(job)


# Figures and computed tables ----------------------------------------------------------------------


def _exhibit(task: Task, exhibit: Exhibit, write: Sequence[Path], as_json: bool) -> None:
    """Make a figure or a computed table, print its numbers, and write its files."""
    title = f"{task.paper.name}, {report.title_of(exhibit.name)}: {exhibit.title}"
    if exhibit.make is None or not exhibit.state().startswith(RUNS):
        raise UserError(f"{title}: {exhibit.state()}")
    wanted = Wanted(task.choice.by_name(), task.forms, task.given, task.out, training.train)
    made = exhibit.make(wanted)
    data = {
        "paper": task.paper.name,
        "exhibit": exhibit.name,
        "title": exhibit.title,
        "forms": list(task.forms),
        "changed": _changes(task),
        "grids": [
            {"title": g.title, "columns": list(g.columns), "rows": [list(r) for r in g.rows]}
            for g in made.grids
        ],
        "notes": list(made.notes),
    }
    files = [str(file) for file in _write_exhibit(task.out, exhibit, made, data)]
    for file in write:
        sheets.write(file, sheets.grids_as(file.suffix.lower(), title, made.grids, made.notes))
    if as_json:
        typer.echo(json.dumps(data | {"files": files}, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{escape(title)}[/bold]\n")
    sheets.print_grids(made.grids)
    sheets.print_notes(made.notes)
    for path in files:
        console.print(escape(path), soft_wrap=True)


def _changes(task: Task) -> list[str]:
    """List what the user changed, for an exhibit, whose protocol only its notes know."""
    choice = task.choice
    return [
        *(["a quick look"] if choice.quick else []),
        *([f"seeds {', '.join(map(str, choice.seeds))}"] if choice.seeds else []),
        *([f"{choice.all_rounds} rounds"] if choice.all_rounds is not None else []),
        *([f"{task.paper.name} with {report.assignments(task.given)}"] if task.given else []),
    ]


def _write_exhibit(out: Path, exhibit: Exhibit, made: Made, data: Mapping[str, Any]) -> list[Path]:
    """Write drawings and numbers; return the files."""
    from polyphily.report import style
    from polyphily.report.grids import to_csv

    stem = report.stem_of(exhibit.name)
    found = []
    if made.draw is not None:
        drawing = made.draw()
        found = [out / f"{stem}{suffix}" for suffix in (".svg", ".png")]
        for file in found:
            style.save(drawing, file)
    for i, grid in enumerate(made.grids, 1):
        found.append(out / f"{stem}{f'-{i}' if len(made.grids) > 1 else ''}.csv")
        sheets.write(found[-1], to_csv([grid]))
    found.append(out / report.numbers_file(exhibit.name))
    sheets.write(found[-1], json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    return found


# The page and the list ----------------------------------------------------------------------------


def _write_page(paper: Paper, folder: Path, file: Path) -> None:
    """Write a paper's page and, beside it, the drawings that it shows."""
    made = pages.page(paper, folder)
    sheets.write(file, made.text)
    for link, source in made.drawings.items():
        target = file.parent / link
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    typer.echo(str(file))


def _list(name: str | None, as_json: bool) -> None:
    papers = [tables.paper(each) for each in (tables.PAPERS if name is None else (name,))]
    found = {paper.name: contents.contents(paper) for paper in papers}
    if as_json:
        rows = [contents.as_row(paper, i) for paper in papers for i in found[paper.name]]
        typer.echo(json.dumps(rows, indent=2))
        return
    for paper in papers:
        sheets.print_contents(paper, found[paper.name])
    everything = [item for items in found.values() for item in items]
    Console(highlight=False).print(escape(contents.closing(everything)))


def _forms(text: str) -> tuple[str, ...]:
    """Return the forms that `--form` names, in the order of their columns."""
    named = {part.strip().lower() for part in text.split(",")}
    known = {*FORMS, "both"}
    for name in named - known:
        raise unknown("form", name, known)
    wanted = {*named, *(BOTH if "both" in named else ())}
    return tuple(form for form in FORMS if form in wanted)


def _check_device(device: str) -> None:
    """Raise a `UserError` if a device does not exist. Torch is imported for a GPU only."""
    if device != "cpu":
        from polyphily.runtime import machine

        machine.check_device(device)


def _names(text: str | None) -> tuple[str, ...] | None:
    """Split names at commas, but not at one before `option=`, which belongs to the name."""
    if text is None:
        return None
    return tuple(filter(None, (name.strip() for name in re.split(r",(?![^,:\[]*=)", text))))


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--{flag} {text}: write numbers such as 5,10") from None


def _seeds(text: str) -> list[int]:
    return options.gather(None, {"seeds": text}, [], None).seeds
