"""The run folder: text reads back as it was, files are whole or not there, rounds are not lost."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.graphs.partitions import Partition
from polyphily.runs import folder as module
from polyphily.runs.folder import SHARE, RunFolder, clean, safe_name, to_toml, write_text

MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
basic = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}", fullmatch=True)
values = st.one_of(
    basic,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(-1000, 1000), max_size=4),
    st.lists(basic, max_size=3),
)
AWKWARD = [
    'say "hello"',
    "C:\\data\\new folder\\",
    "line one\nline two\r\n\ttabbed",
    "Größe, naïve, 図書館, Ωμέγα",
    "'''\"\"\"",
    "# no comment",
    "a = 1\n[table]",
    "\x00\x07\x1b\x7f\u0085\u2028\ufeff",
    "\\u0041 \\n \\",
    "",
]


class Killed(BaseException):
    """Stands for a kill: nothing in the library may catch it."""


def federation(seed: int) -> Any:
    """As much of a federation as the folder looks at."""
    return SimpleNamespace(seed=seed, partition=Partition.of("louvain", [np.array([0, seed + 1])]))


# TOML ------------------------------------------------------------------------------------------


@MANY
@given(st.dictionaries(names, values), st.dictionaries(names, values, min_size=1))
@example({"text": "\x7f"}, {"mu": 1e-300})
def test_what_is_written_as_toml_reads_back(plain: dict[str, Any], table: dict[str, Any]) -> None:
    plain = {name: value for name, value in plain.items() if name != "set"}
    assert tomllib.loads(to_toml({**plain, "set": table})) == {**plain, "set": table}


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_strings_survive_toml(text: str) -> None:
    config = {"name": text, "several": [text, text], "set": {"inner": text}}
    assert tomllib.loads(to_toml(config)) == config


@pytest.mark.parametrize("number", [1e-5, 1e16, 1e22, 5e-324, 0.1, -0.0, 2**62, True, 1.0])
def test_numbers_keep_value_and_type_in_toml(number: float) -> None:
    found = tomllib.loads(to_toml({"n": number}))["n"]
    assert (found, type(found)) == (number, type(number))


def test_plain_values_come_before_tables_and_empty_tables_are_left_out() -> None:
    config = {"set": {"mu": 0.1}, "method": "fedprox", "nothing": {}}
    assert tomllib.loads(to_toml(config)) == {"method": "fedprox", "set": {"mu": 0.1}}


@pytest.mark.parametrize("text", ["graphs 🦊", "𝛼 = 0.1"])
def test_any_unicode_survives_toml(text: str) -> None:
    assert tomllib.loads(to_toml({"dataset": text})) == {"dataset": text}


def test_infinity_survives_toml() -> None:
    assert tomllib.loads(to_toml({"clip": math.inf})) == {"clip": math.inf}


# Files whole or not at all ---------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    for text in ("first\n", "", "größer\n" * 1000):
        write_text(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_kill_before_the_replacement_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    write_text(file, "old")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", _kill)
        with pytest.raises(Killed):
            write_text(file, "new")
    assert file.read_text() == "old"
    write_text(file, "newer")
    assert file.read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_kill_in_the_midst_of_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    write_text(file, "old")
    plain = Path.write_text

    def half(self: Path, text: str, **options: Any) -> int:
        plain(self, text[: len(text) // 2], **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(Killed):
            write_text(file, "a new text")
    assert file.read_text() == "old"


def test_a_kill_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"w": torch.zeros(3)}, {"round": 1})
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", _kill)
        with pytest.raises(Killed):
            folder.save_checkpoint({"w": torch.ones(3)}, {"round": 2})
    found = folder.load_checkpoint()
    assert found is not None
    assert torch.equal(found[0]["w"], torch.zeros(3))
    assert found[1] == {"round": 1}


def _kill(*arguments: object) -> None:
    raise Killed


# A new folder ----------------------------------------------------------------------------------


def test_a_new_folder_holds_config_and_partitions(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    config = {"method": "fedavg", "seeds": [3, 4], "set": {"mu": 0.5}}
    folder.create(config, [federation(3), federation(4)])
    assert tomllib.loads((folder.path / "config.toml").read_text()) == config
    assert Partition.load(folder.path / "partition.npz").client_nodes.tolist() == [0, 4]
    assert Partition.load(folder.path / "partition-seed-4.npz").client_nodes.tolist() == [0, 5]
    assert (folder.path / "models").is_dir()
    assert folder.records() == []
    assert folder.read_summary() is None
    assert folder.load_checkpoint() is None


def test_a_folder_with_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    RunFolder(tmp_path).create({"method": "fedavg"}, [])
    with pytest.raises(UserError, match=r"holds a run already.*--resume"):
        RunFolder(tmp_path).create({"method": "local"}, [])
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == {"method": "fedavg"}


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        RunFolder(tmp_path / "file").create({}, [])
    with pytest.raises(UserError, match="cannot write to"):
        RunFolder(tmp_path / "file" / "below").create({}, [])


# Rounds ----------------------------------------------------------------------------------------


def with_records(path: Path, count: int) -> list[dict[str, Any]]:
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").unlink(missing_ok=True)
    records = [{"round": r, "loss": r / 3, "note": 'ä "x"\n'} for r in range(1, count + 1)]
    for record in records:
        RunFolder(path).append(record)
    return records


@MANY
@given(st.integers(1, 4), st.data())
def test_a_file_cut_anywhere_gives_the_rounds_before_the_cut(
    tmp_path: Path, count: int, data: st.DataObject
) -> None:
    records = with_records(tmp_path, count)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    file.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    found = RunFolder(tmp_path).records()
    assert found[:complete] == records[:complete]
    assert len(found) - complete in (0, 1)  # 1: only the line's end was lost
    assert found == records[: len(found)]


@MANY
@given(st.integers(0, 5), st.integers(0, 6), st.booleans())
def test_truncating_drops_the_rounds_after_the_checkpoint(
    tmp_path: Path, count: int, keep: int, broken: bool
) -> None:
    records = with_records(tmp_path, count)
    if broken:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"round": 9, "lo')
    folder = RunFolder(tmp_path)
    assert folder.truncate(keep) == records[:keep]
    folder.append({"round": keep + 1})
    assert folder.records() == [*records[:keep], {"round": keep + 1}]


def test_records_and_summaries_are_strict_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"round": 1, "loss": math.nan, "values": (1.0, math.inf)})
    folder.write_summary({"final": {"accuracy": -math.inf}, "seeds": [0]})
    assert folder.records() == [{"round": 1, "loss": None, "values": [1.0, None]}]
    assert folder.read_summary() == {"final": {"accuracy": None}, "seeds": [0]}
    for file in tmp_path.iterdir():
        assert not any(word in file.read_text() for word in ("NaN", "Infinity"))


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner), st.dictionaries(st.text(), inner)),
    max_leaves=12,
)


@MANY
@given(anything)
def test_cleaned_values_are_strict_json_and_otherwise_the_same(value: Any) -> None:
    text = json.dumps(clean(value), allow_nan=False)
    assert json.loads(text) == _without_nan(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def test_clean_takes_numpys_nan_and_names_that_are_no_strings() -> None:
    assert clean({1: np.float64("nan"), "a": np.float64(0.5)}) == {"1": None, "a": 0.5}


# Weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("bank north", "bank-north"), ("a", ".a"), ("图/1", "图 1")])
def test_models_with_different_names_are_different_files(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    files = RunFolder(tmp_path).model_files(pair)
    assert list(files) == list(pair)
    assert len(set(files.values())) == 2
    assert {file.parent for file in files.values()} == {tmp_path / "models"}


def test_the_file_of_a_model_is_named_after_it(tmp_path: Path) -> None:
    (file,) = RunFolder(tmp_path).model_files(["bank north/1"]).values()
    assert file == tmp_path / "models" / "bank-north-1.safetensors"


def test_a_checkpoint_reads_back_bit_by_bit(tmp_path: Path) -> None:
    base = torch.tensor([math.nan, math.inf, -0.0, 1e-40], dtype=torch.float32)
    tensors = {
        "memory/model/w": base,
        "memory/shared": base,  # the same storage twice
        "state/0/view": torch.arange(12.0, dtype=torch.float64).view(3, 4).T,
        "steps": torch.tensor([2**53 + 1]),
        "expanded": torch.ones(1, 2).expand(3, 2),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
    }
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(tensors, {"round": 4, "stopped": [1], "setup_seconds": 0.25})
    found = folder.load_checkpoint()
    assert found is not None
    assert found[1] == {"round": 4, "stopped": [1], "setup_seconds": 0.25}
    assert found[0].keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[0][name].dtype == value.dtype
        np.testing.assert_array_equal(found[0][name], value)
    assert torch.signbit(found[0]["memory/model/w"][2])


def test_checkpoints_take_no_more_than_their_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    plain = os.replace

    def slow(source: Path, target: Path) -> None:
        now[0] += 2.0  # what writing costs
        plain(source, target)

    monkeypatch.setattr(module.os, "replace", slow)
    folder = RunFolder(tmp_path)
    assert folder.checkpoint_due()
    folder.save_checkpoint({"w": torch.zeros(1)}, {})
    assert not folder.checkpoint_due()
    now[0] += 2.0 / SHARE - 0.1
    assert not folder.checkpoint_due()
    now[0] += 0.2
    assert folder.checkpoint_due()


# Names -----------------------------------------------------------------------------------------


@MANY
@given(st.text())
@example("../../etc/passwd")
@example("..")
@example("a\\b\x00c")
def test_a_safe_name_is_a_plain_file_name(name: str) -> None:
    safe = safe_name(name)
    assert safe
    assert not safe.startswith((".", "-"))
    assert not any(mark in safe for mark in '/\\:*?"<>|\0 \n\t')
    assert Path("models", f"{safe}.safetensors").name == f"{safe}.safetensors"
    assert safe_name(safe) == safe


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("client-03", "client-03"),
        ("seed-1-global-best", "seed-1-global-best"),
        ("bank north/1", "bank-north-1"),
        ("v1.2_final", "v1.2_final"),
        ("Größe", "Größe"),
        ("../x", "x"),
        ("  ", "model"),
    ],
)
def test_safe_names_stay_readable(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_records_that_wait_are_written_in_order_by_a_checkpoint_and_at_the_end(
    tmp_path: Path,
) -> None:
    folder, reader = RunFolder(tmp_path), RunFolder(tmp_path)
    with folder.at_work():
        folder.append({"round": 1}, within=3600)
        folder.append({"round": 2}, within=3600)
        assert reader.records() == []
        folder.save_checkpoint({"w": torch.zeros(1)}, {"round": 2})
        assert reader.records() == [{"round": 1}, {"round": 2}]
        folder.append({"round": 3}, within=3600)
        folder.append({"round": 4})  # one that must not wait takes those before it along
        assert [record["round"] for record in reader.records()] == [1, 2, 3, 4]
        folder.append({"round": 5}, within=3600)
    assert [record["round"] for record in reader.records()] == [1, 2, 3, 4, 5]
