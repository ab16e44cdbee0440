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

from cute_attn.cli.options import make_console, working
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.lab.builds import build_at_once
from cute_attn.lab.pictures import pictures
from cute_attn.lab.verdict import shown, verdict
from cute_attn.reference import emulate
from cute_attn.traits import Traits

FLAGSHIP = "forward-sm80-bf16-d64-causal"
LARGE = ("forward-sm80-bf16-d128-causal", "forward-sm90-bf16-d128-causal")
PICTURES = Path("build/pictures")
NEXT = (
    ("tour 3", "a lesson: shared memory, a swizzle, ldmatrix"),
    (f"verdict {FLAGSHIP} --tile tile_n=64 --tile tile_n=96", "two tiles"),
    ("list", "all kernels; `list --features` has the words of their names"),
)

console = make_console()


def heading(command: str, text: str) -> None:
    """Print what the next step does, after the command that does it, if there is one."""
    console.print(f"\n[bold]{f'cute-attn {command}: ' if command else ''}{text}", highlight=False)


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    # Another process builds while this one computes.
    builds = threading.Thread(target=build_at_once, args=([(FLAGSHIP, None)], "sm90"))
    builds.start()
    wrong = list(epilogues_on_the_cpu())
    heading(f"verdict {FLAGSHIP} --target sm90", "what it costs")
    with working("building the kernel"):
        builds.join()
        cost = verdict(FLAGSHIP, target="sm90")
    console.print(shown(cost))
    heading(f"show {FLAGSHIP}", "layouts, copies, MMAs")
    with working("drawing"):
        drawn = list(pictures(FLAGSHIP, target="sm90").save(PICTURES))
    console.print(f"  {len(drawn)} pictures in {PICTURES}, such as {drawn[0].name}", highlight=False)
    if torch.cuda.is_available():
        wrong += on_the_gpu()
    else:
        console.print("\nThere is no GPU: with one, kernels would now be compared with torch and timed.")
    console.print(f"[red]wrong: {', '.join(wrong)}" if wrong else "All agree.", end="")
    console.print(f" {time.perf_counter() - start:.0f} s", highlight=False)
    next_steps()
    if wrong:
        sys.exit(1)


def epilogues_on_the_cpu() -> Iterator[str]:
    """Compare the kernels' tiling and epilogues, for every thread, with formulas in torch; yields what differs."""
    heading(
        "", f"Score tiles of {len(registry.KERNELS)} kernels share epilogues. On this CPU, against torch:"
    )
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


def on_the_gpu() -> Iterator[str]:
    """Compare kernels with the reference, and time them and the peers that run here; yields the wrong kernels."""
    from cute_attn.lab.benchmark import peers, results, workload
    from cute_attn.lab.check import check_workloads, small_workloads

    names = LARGE if torch.cuda.get_device_capability() == (9, 0) else LARGE[:1]
    heading("check NAME and cute-attn bench NAME --peers", "against the definition, and 2,048 tokens")
    for name in names:
        traits = Traits.parse(name)
        found = list(check_workloads(traits, small_workloads(traits)))
        failed = sum(not accuracy.passed for _, accuracy in found)
        rows = results.time_workloads(
            [workload.of_traits(traits, 2048)], {traits.arch: peers.ours(traits.arch)} | peers.PEERS
        )["rows"]
        speeds = ", ".join(f"{row['impl']} {row['value']:.0f}" for row in rows if "value" in row)
        console.print(
            f"  {name}: {len(found) - failed} of {len(found)} right; TFLOP/s: {speeds}", highlight=False
        )
        yield from [name] * bool(failed)


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
