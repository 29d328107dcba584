"""FedGSP: costs, homophily and similarity of clients, filters, curves over rounds, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from polyphily.papers import published, tables
from polyphily.papers.exhibits import Exhibit, Made, Wanted
from polyphily.papers.exhibits.common import (
    Bench,
    Line,
    Ran,
    cells_of,
    chosen,
    forms_of,
    left_out,
    lines_of,
)
from polyphily.papers.exhibits.drawing import (
    Heat,
    Series,
    draw_heat,
    draw_lines,
    panel_axes,
    series_grid,
)
from polyphily.report.grids import Grid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from polyphily.graphs.loading import Federation

OWN = "fedgsp"
HOMOPHILIC = ("cora", "citeseer", "pubmed", "amazon-computers", "amazon-photo", "ogbn-arxiv")
HETEROPHILIC = ("roman-empire", "amazon-ratings", "minesweeper", "tolokers", "questions")
DISJOINT, OVERLAPPING = "metis", "metis-overlap"


@dataclass(frozen=True)
class Cell:
    """Data of a figure: a dataset, a partition and a number of clients."""

    dataset: str
    partition: str
    clients: int

    def __str__(self) -> str:
        return f"{self.dataset}, {self.clients} clients"


def present(cells: Sequence[Cell], wanted: Wanted) -> list[Cell]:
    """Return the chosen cells whose data are present."""
    printed: dict[str, list[int]] = {}
    for cell in cells:
        printed.setdefault(cell.dataset, []).append(cell.clients)
    kept = cells_of(printed, wanted)
    return [cell for cell in cells if cell.clients in kept.get(cell.dataset, ())]


def datasets(cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cell.dataset for cell in cells))


# Runs and data of a cell --------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """The runs of an exhibit, each by the protocol of the table that has its dataset.

    Attributes:
        exhibit: the folder of the runs, under `wanted.out`.
        wanted: what the user asked for.
        remarks: see `Bench`.
    """

    exhibit: str
    wanted: Wanted
    remarks: list[str] = field(default_factory=list)

    def bench(self, cell: Cell) -> Bench:
        names = ("II", "IV") if cell.partition == DISJOINT else ("III", "V")
        table = tables.paper(OWN).table(names[cell.dataset in HETEROPHILIC])
        return Bench(self.exhibit, table, self.wanted, self.remarks)

    def run(self, line: Line, cell: Cell) -> Ran:
        own = as_published(line, cell)
        return self.bench(cell).run(own, cell.dataset, cell.partition, cell.clients)

    def federation(self, cell: Cell) -> Federation:
        """Load the data of the first seed."""
        from polyphily.graphs.loading import load

        line = Line("local", "local")
        job = self.bench(cell).job(line, cell.dataset, cell.partition, cell.clients)
        return load(**job.data, seed=job.seeds[0])

    def notes(self, cells: Sequence[Cell]) -> list[str]:
        """Return how scores are obtained, and the remarks."""
        found = [note for cell in cells for note in self.bench(cell).notes(cell.dataset)]
        return list(dict.fromkeys(found))


def as_published(line: Line, cell: Cell) -> Line:
    """Return FedGSP with the values that its authors' code sets for the cell; others as they are.

    What the line sets itself stays.
    """
    if line.method != OWN:
        return line
    case = published(OWN, cell.dataset, cell.partition, cell.clients)
    return replace(line, set={**case.hyperparameters, **line.set}, settings=case.settings)


def on_unifilter(method: str, cell: Cell) -> Line:
    """Return a method that trains FedGSP's network, with the width, depth and order of the cell."""
    case = published(OWN, cell.dataset, cell.partition, cell.clients)
    network = {"backbone": "unifilter", "hops": case.hyperparameters["order"]}
    return Line(f"{method} on unifilter", method, settings={**case.settings, **network})


# Table I ------------------------------------------------------------------------------------------

# Space at a client and at the server, time at a client and at the server, as printed.
COSTS = {
    "fedavg": ("d + d²", "M(1 + d²)", "e d + n d²", "M"),
    "fedprox": ("d + 2d²", "M(1 + d²)", "e d + n d² + d²", "M"),
    "fedper": ("d + 2d²", "M(1 + d²)", "e d + n d² + d²", "M"),
    "gcfl": ("d + d²", "M(1 + 2d²)", "e d + n d²", "M + M²(log M + d²)"),
    "fedgnn": ("d + 2d²", "2M(1 + 2d²)", "e d + n d² + d", "M"),
    "fedsage+": ("n d + 3d²", "M(1 + 3d²)", "e d + n d²", "M"),
    "fedpub": ("n d + d²", "M(d² + M)", "e d + n d²", "M d (M + d)"),
    "fedgta": ("d + d² + K c", "M(1 + d² + M K c)", "e(d + n c) + n(d² + c)", "M + M K c"),
    "adafgl": ("n d + 2d²", "M(1 + d²)", "K(e d + e n + n d²)", "M"),
    "fedtad": ("n d + 2d²", "M(1 + d²)", "K n + e", "n d (d + n + 2 M c)"),
    "fediih": ("n d + d²", "M K (d² + M)", "K(e d + n d²)", "M d (K M + d)"),
    OWN: ("K d + d²", "M K (d² + M)", "K(e d + n d²)", "M d (M + d + 1) + M K"),
}
COST_CELL = Cell("cora", DISJOINT, 10)
MEASURED = ("parameters", "kB up, first round", "kB up", "kB down", "seconds")


def costs(wanted: Wanted) -> Made:
    """Print the complexities beside what a client holds, sends and receives, and a round's time."""
    (cell,), runs = present([COST_CELL], wanted), Runs("table-I", wanted)
    lines = lines_of(OWN, tuple(COSTS), wanted)
    rows: list[tuple[Any, ...]] = []
    for method in chosen("methods", tuple(COSTS), wanted.choice.methods):
        own = [line for line in lines if line.method == method]
        rows += [
            (line.label, *COSTS[method], *measured_costs(runs.run(line, cell))) for line in own
        ]
        if not own:
            rows.append((method, *COSTS[method], *[None] * len(MEASURED)))
    printed = ("method", "client space", "server space", "client time", "server time")
    title = f"Costs as printed, O(…), and measured on {cell}"
    return Made(
        [Grid(title, (*printed, *MEASURED), rows)],
        [
            "M: clients; K: orders; d: dimensions; n, e, c: nodes, edges and classes of a client.",
            "Parameters and kB are those of one client; kB are medians over rounds, but for the "
            "first. Seconds are those of a whole round of one seed: all clients and the server.",
            "The paper prints no measurement beside these; the data are our choice.",
            "FedGSP has the width and depth that its authors' code sets for these data, the others "
            "those of the protocol.",
            *left_out(tuple(COSTS)),
            *runs.remarks,
        ],
    )


def measured_costs(ran: Ran) -> tuple[float | None, ...]:
    """Return the numbers of `MEASURED`."""
    from polyphily.runs.folder import RunFolder

    if ran.summary is None:
        return (None,) * len(MEASURED)
    network = ran.simulation().network
    first = RunFolder(ran.folder).records()[0]
    kilobytes = 1000 * len(ran.summary["clients"])
    return (
        sum(parameter.numel() for parameter in network.parameters()),
        first["bytes_up"] / kilobytes,
        ran.summary["bytes_up_per_round"] / kilobytes,
        ran.summary["bytes_down_per_round"] / kilobytes,
        ran.summary["seconds_per_round_median"] / len(ran.job.seeds),
    )


# Figures 1 and 3: the clients ---------------------------------------------------------------------

VARIED = (Cell("citeseer", OVERLAPPING, 50), Cell("questions", DISJOINT, 10))
VARIED_NOTE = (
    "The paper does not say how many clients there are. It names client 34 of CiteSeer, and its "
    "experiments have 50 clients where they have more than 30: the overlapping partition. For "
    "Questions, where it names clients 6 and 7, 10 disjoint clients are used."
)


def homophily_levels(wanted: Wanted) -> Made:
    """Measure the adjusted homophily of each client."""
    runs = Runs("figure-1", wanted)
    levels = {cell: homophily_of(runs.federation(cell)) for cell in present(VARIED, wanted)}

    def draw() -> Any:
        from polyphily.report.style import COLOURS, style

        with style():
            figure, all_axes = panel_axes(len(levels), 0.6)
            for axes, (cell, values) in zip(all_axes, levels.items(), strict=True):
                bars = axes.bar(range(1, len(values) + 1), values, color="#a9b4bd", width=0.75)
                high, low = extremes(values)
                bars[high].set_color(COLOURS[0])
                bars[low].set_color(COLOURS[1])
                axes.axhline(0, color="#444444", linewidth=0.6)
                axes.grid(visible=False, axis="x")
                axes.margins(x=0.02)
                ends = f"from {values[low]:.3f} ({low + 1}) to {values[high]:.3f} ({high + 1})"
                axes.set(xlabel="client", ylabel="adjusted homophily", title=f"{cell}\n{ends}")
        return figure

    rows = [
        (cell.dataset, client, value)
        for cell, values in levels.items()
        for client, value in enumerate(values, start=1)
    ]
    notes = [
        VARIED_NOTE,
        "The partition has another random seed than the paper's, so clients have other numbers.",
        *left_out(datasets=datasets(VARIED)),
    ]
    return Made(
        [Grid("Homophily of clients", ("dataset", "client", "homophily"), rows)], notes, draw
    )


def homophily_of(federation: Federation) -> list[float]:
    """Return the adjusted homophily of each client; NaN if it has a single class or no edge."""
    from polyphily.heterogeneity.homophily import adjusted_homophily

    return [adjusted_homophily(graph) for graph in federation.clients]


def extremes(levels: Sequence[float]) -> tuple[int, int]:
    """Return the clients with the highest and the lowest homophily."""
    import numpy as np

    return int(np.nanargmax(levels)), int(np.nanargmin(levels))


COMPARED = tuple(
    Cell(dataset, partition, 10)
    for dataset in ("ogbn-arxiv", "amazon-ratings")
    for partition in (DISJOINT, OVERLAPPING)
)


def similarities(wanted: Wanted) -> Made:
    """Measure the similarity of all pairs of clients, and the share of complementary pairs."""
    from polyphily.heterogeneity.divergence import complementarity_ratio

    runs = Runs("figure-3", wanted)
    found = {cell: similarity_of(runs.federation(cell)) for cell in present(COMPARED, wanted)}
    panels, ratios, rows = {}, [], []
    for cell, values in found.items():
        names = range(1, len(values) + 1)
        kind = "disjoint" if cell.partition == DISJOINT else "overlapping"
        ratio = complementarity_ratio(values)
        title = f"{cell.dataset}, {kind}\nr_c = {ratio:.2f}"
        panels[title] = Heat(values.tolist(), names, names)
        ratios.append((cell.dataset, kind, 1 - ratio, ratio))
        rows += [
            (cell.dataset, kind, i + 1, j + 1, float(values[i, j]))
            for i in range(len(values))
            for j in range(i + 1, len(values))
        ]
    return Made(
        [
            Grid("Ratios of pairs", ("dataset", "partition", "similar", "complementary"), ratios),
            Grid(
                "Similarity of pairs",
                ("dataset", "partition", "client i", "client j", "similarity"),
                rows,
            ),
        ],
        [
            "The paper does not define the similarity S. Here it is one minus the total variation "
            "between the distributions of (label, neighbour's label) over two clients' edges.",
            "The number of clients is not stated: 10, which both settings have.",
            *left_out(datasets=datasets(COMPARED)),
        ],
        lambda: draw_heat(panels, "client j", "client i", "similarity S(i, j)"),
    )


def similarity_of(federation: Federation) -> npt.NDArray[np.float64]:
    """Return S(i, j) for all pairs of clients; 1 on the diagonal."""
    import numpy as np

    from polyphily.heterogeneity.divergence import similarity, symmetric
    from polyphily.heterogeneity.homophily import class_mixing

    classes = len(federation.classes)
    mixing = [class_mixing(graph, classes) for graph in federation.clients]
    found = symmetric(mixing, similarity)
    np.fill_diagonal(found, 1.0)
    return found


# Figures 2 and 6: the filters ---------------------------------------------------------------------


def filters(wanted: Wanted, *, together: bool) -> Made:
    """Compute the filter responses of the clients with the highest and the lowest homophily.

    Args:
        wanted: what the user asked for.
        together: whether models are those after aggregation, or local ones only.
    """
    from polyphily.heterogeneity.filters import FREQUENCIES

    runs = Runs("figure-6" if together else "figure-2", wanted)
    panels: dict[str, dict[str, Series]] = {}
    for cell in present(VARIED, wanted):
        levels = homophily_of(runs.federation(cell))
        titles = {}
        for client in extremes(levels):
            letter = "abcd"[len(panels)]
            titles[client] = (
                f"({letter}) {cell.dataset}, client {client + 1}, h = {levels[client]:.2f}"
            )
            panels[titles[client]] = {}
        lines = [on_unifilter("local", cell)]
        if together:
            lines += [on_unifilter("fedavg", cell), *forms_of(OWN, wanted).values()]
        for line in lines:
            ran = runs.run(line, cell)
            if ran.summary is None:
                continue
            responses = responses_of(ran, list(titles)).tolist()
            for title, response in zip(titles.values(), responses, strict=True):
                points = zip(FREQUENCIES.tolist(), response, strict=True)
                known = [(x, y, 0.0) for x, y in points if not math.isnan(y)]
                panels[title][line.label] = Series.of(known)
    name = "Filter responses" + (" after aggregation" if together else " of local models")
    return Made(
        [series_grid(name, panels, "client", "frequency", "response")],
        [
            "Clients are those with the highest and the lowest adjusted homophily, as in Figure 1.",
            VARIED_NOTE,
            "The paper does not define the response of a filter that has coefficients for each "
            "feature. Here it is the factor that fits best what the filter does to all features at "
            "a frequency; it is left out where features have no energy. Frequencies are "
            "eigenvalues of I - D^-1/2 A D^-1/2. The first seed is shown. The drawing has absolute "
            "values, because an MLP follows the filter and the sign says nothing.",
            "Local and FedAvg train UniFilter with tau = 0.95 and one learning rate.",
            *left_out(datasets=datasets(VARIED)),
            *runs.remarks,
        ],
        lambda: _draw_responses(panels),
    )


def responses_of(ran: Ran, clients: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the responses of some clients of the first seed, `[clients, frequencies]`.

    Models are those that the server sends; of Local those that clients trained.
    """
    from polyphily.report.trained import filter_responses

    simulation = ran.simulation()
    shared = ran.job.method != "local"
    local = simulation.received() if shared else simulation.trained()
    local.params = {name: value[list(clients)] for name, value in local.params.items()}
    graphs = simulation.federations[0].clients
    found = filter_responses(local, [graphs[client] for client in clients])
    assert found is not None
    return found


def _draw_responses(panels: Mapping[str, Mapping[str, Series]]) -> Any:
    sizes = {
        title: {
            label: replace(series, y=[abs(value) for value in series.y])
            for label, series in lines.items()
        }
        for title, lines in panels.items()
    }
    figure = draw_lines(sizes, "frequency λ", "response |g(λ)|", markers=False)
    for axes in figure.axes:
        axes.set_xlim(0, 2)
        axes.set_ylim(bottom=0)
        axes.set_xticks((0, 0.5, 1, 1.5, 2))
    return figure


# Figures 7 and 8: curves over rounds --------------------------------------------------------------

SHOWN = ("local", *COSTS)


def curves(wanted: Wanted, exhibit: str, partition: str, clients: int) -> Made:
    """Train all methods and return test scores over rounds."""
    every = [Cell(dataset, partition, clients) for dataset in (*HOMOPHILIC, *HETEROPHILIC)]
    cells, runs = present(every, wanted), Runs(exhibit, wanted)
    panels: dict[str, dict[str, Series]] = {}
    for cell in cells:
        for line in lines_of(OWN, SHOWN, wanted):
            ran = runs.run(line, cell)
            if ran.summary is not None:
                title = f"{cell.dataset} ({ran.job.protocol.metric})"
                panels.setdefault(title, {})[line.label] = ran.curve()
    return Made(
        [series_grid("Test scores over rounds", panels, "dataset", "round", "score")],
        [
            "The paper shows eight datasets and does not say which: all that are present are here.",
            "Curves show the score of every round; bands are one deviation over seeds.",
            *left_out(SHOWN, datasets(every)),
            *runs.notes(cells),
        ],
        lambda: draw_lines(panels, "round", "test score (%)", markers=False),
    )


# Figures 9 and 10: sensitivity --------------------------------------------------------------------

STUDIED = (Cell("cora", DISJOINT, 10), Cell("roman-empire", DISJOINT, 10))
STUDIED_NOTE = (
    "Data and values are not stated in the text: Cora and Roman-empire, as in Table VI, with 10 "
    "disjoint clients. All other hyperparameters are those of the authors' code for these data."
)
ORDERS = (2, 4, 6, 8, 10, 12, 14)
VECTORS = (1, 3, 5, 7, 9)
GAMMAS = (0.1, 0.5, 1.0, 5.0, 10.0)
TAUS = (0.7, 0.8, 0.9, 0.95, 0.99)


def orders_and_vectors(wanted: Wanted) -> Made:
    """Score FedGSP over the number of orders K and the number of vectors t."""
    cells, runs = present(STUDIED, wanted), Runs("figure-9", wanted)
    panels: dict[str, dict[str, Series]] = {}
    for cell in cells:
        for name, symbol, values in (("order", "K", ORDERS), ("vectors", "t", VECTORS)):
            points: dict[str, list[tuple[float, float | None, float | None]]] = {}
            for value in values:
                for form, line in forms_of(OWN, wanted, **{name: value}).items():
                    points.setdefault(form, []).append((value, *runs.run(line, cell).score))
            panels[f"{cell.dataset}, {symbol}"] = {f: Series.of(p) for f, p in points.items()}

    def draw() -> Any:
        figure = draw_lines(panels, "", "test score (%)")
        for axes, title in zip(figure.axes, panels, strict=True):
            axes.set_xlabel(title.rpartition(", ")[2])
        return figure

    grid = series_grid("Sensitivity to K and t", panels, "varied", "value", "score")
    return Made([grid], _study_notes(runs, cells), draw)


def gamma_and_tau(wanted: Wanted) -> Made:
    """Score FedGSP over a grid of gamma and tau."""
    cells, runs = present(STUDIED, wanted), Runs("figure-10", wanted)
    scores: dict[tuple[str, str], dict[tuple[float, float], Any]] = {}
    for cell in cells:
        for gamma, tau in product(GAMMAS, TAUS):
            for form, line in forms_of(OWN, wanted, gamma=gamma, tau=tau).items():
                found = scores.setdefault((cell.dataset, form), {})
                found[gamma, tau] = runs.run(line, cell).score
    panels = {
        ", ".join(panel): Heat(
            [[_or_nan(found[gamma, tau][0]) for tau in TAUS] for gamma in GAMMAS],
            [f"{gamma:g}" for gamma in GAMMAS],
            [f"{tau:g}" for tau in TAUS],
        )
        for panel, found in scores.items()
    }
    rows = [
        (*panel, *point, *score)
        for panel, found in scores.items()
        for point, score in found.items()
    ]
    columns = ("dataset", "form", "gamma", "tau", "score", "deviation")
    least = min((row[4] for row in rows if row[4] is not None), default=0.0)
    return Made(
        [Grid("Sensitivity to gamma and tau", columns, rows)],
        _study_notes(runs, cells),
        lambda: draw_heat(panels, "τ", "γ", "test score (%)", least=least),
    )


def _study_notes(runs: Runs, cells: Sequence[Cell]) -> list[str]:
    return [STUDIED_NOTE, *left_out(datasets=datasets(STUDIED)), *runs.notes(cells)]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


# All ----------------------------------------------------------------------------------------------


def _curves(exhibit: str, partition: str, clients: int) -> Callable[[Wanted], Made]:
    return partial(curves, exhibit=exhibit, partition=partition, clients=clients)


EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit("figure-1", "homophily levels of clients", homophily_levels, datasets(VARIED)),
    Exhibit(
        "figure-2",
        "filters of local models",
        partial(filters, together=False),
        datasets(VARIED),
        ("local",),
    ),
    Exhibit("figure-3", "similarity of clients", similarities, datasets(COMPARED)),
    Exhibit("figure-4", "framework", illustration=True),
    Exhibit("figure-5", "the optimisation problem", illustration=True),
    Exhibit("I", "costs of methods", costs, datasets([COST_CELL]), tuple(COSTS)),
    Exhibit(
        "figure-6",
        "filters after aggregation",
        partial(filters, together=True),
        datasets(VARIED),
        ("local", "fedavg", OWN),
    ),
    Exhibit(
        "figure-7",
        "scores over rounds, 10 disjoint clients",
        _curves("figure-7", DISJOINT, 10),
        (*HOMOPHILIC, *HETEROPHILIC),
        SHOWN,
    ),
    Exhibit(
        "figure-8",
        "scores over rounds, 30 overlapping clients",
        _curves("figure-8", OVERLAPPING, 30),
        (*HOMOPHILIC, *HETEROPHILIC),
        SHOWN,
    ),
    Exhibit("figure-9", "sensitivity to K and t", orders_and_vectors, datasets(STUDIED), (OWN,)),
    Exhibit("figure-10", "sensitivity to gamma and tau", gamma_and_tau, datasets(STUDIED), (OWN,)),
)
