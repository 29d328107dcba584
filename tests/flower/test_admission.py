"""Keys that are made at the sites: requests, answers, rotation, revocation, modes of files."""

from __future__ import annotations

import base64
import datetime as dt
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyphily.cli import deploying
from polyphily.errors import UserError
from polyphily.flower import admission, keys
from polyphily.flower.admission import NEW_KEY, Member, Request, ServerAnswer
from polyphily.flower.deployment import Bundle, Deployment
from polyphily.flower.register import REVOKED, Journal, Register

ADDRESS = "example.org:9443"


@pytest.fixture
def own(tmp_path: Path) -> Deployment:
    """A server without sites."""
    return Deployment.create(tmp_path / "server", [], "example.org", 9443, 9444)


def ask(place: Path, name: str) -> Path:
    """Make a site's folder; return its request."""
    return admission.init_site(place / name, name, ADDRESS)


def let_in(own: Deployment, place: Path, *names: str) -> list[Bundle]:
    """Sites with keys of their own, who know each other."""
    for name in names:
        admission.admit(own, ask(place, name))
    for name in names:
        admission.accept(place / name, admission.answer(own, name))
    return [Bundle(place / name) for name in names]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# From request to folder ------------------------------------------------------------------------


def test_the_key_is_made_at_the_site_and_stays_there(own: Deployment, tmp_path: Path) -> None:
    north, south = let_in(own, tmp_path, "north", "south")
    for site in (north, south):
        assert site.key.stat().st_mode & 0o777 == 0o600
        secret = site.key.read_bytes().splitlines()[2]
        held = [p for p in tmp_path.rglob("*") if p.is_file() and secret in p.read_bytes()]
        assert held == [site.key]
    signature = north.identity().sign(b"words")
    assert south.identity().verify("north", b"words", signature)
    assert not south.identity().verify("south", b"words", signature)
    assert own.sites == ["north", "south"]
    assert own.public_keys() == {
        keys.public_pem(site.pair()[1]): site.name for site in (north, south)
    }


def test_fingerprints_are_those_of_the_usual_tools(own: Deployment, tmp_path: Path) -> None:
    (north,) = let_in(own, tmp_path, "north")
    if not shutil.which("ssh-keygen") or not shutil.which("openssl"):
        pytest.skip("no ssh-keygen or openssl")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", own.path / "sites/north.pub"], capture_output=True, text=True
    )
    assert keys.fingerprint(north.pair()[1]) in shown.stdout
    command = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", north.certificate]
    shown = subprocess.run(command, capture_output=True, text=True)
    authority = keys.read_certificate(north.certificate)
    assert keys.certificate_fingerprint(authority) in shown.stdout


def test_nobody_can_ask_for_a_key_that_he_does_not_have(own: Deployment, tmp_path: Path) -> None:
    """The name and the key in a request are signed; put together from two, they are refused."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    victim, thief = (
        x509.load_pem_x509_csr(Request.read(ask(tmp_path, name)).csr.encode())
        for name in ("north", "south")
    )
    whole = victim.public_bytes(Encoding.DER)
    mixed = whole.replace(victim.signature, thief.signature)
    pem = b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(mixed)
    pem += b"-----END CERTIFICATE REQUEST-----\n"
    file = tmp_path / "mixed.json"
    file.write_text(json.dumps({"polyphily": "request", "csr": pem.decode(), "signature": ""}))
    with pytest.raises(UserError, match="not the request of a site"):
        admission.admit(own, file)
    assert own.sites == []


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_request_admits_no_other_key(
    own: Deployment, tmp_path: Path, at: float, value: int
) -> None:
    request = tmp_path / "north" / "north.request.json"
    if not request.exists():
        ask(tmp_path, "north")
    whole = bytearray(request.read_bytes())
    whole[int(at * len(whole))] = value
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(whole)
    try:
        admission.admit(own, damaged)
    except UserError:
        return
    _, key = Bundle(tmp_path / "north").pair()
    assert [(e.name, e.key) for e in own.register.entries()] == [("north", key)]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"polyphily": "request"}', '{"polyphily": "request", "csr": 7}',
     "[" * 100_000, "\xff"],
)  # fmt: skip
def test_what_is_no_request_or_answer_is_refused(
    own: Deployment, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(text, encoding="latin-1")
    ask(tmp_path, "north")
    for refuse in (
        lambda: admission.admit(own, file),
        lambda: admission.rotate(own, file),
        lambda: admission.accept(tmp_path / "north", file),
    ):
        with pytest.raises(UserError, match=r"file\.json"):
            refuse()


def test_a_huge_file_is_not_read(own: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "huge.json"
    with file.open("wb") as stream:
        stream.truncate(admission.LARGEST + 1)
    with pytest.raises(UserError, match="too large"):
        admission.admit(own, file)


@pytest.mark.parametrize("name", ["../up", "North", "", "a b", "a\x1b[31m"])
def test_a_site_needs_a_proper_name(own: Deployment, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        admission.init_site(tmp_path / "site", name, ADDRESS)
    key = keys.new_key()
    if name:
        file = tmp_path / "file.json"
        Request(name, key.public_key(), keys.new_request(key, name).decode()).write(file)
        with pytest.raises(UserError, match="cannot be the name"):
            admission.admit(own, file)


@pytest.mark.parametrize("server", ["example.org", "example.org:", ":9443", "a:b", "a:99999"])
def test_a_site_needs_the_servers_address(tmp_path: Path, server: str) -> None:
    with pytest.raises(UserError, match="is not an address"):
        admission.init_site(tmp_path / "site", "north", server)


def test_a_key_is_not_written_over(tmp_path: Path) -> None:
    ask(tmp_path, "north")
    before = contents(tmp_path / "north")
    with pytest.raises(UserError, match="already"):
        ask(tmp_path, "north")
    assert contents(tmp_path / "north") == before


def test_a_site_without_an_answer_is_told_what_is_missing(tmp_path: Path) -> None:
    ask(tmp_path, "north")
    with pytest.raises(UserError, match="site accept"):
        Bundle(tmp_path / "north").identity()


def _spoil_name(answer: dict) -> None:
    answer["name"] = "south"


def _spoil_certificate(answer: dict) -> None:
    answer["certificate"] = answer["authority"]


def _spoil_own_key(answer: dict) -> None:
    answer["members"]["north"]["keys"] = answer["members"]["south"]["keys"]


def _spoil_members(answer: dict) -> None:
    answer["members"]["../../south"] = answer["members"]["south"]


@pytest.mark.parametrize("spoil", [_spoil_name, _spoil_certificate, _spoil_own_key, _spoil_members])
def test_a_wrong_answer_changes_nothing(
    own: Deployment, tmp_path: Path, spoil: Callable[[dict], None]
) -> None:
    let_in(own, tmp_path, "north", "south")
    answer = json.loads(admission.answer(own, "north").read_text())
    spoil(answer)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(answer))
    before = contents(tmp_path / "north")
    with pytest.raises(UserError):
        admission.accept(tmp_path / "north", file)
    assert contents(tmp_path / "north") == before


def test_an_answer_of_another_federation_is_refused(own: Deployment, tmp_path: Path) -> None:
    (north,) = let_in(own, tmp_path, "north")
    other = Deployment.create(tmp_path / "other", [], "example.org", 9443, 9444)
    answer = admission.admit(other, tmp_path / "north" / "north.request.json")
    before = contents(north.path)
    with pytest.raises(UserError, match="another authority"):
        admission.accept(north.path, answer)
    assert contents(north.path) == before


def test_an_authority_that_is_known_beforehand_is_insisted_on(
    own: Deployment, tmp_path: Path
) -> None:
    other = Deployment.create(tmp_path / "other", [], "example.org", 9443, 9444)
    request = admission.init_site(tmp_path / "n", "north", ADDRESS, own.path / "ca.crt")
    with pytest.raises(UserError, match="another authority"):
        admission.accept(tmp_path / "n", admission.admit(other, request))
    assert admission.accept(tmp_path / "n", admission.admit(own, request)).known


# At the server ---------------------------------------------------------------------------------


def test_the_configuration_keeps_its_other_lines(own: Deployment, tmp_path: Path) -> None:
    config = own.path / "config.toml"
    config.write_text(config.read_text() + 'classes = ["no", "yes"]  # ours\n')
    before = config.read_text().splitlines()
    let_in(own, tmp_path, "north", "south")
    after = config.read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [("sites = []", 'sites = ["north", "south"]')]


def test_a_second_key_for_a_site_is_refused(own: Deployment, tmp_path: Path) -> None:
    let_in(own, tmp_path, "north")
    with pytest.raises(UserError, match="has a key already"):
        admission.admit(own, ask(tmp_path / "other", "north"))


def test_one_key_cannot_be_two_sites(own: Deployment, tmp_path: Path) -> None:
    (north,) = let_in(own, tmp_path, "north")
    key, public = north.pair()
    Request("south", public, keys.new_request(key, "south").decode()).write(tmp_path / "r.json")
    with pytest.raises(UserError, match="is the key of 'north'"):
        admission.admit(own, tmp_path / "r.json")


def test_the_authoritys_key_can_be_kept_elsewhere(tmp_path: Path) -> None:
    safe = tmp_path / "safe"
    safe.mkdir(mode=0o700)
    own = Deployment.create(
        tmp_path / "server", ["south"], "example.org", 9443, 9444, safe / "ca.key"
    )
    assert not (own.path / "ca.key").exists()
    request = ask(tmp_path, "north")
    with pytest.raises(UserError, match="--ca-key"):
        admission.admit(own, request)
    other = Deployment.create(tmp_path / "other", [], "example.org", 9443, 9444)
    with pytest.raises(UserError, match="not the key of this federation's authority"):
        admission.admit(own, request, other.path / "ca.key")
    assert own.sites == ["south"]
    admission.admit(own, request, safe / "ca.key")
    assert own.sites == ["south", "north"]


def test_a_failed_rotation_leaves_the_old_key_valid(own: Deployment, tmp_path: Path) -> None:
    let_in(own, tmp_path, "north")
    (own.path / "ca.key").rename(tmp_path / "ca.key")
    with pytest.raises(UserError, match="--ca-key"):
        admission.rotate(own, admission.rotate_site(tmp_path / "north"))
    assert own.sites == ["north"]


def test_a_revoked_key_is_refused_for_ever_and_the_name_is_free(
    own: Deployment, tmp_path: Path
) -> None:
    north, _ = let_in(own, tmp_path, "north", "south")
    old = keys.public_pem(north.pair()[1])
    assert own.register.refusal(old) == ""
    admission.revoke(own, "north")
    assert own.sites == ["south"]
    assert "revoked" in own.register.refusal(old)
    with pytest.raises(UserError, match="was revoked"):
        admission.admit(own, north.path / "north.request.json")
    with pytest.raises(UserError, match="already"):
        admission.revoke(own, "north")
    admission.admit(own, ask(tmp_path / "again", "north"))
    assert own.sites == ["north", "south"]
    assert "revoked" in own.register.refusal(old)
    assert [e["event"] for e in Journal(own.path).events()] == [
        "admitted", "admitted", "revoked", "admitted",
    ]  # fmt: skip


def test_a_site_that_is_not_there_cannot_be_revoked(own: Deployment, tmp_path: Path) -> None:
    let_in(own, tmp_path, "north")
    with pytest.raises(UserError, match=r"no site 'nort'.*north"):
        admission.revoke(own, "nort")


def test_a_site_that_is_taken_out_of_the_configuration_may_not_connect(
    own: Deployment, tmp_path: Path
) -> None:
    north, _ = let_in(own, tmp_path, "north", "south")
    register, key = own.register, keys.public_pem(north.pair()[1])
    assert register.refusal(key) == ""
    config = own.path / "config.toml"
    config.write_text(config.read_text().replace('"north", ', ""))
    assert "config.toml" in register.refusal(key), "without a restart"
    assert own.sites == ["south"]


def test_an_expired_certificate_is_refused_and_renewed_by_the_same_request(
    own: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "VALID", dt.timedelta(seconds=-1))
    request = ask(tmp_path, "north")
    answer = admission.admit(own, request)
    key = keys.public_pem(Bundle(tmp_path / "north").pair()[1])
    assert "ended on" in own.register.refusal(key)
    with pytest.raises(UserError, match="not for the key"):
        admission.accept(tmp_path / "north", answer)
    monkeypatch.undo()
    admission.accept(tmp_path / "north", admission.admit(own, request))
    assert own.register.refusal(key) == ""


def test_a_certificate_does_not_outlive_its_authority(
    own: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "VALID", dt.timedelta(days=100 * 365))
    admission.admit(own, ask(tmp_path, "north"))
    authority, site = (keys.read_certificate(own.path / n) for n in ("ca.crt", "sites/north.crt"))
    assert site.not_valid_after_utc <= authority.not_valid_after_utc


def test_the_servers_certificate_is_renewed_with_its_key_and_names(
    own: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography import x509

    monkeypatch.setattr(keys, "VALID", dt.timedelta(days=20))
    admission.renew(own)
    old = keys.read_certificate(own.path / "server.crt")
    deploying._warn_of_expiry(own)
    assert "server renew" in capsys.readouterr().err
    monkeypatch.undo()
    admission.renew(own)
    new = keys.read_certificate(own.path / "server.crt")
    deploying._warn_of_expiry(own)
    assert capsys.readouterr().err == ""
    assert new.not_valid_after_utc > old.not_valid_after_utc + dt.timedelta(days=365)
    assert new.public_key() == old.public_key()
    names = x509.SubjectAlternativeName
    assert new.extensions.get_extension_for_class(names) == old.extensions.get_extension_for_class(
        names
    )
    new.verify_directly_issued_by(keys.read_certificate(own.path / "ca.crt"))


# New keys --------------------------------------------------------------------------------------


def test_a_new_key_replaces_the_old_one_at_the_server_and_at_other_sites(
    own: Deployment, tmp_path: Path
) -> None:
    north, south = let_in(own, tmp_path, "north", "south")
    first = north.pair()[1]
    for _ in range(2):  # the other site misses the answers in between
        answer = admission.rotate(own, admission.rotate_site(north.path))
        admission.accept(north.path, answer)
    assert not (north.path / NEW_KEY).exists()
    latest = north.pair()[1]
    assert latest != first
    assert "replaced" in own.register.refusal(keys.public_pem(first))
    assert own.register.refusal(keys.public_pem(latest)) == ""
    done = admission.accept(south.path, admission.answer(own, "south"))
    assert done.replaced == {"north": keys.fingerprint(latest)}
    assert south.identity().verify("north", b"words", north.identity().sign(b"words"))


def test_until_it_is_accepted_the_old_key_stays_in_use(own: Deployment, tmp_path: Path) -> None:
    (north,) = let_in(own, tmp_path, "north")
    before = north.pair()[1]
    admission.rotate_site(north.path)
    assert north.pair()[1] == before
    assert own.register.refusal(keys.public_pem(before)) == ""


def test_only_the_old_key_can_name_its_successor(own: Deployment, tmp_path: Path) -> None:
    north, south = let_in(own, tmp_path, "north", "south")
    request = Request.read(admission.rotate_site(north.path))
    new = keys.public_openssh(request.key)
    others = south.pair()[0]
    for signature in (b"", b"x", keys.sign_rotation(others, "north", new),
                      keys.sign_rotation(north.pair()[0], "south", new)):  # fmt: skip
        file = tmp_path / "forged.json"
        Request("north", request.key, request.csr, signature).write(file)
        with pytest.raises(UserError, match="not signed with the present key"):
            admission.rotate(own, file)
    with pytest.raises(UserError, match="has a key already"):
        admission.admit(own, north.path / "north.request.json")


def test_a_server_cannot_slip_in_a_key_of_its_own(own: Deployment, tmp_path: Path) -> None:
    """A lying server could read what sites mask for each other if it could exchange their keys."""
    _, south = let_in(own, tmp_path, "north", "south")
    honest = ServerAnswer.read(admission.answer(own, "south"))
    known, own_key = honest.members["north"].keys[0], keys.new_key()
    forged = keys.public_openssh(own_key).decode()
    signed = keys.sign_rotation(own_key, "north", forged.encode())
    for member in (
        Member((forged,)),
        Member((known, forged), (base64.b64encode(signed).decode(),)),
        Member((known, forged), ("",)),
    ):
        lie = ServerAnswer(
            "south", honest.host, honest.port, honest.authority, honest.certificate,
            {**honest.members, "north": member},
        )  # fmt: skip
        lie.write(tmp_path / "lie.json")
        before = contents(south.path)
        with pytest.raises(UserError, match="another key for 'north'"):
            admission.accept(south.path, tmp_path / "lie.json")
        assert contents(south.path) == before


def test_sites_learn_of_new_and_of_former_sites(own: Deployment, tmp_path: Path) -> None:
    north, _ = let_in(own, tmp_path, "north", "south")
    admission.admit(own, ask(tmp_path, "east"))
    admission.revoke(own, "south")
    done = admission.accept(north.path, admission.answer(own, "north"))
    assert list(done.added) == ["east"]
    assert done.removed == ["south"]
    assert set(north.identity().public_keys) == {"north", "east"}


# Register --------------------------------------------------------------------------------------


def test_a_register_reads_only_what_has_changed(
    own: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    north, south = let_in(own, tmp_path, "north", "south")
    register = Register(own.path)
    first, second = (keys.public_pem(site.pair()[1]) for site in (north, south))
    for _ in range(5):
        assert register.refusal(first) == ""
    assert register.version == 1
    admission.revoke(own, "south")
    assert register.refusal(second) != ""
    assert register.version == 2


@pytest.mark.parametrize("key", [b"", b"no key", b"-----BEGIN PUBLIC KEY-----\nAAAA\n"])
def test_what_is_no_key_is_refused(own: Deployment, key: bytes) -> None:
    assert own.register.refusal(key)


def test_revocations_survive(own: Deployment, tmp_path: Path) -> None:
    north, _ = let_in(own, tmp_path, "north", "south")
    admission.revoke(own, "north")
    lines = (own.path / "sites" / REVOKED).read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["revoked"]
    (own.path / "sites" / "north.pub").unlink()
    assert "revoked" in Register(own.path).refusal(keys.public_pem(north.pair()[1]))


# Modes of files --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610])
def test_a_key_that_others_can_read_is_refused(own: Deployment, tmp_path: Path, mode: int) -> None:
    (north,) = let_in(own, tmp_path, "north")
    north.key.chmod(mode)
    with pytest.raises(UserError, match=f"chmod go= {north.key}"):
        north.pair()
    north.key.chmod(0o600)
    north.pair()
    (own.path / "ca.key").chmod(mode)
    with pytest.raises(UserError, match=r"chmod go= .*ca\.key"):
        admission.renew(own)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(
    own: Deployment, tmp_path: Path, mode: int
) -> None:
    (north,) = let_in(own, tmp_path, "north")
    north.path.chmod(mode)
    with pytest.raises(UserError, match=rf"chmod go-w {north.path}\b"):
        north.pair()


@pytest.mark.parametrize("name", ["ca.crt", "sites", "sites/north.pub"])
def test_files_that_others_can_replace_are_refused(
    own: Deployment, tmp_path: Path, name: str
) -> None:
    (north,) = let_in(own, tmp_path, "north")
    (north.path / name).chmod(0o777)
    north.pair()  # nobody else can reach it
    north.path.chmod(0o755)
    with pytest.raises(UserError, match=f"chmod go-w {north.path / name}"):
        north.pair()
