"""Gradients of q, k, v and bias from gradients of out and lse, on CUDA: three launches and their workspace.

    preprocess   out, grad_out, lse, grad_lse  ->  two numbers per query, and dQ accumulators of zeros
    main         dK, dV, the bias's gradient; adds to the accumulators
    convert      accumulators  ->  dQ

On Hopper the main kernel stores dQ of short sequences: no accumulators and no convert.

fp32 q, k, v and grad_out are split into two fp16 terms before the main kernel, or into one with precision tf32
(:mod:`cute_attn.host.split_fp32`). A second main kernel, for whole fp32 operands, follows. Each of the two reads on the
GPU whether the tensors fit their terms, and one of them returns at once. Small calls that name no tile use no terms.

As in :mod:`cute_attn.host.forward`, a plan is made once for the metadata of a call; repeated calls run from records.

Workspace: fp32 of q's size, head dims padded to multiples of 32 and sequences to whole blocks, and two fp32 numbers
per query and head; the terms, of the tensors' size; one copy of dK and dV per split where query heads are split among
CTAs (:func:`cute_attn.host.backward_splits.head_splits`). The deterministic mode needs copies of dQ: on Hopper mostly
one, to which key blocks add by turns (:func:`cute_attn.host.backward_splits.accumulators_in_order`), otherwise one per
split of the key blocks (:func:`cute_attn.host.backward_splits.key_splits`). For a broadcast bias it also needs the
gradient before the sum, 4 bytes per score; otherwise that gradient is accumulated in fp32, in the bias's shape.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import checks, fused_qkv, padding, plans, record
from cute_attn.host.backward_splits import (
    Columns,
    accumulators_in_order,
    head_splits,
    key_splits,
    queries_seen,
)
from cute_attn.host.call import NUM_TENSORS, Call
from cute_attn.host.choose import choose_kernel, user_classes
from cute_attn.host.counters import l2_bytes, multiprocessors
from cute_attn.host.forward import may_read
from cute_attn.host.memory import as_strided, contiguous_strides, is_aligned, on_device
from cute_attn.host.plans import Plan
from cute_attn.host.split_fp32 import can_split, split
from cute_attn.tiles import padded
from cute_attn.tiles.backward import COUNTERS
from cute_attn.traits import PARTS, Traits

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of q, k, v, bias and sinks; None where they are not needed."""

NOTHING: Gradients = (None, None, None, None, None)

Needed = tuple[bool, ...]
"""Whether each gradient is needed."""
Given = tuple[Tensor | None, Tensor | None, Tensor, Tensor]
"""Gradients of out and lse, None for zeros; out and lse."""
Outer = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""The same with a gradient of out."""


def gradients(call: Call, outer: Given, needed: Needed, into: Gradients | None = None) -> Gradients:
    """The needed gradients of q, k, v, bias and sinks, from the call's ``out`` and ``lse``.

    Deterministic with ``call.deterministic``, or under ``torch.use_deterministic_algorithms``.

    into: tensors to write gradients into, None for each gradient to allocate. Without ``into``, allocated gradients are
    never views of one tensor.
    """
    grad_out, *others = outer
    if grad_out is None:  # one row of zeros, broadcast
        shape, _ = call.output_shapes()
        grad_out = call.q.new_zeros(shape[-1:]).expand(shape)
    whole: Any = (grad_out, *others)
    plan = plan_of(call, whole, needed)
    written = [x for x in into or () if x is not None]
    if into is not None and written:
        check_given(call, into, needed, outer)
    found = launch(plan, call, whole, needed, into)
    if written:
        record.overwritten(*written)
    return found


# ---- the plan ----


class Division(NamedTuple):
    """How a backward's work is divided, and where its results go.

    Attributes:
        shapes: shapes of dq, dk and dv as the kernels write them; dk and dv have k's heads times ``head_splits``.
        workspace: see :func:`workspace_of`.
        num_splits, split_stride, multiprocessors: see ``cute_attn.work.key_tiles.BackwardSchedule``.
    """

    shapes: tuple[tuple[int, ...], ...]
    workspace: tuple[tuple[int, ...], ...]
    bias: "BiasGradient | None"
    num_splits: int
    split_stride: int
    multiprocessors: int


def plan_of(call: Call, outer: Outer, needed: Needed) -> Plan:
    """The plan of a call, kept under its metadata."""
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    options = (call[NUM_TENSORS + 1 :], *user_classes(call, "backward"), deterministic)
    starts = tuple(map(is_aligned, call[:3])), call.bias is None or is_aligned(call.bias)
    tensors = (*call[:NUM_TENSORS], *outer, *call.epilogue_tensors)
    key = ("backward", options, needed, starts)
    return plans.plan(key, tensors, lambda: plan_backward(call, outer, needed, deterministic))


def plan_backward(call: Call, outer: Outer, needed: Needed, deterministic: bool) -> Plan:
    """Check a call and choose its kernels. A plan without a main kernel computes nothing.

    The plan's functions are ``preprocess``, ``main`` and, for dq unless the main kernel stores it, ``convert``; with
    terms also ``split`` and ``fallback``. They are ``pad`` and ``unpad`` if kernels cannot read q, k or v in place.
    """
    checks.check(call)
    checks.check_for_kernels(call)
    grad_out, grad_lse, out, _ = outer
    checks.check_gradients(call, outer)
    if 0 in (call.batch, *call.longest, out.numel(), call.k.numel()):
        return Plan()
    with on_device(call.q.get_device()):
        copied = padding.to_copy(call[:3])
        if any(copied):
            named = {"q": call.q, "k": call.k, "v": call.v, "grad_out": grad_out, "out": out}
            padding.check_rows(named, (*copied, *padding.to_copy((grad_out, out))))
            return Plan(functions=padding.kernels_for("backward", call))
        call = call.with_positive_scale()
        bias = BiasGradient.of(call, deterministic) if needed[3] else None
        target = compiler.default_target("sm80")
        kernel = choose_kernel(call, target, op="backward", bias_grad=bias is not None)
        if getattr(kernel.tile, "in_terms", False):
            kernel = _in_terms_or_whole(kernel, call, grad_out, target)
        kernel = _with_order(kernel, call, deterministic)
        on_gpu = multiprocessors(call.q.get_device())
        if hasattr(kernel, "storing_dq") and not call.same_bits:
            kernel = kernel.storing_dq(*call.longest, call.group, call.batch * call.nheads, on_gpu)
        traits, tile = kernel.traits, kernel.tile
        if traits.arch == "sm80":
            checks.check_count(f"the queries of a sequence for {traits}", call.longest[0], AMPERE_QUERIES)
        in_order, direct = getattr(tile, "dq_in_order", False), getattr(tile, "dq_direct", False)
        wanted = kernels_of(kernel, lse_grad=grad_lse is not None)
        blocks = -(-call.longest[1] // tile.tile_n)
        processors = on_gpu // getattr(tile, "cluster", 1)
        in_l2 = l2_bytes(call.q.get_device())
        heads_dkv = call.k.shape[-2] * head_splits(
            call, tile, processors, in_l2, deterministic and not (in_order or direct), in_order
        )
        num_splits, accumulators = blocks, 1
        if direct:
            num_splits, accumulators = 1, 0
        elif in_order or deterministic:
            accumulators = _accumulators(call, tile, traits.head_dim, heads_dkv, processors, in_l2)
            num_splits = blocks if in_order else accumulators
        check_blocks(call, tile, wanted[1][1].rows, num_splits, heads_dkv)
        if traits.arch == "sm90":
            ctas = min(processors, call.batch * heads_dkv * num_splits)
            checks.check_steps(call, query_blocks(call, tile.tile_m), tile, ctas)
        functions = {"main": compiler.build(kernel, target)}
        for part, own in wanted[1:]:  # only the fallback's op is the main kernel's
            name = "fallback" if part.op == traits.op else part.op.removeprefix("backward_")
            if needed[0] or name != "convert":
                functions[name] = compiler.compile(part, own, target)
    shapes = [tuple(x.shape) for x in call[:3]]
    shapes[1:] = [(*shape[:-2], heads_dkv, shape[-1]) for shape in shapes[1:]]
    turns = tile.cluster if in_order else 0
    workspace = workspace_of(call, tile.tile_m, padded(traits.head_dim), accumulators, turns)
    stride = math.prod(workspace[2][1:]) if accumulators > 1 else 0
    return Plan(kernel, functions, Division(tuple(shapes), workspace, bias, num_splits, stride, processors))


def _with_order(kernel: Any, call: Call, deterministic: bool) -> Any:
    """The kernel; on Hopper with a tile that adds dQ in order, if gradients must repeat and no blocks are listed.

    Raises:
        ValueError: the kernel's gradients do not repeat, or ``dq_in_order`` is set with a list of blocks.
    """
    named = getattr(kernel.tile, "dq_in_order", False)
    if deterministic and not getattr(kernel, "repeats_bits", True):  # a user's class may say so
        raise ValueError(
            f"deterministic is True; accepted by {type(kernel).__name__}, whose gradients' bits vary: False"
        )
    if named and call.lists_blocks:
        raise ValueError("backward_tile has dq_in_order=true with a list of blocks; accepted: false")
    stored = getattr(kernel.tile, "dq_direct", False)  # one CTA stores all of dQ
    if kernel.traits.arch != "sm90" or call.lists_blocks or stored or not (deterministic or named):
        return kernel
    return replace(kernel, tile=kernel.tile.in_order())


def _accumulators(call: Call, tile: Any, head_dim: int, heads_dkv: int, processors: int, in_l2: int) -> int:
    """Number of dQ accumulators: chosen for key blocks that add in order, otherwise one per split of the key blocks."""
    _, _, shape, _ = workspace_of(call, tile.tile_m, padded(head_dim), 1)
    if call.same_bits:  # the same number whatever the shapes; 2 take up to a sixth longer
        return 1
    blocks, heads = -(-call.longest[1] // tile.tile_n), heads_dkv * call.batch
    _, queries = queries_seen(call, *call.longest, tile.tile_n)
    group, accumulator_bytes = call.nheads / heads_dkv, 4 * math.prod(shape)
    packed = call.k.shape[0] // tile.tile_n + call.batch if call.varlen else 0
    if getattr(tile, "dq_in_order", False):
        order = (heads_dkv, blocks, packed, call.batch) if packed else (heads, blocks, blocks, 1)
        steps, seen = group * max(queries / tile.tile_m, 1), queries / call.longest[0]
        key_bytes = call.k.element_size() * (call.k.numel() + call.v.numel())
        return accumulators_in_order(
            Columns(*order, steps, seen), accumulator_bytes, key_bytes, processors, in_l2
        )
    steps = group * queries / tile.tile_m
    return key_splits(blocks, heads, processors, steps, accumulator_bytes, heads_dkv * packed)


def workspace_of(
    call: Call, tile_m: int, head_dim_padded: int, accumulators: int, turns: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the fp32 workspace of a call, with rows padded to whole blocks of tile_m, for each sequence if varlen.

    turns: number of counters per query block and accumulator.

    Returns:
        lse_log2, minus_d: (batch, nheads, rows), varlen (nheads, rows).
        dq: (accumulators, batch, nheads, rows * head_dim), varlen without the batch.
        counters: (counters,).
    """
    if call.varlen:
        rows = (call.q.shape[0] // tile_m + call.batch) * tile_m
        heads: tuple[int, ...] = (call.nheads,)
    else:
        rows = -(-call.longest[0] // tile_m) * tile_m
        heads = (call.batch, call.nheads)
    turns *= accumulators * math.prod(heads) * (rows // tile_m)
    counters = -(-(COUNTERS + turns) // 16) * 16
    return (*heads, rows), (*heads, rows), (accumulators, *heads, rows * head_dim_padded), (counters,)


@dataclass(frozen=True, slots=True)
class BiasGradient:
    """How the bias's gradient is computed.

    Attributes:
        shape, dtype: shape and dtype of the tensor that the kernel writes.
        seen: shape (batch, nheads, max_seqlen_q, max_seqlen_k) and strides as the kernel addresses it.
        clear: whether to zero the tensor first, since the kernel leaves elements unwritten or adds to them.
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
        """How the gradient is computed for a call with a bias."""
        assert call.bias is not None
        full = (call.batch, call.nheads, call.max_seqlen_q, call.max_seqlen_k)
        shape = tuple(call.bias.shape)
        shared = tuple(dim for dim in range(3) if shape[dim] < full[dim])
        dtype, whole = call.bias.dtype, (full, contiguous_strides(full))
        if not shared:
            clear = bool(call.mask) or any(x is not None for x in call[3:7]) or call.lists_blocks
            return BiasGradient(shape, dtype, whole, clear, (), dtype)
        if deterministic:
            return BiasGradient(full, torch.float32, whole, True, shared, dtype)
        strides = tuple(0 if dim in shared else step for dim, step in enumerate(contiguous_strides(shape)))
        return BiasGradient(shape, torch.float32, (full, strides), True, (), dtype)

    def allocate(self, like: Tensor, given: Tensor | None) -> Tensor:
        """The tensor that the kernel writes: ``given`` if its layout and dtype fit, otherwise a new one."""
        gradient = given
        fits = given is not None and (tuple(given.shape), given.dtype) == (self.shape, self.dtype)
        if gradient is None or not (fits and gradient.is_contiguous() and is_aligned(gradient)):
            gradient = record.contiguous(like, self.shape, self.dtype)
        if self.clear:
            record.step(Tensor.zero_, gradient)
        return gradient

    def finish(self, gradient: Tensor, given: Tensor | None = None) -> Tensor:
        """The bias's gradient from the kernel's output, written into ``given`` unless None."""
        if self.sum_over:
            shape = tuple(1 if dim in self.sum_over else size for dim, size in enumerate(gradient.shape))
            summed = record.contiguous(gradient, shape)
            record.step(_sum_into, gradient, self.sum_over, summed, True)
            gradient = summed
        if given is None and gradient.dtype == self.result:
            return gradient
        found = record.contiguous(gradient, tuple(gradient.shape), self.result) if given is None else given
        if found is not gradient:
            record.step(Tensor.copy_, found, gradient)
        return found


# ---- launches ----


def launch(plan: Plan, call: Call, outer: Outer, needed: Needed, into: Gradients | None = None) -> Gradients:
    """Launch a call with its plan on q's device, and return the gradients. Arguments: see :func:`gradients`."""
    with on_device(call.q.get_device()):
        if "pad" in plan.functions:
            return _padded(plan, call, outer, needed, into)
        if plan.kernel is None:
            return _without_keys(call, outer, needed, into or NOTHING)
        return _launched(plan, call, outer, needed, into)


def _launched(plan: Plan, call: Call, outer: Outer, needed: Needed, into: Gradients | None) -> Gradients:
    given, sign, division = into or NOTHING, call.scale_sign, plan.division
    grad_out, grad_lse, out, lse = outer
    call = call.with_positive_scale()
    grad_out, out = record.readable(grad_out), record.readable(out)
    if lse.stride(-1) != 1:
        lse = lse.clone(memory_format=torch.contiguous_format)
    dq, dk, dv = _results(call, division.shapes, needed, into)
    workspace = record.together(call.q, division.workspace, torch.float32)
    lse_log2, minus_d, accumulators, counter = workspace
    if needed[4] and (call.varlen or call.seqused_q is not None):
        # Rows between sequences, which the preprocess leaves unwritten.
        record.step(Tensor.fill_, lse_log2, math.inf)
        record.step(Tensor.zero_, minus_d)
    dbias = None if division.bias is None else division.bias.allocate(call.q, given[3])
    call = call.as_kernels_read()
    # The preprocess and the convert take no lengths of keys.
    seqlens, own_seqlens = call.seqlens(), call._replace(seqused_k=None).seqlens()
    keep = 1.0 - call.dropout_p
    cleared = (dq, dk, dv) if call.varlen else None
    numbers = {"mLSElog2": lse_log2, "mMinusD": minus_d, "mDQaccum": accumulators}
    preprocessed = {
        "mDO": grad_out, "mO": out, "mLSE": lse, "mDLSE": grad_lse, "mCounters": counter, "gradients": cleared,
        "seqlens": own_seqlens, "keep_prob": keep,
    }  # fmt: skip
    record.launch(*plan.functions["preprocess"].bind(**numbers, **preprocessed))
    if may_read(plan.kernel.traits):
        record.also()
    grad_bias = None if dbias is None else as_strided(dbias, *division.bias.seen)
    schedule = (division.num_splits, division.split_stride, counter, division.multiprocessors)
    arguments = {
        "mQ": call.q, "mK": call.k, "mV": call.v, "mDO": grad_out, "mDK": dk, "mDV": dv,
        **numbers, "mDQaccum": dq if getattr(plan.kernel.tile, "dq_direct", False) else accumulators,
        "seqlens": seqlens, "softmax_scale": call.softmax_scale, "schedule": schedule,
        "score_args": plan.kernel.score_args(call.score_inputs(grad_bias)),
    }  # fmt: skip
    _launch_main(plan, arguments)
    if "convert" in plan.functions:
        own = {"mDQaccum": accumulators, "mDQ": dq, "seqlens": own_seqlens}
        record.launch(*plan.functions["convert"].bind(**own, scale=call.softmax_scale / keep))
    if needed[0] and sign != 1:
        record.step(Tensor.mul_, dq, sign)
    dsinks, sinks, nheads_kv = given[4], call.sinks, call.k.shape[-2]
    if needed[4] and sinks is not None:
        dsinks = record.contiguous(sinks, tuple(sinks.shape)) if dsinks is None else dsinks
        record.step(_sinks_gradient, sinks, lse_log2, minus_d, keep, dsinks)
    return (
        dq if needed[0] else None,
        _sum_splits(dk, nheads_kv, given[1]) if needed[1] else None,
        _sum_splits(dv, nheads_kv, given[2]) if needed[2] else None,
        None if dbias is None else division.bias.finish(dbias, given[3]),
        dsinks,
    )


def _launch_main(plan: Plan, arguments: dict[str, Any]) -> None:
    """Launch the main kernel. If operands are split, launch it on their terms, and then the fallback."""
    if "split" not in plan.functions:
        no_scales = {"scales": None} if plan.kernel.traits.arch == "sm80" else {}
        record.launch(*plan.functions["main"].bind(**arguments, **no_scales))
        return
    names = ("mQ", "mK", "mV", "mDO")
    terms, scales = split(plan.functions["split"], [arguments[name] for name in names])
    in_terms = dict(zip(names, terms, strict=True))
    record.launch(*plan.functions["main"].bind(**{**arguments, **in_terms, "scales": scales}))
    record.launch(*plan.functions["fallback"].bind(**arguments, scales=scales))


def _results(
    call: Call, shapes: tuple[tuple[int, ...], ...], needed: Needed, into: Gradients | None
) -> list[Tensor]:
    """dq, dk and dv for the kernels to write: from ``into``, or new, as views of one tensor if q, k and v are."""
    given, found = into or NOTHING, []
    count = fused_qkv.number_packed(call[:3]) if all(needed[:3]) and into is not None else 0
    whole = shapes[1][-2] == call.k.shape[-2]
    packs = count > 0 and whole and not any(x is not None for x in given[:3])
    together: Tensor | None = None
    if packs and fused_qkv.are_adjacent((call.q, call.k, call.v)[3 - count :]):
        shape = (*shapes[2][:-2], count, *shapes[2][-2:])
        together = record.contiguous(call.q, shape)
    for i, shape in enumerate(shapes):
        own = given[i]
        if together is not None and i >= 3 - count:
            first = (i + count - 3) * shape[-1] * shape[-2]
            own = as_strided(together, shape, fused_qkv.packed_strides(shape, count), first)
        elif own is None or tuple(own.shape) != shape:  # heads are divided, and added up afterwards
            own = record.contiguous(call.q, shape)
        found.append(own)
    return found


def _without_keys(call: Call, outer: Outer, needed: Needed, given: Gradients) -> Gradients:
    """The gradients of a call without keys: zeros, except the sinks', since an existing row's LSE is the sink."""
    record.also()
    _, grad_lse, _, lse = outer
    tensors = (call.q, call.k, call.v, call.bias, call.sinks)
    *zeros, dsinks = (
        None if not wanted or x is None else x.new_zeros(x.shape) if own is None else own.zero_()
        for x, wanted, own in zip(tensors, needed, given, strict=True)
    )
    if dsinks is not None and grad_lse is not None:
        rows = torch.where(lse == -math.inf, 0.0, grad_lse)
        dsinks.copy_(rows.sum(-1) if rows.dim() == 2 else rows.sum((0, 2)))
    return (*zeros, dsinks)  # type: ignore[return-value]


def _padded(plan: Plan, call: Call, outer: Outer, needed: Needed, into: Gradients | None) -> Gradients:
    """Compute a call on padded copies of its tensors: see :mod:`cute_attn.host.padding`."""
    grad_out, grad_lse, out, lse = outer
    tensors, given = (*call[:3], grad_out, out), into or NOTHING
    copied = padding.to_copy(tensors)
    if padding.is_by_address(tensors):
        record.unlike_others()
    results = _results(call, tuple(tuple(x.shape) for x in call[:3]), needed, into)
    cut = [not padding.is_writable(x) for x in results]
    written: Any = (*(None if cuts else x for cuts, x in zip(cut, results, strict=True)), *given[3:])
    q, k, v, wide_grad, wide_out = padding.pad(plan.functions["pad"], tensors, copied)
    padded = call._replace(q=q, k=k, v=v)
    inner = (wide_grad, grad_lse, wide_out, lse)
    found = launch(plan_of(padded, inner, needed), padded, inner, needed, written)
    wide = [x if cuts else None for cuts, x in zip(cut, found, strict=False)]
    padding.unpad(plan.functions["unpad"], wide, results)
    wanted = (x if one else None for x, one in zip(results, needed, strict=False))
    return (*wanted, *found[3:])  # type: ignore[return-value]


def _sinks_gradient(sinks: Tensor, lse_log2: Tensor, minus_d: Tensor, keep: float, out: Tensor) -> None:
    """Write the gradient of (nheads,) sinks, from the preprocess's D: dsink = -sum over rows of exp(sink - LSE) * D.

    exp(sink - LSE) is the sink's probability in a row's softmax. In rows that do not exist, LSE is inf and D is 0.

    lse_log2, minus_d: (batch, nheads, rows), or varlen (nheads, rows); D has the factor ``keep``, 1 - dropout_p.
    """
    shares = torch.exp2(sinks.float()[:, None] * math.log2(math.e) - lse_log2)
    out.copy_((shares * minus_d).sum(-1 if lse_log2.dim() == 2 else (0, 2)) / keep)


def _sum_splits(gradient: Tensor, nheads_kv: int, given: Tensor | None) -> Tensor:
    """dK or dV of each kv head, from (..., nheads_kv * splits, dim), written into ``given`` unless None."""
    if gradient.shape[-2] == nheads_kv:
        return gradient
    shape = (*gradient.shape[:-2], nheads_kv, gradient.shape[-1])
    if given is None:
        given = record.contiguous(gradient, shape)
    record.step(_sum_into, gradient.unflatten(-2, (nheads_kv, -1)), -2, given)
    return given


def _sum_into(x: Tensor, dim: int | tuple[int, ...], out: Tensor, keepdim: bool = False) -> None:
    torch.sum(x, dim, keepdim=keepdim, out=out)


def check_given(call: Call, given: Gradients, needed: Needed, outer: Given) -> None:
    """Raise if a tensor to write a gradient into does not fit."""
    names = ("grad_out", "grad_lse", "out", "lse")
    taken = [(name, x) for name, x in zip(names, outer, strict=True) if x is not None]
    taken += call.tensors()
    for name, own, wanted in zip(("q", "k", "v", "bias", "sinks"), given, needed, strict=True):
        if own is None:
            continue
        x = getattr(call, name)
        if not wanted or x is None:
            raise ValueError(f"d{name} is given, but no gradient of {name} is wanted; accepted: None")
        checks.check_like(f"d{name}", own, device=x.device, dtype=x.dtype, shape=x.shape)
        if own.requires_grad:
            raise ValueError(f"d{name} requires a gradient; accepted: a tensor to write")
        checks.check_apart(f"d{name}", own, taken)
        taken.append((f"d{name}", own))
        if name in ("q", "k", "v") and own.is_cuda and call.aligned:
            checks.check_rows(f"d{name}", own)


# ---- kernels and sizes ----


def _in_terms_or_whole(kernel: Any, call: Call, grad_out: Tensor, target: str) -> Any:
    """The kernel for operands in terms; for whole operands if the call names no tile, and is small or cannot be split.

    Raises:
        ValueError: the call names a tile and has too many rows to split.
    """
    few_rows = can_split((*call[:3], grad_out))
    if call.backward_tile:
        if not few_rows:
            raise ValueError(
                f"q, k, v or grad_out has more than {padding.MAX_ROWS} rows of heads; accepted: fewer, or "
                "operands=whole"
            )
        return kernel
    pays = kernel.terms_pay(math.prod(call.q.shape[:-1]), call.longest[1])
    return kernel if few_rows and pays else kernel.of_whole_operands(target)


AMPERE_QUERIES = 2**29 - 2**12
"""Maximum queries of a sequence in the Ampere backward: bytes of LSE and D are counted in 32 bits."""
_MAX_VARLEN_HEADS = 2**25
"""Maximum heads of packed q: the 16-byte vectors of a row of all heads are counted in 32 bits, at any head dim."""


def query_blocks(call: Call, tile_m: int) -> int:
    """Query blocks of all heads and sequences in the workspace."""
    blocks = -(-call.longest[0] // tile_m) * call.batch
    return call.nheads * (call.q.shape[0] // tile_m + call.batch if call.varlen else blocks)


def check_blocks(call: Call, tile: Any, rows: int, num_splits: int, heads_dkv: int) -> None:
    """Raise if a count of the backward exceeds 32 bits.

    Args:
        rows: queries of a CTA of the preprocess.
        num_splits: number of CTAs among which a sequence's key blocks are split.
        heads_dkv: heads of dK and dV before they are added up.
    """
    batch, nheads = call.batch, call.nheads
    blocks = -(-call.longest[0] // tile.tile_m) * (tile.tile_m // rows)
    splits, spare = batch * num_splits, 0
    if call.varlen:
        for name, x, size in (("q", call.q, tile.tile_m), ("k", call.k, tile.tile_n)):
            what = f"{name} has {x.shape[0]} rows in {batch} sequences, each padded to blocks of {size} rows"
            checks.check_count(what, (x.shape[0] // size + batch) * size, checks.MAX_ROWS)
        checks.check_count("q has heads", nheads, _MAX_VARLEN_HEADS)
        checks.check_count(
            f"{call.stated('k')}{batch} sequences of {num_splits} splits of their key blocks", splits
        )
        if num_splits * tile.tile_n >= call.longest[1]:  # the grid follows the actual rows
            splits = min(splits, call.k.shape[0] // tile.tile_n + batch)
        # Each CTA of the preprocess clears rows that no sequence owns, at a stride.
        spare = max(call.q.shape[0], call.k.shape[0])
    what = f"{call.stated('q')}{batch} sequences of {nheads} heads of {blocks} blocks of {rows} queries"
    checks.check_count(what, batch * nheads * blocks, checks.MAX_ROWS - spare)
    # Each CTA claims one work tile beyond the last.
    what = f"{call.stated('k')}{heads_dkv} heads of {splits} splits of their key blocks"
    checks.check_count(what, splits * heads_dkv, checks.MAX_ROWS)


def kernels_of(main: Any, *, lse_grad: bool = False) -> list[tuple[Traits, Any]]:
    """(traits, tile) of the main kernel, preprocess and convert; with terms also of the split and the fallback.

    Without the convert if the main kernel stores dQ.
    """
    beside, tile = [], main.tile
    if getattr(tile, "in_terms", False):
        tile = tile.fallback(main.traits)  # the convert's as well
        beside = [(main.traits.split_fp32("backward_split"), None), (main.traits, tile)]
    parts = [main.traits.part(op, lse_grad=lse_grad and op == "backward_preprocess") for op in PARTS]
    if getattr(tile, "dq_direct", False):
        parts.pop()
    tiles = [registry.KERNELS[part.op, part.arch, ""].beside(part, tile) for part in parts]
    return [(main.traits, main.tile), *zip(parts, tiles, strict=True), *beside]
