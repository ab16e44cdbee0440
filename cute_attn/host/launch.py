"""A plan's launches: kernels' functions with arguments that are made once.

A call that repeats an earlier one allocates outputs, sets addresses and launches. Nothing is viewed through other
strides: slots (:mod:`cute_attn.host.slots`) have those that kernels read. Launching functions run without the
interpreter's lock, so each launch takes arguments of its own while it lasts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.host import counters, memory
from cute_attn.host.memory import Tensors
from cute_attn.host.params import ALIGNMENT_BYTES, AttentionParams
from cute_attn.host.slots import Slot, array, current_stream, prepared, slot

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


class Meta(NamedTuple):
    """A tensor's metadata as a kernel reads it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "Meta":
        """``x``'s."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device)


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
    def of(cls, kernel: Any, params: AttentionParams, function: Any) -> "ScoreArgs | None":
        """Of the package's own epilogues, which pass the call's tensors on unchanged, for a launching function.

        None with users' classes, which may derive other tensors.
        """
        if params.epilogues or kernel.traits.variant:
            return None
        own = {id(getattr(params, name)): AttentionParams._fields.index(name) for name in _SCORE_TENSORS}
        parts, places = list(kernel.score_args(params.score_inputs())), []
        for i, part in enumerate(parts):
            if isinstance(part, tuple):
                places += [(i, j, own[id(x)]) for j, x in enumerate(part) if isinstance(x, Tensor)]
                parts[i] = tuple(None if isinstance(x, Tensor) else x for x in part)  # keep no tensor alive
        return cls(tuple(parts) if places else prepared(function, tuple(parts)), tuple(places))


_SCORE_TENSORS = ("alibi_slopes", "bias", "sinks", "rng_state")


class _BoundScoreArgs(NamedTuple):
    """The epilogues' arguments of one launch at a time.

    Attributes:
        values: an array.
        addresses: (address, place among a call's tensors) of the slots in it.
    """

    values: Any
    addresses: tuple[tuple[Any, int], ...]


@dataclass(frozen=True, slots=True)
class ScoreSlots:
    """Epilogues' arguments whose tensors become slots.

    Attributes:
        args: the arguments.
        tensors: metadata of the tensors among them, by index among the parameters.
        places: where a call has these tensors, by index.
    """

    args: ScoreArgs
    tensors: dict[int, Meta]
    places: Mapping[int, int]

    @classmethod
    def of(cls, args: ScoreArgs, tensors: Sequence[Any], places: Mapping[int, int]) -> "ScoreSlots | None":
        """None where a call lacks one of the tensors.

        tensors: of a call as its kernels read them. Their memory is not kept.
        """
        wanted = {index for _, _, index in args.places}
        if not wanted <= set(places):
            return None
        return cls(args, {index: Meta.of(tensors[index]) for index in wanted}, places)

    def bind(self) -> _BoundScoreArgs:
        """Arguments for one launch at a time."""
        slots = {index: slot(*meta) for index, meta in self.tensors.items()}
        values = self.args.fill({index: one.tensor for index, one in slots.items()})  # type: ignore[arg-type]
        addresses = tuple((one.address, self.places[index]) for index, one in slots.items())
        return _BoundScoreArgs(array(values), addresses)


PARAMETERS = {index: index for index in range(len(AttentionParams._fields))}
"""The places of tensors in a call that has them in the parameters' order."""


# ---- the forward ----


class _ForwardArguments(NamedTuple):
    """Of one launch at a time."""

    q: Slot
    k: Slot
    v: Slot
    out: Slot
    score_args: _BoundScoreArgs


@dataclass(frozen=True, slots=True)
class BoundForward:
    """A forward's launch on tensors of known metadata, which start at multiples of 16 bytes.

    Attributes:
        function: launches the kernel.
        device: of the tensors, as they give it.
        out, lse: the layouts in which a call returns them; kernels write both in place.
        rows: metadata of q, k, v and out as kernels read them.
        seqlens: an array.
        softmax_scale: the kernel's.
        score_slots: the epilogues' arguments.
        free: arguments that no launch has.
    """

    function: Callable[..., None]
    device: int
    out: Layout
    lse: Layout
    rows: tuple[Meta, Meta, Meta, Meta]
    seqlens: Any
    softmax_scale: float
    score_slots: ScoreSlots
    free: list[_ForwardArguments] = field(default_factory=list)

    def run(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """out and lse. tensors: q, k, v, and at their places what epilogues read."""
        if self.device == memory.current_device():
            return self._run(tensors)
        with torch.cuda.device(self.device):
            return self._run(tensors)

    def _run(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        query = tensors[0]
        out = memory.new_empty_strided(query, *self.out, query.dtype)
        lse = memory.new_empty_strided(query, *self.lse, torch.float32)
        try:
            arguments = self.free.pop()
        except IndexError:
            q, k, v, written = (slot(*one) for one in self.rows)
            arguments = _ForwardArguments(q, k, v, written, self.score_slots.bind())
        q, k, v, written, score_args = arguments
        q.address.value, k.address.value = query.data_ptr(), tensors[1].data_ptr()
        v.address.value, written.address.value = tensors[2].data_ptr(), out.data_ptr()
        for address, place in score_args.addresses:
            address.value = tensors[place].data_ptr()
        self.function(
            q.tensor,
            k.tensor,
            v.tensor,
            written.tensor,
            lse,  # torch's, by which TVM FFI finds the current stream
            self.seqlens,
            self.softmax_scale,
            counters.schedule(self.device),
            score_args.values,
        )
        self.free.append(arguments)
        return out, lse


# ---- the backward ----


class _BackwardArguments(NamedTuple):
    """Of one call at a time.

    Attributes:
        rows: of q, k, v, grad_out, out, lse, and the gradients of q, k and v.
        workspace: of LSE, D, the accumulators and the counter.
        schedule: a ``BackwardSchedule``, an array.
        score_args: the epilogues' arguments.
    """

    rows: tuple[Slot, ...]
    workspace: tuple[Slot, ...]
    schedule: Any
    score_args: _BoundScoreArgs


@dataclass(frozen=True, slots=True)
class BoundBackward:
    """A backward's three launches, on tensors of known metadata.

    Attributes:
        preprocess, main, convert: launch the kernels; ``main`` takes its operands and then its other arguments.
        device: as of :class:`BoundForward`.
        grads: layouts of the gradients of q, k and v, which kernels write in place.
        rows: metadata of the tensors of ``_BackwardArguments.rows`` as kernels read and write them.
        space: elements of the fp32 workspace, and (shape, strides, first element) of its parts.
        seqlens: arrays for the main kernel and for the others.
        softmax_scale: the kernels'.
        keep: 1 - dropout_p.
        schedule: makes a ``BackwardSchedule`` of the counter.
        score_slots: as of :class:`BoundForward`.
        free: arguments that no call has.
    """

    preprocess: Callable[..., None]
    main: Callable[[tuple, tuple], None]
    convert: Callable[..., None]
    device: int
    grads: tuple[Layout, ...]
    rows: tuple[Meta, ...]
    space: tuple[int, tuple]
    seqlens: tuple[Any, ...]
    softmax_scale: float
    keep: float
    schedule: Callable[[Any], tuple]
    score_slots: ScoreSlots
    free: list[_BackwardArguments] = field(default_factory=list)

    def run(self, tensors: Sequence[Any], given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """Gradients of q, k and v; None where kernels cannot read grad_out or out.

        tensors: as of :meth:`BoundForward.run`. given: grad_out, out and lse.
        """
        if (given[0].data_ptr() | given[1].data_ptr()) % ALIGNMENT_BYTES:
            return None
        if self.device == memory.current_device():
            return self._run(tensors, given)
        with torch.cuda.device(self.device):
            return self._run(tensors, given)

    def _run(self, tensors: Sequence[Any], given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        query, (size, parts) = tensors[0], self.space
        grads = [memory.new_empty_strided(query, *layout, query.dtype) for layout in self.grads]
        workspace = memory.new_empty_strided(query, (size,), (1,), torch.float32)
        try:
            arguments = self.free.pop()
        except IndexError:
            arguments = self._new_arguments()
        for one, x in zip(arguments.rows, (*tensors[:3], *given, *grads), strict=True):
            one.address.value = x.data_ptr()
        first = workspace.data_ptr()
        for one, (_, _, element) in zip(arguments.workspace, parts, strict=True):
            one.address.value = first + 4 * element
        for address, place in arguments.score_args.addresses:
            address.value = tensors[place].data_ptr()
        with current_stream(self.device):
            self._launch(arguments)
        self.free.append(arguments)
        return tuple(grads)

    def _launch(self, arguments: _BackwardArguments) -> None:
        q, k, v, grad_out, out, lse, dq, dk, dv = (one.tensor for one in arguments.rows)
        *workspace, counter = (one.tensor for one in arguments.workspace)
        seqlens, part_seqlens = self.seqlens
        self.preprocess(grad_out, out, lse, None, *workspace, counter, None, part_seqlens, self.keep)
        shared = (seqlens, self.softmax_scale, arguments.schedule, arguments.score_args.values)
        self.main((q, k, v, grad_out), (*workspace, dk, dv, *shared))
        self.convert(workspace[2], dq, part_seqlens, self.softmax_scale / self.keep, None)

    def _new_arguments(self) -> _BackwardArguments:
        device = self.rows[0].device
        workspace = tuple(slot(shape, strides, torch.float32, device) for shape, strides, _ in self.space[1])
        return _BackwardArguments(
            tuple(slot(*one) for one in self.rows),
            workspace,
            array(self.schedule(workspace[3].tensor)),
            self.score_slots.bind(),
        )
