"""The server's folder, the sites' bundles, certificates."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flower.federations import Wires, federation, sites_of
from polyphily.errors import UserError
from polyphily.flower import keys
from polyphily.flower.deployment import CONFIG, Bundle, Deployment


@pytest.fixture
def own(tmp_path: Path) -> Deployment:
    names = [graph.name for graph in federation().clients]
    return Deployment.create(tmp_path / "server", names, "example.org", 9443, 9444)


def test_a_bundle_holds_one_private_key_and_it_is_its_own(own: Deployment) -> None:
    secrets = {}
    for site in own.sites:
        bundle = Bundle(own.path / "bundles" / site)
        names = sorted(p.name for p in bundle.path.iterdir())
        assert names == ["ca.crt", "site.key", "site.toml", "sites"]
        everybody = {f"{name}.pub" for name in own.sites}
        assert {p.name for p in (bundle.path / "sites").iterdir()} == everybody
        assert not [p for p in (bundle.path / "sites").iterdir() if b"PRIVATE" in p.read_bytes()]
        assert stat.S_IMODE(bundle.key.stat().st_mode) == 0o600
        assert (bundle.name, bundle.address) == (site, ("example.org", 9443))
        _, public = keys.read_pair(bundle.key)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        secrets[public.public_bytes(serialization.Encoding.PEM, form)] = site
    assert secrets == own.public_keys()
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((own.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700


def test_sites_know_each_others_signatures(own: Deployment) -> None:
    first, second, third = (Bundle(own.path / "bundles" / site).identity() for site in own.sites)
    signature = first.sign(b"words")
    name, other, _ = own.sites
    assert second.verify(name, b"words", signature)
    assert third.verify(name, b"words", signature)
    assert not second.verify(other, b"words", signature)
    assert not second.verify(name, b"other words", signature)
    assert not second.verify("stranger", b"words", signature)


def test_the_servers_certificate_is_for_its_names_and_signed_by_the_authority(
    own: Deployment,
) -> None:
    authority, server = (
        x509.load_pem_x509_certificate((own.path / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"example.org", "localhost"}
    assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1"}
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = serialization.load_pem_private_key((own.path / "server.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == server.public_key()


def test_a_private_file_is_never_written_over(tmp_path: Path) -> None:
    keys.write_private(tmp_path / "k", b"first")
    with pytest.raises(FileExistsError):
        keys.write_private(tmp_path / "k", b"second")
    assert (tmp_path / "k").read_bytes() == b"first"


@pytest.mark.parametrize("sites", [["a", "a"], ["../up"], ["North"], [""]])
def test_sites_need_names_of_their_own(sites: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        Deployment.create(tmp_path / "s", sites, "localhost", 1, 2)
    assert not (tmp_path / "s").exists()


def test_a_folder_is_not_laid_out_twice(own: Deployment) -> None:
    with pytest.raises(UserError, match="is a server folder already"):
        Deployment.create(own.path, ["a"], "localhost", 1, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ruonds = 3", "did you mean 'rounds'"),
        ('sites = "north"', "'sites' must be a list"),
        ("port = ", "Invalid value"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(own: Deployment, line: str, words: str) -> None:
    file = own.path / CONFIG
    kept = [old for old in file.read_text().splitlines() if old[:5] != line[:5]]
    file.write_text("\n".join([line, *kept]))
    with pytest.raises(UserError, match=words):
        Deployment.open(own.path)


def test_what_is_no_folder_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a server folder"):
        Deployment.open(tmp_path)
    with pytest.raises(UserError, match="is not a site's folder"):
        _ = Bundle(tmp_path).name


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fedavgg", {}, "did you mean 'fedavg'"),
        ("fedavg", {"rounds": 0}, "rounds"),
        ("fedavg", {"participation": 0.5}, "is for simulations"),
        ("fedavg", {"min_sites": 4}, "more than the 3 sites"),
        ("fedspa", {"secure_aggregation": True}, "fedspa cannot take --secure-aggregation"),
        ("fedavg", {"timeout": -1.0}, "timeouts above 0"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_is_laid_out(
    own: Deployment, method: str, settings: dict, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        own.new_run(method, settings, {})
    assert list((own.path / "runs").iterdir()) == []


def test_flags_win_over_the_configuration(own: Deployment) -> None:
    file = own.path / CONFIG
    file.write_text(file.read_text() + "rounds = 7\nhidden = 8\ntimeout = 9\n")
    name = own.new_run("fedprox", {"rounds": 2, "repeats": 5}, {"mu": 0.3})
    request = json.loads((own.run_folder(name).path / "request.json").read_text())
    assert request["settings"] == {"rounds": 2, "hidden": 8}
    assert request["policy"] == {"min_sites": 3, "timeout": 9, "repeats": 5}
    assert request["hyperparameters"]["mu"] == 0.3


@pytest.mark.parametrize("name", ["../../etc", "no-such-run", ""])
def test_only_runs_of_the_folder_are_found(own: Deployment, name: str) -> None:
    own.new_run("fedavg", {}, {})
    with pytest.raises(UserError, match="unknown run"):
        own.run_folder(name)


def test_a_run_is_conducted_from_handshake_to_summary(own: Deployment, tmp_path: Path) -> None:
    name = own.new_run("fedavg", {"rounds": 2, "hidden": 8}, {})
    summary = own.conduct(name, Wires(sites_of(federation(), tmp_path)))
    assert summary["rounds"] == 2
    assert summary["clients"] == own.sites
    plan = json.loads((own.run_folder(name).path / "plan.json").read_text())
    assert plan["schema"]["classes"] == ["0", "1"]


def test_sites_that_differ_fail_the_run_before_training(own: Deployment, tmp_path: Path) -> None:
    sites = sites_of(federation(), tmp_path)
    odd = sites["client-1"].graph
    object.__setattr__(odd, "schema", type(odd.schema)((), 9, odd.schema.classes))
    wires = Wires(sites)
    name = own.new_run("fedavg", {"rounds": 2}, {})
    with pytest.raises(UserError, match="'client-0' and 'client-1' have 8 and 9 features"):
        own.conduct(name, wires)
    assert {asked.facts["kind"] for _, asked in wires.asked} == {"hello"}
    events = (own.run_folder(name).path / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "failed"
