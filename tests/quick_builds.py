"""Changes to the DSL under which the tests build in less time: no kernel's code is another.

Processes that ``prebuild`` starts make them too: they run this file.
"""

from collections.abc import Callable
from typing import Any

from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl
from cutlass.base_dsl.compiler import Compiler
from cutlass.cutlass_dsl import tvm_ffi_provider

from cute_attn.compiler import prebuild_worker, workers
from cute_attn.compiler.workers import Worker

JIT, EXPORTER = Compiler.jit, tvm_ffi_provider._aot_support


class _Exporter:
    """Host code around a kernel, which tests without a GPU hardly run, is not optimised: 0.1 s a kernel."""

    @staticmethod
    def export_module_to_bytes(module: Any, **options: Any) -> bytes:
        return EXPORTER.export_module_to_bytes(module, **options | {"opt_level": 0})


def _jit_without_optimisation(
    compiler: Compiler, module: Any, opt_level: int = 2, shared_libs: Any = ()
) -> Any:
    """Compile emulated code without optimisation, which would take longer than the code runs."""
    return JIT(compiler, module, 0, shared_libs)


def _no_source_locations(enable: bool) -> None:
    """Skip the source line of each operation, which no kernel has: finding it takes a fifth of a build.

    With ``remarks{ptx}`` the DSL collects them as for debugging.
    """


class _Silent:
    """A logger whose messages nobody reads; it is asked at each operation."""

    @staticmethod
    def debug(*message: Any) -> None: ...


def _as_it_is(argument: Any, **options: Any) -> Any:
    """Arguments are looked through for the DSL's PyIR, which is switched off."""
    return argument


def apply(set_attribute: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Make the changes by ``setattr``, or by pytest's, which undoes them."""
    set_attribute(dsl, "_set_enable_frame_filtering", _no_source_locations)
    set_attribute(op, "log", lambda: _Silent)
    set_attribute(op, "_pyir_auto_load_arg", _as_it_is)
    set_attribute(Compiler, "jit", _jit_without_optimisation)
    set_attribute(tvm_ffi_provider, "_aot_support", _Exporter)
    set_attribute(workers, "Worker", lambda module: Worker("tests.quick_builds"))


if __name__ == "__main__":
    apply()
    prebuild_worker.main()
