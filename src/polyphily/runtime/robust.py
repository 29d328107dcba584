"""Robust aggregation: means over clients that a few hostile clients cannot move far.

It works on what methods declare, for those whose server needs only means and sums. The server is
given one row of robust means in place of the clients' uploads, as after secure aggregation, so that
no upload reaches it in another way. Every client counts the same, because the weight of a client is
its own claim. `clip` leaves the uploads apart and bounds each of them and its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyphily.core.budget import OFF
from polyphily.core.declarations import example_sizes
from polyphily.core.messages import Declared, Mean, Message, Role, Sum, Uploads
from polyphily.core.method import Method
from polyphily.core.settings import Settings
from polyphily.errors import TrainingError, UserError, unknown
from polyphily.nn.sparse import flat

MEDIAN, TRIMMED, KRUM, GEOMETRIC, CLIP = KINDS = (
    "median",
    "trimmed-mean",
    "krum",
    "geometric-median",
    "clip",
)
AUTO = "auto"
COMPARED = (Role.MODEL, Role.STATISTIC)  # what clients are compared by
STEPS = 20  # of Weiszfeld's algorithm
COUNTS = 10.0  # with `clip`: a client counts at most as much as so many median clients


@dataclass(frozen=True)
class Defence:
    """A robust estimate of the mean over clients.

    Attributes:
        kind: one of `KINDS`.
        value: the share trimmed at each end, the number of hostile clients for krum, or the largest
            distance from the median for clip; None: chosen from the uploads.
    """

    kind: str
    value: float | None = None

    @classmethod
    def parse(cls, text: str) -> Defence | None:
        """Parse the setting `robust`; None if it is off.

        >>> Defence.parse("trimmed-mean=0.2")
        Defence(kind='trimmed-mean', value=0.2)
        """
        if text == OFF:
            return None
        kind, sign, rest = (part.strip() for part in text.partition("="))
        if kind not in KINDS:
            raise unknown("robust aggregation", kind, [OFF, *KINDS])
        if not sign or (kind == CLIP and rest == AUTO):
            return cls(kind, 0.2 if kind == TRIMMED else None)
        try:
            value = float(rest)
        except ValueError:
            raise UserError(f"robust: '{rest}' in '{text}' is not a number") from None
        fits = {
            TRIMMED: 0 < value < 0.5,
            KRUM: value >= 1 and value == int(value),
            CLIP: 0 < value < math.inf,
        }
        if not fits.get(kind, False):
            words = {
                TRIMMED: "a share above 0 and below 0.5",
                KRUM: "the number of hostile clients, 1 or more",
                CLIP: "auto or a positive distance",
            }
            raise UserError(f"robust: {kind} takes {words.get(kind, 'no value')}, not '{rest}'")
        return cls(kind, value)

    @property
    def fewest(self) -> int:
        """The number of answers that a round needs."""
        if self.kind == TRIMMED:
            assert self.value is not None
            return max(3, math.ceil(1 / self.value))
        return 2 * int(self.value or 1) + 3 if self.kind == KRUM else 3

    def __call__(self, uploads: Uploads, declared: Sequence[Declared], number: int) -> Uploads:
        """Return what the server gets in place of the uploads.

        Args:
            uploads: of a round.
            declared: what the method says of them.
            number: of the round, for messages.

        Raises:
            TrainingError: if too few have answered.
        """
        answers = len(uploads.clients)
        if answers < self.fewest:
            raise TrainingError(
                f"round {number}: {answers} answers arrived, but --robust {self.kind} needs "
                f"{self.fewest} to tell hostile clients from the others"
            )
        entries = [entry for entry in declared if number in entry.rounds]
        if not entries:
            return uploads
        if self.kind == CLIP:
            return _clipped(uploads, entries, self.value)
        rows, weights = _compared(uploads, entries), None
        if self.kind == KRUM and rows.shape[1]:
            weights = krum_weights(rows, int(self.value or (answers - 3) // 2))
        elif self.kind == GEOMETRIC and rows.shape[1]:
            weights = geometric_median_weights(rows)
        share = self.value if self.kind == TRIMMED else None
        found: Message = {}
        for entry in entries:
            for name in entry.shapes:
                tensor = uploads[name]
                valid = _valid(tensor, entry, uploads)
                if weights is None:
                    mean = trimmed_mean(tensor, valid, share)
                else:
                    mean = _weighted(tensor, valid, weights)
                if isinstance(entry.server, Sum):
                    mean = mean * answers
                found[name] = mean.unsqueeze(0).to(tensor.dtype)
        return Uploads((), found)


def trimmed_mean(values: Tensor, valid: Tensor | None = None, share: float | None = None) -> Tensor:
    """Compute the mean over clients of each number without its smallest and largest values.

    >>> trimmed_mean(torch.tensor([1.0, 2.0, 4.0, 1e6])).item()
    3.0

    Args:
        values: `[K, …]`.
        valid: which of them count, in a shape that broadcasts; None: all. Where none does, the
            mean is zero.
        share: the share of the values that is left out at each end, as a whole number rounded
            down. None: all but the middle one or two, which gives the median.
    """
    counts = torch.ones_like(values, dtype=torch.bool) if valid is None else valid.expand_as(values)
    ordered = torch.where(counts, values.double(), math.inf).sort(dim=0).values
    present = counts.sum(dim=0)
    left = ((present - 1) // 2).clamp(min=0) if share is None else (share * present).floor()
    place = torch.arange(len(values), device=values.device).view(-1, *[1] * (values.dim() - 1))
    kept = (place >= left) & (place < present - left)
    total = torch.where(kept, ordered, 0.0).sum(dim=0)
    return total / kept.sum(dim=0).clamp(min=1)


def krum_weights(rows: Tensor, hostile: int) -> Tensor:
    """Compute the weights of Multi-Krum (Blanchard et al. 2017): one over m for m clients.

    A client's score is the sum of its squared distances to its K - f - 2 nearest. The m = K - f
    clients with the lowest scores are averaged.

    Args:
        rows: the clients' vectors, `[K, d]`.
        hostile: f.
    """
    clients = len(rows)
    square = torch.cdist(rows, rows).square()
    square.fill_diagonal_(math.inf)
    near = square.sort(dim=1).values[:, : max(1, clients - hostile - 2)]
    chosen = near.sum(dim=1).argsort(stable=True)[: clients - hostile]
    weights = rows.new_zeros(clients)
    weights[chosen] = 1 / (clients - hostile)
    return weights


def geometric_median_weights(rows: Tensor, steps: int = STEPS) -> Tensor:
    """Compute the weights that make the geometric median (RFA, Pillutla et al. 2022).

    The geometric median has the smallest sum of distances to all rows. Weiszfeld's algorithm
    begins at the median of each number.

    Args:
        rows: the clients' vectors, `[K, d]`.
        steps: of the algorithm.
    """
    centre, weights = trimmed_mean(rows), rows.new_full((len(rows),), 1 / len(rows))
    for _ in range(steps):
        distance = (rows - centre).norm(dim=1)
        floor = 1e-6 * distance.median() + 1e-30
        closeness = distance.clamp(min=floor).reciprocal()
        weights = closeness / closeness.sum()
        centre = weights @ rows
    return weights


def _clipped(uploads: Uploads, entries: Sequence[Declared], limit: float | None) -> Uploads:
    """Return uploads of which none is further from the median of all than the median client.

    A client counts at most as much as ten median clients.
    """
    found = dict(uploads.tensors)
    parts: dict[str, tuple[Tensor, Tensor]] = {}  # median, and difference of each client to it
    for entry in entries:
        for name in entry.shapes:
            tensor = uploads[name].double()
            if entry.role in COMPARED:
                valid = _valid(tensor, entry, uploads)
                middle = trimmed_mean(tensor, valid)
                parts[name] = middle, torch.where(valid, tensor - middle, 0.0)
            else:
                most = COUNTS * flat(tensor.clamp(min=0)).sum(dim=1).median()
                found[name] = tensor.clamp(min=0).minimum(most).to(uploads[name].dtype)
    if not parts:
        return Uploads(uploads.clients, found)
    squares = [flat(change).square().sum(dim=1) for _, change in parts.values()]
    distance = torch.stack(squares).sum(dim=0).sqrt()
    heard = torch.where(distance > 0, distance, math.nan)  # a client may have nothing to say
    bound = heard.nanmedian().nan_to_num() if limit is None else limit
    scale = (bound / distance.clamp(min=1e-30)).clamp(max=1)
    for name, (middle, change) in parts.items():
        moved = middle + scale.view(-1, *[1] * (change.dim() - 1)) * change
        found[name] = moved.to(uploads[name].dtype)
    return Uploads(uploads.clients, found)


def _compared(uploads: Uploads, entries: Sequence[Declared]) -> Tensor:
    """Return what clients are compared by, `[K, d]`: models and statistics, in double precision."""
    parts = [
        flat(uploads[name].double())
        for entry in entries
        if entry.role in COMPARED
        for name in entry.shapes
    ]
    first = next(iter(uploads.tensors.values()))
    return torch.cat(parts, dim=1) if parts else first.new_zeros(len(first), 0).double()


def _valid(tensor: Tensor, entry: Declared, uploads: Uploads) -> Tensor:
    """Return which entries count: where the weight of a mean is zero, a client has nothing."""
    if not isinstance(entry.server, Mean):
        return torch.ones_like(tensor, dtype=torch.bool)
    weight = uploads[entry.server.by]
    return (weight > 0).view(*weight.shape, *[1] * (tensor.dim() - weight.dim()))


def _weighted(values: Tensor, valid: Tensor, weights: Tensor) -> Tensor:
    """Compute the mean over clients with weights, among the entries that count."""
    share = weights.view(-1, *[1] * (values.dim() - 1)) * valid
    total = share.sum(dim=0)
    found = (share * values.double()).sum(dim=0) / total.clamp(min=1e-30)
    return torch.where(total > 0, found, 0.0)


def check_robust(method: Method, settings: Settings, answers: int) -> None:
    """Check that a run can have the robust aggregation that its settings ask for.

    Args:
        method: what will be trained.
        settings: of the run.
        answers: how many clients answer in a round at least.

    Raises:
        UserError: if it cannot.
    """
    defence = Defence.parse(settings.robust)
    if defence is None:
        return
    if settings.secure_aggregation:
        raise UserError(
            "--robust cannot be combined with --secure-aggregation: the server sees no single "
            "upload, so that it cannot tell one from the others"
        )
    if answers < defence.fewest:
        raise UserError(
            f"--robust {settings.robust} needs at least {defence.fewest} answers in a round, here "
            f"are {answers}"
        )
    reason = method.reason_against_sums(example_sizes(method, settings.backbone))
    if reason:
        raise UserError(f"{method.name} cannot take --robust: {reason}")
