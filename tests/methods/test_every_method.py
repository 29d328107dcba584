"""Properties that every registered method must have: those of `polyphily.testing`, and more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyphily.core.declarations import describe
from polyphily.core.method import METHODS, create
from polyphily.errors import UserError
from polyphily.nn.backbones import Shape
from polyphily.testing import METHOD_CHECKS, MethodCase

NAMES = sorted(METHODS)
every_method = pytest.mark.parametrize("name", NAMES)


def forms() -> dict[str, MethodCase]:
    """Return every method as it is by default, and other forms of those that have them."""
    found = {name: MethodCase(create(name)) for name in NAMES}
    for name in NAMES:
        if METHODS[name].paper_form():
            found[f"{name}, paper"] = MethodCase(create(name, {"paper": True}))
    # Without a tie-break, rounding decides among eigenvectors of equal eigenvalues.
    found["s2fgl, paper"] = MethodCase(create("s2fgl", {"paper": True, "tie_break": 1e-4}))
    # Labels are hidden, groups, views and noise are drawn by client number.
    by_number = ("fedspa", "polyphony", "fedfa", "fgssl", "fgssl, paper", "fggp", "fggp, paper")
    for name in (*by_number, "fedgnn, paper", "fediih", "fediih, paper"):
        found[name] = replace(found[name], permutes=False)
    # Own renditions and the mix are set, not trained.
    found["polyphony"] = replace(found["polyphony"], untrained=("own.", "mix"))
    audition = {"mixing": "own", "audition": 2, "fewest": 0, "held": 0.2}
    found["polyphony, audition"] = replace(found["polyphony"], method=create("polyphony", audition))
    found["fediih, code"] = MethodCase(create("fediih", {"code": True}))
    # Its heads train in the local stage; train nodes are halved by client number.
    found["adafgl"] = replace(found["adafgl"], permutes=False, untrained=("heads.", "adapted"))
    # Nodes are hidden by client number; the classifier trains in the later stage; where every
    # count is below one, counts that are rounded down leave the generator without a gradient.
    sage = MethodCase(create("fedsage+"), permutes=False, untrained=("classifier.",))
    found["fedsage+"] = sage
    found["fedsage+, paper"] = replace(
        sage,
        method=create("fedsage+", {"paper": True}),
        untrained=("classifier.", "neighgen.generator."),
    )
    found["fedspa, no label hidden"] = MethodCase(create("fedspa", {"hidden_share": 0}))
    found["s2fgl, no warm-up"] = MethodCase(create("s2fgl", {"warm_up": 0, "ramp": 1}))
    found["scaffold, option II"] = MethodCase(create("scaffold", {"option": "II"}))
    return found


FORMS = forms()


@pytest.mark.parametrize("check", METHOD_CHECKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_every_method(form: str, check: str) -> None:
    METHOD_CHECKS[check](FORMS[form])


@pytest.mark.parametrize("check", ["stacked-equals-sequential", "embedding-width"])
@pytest.mark.parametrize(
    ("form", "backbone"),
    [(form, name) for form, case in FORMS.items() for name in case.method.supported_backbones()],
)
def test_every_backbone_of_every_method(form: str, backbone: str, check: str) -> None:
    METHOD_CHECKS[check](replace(FORMS[form], backbone=backbone))


@every_method
def test_what_travels_can_be_listed(name: str) -> None:
    up, down = describe(METHODS[name]())
    assert bool(up) == bool(down) == (name != "local")
    assert all(row["name"] and row["shape"] and row["meaning"] for row in [*up, *down])
    assert all(row["server"] for row in up)


@every_method
def test_what_is_recorded_names_the_network(name: str) -> None:
    method, shape = create(name), Shape(features=6, classes=3, hidden=8)
    names = [method.build(b, shape, 0).describe() for b in method.supported_backbones()]
    assert len({*names}) == len(names)
    for backbone, network in zip(method.supported_backbones(), names, strict=True):
        assert backbone in network


@every_method
def test_the_papers_form_is_one_flag_away(name: str) -> None:
    cls = METHODS[name]
    departs = cls.paper_form()
    assert create(name, {"paper": "on"}) == create(name, departs)
    assert create(name, {"paper": False}) == create(name)
    if departs:
        field, value = next(iter(departs.items()))
        usual = cls.hyperparameters()[field].default
        assert getattr(create(name, {"paper": True, field: usual}), field) == usual != value
    with pytest.raises(UserError, match="paper"):
        create(name, {"paper": "maybe"})


def test_large_methods_have_a_form_of_the_paper() -> None:
    assert {"fedspa", "fedgsp", "fedhero", "s2fgl", "fedath"} <= {
        name for name in NAMES if f"{name}, paper" in FORMS
    }
