"""A cache of epilogues, for functions that are passed in several calls. Imports no compiler."""

import base64
import json
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.epilogues.functions.graph import Graph, Node, ordered
from cute_attn.epilogues.functions.reads import Reads
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


_thread = threading.local()


def traces_alone() -> int:
    """Number of this thread's traces that served only one call, since later calls cannot be compared with that call."""
    return getattr(_thread, "alone", 0)


def epilogue_of(
    score_mod: Callable | None,
    mask_mod: Callable | None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    unites: bool | None = None,
    partial: Callable | None = None,
) -> tuple[str, tuple[Tensor, ...]]:
    """The name of the functions' epilogue, and the tensors that they capture; ("", ()) if they change no score.

    Functions are traced once for each set of values that they read, see :mod:`.reads`, or in each call if these values
    cannot be compared. An epilogue lives as long as this cache, a pending backward or :func:`hold` needs it.

    dtype: the scores' dtype. unites, partial: for a mask with lists of blocks, see :class:`.trace.Trace`; the caller
    appends the lists' tensors.
    """
    for what, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            check_function(what, function)
    state = (device, dtype, unites, partial is None)
    reads = Reads(score_mod, mask_mod, state=state)
    key = reads.key
    if reads.complete and not torch.compiler.is_exporting():
        with _lock:
            known = _known.get(key)
            if known is not None:
                _known.move_to_end(key)
        if known is not None:
            read = reads.tensors
            tensors = tuple([x.of(read) if isinstance(x, _View) else read[x] for x in known.tensors])
            return known.epilogue.name if known.epilogue is not None else "", tensors
    # A kept trace serves calls with gradients as well; a trace for only this call sees torch's state as it is.
    with torch.set_grad_enabled(torch.is_grad_enabled() or reads.complete):
        traced = trace(score_mod, mask_mod, device, dtype)
        own = None if partial is None else trace(None, partial, device)
        epilogue = _registered(replace(traced, partial=own, unites=unites))
    places = {id(x): i for i, x in enumerate(reads.tensors)}
    found = [_place_of(*one, places) for one in zip(traced.tensors, traced.sources, strict=True)]
    lasts = reads.complete and not traced.reads and None not in found
    if lasts and Reads(score_mod, mask_mod, state=state).key == key:  # tracing changed nothing
        with _lock:
            _known[key] = _Known(epilogue, tuple(found), tuple(reads.kept))  # type: ignore[arg-type]
            while len(_known) > _MOST:
                _known.popitem(last=False)
    else:
        _thread.alone = traces_alone() + 1
        _recent.append(epilogue)
    return epilogue.name if epilogue is not None else "", traced.tensors


def held_epilogue_of(traced: Trace) -> tuple[str, tuple[Tensor, ...]]:
    """Like :func:`epilogue_of`, for a trace. Holds the epilogue, since a graph refers to it by name."""
    epilogue = _registered(traced)
    if epilogue is None:
        return "", traced.tensors
    hold(epilogue.name)
    return epilogue.name, traced.tensors


def _registered(traced: Trace) -> Any:
    if traced.output.op == "score" and traced.unites is None:
        return None
    from cute_attn.epilogues.functions.epilogue import register_trace  # loads the DSL

    made = register_trace(traced)
    if torch.compiler.is_exporting():
        _texts[made.name] = text_of(traced)
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
        made = _registered(trace_of(text))
        if made.name != name:
            raise ValueError(
                f"{name} is a function of another version's program; accepted: one exported anew"
            )
        hold(name)
    return f"{name}:{letters}" if letters else name


def hold(name: str) -> None:
    """Keep an epilogue forever: a graph that uses its name or contains its kernel may run at any time."""
    _held[name] = user_epilogue(name)


def _place_of(x: Tensor, source: Tensor | None, places: dict[int, int]) -> int | _View | None:
    """Where later calls find the traced tensor x; None if the function computes it."""
    if id(x) in places:
        return places[id(x)]
    if source is None or id(source) not in places or x.dtype != source.dtype or not _is_alias_of(x, source):
        return None
    offset = int(x.storage_offset()) - int(source.storage_offset())
    return _View(places[id(source)], tuple(x.shape), x.stride(), offset)


_is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]


# ---- traces as text ----


def text_of(traced: Trace) -> str:
    """A trace as ASCII letters, digits, "-", "_" and "="."""
    partial = None if traced.partial is None else _listed(traced.partial)
    content = [_listed(traced), partial, traced.unites]
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(content).encode())).decode()


def trace_of(text: str) -> Trace:
    """The trace of a :func:`text_of`, with meta tensors."""
    traced, partial, unites = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
    return replace(_trace(*traced), partial=None if partial is None else _trace(*partial), unites=unites)


def _listed(traced: Trace) -> list[Any]:
    nodes = ordered(traced.output)
    number = {node: i for i, node in enumerate(nodes)}
    rows = [[x.op, x.kind, [number[arg] for arg in x.args], x.value, x.depends_on, x.dtype] for x in nodes]
    tensors = [
        [str(x.dtype).removeprefix("torch."), x.dim(), x.dim() == 0 or x.stride(-1) == 1]
        for x in traced.tensors
    ]
    return [rows, tensors]


def _trace(rows: list[list[Any]], tensors: list[list[Any]]) -> Trace:
    graph, made = Graph(), list[Node]()
    for op, kind, args, value, depends_on, dtype in rows:
        value = tuple(value) if isinstance(value, list) else value
        made.append(graph.make(op, kind, [made[i] for i in args], value, depends_on, dtype))
    return Trace(graph, made[-1], tuple(_like(*one) for one in tensors))


def _like(dtype: str, dim: int, unit_stride: bool) -> Tensor:
    made = torch.empty((2,) * dim, dtype=getattr(torch, dtype), device="meta")
    return made if unit_stride else made.as_strided(made.shape, (*made.stride()[:-1], 2))
