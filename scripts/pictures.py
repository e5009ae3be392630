"""Draw the pictures of docs/architecture.md: `python scripts/pictures.py [--out docs/images] [NAME ...]`.

NAME is `packages`, `step`, `memory` or `sync`; without a name the script draws all four. Three pictures are computed:
`packages` from the imports of the code, `memory` from the plan of `configs/plans/llama-3-70b_64gpu.yaml`, `sync` from a
plan of `megarl.reshard`.
"""

import argparse
import contextlib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import grimp
import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "commands"
ERRORS = "megarl.platform.errors"
BLUE = "#3b6fb6"
GREEN = "#4a9156"
ORANGE = "#d98328"
GREY = "#8a8f98"
VIOLET = "#7d5ba6"
RED = "#b8484e"
INK = "#22262d"
PALE = "#d9dde3"
GB = 1e9
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.size": 9, "text.color": INK}


class Arrow(NamedTuple):
    """An import of one package by another."""

    importer: str
    imported: str


def main() -> None:
    """Draw the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    unknown = set(options.names) - PICTURES.keys()
    if unknown:
        parser.error(f"no picture is called {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = options.out / f"{name}.svg"
        PICTURES[name](path)
        print(path)


def read_layers() -> list[list[str]]:
    """Return the packages of each layer of pyproject.toml, the highest layer first, without `__main__`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    packages = [[word.strip(" ()") for word in layer.replace("|", ":").split(":")] for layer in layers]
    return packages[1:]


def find_arrows(layers: Iterable[Iterable[str]]) -> set[Arrow]:
    """Return which package imports which, from the code. Every package may import `errors`, which has no arrows."""
    packages = {package for layer in layers for package in layer}
    graph = grimp.build_graph("megarl", cache_dir=None)

    def package_of(module: str) -> str:
        name = module.split(".")[1] if "." in module else COMMANDS
        return name if name in packages else COMMANDS

    pairs = {
        Arrow(package_of(module), package_of(imported))
        for module in graph.modules - {"megarl"}
        for imported in graph.find_modules_directly_imported_by(module) - {"megarl", ERRORS}
    }
    return {arrow for arrow in pairs if arrow.importer != arrow.imported}


def without_shortcuts(arrows: set[Arrow]) -> set[Arrow]:
    """Return the arrows that no chain of other arrows replaces."""
    below: dict[str, set[str]] = {}
    for importer, imported in arrows:
        below.setdefault(importer, set()).add(imported)

    def reach(package: str) -> set[str]:
        found = set(below.get(package, ()))
        return found.union(*map(reach, found))

    return {
        arrow
        for arrow in arrows
        if not any(arrow.imported in reach(other) for other in below[arrow.importer] - {arrow.imported})
    }


def draw_packages(path: Path) -> None:
    """Draw the packages by layer. The SVG names each arrow in an id, `importer->imported`."""
    layers = read_layers()
    arrows = find_arrows(layers)
    dark = without_shortcuts(arrows)
    spots = {
        package: (5 + 2.6 * (place - (len(layer) - 1) / 2), -1.1 * level)
        for level, layer in enumerate(layers)
        for place, package in enumerate(layer)
    }
    _, axes = _canvas(8, 8.6, (0, 10), (-1.1 * len(layers) + 0.4, 0.6))
    for arrow in sorted(arrows, key=lambda arrow: (arrow in dark, arrow)):
        (x, y), (to_x, to_y) = spots[arrow.importer], spots[arrow.imported]
        line = _arrow(axes, (x, y - 0.25), (to_x, to_y + 0.25), color=INK if arrow in dark else PALE)
        line.set_gid(f"{arrow.importer}->{arrow.imported}")
        line.set_zorder(2 if arrow in dark else 1)
    for package, (x, y) in spots.items():
        _box(axes, x, y, 1.9, 0.5, package, BLUE if package not in ("batch", "mark", "section") else GREY)
    axes.text(0.1, 0.35, f"{len(arrows)} arrows; a pale arrow\nrepeats a chain of dark arrows", va="top", color=GREY)
    _save(path)


LANES = {"engine (vLLM)": GREEN, "rewards (processes)": ORANGE, "trainer (Megatron)": BLUE, "all ranks": GREY}
STEP: list[tuple[str, str, float, float]] = [
    ("engine (vLLM)", "sync", 0, 1.2),
    ("engine (vLLM)", "gen", 1.3, 3.2),
    ("rewards (processes)", "reward", 2.0, 3.3),
    ("trainer (Megatron)", "old_log_prob", 5.4, 1.7),
    ("all ranks", "gate", 7.2, 0.9),
    ("trainer (Megatron)", "ref", 8.2, 1.0),
    ("trainer (Megatron)", "values", 9.3, 1.0),
    ("all ranks", "adv", 10.4, 0.9),
    ("trainer (Megatron)", "update_actor", 11.4, 1.9),
    ("trainer (Megatron)", "update_critic", 13.4, 1.9),
]
"""The phases of a step: lane, name (as in `timing_s/NAME`), begin and length. The lengths are not to scale."""


def draw_step(path: Path) -> None:
    """Draw the phases of one step in the order of `megarl/training/loop.py`."""
    _, axes = _canvas(10, 3.0, (-3.0, 15.6), (-4.3, 0.95))
    for level, (lane, color) in enumerate(LANES.items()):
        axes.axhspan(-level - 0.44, -level + 0.44, color=color, alpha=0.07, lw=0)
        axes.text(-2.9, -level, lane, va="center", color=color, weight="bold")
    rows = list(LANES)
    for lane, name, begin, length in STEP:
        _box(axes, begin + length / 2, -rows.index(lane), length, 0.56, name, LANES[lane], size=8)
    notes = {
        0.6: "weights:\nshard to shard",
        2.9: "responses",
        4.6: "scores",
        7.6: "do engine and\ntrainer agree?",
        10.8: "advantages",
        13.3: "mini-batches",
    }
    for x, note in notes.items():
        axes.text(x, -3.6, note, ha="center", va="top", size=7.5, color=INK)
    axes.annotate("", (15.5, 0.58), (-0.1, 0.58), arrowprops={"arrowstyle": "->", "color": INK})
    axes.text(15.4, 0.62, "one step", ha="right", va="bottom", size=8)
    _save(path)


KINDS = {
    "weights of the trainer": ("weights", BLUE),
    "gradients": ("gradients", RED),
    "optimizer": ("optimizer", VIOLET),
    "activations": ("activations", ORANGE),
    "engine weights": ("engine weights", GREEN),
    "KV cache": ("KV cache", "#8cc08c"),
    "sync buckets": ("sync buckets", GREY),
}
PLAN = "configs/plans/llama-3-70b_64gpu.yaml"


def draw_memory(path: Path) -> None:
    """Draw the device memory of the fullest rank in each phase, as `megarl plan` computes it."""
    from megarl.planning.device import H100
    from megarl.planning.planner import Planner
    from megarl.planning.report import to_dict
    from megarl.planning.traffic import Links

    with contextlib.chdir(ROOT):  # the configuration names its models relative to the checkout
        links = Links(inside=400e9, between=45e9)
        planner = Planner([PLAN], device=H100, ranks_per_node=None, links=links)
        moments = _fullest(to_dict(planner.plan())["memory"]["moments"])
    figure, axes = plt.subplots(figsize=(8, 3.4))
    bottoms = [0.0] * len(moments)
    for label, (kind, color) in KINDS.items():
        sizes = [sum(size for part, size in moment["parts"].items() if _kind(part) == kind) / GB for moment in moments]
        axes.bar(range(len(moments)), sizes, 0.6, bottom=bottoms, label=label, color=color)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.axhline(H100.num_bytes / GB, color=INK, lw=1, ls="--")
    axes.text(-0.45, 78.5, "device: 80 GB", va="top", size=8)
    axes.set_xticks(range(len(moments)), [_title(moment) for moment in moments])
    axes.set_ylabel("GB on rank 0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    _save(path)


def _fullest(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fullest moment of each phase."""
    phases: dict[str, dict[str, Any]] = {}
    for moment in moments:
        if moment["total"] > phases.get(moment["phase"], {"total": 0})["total"]:
            phases[moment["phase"]] = moment
    return list(phases.values())


def _title(moment: dict[str, Any]) -> str:
    return moment["phase"] if moment["worker"] == "engine" else f"{moment['phase']} {moment['worker']}"


def _kind(part: str) -> str:
    return part if part in KINDS else part.split()[-1]


ROW_HEIGHT = 0.3
PARTS = {"q_proj": BLUE, "k_proj": GREEN, "v_proj": ORANGE}


def draw_sync(path: Path) -> None:
    """Draw who sends which rows of a fused attention matrix to rank 0, as `make_plan` computes it."""
    held, needed, plan = _example_plan()
    _, axes = _canvas(8, 4.1, (-0.2, 11), (-5.9, 0.5))
    places = {}
    for rank, layout in enumerate(held):
        places[rank] = _stack(axes, layout, 0.3, -2.9 * rank, f"trainer, rank {rank}")
    targets = _stack(axes, needed, 8.2, -0.6, "engine, rank 0")
    for wave in plan.waves:
        for copy in wave.copies:
            _link(axes, places[0], targets, copy.source, ls="--")
        for transfer in wave.receives:
            _link(axes, places[transfer.peer], targets, transfer.piece, ls="-")
    axes.text(5.6, -0.25, "copied on the rank (dashed)", ha="center", size=8, color=GREY)
    axes.text(5.6, -5.7, f"received: {plan.bytes_received} bytes, the rows that rank 0 lacks", ha="center", size=8)
    _save(path)


def _example_plan() -> tuple[list[Any], Any, Any]:
    """Return the layouts of two trainer ranks, the layout of one engine rank, and the plan of rank 0."""
    import torch

    from megarl.models.architecture import read_architecture
    from megarl.models.grid import Cut
    from megarl.models.weights import pieces
    from megarl.reshard.layout import placement_of
    from megarl.reshard.planner import make_plan

    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    model = read_architecture({"model_type": "llama", **sizes, **heads})
    name = "decoder.layers.0.self_attention.linear_qkv.weight"

    def layout(rank: int, num_ranks: int) -> Any:
        cut = Cut(tp_rank=rank, tp_size=num_ranks)
        return pieces(model, name, (16 // num_ranks, 8), param="linear_qkv", dtype=torch.float32, cut=cut)

    held = [layout(0, 2), layout(1, 2)]
    needed = layout(0, 1)
    source = placement_of(held)
    destination = placement_of([needed, needed])
    sizes_of_job: dict[str, Any] = {"rank": 0, "world_size": 2, "ranks_per_node": 2, "bucket_bytes": 512}
    return held, needed, make_plan(source, destination, held=held[0], needed=needed, **sizes_of_job)


def _stack(axes: Any, layout: Any, x: float, top: float, title: str) -> dict[str, tuple[float, float]]:
    """Draw the pieces of a layout one below the other; return the left and middle of each parameter's rows."""
    axes.text(x, top + 0.15, title, weight="bold", size=9)
    spots: dict[str, tuple[float, float]] = {}
    y = top
    for piece in layout:
        rows = _rows(piece.box)
        part = piece.name.split(".")[-2]
        height = ROW_HEIGHT * len(rows) * (0.8 if len(layout) > 3 else 1)
        axes.add_patch(Rectangle((x, y - height), 2.4, height, facecolor=PARTS[part], alpha=0.75, edgecolor="white"))
        axes.text(x + 1.2, y - height / 2, f"{part} rows {rows[0]}-{rows[-1]}", ha="center", va="center", size=8)
        for number, row in enumerate(rows):
            spots[f"{part}{row}"] = (x, y - height * (number + 0.5) / len(rows))
        y -= height
    return spots


def _rows(box: Any) -> range:
    first, last = str(box).strip("[]").split(",")[0].split(":")
    return range(int(first), int(last))


def _link(axes: Any, sources: Any, targets: Any, piece: Any, *, ls: str) -> None:
    rows = _rows(piece.box)
    part = piece.name.split(".")[-2]
    begin, end = (
        [sum(spots[f"{part}{row}"][place] for row in rows) / len(rows) for place in (0, 1)]
        for spots in (sources, targets)
    )
    _arrow(axes, (begin[0] + 2.45, begin[1]), (end[0] - 0.05, end[1]), color=PARTS[part], ls=ls)


def _canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    return figure, axes


def _box(axes: Any, x: float, y: float, width: float, height: float, text: str, color: str, size: float = 9) -> None:
    style = "round,pad=0,rounding_size=0.1"
    axes.add_patch(
        FancyBboxPatch((x - width / 2, y - height / 2), width, height, boxstyle=style, facecolor=color, lw=0, zorder=3)
    )
    axes.text(x, y, text, ha="center", va="center", color="white", size=size, zorder=4)


def _arrow(axes: Any, begin: Any, end: Any, *, color: str, ls: str = "-") -> FancyArrowPatch:
    arrow = FancyArrowPatch(
        begin, end, arrowstyle="-|>", mutation_scale=8, color=color, lw=1.1, ls=ls, shrinkA=0, shrinkB=0
    )
    axes.add_patch(arrow)
    return arrow


def _save(path: Path) -> None:
    plt.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close()
    lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


PICTURES: dict[str, Callable[[Path], None]] = {
    "packages": draw_packages,
    "step": draw_step,
    "memory": draw_memory,
    "sync": draw_sync,
}

if __name__ == "__main__":
    main()
