"""Functions to call once a module is imported. Nothing here loads torch."""

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call ``then`` when the module ``name`` is loaded, immediately if it already is.

    Returns a function that cancels the wait.
    """
    if name in sys.modules:
        then()
        return lambda: None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.stop


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module with the other finders, and calls a function after the module was executed.

    Libraries may look up a module's spec long before they import it, so this finder stays until the import.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """The module's spec, with a loader that calls the function; None for other modules."""
        if name != self.name:
            return None
        others = [x for x in sys.meta_path if x is not self and hasattr(x, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader)  # type: ignore[method-assign]
        return spec

    def _execute(self, loader: Any, module: Any) -> None:
        del loader.exec_module  # the class's method remains
        loader.exec_module(module)
        self.stop()
        self.then()

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
