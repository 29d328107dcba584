"""A site's own graph, and its conversion to the schema that all sites agreed on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyphily.errors import UserError
from polyphily.flower.plan import Schema
from polyphily.graphs import files
from polyphily.graphs.columns import columns_of, conform, named_columns
from polyphily.graphs.files.client import listed
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.heterogeneity.homophily import class_counts, edge_homophily


@dataclass(frozen=True)
class SiteGraph:
    """A site's graph as its files hold it, with columns and labels in their own order."""

    graph: Graph
    schema: Schema
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> SiteGraph:
        """Read the graph at `path`, in any of the formats of `polyphily run`.

        Raises:
            UserError: if there is more than one graph.
        """
        collection = files.read(path)
        if len(collection.graphs) != 1:
            names = listed(graph.name for graph in collection.graphs)
            raise UserError(f"{path}: holds {len(collection.graphs)} graphs ({names}): give one")
        (graph,) = collection.graphs
        columns = () if graph.table is None else columns_of(graph.table)
        features = tuple(column.name for column in columns)
        width = graph.num_features if graph.table is None else len(columns)
        schema = Schema(features, width, collection.classes, columns)
        return cls(graph, schema, collection.notes)

    def aligned(self, schema: Schema) -> Graph:
        """Return the graph with columns and labels in the order of a schema.

        Raises:
            UserError: if columns or labels do not fit, with their names.
        """
        graph, own = self.graph, self.schema
        features, table = graph.features, graph.table
        if own.features and schema.features:
            position = {name: i for i, name in enumerate(own.features)}
            missing = [name for name in schema.features if name not in position]
            extra = [name for name in own.features if name not in schema.features]
            if missing or extra:
                raise UserError(
                    "the graph's feature columns are not those that the sites agreed on: missing "
                    f"{listed(missing) or 'none'}, not agreed on {listed(extra) or 'none'}"
                )
            if table is None:
                features = features[:, [position[name] for name in schema.features]]
        elif own.width != schema.width:
            raise UserError(
                f"the graph has {own.width} features, but the sites agreed on {schema.width}"
            )
        if schema.columns:
            raw = table or named_columns(features, schema.features)
            table, features = conform(raw, schema.columns), features[:, :0]
        index = {name: i for i, name in enumerate(schema.classes)}
        unknown = [name for name in own.classes if name not in index]
        if unknown:
            raise UserError(
                f"the graph has labels that were not agreed on: {listed(unknown)}. "
                f"Agreed: {listed(schema.classes, 50)}"
            )
        # The last entry is for unlabelled nodes, whose label -1 indexes from the end.
        new_label = np.array([*(index[name] for name in own.classes), UNLABELLED])
        return replace(graph, features=features, table=table, labels=new_label[graph.labels])

    def summary(self) -> dict[str, Any]:
        """Return size, homophily and label counts; they are shown at the site and never sent."""
        graph, classes = self.graph, self.schema.classes
        homophily = edge_homophily(graph)
        counts = class_counts(graph, len(classes))
        return {
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "features": self.schema.width,
            "labelled": int(counts.sum()),
            "labels": dict(zip(classes, counts.tolist(), strict=True)),
            "homophily": None if math.isnan(homophily) else homophily,
            "split": "own" if graph.own_masks else "drawn",
        }
