"""The page docs/tour.md: the levels' docstrings, what their machine code costs, and what they reach.

```sh
python -m tour --page      write docs/tour.json (built now), docs/tour.md and, of a measurement, docs/tour.png
```

Numbers of speed come from the newest ``bench/results/*-tour.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tour.levels import LEVELS, Entry
from tour.report import COUNTED, TIMED, all_facts, plot, speeds

ROOT = Path(__file__).parents[1]
PAGE, FACTS, PICTURE = Path("docs/tour.md"), Path("docs/tour.json"), Path("docs/tour.png")

INTRODUCTION = """# A tour: eight levels to the shipped kernel, and two of the backward

The tour leads from a warp that computes one query to the Hopper forward of this package; [two more
levels](#level-9) compute the backward. All levels compute bf16 attention, full and causal, for head dims 64 and 128,
grouped heads and any lengths, in tensors (batch, seqlen, heads, head_dim). Each level is one short file under `tour/`:
a complete kernel that a call can ask for. Its text says what the level before it wasted. A notebook of each level has
the kernel as a cell to change, and its outputs.

```sh
cute-attn tour                    # the levels
cute-attn tour 4                  # what one costs; with a GPU, check and time it
cute-attn tour --measure -o FILE  # levels 1 to 8 and the shipped kernel, on a GPU
cute-attn --load tour.levels verdict forward-sm90:tour5-bf16-d128-causal --lines
cute-attn --load tour.levels \\
    ab forward-sm90:tour6-bf16-d128 forward-sm90:tour7-bf16-d128
```

Levels 1 to 4 and 9 run on any GPU from Ampere on, the others on Hopper. In Python, after `import tour.levels`,
`attention(q, k, v, causal=True, kernel="sm90:tour5")` runs level 5. Level 9 runs by
`attention_backward(grad_out, q, k, v, out, lse, causal=True, kernel="sm80:tour9")`. `make tour` writes this page.
"""

CLOCKS = """Costs are of the causal kernel at head dim 128, built for sm90. Clocks are `verdict`'s lower bound for
1,000 scores, from the machine code of the loop over key blocks. Of one multiprocessor's pipes (tensor cores, special
functions, issue, and shared memory with L1) they are the clocks of the one that needs the most. The tensor cores need
at least 125, with wgmma. The difference between that bound and a measured time is waiting. Levels 6 to 8 start with 168
registers per thread. `setmaxnreg` then leaves 24 to the producer's warps and gives 240 to the consumers. Levels 9 and
10 compute five products for a score where a forward computes two. They are built, and checked on the CPU against the
layouts and products of the shipped kernels; no GPU has run them yet.
"""


def newest_result() -> dict[str, Any] | None:
    """The newest measurement, or None."""
    found = sorted((ROOT / "bench" / "results").glob("*-tour.json"))
    return json.loads(found[-1].read_text()) if found else None


def number(value: Any) -> str:
    """A cell of a table; a dash for nothing."""
    return "-" if value is None else f"{value:,}"


def summary(found: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    """A row for each level."""
    header = ["level", "", "registers", "shared memory", "CTAs", "clocks", "bound by"]
    header += ["full", "causal"] * bool(result)
    lines = [header, ["---", "---", *["---:"] * 4, "---", *["---:"] * (len(header) - 7)]]
    reached = speeds(result) if result else {}
    for n, entry in LEVELS.items():
        own = found["levels"][str(n)]
        clocks = own.get("clocks_per_step", {})
        cells = [
            f"[{n}](#level-{n})",
            entry.title,
            number(own["registers"]),
            number(own["shared_memory_bytes"]),
            number(own["ctas_per_multiprocessor"]),
            number(own.get("clocks_per_1000_scores")),
            max(clocks, key=lambda name: clocks[name]) if clocks else "-",
        ]
        if result:
            cells += [reached_text(reached.get(n, {}).get(which)) for which in ("full", "causal")]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def reached_text(row: Mapping[str, Any] | None) -> str:
    """TFLOP/s of a row, or that it failed."""
    if row is None:
        return "-"
    return f"{row['value']:.3g}" if "value" in row else "failed"


def section(entry: Entry, found: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    """A level's text, its instructions and its speed."""
    own = found["levels"][str(entry.number)]
    counts = ", ".join(f"{count} {name}" for name in COUNTED if (count := own["instructions"].get(name)))
    does = "has it as a cell to change" if entry.variant else "builds it with and without speculation"
    notebook = f"[a notebook](../examples/tour/level{entry.number}.ipynb) {does}"
    cost = f"`tour/level{entry.number}.py`, kernel `{entry.name}`; {notebook}. Its machine code has {counts}."
    if "instructions_per_score" in own:
        clocks = ", ".join(f"{name} {value:,}" for name, value in own["clocks_per_step"].items())
        cost += (
            f" A thread needs {own['instructions_per_score']} instructions per score; a step of the loop takes, in "
            f"clocks of a multiprocessor, at least: {clocks}."
        )
    if result and entry.op == "forward":
        rows = speeds(result)[entry.number]
        cost += (
            f" Measured: {reached_text(rows.get('full'))} TFLOP/s, causal {reached_text(rows.get('causal'))}."
        )
    text = entry.plain_text.replace("docs/a_kernel.md", "[docs/a_kernel.md](a_kernel.md)")
    if entry.number == 3:
        ways = found["bank_conflict_ways"]
        swizzled = "no bank conflicts" if ways["swizzled"] == 1 else f"{ways['swizzled']}-way bank conflicts"
        cost += (
            f" An ldmatrix of K has {swizzled}, without the swizzle {ways['plain']}-way ones:\n\n"
            "![Rows without a swizzle: eight rows of an ldmatrix in the same banks](layout.png)"
        )
    return f'<a id="level-{entry.number}"></a>\n\n## {entry.number}. {entry.title}\n\n{text}\n\n{cost}\n'


def page(found: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    """The page, of the facts in docs/tour.json and of a measurement or None."""
    if result:
        sizes = "{batch} sequences of {seqlen}, {nheads} heads, head dim {head_dim}".format(**TIMED)
        speed = (
            f"Speeds are TFLOP/s of one run on {result['gpu']} (driver {result['driver']}, torch {result['torch']}, "
            f"DSL {result['cutlass_dsl']}, commit {result['commit']}, {result['date'][:10]}): {sizes}.\n\n"
            f"![TFLOP/s of the eight levels]({PICTURE.name})\n"
        )
    else:
        speed = "Not measured yet: `python -m tour --measure` needs a GPU.\n"
    parts = [INTRODUCTION, summary(found, result) + "\n", CLOCKS, speed]
    return "\n".join([*parts, *(section(entry, found, result) for entry in LEVELS.values())])


def write() -> None:
    """The facts, the page and the picture."""
    found, result = all_facts(), newest_result()
    (ROOT / FACTS).write_text(json.dumps(found, indent=1) + "\n")
    (ROOT / PAGE).write_text(page(found, result))
    if result:
        plot(result, ROOT / PICTURE)
