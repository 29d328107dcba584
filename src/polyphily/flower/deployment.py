"""The server's folder and the sites' bundles, which `polyphily server` and `site` work with.

The server's folder holds:

config.toml          address, sites, and the usual training settings
ca.crt, ca.key       the federation's own certificate authority; ca.key may be kept elsewhere
server.crt, .key     the server's certificate
sites/               each site's public key and certificate (`register.py`)
answers/NAME.answer.json   what a site that has made its own key gets (`admission.py`)
bundles/NAME/        to try things out, a site's folder with a private key that was made here:
                     site.toml, ca.crt, site.key and the public keys of all sites (sites/NAME.pub)
events.jsonl         connections, admissions, revocations
flower/              Flower's own files: database, log; and the secret that local commands need
runs/NAME/           one folder per run
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyphily.errors import PolyphilyError, UserError, missing_package, toml_fault, unknown
from polyphily.flower import flwr_internals
from polyphily.graphs.limits import TEXT
from polyphily.runs.folder import LOCK, RunFolder, safe_name, to_toml, write_text

if TYPE_CHECKING:
    from polyphily.core.method import Method
    from polyphily.core.settings import Settings
    from polyphily.flower.joining import Emit, Policy, Transport, Troubles
    from polyphily.flower.keys import Authority, Identity, KeyPair
    from polyphily.flower.plan import Plan
    from polyphily.flower.register import Register

CONFIG, SITE, PLAN, REQUEST = "config.toml", "site.toml", "plan.json", "request.json"
ENVIRONMENT = "POLYPHILY_SERVER"  # environment variable: the server's folder
KIND = "files"  # the kind of data that defaults are chosen for
DATASET = "sites"  # name of the data in summaries: the server does not see the graphs
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "min_sites",
    "timeout",
    "repeats",
    "join_timeout",
    "misses",
    "grace",
    "max_update",
    "max_weight",
    "max_model",
)
DATA = ("split", "normalize", "encoding")
OWN = ("sites", "host", "port", "control_port", "classes", *DATA, "seed", *POLICY)


def require_flower() -> None:
    """Check that Flower is installed.

    Raises:
        UserError: if it is not, with the command that installs it.
    """
    if not flwr_internals.is_installed():
        raise missing_package("flwr", "flower", "training across sites")


def quiet_flower() -> None:
    """Turn off Flower's telemetry and update check; print its log as `flower_log` does."""
    from polyphily.flower.flower_log import install

    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    install(os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING"))


def read_secret(deployment: Deployment) -> str:
    """Return the secret of the running server, or of the one that ran last.

    Raises:
        UserError: if there is none, or the server belongs to another user of the machine.
    """
    try:
        return deployment.secret_file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise UserError(
            f"no server has been started: polyphily server start {deployment.path}"
        ) from None
    except OSError as error:
        raise UserError(
            f"{deployment.secret_file} cannot be read: {error.strerror}. Only the user who runs "
            "the server can send it commands"
        ) from None


@dataclass(frozen=True)
class Bundle:
    """A site's folder: its name, the server's address, the site's key."""

    path: Path

    def _entries(self) -> dict[str, Any]:
        file = self.path / SITE
        TEXT.check_file(file)
        try:
            return tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError:
            raise UserError(
                f"{self.path} is not a site's folder: it has no {SITE}. "
                "Make one: polyphily site init"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{file} is not valid TOML: {toml_fault(error)}") from None

    @property
    def name(self) -> str:
        return str(self._entries()["name"])

    @property
    def address(self) -> tuple[str, int]:
        entries = self._entries()
        return str(entries["host"]), int(entries["port"])

    @property
    def certificate(self) -> Path:
        return self.path / "ca.crt"

    @property
    def key(self) -> Path:
        return self.path / "site.key"

    def pair(self) -> KeyPair:
        """Read the site's private key; return it with its public key.

        Raises:
            UserError: if there is none, or if other users of the machine can read or replace it.
        """
        from polyphily.flower.keys import check_modes, read_pair

        others = self.path / "sites"
        check_modes(self.key, self.certificate, others, *sorted(others.glob("*.pub")))
        try:
            return read_pair(self.key)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.key} is not the private key of a site: {error}") from None

    def identity(self) -> Identity:
        """Read the key that the site signs with and the public keys of all sites."""
        from polyphily.flower.keys import Identity, read_public_keys

        private, _ = self.pair()
        if not self.certificate.exists():
            raise UserError(
                f"{self.path} is not complete. Send {self.name}.request.json to the server's "
                f"operator, then: polyphily site accept {self.path} ANSWER"
            )
        try:
            return Identity(private, read_public_keys(self.path / "sites"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path / 'sites'} does not hold the public keys of sites: {error}"
            ) from None


@dataclass(frozen=True)
class Deployment:
    """A server's folder."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Deployment:
        """Open a server's folder and check its configuration."""
        if not (path / CONFIG).is_file():
            raise UserError(
                f"{path} is not a server folder: it has no {CONFIG}. "
                f"Make one: polyphily server init {path} --sites north,south"
            )
        deployment = cls(path.resolve())
        deployment.config()
        return deployment

    @classmethod
    def of_environment(cls) -> Deployment:
        """Open the folder that the server's process has put into the environment."""
        return cls.open(Path(os.environ[ENVIRONMENT]))

    @classmethod
    def create(
        cls,
        path: Path,
        sites: Sequence[str],
        host: str,
        port: int,
        control_port: int,
        ca_key: Path | None = None,
    ) -> Deployment:
        """Create a new server folder with certificates.

        Args:
            path: of the folder.
            sites: names of sites that get a bundle with a key that is made here.
            host: by which sites reach the server.
            port: for sites.
            control_port: for commands on this machine.
            ca_key: file for the authority's private key; in the folder unless given.
        """
        for site in sites:
            check_site_name(site)
        if len(set(sites)) < len(sites):
            raise UserError("--sites: name each site once: --sites north,south")
        if (path / CONFIG).exists():
            raise UserError(f"{path} is a server folder already: choose another")
        try:
            for name in ("sites", "bundles", "flower", "runs"):
                (path / name).mkdir(parents=True)
            path.chmod(0o700)
            authority = _write_certificates(
                path, list(dict.fromkeys([host, *LOOPBACK])), ca_key or path / "ca.key"
            )
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}") from None
        _write_bundles(path, sites, host, port, authority)
        config = {"sites": list(sites), "host": host, "port": port, "control_port": control_port}
        write_text(path / CONFIG, to_toml(config) + _OPTIONAL_ENTRIES)
        return cls(path.resolve())

    # Configuration ---------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Read config.toml and check the names and types of its entries."""
        from polyphily.core.settings import names

        file = self.path / CONFIG
        TEXT.check_file(file)
        try:
            entries = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{file}: {error}") from None
        entries = {name.replace("-", "_"): value for name, value in entries.items()}
        for name in entries:
            if name not in OWN and name not in names():
                raise unknown(f"entry in {file}", name, {*OWN, *names()})
        for name in ("sites", "host", "port", "control_port"):
            if name not in entries:
                raise UserError(f"{file}: no entry '{name}'")
        for name, kind, noun in (
            ("sites", list, "a list"),
            ("classes", list, "a list"),
            ("host", str, "a string"),
            ("port", int, "an integer"),
        ):
            if not isinstance(entries.get(name, kind()), kind):
                raise UserError(f"{file}: '{name}' must be {noun}")
        sites = [str(site) for site in entries["sites"]]
        if len(set(sites)) < len(sites):
            raise UserError(f"{file}: name each site once in 'sites'")
        return entries

    @property
    def sites(self) -> list[str]:
        """The names of the sites that may connect."""
        return [entry.name for entry in self.register.active()]

    @property
    def register(self) -> Register:
        from polyphily.flower.register import Register

        return Register(self.path)

    def has_certificate(self, site: str) -> bool:
        """Return whether a site's key was certified here."""
        return (self.path / "sites" / f"{site}.crt").exists()

    def public_keys(self) -> dict[bytes, str]:
        """Return the names of the sites that may connect, by public key."""
        return {entry.pem: entry.name for entry in self.register.active()}

    @property
    def control(self) -> str:
        """The address at which commands on this machine reach the server."""
        return f"127.0.0.1:{self.config()['control_port']}"

    @property
    def secret_file(self) -> Path:
        """The file with the secret that commands send to the running server."""
        return self.path / "flower" / "secret"

    @property
    def instance_file(self) -> Path:
        """The file with the id of the server process that is running, or ran last."""
        return self.path / "flower" / "instance"

    @property
    def instance(self) -> str:
        file = self.instance_file
        return file.read_text(encoding="ascii").strip() if file.exists() else ""

    # Runs ------------------------------------------------------------------------------------

    def new_run(
        self, method: str, settings: Mapping[str, Any], hyperparameters: Mapping[str, Any]
    ) -> str:
        """Create the folder of a new run and return the run's name.

        Settings are checked first, as far as that is possible without the sites.
        """
        from polyphily.core.method import create
        from polyphily.core.sampling import check_sampling
        from polyphily.core.settings import from_mapping, names
        from polyphily.flower.agreeing import check_wishes
        from polyphily.flower.plan import check_for_flower
        from polyphily.privacy.differential import check_min_sites, check_privacy
        from polyphily.runtime.network import complete
        from polyphily.runtime.robust import check_robust

        known = {entry.name for entry in self.register.entries()}
        unknown_sites = [name for name in self.config()["sites"] if name not in known]
        if unknown_sites or not self.sites:
            what = "no site that may connect"
            if unknown_sites:
                what = f"no key for {', '.join(unknown_sites)}, which config.toml names"
            raise UserError(f"{self.path} has {what}: polyphily server admit {self.path} REQUEST")
        entries = {**self.config(), **settings}
        asked = {k: v for k, v in entries.items() if k in names()}
        check_for_flower(from_mapping(asked))
        instance = create(method, hyperparameters)
        example = complete(from_mapping(asked), instance, KIND, "accuracy")
        check_sampling(instance, example)
        check_privacy(instance, example, len(self.sites))
        check_wishes(entries.get("normalize"), entries.get("encoding"), private=example.private)
        policy = {name: entries[name] for name in POLICY if name in entries}
        policy.setdefault("min_sites", len(self.sites))
        check_min_sites(example, int(policy["min_sites"]))
        check_robust(instance, example, make_policy(policy, len(self.sites)).min_sites)
        request = {
            "method": instance.name,
            "hyperparameters": dataclasses.asdict(instance),
            "settings": asked,
            "sites": self.sites,
            "classes": entries.get("classes", []),
            "split": entries.get("split", ""),
            "normalize": entries.get("normalize"),
            "encoding": entries.get("encoding"),
            "seed": entries.get("seed", 0),
            "policy": policy,
        }
        folder = RunFolder(self.path / "runs" / self._new_name(instance.name))
        config = {"method": instance.name, "dataset": DATASET, "seeds": [request["seed"]], **asked}
        folder.create({**config, "engine": "flower", "set": request["hyperparameters"]}, [])
        write_text(folder.path / REQUEST, json.dumps(request, indent=2) + "\n")
        return folder.path.name

    def _new_name(self, method: str) -> str:
        """Return an unused name for a run, made of the time and the method's name."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe_name(method)}"
        name, number = stem, 1
        while (self.path / "runs" / name).exists():
            number += 1
            name = f"{stem}-{number}"
        return name

    def run_folder(self, name: str | None = None) -> RunFolder:
        """Return the folder of a run, the latest unless one is named."""
        from polyphily.flower.plan import RUN_NAME

        runs = sorted(p.name for p in (self.path / "runs").iterdir() if (p / REQUEST).exists())
        if name is None and not runs:
            raise UserError(f"{self.path} has no run yet: polyphily server run {self.path} fedavg")
        chosen = runs[-1] if name is None else name
        if not RUN_NAME.fullmatch(chosen) or chosen not in runs:
            raise unknown("run", chosen, runs)
        return RunFolder(self.path / "runs" / chosen)

    def conduct(
        self,
        name: str,
        transport: Transport,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Run a run that `new_run` has created, from its beginning or from its checkpoint.

        Args:
            name: the run's.
            transport: sends messages to the sites.
            progress: called with the record of every complete round.

        Returns:
            The summary.

        Raises:
            PolyphilyError: if the run cannot go on. The reason is also written to the events.
        """
        from polyphily.flower.joining import event_writer
        from polyphily.flower.server import Coordinator

        folder = self.run_folder(name)
        request = json.loads((folder.path / REQUEST).read_text(encoding="utf-8"))
        policy = make_policy(request["policy"], len(request["sites"]))
        emit = event_writer(folder)
        troubles: Troubles = []
        with _locked(folder.path / LOCK):
            emit("started", sites=request["sites"])
            try:
                plan = self._plan(folder, request, policy, transport, emit, troubles)
                return Coordinator(
                    plan,
                    transport,
                    folder,
                    policy,
                    emit,
                    progress,
                    troubles=troubles,
                    command=self.command_of(request),
                ).go()
            except PolyphilyError as error:
                emit("failed", reason=str(error))
                raise
            except Exception as error:
                emit("failed", reason=f"{type(error).__name__}: {error}")
                raise

    def command_of(self, request: Mapping[str, Any]) -> str:
        """Return the command that makes a run once more."""
        from polyphily.core.method import create

        defaults = dataclasses.asdict(create(request["method"]))
        parts = ["polyphily", "server", "run", str(self.path), request["method"]]
        given = {**request["settings"], **request["policy"], "seed": request["seed"]}
        for name, value in given.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                parts.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                parts += [f"--{flag}", str(value)]
        for name, value in request["hyperparameters"].items():
            if value != defaults[name]:
                parts += ["--set", f"{name}={value}"]
        return shlex.join(parts)

    def _plan(
        self,
        folder: RunFolder,
        request: Mapping[str, Any],
        policy: Policy,
        transport: Transport,
        emit: Emit,
        troubles: Troubles,
    ) -> Plan:
        """Read the plan of a run that has begun already, or agree on one with the sites.

        Sites that do not fit are left out and told why, as long as enough others remain.
        """
        from polyphily.core.method import create
        from polyphily.core.settings import from_mapping
        from polyphily.flower.agreeing import agree_encoding
        from polyphily.flower.fitting import choose_sites, leave_out, reason_against_size, too_large
        from polyphily.flower.joining import gather
        from polyphily.flower.plan import Plan
        from polyphily.graphs.graph import join_relations
        from polyphily.privacy.differential import check_privacy
        from polyphily.runtime.network import complete

        file = folder.path / PLAN
        if file.exists():
            TEXT.check_file(file)
            plan = Plan.from_json(json.loads(file.read_text(encoding="utf-8")))
            gather(transport, plan.sites, policy, emit, troubles)
            return plan
        joined = gather(transport, request["sites"], policy, emit, troubles)
        method = create(request["method"], request["hyperparameters"])
        asked = from_mapping(request["settings"])
        schemas = {site: facts["schema"] for site, facts in joined.items()}
        left_out = too_large(schemas, method, complete(asked, method, KIND, "accuracy"), policy)
        if fitting := {s: own for s, own in schemas.items() if s not in left_out}:
            schema, others = choose_sites(fitting, request["classes"])
            left_out |= others
        joined = {site: facts for site, facts in joined.items() if site not in left_out}
        leave_out(left_out, len(joined), policy, transport, emit, troubles)
        classes = len(schema.classes)
        dense = all(facts["dense"] for facts in joined.values())
        relations = join_relations(facts["relations"] for facts in joined.values())
        draft = Plan(
            run=folder.path.name,
            method=method.name,
            hyperparameters=request["hyperparameters"],
            settings=complete_for_sites(
                asked, method, dense=dense, classes=classes, relations=relations
            ),
            schema=schema,
            sites=tuple(joined),
            split=request["split"],
            seed=request["seed"],
        )
        check_privacy(method, draft.settings, len(joined))
        wanted = request["normalize"], request.get("encoding")
        plan = agree_encoding(draft, *wanted, transport, policy, emit, troubles)
        if schema.columns and plan.encoding is not None:  # some defaults depend on the features
            dense = plan.encoding.dense
            settings = complete_for_sites(
                asked, method, dense=dense, classes=classes, relations=relations
            )
            plan = dataclasses.replace(plan, settings=settings)
        if reason := reason_against_size(method, plan.settings, plan.width, classes, policy):
            raise UserError(f"the sites' columns cannot be used: {reason}")
        write_text(file, json.dumps(plan.to_json(), indent=2) + "\n")
        chosen = {k: v for k, v in dataclasses.asdict(plan.settings).items() if v is not None}
        chosen |= {"engine": "flower", "normalize": plan.normalize}
        folder.amend_config(**chosen, **({"split": plan.split} if plan.split else {}))
        return plan


def check_site_name(name: str) -> None:
    """Raise a `UserError` if a site cannot have this name."""
    from polyphily.flower.plan import SITE_NAME

    if not SITE_NAME.fullmatch(name):
        raise UserError(
            f"{name[:40]!r} cannot be the name of a site: use small letters, digits, '-', '_' "
            "and '.'"
        )


def _write_certificates(path: Path, hosts: Sequence[str], ca_key: Path) -> Authority:
    """Write a new certificate authority and a server certificate that it has signed."""
    from polyphily.flower import keys

    authority_key, server_key = keys.new_key(), keys.new_key()
    authority = keys.new_authority(authority_key)
    certificate = keys.new_certificate(server_key, hosts, authority, authority_key)
    keys.write_private(ca_key, keys.private_pem(authority_key))
    keys.write_private(path / "server.key", keys.private_pem(server_key))
    (path / "ca.crt").write_bytes(keys.certificate_pem(authority))
    (path / "server.crt").write_bytes(keys.certificate_pem(certificate))
    return authority, authority_key


def _write_bundles(
    path: Path, sites: Sequence[str], host: str, port: int, authority: Authority
) -> None:
    """Generate a key pair for every site and write the sites' bundles."""
    from polyphily.flower import keys

    private_keys = {site: keys.new_key() for site in sites}
    public_keys = {site: keys.public_openssh(key) for site, key in private_keys.items()}
    for site, key in private_keys.items():
        bundle = path / "bundles" / site
        bundle.mkdir(mode=0o700)
        (bundle / "sites").mkdir()
        keys.write_private(bundle / "site.key", keys.private_openssh(key))
        for other, public in public_keys.items():
            (bundle / "sites" / f"{other}.pub").write_bytes(public)
        (path / "sites" / f"{site}.pub").write_bytes(public_keys[site])
        certificate = keys.new_site_certificate(site, key.public_key(), *authority)
        (path / "sites" / f"{site}.crt").write_bytes(keys.certificate_pem(certificate))
        (bundle / "ca.crt").write_bytes((path / "ca.crt").read_bytes())
        write_text(bundle / SITE, to_toml({"name": site, "host": host, "port": port}))


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Wait until no other process runs the same run; one of a killed server may still do so."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def make_policy(entries: Mapping[str, Any], sites: int) -> Policy:
    """Create the policy of a run with so many sites from its entries in a request."""
    from polyphily.flower.joining import Policy, read_limit

    policy = Policy(**{name: read_limit(name, value) for name, value in entries.items()})
    if policy.min_sites > sites:
        raise UserError(f"min_sites {policy.min_sites} is more than the {sites} sites there are")
    return policy


def complete_for_sites(
    settings: Settings, method: Method, *, dense: bool, classes: int, relations: Sequence[str] = ()
) -> Settings:
    """Fill in all settings that were not given, with the defaults for graphs in files."""
    from polyphily.core.metrics import check_metric
    from polyphily.runtime.network import complete

    found = complete(settings, method, KIND, "accuracy", dense=dense, relations=relations)
    found.check()
    check_metric(found.metric or "accuracy", classes, "the sites' data")
    return found


_OPTIONAL_ENTRIES = """
# min_sites = 2         # fewest answers that a round needs; all sites unless given
# timeout = 600         # seconds a site has for a round
# repeats = 2           # how often a round with fewer than min_sites answers is repeated
# join_timeout = 600    # seconds to wait for the sites before the first round
# misses = 2            # messages without an answer after which a site counts as away
# grace = 5             # seconds that a site which is away has, if the others are quicker
# max_update = 100      # largest change of a model, in units of the others' (or "off")
# max_weight = 10000    # largest count or statistic, in units of the others' (or "off")
# max_model = 512       # largest model, in megabytes (or "off")
# classes = ["no", "yes"]   # all labels; needed if a site may lack some of them
# split = "0.6,0.2,0.2"     # split of the nodes at sites whose data has no split of its own
# normalize = "standard"    # normalisation of the features at the sites: none, row, standard
# encoding = "home"         # sites exchange no statistics of their columns (docs/privacy.md)
# rounds = 50               # and any other setting of polyphily run
"""
