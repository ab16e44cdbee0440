"""Draws panels of coloured, labelled cells with matplotlib. Lengths are in inches."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".png", ".svg")
INK, FAINT, RULE = "#1f2933", "#6b7785", "#39434f"
# One hue for each warp; lanes are tints of it.
WARP_HUES = (
    *("#3f7cc4", "#ee8a2c", "#4aa564", "#a06cc0", "#2fa7b5", "#d9534f"),
    *("#c9a21d", "#8c6d5a", "#6f7fe0", "#d46fa5", "#7f9a3c", "#7d8794"),
)
# One hue for each 16 bytes of banks.
BANK_HUES = ("#3f7cc4", "#2fa7b5", "#4aa564", "#a5b83a", "#eec03b", "#ee8a2c", "#d9534f", "#a06cc0")
_MARGIN = 0.3
_TICKS_LEFT, _TICKS_TOP = 0.46, 0.2
_TITLE = 0.3
_GAP = 0.35
_LINE = 0.19
_LEAST_WIDTH = 6.0
_FONT = 6.6

Color = tuple[float, float, float]


@dataclass(frozen=True)
class Cell:
    """A rectangle in grid units of a panel, with up to two lines of text."""

    row: int
    col: int
    height: int
    width: int
    color: Color
    label: str


@dataclass(frozen=True)
class Panel:
    """A grid of cells. ticks: cells between numbers on each axis; rules: cells between heavier lines."""

    title: str
    cells: Sequence[Cell]
    shape: tuple[int, int]
    unit: tuple[float, float]
    axes: tuple[str, str]
    ticks: tuple[int, int]
    rules: tuple[int, int]

    @property
    def height(self) -> float:
        return self.shape[0] * self.unit[0] + _TICKS_TOP + _TITLE

    @property
    def width(self) -> float:
        return max(self.shape[1] * self.unit[1], 0.087 * len(self.title)) + _TICKS_LEFT


@dataclass(frozen=True)
class Legend:
    """Named strips of colours; ``lines`` of text below the title, ``notes`` below the strips."""

    strips: Sequence[tuple[str, Sequence[Color]]]
    notes: Sequence[str] = ()
    lines: Sequence[str] = ()


def tint(color: str, strength: float) -> Color:
    """A colour mixed with white; strength 1 is the colour itself."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (1 - strength * (1 - channel) for channel in channels)
    return red, green, blue


@dataclass(frozen=True, repr=False)
class Picture:
    """A grid of panels with a title; the legend is below, or in the top left corner if the grid has no panel there.

    Notebooks display a picture as SVG.
    """

    grid: Sequence[Sequence[Panel | None]]
    title: str
    legend: Legend

    def save(self, path: str | Path) -> Path:
        """Write the file and return its path.

        Raises ValueError unless the path ends in .png or .svg, ImportError without matplotlib.
        """
        path = Path(path)
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"path={str(path)!r}: accepted suffixes are {', '.join(SUFFIXES)}")
        _draw(self, path, path.suffix[1:].lower())
        return path

    def _repr_svg_(self) -> str:
        out = io.StringIO()
        _draw(self, out, "svg")
        return out.getvalue()

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"


def _draw(picture: Picture, to: Path | IO[str], kind: str) -> None:
    """Draw the picture with matplotlib, as ``"png"`` or ``"svg"``."""
    try:
        from matplotlib import collections, figure, patches, rc_context  # an extra's
    except ImportError as error:
        raise ImportError("pictures need matplotlib; pip install matplotlib") from error

    grid, legend = picture.grid, picture.legend
    heights = [max(panel.height for panel in row if panel) for row in grid]
    widths = [max(panel.width for row in grid if (panel := row[i])) for i in range(len(grid[0]))]
    width = max(sum(widths) + _GAP * (len(widths) - 1), _LEAST_WIDTH)
    head = 0.36 + _LINE * len(legend.lines)
    corner = grid[0][0] is None
    top = _MARGIN + (0 if corner else head)
    legend_top = _MARGIN + head + 0.2 if corner else top + sum(heights) + _GAP * len(heights)
    places = _place_strips(legend.strips, _MARGIN, legend_top, widths[0] if corner else width)
    notes_top = max((y for _, y in places), default=legend_top) + 0.3
    bottom = top + sum(heights) + _GAP * (len(heights) - 1)
    total = (width + 2 * _MARGIN, max(bottom, notes_top + _LINE * (len(legend.notes) - 1) + 0.05) + _MARGIN)

    with rc_context({"svg.fonttype": "none", "font.family": "DejaVu Sans", "svg.hashsalt": "layouts"}):
        drawn = figure.Figure(figsize=total, facecolor="white")
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, total[0])
        axes.set_ylim(total[1], 0)
        axes.axis("off")
        axes.text(
            _MARGIN, _MARGIN + 0.12, picture.title, fontsize=13, fontweight="bold", color=INK, va="center"
        )
        _draw_lines(axes, legend.lines, _MARGIN + 0.4)
        for row, row_height in zip(grid, heights, strict=True):
            left = _MARGIN
            for panel, panel_width in zip(row, widths, strict=True):
                if panel:
                    _draw_panel(axes, collections, panel, left, top + row_height - panel.height)
                left += panel_width + _GAP
            top += row_height + _GAP
        _draw_strips(axes, patches, legend.strips, places)
        _draw_lines(axes, legend.notes, notes_top)
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        drawn.savefig(to, format=kind, dpi=160, metadata=metadata)


def _draw_panel(axes: Any, collections: Any, panel: Panel, left: float, top: float) -> None:
    unit_h, unit_w = panel.unit
    rows, cols = panel.shape
    axes.text(
        left + _TICKS_LEFT, top + 0.1, panel.title, fontsize=9, fontweight="bold", color=INK, va="center"
    )
    left, top = left + _TICKS_LEFT, top + _TITLE + _TICKS_TOP
    corners = []
    for cell in panel.cells:
        x, y = left + cell.col * unit_w, top + cell.row * unit_h
        w, h = cell.width * unit_w, cell.height * unit_h
        corners.append([(x, y), (x + w, y), (x + w, y + h), (x, y + h)])
        if cell.label:
            style = {"fontsize": _fit(cell.label, w, h), "color": INK, "linespacing": 1.05}
            axes.text(x + w / 2, y + h / 2, cell.label, ha="center", va="center", **style)
    colors = [cell.color for cell in panel.cells]
    axes.add_collection(
        collections.PolyCollection(corners, facecolors=colors, edgecolors="white", linewidths=0.6)
    )

    right, bottom = left + cols * unit_w, top + rows * unit_h
    ys = [top + i * unit_h for i in (*range(0, rows, panel.rules[0]), rows)]
    xs = [left + i * unit_w for i in (*range(0, cols, panel.rules[1]), cols)]
    lines = [[(left, y), (right, y)] for y in ys] + [[(x, top), (x, bottom)] for x in xs]
    axes.add_collection(collections.LineCollection(lines, colors=RULE, linewidths=0.9))

    style = {"fontsize": 6.4, "color": FAINT}
    for i in range(0, rows, panel.ticks[0]):
        axes.text(left - 0.05, top + (i + 0.5) * unit_h, str(i), ha="right", va="center", **style)
    for i in range(0, cols, panel.ticks[1]):
        at = left + i * unit_w + min(unit_w / 2, 0.06)
        axes.text(at, top - 0.06, str(i), ha="center", va="center", **style)
    style["fontsize"] = 7.4
    axes.text(left - 0.36, (top + bottom) / 2, panel.axes[0], rotation=90, ha="center", va="center", **style)
    axes.text((left + right) / 2, top - 0.2, panel.axes[1], ha="center", va="center", **style)


def _fit(label: str, width: float, height: float) -> float:
    """The font size at which a label fits its cell."""
    lines = label.split("\n")
    # A DejaVu Sans character is about 0.62 of the size wide, a line 1.25 of it high; 72 points an inch.
    by_width = 72 * 0.92 * width / (0.62 * max(map(len, lines)))
    by_height = 72 * 0.92 * height / (1.25 * len(lines))
    return min(_FONT, by_width, by_height)


def _bar(colors: Sequence[Color]) -> float:
    return 0.22 if len(colors) == 1 else 0.7


def _place_strips(
    strips: Sequence[tuple[str, Sequence[Color]]], left: float, top: float, width: float
) -> list[tuple[float, float]]:
    """The positions of a legend's strips, in as many columns of equal width as fit."""
    step = max(_bar(colors) + 0.2 + 0.066 * len(name) for name, colors in strips)
    columns = max(1, min(len(strips), int((width + 0.15) / step)))
    return [(left + step * (i % columns), top + 0.26 * (i // columns)) for i in range(len(strips))]


def _draw_strips(
    axes: Any, patches: Any, strips: Sequence[tuple[str, Sequence[Color]]], places: list[tuple[float, float]]
) -> None:
    for (name, colors), (left, top) in zip(strips, places, strict=True):
        step = _bar(colors) / len(colors)
        for i, color in enumerate(colors):
            axes.add_patch(
                patches.Rectangle((left + step * i, top - 0.08), step + 0.005, 0.16, color=color, lw=0)
            )
        axes.text(left + _bar(colors) + 0.07, top, name, fontsize=8, color=INK, va="center")


def _draw_lines(axes: Any, lines: Sequence[str], top: float) -> None:
    for i, line in enumerate(lines):
        axes.text(_MARGIN, top + _LINE * i, line, fontsize=8, color=FAINT, va="center")
