"""The server's folder and the sites' bundles: what `polyphily server` and `site` work with.

config.toml          address, sites, and the usual training settings
ca.crt, ca.key       the federation's own certificate authority
server.crt, .key     the server's certificate
sites/NAME.pub       each site's public key
bundles/NAME/        what a site gets: site.toml, ca.crt, its own key, the public keys of all sites
                     (sites/NAME.pub); to be moved there
flower/              Flower's own files: database, log
runs/NAME/           one folder per run
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyphily.errors import PolyphilyError, UserError, missing_package, unknown
from polyphily.runs.folder import RunFolder, to_toml, write_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from polyphily.core.settings import Settings
    from polyphily.flower.keys import Identity
    from polyphily.flower.plan import Plan
    from polyphily.flower.server import Policy, Transport

CONFIG, SITE, PLAN, REQUEST = "config.toml", "site.toml", "plan.json", "request.json"
ENVIRONMENT = "POLYPHILY_SERVER"
DATASET = "sites"  # what summaries call graphs that nobody here has seen
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = ("min_sites", "timeout", "repeats", "join_timeout")
OWN = ("sites", "host", "port", "control_port", "classes", "split", "normalize", "seed", *POLICY)


def require_flower() -> None:
    """Says how to get Flower where it is missing."""
    try:
        import flwr.supercore  # noqa: F401
    except ImportError:
        raise missing_package("flwr", "flower", "training across sites") from None


def quiet_flower() -> None:
    """Flower's settings for a closed house: no telemetry, no calls home, its tools found."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    level = os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    logging.getLogger("flwr").setLevel(level)
    tools = str(Path(sys.executable).parent)
    if tools not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([tools, os.environ.get("PATH", "")])


@dataclass(frozen=True)
class Bundle:
    """A site's folder: who it is, where the server is, its key."""

    path: Path

    def _entries(self) -> dict[str, Any]:
        file = self.path / SITE
        try:
            return tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError:
            raise UserError(
                f"{self.path} is no site bundle: it has no {SITE}. "
                "The server's operator makes bundles with polyphily server init"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{file} is not valid TOML: {error}") from None

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

    def pair(self) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
        """The site's key and the public half of it."""
        from polyphily.flower.keys import read_pair

        try:
            return read_pair(self.key)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.key}: no private key of a site: {error}") from None

    def identity(self) -> Identity:
        """What the site signs with, and the keys by which it knows the others."""
        from polyphily.flower.keys import Identity, read_publics

        private, _ = self.pair()
        try:
            return Identity(private, read_publics(self.path / "sites"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / 'sites'}: no public keys of sites: {error}") from None


@dataclass(frozen=True)
class Deployment:
    """A server's folder."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Deployment:
        if not (path / CONFIG).is_file():
            raise UserError(
                f"{path} is no server folder: it has no {CONFIG}. "
                f"Make one: polyphily server init {path} --sites north,south"
            )
        own = cls(path.resolve())
        own.config()
        return own

    @classmethod
    def of_environment(cls) -> Deployment:
        return cls.open(Path(os.environ[ENVIRONMENT]))

    @classmethod
    def create(
        cls, path: Path, sites: Sequence[str], host: str, port: int, control_port: int
    ) -> Deployment:
        """Lays out a new server folder with certificates, keys and bundles."""
        from polyphily.flower import keys
        from polyphily.flower.plan import SITE_NAME

        for site in sites:
            if not SITE_NAME.fullmatch(site):
                raise UserError(
                    f"'{site}' is no name for a site: use small letters, digits, '-', '_' and '.'"
                )
        if not sites or len(set(sites)) < len(sites):
            raise UserError("--sites: name each site once, at least one: --sites north,south")
        if (path / CONFIG).exists():
            raise UserError(f"{path} is a server folder already: choose another")
        try:
            for name in ("sites", "bundles", "flower", "runs"):
                (path / name).mkdir(parents=True)
            path.chmod(0o700)
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}") from None
        authority_key, server_key = keys.new_key(), keys.new_key()
        authority = keys.new_authority(authority_key)
        hosts = list(dict.fromkeys([host, *LOOPBACK]))
        certificate = keys.new_certificate(server_key, hosts, authority, authority_key)
        keys.write_private(path / "ca.key", keys.private_pem(authority_key))
        keys.write_private(path / "server.key", keys.private_pem(server_key))
        (path / "ca.crt").write_bytes(keys.certificate_pem(authority))
        (path / "server.crt").write_bytes(keys.certificate_pem(certificate))
        own_keys = {site: keys.new_key() for site in sites}
        for site, key in own_keys.items():
            bundle = path / "bundles" / site
            bundle.mkdir(mode=0o700)
            (bundle / "sites").mkdir()
            keys.write_private(bundle / "site.key", keys.private_openssh(key))
            for other, known in own_keys.items():
                (bundle / "sites" / f"{other}.pub").write_bytes(keys.public_openssh(known))
            (path / "sites" / f"{site}.pub").write_bytes(keys.public_openssh(key))
            (bundle / "ca.crt").write_bytes(keys.certificate_pem(authority))
            write_text(bundle / SITE, to_toml({"name": site, "host": host, "port": port}))
        config = {
            "sites": list(sites),
            "host": host,
            "port": port,
            "control_port": control_port,
            "min_sites": len(sites),
        }
        write_text(path / CONFIG, to_toml(config) + _MORE)
        return cls(path.resolve())

    # Configuration ---------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """What config.toml says, its names and types checked."""
        from polyphily.core.settings import names

        file = self.path / CONFIG
        try:
            entries = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{file}: {error}") from None
        entries = {name.replace("-", "_"): value for name, value in entries.items()}
        for name in entries:
            if name not in OWN and name not in names():
                raise unknown(f"entry in {file}", name, {*OWN, *names()})
        for name in ("sites", "host", "port", "control_port"):
            if name not in entries:
                raise UserError(f"{file}: no entry '{name}'")
        for name, kind in (("sites", list), ("classes", list), ("host", str), ("port", int)):
            if not isinstance(entries.get(name, kind()), kind):
                raise UserError(f"{file}: '{name}' is no {kind.__name__}")
        return entries

    @property
    def sites(self) -> list[str]:
        return [str(site) for site in self.config()["sites"]]

    def public_keys(self) -> dict[bytes, str]:
        """The sites' names by public key."""
        from polyphily.flower.keys import read_public

        return {read_public(self.path / "sites" / f"{site}.pub"): site for site in self.sites}

    @property
    def control(self) -> str:
        """Where this machine's own commands reach the server."""
        return f"127.0.0.1:{self.config()['control_port']}"

    @property
    def instance_file(self) -> Path:
        """Names the server process that is running, or ran last."""
        return self.path / "flower" / "instance"

    @property
    def instance(self) -> str:
        file = self.instance_file
        return file.read_text(encoding="ascii").strip() if file.exists() else ""

    # Runs ------------------------------------------------------------------------------------

    def new_run(
        self, method: str, settings: Mapping[str, Any], hyperparameters: Mapping[str, Any]
    ) -> str:
        """Lays out a run; its name. Everything that can be checked before a site is asked is."""
        from polyphily.core import sampling
        from polyphily.core.method import create
        from polyphily.core.settings import from_mapping, names
        from polyphily.flower.plan import check_for_flower
        from polyphily.privacy import differential as privacy

        config = self.config()
        asked = {k: v for k, v in config.items() if k in names()} | {
            k: v for k, v in settings.items() if k in names()
        }
        own = {k: v for k, v in config.items() if k in OWN} | {
            k: v for k, v in settings.items() if k in OWN
        }
        check_for_flower(from_mapping(asked))
        made = create(method, hyperparameters)
        sampling.check(made, from_mapping(asked))
        privacy.check(made, from_mapping(asked), len(self.sites))
        policy = {name: own[name] for name in POLICY if name in own}
        policy.setdefault("min_sites", len(self.sites))
        make_policy(policy, len(self.sites))
        request = {
            "method": made.name,
            "hyperparameters": dataclasses.asdict(made),
            "settings": asked,
            "sites": self.sites,
            "classes": own.get("classes", []),
            "split": own.get("split", ""),
            "normalize": own.get("normalize", "none"),
            "seed": own.get("seed", 0),
            "policy": policy,
        }
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{made.name}"
        name, number = stem, 1
        while (self.path / "runs" / name).exists():
            number += 1
            name = f"{stem}-{number}"
        folder = RunFolder(self.path / "runs" / name)
        config = {"method": made.name, "dataset": DATASET, "seeds": [request["seed"]], **asked}
        folder.create({**config, "engine": "flower", "set": request["hyperparameters"]}, [])
        write_text(folder.path / REQUEST, json.dumps(request, indent=2) + "\n")
        return name

    def run_folder(self, name: str | None = None) -> RunFolder:
        """A run's folder; the latest unless named."""
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
        """Runs a run that was laid out, from its beginning or from its checkpoint.

        Raises:
            PolyphilyError: when it cannot go on; the events say so, too.
        """
        from polyphily.flower.server import Coordinator, log_to

        folder = self.run_folder(name)
        request = json.loads((folder.path / REQUEST).read_text(encoding="utf-8"))
        policy = make_policy(request["policy"], len(request["sites"]))
        emit = log_to(folder)
        with _alone(folder.path / "lock"):
            emit("started", sites=request["sites"])
            try:
                plan = self._plan(folder, request, policy, transport)
                return Coordinator(plan, transport, folder, policy, emit, progress).go()
            except PolyphilyError as error:
                emit("failed", reason=str(error))
                raise
            except Exception as error:
                emit("failed", reason=f"{type(error).__name__}: {error}")
                raise

    def _plan(
        self, folder: RunFolder, request: Mapping[str, Any], policy: Policy, transport: Transport
    ) -> Plan:
        """What was agreed on: from the file of a run that began already, else with the sites."""
        from polyphily.core.method import create
        from polyphily.core.settings import from_mapping
        from polyphily.flower.plan import Plan, agree
        from polyphily.flower.server import gather, log_to
        from polyphily.privacy import differential as privacy

        file = folder.path / PLAN
        if file.exists():
            plan = Plan.from_json(json.loads(file.read_text(encoding="utf-8")))
            gather(transport, plan.sites, policy, log_to(folder))
            return plan
        found = gather(transport, request["sites"], policy, log_to(folder))
        schema = agree({s: facts["schema"] for s, facts in found.items()}, request["classes"])
        method = create(request["method"], request["hyperparameters"])
        settings = filled(
            from_mapping(request["settings"]),
            method.backbone,
            dense=all(facts["dense"] for facts in found.values()),
            classes=len(schema.classes),
        )
        privacy.check(method, settings, len(found))
        plan = Plan(
            run=folder.path.name,
            method=method.name,
            hyperparameters=request["hyperparameters"],
            settings=settings,
            schema=schema,
            sites=tuple(found),
            split=request["split"],
            normalize=request["normalize"],
            seed=request["seed"],
        )
        write_text(file, json.dumps(plan.to_json(), indent=2) + "\n")
        return plan


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Waits until no other process conducts the same run: a killed server's may linger."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def make_policy(entries: Mapping[str, Any], sites: int) -> Policy:
    from polyphily.flower.server import Policy

    if int(entries["min_sites"]) > sites:
        raise UserError(
            f"min_sites {entries['min_sites']} is more than the {sites} sites there are"
        )
    return Policy(**entries)


def filled(settings: Settings, backbone: str | None, *, dense: bool, classes: int) -> Settings:
    """Settings with nothing left open, for graphs in files."""
    from polyphily.core.recipes import fill

    chosen = dataclasses.replace(settings, backbone=settings.backbone or backbone)
    complete = fill(chosen, "files", "accuracy", dense=dense)
    complete.check()
    if complete.metric == "auc" and classes != 2:
        raise UserError(f"metric auc needs two classes, the sites have {classes}")
    return complete


_MORE = """
# timeout = 600         # seconds a site has for a round
# repeats = 2           # how often a round with fewer than min_sites answers is asked again
# join_timeout = 600    # seconds to wait for the sites before the first round
# classes = ["no", "yes"]   # all labels, where a site may lack some
# split = "0.6,0.2,0.2"     # how sites split their nodes; their own split column wins
# normalize = "standard"    # what sites do with their features: none, row, standard
# rounds = 50               # and every other setting of polyphily run
"""
