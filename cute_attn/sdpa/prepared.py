"""Launches of plans with all arguments prepared: a call allocates outputs, sets addresses and launches.

Nothing is viewed with rows before heads: slots (:mod:`cute_attn.host.slots`) have those strides. Launching functions
run without the interpreter's lock, so each launch takes arguments of its own while it lasts. Launches that do more,
such as clear an output first, are left to their launchers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.host import backward, counters, launcher
from cute_attn.host.params import ALIGNMENT_BYTES, AttentionParams
from cute_attn.host.slots import Slot, array, current_stream, slot, takes_slots

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""

_PLACES = {
    AttentionParams._fields.index(name): place
    for name, place in (("bias", 3), ("alibi_slopes", 7), ("rng_state", 8))
}
"""Of epilogues' tensors: indices among the parameters, and among a plan's inputs with the dropout state behind them."""


class _Meta(NamedTuple):
    """A tensor's metadata as a kernel reads it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "_Meta":
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device)


class _ScoreArgs(NamedTuple):
    """The epilogues' arguments of one launch at a time.

    Attributes:
        values: an array.
        addresses: (address, place among the inputs) of the slots in it.
    """

    values: Any
    addresses: tuple[tuple[Any, int], ...]

    @classmethod
    def of(cls, args: launcher.ScoreArgs, tensors: dict[int, _Meta]) -> "_ScoreArgs":
        slots = {index: slot(*tensors[index]) for _, _, index in args.places}
        values = args.fill({index: one.tensor for index, one in slots.items()})  # type: ignore[arg-type]
        return cls(array(values), tuple((one.address, _PLACES[index]) for index, one in slots.items()))


def _score_tensors(args: launcher.ScoreArgs, tensors: Sequence[Any]) -> dict[int, _Meta] | None:
    """Metadata of the tensors that epilogues take, by index; None where slots cannot stand for them all."""
    wanted = {index for _, _, index in args.places}
    return {index: _Meta.of(tensors[index]) for index in wanted} if wanted <= set(_PLACES) else None


# ---- the forward ----


class _ForwardArguments(NamedTuple):
    """Of one launch at a time."""

    q: Slot
    k: Slot
    v: Slot
    out: Slot
    score_args: _ScoreArgs


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """A forward's launch on tensors of known metadata, which start at multiples of 16 bytes.

    Attributes:
        made: the call's launcher.
        device: theirs, as tensors give it.
        out: PyTorch's layout of the output, which kernels write in place.
        rows: metadata of q, k, v and out as kernels read them.
        score_tensors: of the epilogues' tensors, by index.
        seqlens: an array.
        free: arguments that no launch has.
    """

    made: launcher.Launcher
    device: int
    out: Layout
    rows: tuple[_Meta, _Meta, _Meta, _Meta]
    score_tensors: dict[int, _Meta]
    seqlens: Any
    free: list[_ForwardArguments] = field(default_factory=list)

    @classmethod
    def of(cls, made: launcher.Launcher, tensors: launcher.Tensors, out: Layout) -> "PreparedForward | None":
        """None where a call does more than launch a kernel.

        tensors: of a call as its launcher takes them. Their memory is not kept.
        """
        if (
            not takes_slots(made.function)
            or made.softmax_function is not None
            or made.softmax_shape is not None
            or made.divided is not None
            or made.of_copies is not None
            or made.prefill
            or made.sign != 1
            or callable(made.seqlens)
            or made.score_args is None
        ):
            return None
        tensors = made._viewed(tensors)
        score_tensors = _score_tensors(made.score_args, tensors)
        if score_tensors is None:
            return None
        q, k, v = map(_Meta.of, tensors[:3])
        rows = (q, k, v, _Meta(made.shapes[0], made.strides[0], q.dtype, q.device))
        return cls(made, tensors[0].get_device(), out, rows, score_tensors, array(made.seqlens))

    def run(self, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """out, as PyTorch promises it, and lse.

        inputs: of a plan, with the dropout state behind them if there is one.
        """
        if self.device == launcher._current_device():
            return self._run(inputs)
        with torch.cuda.device(self.device):
            return self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        made, query = self.made, inputs[0]
        out = launcher.new_empty_strided(query, *self.out, query.dtype)
        lse = launcher.new_empty_strided(query, made.shapes[1], made.strides[1], torch.float32)
        try:
            arguments = self.free.pop()
        except IndexError:
            arguments = self._new_arguments()
        q, k, v, written, score_args = arguments
        q.address.value, k.address.value = query.data_ptr(), inputs[1].data_ptr()
        v.address.value, written.address.value = inputs[2].data_ptr(), out.data_ptr()
        for address, place in score_args.addresses:
            address.value = inputs[place].data_ptr()
        made.function(  # type: ignore[misc]
            q.tensor,
            k.tensor,
            v.tensor,
            written.tensor,
            lse,  # torch's, by which TVM FFI finds the current stream
            self.seqlens,
            made.softmax_scale,
            counters.schedule(self.device),
            score_args.values,
        )
        self.free.append(arguments)
        return out, lse

    def _new_arguments(self) -> _ForwardArguments:
        assert self.made.score_args is not None
        score_args = _ScoreArgs.of(self.made.score_args, self.score_tensors)
        q, k, v, out = (slot(*one) for one in self.rows)
        return _ForwardArguments(q, k, v, out, score_args)


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
    score_args: _ScoreArgs


@dataclass(frozen=True, slots=True)
class PreparedBackward:
    """A backward's three launches, on tensors of known metadata.

    Attributes:
        made: the call's launcher.
        device: as of :class:`PreparedForward`.
        grads: PyTorch's layouts of the gradients of q, k and v, which kernels write in place.
        rows: metadata of the tensors of ``_BackwardArguments.rows`` as kernels read and write them.
        score_tensors: as of :class:`PreparedForward`.
        seqlens: arrays for the main kernel and for the others.
        free: arguments that no call has.
    """

    made: backward.BackwardLauncher
    device: int
    grads: tuple[Layout, ...]
    rows: tuple[_Meta, ...]
    score_tensors: dict[int, _Meta]
    seqlens: tuple[Any, ...]
    free: list[_BackwardArguments] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        made: backward.BackwardLauncher,
        params: AttentionParams,
        given: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Layout, ...],
    ) -> "PreparedBackward | None":
        """None where a call does more than launch three kernels.

        params, given: of a call as its launcher takes them; given: grad_out, out and lse. Their memory is not kept.
        """
        if (
            not all(map(takes_slots, (made.preprocess, made.main, made.convert)))
            or made.split is not None
            or made.bias is not None
            or made.needed[4]
            or made.varlen
            or not made.aligned
            or any(made.copy)
            or given[2].stride(-1) != 1
            or made.sign != 1
            or made.seqlens is None
            or made.score_args is None
        ):
            return None
        tensors: list[Any] = list(params)
        for index, shape, strides in made.views:
            tensors[index] = launcher.as_strided(tensors[index], shape, strides)
        score_tensors = _score_tensors(made.score_args, tensors)
        if score_tensors is None:
            return None
        inputs = [_Meta.of(x) for x in tensors[:3]]
        written = [
            x._replace(shape=shape, strides=strides)
            for x, shape, strides in zip(inputs, made.shapes, made.strides, strict=True)
        ]
        rows = (*inputs, *map(_Meta.of, given), *written)
        seqlens = tuple(map(array, made.seqlens))
        return cls(made, params.q.get_device(), grads, rows, score_tensors, seqlens)

    def run(self, inputs: Sequence[Any], given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """Gradients of q, k and v as PyTorch promises them; None where kernels cannot read grad_out or out.

        inputs: as of :meth:`PreparedForward.run`. given: grad_out, out and lse.
        """
        if (given[0].data_ptr() | given[1].data_ptr()) % ALIGNMENT_BYTES:
            return None
        if self.device == launcher._current_device():
            return self._run(inputs, given)
        with torch.cuda.device(self.device):
            return self._run(inputs, given)

    def _run(self, inputs: Sequence[Any], given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        space, query = self.made.workspace, inputs[0]
        assert space is not None
        grads = [launcher.new_empty_strided(query, *layout, query.dtype) for layout in self.grads]
        memory = launcher.new_empty_strided(query, (space.size,), (1,), torch.float32)
        try:
            arguments = self.free.pop()
        except IndexError:
            arguments = self._new_arguments()
        for one, x in zip(arguments.rows, (*inputs[:3], *given, *grads), strict=True):
            one.address.value = x.data_ptr()
        first = memory.data_ptr()
        for one, (_, _, element) in zip(arguments.workspace, _parts(space), strict=True):
            one.address.value = first + 4 * element
        for address, place in arguments.score_args.addresses:
            address.value = inputs[place].data_ptr()
        with current_stream(self.device):
            self._launch(arguments)
        self.free.append(arguments)
        return tuple(grads)

    def _launch(self, arguments: _BackwardArguments) -> None:
        made = self.made
        q, k, v, grad_out, out, lse, dq, dk, dv = (one.tensor for one in arguments.rows)
        lse_log2, minus_d, accumulators, counter = (one.tensor for one in arguments.workspace)
        seqlens, part_seqlens = self.seqlens
        keep = 1.0 - made.dropout_p
        workspace = (lse_log2, minus_d, accumulators)
        made.preprocess(grad_out, out, lse, None, *workspace, counter, None, part_seqlens, keep)  # type: ignore[misc]
        schedule, score_args = arguments.schedule, arguments.score_args.values
        made._main(
            (q, k, v, grad_out), (*workspace, dk, dv, seqlens, made.softmax_scale, schedule, score_args)
        )
        made.convert(accumulators, dq, part_seqlens, made.softmax_scale / keep, None)  # type: ignore[misc]

    def _new_arguments(self) -> _BackwardArguments:
        made = self.made
        assert made.score_args is not None and made.workspace is not None
        device = self.rows[0].device
        workspace = tuple(
            slot(shape, strides, torch.float32, device) for shape, strides, _ in _parts(made.workspace)
        )
        schedule = (made.num_splits, made.split_stride, workspace[3].tensor, made.multiprocessors)
        return _BackwardArguments(
            tuple(slot(*one) for one in self.rows),
            workspace,
            array(schedule),
            _ScoreArgs.of(made.score_args, self.score_tensors),
        )


def _parts(space: backward.Workspace) -> tuple:
    """Shapes, strides and first elements."""
    return space.lse_log2, space.minus_d, space.dq, space.next
