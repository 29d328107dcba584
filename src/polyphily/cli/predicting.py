"""`polyphily predict`: classes and probabilities of nodes, from a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyphily.cli import completion


def add_to(app: typer.Typer) -> None:
    app.command("predict")(predict)


def predict(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            help="A model file, a run folder, or a site's folder.",
            autocompletion=completion.run_folder,
        ),
    ],
    graph: Annotated[
        Path,
        typer.Option("--graph", help="The graph: a folder of tables, an .npz or a .pt file."),
    ],
    out: Annotated[Path, typer.Option("--out", help="A .parquet or .csv file to write.")],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose model, encoding and threshold are used."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Which run, if there are several seeds; the first.")
    ] = None,
    which: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="The model of the best validation round, or the last: best, last.",
            autocompletion=completion.words(("best", "last")),
        ),
    ] = "best",
    device: Annotated[
        str,
        typer.Option(
            help="Where to compute: cpu or cuda.",
            autocompletion=completion.words(completion.DEVICES),
        ),
    ] = "cpu",
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="What may be used: 8GB. Larger graphs are predicted in blocks."
        ),
    ] = "auto",
) -> None:
    """Predict the class of every node, also of nodes that are new.

    Writes id, class, the probability of each class and, with two classes, whether the node is above
    the threshold. The graph needs no labels.
    """
    from polyphily.cli.terminal import notes, print_line
    from polyphily.runs.opened import load_model
    from polyphily.runs.prediction import check_out, write
    from polyphily.runs.prediction import predict as compute

    check_out(out)
    chosen = load_model(model, client, seed=seed, which=which)
    found = compute(chosen, graph, device=device, memory=memory)
    notes(found.notes)
    write(found.table(), out)
    print_line(f"{len(found):,} predictions: {out}")
