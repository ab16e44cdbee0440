"""What a call does on the GPU: allocations and launches, executed, recorded, and repeated from the record.

A call that repeats an earlier one needs none of the Python between its arguments and its launches: it allocates what
that one allocated, sets addresses, and launches with arguments made once. Slots (:mod:`cute_attn.host.slots`) stand for
the tensors among them, also for views of an input or an output. Launching functions run without the interpreter's lock,
so each call has arguments of its own while it lasts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from cute_attn.host import counters, memory
from cute_attn.host.call import Call
from cute_attn.host.memory import ALIGNMENT_BYTES, Tensors, as_strided
from cute_attn.host.slots import TYPES, Slot, array, current_stream, prepared, slot, takes_slots

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


# ---- steps ----


class Steps:
    """Executes a call's allocations and launches."""

    def empty(
        self, like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Memory on ``like``'s device, which is the current one."""
        return memory.new_empty_strided(like, shape, strides, dtype)

    def work_tiles(self, device: int) -> Any:
        """A ``ForwardSchedule`` for one launch."""
        return counters.schedule(device)

    def launch(self, function: Callable[..., None], *arguments: Any) -> None:
        """Launch on the current stream."""
        function(*arguments)

    def copy(self, function: Callable[..., None], *arguments: Any) -> None:
        """:meth:`launch` a kernel that reads and writes tensors at any address."""
        self.launch(function, *arguments)

    def also(self) -> None:
        """Say that the call does more than allocate and launch, such as fill an output: a record would lack that."""

    def unlike_others(self) -> None:
        """Say that this call takes another way than most with its metadata, which another one may record."""


NOW = Steps()
"""Steps that leave no record."""


class _Place(NamedTuple):
    """Where a tensor among a launch's arguments lies.

    Attributes:
        source: index among the call's tensors and, behind them, its allocations.
        offset: bytes from the source's first element.
        whole: whether it is the source itself, as torch has it.
        shape, strides, dtype, device: its metadata.
    """

    source: int
    offset: int
    whole: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _WorkTiles:
    """Stands for :meth:`Steps.work_tiles` among recorded arguments."""


class Recording(Steps):
    """Executes a call, and records it."""

    def __init__(self, tensors: Tensors, users: int = 0) -> None:
        """tensors: the call's, some of them None, the last ``users`` of them users' epilogues'.

        A record keeps none of them. ``unlike``: whether :meth:`unlike_others` was called.
        """
        self._sources: list[Any] = list(tensors)
        self._allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self._given = len(tensors)
        self._own = self._given - users
        self._launches: list[tuple[Callable[..., None], list[Any]]] = []
        self._direct: set[int] = set()
        self._work_tiles: Any = None
        self._complete = True
        self.unlike = False

    def empty(
        self, like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """As of :class:`Steps`."""
        made = super().empty(like, shape, strides, dtype)
        self._allocations.append((shape, strides, dtype))
        self._sources.append(made)
        return made

    def work_tiles(self, device: int) -> Any:
        """As of :class:`Steps`."""
        self._work_tiles = super().work_tiles(device)
        return self._work_tiles

    def launch(self, function: Callable[..., None], *arguments: Any) -> None:
        """As of :class:`Steps`."""
        self.copy(function, *arguments)
        if self._complete:
            self._direct |= set(_sources_of(self._launches[-1][1]))

    def copy(self, function: Callable[..., None], *arguments: Any) -> None:
        """As of :class:`Steps`."""
        function(*arguments)
        if self._complete and takes_slots(function):
            self._launches.append((function, [self._record(x) for x in arguments]))
        else:
            self._complete = False

    def also(self) -> None:
        """As of :class:`Steps`: such a call is not repeated from its record."""
        self._complete = False

    def unlike_others(self) -> None:
        """As of :class:`Steps`: this call is not repeated."""
        self._complete, self.unlike = False, True

    def _record(self, x: Any) -> Any:
        if x is self._work_tiles and x is not None:
            return _WorkTiles
        if isinstance(x, Tensor):
            return self._place(x)
        return tuple(map(self._record, x)) if isinstance(x, tuple) else x

    def _place(self, x: Tensor) -> _Place | None:
        """Where ``x`` lies; where that cannot be told, the call is not repeated from its record."""
        if x.dtype not in TYPES:
            self._complete = False
            return None
        first, metadata = x.data_ptr(), (tuple(x.shape), tuple(x.stride()), x.dtype, x.device)
        sources = [(i, y) for i, y in enumerate(self._sources) if y is not None and _share_memory(x, y)]
        for source, y in sources:
            if y is x:
                return _Place(source, 0, True, *metadata)
        if len(sources) == 1 and x.numel():
            source, y = sources[0]
            return _Place(source, first - y.data_ptr(), False, *metadata)
        for source, y in sources:  # such as q, k and v of one tensor, whose distances may vary
            if y.data_ptr() == first and x.numel() >= y.numel() > 0:
                return _Place(source, 0, False, *metadata)
        self._complete = False
        return None

    def replay(self, results: Sequence[Tensor | None]) -> "Replay | None":
        """Repeats the call; None where it does more than was recorded.

        results: what the call returns, allocations, views of such, and None.
        """
        places = [None if x is None else self._place(x) for x in results]
        returned = [place.source for place in places if place is not None]
        if not (self._complete and self._launches) or min(returned, default=self._given) < self._given:
            return None
        allocations = list(self._allocations)
        for i, place in enumerate(places):
            # What is returned in another layout of all its memory is allocated in that layout.
            if place is None or place.whole or place.offset or returned.count(place.source) > 1:
                continue
            made = self._sources[place.source]
            if made.numel() == results[i].numel() and made.dtype == place.dtype:  # type: ignore[union-attr]
                allocations[place.source - self._given] = (place.shape, place.strides, place.dtype)
                places[i] = place._replace(whole=True)
        given = self._sources[: self._given]
        # Of integers (lengths, tables, states of dropout masks) kernels read one at a time; users' may read more.
        direct = (i for i in self._direct if i < self._given)
        rows = {i for i in direct if i >= self._own or given[i].is_floating_point()}
        used = tuple(i for i, x in enumerate(given) if x is not None)
        starts = [given[i].data_ptr() for i in used]
        first = [starts.index(start) for start in starts]
        number = {source: i for i, source in enumerate((*used, *range(self._given, len(self._sources))))}
        return Replay(
            device=given[used[0]].get_device(),
            tensors=used,
            aligned=tuple(
                i
                for i, (source, start) in enumerate(zip(used, starts, strict=True))
                if source in rows and start % ALIGNMENT_BYTES == 0
            ),
            same=tuple((j, i) for i, j in enumerate(first) if i != j),
            allocations=tuple(allocations),
            own=tuple(x == y for x, y in zip(allocations, self._allocations, strict=True)),
            launches=tuple(
                (function, tuple(_numbered(x, number) for x in arguments))
                for function, arguments in self._launches
            ),
            results=tuple(_numbered(x, number) for x in places),
        )


def _sources_of(x: Any) -> Iterator[int]:
    """The sources of a recorded argument, or of several."""
    if isinstance(x, _Place):
        yield x.source
    elif isinstance(x, tuple | list):
        for y in x:
            yield from _sources_of(y)


def _numbered(x: Any, number: dict[int, int]) -> Any:
    """A recorded argument, whose sources are numbered anew."""
    if isinstance(x, _Place):
        return x._replace(source=number[x.source])
    return tuple(_numbered(y, number) for y in x) if isinstance(x, tuple) else x


_share_memory = torch._C._is_alias_of  # type: ignore[attr-defined]


# ---- repeated calls ----


class _BoundLaunch(NamedTuple):
    """A launch's arguments for one call at a time.

    Attributes:
        function: launches the kernel.
        arguments: a list; those of the two places below are filled in by each call.
        whole: (place, source) of a tensor that is passed as torch has it, by which TVM FFI finds the current stream.
        work_tiles: the place of a ``ForwardSchedule``, or None.
    """

    function: Callable[..., None]
    arguments: list[Any]
    whole: tuple[int, int] | None
    work_tiles: int | None


class _Bound(NamedTuple):
    """The arguments of one call at a time.

    Attributes:
        launches: of the call.
        addresses: (address, source, offset) of the slots among their arguments.
        streams: whether each launch finds the current stream by itself.
    """

    launches: tuple[_BoundLaunch, ...]
    addresses: tuple[tuple[Any, int, int], ...]
    streams: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded call, for others with tensors of the same metadata.

    Attributes:
        device: the tensors', as they give it.
        tensors: which of the call's tensors are not None; they are the first sources, the allocations follow.
        aligned: which of them a kernel read where they are, at multiples of 16 bytes, as in each call.
        same: which pairs of them started at one address, as they do in each call.
        allocations: shapes, strides and dtypes, in order.
        own: of each, whether kernels' arguments have this layout if they are the whole allocation.
        launches: functions and their recorded arguments.
        results: where the results lie; None for None.
        free: arguments that no call has.
    """

    device: int
    tensors: tuple[int, ...]
    aligned: tuple[int, ...]
    same: tuple[tuple[int, int], ...]
    allocations: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    own: tuple[bool, ...]
    launches: tuple[tuple[Callable[..., None], tuple], ...]
    results: tuple[_Place | None, ...]
    free: list[_Bound] = field(default_factory=list)

    def run(self, tensors: Tensors) -> tuple[Tensor | None, ...] | None:
        """The call's results; None where a tensor starts elsewhere than kernels have been chosen for."""
        if self.device != memory.current_device():
            with memory.on_device(self.device):
                return self.run(tensors)
        sources = [tensors[i] for i in self.tensors]
        starts = [x.data_ptr() for x in sources]
        unaligned = 0
        for i in self.aligned:
            unaligned |= starts[i]
        if unaligned % ALIGNMENT_BYTES or (self.same and any(starts[i] != starts[j] for i, j in self.same)):
            return None
        like = sources[0]
        for layout in self.allocations:
            made = memory.new_empty_strided(like, *layout)
            sources.append(made)
            starts.append(made.data_ptr())
        try:
            bound = self.free.pop()
        except IndexError:
            bound = self._bind()
        for address, source, offset in bound.addresses:
            address.value = starts[source] + offset
        if bound.streams:
            self._launch(bound, sources)
        else:
            with current_stream(self.device):
                self._launch(bound, sources)
        self.free.append(bound)
        return tuple([None if x is None else self._result(x, sources[x.source]) for x in self.results])

    def _launch(self, bound: _Bound, sources: list[Tensor]) -> None:
        for function, arguments, whole, work_tiles in bound.launches:
            if work_tiles is not None:
                arguments[work_tiles] = counters.schedule(self.device)
            if whole is None:
                function(*arguments)
            else:
                arguments[whole[0]] = sources[whole[1]]
                function(*arguments)
                arguments[whole[0]] = None  # keep no tensor alive
            if work_tiles is not None:
                arguments[work_tiles] = None  # nor counters, which a CUDA graph's capture allocates

    @staticmethod
    def _result(place: _Place, made: Tensor) -> Tensor:
        if place.whole:
            return made
        return as_strided(made, place.shape, place.strides, place.offset // made.element_size())

    def _bind(self) -> _Bound:
        addresses: list[tuple[Any, int, int]] = []

        def bind(x: Any) -> Any:
            if isinstance(x, _Place):
                one: Slot = slot(x.shape, x.strides, x.dtype, x.device)
                addresses.append((one.address, x.source, x.offset))
                return one.tensor
            return tuple(map(bind, x)) if isinstance(x, tuple) else x

        launches = []
        for function, recorded in self.launches:
            whole, work_tiles, arguments = None, None, []
            for i, x in enumerate(recorded):
                if x is _WorkTiles:
                    work_tiles, value = i, None
                elif whole is None and isinstance(x, _Place) and self._is_torchs(x):
                    whole, value = (i, x.source), None
                else:
                    value = bind(x)
                arguments.append(array(value) if isinstance(value, tuple) else value)
            launches.append(_BoundLaunch(function, arguments, whole, work_tiles))
        streams = self.device < 0 or all(one.whole is not None for one in launches)
        return _Bound(tuple(launches), tuple(addresses), streams)

    def _is_torchs(self, place: _Place) -> bool:
        """Whether a call has that very tensor, rather than a view of it."""
        given = len(self.tensors)
        return place.whole and (place.source < given or self.own[place.source - given])


class Repeats:
    """Of a plan whose calls repeat: the first of them records, the others follow the record.

    Attributes:
        replay: the record, or None where there is none.
    """

    __slots__ = ("_tried", "replay")

    def __init__(self) -> None:
        self.replay: Replay | None = None
        self._tried = False

    def run(
        self, tensors: Tensors, call: Callable[[Steps], tuple[Tensor | None, ...]], users: int = 0
    ) -> tuple[Tensor | None, ...]:
        """The call's results.

        tensors: all that it reads and writes but its results, the last ``users`` of them users' epilogues'; ``call``
        makes it in steps.
        """
        if self.replay is not None:
            found = self.replay.run(tensors)
            return call(NOW) if found is None else found
        if self._tried:
            return call(NOW)
        recording = Recording(tensors, users)
        found = call(recording)
        self.replay, self._tried = recording.replay(found), not recording.unlike
        return found


class Repeatable:
    """A plan, a frozen dataclass with a field ``repeats``, which is None until :mod:`cute_attn.host.plans` finds it."""

    __slots__ = ()
    repeats: Any

    def ready(self) -> Self:
        """The plan for calls that repeat."""
        return self if self.repeats is not None else replace(self, repeats=Repeats())  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated(Repeatable):
    """A plan that is a function of a call's tensors, from a call's options on.

    Attributes:
        run: makes the call in steps; returns its results.
        repeats: as of :class:`Repeatable`.
    """

    run: Callable[[Tensors, Steps], tuple[Tensor | None, ...]]
    repeats: Repeats | None = None

    def __call__(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        """A call's results."""
        if self.repeats is None:
            return self.run(tensors, NOW)
        return self.repeats.run(tensors, lambda steps: self.run(tensors, steps))


# ---- epilogues' arguments ----


@dataclass(frozen=True, slots=True)
class ScoreArgs:
    """The epilogues' arguments, made once; each call substitutes its tensors.

    Attributes:
        parts: the arguments, a tuple of them for each epilogue; an array where no tensor is substituted.
        places: (part, index in the part, index among the call's tensors) of each tensor.
    """

    parts: tuple
    places: tuple[tuple[int, int, int], ...]

    def fill(self, tensors: Tensors) -> tuple:
        """The arguments with ``tensors`` substituted."""
        if not self.places:
            return self.parts
        parts = list(self.parts)
        for part, place, tensor in self.places:
            own = list(parts[part])
            own[place] = tensors[tensor]
            parts[part] = tuple(own)
        return tuple(parts)

    @classmethod
    def of(cls, kernel: Any, call: Call, function: Any) -> "ScoreArgs | None":
        """Of the package's own epilogues, which pass the call's tensors on unchanged, for a launching function.

        None with users' classes, which may derive other tensors.
        """
        if call.epilogues or kernel.traits.variant:
            return None
        given = {name: getattr(call, name) for name in _SCORE_TENSORS}
        # One tensor may be two arguments, which objects of their own tell apart.
        call = call._replace(**{name: x.detach() for name, x in given.items() if x is not None})
        own = {id(getattr(call, name)): Call._fields.index(name) for name in _SCORE_TENSORS}
        parts, places = list(kernel.score_args(call.score_inputs())), []
        for i, part in enumerate(parts):
            if isinstance(part, tuple):
                places += [(i, j, own[id(x)]) for j, x in enumerate(part) if isinstance(x, Tensor)]
                parts[i] = tuple(None if isinstance(x, Tensor) else x for x in part)  # keep no tensor alive
        return cls(tuple(parts) if places else prepared(function, tuple(parts)), tuple(places))


_SCORE_TENSORS = ("alibi_slopes", "bias", "sinks", "rng_state")
