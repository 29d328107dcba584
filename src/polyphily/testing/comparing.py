"""Comparing tensors, and the error that a failed check raises."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_SMALLEST = 1e-6  # tensors with smaller entries are compared absolutely


class CheckFailed(AssertionError):
    """A property that does not hold; the first line says what is wrong and what to do."""


def difference(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], relative: float
) -> str | None:
    """Return how two sets of tensors differ, in words; None if they agree.

    Args:
        first: tensors by name.
        second: the tensors that they are compared with.
        relative: the largest difference allowed, relative to the largest entry of a tensor.
            0 asks for the same bits.
    """
    if first.keys() != second.keys():
        only = sorted(first.keys() ^ second.keys())
        return f"{', '.join(only[:5])} is in one of them only"
    for name, value in first.items():
        other = second[name]
        if value.shape != other.shape:
            return f"{name} has the shapes {tuple(value.shape)} and {tuple(other.shape)}"
        if value.dtype != other.dtype and not relative:
            return f"{name} has the types {value.dtype} and {other.dtype}"
        if not value.numel():
            continue
        wanted, found = value.detach().double(), other.detach().double()
        gap = float((wanted - found).abs().max())
        scale = max(float(wanted.abs().max()), _SMALLEST)
        if not gap <= relative * scale:
            return f"{name} differs by {gap / scale:.1e} of its largest entry"
    return None


def assert_close(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], relative: float = 1e-9
) -> None:
    """Raise `CheckFailed` unless two sets of tensors agree up to a relative difference."""
    found = difference(first, second, relative)
    if found:
        raise CheckFailed(found)


def assert_same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Raise `CheckFailed` unless two sets of tensors are equal."""
    assert_close(first, second, 0.0)
