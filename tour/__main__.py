"""Eight levels from a scalar loop to the shipped Hopper forward, and two of the backward.

cute-attn tour                       the levels; also: python -m tour
cute-attn tour 4                     build level 4 and print what it costs; with a GPU, check it and time it
cute-attn tour 4 --check             only check it, on a GPU
cute-attn tour --measure -o FILE     check and time levels 1 to 8 in one run, on a GPU
cute-attn tour --page                write docs/tour.md and the notebooks' cells again, in a clone; or: make tour
"""

import argparse
import ast
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tour import name_of

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="cute-attn tour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("level", nargs="?", type=int, choices=range(1, 11), help="1 to 10")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--full", action="store_true", help="without the causal mask of the page's figures")
    parser.add_argument("--check", action="store_true", help="only check it, on a GPU")
    parser.add_argument("--measure", action="store_true", help="check and time levels 1 to 8, on a GPU")
    parser.add_argument("--page", action="store_true", help="write docs/tour.md and examples/tour again")
    parser.add_argument(
        "-o", "--output", type=Path, help="of --measure; else bench/results/DATE-GPU-tour.json"
    )
    options = parser.parse_args()
    if options.level is None and not (options.check or options.measure or options.page):
        print(*titles(), sep="\n")
        return

    import torch

    if (options.check or options.measure) and not torch.cuda.is_available():
        parser.exit(2, "error: there is no GPU; checking and timing a level need one\n")
    if options.check and options.level is None:
        sys.exit("--check without a level; accepted: cute-attn tour 1 --check, up to 10")
    if options.page:
        from tour import notebooks, page

        page.write()
        notebooks.write()
        print(f"wrote {page.PAGE} and {notebooks.FOLDER}")
    elif options.measure:
        measure(options.output)
    elif options.check:
        check(options.level)
    else:
        show(options.level, options.head_dim, not options.full)


def titles() -> Iterator[str]:
    """A line for each level, read from its file: importing it loads the compiler."""
    for number in range(1, 11):
        source = ast.parse(Path(__file__).with_name(f"level{number}.py").read_text())
        first = (ast.get_docstring(source) or "").splitlines()[0]
        yield f"{number:<3} {first.partition(': ')[2].rstrip('.'):60} {name_of(number)}"


def show(level: int, head_dim: int, causal: bool) -> None:
    """Print a level's cost; on a GPU also whether it is right, and its speed."""
    import torch

    from tour.levels import LEVELS
    from tour.report import facts, time_one

    entry = LEVELS[level]
    print(f"level {level}: {entry.title}\n\n{folded(entry.plain_text)}\n")
    for name, value in facts(entry, head_dim, causal).items():
        if value != []:
            line = f"{name.replace('_', ' '):26} {_shown(value)}"
            print(textwrap.fill(line, width(), subsequent_indent=27 * " ", drop_whitespace=True))
    if not torch.cuda.is_available():
        print("\nNo GPU here: with one, it would now be checked and timed.")
        return
    check(level)
    if entry.op == "forward":
        print(time_one(entry, head_dim, causal))


def folded(text: str) -> str:
    """A level's text in the terminal's width; indented lines stay as they are."""
    parts = (part if part.startswith(" ") else textwrap.fill(part, width()) for part in text.split("\n\n"))
    return "\n\n".join(parts)


def width() -> int:
    """Columns of the terminal, 120 at most and where there is none."""
    return min(shutil.get_terminal_size((120, 24)).columns, 120)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(count)}" for name, count in value.items() if count)
    return f"{value:,}" if isinstance(value, int) else str(value)


def check(level: int) -> None:
    """Compare a level with the definition; the exit status is 1 where it is wrong."""
    from tour.levels import LEVELS
    from tour.report import check as compare

    results = list(compare(LEVELS[level]))
    wrong = [(name, accuracy) for name, accuracy in results if not accuracy.passed]
    for name, accuracy in wrong:
        print(f"{name}: error {accuracy.error:.2e}, allowed {accuracy.allowed:.2e}")
    if wrong:
        sys.exit(f"wrong in {len(wrong)} of {len(results)} comparisons, first {wrong[0][0]}")
    print(f"right in {len(results)} comparisons")


def measure(output: Path | None) -> None:
    """Check and time all levels; write the result, print the table and draw a chart next to the result."""
    from cute_attn.lab.benchmark.results import default_path, write
    from tour.report import measure as run
    from tour.report import plot, table

    result = run()
    path = write(result, output or default_path(ROOT / "bench" / "results", "tour", result))
    print(table(result))
    print(f"{result['gpu']}; wrote {path}")
    print(f"wrote {plot(result, path.with_suffix('.png'))}")


if __name__ == "__main__":
    main()
