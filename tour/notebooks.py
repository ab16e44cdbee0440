"""A notebook for each level, examples/tour/levelN.ipynb: its text, its file as a cell to change, and what that costs.

    python -m tour --page                                         write their cells, with docs/tour.md
    python -m tests.notebook examples/tour/level3.ipynb --write   run one and store its outputs; `make tour` does all

A cell that is as before keeps its outputs until then.
"""

import json
from pathlib import Path
from typing import Any

from tour.levels import LEVELS, Entry

ROOT = Path(__file__).parents[1]
FOLDER = Path("examples/tour")

TRIALS = {
    1: (
        "Instructions by kind. LDG reads a row of K, FFMA multiplies it, SHFL adds up the lanes' sums. There is no "
        "HMMA and no HGMMA: the tensor cores are idle.",
        "counts('LDG', 'FFMA', 'SHFL', 'MUFU', 'HMMA', 'HGMMA')",
    ),
    2: (
        "Loads, and products of the tensor cores. More keys per step cost as much per score: every warp still loads "
        "every operand.",
        "counts('LDG', 'HMMA')",
        "shown(*(verdict(NAME, tile, 'sm90') for tile in ('tile_n=16', 'tile_n=32')))",
    ),
    3: (
        "The same kernel without the swizzle, as another variant: the eight rows of an ldmatrix lie in the same banks.",
        "class Plain(Shared):\n"
        "    def smem_layout(self, rows):\n"
        "        return layouts.smem_layout(rows, self.traits.head_dim, BFloat16, swizzle_bits=0)\n"
        "\n\n"
        "register(Plain, variant='plain', arch='sm80')\n"
        "PLAIN = NAME.replace('tour3', 'plain')\n"
        "shown(verdict(NAME, target='sm90'), verdict(PLAIN, target='sm90'))",
        "pictures(NAME)['smem-k']",
    ),
    4: (
        "A function of a score between the two products makes another variant: tanh costs more instructions than all "
        "the rest. A third stage costs no instruction, only shared memory.",
        "def softcap(score, query, key, head):\n"
        "    return 30.0 * cute.math.tanh(score / 30.0)\n"
        "\n\n"
        "with_epilogue(Pipelined, softcap)\n"
        "CAPPED = NAME.replace('tour4', 'tour4_softcap')\n"
        "shown(verdict(NAME, target='sm90'), verdict(CAPPED, target='sm90'))",
        "shown(*(verdict(NAME, tile, 'sm90') for tile in ('num_stages=2', 'num_stages=3')))",
    ),
    5: (
        "Few instructions load and multiply. With more keys per step, Q in shared memory serves more scores; but the "
        "multiprocessor holds fewer CTAs.",
        "counts('LDGSTS', 'LDSM', 'UTMALDG', 'HGMMA')",
        "shown(*(verdict(NAME, tile, 'sm90') for tile in ('tile_n=64', 'tile_n=128')))",
    ),
    6: (
        "A consumer's step in the order of its machine code. SYNCS waits for K, 8 HGMMA compute S, 64 MUFU "
        "exponentiate, and 8 HGMMA add to O. Nothing overlaps within a warpgroup.",
        "order()",
        "shown(*(verdict(NAME, tile, 'sm90') for tile in ('tile_n=64', 'tile_n=128')))",
    ),
    7: (
        "A consumer's step in the order of its machine code. BAR waits for the turn. The products of two blocks are "
        "issued together, BAR gives the turn to the other warpgroup, and the exponentials follow.",
        "order()",
    ),
    8: (
        "The shipped kernel with and without speculation: frozen maxima leave fewer instructions per score.",
        "shown(*(verdict(NAME, tile, 'sm90') for tile in ('speculative=true', 'speculative=false')))",
    ),
    9: (
        "Additions to dQ are REDG in code for sm90. The shipped Ampere kernel has the same products for twice the "
        "keys, and loads the next block of queries meanwhile.",
        "counts('REDG', 'HMMA', 'LDSM', 'STS', 'LDGSTS')",
        "shown(verdict(NAME, target='sm90'), verdict('backward-sm80-bf16-d128-causal', target='sm90'))",
    ),
    10: (
        "TMA loads all operands. In the shipped kernel P stays in registers, and a producer warp loads the next block.",
        "counts('HGMMA', 'STSM', 'UTMALDG', 'REDG', 'LDG')",
        "shown(verdict(NAME, target='sm90'), verdict('backward-sm90-bf16-d128-causal', target='sm90'))",
    ),
}
"""Level -> suggestions, in words and as cells."""

_COUNTS = '''


def counts(*mnemonics):
    """How many of these instructions the machine code has."""
    found = compile(NAME, target="sm90").instructions
    return {name: found.get(name, 0) for name in mnemonics}
'''
_ORDER = '''


def order(shown=("HGMMA", "MUFU", "BAR", "SYNCS")):
    """Runs of these instructions in the steady step."""
    names = [i.opcode for i, _ in verdict(NAME, target="sm90").steady.instructions if i.opcode in shown]
    return ", ".join(f"{len([*run])} {name}" for name, run in itertools.groupby(names))
'''


def made(entry: Entry) -> dict[str, Any]:
    """A level's notebook, without outputs."""
    n, (words, *trials) = entry.number, TRIALS[entry.number]
    own = source_of(entry)
    kernel = (
        f"## The kernel\n\nThis cell is `tour/level{n}.py`. Change it, run it again, and read its verdict."
        if entry.variant
        else "## The kernel\n\n[docs/a_kernel.md](../../docs/a_kernel.md) walks through it."
    )
    cells = [
        ("markdown", f"# Level {n}: {entry.title}\n\n{entry.plain_text}"),
        ("code", _head(entry, "\n".join(trials))),
        ("markdown", kernel),
        ("code", own),
        ("code", 'verdict(NAME, target="sm90")'),
        ("markdown", f"## To try\n\n{words}"),
        *(("code", one.replace("'", '"')) for one in trials),
        ("markdown", "## Right, and how fast\n\nOn a GPU, against the definition in float64."),
        ("code", _check(entry)),
    ]
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [_cell(i, *one) for i, one in enumerate(cells)],
        "metadata": {"kernelspec": kernelspec, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def source_of(entry: Entry) -> str:
    """A level's file without its docstring."""
    text = Path(str(entry.module.__file__)).read_text()
    return text.removeprefix(f'"""{entry.module.__doc__}"""').strip()


def _head(entry: Entry, trials: str) -> str:
    """Imports, the kernel's name, and the functions that the suggestions call."""
    needs = {
        "import itertools": "order(" in trials,
        "import torch": True,
        "from cute_attn import compile": "counts(" in trials,
        "from cute_attn.lab.pictures import pictures": "pictures(" in trials,
        f"from cute_attn.lab.verdict import {'shown, ' * ('shown(' in trials)}verdict": True,
        "from tour.common import with_epilogue": "with_epilogue(" in trials,
        "from tour.levels import LEVELS": True,
        "from tour.report import check": True,
    }
    lines = [line for line, needed in needs.items() if needed]
    second = next(i for i, line in enumerate(lines) if "torch" in line)
    lines[second + 1 : second + 1] = [""]
    if second:
        lines.insert(second, "")
    name = f'\nNAME = "{entry.traits(128, causal=True)}"'
    helpers = _COUNTS * ("counts(" in trials) + _ORDER * ("order(" in trials)
    return "\n".join([*lines, name]) + helpers.rstrip("\n")


def _check(entry: Entry) -> str:
    return (
        f"found = [*check(LEVELS[{entry.number}])] if torch.cuda.is_available() else []\n"
        "wrong = [name for name, accuracy in found if not accuracy.passed]\n"
        'f"{len(found) - len(wrong)} of {len(found)} right" if found else "No GPU here: nothing was compared."'
    )


def _cell(number: int, kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def path_of(entry: Entry) -> Path:
    """Path of a level's notebook."""
    return ROOT / FOLDER / f"level{entry.number}.ipynb"


def write() -> None:
    """The notebooks' cells."""
    (ROOT / FOLDER).mkdir(exist_ok=True)
    for entry in LEVELS.values():
        path, new = path_of(entry), made(entry)
        old = json.loads(path.read_text())["cells"] if path.exists() else []
        kept = {"".join(cell["source"]): cell for cell in old}
        new["cells"] = [cell | kept.get("".join(cell["source"]), {}) for cell in new["cells"]]
        path.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")
