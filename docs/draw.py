"""Draw the pictures of these pages: `python docs/draw.py` writes docs/images/*.svg, and docs/zh/images in Chinese.

The other pictures there: `python -m bmtrain plan --machine h100-80gb --scale docs/images` writes scale-mfu.png and
scale-parts.png, docs/results/step.md says how scale-step.png was measured, and timeline.png is of the example:

    export BMTRAIN_TIMELINE=out/timeline
    torchrun --standalone --nproc-per-node 2 example/train.py --num-layers 4 --dim-model 256
    python -m bmtrain timeline out/timeline && cp out/timeline/timeline.png docs/images/

A picture of a collective shows the ranks' tensors before and after, one colour for the data of each rank; a sum has
the colours of what it is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from bmtrain._engine.pipe_schedule import SCHEDULES, Kind, actions_of, ends_of

__all__ = ["pictures"]

FOLDER = Path(__file__).parent / "images"
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
EMPTY = "#eeeeee"
CELL, GAP, ROW = 46, 4, 62  # pixels
LEFT, RIGHT, TOP = 70, 390, 48
RANKS = range(4)

Cell = tuple[str, tuple[int, ...]]  # what is written in it; the ranks whose data it holds


def _text(
    x: float,
    y: float,
    text: str,
    size: int = 13,
    colour: str = "#333",
    anchor: str = "middle",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-family="sans-serif" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>'
    )


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
    open_tag = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    return (
        "\n".join(
            [open_tag, head, _rectangle(0, 0, width, height, "#ffffff"), *parts, "</svg>"]
        )
        + "\n"
    )


def _cells(x: float, y: float, cells: list[Cell]) -> list[str]:
    parts = []
    for text, ranks in cells:
        height = CELL / max(1, len(ranks))
        for i, rank in enumerate(ranks):
            parts.append(_rectangle(x, y + i * height, CELL, height, COLOURS[rank]))
        if not ranks:
            parts.append(_rectangle(x, y, CELL, CELL, EMPTY))
        parts.append(
            _text(x + CELL / 2, y + CELL / 2 + 5, text, colour="#fff" if ranks else "#999")
        )
        x += CELL + GAP
    return parts


def collective(
    before: list[list[Cell]], after: list[list[Cell]], moves: list[tuple[int, int]]
) -> str:
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
        "send-recv": collective(
            [own[0], *nothing[1:]], [own[0], nothing[0], nothing[0], own[0]], [(0, 3)]
        ),
        "broadcast": collective([own[0], *nothing[1:]], [own[0]] * 4, from_root),
        "scatter": collective(
            [table[0], [], [], []], [[cell] for cell in table[0]], from_root
        ),
        "gather": collective(own, [stacked, *at_root[1:]], to_root),
        "reduce": collective(own, [total, *at_root[1:]], to_root),
        "all-reduce": collective(own, [total] * 4, everybody),
        "all-gather": collective(own, [stacked] * 4, everybody),
        "sequence-heads": collective(
            table, [[table[r][i] for r in RANKS] for i in RANKS], everybody
        ),
        "sequence-ring": collective(
            [[(str(r), (r,)), (str(7 - r), (r,))] for r in RANKS],
            [[(str(r), (r,)), (str(7 - r), (r,))] for r in (3, 0, 1, 2)],
            [(r, (r + 1) % 4) for r in RANKS],
        ),
        "reduce-scatter": collective(
            table, [[(f"sum {r}", tuple(RANKS))] for r in RANKS], everybody
        ),
        "experts": _experts([[0, 2, 2], [3, 0, 2], [0, 2], [3, 3, 0]]),
    }


def _experts(routed: list[list[int]]) -> str:
    """Tokens of each rank, by the number of their expert, and those that each rank's expert gets."""
    before: list[list[Cell]] = [
        [(f"{'ABCD'[r]}{e}", (r,)) for e in routed[r]] for r in RANKS
    ]
    after: list[list[Cell]] = [
        [(f"{'ABCD'[r]}{e}", (r,)) for r in RANKS for e in routed[r] if e == expert]
        for expert in RANKS
    ]
    return collective(before, after, sorted({(r, e) for r in RANKS for e in routed[r]}))


def flat_buffer() -> str:
    """How a block's parameters become one buffer, and the buffer the ranks' shards."""
    parameters = [
        ("attention.weight", 210),
        ("attention.bias", 96),
        ("mlp.weight", 250),
        ("mlp.bias", 66),
    ]
    gap, height, x0 = 6, 34, 20
    total = sum(width for _, width in parameters) + gap * len(parameters)
    parts = [_text(x0, 26, "a block's parameters, one after the other", 14, anchor="start")]
    x, places = x0, []
    for i, (name, width) in enumerate(parameters):
        shade = ("#8f8f8f", "#a9a9a9")[i % 2]
        parts += [
            _rectangle(x, 40, width, height, shade),
            _text(x + width / 2, 62, name, 12, "#fff"),
        ]
        places.append((x, width))
        x += width + gap
    parts.append(
        _text(x0, 128, "one flat buffer, cut into equal partitions", 14, anchor="start")
    )
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
    blocks, x0, width, height = 3, 72, 70, 34
    names = [
        "forward 0",
        "forward 1",
        "forward 2",
        "backward 2",
        "backward 1",
        "backward 0",
        "step",
    ]
    title = {
        3: "level 3: full parameters only while the block runs",
        2: "level 2: full parameters until the block's backward is over",
    }[level]
    parts = [_text(20, 26, title, 14, anchor="start")]
    for column, name in enumerate(names):
        parts.append(_text(x0 + (column + 0.5) * width, 54, name, 12))
    for block in range(blocks):
        y = 68 + block * (height + 8)
        parts.append(_text(20, y + 22, f"block {block}", anchor="start"))
        runs = {block, 2 * blocks - 1 - block}
        whole = (
            range(min(runs), max(runs) + 1) if level == 2 or block == blocks - 1 else runs
        )
        for column in range(len(names)):
            x = x0 + column * width
            if column in whole:
                for rank in RANKS:
                    quarter = (width - 3) / 4
                    parts.append(
                        _rectangle(x + rank * quarter, y, quarter, height, COLOURS[rank])
                    )
            else:
                parts.append(_rectangle(x, y, width - 3, height, EMPTY))
                parts.append(_rectangle(x, y, (width - 3) / 4, height, COLOURS[0]))
    return _svg(x0 + len(names) * width + 16, 68 + blocks * (height + 8) + 8, parts)


def schedules(stages: int = 4, micros: int = 8) -> str:
    """Actions of the stages in every schedule over time; a backward is twice as long as a forward."""
    colours = {
        Kind.FORWARD: COLOURS[0],
        Kind.BACKWARD: COLOURS[1],
        Kind.BACKWARD_INPUT: COLOURS[1],
        Kind.BACKWARD_WEIGHT: COLOURS[2],
    }
    x0, unit, height, y = 90, 16.0, 20, 14.0
    longest, parts = 0.0, []
    for name in SCHEDULES:
        chunks = 2 if name == "interleaved" else 1
        units = {kind: (2 if kind is Kind.BACKWARD else 1) / chunks for kind in Kind}
        actions = actions_of(name, stages, micros, chunks)
        ends = ends_of(actions, chunks, units)
        parts.append(_text(10, y + 2 * height + 4, name, 14, anchor="start"))
        for stage in range(stages):
            last = max(map(max, ends))
            parts.append(_rectangle(x0, y, unit * last - 1, height - 2, EMPTY))
            for action, end in zip(actions[stage], ends[stage], strict=True):
                width = unit * units[action.kind]
                x, dark = x0 + unit * end - width, action.chunk % 2
                parts.append(_rectangle(x, y, width - 1, height - 2, colours[action.kind]))
                if dark:
                    parts.append(_rectangle(x, y + height - 6, width - 1, 4, "#333"))
                label = _text(
                    x + width / 2 - 0.5,
                    y + 13,
                    str(action.micro),
                    10 if chunks == 1 else 8,
                    "#fff",
                )
                parts.append(label)
            longest, y = max(longest, last), y + height
        y += 16
    return _svg(x0 + unit * longest + 14, y, parts)


def step_peers() -> str:
    """Time of a training step, from the table of results/step.md: no communication, bmtrain, FSDP2."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (FOLDER.parent / "results" / "step.md")
        .read_text(encoding="utf-8")
        .splitlines()
        if line.startswith("| level 3, ")
    ]
    names = ("no communication", "bmtrain", "FSDP2")
    x0, scale, bar, gap = 144, 0.25, 20, 16
    parts = [
        _text(
            20,
            26,
            "milliseconds per step, 2 CPU ranks, level 3 (shorter is better)",
            14,
            anchor="start",
        )
    ]
    for index, (name, colour) in enumerate(
        zip(names, (COLOURS[2], COLOURS[0], COLOURS[1]), strict=True)
    ):
        parts.append(_rectangle(20 + 150 * index, 40, 14, 14, colour))
        parts.append(_text(40 + 150 * index, 52, name, 12, anchor="start"))
    y = 72.0
    for row in rows:
        parts.append(
            _text(20, y + 1.5 * bar + 5, row[0].removeprefix("level 3, "), anchor="start")
        )
        for value, colour in zip(
            (row[1], row[3], row[2]), (COLOURS[2], COLOURS[0], COLOURS[1]), strict=True
        ):
            length = scale * float(value)
            parts.append(_rectangle(x0, y, length, bar - 3, colour))
            parts.append(_text(x0 + length + 6, y + bar - 7, value, 12, anchor="start"))
            y += bar
        y += gap
    return _svg(x0 + scale * 1142 + 60, y, parts)


def _loss_axes(
    title: str, last: int, every: int
) -> tuple[list[str], Callable[[float, float], tuple[float, float]]]:
    """Axes of a curve of losses up to step ``last``, and where a step and a loss are in the picture."""
    x0, y0, width, height = 60, 250, 480, 200
    low, high = 1.5, 6.0

    def place(step: float, loss: float) -> tuple[float, float]:
        return x0 + width * step / last, y0 - height * (loss - low) / (high - low)

    parts = [_text(20, 26, title, 14, anchor="start")]
    for tick in range(2, 7):
        y = place(0, tick)[1]
        parts += [
            _rectangle(x0, y, width, 0.5, "#ccc"),
            _text(x0 - 10, y + 4, str(tick), 12, anchor="end"),
        ]
    for tick in range(0, last + 1, every):
        parts.append(_text(place(tick, 0)[0], y0 + 18, str(tick), 12))
    return parts, place


def training_curve() -> str:
    """Losses of the example, from results/example.json: steps, training losses, validation losses by step."""
    run = json.loads(
        (FOLDER.parent / "results" / "example.json").read_text(encoding="utf-8")
    )
    parts, place = _loss_axes(
        "example/train.py: loss, nats per byte", run["steps"][-1], 200
    )
    points = (place(*point) for point in zip(run["steps"], run["losses"], strict=True))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(
        f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>'
    )
    for step, loss in run["validation"]:
        x, y = place(step, loss)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[1]}"/>')
        parts.append(
            _text(
                x + (10 if step == 0 else -2),
                y - 8,
                f"{loss:.2f}",
                12,
                anchor="start" if step == 0 else "end",
            )
        )
    parts += [
        _rectangle(300, 50, 14, 3, COLOURS[0]),
        _text(320, 56, "training", 12, anchor="start"),
    ]
    parts.append(f'<circle cx="407" cy="52" r="5" fill="{COLOURS[1]}"/>')
    parts.append(_text(420, 56, "held-out files", 12, anchor="start"))
    parts.append(_text(300, 288, "step", 12))
    return _svg(570, 300, parts)


def muon_curve() -> str:
    """Held-out losses of Adam and Muon by step, from results/muon.json."""
    run = json.loads((FOLDER.parent / "results" / "muon.json").read_text(encoding="utf-8"))
    curves = [run["losses"][name] for name in ("adam", "muon")]
    parts, place = _loss_axes(
        "loss on held-out files, nats per byte", curves[0][-1][0], 100
    )
    for index, (name, losses) in enumerate(zip(("Adam", "Muon"), curves, strict=True)):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in losses))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{COLOURS[index]}" stroke-width="2"/>'
        )
        rate, end = run["rate"][name.lower()], losses[-1][1]
        parts.append(_rectangle(300, 51 + 20 * index, 14, 3, COLOURS[index]))
        label = f"{name}: {end:.3f} at the end, lr {rate:g}"
        parts.append(_text(320, 57 + 20 * index, label, 12, anchor="start"))
    parts.append(_text(300, 288, "step", 12))
    return _svg(570, 300, parts)


def plan_memory() -> str:
    """Memory of one device by purpose, from the two outputs on the page of plan."""
    page = (FOLDER.parent / "howto" / "plan.md").read_text(encoding="utf-8")
    row = re.compile(
        r"^  (weights|gathered|gradients|optimizer|activations|scratch) +([\d.]+) ([MG])iB",
        re.MULTILINE,
    )
    outputs = [block for block in page.split("```") if block.startswith("text\nGPT-2")]
    colours = (*COLOURS, "#e15759", "#9c9c9c")
    usable, scale, x0 = 78.5, 3.9, 96
    parts = [
        _text(
            20,
            26,
            "memory of one device, GiB, for both plans of this page",
            14,
            anchor="start",
        )
    ]
    for index, (title, output) in enumerate(
        zip(("32 devices", "2 devices"), outputs, strict=True)
    ):
        y, x = 84 + 50 * index, float(x0)
        parts.append(_text(20, y + 22, title, anchor="start"))
        sizes = [
            (name, float(size) / (1024 if unit == "M" else 1))
            for name, size, unit in row.findall(output)
        ]
        for (name, size), colour in zip(sizes, colours, strict=True):
            parts.append(_rectangle(x, y, scale * size, 34, colour))
            if index == 0:
                place = 20 + 84 * sizes.index((name, size))
                parts.append(_rectangle(place, 44, 12, 12, colour))
                parts.append(_text(place + 16, 54, name, 11, anchor="start"))
            x += scale * size
        total = sum(size for _, size in sizes)
        parts.append(_text(x + 6, y + 22, f"{total:.1f}", 12, anchor="start"))
    limit = x0 + scale * usable
    parts.append(
        f'<line x1="{limit:g}" y1="70" x2="{limit:g}" y2="182" stroke="#333" stroke-dasharray="4 3"/>'
    )
    parts.append(_text(limit, 198, f"{usable} usable", 12))
    return _svg(570, 210, parts)


def blamed_rank() -> str:
    """Four ranks of which one raises: what the others do until the watchdogs end their waits."""
    x0, height, step = 76, 26, 36
    gathers = "all_gather #1"
    parts = [
        _text(
            20,
            26,
            "rank 1 raises; the watchdogs report it and end the waits",
            14,
            anchor="start",
        )
    ]
    for rank, arrival in enumerate((170, 210, 190, 150)):
        y = 44 + step * rank
        parts.append(_text(20, y + 18, f"rank {rank}", anchor="start"))
        parts.append(_rectangle(x0, y, arrival - 8, height, COLOURS[0]))
        parts.append(_text(x0 + 60, y + 18, "forward", 12, "#fff"))
        if rank == 1:
            parts.append(_rectangle(x0 + arrival, y, 150, height, "#e15759"))
            parts.append(
                _text(x0 + arrival + 75, y + 18, "ValueError: bad sample", 12, "#fff")
            )
        else:
            parts.append(_rectangle(x0 + arrival, y, 400 - arrival, height, "#cccccc"))
            parts.append(_text(x0 + (arrival + 400) / 2, y + 18, f"waits in {gathers}", 12))
            parts.append(_rectangle(x0 + 404, y, 140, height, COLOURS[1]))
            parts.append(_text(x0 + 474, y + 18, "CommunicationError", 12, "#fff"))
    return _svg(x0 + 564, 44 + step * 4 + 6, parts)


#: Labels on the Chinese pages; names, numbers and what programs print stay.
CHINESE = {
    "before": "之前",
    "after": "之后",
    "sum": "和",
    "a block's parameters, one after the other": "一个 block 的参数，依次排列",
    "one flat buffer, cut into equal partitions": "一个一维缓冲区，切成相等的分区",
    "what each rank keeps: its shard": "每个 rank 保存的部分：它的分片",
    "level 3: full parameters only while the block runs": "level 3：完整的参数只在 block 运行时存在",
    "level 2: full parameters until the block's backward is over": "level 2：完整的参数保留到该 block 的反向结束",
    "step": "步",
    "milliseconds per step, 2 CPU ranks, level 3 (shorter is better)": "每步毫秒数，2 个 CPU rank，level 3（越短越好）",
    "no communication": "不通信",
    "fp32, recomputing": "fp32，重计算",
    "bf16, recomputing": "bf16，重计算",
    "example/train.py: loss, nats per byte": "example/train.py：损失（每字节 nat）",
    "training": "训练",
    "held-out files": "留出的文件",
    "loss on held-out files, nats per byte": "留出文件上的损失（每字节 nat）",
    "memory of one device, GiB, for both plans of this page": "单个设备的显存（GiB），本页的两个方案",
    "weights": "权重",
    "gathered": "聚合",
    "gradients": "梯度",
    "optimizer": "优化器",
    "activations": "激活",
    "scratch": "临时",
    "rank 1 raises; the watchdogs report it and end the waits": "rank 1 抛出异常；看门狗报告它，并结束等待",
    "forward": "前向",
}
_CHINESE_PARTS = {
    r"sum (\d)": r"和 \1",
    r"partition (\d)": r"分区 \1",
    r"forward (\d)": r"前向 \1",
    r"backward (\d)": r"反向 \1",
    r"(\d+) devices": r"\1 个设备",
    r"([\d.]+) usable": r"可用 \1",
    r"waits in (.*)": r"等待 \1",
    r"(\w+): ([\d.]+) at the end, lr (.*)": r"\1：最终 \2，lr \3",
}


def _in_chinese(label: re.Match[str]) -> str:
    text = CHINESE.get(label[1], label[1])
    for english, chinese in _CHINESE_PARTS.items():
        text = re.sub(f"^{english}$", chinese, text)
    return f">{text}</text>"


def pictures() -> dict[str, str]:
    """Path below docs/ -> SVG."""
    drawn = {
        **_collectives(),
        "flat-buffer": flat_buffer(),
        "level-3": one_step(3),
        "level-2": one_step(2),
    }
    drawn |= {"step-peers": step_peers(), "training-curve": training_curve()}
    drawn |= {"muon-curve": muon_curve(), "schedules": schedules()}
    drawn |= {"plan-memory": plan_memory(), "blame": blamed_rank()}
    english = {f"images/{name}.svg": picture for name, picture in drawn.items()}
    return english | {
        f"zh/{path}": re.sub(">([^<>]+)</text>", _in_chinese, picture)
        for path, picture in english.items()
    }


if __name__ == "__main__":
    for path, picture in pictures().items():
        (FOLDER.parent / path).parent.mkdir(exist_ok=True)
        (FOLDER.parent / path).write_text(picture, encoding="utf-8")
