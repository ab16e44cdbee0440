"""A process that builds kernels for :mod:`cute_attn.lab.builds` and ranks them by their code: lines of JSON in and out.

    {"traits": NAME, "tile": TEXT, "target": ..., "modules": {NAME: FILE}, "workloads": [{...}, ...]}
    {"seconds": ..., "error": TEXT or null, "spills_in_step": ..., "estimates": {WORKLOAD: ...}, "no_rank": TEXT}

A kernel requested without workloads is only needed to run others, and is not ranked. A backward's preprocess and
convert are built too. Ranks are computed here since reading the code takes half a second, which would delay the process
that times kernels.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from cute_attn.compiler import SpillWarning, compile, registry
from cute_attn.compiler.prebuild_worker import build, serve
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.rank import estimate
from cute_attn.lab.verdict import verdict


def main() -> None:
    warnings.simplefilter("ignore", SpillWarning)  # the answers have the spills
    serve(build_and_rank)


def build_and_rank(workloads: Sequence[dict[str, Any]], **request: Any) -> dict[str, Any]:
    """Answer one request; it is a request of ``prebuild_worker`` with ``workloads`` added."""
    answer = build(**request)
    if answer["error"] is not None or not workloads:
        return answer
    compiled = compile(request["traits"], request["tile"], request["target"])
    try:
        build_parts(compiled)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return answer | ranked(compiled, workloads)


def build_parts(compiled: Any) -> None:
    """Build the kernels that a backward launches in addition to its main kernel."""
    if compiled.traits.op != "backward":
        return
    from cute_attn.host.backward import kernels_of  # loads torch

    for traits, tile in kernels_of(registry.lookup(compiled.traits, compiled.tile, compiled.target))[1:]:
        compile(traits, tile, compiled.target)


def ranked(compiled: Any, workloads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A kernel's estimated clocks for each workload, and its spills; or why there is no estimate."""
    try:
        found = verdict(compiled)
        plain = [
            {n: tuple(x) if isinstance(x, list) else x for n, x in values.items()} for values in workloads
        ]
        shapes = [Workload(**values) for values in plain]  # type: ignore[arg-type]
        estimates = {shape.name: float(estimate(found, shape)) for shape in shapes}
    except Exception as error:  # the kernel can be timed all the same
        return {"spills_in_step": 0, "estimates": {}, "no_rank": f"{type(error).__name__}: {error}"}
    return {"spills_in_step": found.spills_in_step, "estimates": estimates, "no_rank": ""}


if __name__ == "__main__":
    main()
