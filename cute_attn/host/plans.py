"""The plans of calls, found by what is known of a call before any check: its options and its tensors' metadata.

A plan is all that follows from those: checks that passed, kernels, layouts, constant arguments. A call that repeats an
earlier one is recognized by torch's guards, those of compiled code, which compare types, dtypes, devices, shapes,
strides and the dispatcher's state of all tensors at once. Where no guard matches, a key of the same metadata finds the
plan, in five times that time.
"""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor

from cute_attn.host.memory import Tensors, all_plain, tensor_guards

_MAX_PLANS = 4096
_MAX_GUARDS = 8
"""Of calls with the same key and the same tensors present, the last ones first; a new plan takes the oldest's place."""


@dataclass(frozen=True, slots=True)
class Known:
    """An earlier call's plan.

    Attributes:
        plan: what :func:`keep` was given.
        constant: whether none of the call's tensors requires a gradient.
        check: torch's guards of the tensors that ``pick`` selects; None where a key found the plan.
        pick: selects the tensors that were present, each once.
        same: places of tensors that are one and the same, which guards cannot tell.
    """

    plan: Any
    constant: bool
    check: Callable[..., bool] | None = None
    pick: Callable[[Tensors], Tensors] | None = None
    same: tuple[tuple[int, int], ...] = ()


class Options:
    """Part of a key that is made once and looked up often; its hash is kept."""

    __slots__ = ("_hash", "values")

    def __init__(self, values: tuple[Hashable, ...]) -> None:
        """values: what it stands for."""
        self.values, self._hash = values, hash(values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Options) and self.values == other.values)


_plans: dict[tuple[Any, ...], Any] = {}
_guarded: dict[tuple[Any, ...], list[Known]] = {}


def find(key: Hashable, tensors: Tensors) -> Known | None:
    """The plan that was kept for ``key`` and for tensors of this metadata; None also for arguments of wrong types.

    Memory is all there is to the tensors of a call with a plan (:func:`cute_attn.host.memory.all_plain`).

    key: all that the plan depends on beside the tensors' metadata.
    """
    try:
        for known in _guarded.get((key, tuple(map(type, tensors))), ()):
            if known.check(*known.pick(tensors)) and (  # type: ignore[misc]
                not known.same or all(tensors[i] is tensors[j] for i, j in known.same)
            ):
                return known
        full = _full_key(key, tensors)
        plan = _plans.get(full)
        if plan is None or not all_plain(tensors):
            return None
    except (TypeError, AttributeError, RuntimeError):  # not hashable, no tensor, or one without memory
        return None
    if hasattr(plan, "ready"):
        plan = _plans[full] = plan.ready()
    return _guard(key, tensors, plan)


def keep(key: Hashable, tensors: Tensors, plan: Any) -> Any:
    """Let :func:`find` find a plan; returns it.

    What pays only for calls that repeat is made when one does: guards, and what the plan's method ``ready`` returns, a
    plan that takes its place.
    """
    if len(_plans) >= _MAX_PLANS:
        forget()
    if any(isinstance(x, weakref.ref) for x in _flat(key)):
        _forget_dead()
    with contextlib.suppress(TypeError):  # an option that cannot be hashed, such as a window as a list
        _plans[_full_key(key, tensors)] = plan
        del _guarded.get((key, tuple(map(type, tensors))), [])[_MAX_GUARDS - 1 :]  # room for this one's
    return plan


def forget(owner: Any = None) -> None:
    """Forget all plans, or those whose keys begin with ``owner``."""
    if owner is None:
        _plans.clear()
        _guarded.clear()
        return
    for kept in (_plans, _guarded):
        for full in list(kept):
            if isinstance(full[0], tuple) and full[0] and full[0][0] is owner:
                kept.pop(full, None)


def _forget_dead() -> None:
    """Forget plans of traced functions that are let go, and with them their kernels."""
    for kept in (_plans, _guarded):
        for full in list(kept):
            if any(isinstance(x, weakref.ref) and x() is None for x in _flat(full[0])):
                kept.pop(full, None)


def _flat(key: Any) -> list[Any]:
    return [one for x in key for one in _flat(x)] if isinstance(key, tuple) else [key]


def _full_key(key: Hashable, tensors: Tensors) -> tuple[Hashable, ...]:
    full: list[Any] = [key]
    for x in tensors:  # one flat tuple, for speed
        if x is None:
            full.append(None)
        else:
            full += (type(x), x.dtype, x.get_device(), x.shape, x.stride())
    return tuple(full)


def _guard(key: Hashable, tensors: Tensors, plan: Any) -> Known:
    """The plan, which guards find from now on."""
    first: dict[int, int] = {}
    same = []
    for place, x in enumerate(tensors):
        if x is not None and first.setdefault(id(x), place) != place:
            same.append((first[id(x)], place))
    places = tuple(first.values())
    present = [tensors[place] for place in places]
    constant = not any(x.requires_grad for x in present)
    found = _guarded.get((key, tuple(map(type, tensors))), [])
    if tensor_guards is None or len(places) < 2 or len(found) >= _MAX_GUARDS:  # making guards takes long
        return Known(plan, constant)
    known = Known(plan, constant, guards(present), itemgetter(*places), tuple(same))
    if len(_guarded) >= _MAX_PLANS:
        _guarded.clear()
    _guarded.setdefault((key, tuple(map(type, tensors))), found).insert(0, known)
    return known


def guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors, all different ones, have the metadata of these, which are so too."""
    assert tensor_guards is not None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
