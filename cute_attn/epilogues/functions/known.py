"""The epilogues of functions that come again, by what the functions refer to. Imports no compiler."""

from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.epilogues.functions.trace import Trace, check_function, trace


class _Known(NamedTuple):
    """A trace's epilogue, which of the functions' tensors it captured, and what keeps the key's identities alive."""

    name: str
    tensors: tuple[int, ...]
    kept: tuple


_known: dict[tuple, _Known] = {}
_MOST = 1024
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device))
_LIBRARIES = frozenset(("torch", "math", "operator"))


def epilogue_of(
    score_mod: Callable | None, mask_mod: Callable | None, device: torch.device | None = None
) -> tuple[str, tuple[Tensor, ...]]:
    """The registered name of functions, and the tensors that they capture; ("", ()) where they leave scores alone.

    Functions are traced once for each value of what they refer to: code, closures, defaults, globals. Tensors count by
    dtype, shape and strides, so that others take their place. Functions that refer to objects of other classes, whose
    attributes may change, are traced each time.

    Raises:
        TypeError, ValueError: as :func:`cute_attn.epilogues.functions.trace.trace`.
    """

    def register(traced: Trace) -> str:
        if traced.output.op == "score":
            return ""
        from cute_attn.epilogues.functions.epilogue import register_trace  # loads the DSL

        return register_trace(traced)

    return _known_or_traced(score_mod, mask_mod, device, (), register)


def block_mask_epilogue_of(
    mask_mod: Callable, partial: Callable | None, unites: bool, device: torch.device | None
) -> tuple[str, tuple[Tensor, ...]]:
    """The same of a mask with lists of blocks, whose tensors follow.

    partial: what ``mask_mod``, which captures one tensor more and that first, is in listed blocks that need a mask;
    None: itself. unites: whether lists of query blocks are unions of several heads'.
    """

    def register(traced: Trace) -> str:
        from cute_attn.epilogues.functions.epilogue import register_block_mask  # loads the DSL

        return register_block_mask(traced, None if partial is None else trace(None, partial, device), unites)

    return _known_or_traced(None, mask_mod, device, ("listed", partial is None, unites), register)


def _known_or_traced(
    score_mod: Callable | None,
    mask_mod: Callable | None,
    device: torch.device | None,
    kind: tuple,
    register: Callable[[Trace], str],
) -> tuple[str, tuple[Tensor, ...]]:
    """kind: beside the functions, what ``register`` makes of their trace."""
    for what, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            check_function(what, function)
    seen = _References()
    seen.parts += kind
    known = _known.get(seen.key()) if seen.walk(score_mod) and seen.walk(mask_mod) else None
    if known is not None:
        return known.name, tuple([seen.tensors[i] for i in known.tensors])
    traced = trace(score_mod, mask_mod, device)
    name = register(traced)
    numbers = {id(x): i for i, x in enumerate(seen.tensors)}
    if seen.complete and all(id(x) in numbers for x in traced.tensors):
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)))
        _known[seen.key()] = _Known(name, tuple(numbers[id(x)] for x in traced.tensors), tuple(seen.kept))
    return name, traced.tensors


class _References:
    """What functions refer to, as a key, with the tensors in the order of their first reference."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.tensors: list[Tensor] = []
        self.kept: list[Any] = []
        self.complete = True
        self._active: list[Any] = []

    def key(self) -> tuple:
        return tuple(self.parts)

    def walk(self, x: Any) -> bool:
        """Add x; False where it may change without notice."""
        kind = type(x)
        if kind is FunctionType:
            return self._function(x)
        if kind in _PLAIN:
            self.parts += (kind, x)
        elif kind is float:
            self.parts.append(repr(x))
        elif kind is Tensor or kind is torch.nn.Parameter:
            self._tensor(x)
        elif kind is tuple or kind is list:
            self.parts += (kind, len(x))
            for item in x:
                self.walk(item)
        elif kind is BuiltinFunctionType or (
            kind is ModuleType and x.__name__.partition(".")[0] in _LIBRARIES
        ):
            self._identity(x)
        else:
            self.complete = False
        return self.complete

    def _identity(self, x: Any) -> None:
        self.parts.append(id(x))
        self.kept.append(x)

    def _tensor(self, x: Tensor) -> None:
        for i, other in enumerate(self.tensors):
            if other is x:
                self.parts.append(i)
                return
        self.tensors.append(x)
        self.parts += (x.dtype, x.shape, x.stride())

    def _function(self, function: Any) -> bool:
        for other in self._active:
            if other is function:  # it calls itself
                return self.complete
        code = function.__code__
        self._identity(code)
        if function.__module__.partition(".")[0] == "torch" and not function.__closure__:
            return self.complete
        self._active.append(function)
        for cell in function.__closure__ or ():
            try:
                self.walk(cell.cell_contents)
            except ValueError:  # empty
                self.complete = False
        if function.__defaults__ or function.__kwdefaults__:
            self.walk(function.__defaults__)
            self.walk(tuple(sorted((function.__kwdefaults__ or {}).items())))
        scope = function.__globals__
        for name in _names_of(code):
            if name in scope:
                self.parts.append(name)
                self.walk(scope[name])
        self._active.pop()
        return self.complete


_names: dict[int, tuple[CodeType, tuple[str, ...]]] = {}


def _names_of(code: CodeType) -> tuple[str, ...]:
    """The globals that a function may name, its inner functions' too."""
    found = _names.get(id(code))
    if found is None:
        names, pending = dict.fromkeys(code.co_names), [code]
        while pending:
            inner = [x for x in pending.pop().co_consts if isinstance(x, CodeType)]
            pending += inner
            for one in inner:
                names |= dict.fromkeys(one.co_names)
        while len(_names) >= _MOST:
            _names.pop(next(iter(_names)))
        found = _names[id(code)] = (code, tuple(names))
    return found[1]
