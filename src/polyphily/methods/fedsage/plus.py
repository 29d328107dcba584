"""FedSage+: clients train generators of lost neighbours, mend their graphs, then run FedSage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Dims,
    Individually,
    Mean,
    Message,
    Role,
    Rounds,
    Sizes,
    State,
    Sum,
    Uploads,
    count,
    model,
    public,
    statistic,
    with_prefix,
)
from polyphily.core.method import parameter, register
from polyphily.core.optimizers import initial_state
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.fedavg import WEIGHT
from polyphily.methods.fedsage import exchange
from polyphily.methods.fedsage.exchange import (
    ANSWERS,
    ASKED,
    COUNTS,
    EMBEDDINGS,
    GRADIENT,
    OTHERS,
    OWN,
)
from polyphily.methods.fedsage.impaired import Impaired, impaired
from polyphily.methods.fedsage.leaves import leaves
from polyphily.methods.fedsage.network import (
    CLASSIFIER,
    GENERATOR,
    JUDGE,
    NEIGHGEN,
    Generated,
    Mended,
    MendingNetwork,
    Widths,
    count_errors,
    feature_errors,
)
from polyphily.methods.fedsage.plain import CITE, FedSage
from polyphily.methods.fedsage.slots import Slots
from polyphily.nn.backbones import Backbone, Output, Shape

FEATURES, GATE = "features", "gate"  # constants of a classifier round: the mended graph
READY = "ready"
ALONE = Individually("the server hands every client the generators of some others")


class Phase(NamedTuple):
    """The work of a client in a round.

    Attributes:
        trains: what the names of the trained parameters begin with.
        steps: how many steps are taken; 0 for as many as usual.
        begins: whether it is the first round of the classifier.
        shares: whether it sends its feature generator.
        answers: whether it answers other clients.
        ends: whether it is the last round of NeighGen.
    """

    trains: tuple[str, ...]
    steps: int = 0
    begins: bool = False
    shares: bool = False
    answers: bool = False
    ends: bool = False


@register("fedsage+", cite=CITE)
@dataclass(frozen=True)
class FedSagePlus(FedSage):
    """FedSage on mended graphs: each client's private NeighGen generates its lost neighbours.

    NeighGen is trained on a graph of which some nodes are hidden, by

        L = lambda_d · smoothL1(ñ_v, n_v) + lambda_f · L_f + lambda_c · CE on the mended graph,
        L_f = mean over v of sum over p ≤ ñ_v of min over hidden neighbours u of ||x̃_vp - x_u||².

    In the first rounds a client takes `generator_steps` steps on all of NeighGen. In the next
    `generator_rounds` rounds it trains the feature generator alone, and L_f has a term for every
    other client, which compares with neighbours there (see `exchange`). Then NeighGen is frozen,
    the whole graph is mended with one draw of noise, and only the classifier is trained and shared.
    Each client is evaluated on its own mended graph.
    """

    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "The errors of counts and features need no labels: they are means over all visible nodes "
        "(the authors' code takes train nodes only).",
        "A generated neighbour is compared with the first P hidden neighbours of its node, and at "
        "another client with P neighbours of a random node there, as in the authors' code.",
        "How many embeddings are sent for the cross-client term is not said: `rows` of them, drawn "
        "anew in every round.",
        "The cross-client term is a sum over all others in each step. Here a client answers "
        "`partners` others in a round, in rotation, and the sum is scaled to all of them.",
        "An answer needs two messages, so its gradient is that of one round ago, and the first of "
        "the `generator_rounds` rounds has none. It stays the same in all steps of a round.",
        "Counts are rounded down there, so that a count below one mends nothing. By default the "
        "nearest whole number is taken (counting=floor rounds down).",
        "Where the regression of counts starts is not said: at one neighbour each, because a ReLU "
        "that starts below zero is not trained.",
        "The classifier that NeighGen is trained with has one hidden layer of 32, and is not used "
        "afterwards. Generated features are not dropped at the input of the classifier.",
        "The authors evaluate on the graph with all edges between clients. Here each client is "
        "evaluated on its own mended graph.",
    )

    mend: str = parameter(
        "generated",
        "how graphs are mended: by generated neighbours, by those of other nodes of the client "
        "(an ablation), or not at all (FedSage)",
        choices=("generated", "shuffled", "off"),
    )
    slots: int = parameter(
        3, "neighbours that are generated for a node, at most", symbol="P", paper=5
    )
    hidden_share: float = parameter(
        0.25,
        "share of nodes that NeighGen is trained to find (the paper has 3.4 to 27.8 %)",
        symbol="h",
        code=0.1,
        search=Range(0.05, 0.4),
    )
    counting: str = parameter(
        "nearest",
        "how a predicted count becomes a number of neighbours",
        choices=("nearest", "floor"),
        paper="floor",
    )
    embedding: int = parameter(64, "width of NeighGen's embeddings", symbol="z", paper=128)
    first_width: int = parameter(64, "width of the generator's first hidden layer", paper=256)
    second_width: int = parameter(64, "width of the generator's second hidden layer", paper=2048)
    generator_steps: int = parameter(20, "steps on all of NeighGen, in the first rounds")
    first_rounds: int = parameter(
        4, "rounds over which these steps are spread, at most one for each step", paper=1
    )
    generator_rounds: int = parameter(
        4, "further rounds, in which only the feature generator is trained", paper=20
    )
    count_weight: float = parameter(1.0, "weight of the error of counts", symbol="λ_d")
    feature_weight: float = parameter(
        1.0,
        "weight of the distance of features",
        symbol="λ_f",
        search=Range(0.1, 10.0, log=True),
    )
    class_weight: float = parameter(
        1.0,
        "weight of NeighGen's cross-entropy",
        symbol="λ_c",
        search=Range(0.1, 10.0, log=True),
    )
    distance: str = parameter(
        "sum",
        "whether squared differences of features are summed, or averaged over features and slots",
        choices=("sum", "mean"),
        code="mean",
    )
    cross: float = parameter(
        1.0,
        "weight of the distance to features at other clients; 0: none",
        symbol="α",
        search=Range(0.1, 10.0, log=True),
    )
    partners: int = parameter(
        1, "other clients that a client answers in a round (the paper: all others)", paper=4
    )
    rows: int = parameter(32, "embeddings that a client sends to be answered")

    def __post_init__(self) -> None:
        sizes = ("slots", "embedding", "first_width", "second_width")
        for name in (*sizes, "generator_steps", "first_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"fedsage+: '{name}' must be at least 1")
        for name in ("partners", "rows"):
            if getattr(self, name) < 1:
                raise UserError(f"fedsage+: '{name}' must be at least 1 (cross=0 asks nobody)")
        if self.generator_rounds < 0:
            raise UserError("fedsage+: 'generator_rounds' must be 0 or more")
        if not 0 < self.hidden_share < 1:
            raise UserError(f"fedsage+: 'hidden_share' is between 0 and 1, not {self.hidden_share}")

    @property
    def mends(self) -> bool:
        """True if there is a generator."""
        return self.mend != "off"

    @property
    def crosses(self) -> bool:
        """True if clients answer each other. An answer needs two rounds."""
        return self.mends and self.cross > 0 and self.generator_rounds > 1

    @cached_property
    def first_steps(self) -> tuple[int, ...]:
        """The number of steps in each of the first rounds."""
        rounds = min(self.first_rounds, self.generator_steps)
        each, rest = divmod(self.generator_steps, rounds)
        return tuple(each + (r < rest) for r in range(rounds))

    @property
    def preparation(self) -> int:
        """The number of rounds before the classifier's first."""
        return len(self.first_steps) + self.generator_rounds if self.mends else 0

    @cached_property
    def widths(self) -> Widths:
        return Widths(self.slots, self.embedding, self.first_width, self.second_width)

    # The network -----------------------------------------------------------------------------

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if not self.mends:
            return super().build(backbone, shape, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            shuffled = self.mend == "shuffled"
            return MendingNetwork(shape, self.widths, self.counting, shuffled=shuffled)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return not self.mends or parameter.startswith(CLASSIFIER)

    # Which rounds are alike ------------------------------------------------------------------

    def stage(self, round_index: int) -> str:
        if not self.mends:
            return ""
        return "generator" if round_index < self.preparation else "classifier"

    def phase(self, round_index: int) -> Phase:
        if round_index >= self.preparation:
            return Phase((CLASSIFIER,), begins=self.mends and round_index == self.preparation)
        number = round_index + 1
        return Phase(
            *self._trained(round_index),
            shares=self.crosses and number in self.sharing,
            answers=self.crosses and number in self.answering,
            ends=number == self.preparation,
        )

    def _trained(self, round_index: int) -> tuple[tuple[str, ...], int]:
        """Return what is trained in a round of the generator, and in how many steps."""
        if round_index < len(self.first_steps):
            return (NEIGHGEN, JUDGE), self.first_steps[round_index]
        return (NEIGHGEN + GENERATOR,), 0

    @property
    def sharing(self) -> Rounds:
        """The rounds in which generators are sent: they are answered in the next one."""
        return Rounds(len(self.first_steps), self.preparation - 2)

    @property
    def answering(self) -> Rounds:
        """The rounds in which clients answer: the owner has the sum in the next one."""
        return Rounds(len(self.first_steps) + 1, self.preparation - 1)

    @property
    def applying(self) -> Rounds:
        """The rounds in which the owner of a generator uses the answers."""
        return Rounds(len(self.first_steps) + 2, self.preparation)

    @property
    def classifying(self) -> Rounds:
        return Rounds(self.preparation + 1)

    def rounds_before_it_acts(self) -> int:
        return self.preparation

    def needs_symmetric_edges(self) -> str:
        return "the neighbours that it generates are joined both ways"

    def needs_whole_graph(self) -> str | None:
        return "every node is given its generated neighbours" if self.mends else None

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        weight = count(
            WEIGHT, (), Sum(), rounds=self.classifying, meaning="weight of the client in the mean"
        )
        shared = (model(sizes, Mean(WEIGHT), rounds=self.classifying), weight)
        if not self.mends:
            return shared
        last = Rounds(self.preparation, self.preparation)
        ready = public(READY, (), Sum(), rounds=last, meaning="one, as NeighGen is trained")
        if not self.crosses:
            return (ready, *shared)
        answers = self._generators(
            sizes,
            ANSWERS,
            (self.partners,),
            ALONE,
            self.answering,
            "gradients of this client's distance in the partners' feature generators",
            role=Role.STATISTIC,
        )
        return (
            *self._questions(sizes, OWN, (), ALONE, self.sharing, "of this client"),
            answers,
            ready,
            *shared,
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        shared = model(sizes, rounds=self.classifying)
        if not self.crosses:
            return (shared,)
        many, meaning = (self.partners,), "of the clients to answer"
        return (
            *self._questions(sizes, OTHERS, many, None, self.answering, meaning),
            public(ASKED, many, rounds=self.answering, meaning="one for each client to answer"),
            self._generators(
                sizes, GRADIENT, (), None, self.applying, "sum of the answers to this client"
            ),
            shared,
        )

    def _questions(
        self,
        sizes: Sizes,
        prefix: str,
        leading: Dims,
        server: Individually | None,
        rounds: Rounds,
        whose: str,
    ) -> tuple[Declared, ...]:
        """Declare feature generators with the embeddings and counts to run them on."""

        def rows(name: str, shape: Dims, meaning: str) -> Declared:
            full = (*leading, self.rows, *shape)
            return statistic(prefix + name, full, server, rounds=rounds, meaning=meaning)

        return (
            self._generators(sizes, prefix, leading, server, rounds, f"feature generator {whose}"),
            rows(EMBEDDINGS, (self.embedding,), f"embeddings of some nodes {whose}"),
            rows(COUNTS, (), f"predicted numbers of lost neighbours of these nodes {whose}"),
        )

    def _generators(
        self,
        sizes: Sizes,
        prefix: str,
        leading: Dims,
        server: Individually | None,
        rounds: Rounds,
        meaning: str,
        role: Role = Role.MODEL,
    ) -> Declared:
        """Declare a tensor for every weight of a feature generator."""
        weights = exchange.weight_shapes(self.widths, sizes.features)
        shapes = {prefix + name: (*leading, *shape) for name, shape in weights.items()}
        return Declared(prefix, shapes, role, server, rounds, meaning)

    # At the clients --------------------------------------------------------------------------

    def impaired(self, local: Local) -> Impaired:
        """Return the graphs of which some nodes are hidden; these are always the same."""
        return local.cohort.cached(
            ("fedsage+ impaired", self.hidden_share, self.slots),
            lambda cohort: impaired(cohort, self.hidden_share, self.slots),
        )

    def prepare_round(self, local: Local) -> Message:
        """Mend the graphs; before that, draw what to ask other clients, and answer them."""
        phase, network = local.phase, local.network
        if not isinstance(network, MendingNetwork):
            return {}
        assert isinstance(phase, Phase)
        if phase.trains != (CLASSIFIER,):
            drawn = exchange.sample(local, self.rows) if phase.shares else {}
            return drawn | (self.answers(local, network) if phase.answers else {})
        mended = network.mend(local.cohort, with_prefix(local.params, NEIGHGEN))
        assert isinstance(mended.leaves, Tensor)
        return {FEATURES: mended.leaves, GATE: mended.gate}

    def answers(self, local: Local, network: MendingNetwork) -> Message:
        """Return the gradients of the distance in the generators of the partners."""
        if ASKED not in local.received:
            shapes = exchange.weight_shapes(self.widths, local.cohort.num_features)
            return exchange.no_answers(local, shapes, self.partners)
        return exchange.answers(
            local,
            network.neighgen.generator,
            slots=self.slots,
            counting=self.counting,
            distance=self.distance,
        )

    def train(self, local: Local) -> None:
        phase = local.phase
        assert isinstance(phase, Phase)
        if phase.steps:
            local.steps = (phase.steps,) * len(local.cohort)
        if phase.begins:  # another network: moments and step counts begin anew
            local.memory |= initial_state(local.optimizer, local.params)
        super().train(local)

    def loss(self, local: Local) -> Tensor:
        """Compute the loss of NeighGen, or the classifier's cross-entropy on the mended graph."""
        network, phase = local.network, local.phase
        if not isinstance(network, MendingNetwork):
            return super().loss(local)
        assert isinstance(phase, Phase)
        if phase.trains != (CLASSIFIER,):
            return self.generator_loss(local, network)
        mended = Mended.whole(local.cohort, local.constants[FEATURES], local.constants[GATE])
        output: Output = functional_call(network, local.params, (local.cohort, local.draws, mended))
        return local.cross_entropy(output.logits)

    def generator_loss(self, local: Local, network: MendingNetwork) -> Tensor:
        """Compute lambda_d L_d + lambda_f L_f + lambda_c CE on the impaired graphs."""
        cohort, given, phase = local.cohort, self.impaired(local), local.phase
        assert isinstance(phase, Phase)
        params = {  # no gradient is computed for what is not trained
            name: value if name.startswith(phase.trains) else value.detach()
            for name, value in local.params.items()
        }
        own, judge = (with_prefix(params, part) for part in (NEIGHGEN, JUDGE))

        def choose(count: Tensor) -> Slots:
            return given.choose(given.gate(count, self.counting))

        generated: Generated = functional_call(
            network.neighgen, own, (given.graph, local.draws, choose)
        )
        counts = count_errors(generated.count[given.nodes], given.missing)
        features, mended = self._compare(generated, given, own, judge)
        seen = given.rows.counts.to(cohort.dtype)
        output: Output = functional_call(network.judge, judge, (given.graph, local.draws, mended))
        errors = local.train_errors(output.logits[cohort.train_nodes])
        learns = cohort.train_segments.sum(given.learns).clamp(min=1)
        return (
            self.count_weight * given.rows.sum(counts) / seen
            + self.feature_weight * given.loser_rows.sum(features) / seen
            + self.class_weight * cohort.train_segments.sum(errors * given.learns) / learns
        )

    def _compare(
        self, generated: Generated, given: Impaired, own: Message, judge: Message
    ) -> tuple[Tensor, Mended]:
        """Return the errors of features of each loser, and the graph that the judge sees."""
        slots, hidden, graph = generated.slots, generated.hidden, given.graph
        assert slots is not None
        assert hidden is not None
        exists = given.gate(generated.count, self.counting)
        if slots.blocks is None:
            found = generated.features(own)
            each = found.view(-1, self.slots, found.shape[1]).index_select(0, given.loser_place)
            errors = feature_errors(
                each, exists[given.losers], given.targets, given.present, self.distance
            )
            return errors, Mended(found, slots, exists, graph.kept, graph.degrees)
        gaps, products = leaves(hidden, own, with_prefix(judge, "convs.0."), given.compared(slots))
        number = given.loser_number[slots.node]
        rows = (number >= 0).nonzero().view(-1)
        errors = gaps.new_zeros(len(given.losers)).index_add(0, number[rows], gaps[rows])
        if self.distance == "mean":
            errors = errors / (self.slots * graph.num_features)
        return errors, Mended(products, slots, exists, graph.kept, graph.degrees)

    def correct_gradients(self, local: Local, grads: Message) -> Message:
        """Keep the gradients of what is trained, and add what other clients answered."""
        if not self.mends:
            return grads
        assert isinstance(local.phase, Phase)
        kept = {n: g for n, g in grads.items() if n.startswith(local.phase.trains)}
        for name, answer in with_prefix(local.received, GRADIENT).items():
            own = NEIGHGEN + GENERATOR + name
            kept[own] = kept[own] + self.cross * answer
        return kept

    def upload(self, local: Local) -> Message:
        phase = local.phase
        assert isinstance(phase, Phase)
        if phase.trains == (CLASSIFIER,):
            return super().upload(local)
        sent: Message = {}
        if phase.answers:
            sent |= {n: t for n, t in local.constants.items() if n.startswith(ANSWERS)}
        if phase.shares:
            sent |= self.questions(local)
        if phase.ends:
            sent[READY] = local.cohort.constant((1.0,) * len(local.cohort))
        return sent

    def questions(self, local: Local) -> Message:
        """Return the feature generator, and embeddings and counts to run it on."""
        network, given = local.network, self.impaired(local)
        assert isinstance(network, MendingNetwork)
        own = with_prefix(local.params, NEIGHGEN)
        generated: Generated = functional_call(network.neighgen, own, (given.graph,))
        weights = {OWN + n: t for n, t in with_prefix(own, GENERATOR).items()}
        return weights | exchange.sampled(local, given, generated)

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        like = next(iter(shared.values()))
        state = super().init_server_state(shared, clients)
        if not self.mends:
            return {**state, READY: like.new_ones(())}
        return {**state, **(exchange.initial(like, clients) if self.crosses else {})}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng) if uploads.model else dict(state)
        if READY in uploads.tensors or uploads.model:
            after[READY] = next(iter(state.values())).new_ones(())
        return {**after, **(exchange.exchanged(state, uploads) if self.crosses else {})}

    def download(self, state: State, clients: Sequence[int]) -> Message:
        sent = super().download(state, clients) if READY in state else {}
        if self.crosses:
            sent |= exchange.handed_on(state, list(clients), self.partners)
        return sent

    # For people ------------------------------------------------------------------------------

    def without_effect(self) -> Mapping[str, str]:
        about_answers = ("partners", "rows")
        about_generator = (
            *("slots", "hidden_share", "counting", "embedding", "first_width", "second_width"),
            *("generator_steps", "first_rounds", "generator_rounds", "count_weight"),
            *("feature_weight", "class_weight", "distance", "cross"),
        )
        if not self.mends:
            reason = "nothing is generated; set mend=generated"
            return dict.fromkeys((*about_generator, *about_answers), reason)
        idle: dict[str, str] = {}
        if self.generator_steps == 1:
            idle["first_rounds"] = "a single step has one round; set generator_steps above 1"
        if self.generator_rounds < 2:
            reason = "an answer needs two rounds; set generator_rounds to 2 or more"
            idle |= dict.fromkeys(("cross", *about_answers), reason)
        elif self.cross == 0:
            reason = "clients do not answer each other; set cross above 0"
            idle |= dict.fromkeys(about_answers, reason)
        if self.feature_weight == 0 and not self.crosses:
            idle["distance"] = "features are not compared; set feature_weight above 0"
        return idle
