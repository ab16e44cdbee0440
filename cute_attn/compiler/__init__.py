"""Turns traits and a tile into a kernel that runs: the registry, the build, the disk cache and bundles."""

from cute_attn._without_dsl import is_installed as has_dsl
from cute_attn.compiler.compiled import (
    CompiledKernel,
    Request,
    Resources,
    SpillWarning,
    as_message,
    as_requests,
    build,
    build_for_later,
    check_layouts,
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
    "CompiledKernel", "Request", "Resources", "SpillWarning", "as_message", "as_requests", "build",
    "build_for_later", "check_layouts", "compile", "default_target", "has_dsl", "is_built", "key_of",
    "prebuild", "toolchain", "user_modules", "why_no_kernels",
]  # fmt: skip
