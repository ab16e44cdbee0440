"""From traits and a tile to a kernel that runs: the registry, the build, the cache on disk and bundles."""

from cute_attn.compiler.compiled import (
    CompiledKernel,
    Request,
    Resources,
    SpillWarning,
    as_message,
    build,
    build_for_later,
    compile,
    default_target,
    is_built,
    key_of,
    prebuild,
    toolchain,
    user_modules,
    why_no_kernels,
)

__all__ = [
    "CompiledKernel",
    "Request",
    "Resources",
    "SpillWarning",
    "as_message",
    "build",
    "build_for_later",
    "compile",
    "default_target",
    "is_built",
    "key_of",
    "prebuild",
    "toolchain",
    "user_modules",
    "why_no_kernels",
]
