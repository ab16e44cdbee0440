"""The forward of a call on CUDA: its plan, its outputs and its launches.

A plan is made once for the metadata of a call: passed checks, the kernel and its tile, the compiled functions.
Repeated calls run from records of the allocations and launches (:mod:`cute_attn.host.record`).
"""

import math

import torch
from torch import Tensor

from cute_attn import compiler, reference
from cute_attn.epilogues.names import are_functions
from cute_attn.host import padding, plans, record, split_fp32, split_kv
from cute_attn.host.call import NUM_TENSORS, Call
from cute_attn.host.checks import check, check_for_kernels, check_query_blocks, check_steps
from cute_attn.host.choose import choose_kernel, user_classes
from cute_attn.host.counters import multiprocessors
from cute_attn.host.memory import clear_owned, is_aligned, none_overrides, on_device, write_owned
from cute_attn.host.plans import Plan
from cute_attn.traits import Traits

Outputs = tuple[Tensor, Tensor, Tensor | None]


def forward(
    call: Call, out: Tensor | None = None, lse: Tensor | None = None, *, keeps_rows: bool = True
) -> Outputs:
    """out, lse, and ``call.aux`` or None, on the current stream of q's device.

    Args:
        out: the tensor to write, with strides that kernels write, or None to allocate it.
        keeps_rows: whether rows of ``out`` that no sequence owns keep their contents, with packed queries.
        lse: the tensor to write, or None. It may have more rows than queries; extra rows keep their contents.
    """
    plan = plan_of(call)
    with on_device(call.q.get_device()):
        return _launched(plan, call, out, lse, keeps_rows=keeps_rows)


def plan_of(call: Call) -> Plan:
    """The plan of a call, kept under its metadata, and under what it depends on of addresses.

    This is whether q, k, v and a bias are aligned, and whether k and v start at one address: V may be columns of K.
    """
    # A bias of a subclass, such as a fake tensor, gets no plan; the checks refuse other layouts.
    bias = call.bias
    has_address = bias is not None and none_overrides((bias,)) and bias.layout is torch.strided
    starts = tuple(is_aligned(x) if none_overrides((x,)) else None for x in call[:3])
    latent = None not in starts and call.k.data_ptr() == call.v.data_ptr()
    options = (
        call[NUM_TENSORS + 1 :],
        *user_classes(call),
    )  # users' classes may be registered again at any time
    key = ("forward", options, starts, latent, not has_address or is_aligned(bias))  # type: ignore[arg-type]
    return plans.plan(key, (*call[:NUM_TENSORS], *call.epilogue_tensors), lambda: plan_forward(call))


# ---- the plan ----


def plan_forward(call: Call) -> Plan:
    """Check a call and choose its kernel. A plan without a kernel computes nothing.

    The plan's function is ``main``. If kernels cannot read q, k or v in place, its functions are ``pad`` and ``unpad``
    instead. With terms (:mod:`cute_attn.host.split_fp32`) they are ``split``, ``main`` and ``fallback``, launched in
    this order. If keys are split among CTAs, :mod:`cute_attn.host.split_kv` makes the plan.
    """
    check(call)
    check_for_kernels(call)
    out_shape, _ = call.output_shapes()
    if 0 in (call.batch, *call.longest, math.prod(out_shape), math.prod(call.k.shape)):
        return Plan()
    with on_device(call.q.get_device()):
        copied = padding.to_copy(call[:3])
        if any(copied):
            padding.check_rows({"q": call.q, "k": call.k, "v": call.v}, copied)
            return Plan(functions=padding.kernels_for("forward", call))
        call = call.with_positive_scale()
        if call.same_bits:
            return split_kv.make_plan(split_kv.as_cache(call))
        target = compiler.default_target("sm80")
        kernel = choose_kernel(call, target)
        blocks = check_query_blocks(call, kernel)
        if kernel.traits.arch == "sm90":
            processors = multiprocessors(call.q.get_device())
            check_steps(call, blocks, kernel.tile, processors)
            if divided := split_kv.divided(call, kernel, target, processors):
                return split_kv.make_plan(split_kv.as_cache(call), divided)
        terms = split_fp32.plan_forward(call, kernel, target)
        return terms or Plan(kernel, {"main": compiler.build(kernel, target)})


# ---- launches ----


def _launched(
    plan: Plan, call: Call, out: Tensor | None, lse: Tensor | None, *, keeps_rows: bool = True
) -> Outputs:
    keeps_rows, q = keeps_rows and out is not None and call.varlen, call.q
    read = call.aux == "softmax" and any(x is not None for x in call[3:7])
    if read and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "return_softmax is True with lengths, which it reads on the host, in a CUDA graph's capture; accepted: "
            "without lengths, or outside a graph"
        )
    if "pad" in plan.functions:
        return _padded(plan, call, out, lse)
    call = call.with_positive_scale()
    if out is None:
        out = record.contiguous(q, call.output_shapes()[0])
    if lse is None:
        lse = record.contiguous(q, call.output_shapes()[1], torch.float32)
    if plan.kernel is None or call.seqused_q is not None:  # rows that no thread writes
        record.step(clear_owned, out, call.cu_seqlens_q if keeps_rows else None)
        record.step(Tensor.fill_, lse, -math.inf)
    max_scores = split_kv.empty_maxima(call)
    if plan.kernel is None:
        record.also()
        if call.sinks is not None:
            _fill_with_sinks(lse, call)
        return out, lse, q.new_zeros(call.softmax_shape()) if call.aux == "softmax" else max_scores
    if plan.kernel.traits.op == "kvcache":
        return *_divided(plan, call, out, lse, max_scores, keeps_rows=keeps_rows), max_scores
    call = call.as_kernels_read()
    if may_read(plan.kernel.traits):
        record.also()
    arguments = {
        "mQ": call.q, "mK": call.k, "mV": call.v, "mO": out, "mLSE": lse, "seqlens": call.seqlens(),
        "softmax_scale": call.softmax_scale, "schedule": record.work_tiles(q.get_device()),
        "score_args": plan.kernel.score_args(call.score_inputs(max_scores=max_scores)),
    }  # fmt: skip
    if "fallback" in plan.functions:
        split_fp32.launch_forward(plan, arguments)
    else:
        record.launch(*plan.functions["main"].bind(**arguments))
    if call.aux != "softmax":
        return out, lse, max_scores
    record.also()
    features, inputs, lengths = call.by_definition()
    softmax = reference.softmax(
        *(call.q, call.k, lse, call.softmax_scale), features, inputs, lengths, call.precision
    )
    return out, lse, softmax


def _padded(plan: Plan, call: Call, out: Tensor | None, lse: Tensor | None) -> Outputs:
    """Compute a call on padded copies of its tensors: see :mod:`cute_attn.host.padding`."""
    copied = padding.to_copy(call[:3])
    if padding.is_by_address(call[:3]):
        record.unlike_others()
    if out is None:
        out = record.contiguous(call.q, call.output_shapes()[0])
        if call.seqused_q is not None:  # rows without an owner, too
            record.step(Tensor.zero_, out)
    q, k, v = padding.pad(plan.functions["pad"], call[:3], copied)
    padded = call._replace(q=q, k=k, v=v)
    cuts = not padding.is_writable(out)
    written = record.contiguous(out, padding.wide_shape(out)) if cuts else out
    _, lse, aux = _launched(plan_of(padded), padded, written, lse, keeps_rows=not cuts)
    if cuts:
        padding.unpad(plan.functions["unpad"], [written], [out], call.cu_seqlens_q)
    return out, lse, aux


def _divided(
    plan: Plan, call: Call, out: Tensor, lse: Tensor, max_scores: Tensor | None = None, *, keeps_rows: bool
) -> tuple[Tensor, Tensor]:
    """Compute a call with split keys. keeps_rows: keep rows of ``out`` without a sequence; combine would write them."""
    written = record.contiguous(out, tuple(out.shape)) if keeps_rows else out
    call = split_kv.as_cache(call.as_kernels_read())
    split_kv.launch(plan, call, written, lse, max_scores)
    if keeps_rows:
        record.step(write_owned, out, written, call.cu_seqlens_q)
    return out, lse


def _fill_with_sinks(lse: Tensor, call: Call) -> None:
    """Write the LSE of a call without keys: the head's sink in rows of sequences, -inf in other rows."""
    cu_seqlens_q, seqused_q, sinks = call.cu_seqlens_q, call.seqused_q, call.sinks
    assert sinks is not None
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


def may_read(traits: Traits) -> bool:
    """True if the kernel or an epilogue is a user's class, which may read its arguments on the host."""
    return bool(traits.variant) or not are_functions(traits.epilogues)
