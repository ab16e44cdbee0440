"""Kernels for programs in C and C++: objects, a header, the DSL's small runtime, and a CMake file to link them.

Each kernel is one function with TVM FFI's calling convention, ``TVMFFISafeCallType`` in ``tvm/ffi/c_api.h``. The header
states each kernel's name, tile and arguments.
"""

import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from cute_attn.compiler import compiled
from cute_attn.compiler.cache import OBJECT, needed_cache
from cute_attn.compiler.compiled import CompiledKernel, Request, default_target, prebuild
from cute_attn.lab import bundles
from cute_attn.lab.tables import template
from cute_attn.traits import Traits

HEADER, LISTS = "cute_attn_kernels.h", "CMakeLists.txt"


def export(requests: Iterable[Request], folder: Path, workers: int | None = None) -> list[CompiledKernel]:
    """Build kernels in parallel processes, and write them, a header and CMake files to ``folder``; returns them."""
    wanted = bundles.check_requests(requests)
    names = [macro_name(traits, target or default_target(traits.arch)) for traits, _, target in wanted]
    for (traits, _, _), name in zip(wanted, names, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"{traits} is exported more than once; accepted: one tile of a name and target")
    cache = needed_cache("exporting needs")
    with bundles.without_bundle():
        for built in prebuild(wanted, workers):
            if built.error is not None:
                raise ValueError(f"{built.traits} could not be built: {built.error}")
        kernels = [compiled.compile(*request) for request in wanted]
    entries = [cache.get(kernel.key) for kernel in kernels]
    folder.mkdir(parents=True, exist_ok=True)
    declarations = []
    for kernel, name, entry in zip(kernels, names, entries, strict=True):
        if entry is None:
            raise ValueError(f"{kernel.name} is no longer in the cache; accepted: no pruning meanwhile")
        (folder / f"{name}.o").write_bytes(entry.files[OBJECT])
        declarations.append(declaration(kernel, entry.meta["function"]))
    (folder / HEADER).write_text(
        template("kernels.h").format(**bundles.LICENCE, declarations="".join(declarations))
    )
    (folder / "raise.c").write_text(template("raise.c"))
    shutil.copyfile(bundles.runtime_archive(), folder / bundles.RUNTIME)
    objects = "\n  ".join(f"${{CMAKE_CURRENT_SOURCE_DIR}}/{name}.o" for name in names)
    (folder / LISTS).write_text(template(LISTS).format(objects=objects, runtime=bundles.RUNTIME))
    return kernels


def macro_name(traits: Traits, target: str) -> str:
    """A kernel's name in C: ``forward_sm90_bf16_d128_causal``, with the target if that is not its generation."""
    return re.sub(r"\W", "_", traits.name) + ("" if target == traits.arch else f"_on_{target}")


def declaration(kernel: CompiledKernel, symbol: str) -> str:
    """A kernel's text in the header: its cost, its arguments, its function, and its tile as constants."""
    name, used = macro_name(kernel.traits, kernel.target), kernel.resources
    tile = (f"#define {name}_{field} {int(value)}" for field, value in asdict(kernel.tile).items())
    return template("declaration.h").format(
        name=kernel.name, target=kernel.target, registers=used.registers, memory=used.shared_memory_bytes,
        arguments=arguments(kernel), macro=name, function=f"__tvm_ffi_{symbol}", tile="\n".join(tile),
    )  # fmt: skip


def arguments(kernel: CompiledKernel) -> str:
    """The arguments' names and types, from the kernel's error message for a call without arguments."""
    try:
        kernel.function()
    except TypeError as error:
        stated = re.search(r"`__call__(\(.*\))`", str(error), re.S)
        if stated is not None:
            return stated[1]
    raise RuntimeError(f"{kernel.name} does not state its arguments")
