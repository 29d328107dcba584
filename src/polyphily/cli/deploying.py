"""`polyphily server`, `site` and `predict`: training across real sites, over Flower."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import options
from polyphily.errors import TrainingError, UserError

if TYPE_CHECKING:
    from polyphily.flower.deployment import Deployment
    from polyphily.runs.folder import RunFolder

server = typer.Typer(help="The server of a federation of real sites.", no_args_is_help=True)
site = typer.Typer(help="A site: its graph stays where it is.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The server's folder.", metavar="DIR")]
Run = Annotated[str | None, typer.Argument(help="The run; the latest unless given.")]
GraphAt = Annotated[
    Path,
    typer.Option("--graph", help="Your graph: a folder with nodes and edges, .npz or .pt."),
]
PATIENCE = 3.0  # seconds after which a site that has not answered is worth a word


def add_to(app: typer.Typer) -> None:
    server.command("run")(options.with_settings(data=False)(run))
    app.add_typer(server, name="server")
    app.add_typer(site, name="site")
    app.command("predict")(predict)


# The server ----------------------------------------------------------------------------------


@server.command("init")
def init(
    folder: Folder,
    sites: Annotated[str, typer.Option(help="The sites' names: north,south,east.")],
    host: Annotated[
        str, typer.Option(help="The name or address by which sites reach this machine.")
    ] = "localhost",
    port: Annotated[int, typer.Option(help="The port for sites.")] = 9443,
    control_port: Annotated[
        int, typer.Option(help="The port for this machine's own commands.")
    ] = 9444,
) -> None:
    """Make a server's folder: configuration, certificates, and a bundle with a key per site."""
    from polyphily.cli.terminal import out
    from polyphily.flower.deployment import Deployment, require_flower

    require_flower()
    names = [name.strip() for name in sites.split(",")]
    Deployment.create(folder, names, host, port, control_port)
    out.print(f"server folder: {folder}", soft_wrap=True, markup=False)
    out.print("move each bundle to its site by a safe way, and delete it here:")
    for name in names:
        out.print(f"  {folder / 'bundles' / name}", soft_wrap=True, markup=False)
    out.print(f"then: polyphily server start {folder}", soft_wrap=True, markup=False)


@server.command("start")
def start(folder: Folder) -> None:
    """Start the server, in the foreground; Ctrl-C ends it."""
    from polyphily.cli.terminal import out
    from polyphily.flower.deployment import Deployment
    from polyphily.flower.superlink import serve

    own = Deployment.open(folder)
    config = own.config()

    def ready() -> None:
        out.print(
            f"serving sites on port {config['port']}, this machine's commands on {own.control}",
            soft_wrap=True,
            markup=False,
        )

    serve(own, ready)


@server.command("status")
def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Which sites are connected, and how the runs stand."""
    from polyphily.cli.listings import show
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment
    from polyphily.flower.loopback import failure

    own = Deployment.open(folder)
    nodes = control.nodes(own)
    runs = []
    for path in sorted(path.name for path in (own.path / "runs").iterdir()):
        run_folder = own.run_folder(path)
        runs.append(
            {
                "name": path,
                "state": control.state(own, run_folder).words,
                "rounds": len(run_folder.records()),
                "why": failure(run_folder) or "",
            }
        )
    if as_json:
        typer.echo(json.dumps({"sites": nodes, "runs": runs}))
        return
    rows = [{"name": name, "status": words} for name, words in nodes.items()]
    show(rows, False, {"name": "site", "status": "status"})
    if runs:
        typer.echo()
        columns = {"name": "run", "state": "state", "rounds": "rounds", "why": "why it failed"}
        show(runs, False, columns)


def run(
    folder: Folder,
    method: Annotated[str, typer.Argument(help="The method; `polyphily methods` lists them.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyperparameter of the method, name=value; repeat for more."),
    ] = None,
    min_sites: Annotated[
        int | None, typer.Option(help="Answers without which a round does not count.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds a site has for a round.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often a round with too few answers is asked again.")
    ] = None,
    join_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the sites at the beginning.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights, splits, draws.")] = None,
    **values: Any,
) -> None:
    """Train, and show how it goes. Ctrl-C detaches; the run goes on.

    Ends with status 0 only if the run completed.
    """
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    _check_idle(own)
    request = options.gather(method, values, set_ or [], None)
    policy = {
        "min_sites": min_sites,
        "timeout": timeout,
        "repeats": repeats,
        "join_timeout": join_timeout,
        "seed": seed,
    }
    given = request.settings | {k: v for k, v in policy.items() if v is not None}
    name = own.new_run(method, given, request.hyperparameters)
    run_folder = own.run_folder(name)
    control.start(own, run_folder)
    _follow(own, run_folder)


@server.command("attach")
def attach(folder: Folder, name: Run = None) -> None:
    """Show how a run goes; ends as `server run` does."""
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    _follow(own, own.run_folder(name))


@server.command("stop")
def stop(folder: Folder, name: Run = None) -> None:
    """Stop a run; `resume` goes on with it."""
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    run_folder = own.run_folder(name)
    if control.state(own, run_folder).over:
        raise UserError(f"run {run_folder.path.name} is not going on")
    control.stop(own, run_folder)
    typer.echo(f"stopped {run_folder.path.name}")


@server.command("resume")
def resume(folder: Folder, name: Run = None) -> None:
    """Go on with a run that was stopped or cut short, after its last complete round."""
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    run_folder = own.run_folder(name)
    if run_folder.read_summary() is not None:
        raise UserError(f"run {run_folder.path.name} is complete: nothing to resume")
    _check_idle(own)
    control.start(own, run_folder)
    _follow(own, run_folder)


def _check_idle(own: Deployment) -> None:
    """One run at a time: a site answers one message after the other."""
    from polyphily.flower import control

    for path in (own.path / "runs").iterdir():
        if not control.state(own, own.run_folder(path.name)).over:
            raise UserError(
                f"run {path.name} is going on: polyphily server attach {own.path}, "
                f"or polyphily server stop {own.path}"
            )


def _follow(own: Deployment, folder: RunFolder) -> None:
    """Shows a run's events until it is over."""
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages
    from polyphily.cli.training import PAGE
    from polyphily.flower import control
    from polyphily.flower.loopback import LOOK, events, failure

    terminal.err.print(f"run {folder.path.name}", soft_wrap=True, markup=False)
    scene = _Scene(folder)
    try:
        with terminal.err.status("starting") as spinner:
            over = False
            while not over:
                time.sleep(LOOK)
                state = control.state(own, folder)
                over = state.over
                scene.show(events(folder))
                spinner.update(scene.now())
    except KeyboardInterrupt:
        terminal.err.print(
            f"detached; the run goes on: polyphily server attach {own.path}", soft_wrap=True
        )
        raise typer.Exit(130) from None
    summary = folder.read_summary()
    if not state.well or summary is None:
        raise TrainingError(failure(folder) or f"the run ended as {state.words}")
    terminal.one_run(summary, folder.path)
    pages = Pages(True)
    pages.folders.append(folder.path)
    if page := pages.write(folder.path / PAGE):
        terminal.out.print(f"report: {page}", soft_wrap=True, markup=False)


class _Scene:
    """A run's events as lines for people."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.seen, self.records = 0, 0
        self.round, self.asked = "", 0.0
        self.waiting: set[str] = set()
        self.sites: list[str] = []
        self.plan: dict[str, Any] = {}
        self.view = ""

    def show(self, events: list[dict[str, Any]]) -> None:
        from polyphily.cli.terminal import err

        for event in events[self.seen :]:
            line = self._line(event)
            if line:
                err.print(line, soft_wrap=True, markup=False)
        self.seen = len(events)
        records = self.folder.records()
        for record in records[self.records :]:
            err.print(self._scores(record), soft_wrap=True, markup=False)
        self.records = len(records)

    def now(self) -> str:
        """What the run is waiting for."""
        late = time.time() - self.asked > PATIENCE
        names = f": waiting for {', '.join(sorted(self.waiting))}" if self.waiting and late else ""
        return f"{self.round or 'waiting for the sites'}{names}"

    def _line(self, event: dict[str, Any]) -> str:
        what, where = event["event"], event.get("site", "")
        if what in ("started", "waiting"):
            self.sites = event["sites"]
            self.waiting, self.asked = set(self.sites), event["time"]
            return f"waiting for {', '.join(self.sites)}" if what == "waiting" else ""
        if what == "round":
            self.round = f"round {event['round']}/{event['rounds']}"
            self.waiting, self.asked = set(self.sites), event["time"]
            return ""
        self.waiting.discard(where)
        if what == "late":
            return f"round {event['round']}: {where} is late: {event['reason']}"
        if what == "refused":
            return f"round {event['round']}: {where} was refused: {event['reason']}"
        if what == "repeat":
            self.waiting = set(event["sites"])
            names = ", ".join(event["sites"])
            return f"round {event['round']}: too few answers, asking again: {names}"
        lines = {
            "joined": f"{where} joined",
            "note": event.get("text", ""),
            "resumed": f"going on after round {event.get('round')}",
        }
        return str(lines.get(what, ""))

    def _scores(self, record: dict[str, Any]) -> str:
        from polyphily.report.words import percent

        plan = self._plan()
        found = record[self.view]["val"].get(f"{plan['settings']['metric']}_per_client", [])
        each = " ".join(f"{n} {percent(v, 1)}" for n, v in zip(plan["sites"], found, strict=False))
        number = f"{record['round']:>3}/{plan['settings']['rounds']}"
        if "epsilon" in record:  # sites keep losses and scores to themselves
            return f"round {number}  epsilon {record['epsilon']:.3g}  {record['seconds']:.1f} s"
        return f"round {number}  loss {record['loss']:.3f}  {record['seconds']:.1f} s  val {each}"

    def _plan(self) -> dict[str, Any]:
        """What the sites agreed on: there once a round is complete."""
        from polyphily.core.method import find
        from polyphily.flower.deployment import PLAN
        from polyphily.runs.run import VIEW_OF

        if not self.plan:
            text = (self.folder.path / PLAN).read_text(encoding="utf-8")
            self.plan = json.loads(text)
            self.view = VIEW_OF[find(self.plan["method"]).evaluated]
        return self.plan


# A site --------------------------------------------------------------------------------------


@site.command("check")
def check(
    graph: GraphAt,
    method: Annotated[
        str | None, typer.Option(help="Also show what leaves the site with this method.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at a private graph: is it sound, what is in it, what would leave the site."""
    from polyphily.cli import listings, terminal
    from polyphily.flower.site import SiteGraph

    found = SiteGraph.read(graph)
    facts = found.summary()
    leaves = _what_leaves(method) if method else []
    if as_json:
        extra = {"schema": found.schema.digest} | ({"leaves": leaves} if method else {})
        typer.echo(json.dumps(facts | extra))
        return
    terminal.notes(found.notes)
    total = max(facts["labelled"], 1)
    split = "with a split of its own" if facts["split"] == "own" else "without a split"
    terminal.out.print(
        f"{facts['nodes']:,} nodes, {facts['edges']:,} edges, {facts['features']:,} features, "
        f"{split}"
    )
    homophily = facts["homophily"]
    words = "unknown: no edge has two labels" if homophily is None else f"{homophily:.3f}"
    terminal.out.print(f"edge homophily {words}")
    mix = ", ".join(f"{n} {c:,} ({100 * c / total:.0f} %)" for n, c in facts["labels"].items())
    without = facts["nodes"] - facts["labelled"]
    terminal.out.print(f"labels: {mix}; {without:,} nodes without", markup=False)
    terminal.out.print(f"schema {found.schema.digest[:16]} (the same at every site that fits)")
    if method:
        terminal.out.print("\nleaves the site, in each round:")
        listings.show(leaves, False, {"name": "what", "shape": "shape"})


def _what_leaves(method: str) -> list[dict[str, str]]:
    from polyphily.core.method import find
    from polyphily.methods.traffic import trace

    up, _ = trace(find(method)())
    return [
        *up,
        {"name": "accuracy, F1, AUC on validation and test nodes", "shape": "2 × 2 × 4"},
        {"name": "mean training loss, seconds", "shape": "two numbers"},
        {"name": "once: names of feature columns and labels", "shape": "text"},
        {"name": "once: numbers of validation and test nodes", "shape": "two numbers"},
    ]


@site.command("join")
def join(
    bundle: Annotated[Path, typer.Argument(help="The bundle that the server's operator gave you.")],
    graph: GraphAt,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    dp: Annotated[
        str,
        typer.Option(help="Take part in runs of this differential privacy only: epsilon=8."),
    ] = "off",
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Take part in runs that have it only.")
    ] = False,
) -> None:
    """Take part with a graph, in the foreground; Ctrl-C leaves."""
    from polyphily.flower.deployment import Bundle, require_flower
    from polyphily.privacy.differential import Budget

    require_flower()
    own = Bundle(bundle.resolve())
    name = own.name
    from polyphily.flower.node import join as stay
    from polyphily.flower.site import Site, SiteGraph

    member = Site(
        name,
        SiteGraph.read(graph),
        own.path,
        device,
        dp=Budget.parse(dp),
        secure=secure_aggregation,
        identity=own.identity(),
    )

    def report(text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {name}: {text}")

    stay(own, member, report)


def predict(
    model: Annotated[
        Path,
        typer.Option("--model", help="A site's model: BUNDLE/models/RUN/best.safetensors."),
    ],
    graph: GraphAt,
    out: Annotated[Path, typer.Option("--out", help="A .parquet or .csv file to write.")],
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
) -> None:
    """Predict every node's label with a site's own model, also for nodes added since."""
    from polyphily.cli.terminal import out as console
    from polyphily.flower.prediction import predict as compute
    from polyphily.flower.prediction import write

    table = compute(model, graph, device)
    write(table, out)
    console.print(f"{len(table):,} predictions: {out}", soft_wrap=True, markup=False)
