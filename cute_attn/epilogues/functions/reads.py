"""The values that functions refer to, and how a later call compares them: the key of a trace. Imports no compiler.

A function's trace is valid for every call in which the function would do the same. That depends on its code, and on the
values that it reads from closures, defaults, globals and attributes: these are the key. A value that cannot be compared
(an object of another class, the environment, torch's state) makes the key incomplete; such a function is traced in each
call.
"""

import dis
import functools
import math
import operator
import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.epilogues.functions.torch_functions import KNOWN_NAMES

_ATTRIBUTES = KNOWN_NAMES | {"append", "extend", "items", "keys", "values", "get", "index", "count"}
"""Names in torch and math, and methods of lists and dicts; if tracing changes a list or dict, no trace is kept."""
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device))
_LIBRARIES = frozenset(("torch", "math", "operator"))
_TYPES = frozenset((int, bool, float, str, tuple, list))
_BUILTINS = frozenset(("int", "bool", "float", "tuple", "list")) | {
    *("abs", "all", "any", "enumerate", "isinstance", "len", "map", "max", "min", "pow", "range", "reversed"),
    *("round", "sum", "zip", "TypeError", "ValueError"),
}
"""Builtins whose results depend only on their operands."""
_MOST_VALUES = 4096
"""Maximum length of a key; with more, tracing costs less than comparing."""


class Step(NamedTuple):
    """How a later call finds and compares one value that functions read.

    Attributes:
        parent: the source of the value: 0 for the functions, n + 1 for the value of step n.
        get: reads the value from its parent.
        kind: the value's type.
        test: returns True for the same value; None if the value's contents have separate steps.
    """

    parent: int
    get: Callable[[Any], Any]
    kind: type
    test: Callable[[Any], bool] | None = None


class Reads:
    """The key of some functions, with their tensors in the order of their first reference.

    Tensors are compared by dtype, shape, strides and device, so that other tensors can replace them.

    Attributes:
        values: the key's values, in the order of reading.
        steps: how a later call reads and compares the values without a key; used in :mod:`cute_attn.host.plans`.
        tensors: the referenced tensors, each once.
        references: the tensor of each reference.
        kept: objects whose ids are in the key.
        complete: True if the key determines the functions' behaviour.
    """

    def __init__(self, *functions: Callable | None, state: tuple = ()) -> None:
        """state: values, in addition to the functions, that the trace depends on."""
        # A number gets torch's default dtype when combined with an integer.
        self.values: list[Any] = [torch.get_default_dtype(), *state]
        self.steps: list[Step] = []
        self.tensors: list[Tensor] = []
        self.references: list[Tensor] = []
        self.kept: list[Any] = []
        self.complete = True
        self._places: dict[int, int] = {}
        self._active: list[int] = []
        for place, function in enumerate(functions):
            self._walk(function, 0, operator.itemgetter(place))

    @property
    def key(self) -> tuple:
        """The values that later calls compare."""
        return tuple(self.values)

    def _step(self, x: Any, parent: int, get: Callable[[Any], Any], test: Callable | None = None) -> int:
        """Add a step for a value, and return the number by which other steps refer to it. test: see :class:`Step`."""
        self.steps.append(Step(parent, get, type(x), test))
        return len(self.steps)

    def _walk(self, x: Any, parent: int, get: Callable[[Any], Any]) -> None:
        """Add the value x to the key; ``get`` reads x from the value at ``parent``."""
        kind = type(x)
        if not self.complete:
            return
        if len(self.values) > _MOST_VALUES:
            self.complete = False
        elif kind in _PLAIN:
            self._equal(x, parent, get)
        elif kind is float:
            self.values.append(float)  # 0.5 is not "0.5"
            self._equal(repr(x), self._step(x, parent, get), repr)  # -0.0 is not 0.0, and NaN is NaN
        elif kind is Tensor or kind is torch.nn.Parameter:
            own = self._step(x, parent, get)
            self._step(vars(x), own, operator.attrgetter("__dict__"), operator.not_)
            self._tensor(x)
        elif kind is FunctionType:
            self._nested(x, parent, get, self._function)
        elif kind is tuple or kind is list:
            self._nested(x, parent, get, self._items)
        elif kind is dict:
            self._nested(x, parent, get, self._entries)
        elif kind is functools.partial:
            self._nested(x, parent, get, self._partial)
        elif (
            x is Tensor
            or (kind is type and x in _TYPES)
            or (kind is BuiltinFunctionType and x in _torchs_functions())
            or (kind is ModuleType and x.__name__.partition(".")[0] in _LIBRARIES)
        ):
            self._identity(x, parent, get)
        else:
            self.complete = False

    def _nested(
        self, x: Any, parent: int, get: Callable[[Any], Any], read: Callable[[Any, int], None]
    ) -> None:
        """Add the contents of x to the key. They may include x itself, as in a recursive function."""
        if id(x) in self._active:
            self.values.append(("within", self._active.index(id(x))))
            if type(x) is FunctionType:  # keep neither it nor its references
                one = weakref.ref(x)
                self._step(x, parent, get, lambda x: one() is x)
            else:
                self.complete = False
            return
        self._active.append(id(x))
        read(x, self._step(x, parent, get))
        self._active.pop()

    def _items(self, items: tuple | list, place: int) -> None:
        self.values.append(type(items))
        self._equal(len(items), place, len)
        for number, item in enumerate(items):
            self._walk(item, place, operator.itemgetter(number))

    def _entries(self, entries: dict, place: int) -> None:
        self._items_of(tuple(entries), place, tuple)
        self._items_of(tuple(entries.values()), place, _values)

    def _items_of(self, items: tuple, parent: int, get: Callable[[Any], Any]) -> None:
        self._items(items, self._step(items, parent, get))

    def _partial(self, x: functools.partial, place: int) -> None:
        for name in ("func", "args", "keywords", "__dict__"):
            self._walk(getattr(x, name), place, operator.attrgetter(name))

    def _equal(self, x: Any, parent: int, get: Callable[[Any], Any]) -> None:
        self.values += (type(x), x)
        self._step(x, parent, get, functools.partial(operator.eq, x))

    def _identity(self, x: Any, parent: int, get: Callable[[Any], Any]) -> None:
        self.values.append(id(x))
        self.kept.append(x)
        self._step(x, parent, get, functools.partial(operator.is_, x))

    def _tensor(self, x: Tensor) -> None:
        self.references.append(x)
        place = self._places.setdefault(id(x), len(self.tensors))
        self.values.append(place)
        if place < len(self.tensors):
            return
        self.tensors.append(x)
        if x.layout is not torch.strided or x.is_nested or vars(x):
            self.complete = False
        else:
            self.values += (x.dtype, x.shape, x.stride(), x.device)

    def _function(self, function: FunctionType, place: int) -> None:
        code = function.__code__
        self._identity(code, place, operator.attrgetter("__code__"))
        scope, names = function.__globals__, _names_of(code)
        if _is_of_torch(scope) and (function in _torchs_functions() or function.__name__ == "noop_mask"):
            return
        self.complete = self.complete and names.known
        if function.__closure__:
            cells = self._step(function.__closure__, place, operator.attrgetter("__closure__"))
            for number, cell in enumerate(function.__closure__):
                own = self._step(cell, cells, operator.itemgetter(number))
                try:
                    self._walk(cell.cell_contents, own, operator.attrgetter("cell_contents"))
                except ValueError:  # empty
                    self.complete = False
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            own = getattr(function, name)
            if own:
                self._walk(own, place, operator.attrgetter(name))
            else:
                self._step(own, place, operator.attrgetter(name), operator.not_)
        if names.read:
            globals_ = self._step(scope, place, operator.attrgetter("__globals__"))
            for name in names.read:
                if name in scope:
                    self.values.append(name)
                    self._walk(scope[name], globals_, operator.itemgetter(name))
                elif name in _BUILTINS:
                    self._step(False, globals_, operator.methodcaller("__contains__", name), operator.not_)
                else:
                    self.complete = False


def _values(entries: dict) -> tuple:
    return tuple(entries.values())


def _is_of_torch(scope: dict[str, Any]) -> bool:
    """True if ``scope``, a function's globals, belongs to a module of torch."""
    name = scope.get("__name__")
    if not isinstance(name, str) or name.partition(".")[0] != "torch":
        return False
    return getattr(sys.modules.get(name), "__dict__", None) is scope


@functools.cache
def _torchs_functions() -> frozenset[Any]:
    """Functions of torch, math and operator that depend only on their arguments."""
    places = (torch, torch.nn.functional, torch.special, math)
    known = [getattr(place, name, None) for place in places for name in KNOWN_NAMES]
    known += [getattr(operator, name) for name in dir(operator)]
    return frozenset(x for x in known if isinstance(x, BuiltinFunctionType | FunctionType))


class _Names(NamedTuple):
    """Names that code reads. known: False if it also imports, stores, or reads attributes of unknown meaning."""

    read: tuple[str, ...]
    known: bool


@functools.lru_cache(1024)
def _names_of(code: CodeType) -> _Names:
    """The globals that a function and its inner functions may read."""
    read: dict[str, None] = {}
    known, pending = True, [code]
    while pending:
        inner = pending.pop()
        pending += [x for x in inner.co_consts if isinstance(x, CodeType)]
        for one in dis.get_instructions(inner):
            if one.opcode not in dis.hasname:
                continue
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[one.argval] = None
            elif one.opname not in ("LOAD_ATTR", "LOAD_METHOD") or one.argval not in _ATTRIBUTES:
                known = False
    return _Names(tuple(read), known)
