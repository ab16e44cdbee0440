"""From the parameters of a call to a launch on CUDA.

Everything that follows from metadata (checks, kernel, output shapes, constant arguments) is computed once and kept
as a :class:`Launcher` under that metadata. A call is then a dictionary lookup, the allocation of outputs and the
launch.
"""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from cute_attn.host.counters import multiprocessors, schedule
from cute_attn.host.memory import clear_owned
from cute_attn.host.params import (
    ALIGNMENT_BYTES,
    MAX_ROWS,
    NUM_TENSORS,
    AttentionParams,
    check,
    check_count,
    check_for_kernels,
    check_steps,
    is_aligned,
    regular_strides,
    rows_are_regular,
    rows_are_whole,
)
from cute_attn.host.slots import prepared
from cute_attn.traits import Traits

_log = logging.getLogger("cute_attn")

Tensors = tuple[Any, ...]
"""A call's first tensors, q to rng_state; those that may be absent are None."""
Outputs = tuple[Tensor, Tensor, Tensor | None]

# What torch.compile's generated code calls: a third of the time of the public functions, which go through the
# dispatcher and are used where torch has none of these. TensorGuards compares all metadata of some tensors at once.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided_cuda = getattr(_guards, "_empty_strided_cuda", None)
_reinterpret_tensor = getattr(_guards, "_reinterpret_tensor", None)
_tensor_guards = getattr(_guards, "TensorGuards", None)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def new_empty_strided(
    like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Memory for an output on the current device, ``like``'s. Tests replace it to find unwritten elements."""
    if _empty_strided_cuda is None or not like.is_cuda:
        return like.new_empty_strided(shape, strides, dtype=dtype)
    return _empty_strided_cuda(shape, strides, dtype)


def _as_strided(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> Tensor:
    """A view of ``tensor`` from its element ``first`` on."""
    return tensor.as_strided(shape, strides, tensor.storage_offset() + first)


as_strided: Callable[..., Tensor] = _reinterpret_tensor or _as_strided


# ---- a kernel's arguments, prepared ----


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


# ---- the launcher of a call ----


@dataclass(frozen=True, slots=True, eq=False)
class Launcher:
    """What follows from a call's metadata. Launchers compare by identity.

    Attributes:
        function: launches the kernel; None where there is nothing to compute.
        softmax_function: launches the softmax kernel, which computes P from LSE; None without return_softmax.
        kernel: the kernel object, which makes the epilogues' arguments.
        seqlens: the kernel's lengths, or where some are tensors, the function that makes them.
        longest: the longest sequences as the kernel takes them, of :attr:`AttentionParams.longest`.
        shapes, strides: of out and lse.
        softmax_shape: or None without return_softmax.
        views: (index, shape, strides) of those tensors that the kernel reads through other strides.
        score_args: the epilogues' arguments, or None where each call makes its own.
        prefill: whether some rows are written by no thread, so that outputs are filled beforehand.
        sign, softmax_scale: the call's scale as kernels have it: see :meth:`AttentionParams.with_positive_scale`.
        rest: the call's arguments that are not tensors.
        aligned: whether the kernel takes q, k and v that start at multiples of 16 bytes only, which metadata does not
            show; another one takes the others.
        divided: a ``kvcache_launcher.Plan`` that divides keys among CTAs, in place of ``function``; or None.
        of_copies: the launcher of aligned copies, where no kernel reads q, k and v as they are; or None.
    """

    function: Callable[..., None] | None
    softmax_function: Callable[..., None] | None
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
    aligned: bool = False
    divided: Any = None
    sign: int = 1
    of_copies: "Launcher | None" = None

    def launch(
        self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...] = (), into: Tensor | None = None
    ) -> Outputs:
        """Allocate the outputs and launch on the current stream of q's device.

        into: out's memory, which :func:`cute_attn.host.params.check_out` accepts.
        """
        device = tensors[0].get_device()
        if device == _current_device():
            return self._launch(tensors, epilogue_tensors, into)
        with torch.cuda.device(device):
            return self._launch(tensors, epilogue_tensors, into)

    def _launch(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...], into: Tensor | None) -> Outputs:
        if self.sign != 1:
            tensors = ((tensors[0] * self.sign).contiguous(), *tensors[1:])
        q, k, v = tensors[:3]
        if self.aligned and (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            params = self._params(tensors, epilogue_tensors)
            return _unaligned_launcher(self, params)._launch(tensors, epilogue_tensors, into)
        out = new_empty_strided(q, self.shapes[0], self.strides[0], q.dtype) if into is None else into
        if self.of_copies is not None:
            return self._launch_copies(tensors, epilogue_tensors, out)
        lse = new_empty_strided(q, self.shapes[1], self.strides[1], torch.float32)
        # The kernel does not visit blocks outside the mask's band.
        softmax = None
        if self.softmax_shape is not None:
            strides = contiguous_strides(self.softmax_shape)
            softmax = new_empty_strided(q, self.softmax_shape, strides, q.dtype).zero_()
        if self.prefill:
            clear_owned(out, None if into is None else tensors[3])
            lse.fill_(-math.inf)
        if self.divided is not None:
            return (*self._launch_divided(tensors, out, lse), None)
        if self.function is None:
            if tensors[_SINKS] is not None:
                _fill_with_sinks(lse, tensors)
            return out, lse, softmax
        tensors = self._viewed(tensors)
        q, k, v = tensors[:3]
        if self.score_args is not None:
            score_args = self.score_args.fill(tensors)
        else:
            score_args = self.kernel.score_args(self._params(tensors, epilogue_tensors).score_inputs())
        seqlens = self.seqlens
        if callable(seqlens):
            seqlens = seqlens(*tensors[3:7], *self.longest)
        tiles = schedule(q.get_device())
        self.function(q, k, v, out, lse, seqlens, self.softmax_scale, tiles, score_args)
        if self.softmax_function is not None:
            self.softmax_function(q, k, lse, softmax, seqlens, self.softmax_scale, score_args)
        return out, lse, softmax

    def _launch_copies(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...], into: Tensor) -> Outputs:
        """Launch with aligned copies of q, k, v and the output, of whose columns the first are the call's."""
        assert self.of_copies is not None
        copies = aligned_copies((*tensors[:3], into))
        _, lse, softmax = self.of_copies._launch((*copies[:3], *tensors[3:]), epilogue_tensors, copies[3])
        return into.copy_(copies[3][..., : into.shape[-1]]), lse, softmax

    def _params(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...] = ()) -> AttentionParams:
        """The call's with a positive scale; ``tensors`` have the sign."""
        params = AttentionParams._make((*tensors, epilogue_tensors, *self.rest))
        return params if self.sign == 1 else params._replace(softmax_scale=self.softmax_scale)

    def _viewed(self, tensors: Tensors) -> Tensors:
        """The tensors with the strides that kernels assume."""
        if not self.views:
            return tensors
        viewed = list(tensors)
        for index, shape, strides in self.views:
            viewed[index] = as_strided(viewed[index], shape, strides)
        return tuple(viewed)

    def _launch_divided(self, tensors: Tensors, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        from cute_attn.host import divided

        return divided.launch(self.divided, self._params(self._viewed(tensors)), out, lse)


def _fill_with_sinks(lse: Tensor, tensors: Tensors) -> None:
    """LSE of a call without keys: the head's sink in the rows of sequences."""
    cu_seqlens_q, seqused_q, sinks = tensors[3], tensors[5], tensors[_SINKS]
    row = torch.arange(lse.shape[-1], device=lse.device)
    if cu_seqlens_q is None:
        exists = row < (lse.shape[-1] if seqused_q is None else seqused_q[:, None, None])
    else:
        batch = torch.searchsorted(cu_seqlens_q, row, right=True) - 1
        ends = cu_seqlens_q[1:] if seqused_q is None else cu_seqlens_q[:-1] + seqused_q
        exists = (batch >= 0) & (row < ends[batch.clamp(0, len(ends) - 1)])
    lse.copy_(torch.where(exists, sinks[:, None].to(lse.dtype), -math.inf))


# ---- launchers by metadata ----


_MAX_LAUNCHERS = 4096
_BIAS, _SINKS = (AttentionParams._fields.index(name) for name in ("bias", "sinks"))
_launchers: dict[tuple[Any, ...], Launcher] = {}


def launcher_key(tensors: Tensors, options: Hashable) -> tuple[Any, ...]:
    """The key of a launcher: the tensors' metadata, and the options.

    Also whether the bias is aligned for TMA: a bias that is not has another kernel, where q, k and v raise.
    """
    key: list[Any] = [options]
    for x in tensors:  # one flat tuple: this is a quarter of a call's host time
        if x is None:
            key.append(None)
        else:
            key += (type(x), x.dtype, x.get_device(), x.shape, x.stride())
    if tensors[_BIAS] is not None:
        key.append(is_aligned(tensors[_BIAS]))
    return tuple(key)


def known_launcher(tensors: Tensors, options: Hashable) -> Launcher | None:
    """The launcher of an earlier call with this metadata, or None."""
    try:
        return _launchers.get(launcher_key(tensors, options))
    except (
        TypeError,
        AttributeError,
        RuntimeError,
    ):  # an option that cannot be hashed, no tensor, or one without memory: the checks raise
        return None


@dataclass(frozen=True, slots=True)
class Seen:
    """An earlier call, with what recognises calls of the same metadata.

    Attributes:
        check: whether tensors have that call's metadata.
        aligned: as in :func:`launcher_key`; None without a bias.
        launcher: its launcher, or its plan.
        constant: whether none of its tensors requires a gradient.
    """

    check: Callable[..., bool]
    aligned: bool | None
    launcher: Any
    constant: bool


@dataclass(slots=True)
class _Last:
    """The last calls with the same options and the same tensors present, the latest first.

    Attributes:
        pick: selects the tensors that are present; the fourth and fifth once where they are one, as cu_seqlens may be.
        calls: at most ``_MAX_LAST``.
    """

    pick: Callable[[Tensors], Tensors]
    calls: list[Seen] = field(default_factory=list)


LastCalls = dict[tuple[Any, ...], _Last]
_MAX_LAST = 4
_last: LastCalls = {}


def _last_key(tensors: Tensors, options: Hashable) -> tuple[Any, ...]:
    starts_q, starts_k = tensors[3:5]
    return options, starts_q is starts_k, tuple(x is None for x in tensors[3:])


def recall(tensors: Tensors, options: Hashable, calls: LastCalls | None = None) -> Seen | None:
    """One of the last calls with these options and metadata: a third of the time of a launcher's key.

    Memory is all there is to its tensors, as to those of the call that was remembered: torch's guards compare what the
    dispatcher knows of them.

    calls: where to look; by default among those of :func:`cute_attn.attention`.
    """
    try:
        last = (_last if calls is None else calls).get(_last_key(tensors, options))
        if last is None:
            return None
        present = last.pick(tensors)
        for seen in last.calls:
            if seen.check(*present) and (seen.aligned is None or seen.aligned == is_aligned(tensors[_BIAS])):
                return seen
    except (TypeError, AttributeError, RuntimeError):  # as in known_launcher
        pass
    return None


def remember(
    tensors: Tensors, options: Hashable, launcher: Any, calls: LastCalls | None = None, *, biased: bool = True
) -> None:
    """Let :func:`recall` find a call's launcher or plan, unless one tensor is two of its arguments.

    tensors: of which :func:`cute_attn.host.memory.all_plain` holds.
    calls: as of :func:`recall`.
    biased: whether a bias is among the tensors where :func:`cute_attn.attention` has one.
    """
    calls = _last if calls is None else calls
    places = {id(x): i for i, x in enumerate(tensors) if x is not None}
    both_starts = tensors[3] is not None and tensors[3] is tensors[4]
    if _tensor_guards is None or len(places) + both_starts < sum(x is not None for x in tensors):
        return
    key = _last_key(tensors, options)
    if len(calls) >= _MAX_LAUNCHERS:
        calls.clear()
    last = calls.setdefault(key, _Last(itemgetter(*places.values())))
    bias = tensors[_BIAS] if biased else None
    present = last.pick(tensors)
    check = _tensor_guards(
        *present,
        dynamic_dims_sizes=[list(x.shape) for x in present],
        dynamic_dims_strides=[list(x.stride()) for x in present],
    ).check
    constant = not any(x.requires_grad for x in present)
    last.calls.insert(0, Seen(check, None if bias is None else is_aligned(bias), launcher, constant))
    del last.calls[_MAX_LAST:]


def launcher_for(params: AttentionParams, options: Hashable = None) -> Launcher:
    """The launcher of a call, which is checked; kept under its metadata and ``options``, by default the parameters'.

    Users' classes are part of the key: they may be registered again at any time.

    Raises:
        TypeError, ValueError, Unsupported: a parameter is wrong, or no kernel supports the call.
    """
    tensors, classes = params[:NUM_TENSORS], user_classes(params)
    if options is None or classes:
        options = (params[NUM_TENSORS + 1 :], *classes)
        tensors = (*tensors, *params.epilogue_tensors)
    launcher = known_launcher(tensors, options)
    if launcher is None:
        launcher = _make_launcher(params)
        if len(_launchers) >= _MAX_LAUNCHERS:
            _launchers.clear()
        with contextlib.suppress(TypeError):  # an option that cannot be hashed, such as a window as a list
            _launchers[launcher_key(tensors, options)] = launcher
    return launcher


def user_classes(params: AttentionParams, op: str = "forward") -> tuple[Any, ...]:
    """The users' classes that a call names."""
    if not (params.epilogues or ":" in params.kernel):
        return ()
    from cute_attn.compiler import registry
    from cute_attn.epilogues.base import user_epilogue

    arch, _, variant = params.kernel.partition(":")
    kernel = registry.KERNELS.get((op, arch, variant))
    return (kernel, *(user_epilogue(name) for name in params.epilogue_names))


MAX_UNALIGNED_HEAD_DIM = 256
"""The largest head dim of which a forward kernel reads rows that start anywhere."""


def aligned_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies, with zeros up to a head dim of whole 16 bytes."""
    copies = []
    for x in tensors:
        whole = ALIGNMENT_BYTES // x.element_size()
        wide = x.new_zeros((*x.shape[:-1], -(-x.shape[-1] // whole) * whole))
        wide[..., : x.shape[-1]].copy_(x)
        copies.append(wide)
    return copies


_unaligned: dict[Launcher, Launcher] = {}


def _unaligned_launcher(launcher: Launcher, params: AttentionParams) -> Launcher:
    """The launcher for calls of a launcher's metadata whose q, k or v does not start at a multiple of 16 bytes."""
    found = _unaligned.get(launcher)
    if found is None:
        if len(_unaligned) >= _MAX_LAUNCHERS:
            _unaligned.clear()
        made = _make_launcher(params, aligned=False)
        found = _unaligned[launcher] = replace(made, shapes=launcher.shapes, strides=launcher.strides)
    return found


def _make_launcher(params: AttentionParams, *, aligned: bool = True) -> Launcher:
    """aligned: q, k and v start at multiples of 16 bytes."""
    check(params)
    check_for_kernels(params, unaligned=True)
    aligned = aligned and all(map(rows_are_whole, params[:3]))
    sign, rest, params = params.scale_sign, params[NUM_TENSORS + 1 :], params.with_positive_scale()
    out_shape, lse_shape, softmax_shape = params.output_shapes()
    launcher = Launcher(
        function=None,
        softmax_function=None,
        kernel=None,
        seqlens=None,
        longest=params.longest,
        shapes=(out_shape, lse_shape),
        strides=(contiguous_strides(out_shape), contiguous_strides(lse_shape)),
        softmax_shape=softmax_shape if params.return_softmax else None,
        views=(),
        score_args=None,
        prefill=True,
        softmax_scale=params.softmax_scale,
        sign=sign,
        rest=rest,
    )
    if 0 in (params.batch, *params.longest, math.prod(out_shape), math.prod(params.k.shape)):
        return launcher
    from cute_attn import compiler
    from cute_attn.compiler import registry
    from cute_attn.device.seqlen import Seqlens

    if not aligned and max(params.q.shape[-1], params.v.shape[-1]) > MAX_UNALIGNED_HEAD_DIM:
        q, k, v = aligned_copies(params[:3])
        return replace(launcher, of_copies=_make_launcher(params._replace(q=q, k=k, v=v)))
    with torch.cuda.device(params.q.device):
        target = compiler.default_target("sm80")
        kernel = choose_kernel(params, target, aligned=aligned)
        blocks, processors = check_query_blocks(params, kernel), multiprocessors(params.q.get_device())
        if kernel.traits.arch == "sm90":
            check_steps(params, blocks, kernel.tile, processors)
        from cute_attn.host import divided

        if divided.is_wanted(params, kernel, blocks, processors):
            plan = divided.plan_for_attention(params)
            divided_views = tuple(views(params))
            return replace(launcher, divided=plan, kernel=plan.kernel, views=divided_views, prefill=False)
        from cute_attn.host.split_fp32 import SpeculativeForward, SpeculativeKernels

        function: Callable[..., None]
        speculative = SpeculativeKernels.wanted(params, kernel, target)
        if speculative is not None:
            check_query_blocks(params, speculative.speculative)
            function = SpeculativeForward.of(speculative, target)
            kernel = registry.lookup(replace(kernel.traits, variant=""), None, target)
        else:
            function = compiler.build(kernel, target).function
        softmax_function = _softmax_function(params, kernel.traits, target) if params.return_softmax else None
    lengths = params[3:7]
    return replace(
        launcher,
        function=function,
        softmax_function=softmax_function,
        kernel=kernel,
        seqlens=Seqlens
        if any(x is not None for x in lengths)
        else prepared(function, Seqlens(*lengths, *params.longest)),
        views=tuple(views(params, aligned)),
        score_args=ScoreArgs.of(kernel, params, function),
        aligned=aligned,
        prefill=params.seqused_q is not None,
    )


def _softmax_function(params: AttentionParams, forward: Traits, target: str) -> Callable[..., None]:
    """Launches the softmax kernel of such a forward."""
    from cute_attn import compiler
    from cute_attn.compiler import registry

    kernel = registry.lookup(forward.softmax(), None, target)
    check_query_blocks(params, kernel)
    return compiler.build(kernel, target).function


def check_query_blocks(params: AttentionParams, kernel: Any) -> int:
    """The number of query blocks of a forward or softmax kernel; raises where they exceed 32 bits."""
    queries = getattr(kernel.tile, "queries", kernel.tile.tile_m)
    packs = params.k.shape[-2] * -(-params.group // getattr(kernel.tile, "pack_heads", 1))
    if params.varlen and kernel.traits.arch == "sm90":  # its work tiles are the blocks of all sequences
        blocks = params.q.shape[0] // queries + params.batch
        each = f"rows in {params.batch} sequences, each padded to blocks of {queries}"
        check_count(f"q has {params.q.shape[0]} {each}", blocks * queries, MAX_ROWS)
        check_count(f"q has {packs} heads of {params.q.shape[0]} {each}: blocks", blocks * packs, MAX_ROWS)
        return blocks * packs
    blocks = -(-params.longest[0] // queries)
    what = f"{params.stated('q')}{params.batch} sequences of {packs} heads of {blocks} blocks of {queries} queries"
    check_count(what, params.batch * packs * blocks, MAX_ROWS)
    return params.batch * packs * blocks


def views(
    params: AttentionParams, aligned: bool = True
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Strides that kernels need: regular ones of dimensions of size 1, and 0 to broadcast slopes and bias.

    aligned: of kernels of aligned rows; others take any strides of q, k and v.
    """
    shapes = {
        "alibi_slopes": (params.batch, params.nheads),
        "bias": (params.batch, params.nheads, params.max_seqlen_q, params.max_seqlen_k),
    }
    for name in ("q", "k", "v", *shapes):
        x = getattr(params, name)
        if x is None or (name not in shapes and (not aligned or rows_are_regular(x))):
            continue
        shape = shapes.get(name, tuple(x.shape))
        if name not in shapes or shape != tuple(x.shape) or x.stride(-1) != 1:
            yield AttentionParams._fields.index(name), shape, regular_strides(x, shape)


def choose_kernel(
    params: AttentionParams,
    target: str,
    *,
    op: str = "forward",
    bias_grad: bool = False,
    aligned: bool = True,
) -> Any:
    """The kernel with its tile: the newest generation that supports the call on ``target``, or the one that it names.

    Lengths, heads and the bias's layout may change the default tile: see :mod:`cute_attn.compiler.registry`.

    A variant that is registered for the forward alone leaves the backward to its generation's own kernel. Where a
    newer generation declines a tile, such as one with fields of an older one, a warning gives its reason; where it
    does not compute such traits, the log at level DEBUG does.

    Raises:
        Unsupported: no kernel supports it, with each one's reason.
    """
    from cute_attn.compiler import registry

    tile = params.tile if op == "forward" else params.backward_tile
    names = (
        [params.kernel] if params.kernel else [a for a in ("sm90", "sm80") if target in registry.RUNS_ON[a]]
    )
    reasons: list[str] = []
    for name in names:
        arch, _, variant = name.partition(":")
        if op != "forward" and (op, arch, variant) not in registry.KERNELS:
            variant = ""
        try:
            kernel = registry.lookup(
                params.traits(arch, variant, op=op, bias_grad=bias_grad, aligned=aligned),
                tile or None,
                target,
            )
            if op == "forward" and not tile:
                kernel = kernel.for_lengths(*params.longest, params.group, target)
            reason = _tma_bias_reason(params, kernel)
            if reason and tile:
                raise registry.Unsupported(f"{reason} with tile {kernel.tile}")
            if reasons and tile:
                warnings.warn(f"{kernel.traits} serves the call, since {'; '.join(reasons)}", stacklevel=2)
            if reason:
                kernel = kernel.without_tma_bias()
            why = f"; for TMA, {reason.rstrip(',')}" if reason else "".join(f"; {x}" for x in reasons)
            _log.debug("%s on %s takes tile %s%s", kernel.traits, target, kernel.tile, why)
            return kernel
        except ValueError as reason:
            if len(names) == 1:
                raise
            reasons.append(str(reason))
    raise registry.Unsupported("; ".join(reasons))


def _tma_bias_reason(params: AttentionParams, kernel: Any) -> str | None:
    """Why TMA cannot load a bias or store its gradient as the kernel's tile has it, or None.

    A single row is cheaper without TMA.
    """
    bias = params.bias
    if bias is None or not getattr(kernel.tile, "bias_stages", 0):
        return None
    if getattr(kernel, "stores_bias_gradient", False):
        full = (params.batch, params.nheads, params.max_seqlen_q, params.max_seqlen_k)
        if tuple(bias.shape) != full or bias.shape[3] % 8:
            return (
                f"bias has shape {tuple(bias.shape)} and a gradient; accepted: {full} with a last size that is a "
                "multiple of 8,"
            )
    whole = ALIGNMENT_BYTES // bias.element_size()
    steps = [step for size, step in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1]
    aligned = is_aligned(bias)
    rows = bias.shape[2] > 1 and bias.stride(2) != 0
    if rows and aligned and bias.stride(-1) == 1 and all(step % whole == 0 <= step for step in steps):
        return None
    address = (
        "" if aligned else f" and starts {bias.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of 16"
    )
    return (
        f"bias has shape {tuple(bias.shape)}, strides {tuple(bias.stride())}{address}; accepted: more rows than one, "
        f"multiples of {whole} elements before the last stride, and data aligned to {ALIGNMENT_BYTES} bytes,"
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of that shape."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
