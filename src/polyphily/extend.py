"""All that a package needs to add a method, backbone, partition, dataset or metric.

    from polyphily.extend import FedAvg, parameter, register_method

A name is imported from its module on first use, so that a package with a dataset does not import
torch. `docs/extending.md` has an example of each kind, and `polyphily.testing` checks yours.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort as Cohort
    from polyphily.core.cohort import TrainingGraph as TrainingGraph
    from polyphily.core.local import Local as Local
    from polyphily.core.messages import AFTER_FIRST as AFTER_FIRST
    from polyphily.core.messages import EVERY_ROUND as EVERY_ROUND
    from polyphily.core.messages import FIRST_ROUND as FIRST_ROUND
    from polyphily.core.messages import Declared as Declared
    from polyphily.core.messages import Individually as Individually
    from polyphily.core.messages import Mean as Mean
    from polyphily.core.messages import Message as Message
    from polyphily.core.messages import Role as Role
    from polyphily.core.messages import Rounds as Rounds
    from polyphily.core.messages import Sizes as Sizes
    from polyphily.core.messages import State as State
    from polyphily.core.messages import Sum as Sum
    from polyphily.core.messages import Uploads as Uploads
    from polyphily.core.messages import as_model as as_model
    from polyphily.core.messages import count as count
    from polyphily.core.messages import model as model
    from polyphily.core.messages import model_part as model_part
    from polyphily.core.messages import public as public
    from polyphily.core.messages import statistic as statistic
    from polyphily.core.messages import to_each as to_each
    from polyphily.core.method import Method as Method
    from polyphily.core.method import parameter as parameter
    from polyphily.core.method import register as register
    from polyphily.core.metrics import Predictions as Predictions
    from polyphily.core.metrics import register_metric as register_metric
    from polyphily.core.optimizers import OptimizerSpec as OptimizerSpec
    from polyphily.core.search import Choices as Choices
    from polyphily.core.search import Range as Range
    from polyphily.errors import UserError as UserError
    from polyphily.graphs.datasets.info import DatasetInfo as DatasetInfo
    from polyphily.graphs.datasets.info import Part as Part
    from polyphily.graphs.datasets.info import Request as Request
    from polyphily.graphs.datasets.registry import register_dataset as register_dataset
    from polyphily.graphs.graph import UNLABELLED as UNLABELLED
    from polyphily.graphs.graph import Collection as Collection
    from polyphily.graphs.graph import Graph as Graph
    from polyphily.graphs.graph import IntArray as IntArray
    from polyphily.graphs.graph import Masks as Masks
    from polyphily.graphs.options import Bounds as Bounds
    from polyphily.graphs.options import real as real
    from polyphily.graphs.options import whole as whole
    from polyphily.graphs.partitions import register_partition as register_partition
    from polyphily.graphs.random import generator as generator
    from polyphily.methods.fedavg import WEIGHT as WEIGHT
    from polyphily.methods.fedavg import FedAvg as FedAvg
    from polyphily.nn.backbones import Backbone as Backbone
    from polyphily.nn.backbones import Output as Output
    from polyphily.nn.backbones import Shape as Shape
    from polyphily.nn.backbones import Stack as Stack
    from polyphily.nn.backbones import register_backbone as register_backbone
    from polyphily.nn.draws import Draws as Draws
    from polyphily.nn.layers import ACMConv as ACMConv
    from polyphily.nn.layers import GATConv as GATConv
    from polyphily.nn.layers import GCNConv as GCNConv
    from polyphily.nn.layers import LayerNorm as LayerNorm
    from polyphily.nn.layers import Linear as Linear
    from polyphily.nn.layers import SAGEConv as SAGEConv
    from polyphily.nn.layers import glorot as glorot
    from polyphily.nn.layers import matmul as matmul
    from polyphily.nn.layers import zeros as zeros
    from polyphily.nn.segments import Segments as Segments
    from polyphily.nn.sparse import SparseMatrix as SparseMatrix
    from polyphily.nn.stacked import StackedGraph as StackedGraph

    register_method = register

_HOMES = {
    # A method, and what its hooks are given
    "polyphily.core.method": ("Method", "parameter", "register", "register_method"),
    "polyphily.methods.fedavg": ("FedAvg", "WEIGHT"),
    "polyphily.core.local": ("Local",),
    "polyphily.core.cohort": ("Cohort", "TrainingGraph"),
    "polyphily.core.optimizers": ("OptimizerSpec",),
    "polyphily.core.search": ("Range", "Choices"),  # the values that --tune tries
    # Messages, and what a method declares about them
    "polyphily.core.messages": (
        *("Message", "State", "Uploads", "as_model", "model_part", "to_each"),
        *("Declared", "Sizes", "model", "statistic", "count", "public"),  # what travels
        *("Mean", "Sum", "Individually", "Role"),  # what the server does with it, what it tells
        *("Rounds", "EVERY_ROUND", "FIRST_ROUND", "AFTER_FIRST"),  # when it travels
    ),
    # A backbone, and layers for stacked clients
    "polyphily.nn.backbones": ("Backbone", "Output", "Shape", "Stack", "register_backbone"),
    "polyphily.nn.stacked": ("StackedGraph",),
    "polyphily.nn.layers": (
        *("Linear", "GCNConv", "SAGEConv", "GATConv", "ACMConv", "LayerNorm"),
        *("matmul", "glorot", "zeros"),
    ),
    "polyphily.nn.segments": ("Segments",),
    "polyphily.nn.sparse": ("SparseMatrix",),
    "polyphily.nn.draws": ("Draws",),
    # A partition
    "polyphily.graphs.partitions": ("register_partition",),
    # Options and random numbers of partitions and datasets
    "polyphily.graphs.options": ("Bounds", "real", "whole"),
    "polyphily.graphs.random": ("generator",),
    # A dataset
    "polyphily.graphs.datasets.registry": ("register_dataset",),
    "polyphily.graphs.datasets.info": ("DatasetInfo", "Part", "Request"),
    "polyphily.graphs.graph": ("Graph", "Masks", "Collection", "UNLABELLED", "IntArray"),
    # A metric
    "polyphily.core.metrics": ("register_metric", "Predictions"),
    # All of them
    "polyphily.errors": ("UserError",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'polyphily.extend' has no attribute '{name}'")
    own = "register" if name == "register_method" else name
    return getattr(import_module(_HOME_OF[name]), own)


def __dir__() -> list[str]:
    return sorted(__all__)
