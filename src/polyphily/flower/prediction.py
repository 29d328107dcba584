"""Predictions for the nodes of a site, from a model in the site's folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyphily.errors import UserError
from polyphily.flower.site import Prepared
from polyphily.flower.site_files import SavedModel
from polyphily.flower.site_graph import SiteGraph
from polyphily.graphs.graph import UNLABELLED, Masks
from polyphily.graphs.loading import normalize_features
from polyphily.runtime.machine import check_device

if TYPE_CHECKING:
    import pandas as pd


def predict(model: Path, graph: Path, device: str = "cpu") -> pd.DataFrame:
    """Return every node's id, predicted label and class probabilities, in the order of the file.

    Args:
        model: a model file of a site.
        graph: the graph to predict. It may have other nodes and edges than the graph that the
            model was trained on. Its labels are those that are known, or the train nodes' only if
            it has a split of its own. Networks that use known labels see them: those with labels
            as inputs, FedSPA's, and unifilter. Others ignore them.
        device: where to compute.
    """
    import pandas as pd
    import torch

    check_device(device)
    saved = SavedModel.load(model)
    aligned = SiteGraph.read(graph).aligned(saved.plan.schema)
    empty = np.zeros(aligned.num_nodes, dtype=np.bool_)
    features = normalize_features(aligned.features, saved.plan.normalize)
    own = aligned.own_masks
    known = own[0].train if own else aligned.labels != UNLABELLED
    prepared = replace(aligned, features=features, masks=Masks(known, empty, empty))
    site = Prepared.of(saved.plan, prepared, saved.client, device)
    logits = site.clients.predict(site.restored(saved)).cpu()
    probabilities = torch.softmax(logits.double(), dim=1).numpy()
    classes = np.array(saved.plan.schema.classes)
    ids = np.arange(aligned.num_nodes) if aligned.node_ids is None else aligned.node_ids
    columns = {f"probability {name}": probabilities[:, c] for c, name in enumerate(classes)}
    return pd.DataFrame({"id": ids, "label": classes[probabilities.argmax(axis=1)], **columns})


def write(table: pd.DataFrame, file: Path) -> None:
    """Write predictions as Parquet or CSV, by the ending of the file name."""
    writers = {".parquet": table.to_parquet, ".csv": table.to_csv}
    if file.suffix not in writers:
        raise UserError(f"--out {file}: end the name in .parquet or .csv")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writers[file.suffix](file, index=False)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
