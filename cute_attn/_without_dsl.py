"""Placeholders for the CUTLASS DSL where it is not installed, so that kernels of a bundle run.

A kernel's class is written in the DSL, and the host reads its traits, tiles and arguments. Without the DSL, modules of
this package and of ``layouts`` import placeholders for ``cutlass``. Class bodies, annotations and decorators may use
placeholders; calling one raises ``REASON``. In all other modules ``import cutlass`` still fails.
"""

import builtins
import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType
from typing import Any

REASON = "building kernels needs nvidia-cutlass-dsl, which is not installed"
_OWN = ("cute_attn", "layouts")


@functools.cache
def is_installed() -> bool:
    """True if the DSL is installed, so that kernels can be built."""
    try:
        return importlib.util.find_spec("cutlass") is not None
    except (ImportError, ValueError):  # ValueError: the module was made by hand
        return False


class _Placeholder(type):
    """Metaclass of the placeholders, which are classes so that annotations accept them."""

    def __getattr__(cls, name: str) -> "_Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Placeholder(name, (), {"__module__": __name__, "__doc__": f"{cls.__doc__}.{name}"})
        setattr(cls, name, found)
        return found

    def __getitem__(cls, item: Any) -> "_Placeholder":
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator on a lone function or class; raise RuntimeError for any other call."""
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return _raising(args[0])
        if len(args) == 1 and not kwargs and isinstance(args[0], type):
            return args[0]
        raise RuntimeError(REASON)


def _raising(function: FunctionType) -> Callable[..., Any]:
    """A wrapper of a decorated function that raises when called: only the DSL could trace the function."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(REASON)

    return traced


_PACKAGES = {
    name: _Placeholder(name, (), {"__module__": __name__, "__doc__": name}) for name in ("cutlass", "cuda")
}
"""Placeholders for the DSL and for CUDA's bindings, which the DSL installs: kernels name the driver's types."""


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The ``__import__`` that this package's modules use: it returns placeholders for ``_PACKAGES``."""
    first, *rest = name.split(".")
    if level or first not in _PACKAGES:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    package = _PACKAGES[first]
    return functools.reduce(getattr, rest, package) if fromlist else package


_NAMES = {**vars(builtins), "__import__": _import}
"""Builtins of this package's modules."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds this package's modules through the other finders, and makes the modules import by :func:`_import`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """The module's specification, with a loader that executes the module with ``_NAMES`` as its builtins."""
        if name.partition(".")[0] not in _OWN:
            return None
        others = [x for x in sys.meta_path if x is not self and hasattr(x, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader)  # type: ignore[method-assign]
        return spec

    @staticmethod
    def _execute(loader: Any, module: Any) -> None:
        del loader.exec_module  # the class's method remains
        vars(module)["__builtins__"] = _NAMES
        loader.exec_module(module)


def install() -> None:
    """Give placeholders to this package's modules imported from now on; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
