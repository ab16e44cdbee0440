"""The picture of docs/architecture.md: the package's folders and what they import.

    python -m docs.architecture            print today's imports
    python -m docs.architecture --write    write docs/architecture.json, and draw docs/architecture.svg from it

The file has every import between two folders, those inside functions too. The picture leaves out an arrow that follows
from others: of a -> b -> c and a -> c the last one (the transitive reduction).
"""

import argparse
import ast
import functools
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA, PICTURE = Path("docs/architecture.json"), Path("docs/architecture.svg")
CAPTIONS = {
    "cli": "the command cute-attn",
    "lab": "verdict, A/B, tuning",
    "sdpa": "PyTorch's operators",
    "flex": "FlexAttention's function",
    "flash_attn": "FlashAttention's functions",
    "transformers": "Hugging Face's",
    "api": "attention, caches, append",
    "host": "from a call to its launches",
    "compiler": "registry, build, cache",
    "kernels": "a folder or file each",
    "reference": "the definition, in torch",
    "outputs": "O, LSE, dQ, partials",
    "rows": "where rows lie, TMA",
    "work": "work tiles, key blocks",
    "epilogues": "what happens to scores",
    "device": "pipelines, copies, MMA",
    "tiles": "how it is computed",
    "traits": "what is computed",
    "layouts": "shared memory, copies, MMAs",
}
"""Folder or module -> what it holds, from the top of the picture down."""

WIDTH, HEIGHT, GAP, STEP = 2.3, 0.56, 0.4, 0.95
"""Size of a box; gap between the boxes of a row; distance from row to row."""

Imports = dict[str, list[str]]


def box_of(module: str) -> str | None:
    """The box that contains a dotted name; None for other packages and for this one's ``__init__``."""
    package, _, rest = module.partition(".")
    if package == "layouts":
        return package
    folder = rest.partition(".")[0]
    return folder if package == "cute_attn" and folder in boxes() else None


@functools.cache
def boxes() -> list[str]:
    """The package's folders and top-level modules, and ``layouts``."""
    package = ROOT / "cute_attn"
    folders = [path.parent.name for path in package.glob("*/__init__.py")]
    return sorted(["layouts", *folders, *(path.stem for path in package.glob("[!_]*.py"))])


def imported(path: Path) -> Iterator[str]:
    """The dotted names of all absolute imports of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports() -> Imports:
    """The current imports of each box."""
    found: dict[str, set[str]] = {box: set() for box in boxes()}
    for path in (*ROOT.glob("cute_attn/**/*.py"), *ROOT.glob("layouts/**/*.py")):
        box = box_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if box is not None:
            found[box] |= {other for name in imported(path) if (other := box_of(name)) not in (None, box)}
    return {box: sorted(others) for box, others in found.items()}


def levels(graph: Imports) -> dict[str, int]:
    """How many boxes lie below each one along its longest chain of imports. Raises ValueError for a cycle."""
    found: dict[str, int] = {}
    while len(found) < len(graph):
        ready = [box for box in graph if box not in found and all(x in found for x in graph[box])]
        if not ready:
            raise ValueError(f"a cycle of imports among {sorted(set(graph) - set(found))}")
        found |= {box: max((found[x] + 1 for x in graph[box]), default=0) for box in ready}
    return found


def arrows(graph: Imports) -> list[tuple[str, str]]:
    """The imports that no chain of others implies."""
    reach: dict[str, set[str]] = {}
    for box in sorted(graph, key=levels(graph).__getitem__):
        reach[box] = {y for x in graph[box] for y in (x, *reach[x])}
    return [(a, b) for a in graph for b in graph[a] if not any(b in reach[x] for x in graph[a])]


def rows(graph: Imports) -> list[list[str]]:
    """The boxes of each level, from top to bottom, each near the boxes that it is connected to.

    An arrow that passes a level has a place ``FROM..TO`` there, so that no box lies on it.
    """
    level, lines = levels(graph), arrows(graph)
    found = [[box for box in CAPTIONS if level[box] == n] for n in reversed(range(max(level.values()) + 1))]
    top = len(found) - 1
    pairs = []
    for a, b in lines:
        passed = range(top - level[a] + 1, top - level[b])
        for n in passed:
            found[n].append(f"{a}..{b}")
        chain = [(top - level[a], a), *((n, f"{a}..{b}") for n in passed), (top - level[b], b)]
        pairs += list(itertools.pairwise(chain))
    for down in (True, False) * 4:
        for n in range(1, top + 1) if down else range(top - 1, -1, -1):
            place = {
                (m, item): (i + 0.5) / len(row) for m, row in enumerate(found) for i, item in enumerate(row)
            }
            near: dict[str, list[float]] = {}
            for upper, lower in pairs:
                own, other = (lower, upper) if down else (upper, lower)
                if own[0] == n:
                    near.setdefault(own[1], []).append(place[other])
            means = {item: statistics.mean(near.get(item, [place[n, item]])) for item in found[n]}
            found[n].sort(key=lambda item: round(means[item], 6))
    return found


def places(lines: list[list[str]]) -> dict[tuple[int, str], float]:
    """(level, box or arrow) -> x, each row centred."""
    found = {}
    for n, row in enumerate(lines):
        widths = [0.3 if ".." in item else WIDTH for item in row]
        x = -(sum(widths) + GAP * (len(row) - 1)) / 2
        for item, width in zip(row, widths, strict=True):
            found[n, item] = x + width / 2
            x += width + GAP
    return found


def draw(graph: Imports, path: Path) -> None:
    """The picture, as SVG; each arrow's group has the id ``FROM..TO``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path as Line

    lines = rows(graph)
    at = places(lines)
    level = {item: n for n, row in enumerate(lines) for item in row}
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cute_attn", "font.family": "sans-serif"}):
        figure, axes = plt.subplots(figsize=(10.5, 0.78 * len(lines)), layout="constrained")
        for (n, box), x in at.items():
            if ".." in box:
                continue
            y = -STEP * n
            left, bottom = x - WIDTH / 2, y - HEIGHT / 2
            shape = "round,pad=0,rounding_size=0.08"
            axes.add_patch(
                FancyBboxPatch((left, bottom), WIDTH, HEIGHT, shape, facecolor="#eef3fa", edgecolor="#44607f")
            )
            axes.text(x, y + 0.1, box, ha="center", va="center", fontsize=10, weight="bold")
            axes.text(x, y - 0.13, CAPTIONS[box], ha="center", va="center", fontsize=7.5)
        for a, b in arrows(graph):
            passed = [(at[n, f"{a}..{b}"], n) for n in range(level[a] + 1, level[b])]
            x0, x1 = at[level[a], a], at[level[b], b]
            first, last = (passed or [(x1, 0)])[0][0], (passed or [(x0, 0)])[-1][0]
            points = [(x0 + near(x0, first), -STEP * level[a] - HEIGHT / 2)]
            points += [(x, -STEP * n + dy) for x, n in passed for dy in (HEIGHT / 2, -HEIGHT / 2)]
            points.append((x1 + near(x1, last), -STEP * level[b] + HEIGHT / 2))
            arrow = FancyArrowPatch(
                path=Line(points), arrowstyle="-|>", mutation_scale=9, color="#7a8793", lw=0.9
            )
            arrow.set_gid(f"{a}..{b}")
            axes.add_patch(arrow)
        axes.set_aspect("equal")
        axes.autoscale_view()
        axes.axis("off")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def near(x: float, other: float) -> float:
    """How far from a box's middle, at ``x``, an arrow from or to ``other`` meets it."""
    return max(-WIDTH / 2, min(WIDTH / 2, 0.15 * (other - x)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the file and draw the picture")
    text = json.dumps(imports(), indent=1) + "\n"
    if parser.parse_args().write:
        (ROOT / DATA).write_text(text)
        draw(imports(), ROOT / PICTURE)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
