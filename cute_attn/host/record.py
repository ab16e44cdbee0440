"""A call's work on the GPU: allocations and launches, executed, recorded, and repeated from the record.

A call that repeats an earlier one skips the Python between its arguments and its launches: it repeats the allocations,
sets addresses, and launches with arguments made once. All code that allocates and launches calls the functions of this
module. While a thread records, these functions note each step, so that the record of a public function's call contains
every step, also those of nested calls. Slots (:mod:`cute_attn.host.slots`) replace the tensors among the arguments,
including views of inputs and outputs. Launch functions run without the interpreter's lock, so no two calls use the same
arguments at the same time.
"""

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from cute_attn.host import counters, memory
from cute_attn.host.memory import ALIGNMENT_BYTES, Tensors, as_strided, overlap
from cute_attn.host.slots import CUDA, TYPES, Slot, array, set_stream, slot, takes_slots

# ---- a call's steps ----


class _Thread(threading.local):
    recording: "Recording | None" = None


thread = _Thread()
"""``thread.recording`` is the recording of this thread's call, or None."""


allocate: Callable[..., Tensor] = memory.empty_strided_cuda
"""Make an uninitialized tensor on the current GPU from shape, strides and dtype. Tests replace this function."""


def empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor on ``like``'s device. Recorded."""
    if like.is_cuda:
        with memory.on_device(like.get_device()):
            made = allocate(shape, strides, dtype)
    else:
        made = like.new_empty_strided(shape, strides, dtype=dtype)
    if thread.recording is not None:
        thread.recording.add_source(made, (shape, strides, dtype))
    return made


def contiguous(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous :func:`empty`, by default of ``like``'s dtype."""
    return empty(like, shape, memory.contiguous_strides(shape), dtype or like.dtype)


def together(like: Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Contiguous tensors, uninitialized, one after the other in one allocation: see :func:`empty`."""
    firsts = [*accumulate(map(math.prod, shapes), initial=0)]
    whole = empty(like, (firsts.pop(),), (1,), dtype)
    return [
        as_strided(whole, shape, memory.contiguous_strides(shape), first)
        for shape, first in zip(shapes, firsts, strict=True)
    ]


def drawn(draw: Callable[[], Tensor]) -> Tensor:
    """The result of ``draw``, which each repeated call computes again, such as the state of a dropout mask."""
    made = draw()
    if thread.recording is not None:
        thread.recording.add_source(made, draw)
    return made


def work_tiles(device: int) -> Any:
    """A ``ForwardSchedule`` for one launch."""
    found = counters.schedule(device)
    if thread.recording is not None:
        thread.recording.work_tiles = found
    return found


def launch(function: Callable[..., None], *arguments: Any, direct: bool = True) -> None:
    """Launch a kernel. direct: False if it reads and writes tensors at any address."""
    function(*arguments)
    if thread.recording is not None:
        thread.recording.add_launch(function, arguments, direct=direct)


def step(function: Callable[..., Any], *arguments: Any) -> None:
    """Run a function that takes torch tensors and writes some of them in place."""
    function(*arguments)
    if thread.recording is not None:
        thread.recording.add_launch(function, arguments, of_torch=True)


def sum_of_copies(made: Tensor, copies: Tensor) -> None:
    """For :func:`step`: write the sum of ``copies`` over the first dimension to ``made``, in its dtype and shape."""
    made.copy_((copies.sum(0) if len(copies) > 1 else copies[0]).view(made.shape))


def overwritten(*tensors: Tensor, alone: bool = False, beside: Tensors = ()) -> None:
    """Increment the version counters of arguments that a kernel has written.

    Autograd uses them to detect changes to memory that it saved for a backward. Inference tensors have none.
    In a repeated call these tensors must not overlap each other, nor those ``beside`` them; if ``alone``, nor any other
    tensor.
    """
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
    if thread.recording is not None:
        thread.recording.written += tensors
        thread.recording.alone += tensors if alone else ()
        thread.recording.beside += beside


def readable(x: Tensor, alignment: int = 0) -> Tensor:
    """``x``, or a copy if kernels cannot read its strides or its address.

    alignment: rows start at multiples of this many elements, 0 for 16 bytes; so is the last dimension.
    """
    regular = memory.rows_are_regular(x, alignment)
    if regular and memory.may_be_aligned(x):
        return x
    if regular:  # a copy only for its address, or none
        unlike_others()
        if alignment and memory.is_aligned(x, alignment):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def in_place(x: Tensor, alignment: int = 0) -> Tensor:
    """``x``, with strides as kernels assume them. It must start at a multiple of ``alignment`` elements or 16 bytes."""
    if not memory.is_aligned(x):  # the next call's may start between these multiples
        unlike_others()
    return memory.regular(x, alignment)


def also() -> None:
    """Mark the call as not replayable: it does something that a record lacks, such as read a tensor on the host."""
    if thread.recording is not None:
        thread.recording.complete = False


def unlike_others() -> None:
    """Skip recording this call only: it depends on an address. A later call with its metadata may be recorded."""
    if thread.recording is not None:
        thread.recording.complete, thread.recording.unlike = False, True


def planned(plan: Any, tensors: Tensors) -> None:
    """Note the plan of the recorded call, and the tensors that autograd saves if gradients are enabled."""
    if thread.recording is not None:
        thread.recording.plan = plan
        thread.recording.saved = tensors if torch.is_grad_enabled() else None


# ---- recordings ----


class _Place(NamedTuple):
    """The location of a launch's tensor argument.

    Attributes:
        source: index into the call's tensors, followed by its allocations.
        offset: bytes from the source's first element.
        whole: whether the argument is the source tensor itself rather than a view of it.
        shape, strides, dtype, device: metadata of the argument.
    """

    source: int
    offset: int
    whole: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_CONSTANT = frozenset((type(None), bool, int, float, str))
"""Types of results other than tensors; an empty list is accepted too."""


class _WorkTiles:
    """Placeholder for the result of :func:`work_tiles` among recorded arguments."""


class Recording:
    """Notes a call's steps within a ``with`` block.

    Attributes:
        work_tiles: the result of :func:`work_tiles`.
        complete: whether a record can contain everything that the call did.
        unlike: whether :func:`unlike_others` was called.
        written, alone, beside: arguments of :func:`overwritten`; ``alone``: of calls with ``alone=True``.
        counts: (counter, entry) of each count that the call incremented.
        plan, saved: arguments of :func:`planned`; ``saved`` is None if gradients are disabled.
    """

    def __init__(self, tensors: Tensors, users: int = 0) -> None:
        """tensors: the call's tensors or None; the last ``users`` belong to users' epilogues. A record keeps none."""
        self._sources: list[Any] = list(tensors)
        self._made: list[Any] = []
        self._given = len(tensors)
        self._versions = [_version(x) for x in tensors]
        self._own = self._given - users
        self._launches: list[tuple[Callable[..., None], list[Any], bool]] = []
        self._direct: set[int] = set()
        self.work_tiles: Any = None
        self.complete, self.unlike = True, False
        self.written: tuple[Tensor, ...] = ()
        self.alone: tuple[Tensor, ...] = ()
        self.beside: Tensors = ()
        self.counts: list[tuple[Any, Hashable]] = []
        self.plan: Any = None
        self.saved: Tensors | None = None

    def __enter__(self) -> Self:
        thread.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        thread.recording = None

    def add_source(self, made: Tensor, by: Any) -> None:
        """Note a new tensor. by: shape, strides and dtype of an allocation, or the function that made the tensor."""
        self._made.append(by)
        self._sources.append(made)

    def add_launch(
        self, function: Callable[..., Any], arguments: tuple, *, direct: bool = False, of_torch: bool = False
    ) -> None:
        """Note a launch. direct: the kernel reads its tensors in place; of_torch: see :func:`step`."""
        if not self.complete or not (of_torch or takes_slots(function)):
            self.complete = False
            return
        self._launches.append((function, [self._recorded(x, direct) for x in arguments], of_torch))

    def _recorded(self, x: Any, direct: bool) -> Any:
        if x is self.work_tiles and x is not None:
            return _WorkTiles
        if isinstance(x, Tensor):
            self.complete = self.complete and x.dtype in TYPES
            place = self._place(x)
            if direct and place is not None:
                self._direct.add(place.source)
            return place
        if isinstance(x, list | dict):  # tensors in it would be kept
            self.complete = False
        return tuple(self._recorded(y, direct) for y in x) if isinstance(x, tuple) else x

    def _place(self, x: Tensor) -> _Place | None:
        """The location of ``x``; None if it is ambiguous, and the call then gets no record."""
        first, metadata = x.data_ptr(), (tuple(x.shape), tuple(x.stride()), x.dtype, x.device)
        # Nothing of an empty view is read or written, so any address serves.
        if not x.numel() and not any(x is y for y in self._sources):
            return _Place(len(self._sources) - 1, 0, False, *metadata)
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
        self.complete = False
        return None

    def record(self, results: Any, *, constant: bool = True) -> "Record | None":
        """The call's record; None if the call did more than was recorded.

        Args:
            results: the call's: a tensor, or a tuple of allocations, views of them, tensors that it was given to
                write, and values other than tensors.
            constant: whether none of the call's tensors requires a gradient.
        """
        single = isinstance(results, Tensor)
        returned = (results,) if single else tuple(results)
        places = [self._place(x) if isinstance(x, Tensor) else x for x in returned]
        made, given = list(self._made), self._sources[: self._given]
        changed = [x for x, version in zip(given, self._versions, strict=True) if _version(x) != version]
        if any(not any(x is y for y in self.written) for x in changed):  # in place, by no kernel
            return None
        if not (self.complete and self._launches) or not all(map(self._is_own, places)):
            return None
        if not all(isinstance(x, _Place) or type(x) in _CONSTANT or x == [] for x in places):
            return None
        count = [place.source for place in places if isinstance(place, _Place)]
        for i, place in enumerate(places):
            # A result that is a different layout of a whole allocation: allocate it in that layout.
            if not isinstance(place, _Place) or place.whole or place.offset or count.count(place.source) > 1:
                continue
            source = self._sources[place.source]
            layout = made[place.source - self._given]
            alike = source.numel() == returned[i].numel() and source.dtype == place.dtype
            if alike and isinstance(layout, tuple):
                made[place.source - self._given] = (place.shape, place.strides, place.dtype)
                places[i] = place._replace(whole=True)
        # Kernels read integers (lengths, tables, states of dropout masks) one at a time; users' kernels may read more.
        direct = (i for i in self._direct if i < self._given)
        rows = {i for i in direct if i >= self._own or given[i].is_floating_point()}
        used = tuple(i for i, x in enumerate(given) if x is not None)
        starts = [given[i].data_ptr() for i in used]
        first = [starts.index(start) for start in starts]
        number = {source: i for i, source in enumerate((*used, *range(self._given, len(self._sources))))}
        written = tuple(number[i] for i in used if any(x is given[i] for x in self.written))
        aligned = (i for i, start in enumerate(starts) if used[i] in rows and start % ALIGNMENT_BYTES == 0)
        pairs = ((i, j) for i in written for j in range(len(used)))
        launches = (
            (function, tuple(_numbered(x, number) for x in arguments), of_torch)
            for function, arguments, of_torch in self._launches
        )
        return Record(
            device=given[used[0]].get_device(), tensors=used, aligned=tuple(aligned),
            same=tuple((j, i) for i, j in enumerate(first) if i != j), made=tuple(made),
            launches=tuple(launches), results=tuple(_numbered(x, number) for x in places), single=single,
            written=written, apart=tuple(pair for pair in pairs if self._are_apart(given, used, *pair)),
            counts=tuple(self.counts), constant=constant, plan=self.plan, saved=self._saved(given),
        )  # fmt: skip

    def _are_apart(self, given: list[Any], used: tuple[int, ...], i: int, j: int) -> bool:
        """True if the i-th of the used tensors, which is written, must not overlap the j-th.

        Written tensors that start at one address, such as latent values and their keys, still do so in later calls.
        """
        x, y = given[used[i]], given[used[j]]
        both = any(y is one for one in self.written)
        if both:
            return i < j and x.data_ptr() != y.data_ptr()
        return x is not y and (any(x is one for one in self.alone) or any(y is one for one in self.beside))

    def _is_own(self, place: Any) -> bool:
        """True unless a result is a view of an argument or an argument that the call did not write."""
        if not isinstance(place, _Place) or place.source >= self._given:
            return True
        return place.whole and any(x is self._sources[place.source] for x in self.written)

    def _saved(self, given: list[Any]) -> tuple[int, ...] | None:
        """For each tensor that autograd saves, its index in the call's tensors; None if one is not among them."""
        if self.saved is None:
            return None
        places = {id(x): i for i, x in enumerate(given) if x is not None}
        found = tuple(places.get(id(x), -1) for x in self.saved)
        return None if -1 in found else found


def _version(x: Tensor | None) -> int:
    return 0 if x is None or x.is_inference() else x._version


def _numbered(x: Any, number: dict[int, int]) -> Any:
    """A recorded argument with its sources renumbered."""
    if isinstance(x, _Place):
        return x._replace(source=number[x.source])
    return tuple(_numbered(y, number) for y in x) if isinstance(x, tuple) else x


_share_memory = torch._C._is_alias_of  # type: ignore[attr-defined]


# ---- records ----


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded call, which later calls with tensors of the same metadata repeat.

    Attributes:
        device: index of the tensors' GPU, -1 for the CPU.
        tensors: indices of the call's tensors that are not None. These are the first sources; allocations follow.
        aligned: sources that a kernel reads in place and that were 16-byte aligned; in later calls they must be, too.
        same: pairs of sources that started at one address; in later calls they must, too.
        made: shape, strides and dtype of each allocation, or the function that makes a tensor, in order.
        launches: (function, recorded arguments, whether it is a :func:`step`) of each launch.
        results: ``_Place`` of each result that is a tensor, the value of any other result.
        single: whether the result is one tensor instead of a tuple.
        written: sources that are overwritten.
        apart: pairs of a written source and another one that must not overlap.
        counts: see :class:`Recording`.
        constant: whether none of the call's tensors requires a gradient.
        plan, saved: see :func:`planned`. ``saved`` contains indices into the call's tensors; None if one has no index.
        free: arguments that no running call uses, see :meth:`_bind`.
    """

    device: int
    tensors: tuple[int, ...]
    aligned: tuple[int, ...]
    same: tuple[tuple[int, int], ...]
    made: tuple[Any, ...]
    launches: tuple[tuple[Callable[..., None], tuple, bool], ...]
    results: tuple[Any, ...]
    single: bool
    written: tuple[int, ...]
    apart: tuple[tuple[int, int], ...]
    counts: tuple[tuple[Any, Hashable], ...]
    constant: bool
    plan: Any
    saved: tuple[int, ...] | None
    free: list[tuple[list, list]] = field(default_factory=list)

    def run(self, tensors: Tensors) -> Any:
        """Repeat the call and return its results; None if addresses of tensors do not suit the recorded kernels."""
        if self.device != memory.current_device():
            with memory.on_device(self.device):
                return self.run(tensors)
        sources = list(map(tensors.__getitem__, self.tensors))
        starts = list(map(Tensor.data_ptr, sources))
        unaligned = 0
        for i in self.aligned:
            unaligned |= starts[i]
        if unaligned % ALIGNMENT_BYTES or (self.same and any(starts[i] != starts[j] for i, j in self.same)):
            return None
        for i, j in self.apart:
            if _share_memory(sources[i], sources[j]) and overlap(sources[i], sources[j]):
                return None
        for by in self.made:
            made = allocate(*by) if type(by) is tuple else by()
            sources.append(made)
            starts.append(made.data_ptr())
        try:
            bound = self.free.pop()
        except IndexError:
            bound = self._bind()
        launches, addresses = bound
        for address, source, offset in addresses:
            address.value = starts[source] + offset
        if self.device < 0:
            self._launch(launches, sources)
        else:  # on torch's current stream
            stream = set_stream(CUDA, self.device, torch._C._cuda_getCurrentRawStream(self.device))
            try:
                self._launch(launches, sources)
            finally:
                set_stream(CUDA, self.device, stream)
        self.free.append(bound)
        for counter, entry in self.counts:
            with counter.lock:
                counter[entry] += 1
        if self.written:
            overwritten(*[sources[i] for i in self.written])
        found = []
        for x in self.results:
            if type(x) is _Place:
                x = sources[x.source] if x.whole else _view(x, sources[x.source])
            elif type(x) is list:
                x = []
            found.append(x)
        return found[0] if self.single else tuple(found)

    def _launch(self, launches: list, sources: list[Tensor]) -> None:
        for function, arguments, work_tiles, of_torch in launches:
            if of_torch:
                function(*[_with_tensors(x, sources) for x in arguments])
                continue
            if work_tiles is not None:
                arguments[work_tiles] = counters.schedule(self.device)
            function(*arguments)
            if work_tiles is not None:
                arguments[work_tiles] = None  # keep no counters alive: a CUDA graph's capture allocates them

    def _bind(self) -> tuple[list, list]:
        """The launches with their arguments for one call at a time, and (address, source, offset) of the slots in them.

        Each launch has a function, a list of arguments, the index of the ``ForwardSchedule`` that each call sets there,
        or None, and whether it is a :func:`step`, whose tensors are ``_Place`` objects.
        """
        addresses: list[tuple[Any, int, int]] = []

        def bind(x: Any) -> Any:
            if isinstance(x, _Place):
                one: Slot = slot(x.shape, x.strides, x.dtype, x.device)
                addresses.append((one.address, x.source, x.offset))
                return one.tensor
            return tuple(map(bind, x)) if isinstance(x, tuple) else x

        launches: list[Any] = []
        for function, recorded, of_torch in self.launches:
            if of_torch:
                launches.append((function, recorded, None, True))
                continue
            work_tiles = recorded.index(_WorkTiles) if _WorkTiles in recorded else None
            values = [None if x is _WorkTiles else bind(x) for x in recorded]
            arguments = [array(x) if isinstance(x, tuple) else x for x in values]
            launches.append((function, arguments, work_tiles, False))
        return launches, addresses


def _view(place: _Place, made: Tensor) -> Tensor:
    found = as_strided(made, place.shape, place.strides, place.offset // made.element_size())
    return found if found.dtype is place.dtype else found.view(place.dtype)


def _with_tensors(x: Any, sources: list[Tensor]) -> Any:
    """A torch function's argument with tensors from ``sources``, in the recorded layout even if a source differs."""
    if isinstance(x, _Place):
        return _view(x, sources[x.source])
    return tuple(_with_tensors(y, sources) for y in x) if isinstance(x, tuple) else x
