"""The torch operators ``cute_attn::forward`` and ``::backward``, for CUDA, CPU and fake tensors, with autograd."""

import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn import reference
from cute_attn.api import block_tables as block_tables  # registers its operator, for exported programs
from cute_attn.api import functorch
from cute_attn.epilogues.functions.known import with_texts, without_texts
from cute_attn.epilogues.names import TRACED
from cute_attn.host import fused_qkv, plans
from cute_attn.host.backward import NOTHING, Given, Gradients, Needed, check_given, gradients
from cute_attn.host.call import ATTENTION, LIBRARY, NUM_TENSORS, Call, define, pytorchs_precision, schema
from cute_attn.host.checks import check, check_gradients, check_out
from cute_attn.host.choose import user_classes
from cute_attn.host.dispatch import DIFFERENTIABLE, NO_GRADIENT, transforms_are_active
from cute_attn.host.epilogue_gradients import bins_of, gradient_of, with_targets
from cute_attn.host.forward import Outputs
from cute_attn.host.forward import forward as launch
from cute_attn.host.memory import Tensors, all_plain, none_overrides, write_owned
from cute_attn.host.plans import no_dispatch_mode
from cute_attn.host.record import Record, empty, overwritten, planned

_ARGUMENTS = schema(ATTENTION)
_NAMED = len(DIFFERENTIABLE)
_KERNEL = Call._fields.index("kernel") - NUM_TENSORS - 1
"""As ``functorch.EPILOGUES``."""


def forward(call: Call) -> Outputs:
    """Return out, lse, and ``call.aux`` or None. The dispatcher is called only if something observes operators."""
    # On the CPU torch follows tangents through the definition, except within transforms.
    dual = forward_ad._current_level >= 0 and call.q.is_cuda and not torch.compiler.is_compiling()
    if no_dispatch_mode() and not dual and all_plain((*call[:NUM_TENSORS], *call.epilogue_tensors)):
        return run(call) if call.q.is_cuda else forward_cpu(call)
    if dual or transforms_are_active():
        check(call)  # before the dispatcher, whose errors name no argument
    call = call._replace(epilogues=with_texts(call.epilogues))
    out, lse, aux = torch.ops.cute_attn.forward.default(*call.values(ATTENTION))
    return out, lse, aux if call.aux else None


def run(call: Call) -> Outputs:
    """Launch without the dispatcher. Autograd records the call if a tensor requires a gradient."""
    node, tensors = Node.of(call), (*call[:NUM_TENSORS], *call.epilogue_tensors)
    present = tuple([tensors[i] for i in node.present])
    planned(node, present)
    if torch.is_grad_enabled() and requires_grad(call):
        return Attention.apply(node, None, (), *present)
    return launch(call)


def repeat(record: Record, given: Tensors) -> Outputs | None:
    """Repeat a recorded call with these tensors, differentiably; None if that is impossible."""
    if record.saved is None:  # if results went to out, the record has no plan either
        return None
    traced = record.plan.traced
    held = [one() for one in traced] if traced else ()  # until autograd's node holds them
    if None in held:
        return None
    found = _apply(record.plan, record, given, *[given[i] for i in record.saved])
    del held
    return found


def forward_into(call: Call, out: Tensor) -> Outputs:
    """:func:`forward`, with its first result written to ``out``."""
    if not torch.compiler.is_compiling():  # the operator checks
        check(call)
    check_out(call, out, rows=True)
    if forward_ad._current_level >= 0:
        functorch.refuse_out(call)
    tensors = (*call[:NUM_TENSORS], *call.epilogue_tensors, out)
    if call.q.is_cuda and no_dispatch_mode() and all_plain(tensors):
        outputs = launch(call, out)
        overwritten(out, alone=True)
        return outputs
    result, *others = forward(call)
    return write_owned(out, result, call.cu_seqlens_q), *others  # type: ignore[return-value]


def backward(
    call: Call, outer: Given, needed: Needed, launched: bool = False, into: Gradients = NOTHING
) -> tuple[Tensor | None, ...]:
    """Return the needed gradients of q, k, v, bias and sinks, by the dispatcher only if something observes operators.

    needed: a flag per gradient; optionally also per tensor of the epilogues, whose gradients are then appended.
    launched: whether a kernel has already read and written, in place, all tensors except grad_out and grad_lse.
    into: tensors to write gradients into, either for all needed gradients or for none.
    """
    tensors = (*call[:NUM_TENSORS], *call.epilogue_tensors, *outer, *into)
    new = outer[:2] if launched else tensors
    if call.q.is_cuda and no_dispatch_mode() and none_overrides(tensors) and all_plain(new):
        return _all_gradients(call, outer, needed, into)
    if not torch.compiler.is_compiling():
        check(call)  # before the dispatcher, whose errors name no argument
    if any(x is not None for x in into):
        torch.ops.cute_attn.backward_into.default(*outer, *into, *call.values(ATTENTION))
        return into
    *grads, own = torch.ops.cute_attn.backward.default(*outer, list(needed), *call.values(ATTENTION))
    return tuple(x if wanted else None for x, wanted in zip((*grads, *own), needed, strict=False))


def _all_gradients(
    call: Call, outer: Given, needed: Needed, into: Gradients | None
) -> tuple[Tensor | None, ...]:
    """:func:`backward` on CUDA, without the dispatcher. into: see :func:`cute_attn.host.backward.gradients`."""
    named, own = needed[:_NAMED], needed[_NAMED:]
    if not any(own):
        return (*gradients(call, outer, named, into), *(None for _ in own))
    asked, targets = with_targets(call, own)
    found = gradients(asked, outer, named, into)
    pairs = zip(targets, call.epilogue_tensors, strict=True)
    return (*found, *(None if target is None else gradient_of(x, target) for target, x in pairs))


# ---- CPU ----


def forward_cpu(call: Call) -> Outputs:
    """Compute the reference, differentiable by autograd."""
    if call.q.device.type != "cpu":
        raise ValueError(f"q is on {call.q.device}; accepted: cuda and cpu tensors")
    check(call)
    named: dict[str, Any] = {name: _with_contiguous_gradient(getattr(call, name)) for name in DIFFERENTIABLE}
    call = call._replace(**named)
    out, lse, aux = reference.attention(
        *(*call[:3], call.softmax_scale, *call.by_definition()),
        return_softmax=call.aux == "softmax",
        return_max_scores=call.aux == "max_scores",
    )
    # All inputs have gradients, as on CUDA: zeros for v if only lse is used, and for all if nothing is computed.
    inputs = call.differentiable
    return out if out.requires_grad else _dependent(out, inputs), _dependent(lse, inputs), aux


def _with_contiguous_gradient(x: Tensor | None) -> Tensor | None:
    """``x`` reshaped, so that its gradient is copied to contiguous memory, as from kernels; compilers expect it."""
    if x is None or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return x.reshape(-1).view(x.shape)


def _dependent(output: Tensor, inputs: Sequence[Tensor | None]) -> Tensor:
    """``output`` with a zero gradient for each input, since autograd raises for inputs that are not used."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not (wanted and torch.is_grad_enabled()):
        return output
    return output + sum(torch.atleast_1d(x)[..., :0].sum().to(output.dtype) for x in wanted)


# ---- the operator's implementations ----


def call_of(arguments: tuple) -> Call:
    values: Any = (tuple(x) if isinstance(x, list) else x for x in _with_list(arguments))
    call = Call(*values).resolved()
    return call._replace(epilogues=without_texts(call.epilogues)) if call.epilogues else call


def _with_list(arguments: tuple) -> tuple:
    """The operator's arguments, with an empty list of tensors where AOTInductor's packages pass None."""
    if arguments[NUM_TENSORS] is not None:
        return arguments
    return (*arguments[:NUM_TENSORS], [], *arguments[NUM_TENSORS + 1 :])


def _forward_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, aux = launch(call_of(arguments))
    return out, lse, nothing(out) if aux is None else aux


def _forward_operator_cpu(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, aux = forward_cpu(call_of(arguments))
    return out, lse, out.new_empty(0) if aux is None else aux


def nothing(like: Tensor) -> Tensor:
    return empty(like, (0,), (1,), like.dtype)


def _repeated(name: str, implementation: Callable[..., Any], first: int) -> Callable[..., Any]:
    """Wrap an operator, so that repeated calls replay a record. first: position of the call's first argument."""

    def run(*arguments: Any) -> Any:
        call, precision = functools.partial(implementation, *arguments), ""
        others = arguments[first + NUM_TENSORS + 1 :]
        epilogues = others[functorch.EPILOGUES]
        if ":" in others[_KERNEL] or (epilogues and not all(one.startswith(TRACED) for one in epilogues)):
            return call()  # what has a name may be registered again, and a function's values may change
        if arguments[first].dtype == torch.float32:
            precision = pytorchs_precision()
        return plans.of_operator((name, precision), arguments, call)

    return run


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = call_of(arguments)
    return *call.fake_outputs(), call.fake_aux()


define(
    f"forward({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor aux)",
    _forward_operator_cpu,
    _repeated("forward", _forward_operator, 0),
    _forward_fake,
)


# ---- the gradient ----


def _backward_cuda(*arguments: Any) -> tuple[Tensor, ...]:
    outer, needed, call = arguments[:4], arguments[4], call_of(arguments[5:])
    # Views of one tensor would not have the strides that the fake implementation promises.
    return _filled(call, _all_gradients(call, outer, tuple(needed), None), nothing)


def _backward_cpu(*arguments: Any) -> tuple[Tensor, ...]:
    outer, needed, call = arguments[:4], arguments[4], call_of(arguments[5:])
    check(call)
    check_gradients(call, outer)
    flags = [*needed, *itertools.repeat(False, len(call.differentiable) - len(needed))]
    pairs = zip(call.differentiable, flags, strict=True)
    inputs = [x.detach().requires_grad_() if wanted else x for x, wanted in pairs]
    leaves = [x for x, wanted in zip(inputs, flags, strict=True) if wanted]
    with below_operators(), torch.enable_grad():
        outputs = forward_cpu(call.with_differentiable(inputs)._replace(aux=""))[:2]
        loss = _loss(outputs, outer)
    found = iter(torch.autograd.grad(loss, leaves, materialize_grads=True) if leaves else ())
    return _filled(call, [next(found).contiguous() if wanted else None for wanted in flags])


@contextlib.contextmanager
def below_operators() -> Iterator[None]:
    """Enable autograd in an operator's implementation, which a mode or a tracer may run below autograd."""
    key = torch._C.DispatchKey
    with contextlib.ExitStack() as guards:
        for one in (key.ADInplaceOrView, key.AutogradFunctionality, key.ZeroTensor):  # for zero tangents
            guards.enter_context(torch._C._SetExcludeDispatchKeyGuard(one, False))
        yield


def _loss(outputs: tuple[Tensor, Tensor], outer: Given) -> Tensor:
    """A scalar whose gradients are the kernels' gradients for the ``given`` out and lse.

    The given out and lse may cover more keys than the call, for example if results over ranges of keys were merged.
    Probabilities are relative to the given lse.
    """
    (out, lse), (grad_out, grad_lse, *given) = outputs, outer
    seen = lse != -math.inf
    share = torch.where(seen, (torch.where(seen, lse, 0.0) - torch.where(seen, given[1], 0.0)).exp(), 0.0)
    total = torch.zeros((), dtype=lse.dtype, device=lse.device)
    delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
    if grad_out is not None:
        # lse is (..., heads, rows), out (..., rows, heads, dim)
        total = total + ((grad_out * out).to(lse.dtype).sum(-1).transpose(-1, -2) * share).sum()
        delta = delta + (grad_out * given[0]).to(lse.dtype).sum(-1).transpose(-1, -2)
    return total - (delta * share).sum()


def _filled(
    call: Call, grads: Sequence[Tensor | None], nothing: Callable[[Tensor], Tensor] = lambda x: x.new_empty(0)
) -> tuple[Any, ...]:
    """An operator's results: a tensor per gradient, then a list for the epilogues' tensors; empty tensors for None."""
    missing = (None,) * (_NAMED + len(call.epilogue_tensors) - len(grads))
    filled = [nothing(call.q) if x is None else x for x in (*grads, *missing)]
    return (*filled[:_NAMED], filled[_NAMED:])


def _into(arguments: tuple) -> tuple[Given, Gradients, tuple[bool, ...], tuple]:
    """Split backward_into's arguments: Given, tensors to write into, flags of tensors given, arguments of the call."""
    into = arguments[4 : 4 + _NAMED]
    return arguments[:4], into, tuple(x is not None for x in into), arguments[4 + _NAMED :]


def _backward_into_cuda(*arguments: Any) -> None:
    outer, into, needed, rest = _into(arguments)
    gradients(call_of(rest), outer, needed, into)


def _backward_into_cpu(*arguments: Any) -> None:
    outer, into, needed, rest = _into(arguments)
    check_given(call_of(rest), into, needed, outer)
    found = _backward_cpu(*outer, list(needed), *rest)
    for own, gradient in zip(into, found[:_NAMED], strict=True):
        if own is not None:
            own.copy_(gradient)


_INTO = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, Tensor(e!)? dsinks"
define(
    f"backward_into(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_INTO}, {_ARGUMENTS}) -> ()",
    _backward_into_cpu,
    _backward_into_cuda,
    lambda *_: None,
)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    needed, call = arguments[4], call_of(arguments[5:])
    pairs = zip(call.differentiable, needed, strict=False)
    return _filled(call, [x.new_empty(x.shape) if wanted else None for x, wanted in pairs])


define(
    f"backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] needed, {_ARGUMENTS}) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_sinks, "
    "Tensor[] grad_epilogue_tensors)",
    _backward_cpu,
    _repeated("backward", _backward_cuda, 5),
    _backward_fake,
)


def requires_grad(call: Call) -> bool:
    """True if a tensor of the call requires a gradient.

    Raises:
        NotImplementedError: a tensor requires a gradient that no kernel computes.
    """
    own = [x.requires_grad for x in call.epilogue_tensors]
    if call.alibi_slopes is not None and call.alibi_slopes.requires_grad:
        raise NotImplementedError(NO_GRADIENT)
    if any(own):
        bins_of(call, own)  # which checks them
    return any(x is not None and x.requires_grad for x in call.differentiable)


class Node(NamedTuple):
    """What autograd's node keeps of a call without the dispatcher, except tensors.

    Attributes:
        rest: the call's arguments that are not tensors.
        present: indices of the tensors that are not None, among q to rng_state and then the epilogues'.
        total: number of all these tensors.
        options: everything above and the users' classes that the call names, for the key of a backward's record.
        packed: how many of q, k and v may be adjacent views of one tensor, so that their gradients are, too.
        traced: weak references to the users' classes that are epilogues of functions.
    """

    rest: tuple
    present: tuple[int, ...]
    total: int
    options: plans.Options
    packed: int
    traced: tuple["weakref.ref[Any]", ...]

    @staticmethod
    def of(call: Call) -> "Node":
        """The node of a call that has been checked, or that the forward will check."""
        rest = call[NUM_TENSORS + 1 :]
        shaped = all(x.dim() >= 3 for x in call[:3])  # the checks report errors
        packed = fused_qkv.number_packed(call[:3]) if shaped else 0
        classes = user_classes(call)
        traced = tuple(x for x in classes if isinstance(x, weakref.ref))
        tensors = (*call[:NUM_TENSORS], *call.epilogue_tensors)
        present = tuple(i for i, x in enumerate(tensors) if x is not None)
        options = plans.Options((rest, present, len(tensors), *classes, *user_classes(call, "backward")))
        return Node(rest, present, len(tensors), options, packed, traced)

    def all_of(self, present: Iterable[Any]) -> list[Any]:
        """Values of all tensors from those of the present ones."""
        found: list[Any] = [None] * self.total
        for i, x in zip(self.present, present, strict=True):
            found[i] = x
        return found


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, wanted: Needed
) -> tuple[Tensor | None, ...]:
    """The gradients of :class:`Attention`'s call. wanted: as ``needed`` of :func:`backward`."""
    if grad_out is None and grad_lse is None:
        return (None,) * len(wanted)
    *tensors, out, lse = ctx.saved_tensors
    node, given = ctx.node, (*tensors, grad_out, out, lse)

    def run() -> tuple[Tensor | None, ...]:
        call = Call.joined(node.all_of(tensors), node.rest)
        return backward(call, (grad_out, grad_lse, out, lse), wanted, launched=True)

    if torch.is_grad_enabled():
        return functorch.gradients(node.rest, wanted, (grad_out, grad_lse, out, lse, *node.all_of(tensors)))
    if grad_out is None or grad_lse is not None:
        return run()
    packs = node.packed and fused_qkv.are_adjacent(tensors[3 - node.packed : 3])
    key = ("backward", node.options, wanted, packs, torch.are_deterministic_algorithms_enabled())
    known = plans.find(key, given)
    found = None if known is None else known[0].run(given)
    return plans.recorded(key, given, run) if found is None else found


_FIRST = 3
"""Number of arguments of :meth:`Attention.forward` before its tensors."""


class Attention(torch.autograd.Function):
    """Autograd's node of a call that does not go through the dispatcher. The operator has another node."""

    @staticmethod
    def forward(ctx: Any, node: Node, record: Record | None, given: Tensors, *present: Any) -> Outputs:
        """Repeat ``record`` with ``given``, or launch the call. present: the node's tensors."""
        outputs = None if record is None else record.run(given)
        if outputs is None:
            outputs = launch(Call.joined(node.all_of(present), node.rest))
        out, lse, aux = outputs
        ctx.node = node
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*present, out, lse)
        if node.traced:  # a traced function's epilogue must live until its gradient
            ctx.epilogues = [one() for one in node.traced]
        if aux is not None:
            ctx.mark_non_differentiable(aux)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple:
        """A gradient, or None, for each argument of forward."""
        of_gradients, of_arguments = _order(ctx.node.present, ctx.node.total)
        wanted = of_gradients((*ctx.needs_input_grad, False))
        return of_arguments((*_differentiate(ctx, grad_out, grad_lse, wanted), None))


@functools.cache
def _order(present: tuple[int, ...], total: int) -> tuple[operator.itemgetter, operator.itemgetter]:
    """Getters of a value for each gradient, and for each argument of :meth:`Attention.forward`.

    The first takes values of the arguments and gives each gradient its tensor's; the second takes the gradients'. Both
    take one more value, for those without a counterpart.
    """
    places = (*functorch.INDICES, *range(NUM_TENSORS, total))
    of_gradients = (_FIRST + present.index(i) if i in present else -1 for i in places)
    of_arguments = (places.index(i) if i in places else -1 for i in present)
    return operator.itemgetter(*of_gradients), operator.itemgetter(*(-1,) * _FIRST, *of_arguments)


_apply = super(torch.autograd.Function, Attention).apply
"""``Attention.apply`` without its preparations for torch.func's transforms, within which no call is repeated."""


def _with_derivatives(keyset: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiable forward. torch.library.register_autograd would pass None on, and drop tangents silently."""
    arguments = _with_list(given)
    # In traced code the level is not known here.
    if forward_ad._current_level >= 0 or not no_dispatch_mode():
        found = functorch.with_tangents(Call(*arguments))
        if found is not None:
            return *found, found[0].new_empty(0)
    learns = torch.is_grad_enabled() and requires_grad(call_of(arguments))
    if learns or functorch.differentiates():
        return _transformed(keyset, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        return torch.ops.cute_attn.forward.default.redispatch(below, *arguments)


def _transformed(keyset: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator where autograd or a transform records it: called directly, or in traced code."""
    values: Any = (tuple(x) if isinstance(x, list) else x for x in given)
    with functorch.before_operators():
        out, lse, aux = functorch.forward(Call(*values))
    return out, lse, out.new_empty(0) if aux is None else aux


LIBRARY.impl("forward", _with_derivatives, "Autograd", with_keyset=True)
LIBRARY.impl("forward", _transformed, "FuncTorchBatched", with_keyset=True)
