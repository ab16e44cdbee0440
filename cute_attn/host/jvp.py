"""A call of attention with tangents on CUDA: its plan and its launches.

One launch computes outputs and tangents. If V has more than ``MAX_DUAL_COLUMNS`` columns, there are several launches.
Each computes an equal number of V's columns, and all scores.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.host import epilogue_gradients, plans, record
from cute_attn.host.call import NUM_TENSORS, Call
from cute_attn.host.checks import check, check_for_kernels, check_query_blocks, check_steps
from cute_attn.host.choose import choose_kernel, user_classes
from cute_attn.host.counters import multiprocessors
from cute_attn.host.dispatch import DIFFERENTIABLE, not_in_jvp
from cute_attn.host.forward import forward
from cute_attn.host.memory import clear_owned, on_device
from cute_attn.host.plans import Plan
from cute_attn.traits import MAX_DUAL_COLUMNS, ROW_BYTES

_ROWS = 3
"""Number of tensors, the first ones, whose tangents are loaded as rows."""

Tangents = Sequence[Tensor | None]
"""A tangent of each of q, k, v, bias, sinks and the epilogues' tensors, None for zeros."""


class Columns(NamedTuple):
    """Padded columns of Q and K, padded columns of V in each launch, and the number of launches."""

    qk: int
    v: int
    launches: int

    @staticmethod
    def of(call: Call) -> "Columns":
        """The columns for a call, with rows padded to multiples of 16 bytes."""
        whole = ROW_BYTES // call.q.element_size()
        (d, dv), launches = (call.q.shape[-1], call.v.shape[-1]), -(-call.v.shape[-1] // MAX_DUAL_COLUMNS)
        return Columns(-(-d // whole) * whole, -(-dv // (whole * launches)) * whole, launches)


def with_tangents(call: Call, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and their tangents, on the current stream of q's device.

    Raises:
        NotImplementedError: a tensor of an epilogue's class has a tangent, or the call is fp32, has ``same_bits``, or
            names a kernel or tile.
        TypeError, ValueError, Unsupported: a parameter is wrong, or no kernel supports the call.
    """
    check(call)
    _check_tangents(call, tangents)
    bias, sinks = tangents[_ROWS : len(DIFFERENTIABLE)]
    with on_device(call.q.get_device()):
        out_shape, lse_shape = call.output_shapes()
        if 0 in (call.batch, *call.longest, *out_shape, *call.k.shape):
            out, lse, _ = forward(call)
            lse_dot = torch.zeros_like(lse)
            if sinks is not None:
                lse_dot = torch.where(lse == -torch.inf, lse_dot, sinks[:, None])
            return out, lse, torch.zeros_like(out), lse_dot
        if call.epilogues:
            call = epilogue_gradients.with_tangents(call, tangents[len(DIFFERENTIABLE) :])
        moved = {"bias_tangent": bias is not None, "sinks_tangent": sinks is not None}
        key = ("jvp", call[NUM_TENSORS + 1 :], *moved.values(), *user_classes(call))
        plan = plans.plan(key, (*call[:NUM_TENSORS], *call.epilogue_tensors), lambda: _plan(call, moved))
        columns = Columns.of(call)
        shape = (*out_shape[:-1], columns.v * columns.launches)
        outs = [record.contiguous(call.q, shape) for _ in range(2)]
        lses = [record.contiguous(call.q, lse_shape, torch.float32) for _ in range(2)]
        if call.seqused_q is not None:  # rows that no thread writes
            for x, value in zip(lses, (-torch.inf, 0.0), strict=True):
                x.fill_(value)
            for x in outs:
                clear_owned(x, None)
        _launch(plan, call, tangents, outs, lses)
        out, out_dot = (x[..., : out_shape[-1]].contiguous() for x in outs)
        return out, lses[0], out_dot, lses[1]


def _check_tangents(call: Call, tangents: Tangents) -> None:
    names = (*DIFFERENTIABLE, *(f"epilogues' tensor {i}" for i in range(len(call.epilogue_tensors))))
    for name, x, dot in zip(names, call.differentiable, tangents, strict=True):
        if dot is not None and (dot.shape, dot.dtype, dot.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"the tangent of {name} is {tuple(dot.shape)}, {dot.dtype} on {dot.device}; accepted: "
                f"{tuple(x.shape)}, {x.dtype} on {x.device}"
            )


def _plan(call: Call, moved: dict[str, bool]) -> Plan:
    check_for_kernels(call)
    if call.kernel or call.tile:
        raise not_in_jvp("kernel or tile is given", ": None")
    if call.same_bits:
        raise not_in_jvp("same_bits is True", ": False")
    if call.q.dtype == torch.float32:
        raise not_in_jvp("q is fp32", " on CUDA: fp16, bf16")
    target, columns = compiler.default_target("sm80"), Columns.of(call)
    q, v = (x[..., :1].expand(*x.shape[:-1], n) for x, n in ((call.q, columns.qk), (call.v, columns.v)))
    kernel = choose_kernel(call._replace(q=q, v=v), target, op="jvp", **moved)
    blocks = check_query_blocks(call, kernel)
    if kernel.traits.arch == "sm90":
        check_steps(call, blocks, kernel.tile, multiprocessors(call.q.get_device()))
    return Plan(kernel, {"main": compiler.build(kernel, target)})


def _launch(
    plan: Plan, call: Call, tangents: Tangents, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> None:
    columns, sign = Columns.of(call), call.scale_sign
    call = call.with_positive_scale().as_kernels_read()
    given = zip((call.q, call.k, call.v), tangents[:_ROWS], strict=True)
    bias, sinks = tangents[_ROWS : len(DIFFERENTIABLE)]
    if bias is not None:
        bias = call._replace(bias=bias if bias.stride(-1) == 1 else bias.contiguous()).as_kernels_read().bias
    inputs = replace(call.score_inputs(), bias_tangent=bias, sinks_tangent=sinks)
    widths = (columns.qk, columns.qk, columns.v * columns.launches)
    (q, q_dot), (k, k_dot), (v, v_dot) = (
        (_rows(x, n), x.new_zeros(n).expand(*x.shape[:-1], n) if dot is None else _rows(dot, n))
        for (x, dot), n in zip(given, widths, strict=True)
    )
    if sign != 1:
        q_dot = q_dot * sign
    for i in range(columns.launches):
        own = slice(i * columns.v, (i + 1) * columns.v)
        arguments: dict[str, Any] = {
            "mQ": q, "mK": k, "mV": v[..., own], "mQdot": q_dot, "mKdot": k_dot, "mVdot": v_dot[..., own],
            "mO": outs[0][..., own], "mLSE": lses[0], "mOdot": outs[1][..., own], "mLSEdot": lses[1],
            "seqlens": call.seqlens(), "softmax_scale": call.softmax_scale,
            "schedule": record.work_tiles(q.get_device()),
            "score_args": plan.kernel.score_args(inputs),
        }  # fmt: skip
        record.launch(*plan.functions["main"].bind(**arguments))


def _rows(x: Tensor, columns: int) -> Tensor:
    """``x`` as kernels load it, padded with zeros to ``columns``."""
    if x.shape[-1] < columns:
        return torch.nn.functional.pad(x, (0, columns - x.shape[-1]))
    return record.readable(x)
