"""Labels for the nodes of a site, from the model that the site keeps to itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyphily.errors import UserError
from polyphily.flower.site import SavedModel, SiteGraph, Trainer
from polyphily.graphs.graph import Masks
from polyphily.graphs.loading import _normalize
from polyphily.runs.run import check_device

if TYPE_CHECKING:
    import pandas as pd


def predict(model: Path, graph: Path, device: str = "cpu") -> pd.DataFrame:
    """Every node's id, label and the probability of each class, in the order of the file.

    The graph need not be the one that was trained on: nodes and edges may have come and gone.
    Labels in it play no part.
    """
    import pandas as pd
    import torch

    check_device(device)
    saved = SavedModel.load(model)
    found = SiteGraph.read(graph)
    agreed = found.agreed(saved.plan.schema)
    nothing = np.zeros(agreed.num_nodes, dtype=np.bool_)
    features = _normalize(agreed.features, saved.plan.normalize)
    prepared = replace(agreed, features=features, masks=Masks(nothing, nothing, nothing))
    trainer = Trainer(saved.plan, prepared, saved.client, device)
    logits = trainer.predict(trainer.restored(saved)).cpu()
    shares = torch.softmax(logits.double(), dim=1).numpy()
    classes = np.array(saved.plan.schema.classes)
    ids = np.arange(agreed.num_nodes) if agreed.node_ids is None else agreed.node_ids
    columns = {f"probability {name}": shares[:, c] for c, name in enumerate(classes)}
    return pd.DataFrame({"id": ids, "label": classes[shares.argmax(axis=1)], **columns})


def write(table: pd.DataFrame, file: Path) -> None:
    """Writes predictions as parquet or CSV, by the file's ending."""
    writers = {".parquet": table.to_parquet, ".csv": table.to_csv}
    if file.suffix not in writers:
        raise UserError(f"--out {file}: end the name in .parquet or .csv")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writers[file.suffix](file, index=False)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
