"""PyTorch's scaled_dot_product_attention on the kernels of this package.

    import cute_attn.sdpa
    cute_attn.sdpa.activate()           every fused scaled_dot_product_attention of this process, and varlen_attn
    cute_attn.sdpa.reason(q, k, v)      None, or why PyTorch's own kernel computes such a call
    cute_attn.sdpa.served               which operators were called how often, and why some fell through
    cute_attn.sdpa.restore()

PyTorch chooses a backend as ever. Of the backends' operators (flash, memory-efficient and cuDNN attention, forward and
backward) those whose calls :func:`cute_attn.sdpa.calls.why_not` accepts run here, all others as before. Products of
fp32 tensors have fp32's precision, as in PyTorch's memory-efficient kernel, whatever ``allow_tf32`` says. Importing
this module registers it with PyTorch: ``torch.nn.attention.activate_flash_attention_impl("cute_attn")`` does what
:func:`activate` does.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.sdpa import direct as _direct
from cute_attn.sdpa import repeated, state
from cute_attn.sdpa.calls import BACKENDS, Inputs, call_of, why_not
from cute_attn.sdpa.operators import OPERATORS, Options
from cute_attn.sdpa.state import served

__all__ = ["NAME", "activate", "active", "reason", "restore", "served"]

NAME = "cute_attn"


def activate(
    *,
    backends: Sequence[str] = BACKENDS,
    unsupported: str = "fall_back",
    rng: str = "ours",
    direct: bool = False,
) -> None:
    """Serve PyTorch's fused attention from now on; a second call replaces the options of the first.

    Parameters
    ----------
    backends : sequence of {"flash", "efficient", "cudnn"}
        Whose operators to serve. Where cuDNN supports a call PyTorch prefers it on Hopper, so that "flash" alone is
        seldom reached there.
    unsupported : {"fall_back", "error"}
        What happens to a call that no kernel supports: PyTorch's kernel computes it, or ``Unsupported`` is raised.
    rng : {"ours", "torch"}
        Where dropout masks come from: as :func:`cute_attn.attention` draws them, or from torch's generator as PyTorch's
        kernel would, so that every mask stays the same bit for bit. The latter falls back within CUDA graphs.
    direct : bool
        Whether ``torch.nn.functional.scaled_dot_product_attention`` is replaced, by a function that launches repeated
        calls without gradients itself, past the dispatcher: see :mod:`cute_attn.sdpa.direct`. What imported that name
        before calls PyTorch's. Otherwise the dispatcher has such calls end above autograd, but under inference mode,
        which has no autograd: see :mod:`cute_attn.sdpa.repeated`.

    Raises
    ------
    ValueError
        An argument is not what is described here, there is no GPU that kernels are built for, or torch is older than
        2.10. Nothing is changed then.
    """
    options = Options(backends, unsupported, rng, direct)
    _check_machine()
    if _torch_names_us():
        _register(options)
        try:
            torch.nn.attention.activate_flash_attention_impl(NAME)
        finally:
            _register(Options())
    else:
        _start(options)


def restore() -> None:
    """Let PyTorch's own kernels compute everything again; without :func:`activate` before it nothing happens."""
    if _active is None:
        return
    torch_restores = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    if torch_restores is not None and torch.nn.attention.current_flash_attention_impl() == NAME:
        torch_restores()
    else:
        _active.remove()


@contextlib.contextmanager
def active(**options: Any) -> Iterator[None]:
    """:func:`activate` with these options for a ``with`` block, then :func:`restore`."""
    activate(**options)
    try:
        yield
    finally:
        restore()


def reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why kernels here do not serve a call of ``scaled_dot_product_attention`` and its backward; None where they do.

    Takes that function's arguments, of which it reads shapes, dtypes and devices; fake tensors will do. A call with a
    mask, or causal with different lengths, is taken for one of memory-efficient attention, others for flash attention.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"{name} has shape {tuple(x.shape)}; accepted: (batch, heads, seqlen, head_dim)"
    if query.device.type != "cuda":
        return f"query is on {query.device}; accepted: cuda"
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return f"key has {key.shape[1]} heads; accepted without enable_gqa: {query.shape[1]}, query's"
    masked = attn_mask is not None or (is_causal and query.shape[2] != key.shape[2])
    call = call_of(
        "efficient" if masked else "flash",
        Inputs(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
        causal=is_causal,
        dropout_p=dropout_p,
        scale=query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale,
    )
    if not masked:  # PyTorch pads head dims before it calls flash attention
        q, k, v = ((*shape[:-1], -(-shape[-1] // 8) * 8) for shape in (call.q, call.k, call.v))
        call = call._replace(q=q, k=k, v=v)
    if attn_mask is not None:
        full = (*query.shape[:3], key.shape[2])
        if not _broadcasts(tuple(attn_mask.shape), full):
            return f"attn_mask has shape {tuple(attn_mask.shape)}; accepted: {full}, or what broadcasts to it"
        dtype = query.dtype if attn_mask.dtype == torch.bool else attn_mask.dtype
        call = call._replace(bias=(full, dtype), devices=call.devices | {attn_mask.device})
    return why_not(call)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(shape, full) == full
    except RuntimeError:
        return False


# ---- PyTorch's dispatcher ----


class Activation:
    """Our implementations in PyTorch's dispatcher under one key, until :meth:`remove`.

    Attributes:
        options: of :func:`activate`.
        key: the dispatcher's.
        library: holds the registrations.
    """

    def __init__(self, options: Options, key: str = "CUDA") -> None:
        """Override the operators of the options' backends."""
        self.options = options
        self.key = key
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
            for backend in options.backends:
                for name, implementation in OPERATORS[backend].items():
                    if not hasattr(torch.ops.aten, name):
                        continue
                    run = _with_fall_through(name, implementation, options, _stock_kernel(name, key))
                    self.library.impl(name, run, key, with_keyset=True, allow_override=True)
            if not options.direct:
                self._override_composite()
        repeated.start(options, key.lower())
        if options.direct:
            _direct.install()

    def _override_composite(self) -> None:
        """Serve repeated calls of ``aten::scaled_dot_product_attention`` itself.

        Above autograd alone: with a kernel below it the operator would no longer be a composite one to exports.
        """
        assert self.library is not None
        key = f"Autograd{self.key}"
        stock = torch.library.get_kernel(f"aten::{_direct.NAME}", key)
        run = repeated.override(stock.call_boxed)
        self.library.impl(_direct.NAME, run, key, with_keyset=True, allow_override=True)
        self._forget_resolved()

    def _forget_resolved(self) -> None:
        """Let the dispatcher of tracers, which is Python's, look again for that operator's kernel."""
        key = getattr(torch._C.DispatchKey, f"Autograd{self.key}")
        torch.ops.aten.scaled_dot_product_attention.default._uncache_dispatch(key)

    def remove(self) -> None:
        """Give the operators back to PyTorch; a second call does nothing."""
        global _active
        if self.library is not None:
            self.library._destroy()
            self._forget_resolved()
            self.library = None
            repeated.stop()
            _direct.remove()
        if _active is self:
            _active = None


_active: Activation | None = None


def _with_fall_through(
    name: str, implementation: Callable[..., tuple | Tensor | str], options: Options, stock: Any
) -> Callable[..., tuple | Tensor]:
    """``implementation`` as the dispatcher calls it; ``stock``, PyTorch's kernel or None, takes what it declines."""

    def run(keyset: Any, *args: Any, **kwargs: Any) -> tuple | Tensor:
        if _inside.pytorch and stock is not None:
            return stock.call_boxed(keyset, *args, **kwargs)
        observer = state.observer
        if observer is None:
            found = implementation(options, *args, **kwargs)
        else:
            pytorch = None if stock is None else functools.partial(_call_pytorch, stock, keyset)
            found = observer(name, implementation, options, pytorch, args, kwargs)
        if not isinstance(found, str):
            served[name, ""] += 1
            return found
        served[name, found] += 1
        if stock is None or options.unsupported == "error":
            from cute_attn.registry import Unsupported

            raise Unsupported(f"aten::{name} is not served: {found}")
        return _call_pytorch(stock, keyset, *args, **kwargs)

    return run


class _Inside(threading.local):
    """Of a thread: whether one of PyTorch's kernels runs. Its flash operator calls another one that is overridden."""

    pytorch = False


_inside = _Inside()


def _call_pytorch(stock: Any, keyset: Any, *args: Any, **kwargs: Any) -> tuple | Tensor:
    """PyTorch's kernel, with PyTorch's below it."""
    _inside.pytorch = True
    try:
        return stock.call_boxed(keyset, *args, **kwargs)
    finally:
        _inside.pytorch = False


def _stock_kernel(name: str, key: str) -> Any:
    """PyTorch's kernel, or None where this build has none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _start(options: Options) -> Activation:
    """Activate, in place of an earlier activation; PyTorch keeps the handle."""
    global _active
    _check_machine()
    if _active is not None:
        _active.remove()
    _active = Activation(options)
    return _active


def _check_machine() -> None:
    if not hasattr(torch.library, "get_kernel"):
        raise ValueError(
            f"torch is {torch.__version__}; accepted: 2.10 or newer, whose kernels can be called"
        )
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; accepted: a GPU of compute capability 8.0 to 9.0")
    from cute_attn.compiler import default_target

    default_target("sm90")


def _torch_names_us() -> bool:
    return hasattr(torch.nn.attention, "register_flash_attention_impl")


def _register(options: Options) -> None:
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=functools.partial(_start, options))


if _torch_names_us():
    _register(Options())
