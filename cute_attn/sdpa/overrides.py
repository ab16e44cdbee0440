"""PyTorch's operators overridden in its dispatcher, once and for the life of the process.

A registration is never removed: the dispatcher would free code that another thread may be running. So each override
looks up the active options at every call. Without active options it calls PyTorch's kernel, which costs a hop through
Python. The exception is the backward of a forward that drew its dropout mask here, which is always served.
"""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import doors, plans
from cute_attn.host.activation import Options
from cute_attn.sdpa.calls import _is_capturing
from cute_attn.sdpa.operators import OPERATORS, STATES, drawn_here


class Override:
    """One of PyTorch's operators under one key of the dispatcher.

    Attributes:
        stock: PyTorch's kernel, or None if this build has none.
        state: position of the dropout seed among the arguments of a backward, or None.
        options: the active options, or None if calls are not served.
    """

    __slots__ = ("implementation", "name", "options", "state", "stock")

    def __init__(self, name: str, implementation: Callable[..., tuple | Tensor | str], stock: Any) -> None:
        self.name, self.implementation, self.stock = name, implementation, stock
        self.state = STATES.get(name)
        self.options: Options | None = None

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> tuple | Tensor:
        """Serve a call of the dispatcher, or pass it on to PyTorch's kernel."""
        options, stock = self.options, self.stock
        if options is None or _inside.pytorch:
            if self.state is not None and drawn_here(args[self.state]):
                options = options or _DEFAULT
            elif stock is not None:
                return stock.call_boxed(keyset, *args, **kwargs)
            elif options is None:
                raise NotImplementedError(f"aten::{self.name} has no kernel of PyTorch's for these tensors")
        observer = doors.observer
        if observer is None:
            found = self._served(options, args, kwargs)
        else:
            pytorch = None if stock is None else functools.partial(_call_pytorch, stock, keyset)
            found = observer(self.name, self.implementation, options, pytorch, args, kwargs)
            if not isinstance(found, str):
                doors.served.add(self.name)
        if not isinstance(found, str):
            return found
        doors.served.add(self.name, found)
        if stock is None or options.unsupported == "error":
            raise doors.Unsupported(f"aten::{self.name} is not served: {found}")
        return _call_pytorch(stock, keyset, *args, **kwargs)

    def _served(self, options: Options, args: tuple, kwargs: dict[str, Any]) -> tuple | Tensor | str:
        """The outputs, from a record if the call repeats an earlier one; or why PyTorch computes the call."""

        def call() -> tuple | Tensor | str:
            found = self.implementation(options, *args, **kwargs)
            if not isinstance(found, str):
                doors.served.add(self.name)
            return found

        # Within a CUDA graph no mask is drawn from torch's generator.
        captures = options.rng == "torch" and _is_capturing(args[0].device)
        return plans.of_operator((self, options, captures, *kwargs), (*args, *kwargs.values()), call)


_DEFAULT = Options()


class _Inside(threading.local):
    """Whether this thread runs one of PyTorch's kernels: its flash kernel calls another overridden operator."""

    pytorch = False


_inside = _Inside()


def _call_pytorch(stock: Any, keyset: Any, *args: Any, **kwargs: Any) -> tuple | Tensor:
    """Call PyTorch's kernel; overridden operators that it calls are PyTorch's, too."""
    _inside.pytorch = True
    try:
        return stock.call_boxed(keyset, *args, **kwargs)
    finally:
        _inside.pytorch = False


# ---- repeated calls of PyTorch's function ----

# Its composite operator chooses a backend and calls that one's operator. A Python override of the latter has a cost:
# boxed arguments and results, and three tensors that only a backward with dropout reads. A repeated call skips these,
# since its record has the operator's launches. The function itself handles the first two calls of each kind.


def _key_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> tuple | None:  # fmt: skip
    """The key of a call of PyTorch's function with these arguments; None if the call is never replayed."""
    if (  # overrides of functions are looked for first, since they see attributes being read
        attn_mask is not None
        or dropout_p != 0.0
        or not _PLAIN.issuperset(map(type, (query, key, value)))
        or _function_modes()
        or (query.requires_grad and torch.is_grad_enabled())  # guards know the others
        or doors.observer is not None
        or query.is_nested  # without a shape
        or key.is_nested
    ):
        return None
    # What PyTorch's choice depends on: the enabled backends, their order, and whether results must repeat.
    return (
        is_causal, scale, enable_gqa, _flash_enabled(), _efficient_enabled(), _cudnn_enabled(), _are_deterministic(),
        *_priority_order(),
    )  # fmt: skip


_function_modes = torch._C._len_torch_function_stack
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


_flash_enabled, _efficient_enabled, _cudnn_enabled, _priority_order, _are_deterministic = (
    getattr(torch._C, name)
    for name in (
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_cudnn_sdp_enabled",
        "_get_sdp_priority_order",
        "_get_deterministic_algorithms",
    )
)


def repeating(stock: Callable[..., Tensor], serving: Callable[[], Any]) -> Callable[..., Tensor]:
    """Make an override of ``aten::scaled_dot_product_attention`` above autograd.

    Repeated calls without gradients end here and skip the operators of the backends. In inference mode the dispatcher
    skips autograd's keys, so it does not call the override.

    Args:
        stock: PyTorch's kernel, boxed.
        serving: returns the activation whose calls are recorded, or None; read once at the start of each call.
    """

    def run(keyset: "torch._C.DispatchKeySet", *args: Any, **kwargs: Any) -> Tensor:
        activation = serving()
        asked = None if activation is None else _key_of(*args, **kwargs)
        if asked is None:
            return stock(keyset, *args, **kwargs)
        return plans.repeat((activation, asked), args[:3], lambda: stock(keyset, *args, **kwargs))

    return run


# ---- registered once ----

_COMPOSITE = "scaled_dot_product_attention"
_libraries: dict[str, torch.library.Library] = {}
_overrides: dict[str, dict[str, Override]] = {}
_registering = threading.RLock()


def overrides(key: str) -> dict[str, Override]:
    """The overrides by name, for a key of the dispatcher; the first call registers them."""
    with _registering:
        if key not in _overrides:
            library = _libraries[key] = torch.library.Library("aten", "IMPL")
            made = {}
            for operators in OPERATORS.values():
                for name, implementation in operators.items():
                    if hasattr(torch.ops.aten, name):
                        made[name] = Override(name, implementation, _stock_kernel(name, key))
                        _register(library, name, made[name], key)
            _override_composite(library, key)
            _overrides[key] = made
        return _overrides[key]


def _override_composite(library: torch.library.Library, key: str) -> None:
    """Let ``aten::scaled_dot_product_attention`` itself serve repeated calls under ``key``.

    The override is registered above autograd only. With a kernel below, exports would not see a composite operator.
    """
    above = f"Autograd{key}"
    stock = torch.library.get_kernel(f"aten::{_COMPOSITE}", above)
    _register(library, _COMPOSITE, repeating(stock.call_boxed, functools.partial(_serving.get, key)), above)
    # Let the tracers' dispatcher, in Python, look up that operator's kernel again.
    operator = torch.ops.aten.scaled_dot_product_attention.default
    operator._uncache_dispatch(getattr(torch._C.DispatchKey, above))


def _register(library: torch.library.Library, name: str, run: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        library.impl(name, run, key, with_keyset=True, allow_override=True)


def _stock_kernel(name: str, key: str) -> Any:
    """PyTorch's kernel, or None if this build has none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


# ---- on and off ----

_serving: dict[str, "Activation"] = {}


def serving(key: str = "CUDA") -> "Activation | None":
    """The current activation under a key of the dispatcher, or None."""
    return _serving.get(key)


class Activation:
    """Calls under one key of the dispatcher are served, until :meth:`remove` or another activation."""

    def __init__(self, options: Options, key: str = "CUDA") -> None:
        self.options = options
        self.key = key
        self.start()

    def start(self) -> "Activation":
        """Serve the operators of the options' backends, in place of any other activation; returns self."""
        own = overrides(self.key)
        with _registering:
            for backend, operators in OPERATORS.items():
                for name in operators.keys() & own.keys():
                    own[name].options = self.options if backend in self.options.backends else None
            plans.forget(_serving.get(self.key, self))
            _serving[self.key] = self
        return self

    def remove(self) -> None:
        """Let PyTorch compute all calls; has no effect a second time, or after another activation."""
        with _registering:
            if _serving.get(self.key) is not self:
                return
            del _serving[self.key]
            for one in overrides(self.key).values():
                one.options = None
            plans.forget(self)
