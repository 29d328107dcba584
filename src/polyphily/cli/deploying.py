"""`polyphily server`: training between real sites, over Flower."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion, options
from polyphily.cli.training import Set
from polyphily.errors import TrainingError, UserError

if TYPE_CHECKING:
    from polyphily.flower.deployment import Deployment
    from polyphily.runs.folder import RunFolder

server = typer.Typer(help="Run the server of a federation of sites.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The server's folder.", metavar="DIR")]
Run = Annotated[str | None, typer.Argument(help="The run; the latest unless given.")]
PATIENCE = 3.0  # seconds after which sites that have not answered are named


def add_to(app: typer.Typer) -> None:
    server.command("run")(options.with_settings(data=False)(run))
    app.add_typer(server, name="server")


@server.command("init")
def init(
    folder: Folder,
    sites: Annotated[
        str,
        typer.Option(
            help="To try things out: make keys here for these sites: north,south,east. "
            "Otherwise sites make their own (`site init`, `server admit`)."
        ),
    ] = "",
    host: Annotated[
        str, typer.Option(help="The name or address by which sites reach this machine.")
    ] = "localhost",
    port: Annotated[int, typer.Option(help="The port for sites.")] = 9443,
    control_port: Annotated[
        int, typer.Option(help="The port for this machine's own commands.")
    ] = 9444,
    ca_key: Annotated[
        Path | None,
        typer.Option(help="File for the authority's private key, if it shall be kept elsewhere."),
    ] = None,
) -> None:
    """Create a server's folder: configuration and certificates."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower.deployment import Deployment, require_flower

    require_flower()
    names = [name.strip() for name in sites.split(",")] if sites else []
    Deployment.create(folder, names, host, port, control_port, ca_key)
    print_line(f"server folder: {folder}")
    if names:
        print_line("move each bundle to its site over a secure channel, then delete it here:")
        for name in names:
            print_line(f"  {folder / 'bundles' / name}")
    else:
        print_line(
            f"at each site: polyphily site init DIR --name NAME --server {host}:{port}, "
            f"then here: polyphily server admit {folder} NAME.request.json"
        )
    print_line(f"then: polyphily server start {folder}")


@server.command("start")
def start(folder: Folder) -> None:
    """Start the server, in the foreground; Ctrl-C ends it."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower.deployment import Deployment
    from polyphily.flower.superlink import serve

    own = Deployment.open(folder)
    config = own.config()
    _warn_of_expiry(own)

    def ready() -> None:
        print_line(
            f"serving sites on port {config['port']}, this machine's commands on {own.control}"
        )

    serve(own, ready, lambda line: print_line(f"{time.strftime('%H:%M:%S')} {line}"))


def _expiry(own: Deployment) -> dict[str, str]:
    """Return the days on which the certificates of the server and its authority end."""
    from polyphily.flower.keys import read_certificate

    ends = (read_certificate(own.path / f"{name}.crt") for name in ("server", "ca"))
    server_end, authority_end = (f"{end.not_valid_after_utc:%Y-%m-%d}" for end in ends)
    return {"server": server_end, "authority": authority_end}


def _warn_of_expiry(own: Deployment) -> None:
    """Warn of certificates that end within 30 days."""
    import datetime as dt

    from polyphily.cli.terminal import notes
    from polyphily.flower.keys import WARNING

    soon = dt.datetime.now(dt.UTC) + WARNING
    ends = _expiry(own)
    lines = []
    if ends["server"] <= f"{soon:%Y-%m-%d}":
        lines.append(
            f"the server's certificate ends on {ends['server']}: polyphily server renew {own.path}"
        )
    if ends["authority"] <= f"{soon:%Y-%m-%d}":
        lines.append(
            f"the authority's certificate ends on {ends['authority']}: make a new server folder"
        )
    lines += [
        f"the certificate of '{entry.name}' ends on {entry.expires:%Y-%m-%d}: "
        f"polyphily server admit {own.path} {entry.name}.request.json renews it"
        for entry in own.register.entries()
        if entry.expires is not None and entry.expires <= soon and not entry.why_not
    ]
    notes(lines)


@server.command("status")
def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show which sites are connected, and the state of every run."""
    from polyphily.cli.listings import show
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment
    from polyphily.flower.loopback import failure
    from polyphily.graphs.checked import plain

    own = Deployment.open(folder)
    _warn_of_expiry(own)
    nodes = control.nodes(own)
    runs = []
    for name in sorted(path.name for path in (own.path / "runs").iterdir()):
        run_folder = own.run_folder(name)
        runs.append(
            {
                "name": name,
                "state": control.state(own, run_folder).words,
                "rounds": len(run_folder.records()),
                "why": plain(failure(run_folder) or ""),
            }
        )
    if as_json:
        typer.echo(json.dumps({"sites": nodes, "runs": runs, "valid_until": _expiry(own)}))
        return
    rows = [{"name": name, "status": status} for name, status in nodes.items()]
    show(rows, False, {"name": "site", "status": "status"})
    if runs:
        typer.echo()
        columns = {"name": "run", "state": "state", "rounds": "rounds", "why": "why it failed"}
        show(runs, False, columns)
    typer.echo(f"\nthe server's certificate is valid until {_expiry(own)['server']}")


RequestFile = Annotated[Path, typer.Argument(help="The request of a site.", metavar="REQUEST")]
AuthorityKey = Annotated[
    Path | None,
    typer.Option("--ca-key", help="The authority's private key; ca.key in DIR unless given."),
]


@server.command("admit")
def admit(folder: Folder, request: RequestFile, ca_key: AuthorityKey = None) -> None:
    """Let a site in that has made its own key; also while the server runs.

    Compare the fingerprint with the site's operator by telephone before you send the answer.
    """
    from polyphily.flower import admission
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    answer = admission.admit(own, request, ca_key)
    _show_admitted(own, answer, "admitted")


@server.command("rotate")
def rotate(folder: Folder, request: RequestFile, ca_key: AuthorityKey = None) -> None:
    """Replace a site's key by a new one, which `site rotate` has signed with the old one.

    The old key is refused from now on, also by a server that is running.
    """
    from polyphily.flower import admission
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    answer = admission.rotate(own, request, ca_key)
    _show_admitted(own, answer, "has a new key")


def _show_admitted(own: Deployment, answer: Path, what: str) -> None:
    """Print the fingerprint of a site's key, and where the answers are."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower import admission, keys

    name = answer.name.removesuffix(".answer.json")
    entry = own.register.find(name)
    assert entry is not None
    authority = keys.read_certificate(own.path / "ca.crt")
    print_line(f"{name} {what}. Its key's fingerprint, to compare by telephone:")
    print_line(f"  {entry.fingerprint}")
    print_line("that of this federation's authority, which the site shows, too:")
    print_line(f"  {keys.certificate_fingerprint(authority)}")
    print_line(f"for {name} (nothing in it is secret): {answer}")
    others = [site for site in own.sites if site != name]
    made = [admission.answer(own, site) for site in others if own.has_certificate(site)]
    if made:
        print_line("for the other sites, which do not know this key yet:")
        for file in made:
            print_line(f"  {file}")


@server.command("sites")
def sites(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the sites: fingerprint of the key, validity, connected or not."""
    from polyphily.cli.listings import show
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    try:
        nodes = control.nodes(own)
    except UserError:
        nodes = {}  # the server is not running
    rows = [
        {
            "name": entry.name,
            "fingerprint": entry.fingerprint,
            "until": "" if entry.expires is None else f"{entry.expires:%Y-%m-%d}",
            "status": entry.refusal() or nodes.get(entry.name, "server is not running"),
        }
        for entry in own.register.entries()
    ]
    columns = {"name": "site", "status": "status", "until": "valid until", "fingerprint": "key"}
    show(rows, as_json, columns)


@server.command("revoke")
def revoke(folder: Folder, name: Annotated[str, typer.Argument(help="The site.")]) -> None:
    """Refuse a site's key for ever, from its next message on; also while the server runs."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower import admission
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    print_line(f"revoked the key of {name}: {admission.revoke(own, name)}")
    print_line(f"a running server refuses it now. {name} may ask again with a new key (site init)")


@server.command("renew")
def renew(folder: Folder, ca_key: AuthorityKey = None) -> None:
    """Make a new certificate for the server; a running server takes it at once."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower import admission
    from polyphily.flower.deployment import Deployment

    certificate = admission.renew(Deployment.open(folder), ca_key)
    end = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    print_line(f"the server's certificate is valid until {end}. Sites need not change anything")


def run(
    folder: Folder,
    method: Annotated[
        str,
        typer.Argument(
            help="The method; `polyphily methods` lists them.",
            autocompletion=completion.of("methods"),
        ),
    ],
    set_: Set = None,
    min_sites: Annotated[
        int | None, typer.Option(help="Fewest answers that a round needs.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds a site has for a round.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Further attempts at a round with too few answers.")
    ] = None,
    join_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the sites before the first round.")
    ] = None,
    misses: Annotated[
        int | None, typer.Option(help="Messages without an answer until a site counts as away.")
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds for a site that is away, if others are quicker.")
    ] = None,
    max_update: Annotated[
        str | None,
        typer.Option(help="Largest change of a model, in units of the other sites'; or off."),
    ] = None,
    max_weight: Annotated[
        str | None,
        typer.Option(help="Largest count or statistic, in units of the other sites'; or off."),
    ] = None,
    max_model: Annotated[
        str | None, typer.Option(help="Largest model in megabytes; or off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, splits and draws.")] = None,
    **values: Any,
) -> None:
    """Train and show progress. Ctrl-C detaches; the run goes on.

    The exit status is 0 only if the run completed.
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
        "misses": misses,
        "grace": grace,
        "max_update": max_update,
        "max_weight": max_weight,
        "max_model": max_model,
        "seed": seed,
    }
    given = request.settings | {k: v for k, v in policy.items() if v is not None}
    name = own.new_run(method, given, request.hyperparameters)
    run_folder = own.run_folder(name)
    control.start(own, run_folder)
    _follow(own, run_folder)


@server.command("attach")
def attach(folder: Folder, name: Run = None) -> None:
    """Show the progress of a run, as `server run` does."""
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    _follow(own, own.run_folder(name))


@server.command("stop")
def stop(folder: Folder, name: Run = None) -> None:
    """Stop a run; `resume` continues it."""
    from polyphily.flower import control
    from polyphily.flower.deployment import Deployment

    own = Deployment.open(folder)
    run_folder = own.run_folder(name)
    if control.state(own, run_folder).over:
        raise UserError(f"run {run_folder.path.name} has ended already")
    control.stop(own, run_folder)
    typer.echo(f"stopped {run_folder.path.name}")


@server.command("resume")
def resume(folder: Folder, name: Run = None) -> None:
    """Continue a run that was stopped or interrupted, after its last complete round."""
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
    """Raise a `UserError` if a run is going on: a site answers one message at a time."""
    from polyphily.flower import control

    for path in (own.path / "runs").iterdir():
        if not control.state(own, own.run_folder(path.name)).over:
            raise UserError(
                f"run {path.name} is going on: polyphily server attach {own.path}, "
                f"or polyphily server stop {own.path}"
            )


def _follow(own: Deployment, folder: RunFolder) -> None:
    """Show a run's events until it ends, then its scores."""
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages
    from polyphily.cli.training import PAGE
    from polyphily.flower import control
    from polyphily.flower.loopback import LOOK, events, failure
    from polyphily.graphs.checked import plain

    terminal.print_line(f"run {folder.path.name}", error=True)
    display = _Display(folder)
    try:
        with terminal.err.status("starting") as spinner:
            over = False
            while not over:
                time.sleep(LOOK)
                state = control.state(own, folder)
                over = state.over
                display.show(events(folder))
                spinner.update(display.status())
    except KeyboardInterrupt:
        terminal.print_line(
            f"detached; the run goes on: polyphily server attach {own.path}", error=True
        )
        raise typer.Exit(130) from None
    summary = folder.read_summary()
    if not state.well or summary is None:
        raise TrainingError(plain(failure(folder) or f"the run ended as {state.words}"))
    terminal.one_run(summary, folder.path)
    pages = Pages(True)
    pages.folders.append(folder.path)
    if page := pages.write(folder.path / PAGE):
        terminal.print_line(f"report: {page}")


class _Display:
    """Prints the events and scores of a run as they appear in its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.events_shown, self.rounds_shown = 0, 0
        self.round, self.asked_at = "", 0.0
        self.waiting: set[str] = set()  # sites that have not answered in this round
        self.sites: list[str] = []
        self.plan: dict[str, Any] = {}
        self.view = ""

    def show(self, events: list[dict[str, Any]]) -> None:
        """Print what is new since the last call."""
        from polyphily.cli.terminal import print_line
        from polyphily.graphs.checked import plain

        for event in events[self.events_shown :]:
            line = self._event_line(event)
            if line:
                print_line(plain(line), error=True)  # it may quote what a site sent
        self.events_shown = len(events)
        records = self.folder.records()
        for record in records[self.rounds_shown :]:
            print_line(self._round_line(record), error=True)
        self.rounds_shown = len(records)

    def status(self) -> str:
        """Return the current round, and the sites that have not answered for a while."""
        late = time.time() - self.asked_at > PATIENCE
        names = f": waiting for {', '.join(sorted(self.waiting))}" if self.waiting and late else ""
        return f"{self.round or 'waiting for the sites'}{names}"

    def _event_line(self, event: dict[str, Any]) -> str:
        """Take note of an event; return the line to print, which may be empty."""
        kind, site = event["event"], event.get("site", "")
        if kind in ("started", "waiting"):
            self.sites = event["sites"]
            self.waiting, self.asked_at = set(self.sites), event["time"]
            return f"waiting for {', '.join(self.sites)}" if kind == "waiting" else ""
        if kind == "round":
            self.round = f"round {event['round']}/{event['rounds']}"
            self.waiting, self.asked_at = set(self.sites), event["time"]
            return ""
        self.waiting.discard(site)
        if kind == "late":
            return f"round {event['round']}: {site} is late: {event['reason']}"
        if kind == "refused":
            return f"round {event['round']}: {site} was refused: {event['reason']}"
        if kind == "left out":
            return f"{site} is left out: {event['reason']}"
        if kind == "repeat":
            self.waiting = set(event["sites"])
            names = ", ".join(event["sites"])
            return f"round {event['round']}: too few answers, asking again: {names}"
        lines = {
            "joined": f"{site} joined",
            "note": event.get("text", ""),
            "resumed": f"going on after round {event.get('round')}",
        }
        return str(lines.get(kind, ""))

    def _round_line(self, record: dict[str, Any]) -> str:
        from polyphily.report.words import percent

        plan = self._plan()
        scores = record[self.view]["val"].get(f"{plan['settings']['metric']}_per_client", [])
        each = " ".join(f"{n} {percent(v, 1)}" for n, v in zip(plan["sites"], scores, strict=False))
        number = f"{record['round']:>3}/{plan['settings']['rounds']}"
        if "epsilon" in record:  # with --dp, sites do not send losses and scores
            return f"round {number}  epsilon {record['epsilon']:.3g}  {record['seconds']:.1f} s"
        if record["loss"] is None:  # sites may keep losses and scores with --secure-aggregation
            return f"round {number}  {record['seconds']:.1f} s"
        return f"round {number}  loss {record['loss']:.3f}  {record['seconds']:.1f} s  val {each}"

    def _plan(self) -> dict[str, Any]:
        """Return the plan that the sites agreed on, which exists once a round is complete."""
        from polyphily.core.method import METHODS, VIEW_OF
        from polyphily.flower.deployment import PLAN

        if not self.plan:
            text = (self.folder.path / PLAN).read_text(encoding="utf-8")
            self.plan = json.loads(text)
            self.view = VIEW_OF[METHODS.find(self.plan["method"]).evaluated]
        return self.plan
