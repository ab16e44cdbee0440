"""Classes without a file, typed at a prompt or in a notebook.

Since there is no source file, a digest covers the class's compiled code, that of the functions and classes without a
file that it names, and the values of constants that it names. A kernel that names any other value is always rebuilt.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, get_args, get_origin

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def is_typed(cls: Any) -> bool:
    """True if a class or a function is defined in no file."""
    module = sys.modules.get(cls.__module__)
    return module is None or (
        getattr(module, "__file__", None) is None and module.__name__ not in sys.builtin_module_names
    )


def typed_parts(cls: type) -> tuple[list[bytes], set[ModuleType]]:
    """The code and values that define a typed class, in a fixed order, and the modules that its code names."""
    parts: list[bytes] = []
    modules: set[ModuleType] = set()
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [(cls.__qualname__, cls)]
    while pending:
        name, value = pending.pop()
        value = inspect.unwrap(getattr(value, "__func__", value))  # of a static method or decorated function
        if isinstance(value, _PLAIN):
            parts.append(f"{name}={value!r}".encode())
        elif id(value) in seen:
            continue
        elif isinstance(value, ModuleType):
            modules.add(value)
        elif isinstance(value, (type, FunctionType)) and not is_typed(value):
            parts.append(f"{name}={value.__module__}.{value.__qualname__}".encode())
            modules.add(sys.modules[value.__module__])
        elif get_args(value):  # an annotation
            pending += [
                (f"{name}[{i}]", item) for i, item in enumerate((get_origin(value), *get_args(value)))
            ]
        elif isinstance(value, (tuple, list)):
            pending += [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, property):
            pending += [(f"{name}.{kind}", getattr(value, kind)) for kind in ("fget", "fset")]
        elif isinstance(value, type):
            pending += [
                (f"{name}.{key}", item) for key, item in vars(value).items() if _is_written(key, item)
            ]
        elif isinstance(value, FunctionType):
            parts.append(f"{name}: {list(_of_code(value.__code__))}".encode())
            pending += [(f"{name}.{key}", item) for key, item in _named(value)]
        else:
            parts.append(os.urandom(16))
        seen.add(id(value))
    return parts, modules


def _is_written(name: str, value: Any) -> bool:
    """True if an attribute is written in the class body, False if Python or a dataclass adds it."""
    if not name.startswith("__"):
        return not type(value).__name__.endswith("_descriptor")
    return isinstance(value, FunctionType) and value.__code__.co_filename != "<string>"


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values that a function refers to: globals, enclosing variables, annotations, defaults."""
    names = dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names)
    yield from ((name, function.__globals__[name]) for name in names if name in function.__globals__)
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in closure if name != "__class__")
    yield from function.__annotations__.items()
    yield from (
        ("default", value)
        for value in (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values())
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _of_code(code: CodeType) -> Iterator[str]:
    """The contents of a code object and those inside it, without file names and line numbers."""
    for one in _codes(code):
        constants = [_constant(x) for x in one.co_consts if not isinstance(x, CodeType)]
        yield repr((one.co_code, constants, one.co_names, one.co_varnames, one.co_freevars, one.co_argcount))


def _constant(value: Any) -> str:
    """A constant as text; the order of a set's elements is fixed."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
