"""`polyphily site`: check a private graph, get a key admitted, and take part."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from polyphily.cli import guarding
from polyphily.cli.guarding import SiteFolder

site = typer.Typer(help="Check a private graph, and take part as a site.", no_args_is_help=True)

GraphAt = Annotated[
    Path,
    typer.Option("--graph", help="Your graph: a folder with nodes and edges, .npz or .pt."),
]


def add_to(app: typer.Typer) -> None:
    guarding.add_to(site)
    app.add_typer(site, name="site")


@site.command("check")
def check_graph(
    graph: GraphAt,
    method: Annotated[
        str | None, typer.Option(help="Also show what this method sends to the server.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a private graph, and show what is in it and what would be sent."""
    from polyphily.cli import listings, terminal
    from polyphily.flower.site_graph import SiteGraph

    site_graph = SiteGraph.read(graph)
    facts, digest = site_graph.summary(), site_graph.schema.digest
    sent = _sent_by_site(method, table=bool(site_graph.schema.columns)) if method else []
    if as_json:
        extra = {"schema": digest} | ({"leaves": sent} if method else {})
        typer.echo(json.dumps(facts | extra))
        return
    terminal.notes(site_graph.notes)
    total = max(facts["labelled"], 1)
    split = "with a split of its own" if facts["split"] == "own" else "without a split"
    terminal.out.print(
        f"{facts['nodes']:,} nodes, {facts['edges']:,} edges, {facts['features']:,} features, "
        f"{split}"
    )
    homophily = facts["homophily"]
    value = "unknown: no edge has two labels" if homophily is None else f"{homophily:.3f}"
    terminal.out.print(f"edge homophily {value}")
    labels = ", ".join(f"{n} {c:,} ({100 * c / total:.0f} %)" for n, c in facts["labels"].items())
    without = facts["nodes"] - facts["labelled"]
    terminal.out.print(f"labels: {labels}; {without:,} nodes without", markup=False)
    terminal.out.print(f"schema {digest[:16]} (must be the same at every site)")
    if method:
        terminal.out.print("\nleaves the site:")
        listings.show(sent, False, {"name": "what", "shape": "shape", "rounds": "when"})


def _sent_by_site(method: str, *, table: bool) -> list[dict[str, str]]:
    """Return a row for every tensor and number that a site sends in a run."""
    from polyphily.core.declarations import describe
    from polyphily.core.method import METHODS
    from polyphily.core.metrics import METRICS

    up, _ = describe(METHODS.find(method)())
    others = (
        ("scores: views × (val, test) × metrics", f"2 × 2 × {len(METRICS)}", "every round"),
        ("mean training loss, seconds", "two numbers", "every round"),
        ("names and kinds of columns, labels", "text", "once"),
        (
            "statistics of columns (privacy.md)",
            "per column",
            "once, unless private" if table else "if standardised",
        ),
        ("numbers of validation and test nodes", "two numbers", "once"),
    )
    return up + [{"name": name, "shape": shape, "rounds": when} for name, shape, when in others]


@site.command("init")
def init_site(
    folder: SiteFolder,
    name: Annotated[str, typer.Option(help="The site's name: north.")],
    address: Annotated[str, typer.Option("--server", help="The server: host:port.")],
    authority: Annotated[
        Path | None,
        typer.Option("--ca", help="The authority's certificate, if you have it already."),
    ] = None,
) -> None:
    """Make a site's key, which stays here, and a request to the server's operator."""
    from polyphily.flower import admission
    from polyphily.flower.deployment import require_flower

    require_flower()
    _show_request(admission.init_site(folder, name, address, authority))


@site.command("rotate")
def rotate_site(folder: SiteFolder) -> None:
    """Make a new key for a site, and a request that is signed with the old one.

    The old key stays in use until `site accept`.
    """
    from polyphily.flower import admission
    from polyphily.flower.deployment import require_flower

    require_flower()
    _show_request(admission.rotate_site(folder.resolve()))


def _show_request(request: Path) -> None:
    from polyphily.cli.terminal import print_line
    from polyphily.flower import admission, keys

    found = admission.Request.read(request)
    print_line(f"send this to the server's operator (nothing in it is secret): {request}")
    print_line("the fingerprint of the key, to compare by telephone:")
    print_line(f"  {keys.fingerprint(found.key)}")
    print_line(f"with the answer: polyphily site accept {request.parent} ANSWER")


@site.command("accept")
def accept(
    folder: SiteFolder,
    answer: Annotated[Path, typer.Argument(help="What the operator sent back.", metavar="ANSWER")],
) -> None:
    """Complete a site's folder with the answer of the server's operator.

    Also for later answers, with which new sites and new keys of other sites become known.
    """
    from polyphily.cli.terminal import print_line
    from polyphily.flower import admission
    from polyphily.flower.deployment import require_flower

    require_flower()
    done = admission.accept(folder.resolve(), answer)
    if not done.known:
        print_line("compare the fingerprint of the federation's authority by telephone:")
        print_line(f"  {done.authority}")
    if done.added:
        print_line("and the keys of the other sites, if you want to rely on secure aggregation:")
    for name, fingerprint in done.added.items():
        print_line(f"  {name} {fingerprint}")
    for name, fingerprint in done.replaced.items():
        print_line(f"{name} has a new key, signed with its old one: {fingerprint}")
    for name in done.removed:
        print_line(f"{name} has left")
    if done.address:
        print_line(f"the server says that it is at {done.address}; site.toml has another address")
    print_line(f"then: polyphily site join {folder} --graph GRAPH")


@site.command("join")
def join(
    bundle: Annotated[Path, typer.Argument(help="The site's folder.", metavar="DIR")],
    graph: GraphAt,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    dp: Annotated[
        str,
        typer.Option(
            help="Refuse runs with less differential privacy than this, and uploads that would "
            "spend more in all runs together: epsilon=8."
        ),
    ] = "off",
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Refuse runs without secure aggregation.")
    ] = False,
) -> None:
    """Take part in runs with a graph, in the foreground; Ctrl-C leaves the federation."""
    from polyphily.core.budget import Budget
    from polyphily.flower.deployment import Bundle, require_flower

    require_flower()
    own = Bundle(bundle.resolve())
    name = own.name
    from polyphily.flower.node import join as take_part
    from polyphily.flower.site import Site
    from polyphily.flower.site_graph import SiteGraph
    from polyphily.graphs.checked import plain

    member = Site(
        name,
        SiteGraph.read(graph),
        own.path,
        device,
        dp=Budget.parse(dp),
        secure=secure_aggregation,
        identity=own.identity(),
    )

    member.check_files()

    def report(text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {name}: {plain(text)}")

    take_part(own, member, report)
