"""Tables of figures, as wide as the terminal allows."""

from __future__ import annotations

from collections.abc import Sequence

from .terminal import columns

_GAP = 2


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Names at the left, figures at the right under their titles.

    Args:
        header: titles of the columns; the first is the title of the names.
        rows: as many texts each.
        width: columns beyond so many characters follow in a further table, names repeated; None: one table.

    Example:
        >>> print(table(["variant", "ms", "MB"], [["alone", "824", "-"], ["sharded", "874", "147"]]))
        variant   ms   MB
        alone    824    -
        sharded  874  147
        >>> print(table(["variant", "ms", "MB"], [["alone", "824", "-"]], width=13))
        variant   ms
        alone    824
        <BLANKLINE>
        variant  MB
        alone     -
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    parts: list[list[int]] = [[]]
    for index in range(1, len(header)):
        taken = widths[0] + sum(_GAP + widths[other] for other in (*parts[-1], index))
        if width is not None and taken > width and parts[-1]:
            parts.append([])
        parts[-1].append(index)
    return "\n\n".join(
        "\n".join(
            row[0].ljust(widths[0]) + "".join(row[index].rjust(_GAP + widths[index]) for index in part)
            for row in (header, *rows)
        )
        for part in parts
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints the table, without columns that have no figure, in the width of the terminal; unfolded to files and pipes.

    Example:
        >>> print_table(["variant", "ms", "MB"], [["alone", "824", "-"]])
        variant   ms
        alone    824
    """
    shown = [i for i in range(len(header)) if not rows or any(row[i] != "-" for row in rows)]
    rows = [[row[i] for i in shown] for row in rows]
    print(table([header[i] for i in shown], rows, columns()), flush=True)
