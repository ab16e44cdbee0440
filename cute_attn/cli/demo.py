"""``make demo``: what this project does, in half a minute; all but the last step without a GPU.

The score tiles and epilogues of an Ampere and a Hopper kernel, run on the CPU for every thread and compared with torch;
what both kernels cost, and what bounds them; pictures. With a GPU: `cute-attn check` and `bench --peers` of both.
"""

import sys
import threading
import time
from pathlib import Path

import torch

from cute_attn import reference
from cute_attn.cli.main import bench_kernel, check_kernel
from cute_attn.cli.options import make_console, working
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.lab.builds import build_at_once
from cute_attn.lab.pictures import pictures
from cute_attn.lab.verdict import shown, verdict
from cute_attn.reference import emulate
from cute_attn.traits import Traits

FLAGSHIP = "forward-sm80-bf16-d64-causal"
HOPPER = "forward-sm90-bf16-d64-causal"
LARGE = ("forward-sm80-bf16-d128-causal", "forward-sm90-bf16-d128-causal")
PICTURES = Path("build/pictures")

console = make_console()


def heading(text: str) -> None:
    console.print(f"\n[bold]{text}", highlight=False)


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    # Two processes build while this one computes.
    builds = threading.Thread(target=build_at_once, args=([(FLAGSHIP, None), (HOPPER, None)], "sm90"))
    builds.start()
    wrong = epilogues_on_the_cpu()
    heading("What it costs as an Ampere and as a Hopper kernel, and what bounds it: `cute-attn verdict`")
    with working("building both kernels"):
        builds.join()
        costs = [verdict(name, target="sm90") for name in (FLAGSHIP, HOPPER)]
    console.print(shown(*costs))
    heading(f"Layouts, copies and matrix products of {HOPPER}: `cute-attn show`")
    with working("drawing"):
        drawn = list(pictures(HOPPER).save(PICTURES))
    console.print(f"  {len(drawn)} pictures in {PICTURES}, such as {drawn[0].name}", highlight=False)
    if torch.cuda.is_available():
        for name in LARGE if torch.cuda.get_device_capability() == (9, 0) else LARGE[:1]:
            check_kernel(name)
            bench_kernel(name, peers=True)
    else:
        console.print("\nNo GPU here: with one, kernels would now be compared with torch and timed.")
    console.print(f"{'[red]' + wrong if wrong else 'All agree.'} {time.perf_counter() - start:.0f} s")
    if wrong:
        sys.exit(1)


def epilogues_on_the_cpu() -> str:
    """The kernels' MMA tiling and epilogues, for every thread, against the same formulas in torch; returns errors."""
    heading(f"Score tiles of {len(registry.KERNELS)} kernels share epilogues. On this CPU, against torch:")
    scale, shape = 128**-0.5, (2, 4, 150, 200)
    products = torch.randn(2, 4, 150, 128) @ torch.randn(2, 4, 128, 200)
    wrong = ""
    for arch, features, inputs in (
        ("sm80", "causal", ScoreInputs()),
        ("sm90", "window", ScoreInputs(window_left=40, window_right=3)),
        ("sm80", "softcap", ScoreInputs(softcap=2.0)),
        ("sm90", "alibi", ScoreInputs(alibi_slopes=torch.rand(2, 4))),
    ):
        traits = Traits.parse(f"forward-{arch}-bf16-d128-{features}")
        ours = emulate.scores_on_host(registry.lookup(traits), products, scale, inputs)
        # In float64: torch's first float32 tanh of a process is at times off by 1e-4 on some of its threads.
        coords, raw = emulate.all_coords(traits, shape), products.double() * scale
        expected = reference.modify_scores(raw, coords, reference.Features(traits.mask), inputs).float()
        finite, what = expected.isfinite(), f"{arch} {features}"
        difference = float((ours - expected)[finite].abs().max())
        rounding = 16 * torch.finfo(expected.dtype).eps * float(expected[finite].abs().max())
        agrees = bool((ours.isfinite() == finite).all()) and difference <= rounding
        console.print(f"  {what:24} largest difference {difference:.1e}  {'ok' if agrees else '[red]wrong'}")
        wrong += "" if agrees else f"{what} is wrong. "
    return wrong


if __name__ == "__main__":
    main()
