"""The pages of the Python interface, which Sphinx fills with signatures and docstrings."""

from __future__ import annotations

import inspect
from types import GenericAlias
from typing import Any

import polyphily
from polyphily import extend

GROUPS = {  # the headings of polyphily.extend, and the modules whose names are below each
    "Methods": (
        "core.method",
        "methods.fedavg",
        "core.local",
        "core.cohort",
        "core.optimizers",
        "core.search",
    ),
    "Messages": ("core.messages",),
    "Backbones and layers": ("nn.",),
    "Partitions, datasets and options": ("graphs.",),
    "Metrics": ("core.metrics",),
    "Errors": ("errors",),
}


def pages() -> dict[str, str]:
    """Return the page of `polyphily`."""
    names = {name: getattr(polyphily, name) for name in polyphily.__all__}
    groups = {
        "Functions": [name for name, value in names.items() if not inspect.isclass(value)],
        "Classes": [
            name
            for name, value in names.items()
            if inspect.isclass(value) and not issubclass(value, Exception)
        ],
        "Errors": [
            name
            for name, value in names.items()
            if inspect.isclass(value) and issubclass(value, Exception)
        ],
    }
    parts = [
        "# Python: polyphily",
        "The names that `import polyphily` gives. Those for authors of plug-ins are in "
        "[polyphily.extend](extend.md).",
    ]
    for heading, members in groups.items():
        parts += [
            f"## {heading}",
            *(_directive("polyphily", name, names[name]) for name in members),
        ]
    return {"reference/api.md": "\n\n".join(parts) + "\n"}


def plugin_pages() -> dict[str, str]:
    """Return the page of `polyphily.extend`."""
    parts = [
        "# Python: polyphily.extend",
        "All that a package needs to add a method, backbone, partition, dataset or metric. "
        "[Extending](../extending.md) has an example of each kind.",
    ]
    left = list(extend.__all__)
    for heading, modules in GROUPS.items():
        starts = tuple(f"polyphily.{module}" for module in modules)
        members = [name for name in left if extend._HOME_OF[name].startswith(starts)]
        left = [name for name in left if name not in members]
        parts.append(f"## {heading}")
        parts += [_directive("polyphily.extend", name, getattr(extend, name)) for name in members]
    assert not left, f"names without a heading: {left}"
    return {"reference/extend.md": "\n\n".join(parts) + "\n"}


def _directive(module: str, name: str, value: Any) -> str:
    """Return the block that Sphinx replaces by signature and docstring."""
    if module == "polyphily.extend" and name in polyphily.__all__:
        return f"`{name}` is {{py:obj}}`polyphily.{name}`."
    if inspect.isfunction(value):
        return f"```{{eval-rst}}\n.. autofunction:: {module}.{name}\n```"
    if isinstance(value, type) and not isinstance(value, GenericAlias):
        kind = "autoexception" if issubclass(value, Exception) else "autoclass"
        members = "   :members:\n   :show-inheritance:\n"
        return f"```{{eval-rst}}\n.. {kind}:: {module}.{name}\n{members}```"
    return f"```{{eval-rst}}\n.. py:data:: {module}.{name}\n   :value: {value!r}\n```"
