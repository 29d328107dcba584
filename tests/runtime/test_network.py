"""The network of a run: chosen by the user, else by the method and the data."""

from __future__ import annotations

import re

import pytest

import polyphily
from cases import small_federation
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.nn.backbones import BACKBONES
from polyphily.runtime.network import complete

UNSUPPORTED = [
    (name, backbone)
    for name in sorted(METHODS)
    for backbone in sorted(BACKBONES)
    if backbone not in create(name).supported_backbones()
]


@pytest.mark.parametrize(("name", "backbone"), UNSUPPORTED)
def test_a_backbone_that_the_method_cannot_train_is_refused_with_the_list(
    name: str, backbone: str
) -> None:
    refusal = f"{re.escape(name)} cannot train the backbone {backbone}"
    with pytest.raises(UserError, match=refusal) as caught:
        polyphily.run(name, small_federation(), rounds=1, backbone=backbone)
    for supported in create(name).supported_backbones():
        assert supported in str(caught.value)


@pytest.mark.parametrize("kind", ["homophilic", "heterophilic", "synthetic", "fraud", "files"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_is_chosen_by_default_is_supported(name: str, kind: str) -> None:
    method = create(name)
    filled = complete(Settings(), method, kind, "accuracy")
    assert filled.backbone in method.supported_backbones()
    assert None not in (filled.hidden, filled.lr, filled.optimizer, filled.dropout)


def test_the_name_may_be_written_in_capitals() -> None:
    assert complete(Settings(backbone="GCN"), create("fedavg"), "files", "auc").backbone == "gcn"


@pytest.mark.parametrize(
    ("name", "backbone", "network"),
    [
        ("fedavg", "unifilter", "unifilter"),
        ("local", "unifilter", "unifilter"),
        ("fedgsp", None, "unifilter"),
        ("fedspa", "gcn", "SFPD in gcn"),
        ("fedhero", "sage", "dual channel of sage"),
        ("fedath", "gat", "causal and biased gat"),
    ],
)
def test_the_network_that_was_trained_is_recorded(
    name: str, backbone: str | None, network: str
) -> None:
    summary = polyphily.run(name, small_federation(), rounds=1, hidden=8, backbone=backbone).summary
    assert summary["network"] == network
    assert summary["backbone"] == (backbone or "unifilter")
