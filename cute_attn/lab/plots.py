"""Plots of results, as SVG to put into a page: no script, no fonts or links from elsewhere."""

import io
import re
from collections.abc import Sequence
from typing import Any

from cute_attn.lab.race import Measured
from cute_attn.lab.study import Study

_COLORS = {"faster": "#1a7f37", "slower": "#cf222e", "same": "#57606a", "undecided": "#bf8700"}
_ID = re.compile(r'((?:\bid="|href="#|url\(#))')
_MOST_CANDIDATES = 40


def intervals(measured: Sequence[Measured], resolution: float) -> str:
    """The median gain of each workload with its interval; the band is what counts as none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.1 + 0.42 * len(measured)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-100 * resolution, 100 * resolution, color="#eaeef2")
    axes.axvline(0, color="#57606a", linewidth=0.8)
    for row, one in enumerate(measured):
        low, gain, high = (100 * (value - 1) for value in (one.low, one.ratio, one.high))
        bar = [[gain - low], [high - gain]] if one.interval.width < 10 else None
        axes.errorbar([gain], [row], xerr=bar, fmt="o", capsize=4, color=_COLORS[one.outcome])
    axes.set_yticks(range(len(measured)), [one.workload for one in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlabel("speed of a over b, % (median and 95% interval)")
    return svg(figure)


def gains(study: Study) -> str:
    """The gain of each timed candidate over the default tile, or without times its estimate; the best on top."""
    from matplotlib.figure import Figure

    timed = [one for one in study.candidates if one.gain is not None][:_MOST_CANDIDATES]
    ranked = [one for one in study.candidates if one.estimate is not None][:_MOST_CANDIDATES]
    shown = timed or ranked
    figure = Figure(figsize=(8, 1.1 + 0.26 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#57606a", linewidth=0.8)
    for row, one in enumerate(shown):
        if timed:
            gained = [100 * (gain - 1) for gain in one.gains.values()]
            axes.plot([min(gained), max(gained)], [row, row], color="#8c959f", linewidth=1)
            axes.plot(gained, [row] * len(gained), "o", color="#0969da", markersize=4)
        elif one.estimate is not None:
            axes.plot([100 * (1 / one.estimate - 1)], [row], "o", color="#0969da", markersize=4)
    axes.set_yticks(range(len(shown)), [one.change for one in shown], fontsize=8)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)
    what = "a point a workload" if timed else "by the static estimate"
    axes.set_xlabel(f"speed over the default tile, % ({what})")
    return svg(figure)


def svg(figure: Any) -> str:
    """A figure's SVG element."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return inline(file.getvalue(), "plot")


def inline(text: str, name: str) -> str:
    """An SVG file as an element of a page: without its head and metadata, with ids that begin with ``name``."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return _ID.sub(rf"\g<1>{name}-", text)
