"""The flags of `run` and `compare`, made from `Settings`, so that nothing is said twice."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import typer

from polyphily.core.settings import Settings
from polyphily.errors import UserError, unknown

DATA: dict[str, tuple[type, str]] = {
    "dataset": (
        str,
        "A dataset's name, with options as in csbm:gap=0.4, or a folder or file of your graphs.",
    ),
    "partition": (str, "How one graph is divided among clients, or a partition file (.npz)."),
    "clients": (int, "How many clients; the dataset's usual number unless given."),
    "split": (str, "0.6,0.2,0.2 (add :client or :global), 5-fold, or own."),
    "seeds": (str, "Seeds of partition, split and weights, run side by side: 0,1,2."),
    "normalize": (str, "Features: none, row or standard."),
    "noise": (str, "Disturb the clients' graphs: edges=0.1, features=0.1, labels=0.1, or several."),
}
DEFAULT_DATASET = "csbm"


def attribute_docs(cls: type) -> dict[str, str]:
    """The descriptions under "Attributes:" in a class's docstring."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:")
    found = re.findall(r"^ {4}(\w+): ((?:.|\n {8,})+)", section, flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _plain(kind: Any) -> type:
    """The type a flag takes: `int | str` and the like come as text, `float | None` as float."""
    if isinstance(kind, UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return options[0] if len(options) == 1 else str
    plain: type = kind
    return plain


def with_settings(
    panel: str = "Training", *, data: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for every setting and, with `data`, for every choice of data.

    The command must take `**values`, which holds the flags that were given.
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
        for name, (kind, words) in DATA.items() if data else ():
            names = ["--seeds", "--seed"] if name == "seeds" else [f"--{name}"]
            flags[name] = (kind, typer.Option(None, *names, help=words, rich_help_panel="Data"))
        docs, kinds = attribute_docs(Settings), get_type_hints(Settings)
        for field in dataclasses.fields(Settings):
            kind = _plain(kinds[field.name])
            flag = f"--{field.name.replace('_', '-')}"
            usual = "by data and backbone" if field.default is None else field.default
            words = docs[field.name].rstrip(".")
            flags[field.name] = (
                kind,
                typer.Option(
                    None,
                    f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
                    help=f"{words[0].upper()}{words[1:]}. [dim]\\[{usual}][/dim]",
                    rich_help_panel=panel,
                ),
            )
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind | None
            )
            for name, (kind, info) in flags.items()
        ]

        def wrapper(**values: Any) -> None:
            mine = {p.name: values.pop(p.name) for p in own}
            command(**mine, **{k: v for k, v in values.items() if v is not None})

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return wrapper

    return decorate


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command was asked, from flags and file together.

    Attributes:
        method: the method's name, if one was given.
        data: arguments of `load`.
        seeds: one federation each.
        settings: arguments of `Settings`.
        hyperparameters: of the method.
    """

    method: str | None
    data: dict[str, Any]
    seeds: list[int]
    settings: dict[str, Any]
    hyperparameters: dict[str, Any]


def gather(
    method: str | None, values: Mapping[str, Any], assignments: list[str], config: Path | None
) -> Request:
    """Flags over the configuration file over defaults."""
    merged = read_config(config) if config else {}
    merged |= values
    hyperparameters = {**merged.pop("set", {}), **dict(map(_assignment, assignments))}
    chosen = method or merged.pop("method", None)
    merged.pop("method", None)
    data = {name: merged.pop(name) for name in DATA if name in merged}
    seeds = _seeds(data.pop("seeds", 0))
    data.setdefault("dataset", DEFAULT_DATASET)
    return Request(chosen, data, seeds, merged, hyperparameters)


def read_config(file: Path) -> dict[str, Any]:
    """A configuration file's entries, their names checked, a partition file found beside it."""
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no configuration file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from None
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
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words |= {list: "a list", dict: "a table"}
    allowed = [option for option in get_args(kind) or (kind,) if option in words]
    if type(value) not in allowed and not (type(value) is int and float in allowed):
        wanted = " or ".join(words[option] for option in allowed)
        raise UserError(f"{file}: '{name}' takes {wanted}, not {value!r}")


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UserError(f"--set {text}: write name=value")
    return name.strip(), value.strip()


def _seeds(value: Any) -> list[int]:
    """One or several seeds, from `3`, `"0,1,2"` or `[0, 1, 2]`."""
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        seeds = [int(str(part)) for part in parts]
    except ValueError:
        raise UserError(f"seeds: '{value}' is not a list of whole numbers such as 0,1,2") from None
    if len(set(seeds)) < len(seeds) or min(seeds, default=-1) < 0:
        raise UserError(f"seeds: '{value}' must be different numbers, 0 or more")
    return seeds
