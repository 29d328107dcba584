"""Polyphony: shared networks of different bias, and a mix of them at every client."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.core.labels import LabelsShown, draw_hidden, labelled_features
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Message,
    Rounds,
    Sizes,
    State,
    Sum,
    Uploads,
    statistic,
    to_each,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.polyphony.audition import (
    STEPS,
    held_out,
    posterior,
    responsibilities,
    sharpened,
)
from polyphily.methods.polyphony.voices import MIX, VOICES, Voices, renditions
from polyphily.nn.backbones import BACKBONES, GPRGNN, Backbone, Shape
from polyphily.nn.choir import VOICES as DEFAULT
from polyphily.nn.choir import Song, mix
from polyphily.nn.draws import Draws
from polyphily.nn.residual import Residual
from polyphily.nn.segments import Segments

PARTS, HEARD = "parts", "heard"
EVEN, OWN, FEDERATION = "even", "own", "federation"  # of mixing
BOTH = "both"  # of renditions
ALL = "all"  # of labels
AUDITION = ("audition", "held", "fewest", "trust", "decay", "sharpness")  # hyperparameters


@register("polyphony", cite="Polyphily, docs/polyphony.md")
@dataclass(frozen=True)
class Polyphony(FedAvg):
    """p_k(y) = sum_v w_kv p_v(y): shared voices v, and a mix w_k at client k.

    Voices are networks of different bias, averaged as in FedAvg; their normalisations stay at
    home. Most have the labels of train nodes among their inputs. Every step hides some labels,
    which these voices predict. All voices count the same, unless there is an audition (`mixing`):
    in the first rounds clients with many train nodes hold some out, on which they compare the
    voices. Small clients mix as the federation does then.
    """

    backbone: ClassVar[str | None] = "choir"

    voices: str = parameter(",".join(DEFAULT), "backbones of the shared voices, with commas")
    solo: str = parameter("", "backbones of voices that every client trains alone, with commas")
    labels: str = parameter(
        "most",
        "which voices have train labels among their inputs: most are all but gpr-gnn",
        choices=("most", ALL, "residual", "none"),
    )
    hidden_share: float = parameter(
        0.5, "share of train labels that each step hides from the voices that see labels"
    )
    private: str = parameter(
        "norms", "what of shared voices stays at home", choices=("norms", "none")
    )
    together: float = parameter(
        0.0,
        "weight of the cross-entropy of the mix beside that of every voice",
        symbol="λ",
    )
    renditions: str = parameter(
        BOTH,
        "which renditions of a voice are mixed: the federation's, or also the client's own, as it "
        "trained it last",
        choices=(BOTH, "shared"),
    )
    own_share: float = parameter(
        0.25,
        "weight of all own renditions together in a mix that has heard nothing",
        symbol="ρ",
        search=Range(0.05, 0.5, log=True),
    )
    mixing: str = parameter(
        EVEN,
        "whose weights mix the voices: those of a mix that has heard nothing, in which all voices "
        "are even, or by an audition each client's own, or one set for the federation",
        choices=(EVEN, OWN, FEDERATION),
    )
    audition: int = parameter(50, "rounds of the audition")
    held: float = parameter(0.1, "share of train nodes held out in the audition")
    fewest: int = parameter(
        100, "train nodes that a client needs to hold some out; others mix as the federation does"
    )
    trust: float = parameter(
        20.0,
        "held-out nodes that the federation's mix counts for at a client, and an even one at the "
        "server",
        symbol="τ",
    )
    decay: float = parameter(
        0.9, "how much of what was heard in earlier rounds is kept in the next"
    )

    sharpness: float = parameter(
        2.0,
        "how many times what was heard counts in the weights of a mix; 1: the likeliest weights",
        symbol="γ",
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            *(("hidden_share", 0, 1), ("held", 0, 0.9), ("decay", 0, 0.999), ("own_share", 0, 1)),
            *(("together", 0, np.inf), ("trust", 1e-6, np.inf), ("audition", 0, np.inf)),
            *(("fewest", 0, np.inf), ("sharpness", 0, 100)),
        ):
            if not low <= getattr(self, name) <= high:
                upper = "" if high == np.inf else f" and at most {high:g}"
                raise UserError(f"polyphony: '{name}' must be at least {low}{upper}")
        for name in (*self.shared_voices, *self.solo_voices):
            if BACKBONES.find(name).keeps_features and self.labels == ALL:
                raise UserError(f"polyphony: labels=all: {name} computes from the features once")
            if BACKBONES.find(name).name == "choir":
                raise UserError("polyphony: a choir is not a voice; name other backbones")
        if not self.shared_voices:
            raise UserError("polyphony: 'voices' names no backbone")

    @property
    def shared_voices(self) -> tuple[str, ...]:
        return _names(self.voices)

    @property
    def solo_voices(self) -> tuple[str, ...]:
        return _names(self.solo)

    @property
    def all_voices(self) -> tuple[str, ...]:
        return (*self.shared_voices, *self.solo_voices)

    @property
    def labelled(self) -> tuple[int, ...]:
        """The numbers of the voices that see labels."""
        return tuple(
            v
            for v, name in enumerate(self.all_voices)
            if self.labels == ALL
            or (self.labels == "most" and not issubclass(BACKBONES.find(name), GPRGNN))
            or (self.labels == "residual" and issubclass(BACKBONES.find(name), Residual))
        )

    @property
    def listens(self) -> bool:
        """True if there is an audition."""
        return self.mixing != EVEN and self.parts > 1 and self.audition > 0

    @property
    def parts(self) -> int:
        """The number of voices that are mixed, in all their renditions."""
        return len(self.all_voices) * (2 if self.renditions == BOTH else 1)

    @property
    def even(self) -> tuple[float, ...]:
        """The weights of all parts in a mix that has heard nothing: voices are even."""
        voices = len(self.all_voices)
        own = self.own_share if self.renditions == BOTH else 0.0
        return (
            *((1 - own) / voices,) * voices,
            *(own / voices,) * (self.parts - voices),
        )

    def even_mix(self, like: Tensor) -> Tensor:
        """Return `even` as a tensor `[V]`, made on the device of another one."""
        voices = len(self.all_voices)
        parts = (like.new_full((voices,), weight) for weight in self.even[::voices])
        return torch.cat(list(parts))

    def without_effect(self) -> Mapping[str, str]:
        idle: dict[str, str] = {}
        single = "there is a single voice; name more in 'voices'"
        if len(self.all_voices) == 1:
            idle["together"] = single
        if self.parts == 1:
            idle |= dict.fromkeys(("mixing", *AUDITION), single)
        elif not self.listens:
            what = "mixing=own" if self.mixing == EVEN else "audition above 0"
            names = (*AUDITION, *(["mixing"] * (self.mixing != EVEN)))
            idle |= {n: f"there is no audition; set {what}" for n in names if n not in what}
        if not any(issubclass(BACKBONES.find(name), Residual) for name in self.shared_voices):
            idle["private"] = "no shared voice has normalisations; name a residual one"
        if self.renditions != BOTH:
            idle["own_share"] = "own renditions are not mixed; set renditions=both"
        if not self.labelled:
            idle["hidden_share"] = "no voice sees labels; set labels=all"
        return idle

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return ("choir",)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        first = len(self.shared_voices)
        if self.private == "norms":
            shape = replace(shape, norms_at_home=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Voices(
                shape,
                self.all_voices,
                self.labelled,
                range(first, len(self.all_voices)),
                self.even,
            )

    def needs_whole_graph(self) -> str | None:
        return "labels are inputs, and the audition holds nodes out"

    def phase(self, round_index: int) -> Hashable:
        return self.listens and round_index < self.audition

    def stage(self, round_index: int) -> str:
        if not self.listens:
            return ""
        return "audition" if self.phase(round_index) else "concert"

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.listens:
            return super().uploads(sizes)
        heard, rounds = (self.parts,), Rounds(last=self.audition)
        return (
            *super().uploads(sizes),
            statistic(
                PARTS,
                heard,
                Sum(),
                rounds=rounds,
                meaning="held-out nodes that each voice explains",
            ),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.listens:
            return super().downloads(sizes)
        weights = statistic(MIX, (self.parts,), meaning="weights of the voices")
        return (*super().downloads(sizes), weights)

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        return {**sent, PARTS: local.constants[PARTS]} if local.phase else sent

    # At the clients --------------------------------------------------------------------------

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """Return what the client has heard so far: nothing."""
        return {PARTS: cohort.num_train.new_zeros(len(cohort), self.parts)} if self.listens else {}

    def held_out(self, cohort: TrainingGraph) -> tuple[Tensor, Segments]:
        """Return the train nodes that are held out in the audition."""
        return held_out(cohort, self.held, self.fewest)

    def prepare_round(self, local: Local) -> Message:
        """Compute the weights of this round's mix; in the audition, from the held-out nodes."""
        weights = local.params[MIX].detach().clone()
        if not local.phase:
            return {MIX: weights}
        cohort, prior = local.cohort, local.received[MIX]
        held, segments = self.held_out(cohort)
        heard = local.memory[PARTS]
        weights = posterior(heard, prior, self.trust) if self.mixing == OWN else prior
        if not any(segments.sizes):
            return {MIX: self.sharpen(weights), HEARD: heard, PARTS: torch.zeros_like(heard)}
        visible = torch.ones_like(cohort.train_labels, dtype=torch.bool).index_fill(0, held, False)
        with torch.no_grad():
            said = self.sing(local, visible).voices[:, cohort.train_nodes[held]]
            likelihood = at_labels(said.log_softmax(dim=2), cohort.train_labels[held]).T
            steps = STEPS if self.mixing == OWN else 1
            parts = responsibilities(likelihood, weights, prior, self.trust, segments, steps)
            heard = self.decay * heard + (1 - self.decay) * parts
            if self.mixing == OWN:
                weights = posterior(heard, prior, self.trust)
        return {MIX: self.sharpen(weights), HEARD: heard, PARTS: parts}

    def sharpen(self, weights: Tensor) -> Tensor:
        """Return the weights of a mix from those that EM found, `[K, V]`."""
        return sharpened(weights, self.even_mix(weights), self.sharpness)

    def sing(self, local: Local, visible: Tensor, draws: Draws | None = None) -> Song:
        """Return what the parts say where some train nodes show their labels."""
        graph = local.cohort
        shown = LabelsShown(graph, labelled_features(graph, graph.classes), visible)
        song: Song = functional_call(local.network, local.params, (graph, draws, shown))
        return song

    def loss(self, local: Local) -> Tensor:
        assert local.draws is not None
        cohort = local.cohort
        segments = cohort.train_segments
        used = cohort.num_train.new_ones(len(cohort.train_nodes))
        if local.phase:
            used = used.index_fill(0, self.held_out(cohort)[0], 0)
        asked = used  # of the voices that see labels
        if self.labelled:
            drawn = draw_hidden(cohort, local.draws, self.hidden_share)
            asked = used * torch.zeros_like(used).index_fill(0, drawn, 1)
        said = self.sing(local, used > asked, local.draws).voices[:, cohort.train_nodes]
        likelihood = at_labels(said.log_softmax(dim=2), cohort.train_labels)
        counts = torch.stack([asked if v in self.labelled else used for v in range(len(said))])
        errors = local.weighted(-likelihood)
        each = segments.sum((errors * counts).T) / segments.sum(counts.T).clamp(min=1)
        total = each.sum(dim=1)
        if self.together and len(said) > 1:
            weights = local.constants[MIX].view(len(cohort), -1, len(said)).sum(dim=1)
            mixed = mix(likelihood, segments.expand(weights))
            errors = local.weighted(-mixed)
            mean = segments.sum(errors * asked) / segments.sum(asked).clamp(min=1)
            total = total + self.together * mean
        return total

    def train(self, local: Local) -> None:
        """Train the voices; keep them as own renditions, and the mix."""
        local.params = {n: p for n, p in local.params.items() if n.startswith(VOICES)}
        local.descend(self)
        own = renditions(local.params) if self.renditions == BOTH else {}
        local.params |= {**own, MIX: local.constants[MIX]}

    def update_memory(self, local: Local) -> Message:
        return {PARTS: local.constants[HEARD]} if local.phase else {}

    def reach(self, network: Backbone) -> int | None:
        return network.reach

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        state = super().init_server_state(shared, clients)
        if not self.listens:
            return state
        even = self.even_mix(next(iter(shared.values())))
        return {**state, PARTS: torch.zeros_like(even), MIX: even}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if not self.listens or PARTS not in uploads.tensors:
            return after
        heard = uploads[PARTS].sum(dim=0).clamp(min=0)  # noise may have made it negative
        parts = (self.decay * state[PARTS] + (1 - self.decay) * heard).unsqueeze(0)
        even = self.even_mix(parts).unsqueeze(0)
        return {**after, PARTS: parts[0], MIX: posterior(parts, even, self.trust)[0]}

    def download(self, state: State, clients: Sequence[int]) -> Message:
        sent = super().download(state, clients)
        return {**sent, **to_each({MIX: state[MIX]}, clients)} if self.listens else sent


def at_labels(said: Tensor, labels: Tensor) -> Tensor:
    """Return log p(y_i) at the labels y_i of some nodes, `[parts, n, C] -> [parts, n]`."""
    return said.gather(2, labels.view(1, -1, 1).expand(len(said), -1, 1)).squeeze(2)


def _names(text: str) -> tuple[str, ...]:
    return tuple(BACKBONES.find(name.strip()).name for name in text.split(",") if name.strip())
