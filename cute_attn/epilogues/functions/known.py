"""A cache of epilogues, for functions that are passed in several calls. Imports no compiler."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.epilogues.functions.reads import Reads
from cute_attn.epilogues.functions.saved import text_of, traces_of
from cute_attn.epilogues.functions.trace import Trace, check_function, trace
from cute_attn.epilogues.names import is_registered, user_epilogue


class _View(NamedTuple):
    """A view that a function makes of a captured tensor; the tensor's metadata determine the view.

    Attributes:
        place: index of the captured tensor.
        offset: elements from the tensor's first element to the view's.
    """

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensors: list[Tensor]) -> Tensor:
        """The same view of the tensor that is captured now."""
        x = tensors[self.place]
        return x.as_strided(self.shape, self.strides, x.storage_offset() + self.offset)


class _Known(NamedTuple):
    """A trace's epilogue or None, the places of its tensors, and the objects whose ids are in the key."""

    epilogue: Any
    tensors: tuple[int | _View, ...]
    kept: tuple


_MOST = 256
_known: OrderedDict[tuple, _Known] = OrderedDict()
_recent: deque[Any] = deque(maxlen=_MOST)
"""Keeps epilogues of functions that are traced in each call, since calls in flight use their names."""
_held: dict[str, Any] = {}
_texts: dict[str, str] = {}
"""Texts of functions in exported programs, by the names of their epilogues."""
_lock = threading.Lock()


class _Thread(threading.local):
    alone = 0


_thread = _Thread()


def traces_alone() -> int:
    """Number of this thread's traces that served only one call, since later calls cannot be compared with that call."""
    return _thread.alone


def _registering() -> Any:
    from cute_attn.epilogues.functions import epilogue  # loads the DSL

    return epilogue


def epilogue_of(
    score_mod: Callable | None,
    mask_mod: Callable | None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[str, tuple[Tensor, ...]]:
    """The name of the functions' epilogue, and the tensors that they capture; ("", ()) if they change no score.

    Functions are traced once for each set of values that they read, see :mod:`.reads`, or in each call if these values
    cannot be compared. An epilogue lives as long as this cache, a pending backward or :func:`hold` needs it.

    dtype: the scores' dtype.
    """

    return _known_or_traced(score_mod, mask_mod, device, (dtype,), _registered)


def held_epilogue_of(traced: Trace) -> tuple[str, tuple[Tensor, ...]]:
    """Like :func:`epilogue_of`, for a trace. Holds the epilogue, since a graph refers to it by name."""
    return _held_as(_registered(traced)), traced.tensors


def block_mask_epilogue_of(
    mask_mod: Callable, partial: Callable | None, unites: bool, device: torch.device | None
) -> tuple[str, tuple[Tensor, ...]]:
    """Like :func:`epilogue_of`, for a mask with lists of blocks. The caller appends the lists' tensors.

    partial: replaces ``mask_mod`` in listed blocks that need a mask; it captures the same tensors except the first.
    None: no replacement. unites: True if lists of query blocks are unions over several heads.
    """

    def register(traced: Trace) -> Any:
        traced_partial = None if partial is None else trace(None, partial, device)
        return _registered_block_mask(traced, traced_partial, unites)

    return _known_or_traced(None, mask_mod, device, (torch.float32, partial is None, unites), register)


def held_block_mask_epilogue_of(
    traced: Trace, partial: Trace | None, unites: bool
) -> tuple[str, tuple[Tensor, ...]]:
    """Like :func:`block_mask_epilogue_of`, for traces. Holds the epilogue, since a graph refers to it by name."""
    return _held_as(_registered_block_mask(traced, partial, unites)), traced.tensors


def _registered(traced: Trace) -> Any:
    if traced.output.op == "score":
        return None
    made = _registering().register_trace(traced)
    if torch.compiler.is_exporting():
        _texts[made.name] = text_of(traced)
    return made


def _registered_block_mask(traced: Trace, partial: Trace | None, unites: bool) -> Any:
    made = _registering().register_block_mask(traced, partial, unites)
    if torch.compiler.is_exporting():
        _texts[made.name] = text_of(traced, partial, unites)
    return made


# ---- exported programs ----


def with_texts(epilogues: Sequence[str]) -> tuple[str, ...]:
    """Epilogues as arguments of an operator: in an export, the text of each function follows its name and letters."""
    if not torch.compiler.is_exporting():
        return tuple(epilogues)
    texts = ((item, _texts.get(item.partition(":")[0])) for item in epilogues)
    return tuple(item if text is None else f"{item}{':' * (':' not in item)}:{text}" for item, text in texts)


def without_texts(epilogues: Sequence[str]) -> tuple[str, ...]:
    """The inverse of :func:`with_texts`. Registers functions that this process has not traced."""
    return tuple([_without_text(item) if item.count(":") > 1 else item for item in epilogues])


def _without_text(item: str) -> str:
    name, letters, text = item.split(":")
    if not is_registered(name):
        traced, partial, unites = traces_of(text)
        made = _registered(traced) if unites is None else _registered_block_mask(traced, partial, unites)
        if made.name != name:
            raise ValueError(
                f"{name} is a function of another version's program; accepted: one exported anew"
            )
        hold(name)
    return f"{name}:{letters}" if letters else name


def _held_as(epilogue: Any) -> str:
    if epilogue is None:
        return ""
    hold(epilogue.name)
    return epilogue.name


def hold(name: str) -> None:
    """Keep an epilogue forever: a graph that uses its name or contains its kernel may run at any time."""
    _held[name] = user_epilogue(name)


def _known_or_traced(
    score_mod: Callable | None,
    mask_mod: Callable | None,
    device: torch.device | None,
    kind: tuple,
    register: Callable[[Trace], Any],
) -> tuple[str, tuple[Tensor, ...]]:
    """See :func:`epilogue_of`. kind: the scores' dtype, and anything else on which ``register``'s result depends."""
    for what, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            check_function(what, function)
    reads = Reads(score_mod, mask_mod, state=(device, *kind))
    key = reads.key
    if reads.complete and not torch.compiler.is_exporting():
        with _lock:
            known = _known.get(key)
            if known is not None:
                _known.move_to_end(key)
        if known is not None:
            own = reads.tensors
            tensors = tuple([x.of(own) if isinstance(x, _View) else own[x] for x in known.tensors])
            return known.epilogue.name if known.epilogue is not None else "", tensors
    # A kept trace serves calls with gradients as well; a trace for only this call sees torch's state as it is.
    with torch.set_grad_enabled(torch.is_grad_enabled() or reads.complete):
        traced = trace(score_mod, mask_mod, device, kind[0])
        epilogue = register(traced)
    places = {id(x): i for i, x in enumerate(reads.tensors)}
    read = tuple(
        _place_of(x, source, places) for x, source in zip(traced.tensors, traced.sources, strict=True)
    )
    lasts = reads.complete and not traced.reads and None not in read
    if lasts and Reads(score_mod, mask_mod, state=(device, *kind)).key == key:  # tracing changed nothing
        found = _Known(epilogue, read, tuple(reads.kept))  # type: ignore[arg-type]
        with _lock:
            _known[key] = found
            while len(_known) > _MOST:
                _known.popitem(last=False)
    else:
        _thread.alone += 1
        _recent.append(epilogue)
    return epilogue.name if epilogue is not None else "", traced.tensors


def _place_of(x: Tensor, source: Tensor | None, places: dict[int, int]) -> int | _View | None:
    """Where later calls find the traced tensor x; None if the function computes it."""
    if id(x) in places:
        return places[id(x)]
    if source is None or id(source) not in places or x.dtype != source.dtype or not _is_alias_of(x, source):
        return None
    offset = int(x.storage_offset()) - int(source.storage_offset())
    return _View(places[id(source)], tuple(x.shape), x.stride(), offset)


_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
