"""The flags of `run`, `compare` and `sweep`, made from `Settings`, and configuration files."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import typer

from polyphily.cli import completion
from polyphily.core.settings import Settings
from polyphily.errors import UserError, toml_fault, unknown

DATA: dict[str, tuple[type, str]] = {
    "dataset": (
        str,
        "A dataset's name, with options as in csbm:gap=0.4, or a folder or file of your graphs.",
    ),
    "partition": (str, "How one graph is divided among clients, or a partition file (.npz)."),
    "clients": (int, "Number of clients; the dataset's usual number unless given."),
    "split": (str, "Train, val and test: 0.6,0.2,0.2 (add :client or :global), 5-fold, or own."),
    "seeds": (str, "Seeds of partition, split and weights, trained side by side: 0,1,2 or 0-4."),
    "normalize": (str, "Normalisation of features: none, row, or standard (by the train nodes)."),
    "encoding": (
        str,
        "How columns of tables become features: agreed by all clients, or home (the default with "
        "--dp and --secure-aggregation), where no statistics are exchanged.",
    ),
    "noise": (str, "Noise in the graphs: edges=0.1, features=0.1, labels=0.1, or several."),
}
BY_DATA = "by data"  # the default of a setting that `core.recipes` fills in
WORDS = ("normalize", "encoding")  # in any case
METAVARS = {
    "dataset": "NAME",
    "partition": "NAME",
    "split": "SHARES",
    "seeds": "LIST",
    "backbone": "NAME",
    "metric": "NAME",
}
PANELS: dict[str, tuple[str, ...]] = {  # settings by heading of the help; others: "Training"
    "Network": (
        "backbone",
        "hidden",
        "layers",
        "dropout",
        "input_dropout",
        "heads",
        "hops",
        "norms",
        "readout",
        "label_inputs",
        "degree_inputs",
        "direction",
        "edge_weights",
        "relations",
    ),
    "Evaluation": (
        "evaluate_every",
        "scored_clients",
        "patience",
        "selection",
        "metric",
        "positive",
        "threshold_rule",
    ),
    "Machine": ("engine", "device", "dtype", "precision", "threads", "memory", "on_disk"),
    "Privacy": ("dp", "secure_aggregation"),
    "Robustness": ("robust", "attack", "attackers"),
}
DEFAULT_DATASET = "csbm"
METHOD = "polyphony"  # of `run`, unless another is named
METHODS = ("local", "fedavg", METHOD)  # of `compare`


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the descriptions under "Attributes:" in a class's docstring, by name."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:")
    found = re.findall(r"^ {4}(\w+): ((?:.|\n {8,})+)", section, flags=re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in found}


def _flag_type(kind: Any) -> type:
    """Return the type of a setting's flag: float for `float | None`, str for `int | str`."""
    if isinstance(kind, UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return options[0] if len(options) == 1 else str
    single: type = kind
    return single


def _default(value: Any) -> str:
    """Write the default of a setting for its help."""
    if value in (None, ""):
        return BY_DATA
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def with_settings(
    *, data: bool = True, several: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting and, with `data`, for every entry of `DATA`.

    Flags of `several` entries take text, which may hold several values, with commas between them.
    The command must take `**values`, which receives the flags that the user gave.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name])
            for p in signature.parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        flags: dict[str, tuple[type, typer.models.OptionInfo]] = {}
        for name, (kind, text) in DATA.items() if data else ():
            names = ["--seeds", "--seed"] if name == "seeds" else [f"--{name}"]
            if name in several:
                kind, text = str, f"{text} Several: with commas."
            flags[name] = (
                kind,
                typer.Option(
                    None,
                    *names,
                    help=text,
                    metavar=METAVARS.get(name),
                    rich_help_panel="Data",
                    autocompletion=completion.of_option(name, several=name in several),
                ),
            )
        docs, kinds = attribute_docs(Settings), get_type_hints(Settings)
        panels = {setting: panel for panel, names in PANELS.items() for setting in names}
        for field in dataclasses.fields(Settings):
            kind = _flag_type(kinds[field.name])
            flag = f"--{field.name.replace('_', '-')}"
            text = docs[field.name].rstrip(".")
            flags[field.name] = (
                kind,
                typer.Option(
                    None,
                    f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
                    help=f"{text[0].upper()}{text[1:]}. [dim]\\[{_default(field.default)}][/dim]",
                    metavar=METAVARS.get(field.name),
                    rich_help_panel=panels.get(field.name, "Training"),
                    autocompletion=completion.of_option(field.name),
                ),
            )
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind | None
            )
            for name, (kind, info) in flags.items()
        ]

        def wrapper(**values: Any) -> None:
            arguments = {p.name: values.pop(p.name) for p in own}
            command(**arguments, **{k: v for k, v in values.items() if v is not None})

        # typer reads the flags from the signature.
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return wrapper

    return decorate


def check_output(flag: str, file: Path, endings: Sequence[str]) -> None:
    """Raise a `UserError` for a file with another ending or in a folder that may not be written to.

    Called before any work is done.
    """
    if file.suffix.lower() not in endings:
        *others, last = endings
        known = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"{flag} {file}: the file must end in {known}")
    above = next(folder for folder in file.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "may not be written to" if above.is_dir() else "is no folder"
        raise UserError(f"{flag} {file}: {above} {reason}")


@dataclasses.dataclass(frozen=True)
class Request:
    """A user's request, from flags and a configuration file.

    Attributes:
        method: the method's name, if one was given.
        data: arguments of `load`.
        seeds: the seeds, one federation each.
        settings: arguments of `Settings`.
        hyperparameters: those given for the method.
        assigned: the names of those given with `--set`.
    """

    method: str | None
    data: dict[str, Any]
    seeds: list[int]
    settings: dict[str, Any]
    hyperparameters: dict[str, Any]
    assigned: frozenset[str] = frozenset()


def gather(
    method: str | None, values: Mapping[str, Any], assignments: list[str], config: Path | None
) -> Request:
    """Merge flags and configuration file; flags win.

    Args:
        method: the method given as an argument.
        values: the flags, by name.
        assignments: the values of `--set`.
        config: the configuration file.
    """
    merged = read_config(config) if config else {}
    merged |= values
    assigned = dict(map(_assignment, assignments))
    hyperparameters = {**merged.pop("set", {}), **assigned}
    chosen = method or merged.pop("method", None)
    merged.pop("method", None)
    data = {name: merged.pop(name) for name in DATA if name in merged}
    data |= {name: str(data[name]).lower() for name in WORDS if name in data}
    seeds = _seeds(data.pop("seeds", 0))
    data.setdefault("dataset", DEFAULT_DATASET)
    return Request(chosen, data, seeds, merged, hyperparameters, frozenset(assigned))


def read_config(file: Path) -> dict[str, Any]:
    """Read a configuration file and check the names and types of its entries.

    A partition file is also looked for beside the configuration file.
    """
    from polyphily.graphs.limits import TEXT

    TEXT.check_file(file)
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"no configuration file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {toml_fault(error)}") from None
    for name, value in entries.items():
        if isinstance(value, str) and not value.isprintable():
            raise UserError(
                f"{file}: {name} = {value!r} has a character that cannot be printed. In double "
                "quotes, \\n and \\t are such: write Windows paths in single quotes"
            )
    found = {name.replace("-", "_"): value for name, value in entries.items()}
    if "seed" in found:
        found["seeds"] = found.pop("seed")
    kinds: dict[str, Any] = {name: kind for name, (kind, _) in DATA.items()}
    kinds |= {"method": str, "set": dict, "seeds": int | str | list, **get_type_hints(Settings)}
    for name, value in found.items():
        if name not in kinds:
            raise unknown(f"entry in {file}", name, kinds)
        _check_type(file, name, value, kinds[name])
    beside = file.parent / str(found.get("partition", ""))
    if beside.is_file():
        found["partition"] = str(beside)
    return found


def _check_type(file: Path, name: str, value: Any, kind: Any) -> None:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    names |= {list: "a list", dict: "a table"}
    allowed = [option for option in get_args(kind) or (kind,) if option in names]
    if type(value) not in allowed and not (type(value) is int and float in allowed):
        wanted = " or ".join(names[option] for option in allowed)
        raise UserError(f"{file}: '{name}' takes {wanted}, not {value!r}")


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UserError(f"--set {text}: write name=value")
    return name.strip(), value.strip()


def _range(text: str) -> range:
    """Parse a number, or the numbers from one to another: `3` or `0-4`."""
    first, dash, last = text.strip().partition("-")
    if not dash or not first:  # a negative number is refused later
        return range(int(text), int(text) + 1)
    return range(int(first), int(last) + 1)


def _seeds(value: Any) -> list[int]:
    """Parse one or several seeds: `3`, `"0,1,2"`, `"0-4"` or `[0, 1, 2]`."""
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        seeds = [seed for part in parts for seed in _range(str(part))]
    except ValueError:
        raise UserError(
            f"seeds: '{value}' is not a list of whole numbers such as 0,1,2 or 0-4"
        ) from None
    if not seeds and str(value).strip():
        raise UserError(f"seeds: '{value}' is an empty range: write the smaller number first")
    if len(set(seeds)) < len(seeds) or min(seeds, default=-1) < 0:
        raise UserError(f"seeds: '{value}' must be different numbers, 0 or more")
    return seeds
