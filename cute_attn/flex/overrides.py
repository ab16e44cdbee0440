"""FlexAttention by :func:`cute_attn.attention`, and PyTorch's ``flex_attention`` served by replacing its code object.

Programs may have imported, wrapped or compiled the function before, so the function object stays the same. Compilers
guard on the code object, so they do not reuse graphs from before the replacement.
"""

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.attention.flex_attention as _module
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from cute_attn.api.attention import attention
from cute_attn.host import doors, plans, record
from cute_attn.host.activation import Options
from cute_attn.host.memory import none_overrides
from cute_attn.host.values import check_dtype, check_flags, check_present, kind_of, number, shown, wrong_shape

NAME = "flex_attention"
Result = Tensor | tuple[Tensor, ...] | tuple[Tensor, AuxOutput]

# ---- a call by attention ----


def attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: dict[str, Any] | None = None, *,
    return_aux: AuxRequest | None = None,
) -> Result:  # fmt: skip
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    if scale is not None:
        number("scale", scale)
    _check_tensors(query, key, value, enable_gqa)
    _check_outputs(return_lse, kernel_options, return_aux)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    found = attention(
        q, k, v, softmax_scale=scale, score_mod=score_mod, block_mask=block_mask,
        return_lse=return_lse if return_aux is None else return_aux.lse,
        return_max_scores=return_aux is not None and return_aux.max_scores,
    )  # fmt: skip
    out, *others = found if isinstance(found, tuple) else (found,)
    out = _in_order_of(query, out.transpose(1, 2))
    if return_aux is None:
        return (out, *others) if others else out
    return out, AuxOutput(
        lse=others[0] if return_aux.lse else None, max_scores=others[-1] if return_aux.max_scores else None
    )


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """``out`` with its dimensions in memory in query's order, copied if necessary: programs rely on it for views."""
    order = [3]
    for dim in range(3):  # compilers compare lengths that vary, and do not sort them
        larger = [other for other in order[:-1] if query.stride(other) >= query.stride(dim)]
        order.insert(len(larger), dim)
    stored = out.permute(order)
    if stored.is_contiguous():
        return out
    back = [order.index(dim) for dim in range(4)]
    if out.requires_grad or not plans.no_dispatch_mode():
        return stored.contiguous().permute(back)
    made = record.contiguous(out, tuple(stored.shape))
    record.step(Tensor.copy_, made, stored)
    return made.permute(back)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    named = (("query", query), ("key", key), ("value", value))
    check_present(named, ("query", "key", "value"), "query")
    for name, x in named:
        if x.dim() != 4:
            raise wrong_shape(name, x, "(batch, heads, seqlen, head_dim)")
        check_dtype(name, x, query.dtype, of="query")
    batch, heads, _, head_dim = query.shape
    heads_kv = key.shape[1]
    if key.shape[0] not in (batch, 1):
        raise ValueError(f"key has batch {key.shape[0]}; accepted: {batch}, query's, or 1")
    if value.shape[:3] != key.shape[:3]:
        raise wrong_shape("value", value, f"{tuple(key.shape[:3])} and a head dim, as key")
    if key.shape[3] != head_dim:
        raise ValueError(f"key has head dim {key.shape[3]}; accepted: {head_dim}, query's")
    if not enable_gqa and heads_kv != heads:
        raise ValueError(f"key has {heads_kv} heads; accepted without enable_gqa: {heads}, query's")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(f"query has {heads} heads; accepted with enable_gqa: a multiple of key's {heads_kv}")


def _check_outputs(return_lse: bool, kernel_options: Any, return_aux: Any) -> None:
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(
            f"kernel_options is {shown(kernel_options)}; accepted: a dict, which is not read, or None"
        )
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux is {shown(return_aux)}; accepted: an AuxRequest, or None")
    if return_aux is not None and return_lse:
        raise ValueError("return_lse is True with return_aux; accepted: one of them")


# ---- PyTorch's function, replaced ----

_function: Any = _module.flex_attention
_stock = _function.__code__

pytorchs: Callable[..., Result] = FunctionType(_stock, _function.__globals__, NAME, _function.__defaults__)
"""A function with PyTorch's original code."""
pytorchs.__kwdefaults__ = _function.__kwdefaults__


def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """The replacement code. It runs in PyTorch's function, with the globals of PyTorch's module."""
    from cute_attn.flex.overrides import _route  # the globals are those of another module

    return _route(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
    )  # fmt: skip


_own = flex_attention.__code__


def why_not_replaced() -> str | None:
    """Why the code of PyTorch's function cannot be replaced, or None."""
    theirs, ours = map(_arguments, (_stock, _own))
    if theirs == ours and not _stock.co_freevars:
        return None
    return f"PyTorch's flex_attention takes {', '.join(theirs)}; accepted: {', '.join(ours)}"


def _arguments(code: Any) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# ---- on and off ----

_serving: "Activation | None" = None
_switching = threading.RLock()


def serving() -> "Activation | None":
    return _serving


class Activation:
    """Calls are served until :meth:`remove` or another activation.

    Attributes:
        options: see :func:`cute_attn.flex.activate`.
        device: the type of the tensors whose calls are served; "" if calls are only watched.
    """

    def __init__(self, options: Options, device: str = "cuda") -> None:
        self.options, self.device = options, device
        self.start()

    def start(self) -> None:
        """Serve calls, in place of any other activation."""
        global _serving
        with _switching:
            _serving = self
            _function.__code__ = _own

    def attend(
        self,
        options: Options,
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any = None,
        block_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Result | str:
        """The result, or why PyTorch computes it, as one sentence."""
        exports = torch.compiler.is_exporting()  # its tensors stand for plain ones
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x is None or not (none_overrides((x,)) or (exports and isinstance(x, FakeTensor))):
                return f"{name} is {kind_of(x)}; accepted: a plain torch.Tensor"
        if query.device.type != self.device:
            return f"query is on {query.device}; accepted: cuda"
        try:
            return attend(query, key, value, score_mod, block_mask, *args, **kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:  # every refusal precedes a launch
            return str(error)

    def remove(self) -> None:
        """Let PyTorch compute all calls; has no effect a second time, or after another activation."""
        global _serving
        with _switching:
            if _serving is self:
                _function.__code__ = _stock
                _serving = None


# ---- a call of PyTorch's function ----


def _route(*args: Any, **kwargs: Any) -> Result:
    if not torch.compiler.is_compiling():
        return _serve(pytorchs, args, kwargs)
    activation = _serving
    if activation is None or not activation.device:
        return pytorchs(*args, **kwargs)
    # Watched calls, and calls that PyTorch repeats, must leave the graph: its nodes are neither watched nor repeated.
    if torch.compiler.is_dynamo_compiling() and doors.observer is not None and not _stays_whole():
        return _serve_between_graphs(*args, **kwargs)
    found = activation.attend(activation.options, *args, **kwargs)
    return _finished(activation, found, pytorchs, args, kwargs)


@torch.compiler.assume_constant_result
def _stays_whole() -> bool:
    """True if graph breaks are not allowed in the current trace: under ``fullgraph=True``, or in an export."""
    tracer = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)


def _served_compiled(*args: Any, **kwargs: Any) -> Result:
    """Serve a call between two graphs. If no kernel supports it, PyTorch's function computes it, compiled."""
    return _serve(_compiled(), args, kwargs)


_serve_between_graphs = torch.compiler.disable(
    _served_compiled, reason="cute_attn watches flex_attention between two graphs"
)


@functools.cache
def _compiled() -> Callable[..., Result]:
    return torch.compile(pytorchs)


def _serve(stock: Callable[..., Result], args: tuple, kwargs: dict) -> Result:
    """Serve a call, or call ``stock``, PyTorch's function. Reports the call to the observer."""
    activation, observer = _serving, doors.observer
    if activation is None:  # restored meanwhile
        return stock(*args, **kwargs)
    if observer is not None:
        found = observer(NAME, activation.attend, activation.options, stock, args, kwargs)
    else:
        found = activation.attend(activation.options, *args, **kwargs)
    return _finished(activation, found, stock, args, kwargs)


def _finished(activation: Activation, found: Any, stock: Any, args: tuple, kwargs: dict) -> Result:
    """A call's result, or that of ``stock`` if ``found`` is the reason why PyTorch computes it. Counts the call."""
    if not isinstance(found, str):
        _count("")
        return found
    _count(found, activation.options.unsupported != "error")
    if activation.options.unsupported == "error":
        raise doors.Unsupported(f"{NAME} is not served: {found}")
    return stock(*args, **kwargs)


@torch.compiler.assume_constant_result
def _count(reason: str, warns: bool = False) -> None:
    """Count a call, in a graph when it is traced. reason: why PyTorch computes it; the first such call warns.

    If an observer reports calls, none warns.
    """
    doors.served.add(NAME, reason)
    if warns and doors.observer is None:
        doors.warn_once(NAME, f"PyTorch computes a call of {NAME}: {reason}")
