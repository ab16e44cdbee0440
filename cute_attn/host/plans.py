"""Records and plans of earlier calls, found by metadata.

A call that repeats an earlier one is recognized before any check, by its arguments as given. The guards that torch
uses for compiled code compare types, dtypes, devices, shapes, strides and dispatcher state of all tensors at once. The
values that functions among the arguments read are compared step by step (:mod:`cute_attn.epilogues.functions.reads`).
If no guard matches, a key of the same metadata finds the record, which takes five times as long. A call is recorded
when it is made for the second time.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.epilogues.functions.known import traces_alone
from cute_attn.epilogues.functions.reads import Reads, Step
from cute_attn.epilogues.names import registered_functions
from cute_attn.host import block_masks, doors
from cute_attn.host.call import pack_epilogues
from cute_attn.host.memory import Tensors, all_plain, tensor_guards
from cute_attn.host.record import Record, Recording, thread

_MOST = 4096
_MOST_GUARDS = 8
"""Maximum guards per key, newest first; the guard of a new record replaces the oldest."""

Tables = Callable[[], Tensors | None]
"""A function that returns the tensors made from a BlockMask's blocks, or None if there are none or they are stale."""
Read = tuple[tuple, Tables | None]
"""The functions from which a call's epilogues are traced, each of which may be None, and tables of its BlockMask."""
NOTHING: Read = ((), None)


def no_dispatch_mode() -> bool:
    """True if, for plain tensors, an implementation can be called directly instead of the operator.

    The dispatcher costs more time than the launch. It is needed where something observes or transforms operators:
    compilers, tracers, modes, function transforms, profilers. An autograd node of :mod:`cute_attn.api.operators`
    records the direct call.
    """
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _function_transforms() is not None
        or _tracing_state() is not None
        or _profiler_enabled()
    )


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_function_transforms, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiler_enabled = torch.autograd._profiler_enabled


class Options:
    """A key component that is made once and looked up often, so its hash is stored."""

    __slots__ = ("_hash", "values")

    def __init__(self, values: tuple[Hashable, ...]) -> None:
        self.values, self._hash = values, hash(values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Options) and self.values == other.values)


def read_by(
    functions: tuple[Any, Any, Any], sizes: tuple, starts: Tensors = (), epilogues: Any = ()
) -> tuple[tuple, Tensors, Read] | None:
    """A key component and tensors of a call with functions or named epilogues, and what :func:`find` takes of them.

    Returns None if an epilogue is a user's class, which may do anything.

    Args:
        functions: score_mod, mask_mod and block_mask.
        sizes: batch, queries, heads, keys and kv heads; with a BlockMask those of :class:`.block_masks.Packed`.
        starts: cu_seqlens of packed sequences with a BlockMask.
        epilogues: the call's named epilogues.
    """
    score_mod, mask_mod, block_mask = functions
    # A number takes torch's default dtype where it meets an integer; a captured tensor's gradient repeats in no order.
    key: tuple[Any, ...] = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        id(getattr(score_mod, "__code__", None)),
        id(getattr(mask_mod, "__code__", None)),
        *sizes,  # guards of functions take longer than others: few of each key
    )
    own: Tensors = ()
    read: tuple[Any, ...] = (score_mod, mask_mod)
    tables: Tables | None = None
    if block_mask is not None:
        key += (getattr(block_mask, "BLOCK_SIZE", None), getattr(block_mask, "seq_lengths", None))
        read += (getattr(block_mask, "mask_mod", None),)
        tables = functools.partial(block_masks.tables_of, block_mask, sizes, starts)
    if type(epilogues) is not tuple or epilogues:
        names, own, numbers = pack_epilogues(epilogues)
        registered = registered_functions([name.partition(":")[0] for name in names])
        if registered is None:
            return None
        key += (names, numbers, tuple(map(id, registered)))
        read += tuple(function for one in registered for function in one.functions)
    return key, own, (read, tables)


STORES = ("_plans", "_records", "_guarded", "_kept")
"""Names of this module's stores; a benchmark or a test replaces them to start afresh."""

# ---- records ----


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A record, and the guards that recognize its calls.

    Attributes:
        check: torch's guards of the tensors that ``pick`` selects.
        pick: selects the tensors that were present, each once.
        same: index pairs of tensors that are the same object, which guards cannot detect.
        reads: steps that compare the values that functions read, and keep objects alive that they compare by identity.
        tables: whether the call's tensors include those of a BlockMask's blocks.
    """

    record: Record
    check: Callable[..., bool]
    pick: Callable[[Tensors], Tensors]
    same: tuple[tuple[int, int], ...]
    reads: tuple[Step, ...] = ()
    tables: bool = False


_guarded: dict[tuple[Any, ...], list[_Guarded]] = {}
_records: dict[tuple[Any, ...], Record | bool] = {}
"""Records by all metadata; True after the first call, False for a call that cannot be recorded."""
_kept: dict[tuple[Any, ...], tuple] = {}
"""Objects kept alive because keys of ``_records`` contain their ids."""


def find(key: Hashable, tensors: Tensors, read: Read = NOTHING) -> tuple[Record, Tensors] | None:
    """The record of an earlier call with this key and metadata, and the tensors to run it with; or None.

    Also None for arguments of wrong types, within a recording, and where something observes or transforms operators.
    Only plain tensors (:func:`cute_attn.host.memory.all_plain`) have records.

    key: the arguments as given, except for tensors and functions.
    """
    functions, tables = read
    if not no_dispatch_mode() or thread.recording is not None or forward_ad._current_level >= 0:
        return None
    try:
        guarded = _guarded.get((key, tuple(map(type, tensors))), ())
        if guarded and tensors[0].is_nested:
            return None  # torch's guards end the process
        if guarded and functions and torch.cuda.is_current_stream_capturing():
            return None  # what a graph captures is held for good
        for known in guarded:
            given = tensors
            if known.reads:
                own = _read(known.reads, functions)
                if own is None:
                    continue
                given = (*tensors, *own)
            if known.tables:
                made = tables()  # type: ignore[misc]
                if made is None:
                    return None
                given = (*given, *made)
            if known.check(*known.pick(given)) and (
                not known.same or all(given[i] is given[j] for i, j in known.same)
            ):
                return known.record, given
        if functions:
            return None
        record = _records.get(_full_key(key, tensors, gradients=True))
        if type(record) is not Record or not all_plain(tensors):
            return None
    except (TypeError, AttributeError, RuntimeError):  # not hashable, no tensor, or one without memory
        return None
    _guard(key, tensors, record)
    return record, tensors


def _read(steps: tuple[Step, ...], functions: tuple) -> list[Tensor] | None:
    """The tensors that functions refer to, or None if a value they read has changed since ``steps`` were noted."""
    values: list[Any] = [functions]
    found: list[Any] = []
    try:
        for parent, get, kind, test in steps:
            x = get(values[parent])
            if type(x) is not kind or (test is not None and not test(x)):
                return None
            values.append(x)
            if kind is Tensor or kind is torch.nn.Parameter:
                found.append(x)
    except (LookupError, ValueError, AttributeError):  # a name or a cell without a value
        return None
    return found


def repeat(key: Hashable, tensors: Tensors, call: Callable[[], Any], read: Read = NOTHING) -> Any:
    """The results of a call without gradients, from the record of an earlier call or from :func:`recorded`.

    A call with gradients is not recorded here: ``call`` makes it.
    """
    known = find(key, tensors, read)
    if known is not None:
        record, given = known
        found = record.run(given) if record.constant or not torch.is_grad_enabled() else None
        return call() if found is None else found
    return call() if _requires_grad(tensors) else recorded(key, tensors, call, read)


def may_repeat(options: tuple, q: Any) -> bool:
    """True if equal arguments of a drop-in's function mean equal calls, so that :func:`repeat` may serve them.

    False in fp32, which depends on autocast and PyTorch's precision, and if an option is a tensor or a non-Python
    number, whose value each call reads. Also False in compiled code and under an observer, which must see each call.
    options: the arguments except tensors, some of them in tuples.
    """
    if torch.compiler.is_compiling() or doors.observer is not None:
        return False
    if not isinstance(q, Tensor) or q.dtype == torch.float32:
        return False
    for one in options:
        if type(one) not in _PLAIN and not (isinstance(one, tuple) and _PLAIN.issuperset(map(type, one))):
            return False
    return True


_PLAIN = frozenset((int, float, bool, str, type(None)))


def recorded(key: Hashable, tensors: Tensors, call: Callable[[], Any], read: Read = NOTHING) -> Any:
    """The results of a call that :func:`find` does not know. The second such call is recorded for later ones."""
    functions, tables = read
    on_gpu = len(tensors) > 0 and type(tensors[0]) in (Tensor, torch.nn.Parameter) and tensors[0].is_cuda
    if not on_gpu or not no_dispatch_mode() or thread.recording is not None or forward_ad._current_level >= 0:
        return call()
    own, before = Reads(*functions) if functions else None, traces_alone()
    complete, kept = (True, ()) if own is None else (own.complete, own.kept)
    try:
        full = _full_key(key if own is None else (key, own.key), tensors, gradients=True)
        known, made = _records.get(full), () if tables is None else tables()
    except (TypeError, AttributeError, RuntimeError):
        return call()
    if known is not True or not complete or made is None:
        found = call()
        if complete and known is None and traces_alone() == before:  # a trace may serve only this call
            _remember(full, True, kept)
        return found
    if own is not None and torch.cuda.is_current_stream_capturing():
        return call()  # a capture rebuilds a mask's tables
    given = tensors if own is None else (*tensors, *own.references, *made)
    found, record, repeats = _record(given, call, len(given) - len(tensors))
    if traces_alone() != before:
        return found
    if record is None:
        if repeats:
            _remember(full, False, kept)
    elif own is None:
        _remember(full, record)
        del _guarded.get((key, tuple(map(type, tensors))), [])[_MOST_GUARDS - 1 :]  # room for its guards
    else:
        _forget_dead()
        _guard(key, given, record, len(tensors), own, tables is not None)
    return found


def of_operator(name: Hashable, arguments: Sequence[Any], call: Callable[[], Any]) -> Any:
    """The results of a torch operator, below autograd, from the record of an earlier call or from :func:`recorded`.

    name: everything that results depend on besides the arguments.
    """
    tensors: list[Tensor] = []
    others: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            tensors.append(x)
            others.append(Tensor)
        elif type(x) is list and x and isinstance(x[0], Tensor):
            tensors += x
            others.append((Tensor, len(x)))
        else:
            others.append(tuple(x) if type(x) is list else x)
    key, given = (name, *others, torch.are_deterministic_algorithms_enabled()), tuple(tensors)
    known = find(key, given)
    found = None if known is None else known[0].run(given)
    return recorded(key, given, call) if found is None else found


def _record(tensors: Tensors, call: Callable[[], Any], users: int = 0) -> tuple[Any, Record | None, bool]:
    """The call's results, its record or None, and whether the outcome holds for all calls with its metadata."""
    if not all_plain(tensors):
        return call(), None, True
    with Recording(tensors, users) as recording:
        found = call()
    # As guards see it: whatever the mode of gradients is.
    constant = not any(x is not None and x.requires_grad for x in tensors)
    return found, recording.record(found, constant=constant), not recording.unlike


def _remember(full: tuple, known: Record | bool, kept: Sequence[Any] = ()) -> None:
    if len(_records) >= _MOST:
        forget()
    _records[full] = known
    if kept:
        _kept[full] = tuple(kept)


def _guard(
    key: Hashable,
    tensors: Tensors,
    record: Record,
    given: int | None = None,
    reads: Reads | None = None,
    tables: bool = False,
) -> None:
    """Add guards by which :func:`find` finds a record. given: number of arguments in ``tensors``; others are read."""
    first: dict[int, int] = {}
    same = []
    for place, x in enumerate(tensors):
        if x is not None and first.setdefault(id(x), place) != place:
            same.append((first[id(x)], place))
    places = tuple(first.values())
    bucket = (key, tuple(map(type, tensors[:given])))
    found = _guarded.get(bucket, [])
    if len(found) >= _MOST_GUARDS and reads is None:
        return  # making guards takes long
    if len(_guarded) >= _MOST:
        _guarded.clear()
    del found[_MOST_GUARDS - 1 :]
    steps = () if reads is None else tuple(reads.steps)
    check = guards([tensors[place] for place in places])
    one = len(places) == 1  # itemgetter would make no tuple of it
    pick = operator.itemgetter(*([slice(places[0], places[0] + 1)] if one else places))
    known = _Guarded(record, check, pick, tuple(same), steps, tables)
    _guarded.setdefault(bucket, found).insert(0, known)


def guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that checks if tensors have the metadata of ``tensors``. In both, tensors must be distinct objects."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# ---- plans ----


class Plan(NamedTuple):
    """The result of planning a call by its metadata: its checks passed, and these kernels serve it.

    Attributes:
        kernel: the main kernel, which makes the epilogues' arguments. None if no kernel computes anything.
        functions: compiled kernels, by their role in the call.
        division: how work is divided among CTAs, if the host decides that.
    """

    kernel: Any = None
    functions: Mapping[str, Any] = MappingProxyType({})
    division: Any = None


_plans: dict[tuple[Any, ...], Any] = {}


def plan(key: Hashable, tensors: Tensors, make: Callable[[], Any]) -> Any:
    """The plan of an earlier call with this key and metadata, or a new one of ``make``, which checks the call."""
    try:
        full = _full_key(key, tensors)
        made = _plans.get(full)
    except (TypeError, AttributeError, RuntimeError):  # such as an option that cannot be hashed
        return make()
    if made is None:
        made = make()
        if len(_plans) >= _MOST:
            forget()
        if any(isinstance(x, weakref.ref) for x in _flat(key)):
            _forget_dead()
        _plans[full] = made
    return made


def forget(owner: Any = None) -> None:
    """Forget everything, or the entries with a key that begins with ``owner``."""
    for kept in (_plans, _records, _guarded, _kept):
        for full in list(kept):
            if owner is None or (isinstance(full[0], tuple) and full[0] and full[0][0] is owner):
                kept.pop(full, None)


def _forget_dead() -> None:
    """Forget the plans and records of traced functions that no longer exist, and with them their kernels."""
    for kept in (_plans, _records, _guarded):
        for full in list(kept):
            if _is_dead(full[0]):
                kept.pop(full, None)
    for bucket, found in list(_guarded.items()):
        alive = [one for one in found if one.record.plan is None or not _is_dead(one.record.plan.options)]
        if alive:
            _guarded[bucket] = alive
        else:
            _guarded.pop(bucket, None)


def _is_dead(key: Any) -> bool:
    return any(isinstance(x, weakref.ref) and x() is None for x in _flat(key))


def _flat(key: Any) -> list[Any]:
    if isinstance(key, Options):
        key = key.values
    return [one for x in key for one in _flat(x)] if isinstance(key, tuple) else [key]


def _requires_grad(tensors: Tensors) -> tuple[bool, ...]:
    """Whether each tensor requires a gradient; () if none does or gradients are disabled."""
    if not torch.is_grad_enabled():
        return ()
    found = tuple([isinstance(x, Tensor) and x.requires_grad for x in tensors])
    return found if True in found else ()


def _full_key(key: Hashable, tensors: Tensors, *, gradients: bool = False) -> tuple[Hashable, ...]:
    """The key with the metadata of all tensors. gradients: for a record, which also depends on ``requires_grad`` and
    on which tensors are the same object."""
    full: list[Any] = [key]
    if gradients:
        full.append(_requires_grad(tensors))
        ids = list(map(id, tensors))
        full.append(tuple(map(ids.index, ids)))
    for x in tensors:  # one flat tuple, for speed
        if x is None:
            full.append(None)
        else:
            full += (type(x), x.dtype, x.get_device(), x.shape, x.stride())
    return tuple(full)
