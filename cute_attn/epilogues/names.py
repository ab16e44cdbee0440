"""The names of users' epilogues, and their registry. Imports no compiler."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cute_attn.traits import FEATURES, did_you_mean, is_word

_REGISTERED: dict[str, Any] = {}
_TRACED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Epilogues of functions that are passed in calls; each lives as long as a call needs it."""

TRACED = "traced_"
"""Prefix of the names of traced functions; these names are internal."""


def check_name(name: Any, decorator: str) -> None:
    """Raise ValueError unless ``name`` can be an epilogue's word in a kernel's name; it was given to ``decorator``."""
    if callable(name):
        given = getattr(name, "__qualname__", type(name).__name__)
        raise ValueError(
            f"{given} is given in place of a name; accepted: a call such as @{decorator}('my_bias')"
        )
    if not isinstance(name, str) or not is_word(name) or name in FEATURES:
        raise ValueError(
            f"an epilogue's name is {name!r}; accepted: a lower-case word such as 'my_bias' that is no feature's"
        )


def register_epilogue(name: str) -> Callable[[type], type]:
    """Class decorator: register an epilogue under ``name``, for use in traits.

    Raises:
        TypeError: the decorated object is not a class with the methods of an epilogue.
        ValueError: the name is taken by a class of another name or file, or cannot be a word of a kernel's name.
    """
    check_name(name, "register_epilogue")

    def register(cls: Any) -> Any:
        is_class = isinstance(cls, type)
        if not is_class or not (hasattr(cls, "forward") and hasattr(cls, "reference")):
            raise TypeError(
                f"epilogue {name!r} is {cls!r}; accepted: a class that extends cute_attn.Epilogue"
            )
        check_free(name, cls)
        cls.name = name
        _REGISTERED[name] = cls
        return cls

    return register


def register_function(name: str, epilogue: Any) -> None:
    """Register a function's epilogue, which is an object; ``epilogue.written`` has the function's module and name."""
    check_free(name, epilogue)
    _REGISTERED[name] = epilogue


def register_traced(epilogue: Any) -> Any:
    """Register an epilogue weakly unless its name is taken; return the epilogue registered under the name."""
    return _TRACED.setdefault(epilogue.name, epilogue)


def check_free(name: str, epilogue: Any) -> None:
    """Raise ValueError if the name is taken by a class or function of another name or file."""
    known = _REGISTERED.get(name)
    if known is None:
        return
    (known, own) = (getattr(x, "written", x) for x in (known, epilogue))
    if known.__qualname__ != own.__qualname__ or _file_of(known) != _file_of(own):
        raise ValueError(f"epilogue name {name!r} is taken by {known.__module__}.{known.__qualname__}")


def _file_of(written: Any) -> str:
    """The file of a class or function, or its module's name in a notebook; the same if code is imported or rerun."""
    module = sys.modules.get(written.__module__)
    return getattr(module, "__file__", None) or str(written.__module__)


def in_every_step(names: Iterable[str]) -> list[str]:
    """The names whose epilogues compute in every step, not only in masked blocks."""
    return [name for name in names if not is_registered(name) or not user_epilogue(name).lists_blocks]


def held(names: Iterable[str], op: str) -> int:
    """The sum of :meth:`Epilogue.held` over the registered epilogues."""
    return sum(user_epilogue(name).held(op in ("backward", "jvp")) for name in names if is_registered(name))


def adds_tangents(names: Iterable[str]) -> bool:
    """True if tensors of one of the functions have tangents; False for classes."""
    found = (user_epilogue(name) for name in names if is_registered(name))
    return any(not isinstance(one, type) and one.adds_tangents for one in found)


def reads_keys(names: Iterable[str]) -> bool:
    """True if the effect of one of the epilogues on a score may depend on the key."""
    return any(not is_registered(name) or user_epilogue(name).reads_keys for name in names)


def reads_tensors(names: Iterable[str]) -> bool:
    """True if one of the epilogues is not known to be a function of scores and positions alone."""
    return any(not is_registered(name) or getattr(user_epilogue(name), "captured", True) for name in names)


def lists_blocks(names: Sequence[str]) -> bool:
    """True if one of the registered epilogues lists the blocks to visit."""
    return len(in_every_step(names)) < len(names)


def registered_functions(names: Sequence[str]) -> list[Any] | None:
    """The function epilogues registered under ``names``; None if a name has a class, or is not registered."""
    found = [_REGISTERED.get(name) for name in names]
    return None if any(one is None or isinstance(one, type) for one in found) else found


def are_functions(names: Iterable[str]) -> bool:
    """True if none of the epilogues is a class."""
    return all(name in _TRACED or not isinstance(_REGISTERED.get(name), type) for name in names)


def is_registered(name: str) -> bool:
    """True if ``name`` is registered, by a caller or for a trace."""
    return name in _REGISTERED or name in _TRACED


def example_args(name: str, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> tuple:
    """Arguments of the epilogue registered under ``name`` for a call of these sizes.

    Raises:
        ValueError: the epilogue needs arguments, but its class provides no examples.
    """
    cls = user_epilogue(name)
    epilogue = cls() if isinstance(cls, type) else cls
    args, taken = cls.example_args(batch, nheads, seqlen_q, seqlen_k), len(epilogue.fake_args())
    if not args and taken:
        raise ValueError(
            f"epilogue {name!r} takes {taken} arguments; accepted without them: a class with "
            "example_args(batch, nheads, seqlen_q, seqlen_k), which returns some"
        )
    return args


def user_epilogue(name: str) -> Any:
    """The class registered under ``name``, or a function's object with a class's methods.

    Raises:
        ValueError: nothing is registered under ``name``; the message lists the registered names.
    """
    found = _REGISTERED.get(name) or _TRACED.get(name)
    if found is None and name.startswith(TRACED):
        raise ValueError(
            f"{name} is a function that this process has not traced; accepted: a program that calls attention with it "
            "before, or compiles it"
        )
    if found is None:
        names = sorted(_REGISTERED)
        known = ", ".join(names) or "a name that register_epilogue, score_mod or mask_mod has registered"
        if name in FEATURES:  # a call's argument, such as causal=True
            raise ValueError(
                f"epilogues has {name!r}, a feature that has an argument of its own; accepted: {known}"
            )
        meant = did_you_mean(name, (*FEATURES, *names))
        raise ValueError(f"no feature or epilogue is named {name!r}{meant}; accepted: {known}")
    return found
