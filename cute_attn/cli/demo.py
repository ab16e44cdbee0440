"""``make demo``: what this project does, in half a minute. Only the last step needs a GPU.

It runs the score tiles and epilogues of an Ampere and a Hopper kernel on the CPU, for every thread, and compares them
with torch; says what a kernel costs and what bounds it; draws it. With a GPU it checks kernels and times them.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from cute_attn.cli.main import app
from cute_attn.cli.options import make_console
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.lab.builds import build_at_once
from cute_attn.reference import emulate
from cute_attn.traits import Traits

FLAGSHIP = "forward-sm80-bf16-d64-causal"
LARGE = ("forward-sm80-bf16-d128-causal", "forward-sm90-bf16-d128-causal")
PICTURES = "build/pictures"
NEXT = (
    ("tour 3", "a lesson: shared memory, a swizzle, ldmatrix"),
    (f"verdict {FLAGSHIP} --tile tile_n=64 --tile tile_n=96", "two tiles"),
    ("list", "all kernels; `list --features` has the words of their names"),
)

console = make_console()


def heading(text: str) -> None:
    console.print(f"\n[bold]{text}", highlight=False)


def run(command: str, text: str) -> Iterator[str]:
    """Run a command below a line that says what it does; yields it if it fails."""
    heading(f"cute-attn {command}: {text}")
    if app(["--no-pager", *command.split()], standalone_mode=False):
        yield command


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    # Another process builds while this one computes.
    builds = threading.Thread(target=build_at_once, args=([(FLAGSHIP, None)], "sm90"))
    builds.start()
    wrong = list(epilogues_on_the_cpu())
    builds.join()
    wrong += run(f"verdict {FLAGSHIP} --target sm90", "what it costs")
    wrong += run(f"show {FLAGSHIP} --target sm90 -o {PICTURES}", "layouts, copies, MMAs")
    if torch.cuda.is_available():
        for name in LARGE if torch.cuda.get_device_capability() == (9, 0) else LARGE[:1]:
            wrong += run(f"check {name}", "against the definition")
            wrong += run(f"bench {name} --peers --seqlen 2048", "2,048 tokens")
    else:
        console.print("\nThere is no GPU: with one, kernels would now be compared with torch and timed.")
    console.print(f"[red]wrong: {', '.join(wrong)}" if wrong else "All agree.", end="")
    console.print(f" {time.perf_counter() - start:.0f} s", highlight=False)
    next_steps()
    if wrong:
        sys.exit(1)


def epilogues_on_the_cpu() -> Iterator[str]:
    """Compare the kernels' tiling and epilogues, for every thread, with formulas in torch; yields what differs."""
    heading(f"Score tiles of {len(registry.KERNELS)} kernels share epilogues. On this CPU, against torch:")
    scale = 128**-0.5
    products = torch.randn(2, 4, 150, 128) @ torch.randn(2, 4, 128, 200)
    for arch, features, inputs in (
        ("sm80", "causal", ScoreInputs()),
        ("sm90", "window", ScoreInputs(window_left=40, window_right=3)),
        ("sm80", "softcap", ScoreInputs(softcap=2.0)),
        ("sm90", "alibi", ScoreInputs(alibi_slopes=torch.rand(2, 4))),
    ):
        traits = Traits.parse(f"forward-{arch}-bf16-d128-{features}")
        ours = emulate.scores_on_host(registry.lookup(traits), products, scale, inputs)
        # In float64: torch's first float32 tanh of a process is at times off by 1e-4 on some of its threads.
        expected = emulate.scores_by_definition(traits, products.double(), scale, inputs).float()
        finite, what = expected.isfinite(), f"{arch} {features}"
        difference = float((ours - expected)[finite].abs().max())
        rounding = 16 * torch.finfo(expected.dtype).eps * float(expected[finite].abs().max())
        agrees = bool((ours.isfinite() == finite).all()) and difference <= rounding
        console.print(f"  {what:24} largest difference {difference:.1e}  {'ok' if agrees else '[red]wrong'}")
        if not agrees:
            yield what


def next_steps() -> None:
    """Print commands to try next, in the form that works with this process's Python."""
    installed = Path(sys.executable).with_name("cute-attn").exists()
    command = "cute-attn" if installed else "python -m cute_attn"
    console.print("\n[bold]Next:")
    if installed and sys.prefix != sys.base_prefix and os.environ.get("VIRTUAL_ENV") != sys.prefix:
        console.print(f"  source {os.path.relpath(sys.prefix)}/bin/activate", highlight=False)
    for rest, what in NEXT:
        console.print(f"  {command} {rest}  [dim]# {what}", highlight=False, soft_wrap=True)
    console.print("  README.md, Read on: the pages of docs", highlight=False)


if __name__ == "__main__":
    main()
