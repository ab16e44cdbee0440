"""The command ``cute-attn doctor``: what this machine has, what works, and how to mend what does not."""

import importlib.metadata
import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from cute_attn.cli.options import AsJson, counted, make_console, working
from cute_attn.lab.tables import Table

# Modules that load torch or the DSL are imported inside the checks: one that is broken is a finding.

SMALL = "append-sm80-bf16-d64"
"""A kernel that builds in seconds."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        what: was checked.
        found: it.
        fix: what mends it; "" where nothing is broken.
        broken: whether the package does not work without that.
    """

    what: str
    found: str
    fix: str = ""
    broken: bool = False


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(examine)


def examine(as_json: AsJson = False) -> None:
    """What this machine has and what works: GPU, versions, cache, drop-ins and a quick test, each with its fix."""
    findings: list[Finding] = []
    with working("looking") as say:
        for check in CHECKS:
            say(str(check.__doc__))
            try:
                findings += check()
            except Exception as error:  # a broken installation is what is looked for
                text = str(error).strip().splitlines() or [type(error).__name__]
                findings.append(Finding(check.__name__.strip("_"), text[0], _reinstall(), broken=True))
    if as_json:
        print(json.dumps([asdict(one) for one in findings], indent=1))
    else:
        table = Table("", "found", "what to do")
        for one in findings:
            table.add_row(one.what, f"[red]{one.found}" if one.broken else one.found, one.fix)
        console = make_console()
        console.print(table)
        broken = [one.what for one in findings if one.broken]
        console.print(f"[red]broken: {', '.join(broken)}" if broken else "Nothing is broken.")
    if any(one.broken for one in findings):
        raise typer.Exit(1)


def _reinstall() -> str:
    return "pip install -e '.[lab]' -c constraints.txt, from the clone"


def _python() -> Iterator[Finding]:
    """Python and the package"""
    import cute_attn

    yield Finding("cute_attn", f"{cute_attn.__version__} in {Path(cute_attn.__file__).parent}")
    system = f"{platform.system()} {platform.machine()}"
    fix = "" if sys.platform == "linux" else "use Linux, or its subsystem on Windows"
    yield Finding("system", f"Python {platform.python_version()}, {system}", fix, broken=bool(fix))


def _versions() -> Iterator[Finding]:
    """the compiler and torch"""
    from cute_attn import _without_dsl
    from cute_attn.compiler import toolchain
    from cute_attn.compiler.bundle import find_bundle
    from cute_attn.compiler.cubin import cuda_tool

    if _without_dsl.is_installed():
        versions = toolchain()
        found = f"{versions['cutlass_dsl']}, tvm-ffi {versions['tvm_ffi']}"
        yield Finding("CUTLASS DSL", f"{found}, its compiler is CUDA {versions['ptx_toolkit']}")
    else:
        bundled = find_bundle() is not None
        fix = "to build kernels: " if bundled else "a bundle of `cute-attn bundle`, or "
        yield Finding("CUTLASS DSL", "not installed", f"{fix}{_reinstall()}", broken=not bundled)
    import torch

    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    yield Finding("torch", f"{torch.__version__}, {cuda}")
    try:
        yield Finding("nvdisasm", cuda_tool("nvdisasm"))
    except FileNotFoundError:
        yield Finding("nvdisasm", "not installed: no verdict, no SASS", "pip install nvidia-cuda-nvdisasm")


def _gpu() -> Iterator[Finding]:
    """the GPU and its driver"""
    import torch

    from cute_attn.compiler import default_target

    if not torch.cuda.is_available():
        fix = "for more than builds, verdicts and CPU tests: a GPU of compute capability 8.0 to 9.0"
        if torch.version.cuda is None:
            fix += ", and a torch built for CUDA"
        elif Path("/dev/nvidiactl").exists():
            fix = f"there is one, which torch for CUDA {torch.version.cuda} cannot use: its driver may be too old"
        yield Finding("GPU", "none", fix)
        return
    from cute_attn.lab.benchmark.timing import query_gpu

    name, driver = torch.cuda.get_device_name(), query_gpu("driver_version") or "unknown"
    try:
        yield Finding("GPU", f"{name}, driver {driver}, kernels are built for {default_target('sm80')}")
    except ValueError as error:
        yield Finding("GPU", f"{name}: {error}", "another GPU; calls stay PyTorch's here")


def _bundle() -> Iterator[Finding]:
    """the bundle of compiled kernels"""
    from cute_attn.compiler.bundle import VARIABLE, BundleUnusable, find_bundle

    try:
        bundle = find_bundle()
    except BundleUnusable as reason:
        yield Finding("bundle", str(reason), f"another bundle, or {VARIABLE}=0", broken=True)
        return
    if bundle is None:
        yield Finding(
            "bundle", "none: kernels are built at their first call", f"cute-attn bundle, {VARIABLE}"
        )
        return
    targets = " and ".join(sorted({meta["target"] for meta in bundle.kernels.values()}))
    yield Finding(
        "bundle",
        f"{counted(len(bundle.kernels), 'kernel')} for {targets}, {bundle.size / 1e6:.1f} MB in {bundle.root}, "
        f"built by CUTLASS DSL {bundle.toolchain['cutlass_dsl']} of CUDA {bundle.toolchain['ptx_toolkit']}",
    )


def _cache() -> Iterator[Finding]:
    """the cache of compiled kernels"""
    from cute_attn.compiler.cache import CacheUnusable, default_cache, switched_off

    fix = "CUTE_ATTN_CACHE_DIR names a folder that can be written; without one every process builds its kernels anew"
    try:
        cache = default_cache()
        if cache is None:
            yield Finding("cache", f"off: {switched_off()}", "unset CUTE_ATTN_CACHE")
            return
        cache.prepare()
        with tempfile.TemporaryFile(dir=cache.root):
            entries = cache.entries()
    except (CacheUnusable, OSError) as error:
        yield Finding("cache", f"cannot be written: {error}", fix)
        return
    size = sum(one.size for one in entries) / 1e6
    yield Finding(
        "cache", f"{counted(len(entries), 'kernel')}, {size:.0f} MB in {cache.root}, which can be written"
    )


def _doors() -> Iterator[Finding]:
    """the drop-ins"""
    from cute_attn import flex, sdpa

    doors = (
        ("scaled_dot_product_attention", "sdpa", sdpa.overrides.serving()),
        ("flex_attention", "flex", flex.overrides.serving()),
    )
    for name, module, activation in doors:
        found = "PyTorch's own" if activation is None else "served by cute_attn"
        fix = f"cute_attn.{module}.activate(), or cute-attn run PROGRAM" if activation is None else ""
        yield Finding(name, found, fix)
    for name, door in (
        ("flash_attn", "cute_attn.flash_attn.install() before it is imported"),
        ("flash_attn_interface", "the same: FlashAttention-3"),
        ("transformers", 'cute_attn.transformers.register(), then attn_implementation="cute_attn"'),
        ("kernels", "cute-attn hub FOLDER"),
    ):
        there = importlib.util.find_spec(name) is not None
        found = f"{_version(name)} is installed" if there else "not installed"
        yield Finding(name, found, door if there == (name in ("transformers", "kernels")) else "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "one"


def _self_test() -> Iterator[Finding]:
    """a quick test: attention, a build, and on a GPU a kernel"""
    import torch

    import cute_attn
    from cute_attn import _without_dsl

    q, k, v = (torch.randn(1, 70, heads, 32) for heads in (4, 2, 2))
    ours: Any = cute_attn.attention(q, k, v, causal=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    error = float((ours - torchs.transpose(1, 2)).abs().max())
    yield _within("attention on the CPU", error, 1e-5)
    if _without_dsl.is_installed():
        built = cute_attn.compile(SMALL)
        how = "from the cache" if built.from_cache else f"in {built.seconds:.1f} s"
        yield Finding("a kernel", f"{SMALL} built {how}: {built.resources.registers} registers")
    if torch.cuda.is_available():
        x = torch.randn(1, 130, 4, 64, dtype=torch.bfloat16, device="cuda")
        got: Any = cute_attn.attention(x, x, x, causal=True)
        expected: Any = cute_attn.attention(*(x.cpu().float(),) * 3, causal=True)
        yield _within("attention on the GPU", float((got.cpu().float() - expected).abs().max()), 0.05)


def _within(what: str, error: float, most: float) -> Finding:
    if error <= most:
        return Finding(what, f"right: {error:.0e} from torch's")
    return Finding(what, f"wrong: {error:.0e} from torch's", _reinstall(), broken=True)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _versions,
    _gpu,
    _bundle,
    _cache,
    _doors,
    _self_test,
)
