"""Draw the pictures of these pages: `python docs/draw.py` writes docs/images/*.svg.

A picture of a collective shows the ranks' tensors before and after, one colour for the data of each rank; a sum has
the colours of what it is made of.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["pictures"]

FOLDER = Path(__file__).parent / "images"
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
EMPTY = "#eeeeee"
CELL, GAP, ROW = 46, 4, 62  # pixels
LEFT, RIGHT, TOP = 70, 390, 48
RANKS = range(4)

Cell = tuple[str, tuple[int, ...]]  # what is written in it; the ranks whose data it holds


def _text(x: float, y: float, text: str, size: int = 13, colour: str = "#333", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-family="sans-serif" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>'


def _arrow(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.6" '
        f'marker-end="url(#head)"/>'
    )


def _svg(width: float, height: float, parts: list[str]) -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#777"/></marker></defs>'
    )
    open_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    )
    return "\n".join([open_tag, head, _rectangle(0, 0, width, height, "#ffffff"), *parts, "</svg>"]) + "\n"


def _cells(x: float, y: float, cells: list[Cell]) -> list[str]:
    parts = []
    for text, ranks in cells:
        height = CELL / max(1, len(ranks))
        for i, rank in enumerate(ranks):
            parts.append(_rectangle(x, y + i * height, CELL, height, COLOURS[rank]))
        if not ranks:
            parts.append(_rectangle(x, y, CELL, CELL, EMPTY))
        parts.append(_text(x + CELL / 2, y + CELL / 2 + 5, text, colour="#fff" if ranks else "#999"))
        x += CELL + GAP
    return parts


def collective(before: list[list[Cell]], after: list[list[Cell]], moves: list[tuple[int, int]]) -> str:
    """The ranks' tensors before and after, and which rank's data travels to which."""
    widest = max(len(row) for row in before)
    start = LEFT + widest * (CELL + GAP) + 6
    parts = [
        _text(LEFT, 28, "before", 14, anchor="start"),
        _text(RIGHT, 28, "after", 14, anchor="start"),
    ]
    for rank in RANKS:
        y = TOP + rank * ROW
        parts.append(_text(10, y + CELL / 2 + 5, f"rank {rank}", anchor="start"))
        parts += _cells(LEFT, y, before[rank]) + _cells(RIGHT, y, after[rank])
    for source, target in moves:
        y1, y2 = (TOP + rank * ROW + CELL / 2 for rank in (source, target))
        parts.append(_arrow(start, y1, RIGHT - 10, y2, COLOURS[source]))
    width = RIGHT + max(len(row) for row in after) * (CELL + GAP) + 14
    return _svg(width, TOP + len(RANKS) * ROW + 4, parts)


def _collectives() -> dict[str, str]:
    own: list[list[Cell]] = [[("ABCD"[r], (r,))] for r in RANKS]
    nothing: list[list[Cell]] = [[("", ())] for _ in RANKS]
    stacked: list[Cell] = [("ABCD"[r], (r,)) for r in RANKS]
    table: list[list[Cell]] = [[(f"{'ABCD'[r]}{i}", (r,)) for i in RANKS] for r in RANKS]
    total: list[Cell] = [("sum", tuple(RANKS))]
    at_root: list[list[Cell]] = [[], [], [], []]
    everybody = [(source, target) for source in RANKS for target in RANKS]
    to_root, from_root = [(r, 0) for r in RANKS], [(0, r) for r in RANKS]
    return {
        "send-recv": collective([own[0], *nothing[1:]], [own[0], nothing[0], nothing[0], own[0]], [(0, 3)]),
        "broadcast": collective([own[0], *nothing[1:]], [own[0]] * 4, from_root),
        "scatter": collective([table[0], [], [], []], [[cell] for cell in table[0]], from_root),
        "gather": collective(own, [stacked, *at_root[1:]], to_root),
        "reduce": collective(own, [total, *at_root[1:]], to_root),
        "all-reduce": collective(own, [total] * 4, everybody),
        "all-gather": collective(own, [stacked] * 4, everybody),
        "reduce-scatter": collective(table, [[(f"sum {r}", tuple(RANKS))] for r in RANKS], everybody),
    }


def flat_buffer() -> str:
    """How a block's parameters become one buffer, and the buffer the ranks' shards."""
    parameters = [("attention.weight", 210), ("attention.bias", 96), ("mlp.weight", 250), ("mlp.bias", 66)]
    gap, height, x0 = 6, 34, 20
    total = sum(width for _, width in parameters) + gap * len(parameters)
    parts = [_text(x0, 26, "a block's parameters, one after the other", 14, anchor="start")]
    x, places = x0, []
    for i, (name, width) in enumerate(parameters):
        shade = ("#8f8f8f", "#a9a9a9")[i % 2]
        parts += [_rectangle(x, 40, width, height, shade), _text(x + width / 2, 62, name, 12, "#fff")]
        places.append((x, width))
        x += width + gap
    parts.append(_text(x0, 128, "one flat buffer, cut into equal partitions", 14, anchor="start"))
    share = total / 4
    for rank in RANKS:
        x = x0 + rank * share
        parts.append(_rectangle(x, 140, share - 2, height, COLOURS[rank]))
        parts.append(_text(x + share / 2, 162, f"partition {rank}", 12, "#fff"))
    for x, width in places:
        parts.append(_arrow(x + width / 2, 80, x + width / 2, 108, "#777"))
    parts.append(_text(x0, 228, "what each rank keeps: its shard", 14, anchor="start"))
    for rank in RANKS:
        x = x0 + rank * share
        parts.append(_rectangle(x, 240, share - 2, height, COLOURS[rank]))
        parts.append(_text(x + share / 2, 262, f"rank {rank}", 12, "#fff"))
        parts.append(_arrow(x + share / 2, 180, x + share / 2, 208, "#777"))
    return _svg(total + 2 * x0, 290, parts)


def one_step(level: int) -> str:
    """Which blocks of a rank are whole over one step: a row a block, time to the right."""
    blocks, x0, width, height = 3, 90, 84, 34
    names = ["forward 0", "forward 1", "forward 2", "backward 2", "backward 1", "backward 0", "step"]
    title = {3: "level 3: whole only while it runs", 2: "level 2: whole until its backward is over"}[level]
    parts = [_text(20, 26, title, 14, anchor="start")]
    for column, name in enumerate(names):
        parts.append(_text(x0 + (column + 0.5) * width, 54, name, 12))
    for block in range(blocks):
        y = 68 + block * (height + 8)
        parts.append(_text(20, y + 22, f"block {block}", anchor="start"))
        runs = {block, 2 * blocks - 1 - block}
        whole = range(min(runs), max(runs) + 1) if level == 2 or block == blocks - 1 else runs
        for column in range(len(names)):
            x = x0 + column * width
            if column in whole:
                for rank in RANKS:
                    quarter = (width - 3) / 4
                    parts.append(_rectangle(x + rank * quarter, y, quarter, height, COLOURS[rank]))
            else:
                parts.append(_rectangle(x, y, width - 3, height, EMPTY))
                parts.append(_rectangle(x, y, (width - 3) / 4, height, COLOURS[0]))
    return _svg(x0 + len(names) * width + 16, 68 + blocks * (height + 8) + 8, parts)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    drawn = {**_collectives(), "flat-buffer": flat_buffer(), "level-3": one_step(3), "level-2": one_step(2)}
    return {f"{name}.svg": picture for name, picture in drawn.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, picture in pictures().items():
        (FOLDER / file).write_text(picture)
