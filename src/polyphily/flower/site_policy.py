"""The policy of a site: which runs it takes part in, judged before anything is computed.

`policy.toml` in the site's folder holds it. A plan that breaks a rule is refused. The operator of
the site is told the whole reason, the server the name of the rule only.
"""

from __future__ import annotations

import datetime as dt
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from polyphily.core.budget import OFF, Budget
from polyphily.core.method import METHODS
from polyphily.core.settings import names as setting_names
from polyphily.errors import UserError, unknown
from polyphily.flower.account import DAY, FILE, YEAR, Account, Total, noises
from polyphily.flower.plan import Plan
from polyphily.flower.wire import CLOSE, FINISH, REVEAL
from polyphily.graphs.limits import read_text
from polyphily.privacy.differential import Guard
from polyphily.runs.folder import write_text

POLICY = "policy.toml"
ALL = "all"
EVER, A_YEAR = "ever", "year"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
MEGABYTE = 10**6
LARGEST_MODEL = 1000.0  # megabytes, unless the policy says otherwise
ENDINGS = (REVEAL, CLOSE)  # messages that end what was allowed to begin, and are answered any time


class Refused(UserError):
    """A request that the site's policy does not allow.

    The message is for the site's operator. `public` is what the server is told.

    Attributes:
        rule: the name of the rule.
    """

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(f"refused by the rule '{rule}' of this site's policy: {reason}")
        self.rule = rule

    @property
    def public(self) -> str:
        return f"refused by the site's policy: {self.rule}"


@dataclass(frozen=True)
class SitePolicy:
    """The rules of a site. None allows everything.

    Attributes:
        methods: the methods that may train here.
        sites: fewest sites of a run.
        rounds: most rounds of a run.
        epochs: most local steps of a round.
        rounds_per_day, rounds_per_year: most uploads in any 24 hours or 365 days.
        messages_per_day: most messages that are answered in any 24 hours.
        parameters: most parameters of a model.
        megabytes: largest model.
        dp: the least privacy of a run, by epsilon and delta.
        epsilon, delta, period: the budget of all uploads together, for "ever" or any "year".
        secure_aggregation: whether runs must have secure aggregation.
        robust: whether runs must have robust aggregation.
        scores: whether scores and losses are sent in runs with secure aggregation.
        days: when the site takes part, by its own clock.
        hours: the minutes of the day from which and to which it takes part.
        fixed: hyperparameters and settings that a plan must have these values of.
        journal: the account of uploads, if several sites share their data.
        more: budgets of all uploads that are not in the file.
    """

    methods: tuple[str, ...] | None = None
    sites: int | None = None
    rounds: int | None = None
    epochs: int | None = None
    rounds_per_day: int | None = None
    rounds_per_year: int | None = None
    messages_per_day: int | None = None
    parameters: int | None = None
    megabytes: float = LARGEST_MODEL
    dp: Budget | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    period: str = EVER
    secure_aggregation: bool = False
    robust: bool = False
    scores: bool = True
    days: tuple[str, ...] | None = None
    hours: tuple[int, int] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    journal: str = ""
    more: tuple[Total, ...] = ()

    def stricter(self, dp: Budget | None, *, secure: bool) -> SitePolicy:
        """Return the policy with the flags of `site join`: every rule of both holds."""
        more = () if dp is None else (Total(dp, False, "--dp"),)
        return replace(self, secure_aggregation=self.secure_aggregation or secure, more=more)

    @property
    def totals(self) -> tuple[Total, ...]:
        """The budgets of all uploads together. Without one, the budget of a run is for all."""
        if self.epsilon is not None:
            own = Total(Budget(self.epsilon, self.delta), self.period == A_YEAR, "epsilon")
            return (own, *self.more)
        return (*((Total(self.dp, False, "dp"),) if self.dp else ()), *self.more)

    def in_words(self) -> dict[str, str]:
        """Return the rules that are set, by name."""
        found = {
            "methods": self.methods and ", ".join(self.methods),
            "dp": self.dp and f"epsilon={self.dp.epsilon:g},delta={self.dp.delta:g}",
            "days": self.days and ", ".join(self.days),
            "hours": self.hours and _clock_times(self.hours),
            "fixed": ", ".join(f"{name} = {value}" for name, value in self.fixed.items()),
        }
        plain = SitePolicy()
        return {
            entry.name: str(found.get(entry.name, getattr(self, entry.name)))
            for entry in fields(self)
            if getattr(self, entry.name) != getattr(plain, entry.name) or entry.name == "megabytes"
        }

    @property
    def private(self) -> bool:
        """True if every run must have differential privacy or secure aggregation."""
        return self.secure_aggregation or bool(self.totals)

    # Judgements ------------------------------------------------------------------------------

    def judge_time(self, kind: str, moment: dt.datetime) -> None:
        """Refuse a message at the wrong time, unless it ends what has begun."""
        if kind in ENDINGS:
            return
        if self.days is not None and DAYS[moment.weekday()] not in self.days:
            raise Refused("days", f"today is {DAYS[moment.weekday()]}, not {', '.join(self.days)}")
        minute = 60 * moment.hour + moment.minute
        if self.hours is not None and not _is_between(minute, *self.hours):
            raise Refused("hours", f"it is {moment:%H:%M}, not {_clock_times(self.hours)}")

    def judge_messages(self, answered: int) -> None:
        """Refuse a message if too many were answered in the last 24 hours."""
        if self.messages_per_day is not None and answered >= self.messages_per_day:
            raise Refused("messages_per_day", f"{answered} messages were answered in 24 hours")

    def judge(self, plan: Plan) -> None:
        """Refuse a plan that breaks a rule, before anything is computed for it."""
        self._judge_plan(plan)
        self._judge_model(plan)

    def _judge_plan(self, plan: Plan) -> None:
        settings, run = plan.settings, f"run {plan.run}"
        budget = Budget.parse(settings.dp)
        least = [self.dp, *(total.budget for total in self.totals if total.rule != "epsilon")]
        if self.methods is not None and plan.method not in self.methods:
            raise Refused("methods", f"{run} trains {plan.method}, not {', '.join(self.methods)}")
        if self.secure_aggregation and not settings.secure_aggregation:
            raise Refused(
                "secure_aggregation",
                f"this site takes part with secure aggregation only: {run} has none",
            )
        if self.robust and settings.robust == OFF:
            raise Refused("robust", f"{run} has no robust aggregation")
        for own in filter(None, least):
            if not own.covers(budget):
                raise Refused(
                    "dp",
                    f"this site takes part with epsilon at most {own.epsilon:g} and delta at most "
                    f"{own.delta:g}: {run} has dp {settings.dp}",
                )
        if budget is None and self.totals:
            raise Refused(self.totals[0].rule, f"{run} has no differential privacy")
        for rule, found, most in (
            ("rounds", settings.rounds, self.rounds),
            ("epochs", settings.epoch_range()[1], self.epochs),
        ):
            if most is not None and found > most:
                raise Refused(rule, f"{run} has {found:,} {rule}, {most:,} is the most")
        if self.sites is not None and len(set(plan.sites)) < self.sites:
            raise Refused("sites", f"{run} has {len(set(plan.sites))} sites, not {self.sites}")
        known = asdict(settings) | asdict(plan.make_method())
        for name, value in self.fixed.items():
            if name in known and known[name] != value:
                raise Refused("fixed", f"{run} has {name} = {known[name]!r}, not {value!r}")

    def _judge_model(self, plan: Plan) -> None:
        """Refuse a model that is too large; its parameters are counted without memory for them."""
        try:
            with torch.device("meta"):
                found = sum(p.numel() for p in plan.network().parameters())
        except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
            raise Refused("megabytes", f"the model of run {plan.run}: {error}") from None
        size = found * getattr(torch, plan.settings.dtype).itemsize / MEGABYTE
        if self.parameters is not None and found > self.parameters:
            raise Refused("parameters", f"the model of run {plan.run} has {found:,} parameters")
        if size > self.megabytes:
            raise Refused(
                "megabytes",
                f"the model of run {plan.run} has {size:,.1f} MB, {self.megabytes:g} is the most",
            )

    def judge_budget(self, plan: Plan, kind: str, account: Account, moment: dt.datetime) -> None:
        """Refuse a plan whose uploads would exceed a budget together with all before."""
        budget, rounds = Budget.parse(plan.settings.dp), plan.settings.rounds
        if budget is None or kind in (FINISH, *ENDINGS):
            return
        left = max(rounds - len(account.uploads(run=plan.run)), 0)
        more = [budget.multiplier(rounds) / left**0.5] if left else []  # as one upload
        for total in self.totals:
            if not total.budget.allows([*total.counted(account, moment), *more]):
                raise _spent(total, account, moment, f"run {plan.run} would need more")

    def judge_upload(
        self, plan: Plan, multiplier: float | None, account: Account, moment: dt.datetime
    ) -> None:
        """Refuse an upload that exceeds the budget of its run, of the site, or a count.

        Args:
            plan: of the run.
            multiplier: of the noise of the upload; None without differential privacy.
            account: of all uploads before.
            moment: of the upload.
        """
        for rule, time, most in (
            ("rounds_per_day", DAY, self.rounds_per_day),
            ("rounds_per_year", YEAR, self.rounds_per_year),
        ):
            if most is not None and len(account.uploads(since=moment - time)) >= most:
                raise Refused(rule, f"{most:,} uploads were made in the last {time.days} days")
        budget = Budget.parse(plan.settings.dp)
        if budget is None or multiplier is None:
            return
        made = account.uploads(run=plan.run)
        if not budget.allows([*noises(made), multiplier]):
            raise Refused(
                "dp",
                f"the privacy budget of this run is spent: {len(made)} uploads were made in run "
                f"{plan.run}",
            )
        for total in self.totals:
            if not total.budget.allows([*total.counted(account, moment), multiplier]):
                raise _spent(total, account, moment, f"run {plan.run} asks for another upload")


@dataclass(frozen=True)
class Ledger:
    """The uploads of one run, with the policy and the account that they are judged by.

    Attributes:
        policy: the site's.
        account: of all uploads of the site.
        plan: of the run.
        guard: clips and noises the uploads; None without differential privacy.
        clock: tells the time.
    """

    policy: SitePolicy
    account: Account
    plan: Plan
    guard: Guard | None
    clock: Callable[[], dt.datetime]

    def check(self) -> None:
        """Refuse another upload if it would exceed a budget or a count."""
        multiplier = None if self.guard is None else self.guard.multiplier
        self.policy.judge_upload(self.plan, multiplier, self.account, self.clock())

    def record(self, number: int, sha256: str) -> None:
        """Check an upload and write it to the journal, before it leaves.

        Under differential privacy a repeated question gets the same upload, which costs once.
        """
        if self.guard is not None and self.account.has(sha256):
            return
        self.check()
        self.account.record(self.clock(), self.plan.run, number, sha256, self.guard)


def _spent(total: Total, account: Account, moment: dt.datetime, why: str) -> Refused:
    spent = total.spent(account, moment)
    found = "infinite, because there were uploads without noise" if spent == float("inf") else ""
    return Refused(
        total.rule,
        f"the budget is {total}, and {found or f'{spent:.4g}'} is spent: {why}. If the data are "
        "others by now, declare it: polyphily site policy DIR --new-data NOTE",
    )


def _is_between(minute: int, first: int, last: int) -> bool:
    """Return whether a minute of the day is in an interval, which may go over midnight."""
    if first <= last:
        return first <= minute < last
    return minute >= first or minute < last


def _clock_times(hours: tuple[int, int]) -> str:
    return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in hours)


# The file --------------------------------------------------------------------------------------


def read_policy(file: Path) -> SitePolicy:
    """Read a policy.

    Raises:
        UserError: for an entry that is unknown or not valid, or a file that anybody can change.
    """
    if file.exists() and file.stat().st_mode & stat.S_IWOTH:
        raise UserError(f"{file} can be changed by every user of this machine: chmod o-w {file}")
    try:
        entries = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from None
    known = {entry.name: entry for entry in fields(SitePolicy) if entry.name != "more"}
    values: dict[str, Any] = {}
    for name, value in entries.items():
        if name not in known:
            raise unknown(f"rule in {file}", name, known)
        try:
            values[name] = READERS.get(name, _whole)(value)
        except (ValueError, TypeError) as error:
            raise UserError(f"{file}: {name} = {value!r}: {error}") from None
        except UserError as error:
            raise UserError(f"{file}: {name}: {error}") from None
    policy = SitePolicy(**values)
    if policy.epsilon is None and {"delta", "period"} & entries.keys():
        raise UserError(f"{file}: delta and period belong to epsilon, which is missing")
    return policy


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("give a whole number from 1")
    return value


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise ValueError("give a number above 0")
    return float(value)


def _share(value: object) -> float:
    if (found := _positive(value)) >= 1:
        raise ValueError("give a number between 0 and 1")
    return found


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("give a text in quotes")
    return value


def _methods(value: object) -> tuple[str, ...] | None:
    if value == ALL:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError('give a list such as ["fedavg", "fedper"], or "all"')
    return tuple(METHODS.find(str(name)).name for name in value)


def _one_of(known: Sequence[str]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in known:
            raise ValueError(f"give one of {', '.join(known)}")
        return str(value)

    return read


def _days(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError('give a list such as ["mon", "tue"]')
    return tuple(map(_one_of(DAYS), value))


def _hours(value: object) -> tuple[int, int]:
    found = HOURS.fullmatch(str(value))
    if not found:
        raise ValueError('give a time of day such as "20:00-06:00"')
    first, minute, last, end = map(int, found.groups())
    return 60 * first + minute, 60 * last + end


def _fixed(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("give a table: [fixed], then a line such as lr = 0.01")
    own = {entry.name for method in METHODS.values() for entry in fields(method)}
    for name in value:
        if name not in own | setting_names():
            raise unknown("hyperparameter or setting", name, own | setting_names())
    return value


READERS: Mapping[str, Callable[[object], Any]] = {
    "methods": _methods,
    "megabytes": _positive,
    "dp": lambda value: Budget.parse(_text(value)),
    "epsilon": _positive,
    "delta": _share,
    "period": _one_of((EVER, A_YEAR)),
    "secure_aggregation": _yes_or_no,
    "robust": _yes_or_no,
    "scores": _yes_or_no,
    "days": _days,
    "hours": _hours,
    "fixed": _fixed,
    "journal": _text,
}
"""Readers of entries; entries without one are whole numbers."""


class PolicyFile:
    """The policy in a site's folder, read again when it changes.

    Args:
        folder: of the site.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / POLICY
        self._state: tuple[int, int] | str | None = "unread"
        self._policy: SitePolicy | UserError = SitePolicy()
        self._account: Account | None = None

    def get(self, notice: Callable[[str], None] = lambda text: None) -> SitePolicy:
        """Return the policy as the file has it now; one that allows everything without a file.

        Args:
            notice: called with a line of text if the file has changed.

        Raises:
            Refused: if the file cannot be used. Then nothing is answered.
        """
        state = self._look()
        if state != self._state:
            if self._state != "unread":
                notice(f"{POLICY} has changed and is read again")
            self._state, self._policy = state, self._read(state is not None)
        if isinstance(self._policy, UserError):
            raise Refused("policy", str(self._policy))
        return self._policy

    def read(self) -> SitePolicy:
        """Return the policy in the file.

        Raises:
            UserError: if it cannot be used.
        """
        return read_policy(self.file)

    def _look(self) -> tuple[int, int] | None:
        try:
            found = self.file.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self, exists: bool) -> SitePolicy | UserError:
        try:
            return read_policy(self.file) if exists else SitePolicy()
        except UserError as error:
            return error

    def account(self) -> Account:
        """Return the account of the site's uploads."""
        file = self.folder / (self.get().journal or FILE)
        if self._account is None or self._account.journal.file != file:
            self._account = Account(file)
        return self._account

    def write_default(self) -> None:
        """Write a policy that allows everything, with a comment on every rule."""
        write_text(self.file, DEFAULT)


DEFAULT = """\
# The policy of this site. A plan that breaks a rule is refused: you are told why, the server is
# told the name of the rule. Remove the '#' before a rule to set it. A running site reads the file
# again when it changes.

# methods = ["fedavg", "fedper"]   # methods that may train here; "all"
# sites = 3                        # fewest sites of a run
# rounds = 100                     # most rounds of a run
# epochs = 10                      # most local steps of a round
# rounds_per_day = 200             # most uploads in any 24 hours
# rounds_per_year = 5000           # most uploads in any 365 days
# messages_per_day = 2000          # most messages that are answered in any 24 hours

# parameters = 1000000             # most parameters of a model
megabytes = 1000                   # largest model

# dp = "epsilon=8,delta=1e-5"      # a run must have at least this differential privacy
# epsilon = 20                     # budget of all runs together; without it, dp is for all runs
# delta = 1e-5
# period = "year"                  # the budget is for any 365 days; "ever" is for all time

# secure_aggregation = true        # a run must have secure aggregation
# robust = true                    # a run must have robust aggregation
# scores = false                   # send no scores and losses in runs with secure aggregation

# days = ["mon", "tue", "wed", "thu", "fri"]   # when this site takes part, by its own clock
# hours = "20:00-06:00"

# journal = "/var/lib/polyphily/journal.jsonl" # one account for several sites with the same data

# [fixed]                          # hyperparameters and settings that a plan must have
# lr = 0.01
"""
