"""Tables of numbers and text, and how they are written: Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "…": r"\ldots{}",
    "¹": "$^1$",
    "²": "$^2$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"${sign}$" for sign in "<>|"},
}
_GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "varepsilon",
    "λ": "lambda",
    "μ": "mu",
    "ν": "nu",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "φ": "phi",
    "ω": "omega",
    "Φ": "Phi",
    "Σ": "Sigma",
    "Ω": "Omega",
    "Δ": "Delta",
}


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        title: what it shows.
        columns: the headings.
        rows: cells, numbers or text; None is an empty cell.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def text_of(value: Any) -> str:
    """Return a value of a grid as text: numbers with four digits, nothing for None.

    >>> text_of(0.123456), text_of(None), text_of("cora")
    ('0.1235', '', 'cora')
    """
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_right(grid: Grid, column: int) -> bool:
    """Return whether a column begins with a number: then it is aligned at the right."""
    cells = [text_of(row[column]) for row in grid.rows]
    first = next((cell for cell in cells if cell not in ("", "–")), "")
    return bool(re.match(r"[-+−]?[\d.,]+(e[-+]?\d+)?($|[ %])", first))


def to_markdown(grid: Grid, *, aligned: bool = False) -> str:
    """Return a grid as a Markdown table.

    Args:
        grid: the table.
        aligned: whether columns are aligned as plain text, too.
    """
    right = [is_right(grid, i) for i in range(len(grid.columns))]
    rows = [[text_of(cell).replace("|", "\\|") for cell in row] for row in grid.rows]
    lines = [list(grid.columns), *rows]
    widths = [max(len(line[i]) if aligned else 3 for line in lines) for i in range(len(right))]
    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]

    def written(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right, strict=True)
        ]
        cells = cells if aligned else [cell.strip() for cell in line]
        return f"| {' | '.join(cells)} |"

    return "\n".join([written(grid.columns), written(rule), *map(written, rows)])


def to_csv(grids: Sequence[Grid]) -> str:
    """Return grids as CSV. Grids of the same columns are one table; others follow a blank line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    before: Sequence[str] | None = None
    for grid in grids:
        if before is None or tuple(before) != tuple(grid.columns):
            out.write("\n" if before is not None else "")
            writer.writerow(grid.columns)
        writer.writerows(grid.rows)
        before = grid.columns
    return out.getvalue()


def to_latex(grid: Grid, notes: Sequence[str] = ()) -> str:
    """Return a grid as a LaTeX table, which needs the package booktabs.

    Args:
        grid: the table; its title is the caption.
        notes: sentences below it.
    """
    places = "".join("r" if is_right(grid, i) else "l" for i in range(len(grid.columns)))

    def written(cells: Sequence[Any]) -> str:
        line = " & ".join(latex(text_of(cell)) for cell in cells)
        return ("{}" if line.startswith("[") else "") + line + r" \\"  # \\[ would take a length

    below = [r"\par\smallskip\footnotesize", *[latex(note) + r"\par" for note in notes]]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex(grid.title)}}}",
            rf"\begin{{tabular}}{{{places}}}",
            r"\toprule",
            written(grid.columns),
            r"\midrule",
            *map(written, grid.rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(below if notes else []),
            r"\end{table}",
            "",
        ]
    )


def latex(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> latex("fed_avg ± 0.1 %, λ")
    'fed\\_avg $\\pm$ 0.1 \\%, $\\lambda$'
    """
    signs = {**_LATEX, **{sign: f"$\\{name}$" for sign, name in _GREEK.items()}}
    return "".join(signs.get(sign, sign) for sign in text)
