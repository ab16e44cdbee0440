"""The examples as modules, and their commands in this process."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.processes import ROOT


def load(name: str) -> ModuleType:
    """Load an example as a module; its registrations stay."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run(patch: pytest.MonkeyPatch, command: str, *arguments: str) -> None:
    """``command``: the example's name, and arguments."""
    name, *first = command.split()
    patch.setattr(sys, "argv", [f"{name}.py", *first, *arguments])
    load(name).main()
