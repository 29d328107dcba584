"""Model files: one format for simulations, comparisons, sweeps and sites.

A file stands alone. It has the weights, and as JSON everything else that a prediction needs:
method, settings, classes, the encoding of the columns, and the decision (temperature and
threshold). It is in the safetensors format, so that reading one runs no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyphily.core.local import Local
from polyphily.core.messages import Message, with_prefix
from polyphily.core.method import Method, create
from polyphily.core.settings import Settings, from_mapping
from polyphily.errors import UserError, unknown
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.files.client import listed
from polyphily.graphs.limits import MODEL
from polyphily.nn.backbones import Backbone, Shape
from polyphily.runs.decision import Decision
from polyphily.runs.folder import RunFolder, read_tensors, save_tensors
from polyphily.runtime.machine import versions
from polyphily.runtime.network import build_network
from polyphily.version import __version__

FORMAT = 2  # of the files written now; 1 is that of versions before 0.2
FACTS = "polyphily_model"  # the metadata entry with the JSON
BEST, LAST = "best", "last"
WHICH = (BEST, LAST)
MEMORY, RECEIVED = "memory/", "received/"
GLOBAL = "global"  # the name of the model that all clients share


@dataclass(frozen=True)
class SavedModel:
    """A trained model with everything that is needed to predict with it.

    Attributes:
        method: the name of the method.
        hyperparameters: of the method.
        settings: of the run, with every setting filled in.
        width: the number of features of a node, after encoding.
        classes: names of the classes, in the order of the outputs.
        tensors: the parameters by name, without a client axis. What a method keeps beside them to
            predict is among them, with the prefixes `memory/` and `received/`.
        seed: of the run.
        round: the number of rounds after which the model was saved.
        which: "best" (of the best validation round) or "last".
        client: the name of the client whose model it is; None for a global model.
        number: the client's number in the federation; 0 for a global model.
        dataset: the name of the data that it was trained on.
        network: the name of the network (`Backbone.describe`).
        encoding: how columns become features; None if they are used as they are, or if every
            client has its own.
        decision: temperature and threshold; None if none was made.
        encodings: the clients' own encodings, by client, where they differ.
        decisions: the clients' own decisions, by client, of a global model.
        versions: of the libraries that wrote it.
    """

    method: str
    hyperparameters: Mapping[str, Any]
    settings: Settings
    width: int
    classes: tuple[str, ...]
    tensors: Message = field(repr=False)
    seed: int = 0
    round: int = 0
    which: str = LAST
    client: str | None = None
    number: int = 0
    dataset: str = ""
    network: str = ""
    encoding: Encoding | None = field(default=None, repr=False)
    decision: Decision | None = field(default=None, repr=False)
    encodings: Mapping[str, Encoding] = field(default_factory=dict, repr=False)
    decisions: Mapping[str, Decision] = field(default_factory=dict, repr=False)
    versions: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        whose = self.client or "global"
        return (
            f"SavedModel({self.method}, {self.network or self.settings.backbone}, {whose}, "
            f"{self.which} round {self.round}, {self.width} features, {len(self.classes)} classes)"
        )

    # What a prediction needs -----------------------------------------------------------------

    @property
    def backbone(self) -> str:
        """The name of the backbone."""
        assert self.settings.backbone is not None
        return self.settings.backbone

    @cached_property
    def params(self) -> Message:
        """The parameters by name, without a client axis."""
        return params_of(self.tensors)

    @property
    def memory(self) -> Message:
        """What the method kept at the client and reads to predict."""
        return with_prefix(self.tensors, MEMORY)

    @property
    def received(self) -> Message:
        """What the server sent and the method reads to predict."""
        return with_prefix(self.tensors, RECEIVED)

    def make_method(self) -> Method:
        """Create the method with its hyperparameters."""
        return create(self.method, self.hyperparameters)

    @cached_property
    def module(self) -> Backbone:
        """The network as it was built, with initial parameters (those of the model: `params`)."""
        return build_network(
            self.make_method(), self.settings, self.width, len(self.classes), self.seed
        )

    def check_weights(self) -> None:
        """Raise a `UserError` if the tensors are not the parameters of the network."""
        wanted = {n: tuple(p.shape[1:]) for n, p in self.module.named_parameters()}
        found = {n: tuple(t.shape) for n, t in self.params.items()}
        if found != wanted:
            odd = next(n for n in {**wanted, **found} if wanted.get(n) != found.get(n))
            raise UserError(
                f"the model does not fit {self.method} as it is now: {odd} has the shape "
                f"{found.get(odd)}, {wanted.get(odd)} is wanted. Another version of polyphily or "
                "of a plug-in wrote it: train again, or predict with that version"
            )

    @property
    def shape(self) -> Shape:
        """The size of the network."""
        return self.module.shape

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that the file has an encoding or a decision for."""
        own = () if self.client is None else (self.client,)
        return tuple(dict.fromkeys([*own, *self.encodings, *self.decisions]))

    def for_client(self, client: str | None) -> SavedModel:
        """Return the model as a client uses it, with its own encoding and decision.

        Args:
            client: the client's name. None keeps the model as it is.

        Raises:
            UserError: if it is another client's model, or if it can be used as a client's only.
        """
        if client is None or client == self.client:
            if self.encoding is None and self.encodings:
                raise UserError(
                    "the columns were encoded by each client for itself, so that this model needs "
                    f"a client's name (--client): {', '.join(self.encodings)}"
                )
            return self
        if self.client is not None:
            raise UserError(f"this is the model of client '{self.client}', not of '{client}'")
        if self.clients and client not in self.clients:
            raise unknown("client", client, self.clients)
        return replace(
            self,
            client=client,
            encoding=self.encodings.get(client, self.encoding),
            decision=self.decisions.get(client, self.decision),
            encodings={},
            decisions={},
        )

    # Files -----------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return everything but the tensors, as it stands in a file."""
        own = {name: {"encoding": e.to_json()} for name, e in self.encodings.items()}
        for name, decision in self.decisions.items():
            own.setdefault(name, {})["decision"] = decision.to_json()
        return {
            "format": FORMAT,
            "polyphily": __version__,
            "method": self.method,
            "hyperparameters": dict(self.hyperparameters),
            "settings": {
                k: v for k, v in dataclasses.asdict(self.settings).items() if v is not None
            },
            "backbone": self.settings.backbone,
            "network": self.network,
            "features": self.width,
            "classes": list(self.classes),
            "dataset": self.dataset,
            "seed": self.seed,
            "client": self.client,
            "number": self.number,
            "round": self.round,
            "which": self.which,
            "encoding": None if self.encoding is None else self.encoding.to_json(),
            "decision": None if self.decision is None else self.decision.to_json(),
            "clients": own,
            "versions": dict(self.versions or _versions()),
        }

    def save(self, file: Path) -> None:
        """Write the model file, atomically."""
        save_tensors(file, self.tensors, {FACTS: json.dumps(self.facts(), allow_nan=False)})

    @classmethod
    def load(cls, file: str | Path) -> SavedModel:
        """Read a model file.

        Raises:
            UserError: if it does not exist, is no model file, or is one of another format.
        """
        file = Path(file)
        try:
            tensors, metadata = read_tensors(file, MODEL)
        except FileNotFoundError:
            raise UserError(f"no model {file}") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a model file of Polyphily: {error}") from None
        facts = _read_facts(file, metadata)
        try:
            return _from_facts(facts, tensors)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: not a model file of Polyphily: {error!r}") from None
        except UserError as error:
            raise UserError(f"{file}: {error}") from None


def without_axis(params: Mapping[str, Tensor], row: int = 0) -> Message:
    """Return one client's tensors from stacked ones, on the host."""
    return {n: t[row].detach().cpu().clone() for n, t in params.items()}


def params_of(state: Mapping[str, Tensor]) -> Message:
    """Return the parameters among the tensors of a model."""
    return {n: t for n, t in state.items() if not n.startswith((MEMORY, RECEIVED))}


def state_of(method: Method, view: Local) -> Message:
    """Return a view's model, stacked: its parameters, and what the method reads to predict."""
    kept = {MEMORY + n: t for n, t in view.memory.items()}
    return {**view.params, **_named(method, kept), **received_state(method, view.received)}


def received_state(method: Method, download: Message) -> Message:
    """Return what the method reads of a download to predict, under the names in a model."""
    return _named(method, {RECEIVED + n: t for n, t in download.items()})


def _named(method: Method, kept: Message) -> Message:
    return {n: kept[n] for n in method.prediction_state() if n in kept}


def save_models(folder: RunFolder, models: Mapping[str, SavedModel]) -> None:
    """Write models into a run folder, a file for each."""
    for name, file in folder.model_files(models).items():
        models[name].save(file)


@dataclass(frozen=True)
class ModelFile:
    """A model file in a folder, by whose model it is.

    Attributes:
        path: of the file.
        client: the client whose model it is; None for a global model.
        seed: of the run.
        which: "best" or "last".
    """

    path: Path
    client: str | None
    seed: int
    which: str

    @property
    def name(self) -> str:
        """The name of the file without its ending, such as "global-best"."""
        return self.path.stem

    @classmethod
    def read(cls, file: Path) -> ModelFile:
        """Read whose model a file is, without its tensors."""
        MODEL.check_file(file)
        try:
            with safe_open(file, framework="pt") as stream:
                metadata: Mapping[str, str] = stream.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a model file of Polyphily: {error}") from None
        facts = _read_facts(file, metadata)
        try:
            return cls(file, facts["client"], int(facts["seed"]), str(facts["which"]))
        except (LookupError, ValueError, TypeError) as error:
            raise UserError(f"{file}: not a model file of Polyphily: {error!r}") from None


def choose_model(
    files: Sequence[ModelFile],
    *,
    client: str | None = None,
    seed: int | None = None,
    which: str = BEST,
    place: str = "",
) -> ModelFile:
    """Return the model of a client, or the global one.

    Args:
        files: those there are.
        client: the client's name. If there is a global model only, it is the client's. None: the
            global model, or the only one.
        seed: of the run; the first unless given.
        which: "best" or "last".
        place: the folder, for messages.

    Raises:
        UserError: if there is none, or if there are several to choose from.
    """
    if which not in WHICH:
        raise unknown("kind of model", which, WHICH)
    if not files:
        raise UserError(f"{place}: there is no model: has the run ended?")
    seeds = list(dict.fromkeys(file.seed for file in files))
    if seed is not None and seed not in seeds:
        raise UserError(f"{place}: no run with seed {seed}: there are {seeds}")
    wanted = seeds[0] if seed is None else seed
    fitting = [file for file in files if file.seed == wanted and file.which == which]
    if not fitting:
        raise UserError(f"{place}: there is no model of the {which} round")
    own = [file for file in fitting if client is not None and file.client == client]
    found = own or [file for file in fitting if file.client is None]
    if not found and client is None and len(fitting) == 1:
        return fitting[0]
    if found:
        return found[0]
    names = [str(file.client) for file in fitting]
    if client is not None:
        raise unknown("client", client, names)
    raise UserError(
        f"{place}: every client has its own model: name one (--client): {listed(names)}"
    )


def _read_facts(file: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the JSON in a file's metadata; explain what a file of another format is."""
    again = "train again, or predict with the version that wrote it"
    if FACTS not in metadata:
        if "polyphily" not in metadata:
            raise UserError(f"{file}: not a model file of Polyphily")
        written = metadata["polyphily"]
        version = "an older version" if written.startswith("{") else f"version {written[:20]}"
        raise UserError(
            f"{file}: written by {version} of Polyphily in format 1, which lacks what a prediction "
            f"needs; this version reads format {FORMAT}: {again}"
        )
    try:
        facts = json.loads(metadata[FACTS])
        number = int(facts["format"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: not a model file of Polyphily: {error!r}") from None
    if number != FORMAT:
        raise UserError(
            f"{file}: written by version {str(facts.get('polyphily'))[:20]} of Polyphily in format "
            f"{number}; this version ({__version__}) reads format {FORMAT}: {again}"
        )
    found: Mapping[str, Any] = facts
    return found


def _from_facts(facts: Mapping[str, Any], tensors: Message) -> SavedModel:
    own: Mapping[str, Mapping[str, Any]] = facts["clients"]
    classes = _texts(facts["classes"])
    return SavedModel(
        method=str(facts["method"]),
        hyperparameters=dict(facts["hyperparameters"]),
        settings=from_mapping(dict(facts["settings"])),
        width=int(facts["features"]),
        classes=classes,
        tensors=tensors,
        seed=int(facts["seed"]),
        round=int(facts["round"]),
        which=str(facts["which"]),
        client=None if facts["client"] is None else str(facts["client"]),
        number=int(facts["number"]),
        dataset=str(facts["dataset"]),
        network=str(facts["network"]),
        encoding=_encoding(facts["encoding"]),
        decision=_decision(facts["decision"], classes),
        encodings={n: e for n, own_ in own.items() if (e := _encoding(own_.get("encoding")))},
        decisions={
            n: d for n, own_ in own.items() if (d := _decision(own_.get("decision"), classes))
        },
        versions={str(k): str(v) for k, v in facts["versions"].items()},
    )


def _versions() -> dict[str, str]:
    found = versions()
    return {"polyphily": __version__, **{n: found[n] for n in ("python", "torch", "numpy")}}


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _encoding(facts: Any) -> Encoding | None:
    return None if facts is None else Encoding.from_json(facts)


def _decision(facts: Any, classes: Sequence[str]) -> Decision | None:
    if facts is None:
        return None
    found = Decision.from_json(facts)
    if found.positive is not None and found.positive not in classes:
        raise ValueError(f"its positive class is '{found.positive}', which is no class")
    if not 0 < found.temperature < float("inf"):
        raise ValueError(f"its temperature is {found.temperature}")
    return found
