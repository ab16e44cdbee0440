"""The key under which a compiled kernel is cached: a hash of everything that decides its code.

Hashed are traits, tile, target, the toolchain's versions, ``CUTE_DSL_*`` variables and sources: those of this package
(the folders that shape a kernel) and ``layouts`` and, for a user's kernel or epilogue, its file and the user's files
that it imports, or its code if it was typed in a notebook.
"""

import builtins
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, get_args, get_origin

from cute_attn import _imported_at, _without_dsl

_PACKAGE = Path(__file__).resolve().parents[1]
_LAYOUTS = _PACKAGE.parent / "layouts"
_SHAPING = ("traits.py", "tiles", "epilogues", "device", "work", "rows", "outputs", "kernels", "compiler")
"""Files and folders that shape a kernel or the data stored with it; they import from no other folders."""
_DISTRIBUTIONS = {"cutlass_dsl": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


def dsl() -> Any:
    """:mod:`cute_attn.compiler.dsl`, loaded when it is first needed."""
    from cute_attn.compiler import dsl  # takes seconds, and kernels of a bundle do without

    return dsl


@functools.cache
def toolchain() -> dict[str, str]:
    """Versions of the tools that turn a kernel's source into code, by name.

    ``ptx_toolkit`` is the CUDA version of the DSL's compiler, whose cu12 and cu13 flavours emit different PTX.
    """
    if not _without_dsl.is_installed():
        raise RuntimeError(_without_dsl.REASON)
    cuda = dsl().CUDA_VERSION
    return {
        **{name: importlib.metadata.version(wheel) for name, wheel in _DISTRIBUTIONS.items()},
        "ptx_toolkit": f"{cuda.major}.{cuda.minor}",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": machine(),
    }


def machine() -> str:
    """The system and processor that host code runs on, such as ``"linux-x86_64"``."""
    return f"{sys.platform}-{platform.machine()}"


def source_key(traits: Any, tile: Any, target: str, options: str, classes: Iterable[Any]) -> str:
    """The digest of a kernel's sources and options, without the toolchain that builds it: 40 hexadecimal digits.

    Args:
        traits, tile: dataclasses; all fields are hashed.
        target: the GPU that the kernel is built for.
        options: the compiler's options, without paths.
        classes: the kernel's class and its epilogues; the sources of the classes and their bases are hashed.
    """
    classes = tuple(classes)
    parts = {
        "traits": asdict(traits),
        "tile": [type(tile).__qualname__, asdict(tile)],
        "target": target,
        "options": options,
        "classes": [_class_of(x).__qualname__ + getattr(x, "code_digest", "") for x in classes],
        "package": package_sources(),
        "user": user_sources(classes),
    }
    return digest(json.dumps(parts, sort_keys=True).encode())


def cache_key(traits: Any, tile: Any, target: str, options: str, classes: Iterable[Any]) -> str:
    """The disk cache's key: a digest of :func:`source_key`, the toolchain and the DSL's environment variables."""
    parts = {
        "source": source_key(traits, tile, target, options, classes),
        "toolchain": toolchain(),
        # The variables from which the DSL reads compile options.
        "environment": {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")},
    }
    return digest(json.dumps(parts, sort_keys=True).encode())


def digest(*parts: bytes) -> str:
    """SHA-256 over byte strings and their lengths, truncated to 40 hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:40]


@functools.cache
def package_sources() -> str:
    """Digest of the package's sources and tables of tiles, read once per process.

    If a file changed after this process imported the package, the running code may be older than the file. The digest
    is then unique, so that no later process finds a stale kernel.
    """
    parts, newest = [], 0.0
    for root in (_PACKAGE, _LAYOUTS):
        for path in sorted((*root.rglob("*.py"), *root.rglob("tiles.csv"))):
            place = path.relative_to(root.parent)
            if root == _PACKAGE and place.parts[1] not in _SHAPING:
                continue
            parts += [place.as_posix().encode(), path.read_bytes()]
            newest = max(newest, path.stat().st_mtime)
    if newest > _imported_at:
        parts.append(os.urandom(16))
    return digest(*parts)


def _class_of(x: Any) -> type:
    return x if isinstance(x, type) else type(x)


def user_sources(classes: Iterable[Any]) -> str:
    """Digest of the users' files that define the classes and their bases, and of the users' files that these import.

    A class that is in no file is hashed by its code.
    """
    bases = [base for x in classes for base in _class_of(x).__mro__]
    pending = {module for base in bases if (module := sys.modules.get(base.__module__))}
    typed: list[bytes] = []
    for base in bases:
        if not is_typed(base) or "code_digest" in vars(base):
            continue
        parts, modules = typed_parts(base)
        typed += parts
        pending |= modules
    files: dict[str, bytes] = {}
    while pending:
        module = pending.pop()
        path = _user_file(module)
        if path is not None and str(path) not in files:
            files[str(path)] = path.read_bytes()
            pending |= _imported_modules(module, files[str(path)])
    # A file's folder does not shape code; its name and its contents do.
    return digest(
        *sorted(Path(name).name.encode() + b"\0" + source for name, source in files.items()), *typed
    )


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    cutlass = importlib.util.find_spec("cutlass")
    for place in (cutlass.submodule_search_locations if cutlass else None) or ():
        roots.add(Path(place).resolve())
    return (*roots, _PACKAGE, _LAYOUTS)


def is_installed(path: Path) -> bool:
    """True if a resolved path is in this package, the standard library or an installed package."""
    return any(path.is_relative_to(root) for root in _installed_roots())


def _user_file(module: ModuleType) -> Path | None:
    """The module's source file, or None if it has none or belongs to this package or an installed one."""
    try:
        source = inspect.getsourcefile(module)
    except TypeError:  # built in
        return None
    if source is None or not os.path.isfile(source):
        return None
    path = Path(source).resolve()
    return None if is_installed(path) else path


def _imported_modules(module: ModuleType, source: bytes) -> set[ModuleType]:
    """The loaded modules that a module's import statements name.

    Imports are read from bytecode instead of by :mod:`ast`: in Python 3.11, two threads that use ``ast`` at the same
    time raise SystemError, and the DSL may be using it in another thread, to build a kernel.
    """
    names, pending = set(), [builtins.compile(source, str(module.__file__), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        pending += [x for x in code.co_consts if isinstance(x, CodeType)]
        for kind, what in ModuleFinder().scan_opcodes(code):
            if kind == "store":
                continue
            level, fromlist, base = (0, *what) if kind == "absolute_import" else what
            if level:
                base = importlib.util.resolve_name("." * level + base, module.__package__ or "")
            names |= {base, *(f"{base}.{name}" for name in fromlist or ())}
    return {sys.modules[name] for name in names if name in sys.modules}


# ---- classes without a file, typed at a prompt or in a notebook ----
# A digest covers the class's compiled code, that of the functions and classes without a file that it names, and the
# values of constants that it names. A kernel that names any other value is always rebuilt.

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
