"""Export of saved models: the same network in torch and torch_geometric alone.

The networks are in `polyphily.nn.plain`. An exported folder has a copy of that file, so that it
needs torch, torch_geometric and safetensors, but not Polyphily.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyphily.core.messages import Message
from polyphily.core.method import Method
from polyphily.errors import UserError
from polyphily.graphs.degrees import BINS
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.rules import ArrayRule
from polyphily.nn import plain
from polyphily.nn.plain_form import Spec, describe, plain_state
from polyphily.runs.folder import save_tensors
from polyphily.runs.models import BEST, SavedModel
from polyphily.runs.opened import load_model
from polyphily.runs.prediction import WithModels

WEIGHTS, FACTS, MODULE = "model.safetensors", "model.json", "module.py"
ARCHIVE = ".pt2"
INSTEAD = "use `polyphily predict`, or Run.predict_proba in Python"


def export(
    source: str | Path | SavedModel | WithModels,
    client: str | None = None,
    *,
    seed: int | None = None,
    which: str = BEST,
) -> plain.Model:
    """Return a model as a plain module: `forward(x, edge_index, edge_weight=None)` gives logits.

    It is a torch_geometric network that computes what the model computes, to rounding. Features are
    passed as `Model.encode` returns them, and edges as `Model.prepare` does.

    Args:
        source: a model file, a run folder, a `SavedModel`, or what `run` or `open_run` returned.
        client: the client whose model it is; None for the global model.
        seed: which of several runs; the first unless given.
        which: "best" (of the best validation round) or "last".

    Raises:
        UserError: if there is no such model, or if its predictions are more than a network.
    """
    return plain_model(saved_model(source, client, seed=seed, which=which))


def saved_model(
    source: str | Path | SavedModel | WithModels,
    client: str | None = None,
    *,
    seed: int | None = None,
    which: str = BEST,
) -> SavedModel:
    """Return the model that is meant by a file, a folder or a run."""
    if isinstance(source, SavedModel):
        return source.for_client(client)
    if isinstance(source, WithModels):
        return source.model(client, seed=seed, which=which)
    return load_model(source, client, seed=seed, which=which)


def plain_model(saved: SavedModel) -> plain.Model:
    """Return a saved model as a plain module."""
    network, state = _evaluated(saved)
    model = plain.Model(**_description(saved, network))
    model.network.to(getattr(torch, saved.settings.dtype))
    model.network.load_state_dict(state)
    return model.eval()


def write(saved: SavedModel, out: Path) -> list[Path]:
    """Write an exported model and return the files.

    Args:
        saved: the model.
        out: a folder for `model.safetensors`, `model.json` and `module.py`; or a `.pt2` file for a
            program of `torch.export`, with `model.json` inside.

    Raises:
        UserError: if the model cannot be exported, or the files cannot be written.
    """
    if out.suffix not in ("", ARCHIVE) and not out.is_dir():
        raise UserError(f"--out {out}: give a folder, or a file that ends in {ARCHIVE}")
    model = plain_model(saved)
    facts = json.dumps(_facts(saved), indent=2, allow_nan=False) + "\n"
    try:
        if out.suffix == ARCHIVE:
            out.parent.mkdir(parents=True, exist_ok=True)
            torch.export.save(program(model, saved.width), out, extra_files={FACTS: facts})
            return [out]
        out.mkdir(parents=True, exist_ok=True)
        state = {n: t.detach().contiguous() for n, t in model.state_dict().items()}
        save_tensors(out / WEIGHTS, state, {"format": "pt"})
        (out / FACTS).write_text(facts, encoding="utf-8")
        shutil.copyfile(plain.__file__, out / MODULE)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    return [out / name for name in (WEIGHTS, FACTS, MODULE)]


def program(model: plain.Model, features: int) -> torch.export.ExportedProgram:
    """Trace a model with `torch.export`, for any number of nodes and edges.

    The program takes x, edge_index and edge_weight (ones if edges have no weights), then edge_type
    if the network tells types apart, then labels if it uses known ones.

    Args:
        model: the plain module.
        features: the number of features of a node.
    """
    from torch.export import Dim

    nodes, edges = 11, 26
    dtype = next(model.parameters()).dtype
    index = torch.stack([torch.arange(edges) % nodes, (torch.arange(edges) * 3 + 1) % nodes])
    x = torch.ones(nodes, features, dtype=dtype)
    many_nodes, many_edges = Dim("nodes", min=2), Dim("edges", min=2)
    more: dict[str, tuple[Tensor, Any]] = {}
    if model.relations > 1:
        more["edge_type"] = torch.arange(edges) % model.relations, {0: many_edges}
    if model.uses_labels:
        more["labels"] = torch.arange(nodes) % model.classes, {0: many_nodes}
    values, shapes = zip(*more.values(), strict=True) if more else ((), ())
    return torch.export.export(
        _Program(model, list(more)),
        (x, index, torch.ones(edges, dtype=dtype), *values),
        dynamic_shapes=(
            {0: many_nodes},
            {1: many_edges},
            {0: many_edges},
            *([tuple(shapes)] if more else []),
        ),
        strict=False,
    )


class _Program(nn.Module):
    """A model with the inputs that it uses, in a fixed order."""

    def __init__(self, model: plain.Model, more: Sequence[str]) -> None:
        super().__init__()
        self.model, self.more = model, more

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, *more: Tensor) -> Tensor:
        used = dict(zip(self.more, more, strict=True))
        out: Tensor = self.model(x, edge_index, edge_weight, **used)
        return out


# The network -------------------------------------------------------------------------------------


def _evaluated(saved: SavedModel) -> tuple[Spec, Message]:
    """Return the description and the parameters of the network that a model's predictions are.

    Raises:
        UserError: if predictions are more than that, or the network has no plain form.
    """
    method = saved.make_method()
    if type(method).predict is not Method.predict:
        raise UserError(
            f"{method.name} cannot be exported: its predictions are more than the output of a "
            f"network; {INSTEAD}"
        )
    network, params = saved.module.in_evaluation(saved.params)
    try:
        spec = describe(network)
    except UserError as error:
        raise UserError(f"{method.name} cannot be exported: {error}; {INSTEAD}") from None
    return spec, plain_state(network, params)


def _description(saved: SavedModel, network: Spec) -> Spec:
    """Return the arguments of `plain.Model`."""
    settings = saved.settings
    relational = any(getattr(part, "relational", False) for part in saved.module.modules())
    return {
        "network": network,
        "classes": len(saved.classes),
        "direction": settings.direction,
        "weighted": settings.edge_weights,
        "relations": saved.shape.relations if relational else 0,
        "label_inputs": settings.label_inputs > 0,
        "degree_inputs": BINS if settings.degree_inputs else 0,
        "scaling": _scaling(saved.encoding),
    }


def _scaling(encoding: Encoding | None) -> Spec | None:
    """Return how an array of features is scaled; None if the encoding is that of a table."""
    if encoding is None:
        return {"mean": None, "std": None, "row": False, "padding": 0}
    if not isinstance(encoding.rules, ArrayRule):
        return None
    rule = encoding.rules.to_json()
    own = {"row": encoding.row, "padding": encoding.padding}
    return {"mean": rule["mean"], "std": rule["std"], **own}


def _facts(saved: SavedModel) -> Spec:
    """Return what `model.json` says: the network, and what belongs to a prediction."""
    network, _ = _evaluated(saved)
    facts = saved.facts()
    kept = ("polyphily", "method", "client", "round", "which", "seed", "dataset", "classes")
    return {
        "model": _description(saved, network),
        "features": saved.width,
        "relations": list(saved.settings.relation_names()),
        **{name: facts[name] for name in (*kept, "encoding", "decision", "versions")},
    }
