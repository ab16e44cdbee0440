"""From the gradients of out and lse to those of q, k, v and bias on CUDA: three launches and their workspace.

    preprocess   out, grad_out, lse, grad_lse  ->  two numbers per query, and dQ accumulators of zeros
    main         dK, dV, the bias's gradient; adds to the accumulators
    convert      accumulators  ->  dQ

fp32 q, k, v and grad_out are split into two fp16 terms before the main kernel, or with precision tf32 into one
(:mod:`cute_attn.host.split_fp32`), and another main kernel follows it, for whole fp32 operands: each reads on the GPU
whether the tensors fit their terms, and one of them returns at once. Small calls that name no tile do without terms.

As in :mod:`cute_attn.host.launcher`, what follows from metadata is kept as a :class:`BackwardLauncher` under it.

Workspace: fp32 of q's size, head dims padded to multiples of 32 and sequences to whole blocks, and two fp32 numbers a
query and head; the terms, of the tensors' size; where few work tiles share many query heads, dK and dV as often as
they are divided: see :func:`cute_attn.host.backward_splits.head_splits`. Deterministic: dQ as many times as there are
:func:`cute_attn.host.backward_splits.key_splits`; and for a bias that is broadcast, its gradient before it is summed,
4 bytes for each score. Otherwise such a gradient is added up in fp32 in the bias's size.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import fused_qkv, padding, plans
from cute_attn.host.backward_splits import head_splits, key_splits
from cute_attn.host.call import BIAS, NUM_TENSORS, Call
from cute_attn.host.checks import (
    MAX_ROWS,
    check,
    check_alignment,
    check_apart,
    check_count,
    check_for_kernels,
    check_gradients,
    check_like,
    check_rows,
    check_steps,
)
from cute_attn.host.choose import choose_kernel, user_classes
from cute_attn.host.counters import l2_bytes, multiprocessors
from cute_attn.host.launch import NOW, Repeats, ScoreArgs, Steps
from cute_attn.host.launcher import are_aligned, views
from cute_attn.host.memory import (
    Tensors,
    as_strided,
    contiguous_strides,
    is_aligned,
    on_device,
    overwritten,
    rows_are_regular,
)
from cute_attn.host.padding import Copies
from cute_attn.host.slots import prepared
from cute_attn.host.split_fp32 import MAX_ROWS as MAX_SPLIT_ROWS
from cute_attn.host.split_fp32 import SplitLauncher, can_split
from cute_attn.traits import PARTS, Traits

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of q, k, v, bias and sinks; None where they are not needed."""

NOTHING: Gradients = (None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class Workspace:
    """One fp32 allocation: shape, strides and first element of each part.

    Attributes:
        size: all of it.
        lse_log2, minus_d, dq, next: (batch, nheads, rows), varlen (nheads, rows), twice; (accumulators, batch, nheads,
            rows * head_dim), varlen without the batch; (16,), of which 16 bytes are counters.
    """

    size: int
    lse_log2: tuple[tuple[int, ...], tuple[int, ...], int]
    minus_d: tuple[tuple[int, ...], tuple[int, ...], int]
    dq: tuple[tuple[int, ...], tuple[int, ...], int]
    next: tuple[tuple[int, ...], tuple[int, ...], int]

    @staticmethod
    def of(call: Call, tile_m: int, head_dim_padded: int, accumulators: int) -> "Workspace":
        """Rows are padded to whole blocks of tile_m, each varlen sequence's own."""
        if call.varlen:
            rows = (call.q.shape[0] // tile_m + call.batch) * tile_m
            heads: tuple[int, ...] = (call.nheads,)
        else:
            rows = -(-call.longest[0] // tile_m) * tile_m
            heads = (call.batch, call.nheads)
        shapes = ((*heads, rows), (*heads, rows), (accumulators, *heads, rows * head_dim_padded), (16,))
        parts, size = [], 0
        for shape in shapes:
            parts.append((shape, contiguous_strides(shape), size))
            size += math.prod(shape)
        return Workspace(size, *parts)


@dataclass(frozen=True, slots=True)
class BiasGradient:
    """How the bias's gradient is computed.

    Attributes:
        shape, dtype: of the tensor that the kernel writes.
        seen: shape (batch, nheads, max_seqlen_q, max_seqlen_k) and strides as the kernel addresses it.
        clear: whether the kernel leaves elements unwritten, or adds to them.
        sum_over: the dimensions to sum afterwards.
        result: the bias's dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    seen: tuple[tuple[int, ...], tuple[int, ...]]
    clear: bool
    sum_over: tuple[int, ...]
    result: torch.dtype

    @staticmethod
    def of(call: Call, deterministic: bool) -> "BiasGradient":
        """For a call with a bias."""
        assert call.bias is not None
        full = (call.batch, call.nheads, call.max_seqlen_q, call.max_seqlen_k)
        shape = tuple(call.bias.shape)
        shared = tuple(dim for dim in range(3) if shape[dim] < full[dim])
        lengths_differ = any(
            x is not None for x in (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
        )
        if not shared:
            clear = bool(call.mask) or lengths_differ or call.lists_blocks
            return BiasGradient(
                shape, call.bias.dtype, (full, contiguous_strides(full)), clear, (), call.bias.dtype
            )
        if deterministic:
            seen = (full, contiguous_strides(full))
            return BiasGradient(full, torch.float32, seen, True, shared, call.bias.dtype)
        strides = tuple(0 if dim in shared else step for dim, step in enumerate(contiguous_strides(shape)))
        return BiasGradient(shape, torch.float32, (full, strides), True, (), call.bias.dtype)

    def allocate(self, like: Tensor, given: Tensor | None, steps: Steps) -> Tensor:
        """The tensor that the kernel writes: ``given`` if it can be."""
        if self.clear:
            steps.also()
        if given is not None and (tuple(given.shape), given.dtype) == (self.shape, self.dtype):
            if given.is_contiguous() and is_aligned(given):
                return given.zero_() if self.clear else given
        gradient = steps.empty(like, self.shape, contiguous_strides(self.shape), self.dtype)
        return gradient.zero_() if self.clear else gradient

    def finish(self, gradient: Tensor, given: Tensor | None = None) -> Tensor:
        """The bias's gradient from what the kernel wrote, in ``given`` if there is one."""
        if self.sum_over:
            gradient = gradient.sum(self.sum_over, keepdim=True)
        if given is None or given is gradient:
            return gradient.to(self.result)
        return given.copy_(gradient)


@dataclass(frozen=True, slots=True)
class BackwardLauncher:
    """What follows from the metadata of a call and of its outputs' gradients, as a forward's ``Launcher``.

    Attributes:
        preprocess, main, convert: launch the kernels. convert is None where q needs no gradient, all are None where
            there is nothing to compute.
        split, fallback: of a main kernel whose operands are terms: what splits them, and the other main kernel.
        kernel: the main kernel object, which makes the epilogues' arguments.
        needed: which of the gradients of q, k, v, bias and sinks are computed.
        shapes, strides: of those of q, k and v as the kernels write them: k's and v's heads times ``head_splits``.
        parts: how many of those of q, k and v become parts of one tensor where q, k and v, or k and v, are; or 0.
        varlen: whether rows of those may belong to no sequence.
        copy: which of grad_out and out have strides that kernels do not read.
        views: as of :class:`cute_attn.host.launcher.Launcher`.
        workspace: or None where there is nothing to compute.
        bias: or None without its gradient.
        num_splits, split_stride, multiprocessors: see ``cute_attn.work.key_tiles.BackwardSchedule``.
        seqlens: lengths for the main kernel and for the others, or None where some are tensors.
        score_args: the epilogues' arguments, or None where each call makes its own.
        rest: the call's arguments that are not tensors.
        padding: launches with padded copies, where no kernel reads the tensors as they are; or None.
        sign, softmax_scale: as of :class:`cute_attn.host.launcher.Launcher`.
        repeats: as of :class:`cute_attn.host.launcher.Launcher`, of calls that pack gradients the second.
    """

    preprocess: Callable[..., None] | None
    main: Callable[..., None] | None
    convert: Callable[..., None] | None
    split: SplitLauncher | None
    fallback: Callable[..., None] | None
    kernel: Any
    needed: tuple[bool, bool, bool, bool, bool]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    parts: int
    varlen: bool
    copy: tuple[bool, bool]
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    workspace: Workspace | None
    bias: BiasGradient | None
    num_splits: int
    split_stride: int
    multiprocessors: int
    seqlens: tuple[Any, Any] | None
    softmax_scale: float
    dropout_p: float
    score_args: ScoreArgs | None
    rest: tuple
    padding: "PaddedBackward | None" = None
    sign: int = 1
    repeats: tuple[Repeats, Repeats] | None = None

    def launch(
        self,
        call: Call,
        grads: tuple[Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
        into: Gradients | None = None,
    ) -> Gradients:
        """Allocate everything and launch on the current stream of q's device.

        Args:
            grads: of out and lse.
            outputs: out and lse.
            into: tensors to write gradients into, None for those to allocate; without ``into``, none of those to
                allocate is a part of another.
        """
        if self.repeats is not None and grads[1] is None and not any(x is not None for x in into or ()):
            tensors = (*call[:NUM_TENSORS], grads[0], *outputs, *call.epilogue_tensors)
            return self.repeats[self._packs(call[:3], into)].run(  # type: ignore[return-value]
                tensors, lambda steps: self.run(call, grads, outputs, into, steps), len(call.epilogue_tensors)
            )
        return self.run(call, grads, outputs, into)

    def run(
        self,
        call: Call,
        grads: tuple[Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
        into: Gradients | None = None,
        steps: Steps = NOW,
    ) -> Gradients:
        """As :meth:`launch`, step by step."""
        with on_device(call.q.get_device()):
            return self._launch(call, grads, outputs, into, steps)

    def ready(self) -> "BackwardLauncher":
        """The launcher for calls that repeat."""
        return self if self.repeats is not None else replace(self, repeats=(Repeats(), Repeats()))

    def _schedule(self, counter: Any) -> tuple:
        """A ``BackwardSchedule``."""
        return self.num_splits, self.split_stride, counter, self.multiprocessors

    def _launch(
        self,
        call: Call,
        grads: tuple[Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
        into: Gradients | None,
        steps: Steps,
    ) -> Gradients:
        q = call.q
        given = into or NOTHING
        if self.padding is not None:
            return self.padding.launch(self, call, grads, outputs, into, steps)
        if self.main is None or self.workspace is None:
            steps.also()
            return self._without_keys(call, grads[1], outputs[1], given)
        call = call.with_positive_scale()
        grad_out, out = grads[0], outputs[0]
        if not are_aligned(call):  # a launcher that is kept under other tensors' metadata
            check_alignment(*call[:3])
        if not (is_aligned(grad_out) and is_aligned(out)):
            steps.unlike_others()
        grad_out, out = _readable(grad_out, self.copy[0]), _readable(out, self.copy[1])
        lse = outputs[1]
        if lse.stride(-1) != 1:
            lse = lse.clone(memory_format=torch.contiguous_format)
        dq, dk, dv = self._allocate(call, given, self._packs(call[:3], into), steps)
        space = self.workspace
        workspace = steps.empty(q, (space.size,), (1,), torch.float32)
        lse_log2 = as_strided(workspace, *space.lse_log2)
        minus_d = as_strided(workspace, *space.minus_d)
        accumulators = as_strided(workspace, *space.dq)
        counter = as_strided(workspace, *space.next)
        if self.needed[4] and (self.varlen or call.seqused_q is not None):
            # Rows between sequences, which the preprocess leaves unwritten.
            steps.also()
            workspace[: space.dq[2]].zero_()
        dbias = self.bias.allocate(q, given[3], steps) if self.bias is not None else None
        if self.views:
            viewed: list[Any] = list(call)
            for index, shape, strides in self.views:
                viewed[index] = as_strided(viewed[index], shape, strides)
            call = Call._make(viewed)
        seqlens, part_seqlens = self.seqlens or _seqlens(call)
        keep = 1.0 - self.dropout_p
        assert self.preprocess is not None
        cleared = (dq, dk, dv) if self.varlen else None
        steps.launch(
            self.preprocess,
            grad_out,
            out,
            lse,
            grads[1],
            lse_log2,
            minus_d,
            accumulators,
            counter,
            cleared,
            part_seqlens,
            keep,
        )
        shared = (
            lse_log2,
            minus_d,
            accumulators,
            dk,
            dv,
            seqlens,
            self.softmax_scale,
            self._schedule(counter),
            self._score_args(call, dbias, steps),
        )
        self._main((*call[:3], grad_out), shared, steps)
        if self.convert is not None:
            scale = self.softmax_scale / keep
            steps.launch(self.convert, accumulators, dq, part_seqlens, scale)
            if self.sign != 1:
                steps.also()
                dq.mul_(self.sign)
        if dbias is not None and self.bias is not None:
            dbias = self.bias.finish(dbias, given[3])
        needed, nheads_kv = self.needed, call.k.shape[-2]
        if dk.shape[-2] != nheads_kv:
            steps.also()  # sums, perhaps into a tensor that was given
        return (
            dq if needed[0] else None,
            _sum_splits(dk, nheads_kv, given[1]) if needed[1] else None,
            _sum_splits(dv, nheads_kv, given[2]) if needed[2] else None,
            dbias,
            _sinks_gradient(call.sinks, lse_log2, minus_d, keep, given[4]) if needed[4] else None,
        )

    def _main(self, operands: tuple[Tensor, ...], shared: tuple, steps: Steps) -> None:
        """Launch the main kernel on (q, k, v, grad_out), or on their terms and then the fallback."""
        assert self.main is not None
        if self.split is None:
            no_scales = (None,) if self.kernel.traits.arch == "sm80" else ()
            steps.launch(self.main, *operands, *shared, *no_scales)
            return
        steps.also()
        assert self.fallback is not None
        terms, scales = self.split.launch(operands)
        self.main(*terms, *shared, scales)
        self.fallback(*operands, *shared, scales)

    def _packs(self, inputs: Tensors, into: Gradients | None) -> bool:
        """Whether gradients become parts of one tensor, which the addresses of q, k and v decide as well."""
        return (
            self.parts > 0
            and into is not None
            and not any(x is not None for x in into[:3])
            and fused_qkv.are_adjacent(inputs[3 - self.parts : 3])
        )

    def _allocate(self, call: Call, given: Gradients, packs: bool, steps: Steps) -> list[Tensor]:
        """What the kernels write dq, dk and dv into."""
        parts, shapes, found = self.parts, self.shapes, []
        together: Tensor | None = None
        if packs:
            shape = (*shapes[2][:-2], parts, *shapes[2][-2:])
            together = steps.empty(call.q, shape, contiguous_strides(shape), call.q.dtype)
        for i, (shape, strides) in enumerate(zip(shapes, self.strides, strict=True)):
            own = given[i]
            if together is not None and i >= 3 - parts:
                first = (i + parts - 3) * shape[-1] * shape[-2]
                own = as_strided(together, shape, fused_qkv.packed_strides(shape, parts), first)
            elif own is None or tuple(own.shape) != shape:  # heads are divided, and added up afterwards
                own = steps.empty(call.q, shape, strides, call.q.dtype)
            found.append(own)
        return found

    def _score_args(self, call: Call, dbias: Tensor | None, steps: Steps) -> tuple:
        if self.score_args is not None:
            return self.score_args.fill(call)
        if call.epilogues or self.kernel.traits.variant:
            steps.also()  # users' classes may read what they are given
        if dbias is not None and self.bias is not None:
            dbias = as_strided(dbias, *self.bias.seen)
        return self.kernel.score_args(call.score_inputs(dbias))

    def _without_keys(self, call: Call, grad_lse: Tensor | None, lse: Tensor, given: Gradients) -> Gradients:
        """Zeros, but for the sinks of existing rows: their LSE is the sink."""
        tensors = (call.q, call.k, call.v, call.bias, call.sinks)
        *zeros, dsinks = (
            None if not needed or x is None else x.new_zeros(x.shape) if own is None else own.zero_()
            for x, needed, own in zip(tensors, self.needed, given, strict=True)
        )
        if dsinks is not None and grad_lse is not None:
            rows = torch.where(lse == -math.inf, 0.0, grad_lse)
            dsinks.copy_(rows.sum(-1) if rows.dim() == 2 else rows.sum((0, 2)))
        return (*zeros, dsinks)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class PaddedBackward:
    """The backward of a call whose q, k or v no kernel reads as they are: see :mod:`cute_attn.host.padding`.

    Attributes:
        launcher: of the padded call.
        copied: which of q, k, v, grad_out and out are.
        pad, unpad: of those; of dq, dk and dv.
        cut: which of dq, dk and dv have another head dim than the padded call's.
    """

    launcher: BackwardLauncher
    copied: tuple[bool, ...]
    pad: Copies
    unpad: Copies
    cut: tuple[bool, ...]

    @staticmethod
    def of(
        call: Call,
        copied: tuple[bool, ...],
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        needed: tuple[bool, ...],
        deterministic: bool,
    ) -> "PaddedBackward":
        """For a call of whose q, k and v those are ``copied``."""
        tensors = (*call[:3], grad_out, out)
        copied = (*copied, *padding.to_copy((grad_out, out)))
        padding.check_rows(dict(zip(("q", "k", "v", "grad_out", "out"), tensors, strict=True)), copied)
        with on_device(call.q.get_device()):
            pad = Copies.of("backward_pad", call, [x.shape for x in tensors])
            unpad = Copies.of("backward_unpad", call, [x.shape for x in call[:3]])
            *own, wide_grad, wide_out = pad.empty(tensors, copied)
        padded = Call._make((*own, *call[3:]))
        made = _make_launcher(padded, wide_grad, grad_lse, wide_out, needed, deterministic)
        return PaddedBackward(made, copied, pad, unpad, tuple(not padding.is_whole(x) for x in call[:3]))

    def launch(
        self,
        outer: BackwardLauncher,
        call: Call,
        grads: tuple[Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor],
        into: Gradients | None,
        steps: Steps,
    ) -> Gradients:
        """As :meth:`BackwardLauncher.run` of ``outer``, whose field this is."""
        given = into or NOTHING
        results = outer._allocate(call, given, outer._packs(call[:3], into), steps)
        cut = [cut or not padding.is_writable(x) for cut, x in zip(self.cut, results, strict=True)]
        written: Any = (*(None if cut else x for cut, x in zip(cut, results, strict=True)), *given[3:])
        copies = self.pad.pad((*call[:3], grads[0], outputs[0]), self.copied, steps)
        padded = Call._make((*copies[:3], *call[3:]))
        found = self.launcher._launch(padded, (copies[3], grads[1]), (copies[4], outputs[1]), written, steps)
        wide = [x if cut else None for cut, x in zip(cut, found, strict=False)]
        self.unpad.unpad(wide, results, steps)
        own = (x if wanted else None for x, wanted in zip(results, outer.needed, strict=False))
        return (*own, *found[3:])  # type: ignore[return-value]


def _seqlens(call: Call) -> tuple[Any, Any]:
    """Lengths for the main kernel, and for the preprocess and the convert, which read no keys' lengths."""
    from cute_attn.device.seqlen import Seqlens

    lengths, longest = call[3:6], call.longest
    return Seqlens(*lengths, call.seqused_k, *longest), Seqlens(*lengths, None, *longest)


def _sinks_gradient(
    sinks: Tensor | None, lse_log2: Tensor, minus_d: Tensor, keep: float, given: Tensor | None
) -> Tensor:
    """Of (nheads,) sinks, from what the preprocess wrote: dsink = -sum over rows of exp(sink - LSE) * D.

    exp(sink - LSE) is the share of the sink in a row's softmax. In rows that do not exist LSE is inf or D is 0.

    Args:
        sinks: the call's.
        lse_log2, minus_d: (batch, nheads, rows), or varlen (nheads, rows); D has the factor ``keep``, 1 - dropout_p.
        given: what to write the gradient into, or None.
    """
    assert sinks is not None
    shares = torch.exp2(sinks.float()[:, None] * math.log2(math.e) - lse_log2)
    found = (shares * minus_d).sum(-1 if lse_log2.dim() == 2 else (0, 2))
    found = (found / keep).to(sinks.dtype)
    return found if given is None else given.copy_(found)


def _sum_splits(gradient: Tensor, nheads_kv: int, given: Tensor | None) -> Tensor:
    """dK or dV of each kv head, from (..., nheads_kv * splits, dim), in ``given`` if there is one."""
    if gradient.shape[-2] == nheads_kv:
        return gradient
    divided = gradient.unflatten(-2, (nheads_kv, -1))
    return divided.sum(-2) if given is None else torch.sum(divided, -2, out=given)


def check_given(
    call: Call,
    given: Gradients,
    needed: tuple[bool, ...],
    outputs: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
) -> None:
    """Raise where a tensor to write a gradient into does not fit.

    outputs: the gradients of out and lse, out and lse.
    """
    names = ("grad_out", "grad_lse", "out", "lse")
    taken = [(name, x) for name, x in zip(names, outputs, strict=True) if x is not None]
    taken += call.tensors()
    for name, own, wanted in zip(("q", "k", "v", "bias", "sinks"), given, needed, strict=True):
        if own is None:
            continue
        x = getattr(call, name)
        if not wanted or x is None:
            raise ValueError(f"d{name} is given, but no gradient of {name} is wanted; accepted: None")
        check_like(f"d{name}", own, device=x.device, dtype=x.dtype, shape=x.shape)
        if own.requires_grad:
            raise ValueError(f"d{name} requires a gradient; accepted: a tensor to write")
        check_apart(f"d{name}", own, taken)
        taken.append((f"d{name}", own))
        if name in ("q", "k", "v") and own.is_cuda and call.aligned:
            check_rows(f"d{name}", own)


def _readable(x: Tensor, copy: bool) -> Tensor:
    """``x``, or a copy where kernels cannot read its strides or its address."""
    if copy or not is_aligned(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


# ---- launchers by metadata ----


def gradients(
    call: Call,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needed: tuple[bool, ...],
    into: Gradients | None = None,
) -> Gradients:
    """The needed gradients of q, k, v, bias and sinks, from the call's ``out`` and ``lse``.

    Deterministic by the parameter, or under ``torch.use_deterministic_algorithms``.

    Args:
        grad_out, grad_lse: None for one that is zero.
        into: see :meth:`BackwardLauncher.launch`.

    Raises:
        TypeError, ValueError, Unsupported: a parameter is wrong, or no kernel supports the call.
    """
    if grad_out is None:  # one row of zeros, broadcast
        shape, _ = call.output_shapes()
        grad_out = call.q.new_zeros(shape[-1:]).expand(shape)
    found = launcher_for(call, grad_out, grad_lse, out, lse, needed)
    written = [x for x in into or () if x is not None]
    if into is not None and written:
        check_given(call, into, needed, (grad_out, grad_lse, out, lse))
    grads = found.launch(call, (grad_out, grad_lse), (out, lse), into)
    if written:
        overwritten(*written)
    return grads


def launcher_for(
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needed: tuple[bool, ...],
) -> BackwardLauncher:
    """The launcher of such a call, which is checked; kept under its metadata. Arguments as of :func:`gradients`."""
    options, inputs = plans.Options(call[NUM_TENSORS + 1 :]), call[:NUM_TENSORS]
    key = (*_key(options, inputs, needed), *user_classes(call, "backward"))
    tensors = (*inputs, grad_out, grad_lse, out, lse, *call.epilogue_tensors)
    known = plans.find(key, tensors)
    if known is not None:
        return known.plan
    check(call)
    check_for_kernels(call, unaligned=True)
    check_gradients(call, grad_out, grad_lse, out, lse)
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return plans.keep(key, tensors, _make_launcher(call, grad_out, grad_lse, out, needed, deterministic))


def _key(options: plans.Options, inputs: Tensors, needed: tuple[bool, ...]) -> tuple[Hashable, ...]:
    """What a backward's plan depends on beside its tensors' metadata. inputs: q to rng_state."""
    bias = inputs[BIAS]
    starts = are_aligned(inputs) or tuple(map(is_aligned, inputs[:3])), bias is None or is_aligned(bias)
    return "backward", options, needed, torch.are_deterministic_algorithms_enabled(), starts


def repeated_gradients(
    options: plans.Options,
    inputs: Tensors,
    grad_out: Tensor,
    outputs: tuple[Tensor, Tensor],
    needed: tuple[bool, ...],
) -> Gradients | None:
    """:func:`gradients` of a call that has been made before, from its record; None for another.

    Args:
        options: the call's but its tensors, which name no class of a user's.
        inputs: q to rng_state.
        outputs: out and lse.
    """
    known = plans.find(_key(options, inputs, needed), (*inputs, grad_out, None, *outputs))
    if known is None:
        return None
    plan: BackwardLauncher = known.plan
    replay = None if plan.repeats is None else plan.repeats[plan._packs(inputs, NOTHING)].replay
    return None if replay is None else replay.run((*inputs, grad_out, *outputs))  # type: ignore[return-value]


def _make_launcher(
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    needed: tuple[bool, ...],
    deterministic: bool,
) -> BackwardLauncher:
    shapes = tuple(tuple(x.shape) for x in call[:3])
    given, copied = call, padding.to_copy(call[:3], [is_aligned(x) for x in call[:3]])
    sign, rest = call.scale_sign, call[NUM_TENSORS + 1 :]
    call = call.with_positive_scale()
    backward_launcher = BackwardLauncher(
        preprocess=None,
        main=None,
        convert=None,
        split=None,
        fallback=None,
        kernel=None,
        needed=needed,  # type: ignore[arg-type]
        shapes=shapes,
        strides=tuple(map(contiguous_strides, shapes)),
        parts=0,
        varlen=call.varlen,
        copy=(not rows_are_regular(grad_out), not rows_are_regular(out)),
        views=(),
        workspace=None,
        bias=None,
        num_splits=0,
        split_stride=0,
        multiprocessors=0,
        seqlens=None if any(x is not None for x in call[3:7]) else _seqlens(call),
        softmax_scale=call.softmax_scale,
        dropout_p=call.dropout_p,
        score_args=None,
        rest=rest,
        sign=sign,
    )
    if 0 in (call.batch, *call.longest, out.numel(), call.k.numel()):
        return backward_launcher
    if any(copied):
        packed = fused_qkv.parts_packed(call[:3]) if all(needed[:3]) else 0
        made = PaddedBackward.of(given, copied, grad_out, grad_lse, out, needed, deterministic)
        return replace(backward_launcher, padding=made, parts=packed)
    from cute_attn import compiler
    from cute_attn.tiles import padded

    bias = BiasGradient.of(call, deterministic) if needed[3] else None
    with on_device(call.q.get_device()):
        target = compiler.default_target("sm80")
        kernel = choose_kernel(call, target, op="backward", bias_grad=bias is not None)
        if getattr(kernel.tile, "in_terms", False):
            kernel = _in_terms_or_whole(kernel, call, grad_out, target)
        traits, tile = kernel.traits, kernel.tile
        in_terms = getattr(tile, "in_terms", False)
        wanted = kernels_of(kernel, lse_grad=grad_lse is not None)
        blocks = -(-call.longest[1] // tile.tile_n)
        processors = multiprocessors(call.q.get_device()) // getattr(tile, "cluster", 1)
        in_l2 = l2_bytes(call.q.get_device())
        heads_dkv = call.k.shape[-2] * head_splits(call, tile, processors, in_l2, deterministic)
        planes = call.batch * heads_dkv
        num_splits = key_splits(blocks, planes, processors) if deterministic else blocks
        check_blocks(call, tile, wanted[1][1].rows, num_splits, heads_dkv)
        if traits.arch == "sm90":
            check_steps(call, query_blocks(call, tile.tile_m), tile, min(processors, planes * num_splits))
        main = compiler.build(kernel, target).function
        preprocess, convert = (
            compiler.compile(*one, target).function if used else None
            for one, used in zip(wanted[1:3], (True, needed[0]), strict=True)
        )
        split = SplitLauncher.of(traits, "backward_split", target) if in_terms else None
        fallback = compiler.compile(*wanted[-1], target).function if in_terms else None
    workspace = Workspace.of(call, tile.tile_m, padded(traits.head_dim), num_splits if deterministic else 1)
    shapes = (shapes[0], *((*shape[:-2], heads_dkv, shape[-1]) for shape in shapes[1:]))
    return replace(
        backward_launcher,
        shapes=shapes,
        strides=tuple(map(contiguous_strides, shapes)),
        parts=fused_qkv.parts_packed(call[:3]) if all(needed[:3]) and heads_dkv == call.k.shape[-2] else 0,
        main=main,
        preprocess=preprocess,
        convert=convert,
        split=split,
        fallback=fallback,
        kernel=kernel,
        views=tuple(views(call)),
        workspace=workspace,
        bias=bias,
        num_splits=num_splits,
        split_stride=workspace.dq[1][0] if deterministic else 0,
        multiprocessors=processors,
        score_args=ScoreArgs.of(kernel, call, main) if bias is None else None,
        seqlens=None
        if backward_launcher.seqlens is None
        else tuple(prepared(main, x) for x in backward_launcher.seqlens),
    )


def _in_terms_or_whole(kernel: Any, call: Call, grad_out: Tensor, target: str) -> Any:
    """A kernel of operands in terms, or of whole ones where the call names no tile and is small, or cannot be split.

    Raises:
        ValueError: the call names a tile and cannot be split.
    """
    few_rows = can_split((*call[:3], grad_out))
    if call.backward_tile:
        if not few_rows:
            raise ValueError(
                f"q, k, v or grad_out has more than {MAX_SPLIT_ROWS} rows of heads; accepted: fewer, or operands=whole"
            )
        return kernel
    pays = kernel.terms_pay(math.prod(call.q.shape[:-1]), call.longest[1])
    return kernel if few_rows and pays else kernel.of_whole_operands(target)


_MAX_VARLEN_HEADS = 2**25
"""Of varlen q: their rows of 16 bytes fit 32 bits at any head dim."""


def query_blocks(call: Call, tile_m: int) -> int:
    """Query blocks of all heads and sequences in the workspace."""
    blocks = -(-call.longest[0] // tile_m) * call.batch
    return call.nheads * (call.q.shape[0] // tile_m + call.batch if call.varlen else blocks)


def check_blocks(call: Call, tile: Any, rows: int, num_splits: int, heads_dkv: int) -> None:
    """Raise where a count of the backward exceeds 32 bits.

    Args:
        tile: the main kernel's.
        rows: queries of a CTA of the preprocess.
        num_splits: how many CTAs divide a sequence's key blocks.
        heads_dkv: heads of dK and dV before they are added up.
    """
    batch, nheads = call.batch, call.nheads
    blocks = -(-call.longest[0] // tile.tile_m) * (tile.tile_m // rows)
    splits, spare = batch * num_splits, 0
    if call.varlen:
        for name, x, size in (("q", call.q, tile.tile_m), ("k", call.k, tile.tile_n)):
            what = f"{name} has {x.shape[0]} rows in {batch} sequences, each padded to blocks of {size} rows"
            check_count(what, (x.shape[0] // size + batch) * size, MAX_ROWS)
        check_count("q has heads", nheads, _MAX_VARLEN_HEADS)
        check_count(f"{call.stated('k')}{batch} sequences of {num_splits} splits of their key blocks", splits)
        if num_splits * tile.tile_n >= call.longest[1]:  # the grid follows the actual rows
            splits = min(splits, call.k.shape[0] // tile.tile_n + batch)
        # Each CTA of the preprocess clears rows that no sequence owns, at a stride.
        spare = max(call.q.shape[0], call.k.shape[0])
    what = f"{call.stated('q')}{batch} sequences of {nheads} heads of {blocks} blocks of {rows} queries"
    check_count(what, batch * nheads * blocks, MAX_ROWS - spare)
    # Each CTA claims one more than there are.
    what = f"{call.stated('k')}{heads_dkv} heads of {splits} splits of their key blocks"
    check_count(what, splits * heads_dkv, MAX_ROWS)


def kernels_of(main: Any, *, lse_grad: bool = False) -> list[tuple[Traits, Any]]:
    """(traits, tile) of the main kernel, its preprocess and its convert; of terms also the split and the fallback."""
    from cute_attn.compiler import registry

    beside, tile = [], main.tile
    if getattr(tile, "in_terms", False):
        tile = tile.fallback(main.traits)  # the convert's as well
        beside = [(main.traits.split_fp32("backward_split"), None), (main.traits, tile)]
    parts = [main.traits.part(op, lse_grad=lse_grad and op == "backward_preprocess") for op in PARTS]
    tiles = [registry.KERNELS[part.op, part.arch, ""].beside(part, tile) for part in parts]
    return [(main.traits, main.tile), *zip(parts, tiles, strict=True), *beside]
