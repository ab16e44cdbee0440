"""From the parameters of a call to a launch on CUDA.

Everything that follows from metadata (checks, kernel, output shapes, constant arguments) is computed once and kept
as a :class:`Launcher` under that metadata. A call is then a dictionary lookup, the allocation of outputs and the
launch.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.host import fused_qkv, padding, plans, record
from cute_attn.host.call import NUM_TENSORS, SINKS, Call
from cute_attn.host.checks import check, check_for_kernels, check_query_blocks, check_steps
from cute_attn.host.choose import choose_kernel, user_classes
from cute_attn.host.counters import multiprocessors
from cute_attn.host.memory import (
    ALIGNMENT_BYTES,
    Tensors,
    as_strided,
    clear_owned,
    contiguous_strides,
    is_aligned,
    none_overrides,
    on_device,
    regular_strides,
    rows_are_regular,
    write_owned,
)
from cute_attn.host.padding import Copies
from cute_attn.host.record import ScoreArgs
from cute_attn.host.slots import prepared

Outputs = tuple[Tensor, Tensor, Tensor | None]

# ---- the launcher of a call ----


@dataclass(frozen=True, slots=True, eq=False)
class Launcher:
    """What follows from a call's metadata. Launchers compare by identity.

    Attributes:
        function: launches the kernel; None where there is nothing to compute.
        kernel: the kernel object, which makes the epilogues' arguments.
        seqlens: the kernel's lengths, or where some are tensors, the function that makes them.
        longest: the longest sequences as the kernel takes them, of :attr:`Call.longest`.
        shapes, strides: of out and lse.
        softmax_shape: or None without return_softmax; the reference computes it from LSE.
        views: (index, shape, strides) of those tensors that the kernel reads through other strides.
        score_args: the epilogues' arguments, or None where each call makes its own.
        prefill: whether some rows are written by no thread, so that outputs are filled beforehand.
        in_terms: whether ``function`` is a ``SpeculativeForward``, which launches several kernels.
        sign, softmax_scale: the call's scale as kernels have it: see :meth:`Call.with_positive_scale`.
        rest: the call's arguments that are not tensors.
        options: ``rest`` and the users' classes that the call names, for the key of a backward.
        packed: how many of q, k and v are parts of one tensor, if they lie side by side: their gradients are, too.
        aligned: whether calls may come whose q, k or v does not start at a multiple of 16 bytes, which metadata does
            not show: these are padded.
        divided: a ``kvcache_launcher.Plan`` that divides keys among CTAs, in place of ``function``; or None.
        padding: launches with padded copies, where no kernel reads q, k and v as they are; or None.
    """

    function: Callable[..., None] | None
    kernel: Any
    seqlens: Any
    longest: tuple[int, int]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    softmax_shape: tuple[int, ...] | None
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    score_args: ScoreArgs | None
    prefill: bool
    softmax_scale: float
    rest: tuple
    options: plans.Options
    packed: int = 0
    aligned: bool = False
    divided: Any = None
    sign: int = 1
    in_terms: bool = False
    padding: "PaddedForward | None" = None

    def launch(
        self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...] = (), into: Tensor | None = None
    ) -> Outputs:
        """Allocate the outputs and launch on the current stream of q's device.

        into: out's memory, which :func:`cute_attn.host.checks.check_out` accepts.
        """
        with on_device(tensors[0].get_device()):
            return self._launch(tensors, epilogue_tensors, into)

    def _launch(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...], into: Tensor | None) -> Outputs:
        if self.softmax_shape is not None and any(x is not None for x in tensors[3:7]):
            _refuse_capture()
        if self.padding is not None:
            return self.padding.launch(self, tensors, epilogue_tensors, into)
        if self.sign != 1:
            tensors = ((tensors[0] * self.sign).contiguous(), *tensors[1:])
        q, k, v = tensors[:3]
        if self.aligned and not are_aligned(tensors):
            record.unlike_others()
            call = self._call(tensors, epilogue_tensors)
            return _padded_launcher(self, call).launch(tensors, epilogue_tensors, into)
        out = record.empty(q, self.shapes[0], self.strides[0], q.dtype) if into is None else into
        lse = record.empty(q, self.shapes[1], self.strides[1], torch.float32)
        if self.prefill:
            record.step(clear_owned, out, None if into is None else tensors[3])
            record.step(Tensor.fill_, lse, -math.inf)
        if self.divided is not None:
            keeps_rows = into is not None and tensors[3] is not None
            return self._launch_divided(tensors, out, lse, keeps_rows=keeps_rows)
        if self.function is None:
            record.also()
            if tensors[SINKS] is not None:
                _fill_with_sinks(lse, tensors)
            return out, lse, None if self.softmax_shape is None else q.new_zeros(self.softmax_shape)
        tensors = self._viewed(tensors)
        q, k, v = tensors[:3]
        if self.score_args is not None:
            score_args = self.score_args.fill(tensors)
        else:
            if not are_functions(self.kernel.traits):
                record.also()  # users' classes may read what they are given
            score_args = self.kernel.score_args(self._call(tensors, epilogue_tensors).score_inputs())
        seqlens = self.seqlens
        if callable(seqlens):
            seqlens = seqlens(*tensors[3:7], *self.longest)
        tiles = record.work_tiles(q.get_device())
        arguments = (q, k, v, out, lse, seqlens, self.softmax_scale, tiles, score_args)
        if self.in_terms:
            self.function(*arguments)
        else:
            record.launch(self.function, *arguments)
        if self.softmax_shape is None:
            return out, lse, None
        record.also()
        call = self._call(tensors, epilogue_tensors)
        definition = call.by_definition()
        return out, lse, reference.softmax(q, k, lse, call.softmax_scale, *definition, call.precision)

    def _call(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...] = ()) -> Call:
        """The call's with a positive scale; ``tensors`` have the sign."""
        call = Call._make((*tensors, epilogue_tensors, *self.rest))
        return call if self.sign == 1 else call._replace(softmax_scale=self.softmax_scale)

    def _viewed(self, tensors: Tensors) -> Tensors:
        """The tensors with the strides that kernels assume."""
        if not self.views:
            return tensors
        viewed = list(tensors)
        for index, shape, strides in self.views:
            viewed[index] = as_strided(viewed[index], shape, strides)
        return tuple(viewed)

    def _launch_divided(self, tensors: Tensors, out: Tensor, lse: Tensor, *, keeps_rows: bool) -> Outputs:
        """keeps_rows: rows of ``out`` that no sequence owns stay, which the combine kernel would write."""
        from cute_attn.host import divided

        call, written = self._call(self._viewed(tensors)), out
        if keeps_rows:
            record.also()
            written = record.empty(out, self.shapes[0], self.strides[0], out.dtype)
        divided.launch(self.divided, call, written, lse)
        return write_owned(out, written, tensors[3]) if keeps_rows else out, lse, None


@dataclass(frozen=True, slots=True, eq=False)
class PaddedForward:
    """A call whose q, k or v no kernel reads as they are: see :mod:`cute_attn.host.padding`.

    Attributes:
        launcher: of the padded call.
        copied: which of q, k and v are.
        pad, unpad: of q, k and v; of out.
        cuts: whether out has another head dim than the padded call's.
    """

    launcher: Launcher
    copied: tuple[bool, ...]
    pad: Copies
    unpad: Copies
    cuts: bool

    @staticmethod
    def of(call: Call, copied: tuple[bool, ...]) -> "PaddedForward":
        """For a call of which those are ``copied``."""
        padding.check_rows({"q": call.q, "k": call.k, "v": call.v}, copied)
        with on_device(call.q.get_device()):
            pad = Copies.of("forward_pad", call, [x.shape for x in call[:3]])
            unpad = Copies.of("forward_unpad", call, [call.output_shapes()[0]])
            padded = Call._make((*pad.empty(call[:3], copied), *call[3:]))
        return PaddedForward(_make_launcher(padded), copied, pad, unpad, not padding.is_whole(call.v))

    def launch(
        self,
        outer: Launcher,
        tensors: Tensors,
        epilogue_tensors: tuple[Tensor, ...],
        into: Tensor | None,
    ) -> Outputs:
        """As :meth:`Launcher.launch` of ``outer``, whose field this is."""
        q = tensors[0]
        out = record.empty(q, outer.shapes[0], outer.strides[0], q.dtype) if into is None else into
        if outer.prefill and into is None:  # rows without an owner, too
            record.step(Tensor.zero_, out)
        copies = self.pad.pad(tensors[:3], self.copied)
        cuts = self.cuts or not padding.is_writable(into)
        written = record.empty(q, *self.unpad.layouts[0], q.dtype) if cuts else out
        launch = self.launcher._launch
        _, lse, softmax = launch((*copies, *tensors[3:]), epilogue_tensors, written)
        if cuts:
            self.unpad.unpad([written], [out], tensors[3])
        return out, lse, softmax


def _refuse_capture() -> None:
    """Raise where a CUDA graph captures a call whose softmax is wanted: the host reads its lengths."""
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "return_softmax is True with lengths, which it reads on the host, in a CUDA graph's capture; accepted: "
            "without lengths, or outside a graph"
        )


def are_aligned(tensors: Tensors) -> bool:
    """Whether q, k and v start at multiples of 16 bytes, which metadata does not show."""
    return not (tensors[0].data_ptr() | tensors[1].data_ptr() | tensors[2].data_ptr()) % ALIGNMENT_BYTES


def _fill_with_sinks(lse: Tensor, tensors: Tensors) -> None:
    """LSE of a call without keys: the head's sink in the rows of sequences."""
    cu_seqlens_q, seqused_q, sinks = tensors[3], tensors[5], tensors[SINKS]
    if cu_seqlens_q is not None and len(cu_seqlens_q) == 1:
        return  # no sequence has rows
    row = torch.arange(lse.shape[-1], device=lse.device)
    if cu_seqlens_q is None:
        exists = row < (lse.shape[-1] if seqused_q is None else seqused_q[:, None, None])
    else:
        batch = torch.searchsorted(cu_seqlens_q, row, right=True) - 1
        ends = cu_seqlens_q[1:] if seqused_q is None else cu_seqlens_q[:-1] + seqused_q
        exists = (batch >= 0) & (row < ends[batch.clamp(0, len(ends) - 1)])
    lse.copy_(torch.where(exists, sinks[:, None].to(lse.dtype), -math.inf))


def are_functions(traits: Any) -> bool:
    """Whether a kernel computes what the package wrote or traced, and no class of a user's."""
    from cute_attn.epilogues.base import user_epilogue

    return not traits.variant and not any(isinstance(user_epilogue(name), type) for name in traits.epilogues)


# ---- launchers by metadata ----


def key_of(options: Hashable, bias: Tensor | None) -> tuple[Hashable, ...]:
    """What a call's plan depends on beside the tensors' metadata.

    Whether the bias is aligned for TMA is part of it: one that is not has another kernel, where q, k and v are padded.
    """
    # One of a subclass, such as a fake tensor, has no plan; the checks refuse other layouts.
    has_address = bias is not None and none_overrides((bias,)) and bias.layout is torch.strided
    return "forward", options, not has_address or is_aligned(bias)  # type: ignore[arg-type]


def launcher_for(call: Call) -> Launcher:
    """The launcher of a call, which is checked; kept under its metadata.

    Users' classes are part of the key: they may be registered again at any time.

    Raises:
        TypeError, ValueError, Unsupported: a parameter is wrong, or no kernel supports the call.
    """
    key = key_of((call[NUM_TENSORS + 1 :], *user_classes(call)), call.bias)
    tensors = (*call[:NUM_TENSORS], *call.epilogue_tensors)
    return plans.plan(key, tensors, lambda: _make_launcher(call))


def _padded_launcher(launcher: Launcher, call: Call) -> Launcher:
    """The launcher for calls of a launcher's metadata of which q, k or v start as in ``call``, some unaligned."""
    starts = tuple(map(is_aligned, call[:3]))
    key = ("padded forward", launcher, starts)

    def make() -> Launcher:
        made = _make_launcher(call, starts)
        return replace(made, shapes=launcher.shapes, strides=launcher.strides)

    return plans.plan(key, (), make)


def _make_launcher(call: Call, starts: tuple[bool, ...] = ()) -> Launcher:
    """starts: whether q, k and v start at multiples of 16 bytes, as they do by default."""
    check(call)
    check_for_kernels(call, unaligned=True)
    given, copied = call, padding.to_copy(call[:3], starts)
    sign, rest, call = call.scale_sign, call[NUM_TENSORS + 1 :], call.with_positive_scale()
    out_shape, lse_shape = call.output_shapes()
    launcher = Launcher(
        function=None,
        kernel=None,
        seqlens=None,
        longest=call.longest,
        shapes=(out_shape, lse_shape),
        strides=(contiguous_strides(out_shape), contiguous_strides(lse_shape)),
        softmax_shape=call.softmax_shape() if call.return_softmax else None,
        views=(),
        score_args=None,
        prefill=True,
        softmax_scale=call.softmax_scale,
        sign=sign,
        rest=rest,
        options=plans.Options((rest, *user_classes(call))),
        packed=fused_qkv.parts_packed(call[:3]),
    )
    if 0 in (call.batch, *call.longest, math.prod(out_shape), math.prod(call.k.shape)):
        return launcher
    from cute_attn import compiler
    from cute_attn.compiler import registry
    from cute_attn.device.seqlen import Seqlens

    if any(copied):
        prefill = call.seqused_q is not None
        return replace(launcher, padding=PaddedForward.of(given, copied), prefill=prefill)
    with on_device(call.q.get_device()):
        target = compiler.default_target("sm80")
        kernel = choose_kernel(call, target)
        blocks = check_query_blocks(call, kernel)
        if kernel.traits.arch == "sm90":
            from cute_attn.host import divided

            processors = multiprocessors(call.q.get_device())
            check_steps(call, blocks, kernel.tile, processors)
            if divided.is_wanted(call, kernel, target, processors):
                plan = divided.plan_for_attention(call)
                divided_views = tuple(views(call))
                own = {"divided": plan, "kernel": plan.kernel, "views": divided_views}
                return replace(launcher, **own, aligned=True, prefill=False)
        from cute_attn.host.split_fp32 import SpeculativeForward, SpeculativeKernels

        function: Callable[..., None]
        speculative = SpeculativeKernels.wanted(call, kernel, target)
        if speculative is not None:
            check_query_blocks(call, speculative.speculative)
            function = SpeculativeForward.of(speculative, target)
            kernel = registry.lookup(replace(kernel.traits, variant=""), None, target)
        else:
            function = compiler.build(kernel, target).function
    lengths = call[3:7]
    return replace(
        launcher,
        function=function,
        in_terms=speculative is not None,
        kernel=kernel,
        seqlens=Seqlens
        if any(x is not None for x in lengths)
        else prepared(function, Seqlens(*lengths, *call.longest)),
        views=tuple(views(call)),
        score_args=ScoreArgs.of(kernel, call, function),
        aligned=True,
        prefill=call.seqused_q is not None,
    )


def views(call: Call) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Strides that kernels need: regular ones of dimensions of size 1, and 0 to broadcast slopes and bias."""
    shapes = {
        "alibi_slopes": (call.batch, call.nheads),
        "bias": (call.batch, call.nheads, call.max_seqlen_q, call.max_seqlen_k),
    }
    for name in ("q", "k", "v", *shapes):
        x = getattr(call, name)
        if x is None or (name not in shapes and rows_are_regular(x)):
            continue
        shape = shapes.get(name, tuple(x.shape))
        if name not in shapes or shape != tuple(x.shape) or x.stride(-1) != 1:
            yield Call._fields.index(name), shape, regular_strides(x, shape)
