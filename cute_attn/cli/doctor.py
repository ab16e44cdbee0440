"""The command ``cute-attn doctor``: the state of this machine, what works, and how to fix what does not."""

import platform
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

import cute_attn
from cute_attn import compiler
from cute_attn.cli.options import AsJson, answer, make_console, working
from cute_attn.compiler.bundle import find_bundle
from cute_attn.compiler.cache import default_cache, switched_off
from cute_attn.compiler.cubin import cuda_tool
from cute_attn.lab.tables import Table, counted, sized

# What loads torch or the DSL is imported inside the checks: one that is broken is a finding.

SMALL = "append-sm80-bf16-d64"  # builds in seconds
_REINSTALL = "pip install -e '.[lab]' -c constraints.txt, from the clone"


def examine(as_json: AsJson = False) -> None:
    """What this machine has and what works: GPU, versions, cache, drop-ins and a quick test, each with its fix."""
    here = f"{cute_attn.__version__} in {Path(cute_attn.__file__).parent}, Python {platform.python_version()}"
    findings: list[dict[str, Any]] = [{"what": "cute_attn", "found": here, "fix": "", "broken": False}]
    with working("looking") as say:
        for what, (check, fix) in CHECKS.items():
            say(what)
            try:
                (found, fix), broken = check(), False
            except Exception as error:  # the command looks for broken installations
                found, broken = str(error).strip().partition("\n")[0] or type(error).__name__, True
            findings.append({"what": what, "found": found, "fix": fix, "broken": broken})
    wrong = ", ".join(one["what"] for one in findings if one["broken"])
    table = Table(
        "", "found", "what to do", caption=f"[red]broken: {wrong}" if wrong else "Nothing is broken."
    )
    for one in findings:
        table.add_row(one["what"], f"[red]{one['found']}" if one["broken"] else one["found"], one["fix"])
    answer(as_json, findings, lambda: table, make_console().print)
    if wrong:
        raise typer.Exit(1)


# Each gives what was found and what may be done; it raises where something is broken.


def _compiler() -> tuple[str, str]:
    if not compiler.has_dsl() and find_bundle() is not None:
        return "not installed", f"to build kernels: {_REINSTALL}"
    versions = ", ".join(f"{name} {value}" for name, value in compiler.toolchain().items())
    return f"{versions}; {SMALL} has {compiler.compile(SMALL).resources.registers} registers", ""


def _gpu() -> tuple[str, str]:
    import torch  # its failure is a result

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    torchs = f"torch {torch.__version__}, for {built_for}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, of {compiler.default_target('sm80')}'s kernels; {torchs}", ""
    fix = "to run kernels: a GPU from Ampere on, torch for CUDA, and a driver for that CUDA"
    return f"none; {torchs}", fix


def _bundle() -> tuple[str, str]:
    bundle = find_bundle()
    if bundle is None and not compiler.has_dsl():
        raise RuntimeError("none, and no compiler: no call on a GPU can run")
    if bundle is None:
        return "none: kernels are built at their first call", "cute-attn bundle"
    targets = " and ".join(sorted({meta["target"] for meta in bundle.kernels.values()}))
    size = f"{counted(len(bundle.kernels), 'kernel')} for {targets}, {sized(bundle.size)} in {bundle.root}"
    return f"{size}, built for CUDA {bundle.toolchain['ptx_toolkit']}", ""


def _cache() -> tuple[str, str]:
    cache = default_cache()
    if cache is None:
        return f"off: {switched_off()}", "unset CUTE_ATTN_CACHE"
    cache.prepare()
    with tempfile.TemporaryFile(dir=cache.root):
        sizes = [one.size for one in cache.entries()]
    return f"{counted(len(sizes), 'kernel')}, {sized(sum(sizes))} in {cache.root}, writable", ""


def _doors() -> tuple[str, str]:
    there = [name for name in ("flash_attn", "transformers", "kernels") if find_spec(name) is not None]
    return ", ".join(
        there
    ) or "none of flash_attn, transformers and kernels", "docs/doors.md: how each runs these kernels"


def _attention() -> tuple[str, str]:
    import torch  # its failure is a result

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1, 130, 4, 64, dtype=torch.bfloat16, device=device)
    ours: Any = cute_attn.attention(x, x, x, causal=True)
    y = x.float().transpose(1, 2)
    torchs = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2)
    error = float((ours.float() - torchs).abs().max())
    if not error <= 0.05:
        raise RuntimeError(f"wrong: {error:.0e} from torch's")
    return f"right on {device}: {error:.0e} from torch's", ""


CHECKS = {
    "CUTLASS DSL": (_compiler, f"{_REINSTALL}, or a bundle of `cute-attn bundle`"),
    "nvdisasm": (lambda: (cuda_tool("nvdisasm"), ""), "for verdicts and SASS: nvidia-cuda-nvdisasm"),
    "GPU": (_gpu, "another GPU; calls stay PyTorch's here"),
    "bundle": (_bundle, "another bundle, or the compiler"),
    "cache": (_cache, "CUTE_ATTN_CACHE_DIR names a folder that can be written"),
    "libraries": (_doors, _REINSTALL),
    "attention": (_attention, _REINSTALL),
}
