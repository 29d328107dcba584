# %% [markdown]
# # From a torch_geometric `Data` to `predict_proba`
#
# You have a graph in memory. We make a small one, divide it among four clients, train them
# together, predict nodes that were not there, and export the model. Nothing is downloaded.

# %%
import torch
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.utils import stochastic_blockmodel_graph

import polyphily

torch.manual_seed(0)

# %% [markdown]
# ## A graph
#
# Three classes of 150 nodes. Nodes of one class are linked more often, and features say little
# about the class. Your own `Data` will do as well: `x` may be dense or sparse, masks may have a
# column for each split, and `edge_weight` is used if there is one. A node whose class is unknown
# has `y` -1.


# %%
def draw(per_class: int) -> Data:
    """Draw a graph of three classes."""
    links = torch.full((3, 3), 0.01) + 0.07 * torch.eye(3)
    y = torch.arange(3).repeat_interleave(per_class)
    edge_index = stochastic_blockmodel_graph([per_class] * 3, links)
    x = torch.randn(3 * per_class, 16)
    x[torch.arange(len(y)), y] += 1.5
    return Data(x=x, edge_index=edge_index, y=y)


data = draw(150)
data.class_names = ["red", "green", "blue"]
print(data)

# %% [markdown]
# ## Clients
#
# A `Data` is one client. With `partition` or `clients` it is divided among several. A list of
# `Data` or a dataset of many graphs has a client for each graph.

# %%
federation = polyphily.load(data, partition="random", clients=4, split="0.05,0.15,0.8")
print(federation)

# %% [markdown]
# ## Alone and together
#
# `local` trains every client alone, `fedavg` averages their models. Validation nodes choose the
# round, and test nodes are scored.

# %%
settings = {"backbone": "gcn", "hidden": 32, "rounds": 30}
alone = polyphily.run("local", federation, **settings)
together = polyphily.run("fedavg", federation, **settings)
for result in (alone, together):
    print(result)

# %% [markdown]
# ## Probabilities
#
# `predict_proba` takes a client of the run, or a graph that was not there in training. The new
# graph needs no labels. The result has a row per node and a column per class.

# %%
print(together.predict_proba("client-0").head(3))
tomorrow = draw(50)
truth, tomorrow.y = tomorrow.y, None
probabilities = together.predict_proba(tomorrow)
print(probabilities.round(3).head(3))
right = probabilities.to_numpy().argmax(axis=1) == truth.numpy()
print(f"{right.mean():.1%} of the new nodes are right")

# %% [markdown]
# ## Back to torch_geometric
#
# `to_pyg` returns a `Data` per client, with masks, names and ids of nodes. `load` takes the list
# again.

# %%
clients = federation.to_pyg()
print(clients[0])
assert len(polyphily.load(clients)) == len(federation)

# %% [markdown]
# ## A plain network
#
# `export` returns the same model as a module of torch_geometric layers. It can be fine-tuned, saved
# with `torch.save`, or explained. `prepare` removes self-loops and adds reverse edges, as `load`
# does. On the command line `polyphily export` writes a folder or a `torch.export` program.

# %%
model = polyphily.export(together)
edge_index, edge_weight, _ = model.prepare(tomorrow.edge_index, num_nodes=tomorrow.num_nodes)
with torch.no_grad():
    logits = model(tomorrow.x, edge_index, edge_weight)
print((logits.argmax(dim=1) == truth).float().mean())

# %% [markdown]
# ## Why?
#
# Explainers of torch_geometric work on the exported network. GNNExplainer learns which features and
# which edges a prediction rests on.

# %%
explainer = Explainer(
    model=model,
    algorithm=GNNExplainer(epochs=100),
    explanation_type="model",
    node_mask_type="attributes",
    edge_mask_type="object",
    model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
)
explanation = explainer(tomorrow.x, edge_index, index=0)
strongest = explanation.edge_mask.topk(3).indices
print("edges that matter for node 0:", edge_index[:, strongest].T.tolist())
print("features by weight:", explanation.node_mask.sum(dim=0).topk(3).indices.tolist())
