"""`polyphily export`: a saved model as a plain torch_geometric network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    model: Annotated[
        Path,
        typer.Option("--model", help="A model file, a run folder, or a site's folder."),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="A folder, or a .pt2 file for a torch.export program.")
    ],
    client: Annotated[
        str | None, typer.Option(help="The client whose model and threshold are exported.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Which run, if there are several seeds; the first.")
    ] = None,
    which: Annotated[
        str, typer.Option(help="The model of the best validation round, or the last: best, last.")
    ] = "best",
) -> None:
    """Export a model to torch and torch_geometric, for use without Polyphily.

    A folder gets model.safetensors, model.json (network, classes, encoding, temperature and
    threshold) and module.py, whose `load` returns the network.
    """
    from polyphily.cli.terminal import print_line
    from polyphily.runs.export import saved_model, write

    for file in write(saved_model(model, client, seed=seed, which=which), out):
        print_line(str(file))
