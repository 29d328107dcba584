"""Time and memory of predictions on a large grid, whole and in blocks: docs/predict.md."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np

from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.runs.models import SavedModel
from polyphily.runs.prediction import class_scores

HEIGHT, WIDTH, FEATURES = 400, 1000, 32
BACKBONES = ("gcn", "acm-gcn", "gat", "res-acm")
LIMITS = ("100GB", "100MB")


def grid() -> Graph:
    """Return a grid without labels."""
    nodes = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
    across = np.stack([nodes[:, :-1].ravel(), nodes[:, 1:].ravel()])
    down = np.stack([nodes[:-1].ravel(), nodes[1:].ravel()])
    features = np.random.default_rng(0).normal(size=(nodes.size, FEATURES)).astype(np.float32)
    edges = np.concatenate([across, down], axis=1)
    return Graph.build(features, edges, np.full(nodes.size, UNLABELLED))


def untrained(backbone: str) -> SavedModel:
    """Return a model with initial parameters."""
    chosen = Settings(hidden=64, layers=2, backbone=backbone)
    settings = fill(chosen, "files", "accuracy", dense=True)
    model = SavedModel("fedavg", {}, settings, FEATURES, ("no", "yes"), {}, network=backbone)
    return replace(model, tensors={n: p.detach()[0] for n, p in model.module.named_parameters()})


def measure(backbone: str, memory: str) -> None:
    """Print seconds, and the peak of memory in addition to that of a small prediction."""
    graph, model = grid(), untrained(backbone)
    class_scores(model, graph.subgraph(np.arange(1000)))
    before, began = _peak(), time.perf_counter()
    class_scores(model, graph, memory=memory)
    seconds = time.perf_counter() - began
    print(f"{backbone:8} {memory:6} {seconds:6.1f} s {_peak() - before:6.0f} MB", flush=True)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:  # a process each, because the peak of a process does not go down
        for name in BACKBONES:
            for limit in LIMITS:
                subprocess.run([sys.executable, __file__, name, limit], check=True)
