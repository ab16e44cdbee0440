"""Attention calls with functions under torch's compiler: one graph node, with functions traced at compile time.

The compiler interprets a function where it is called. So an attention call passes each function stand-ins for a score
and its indices. Stand-ins and result become arguments of the attention operator, in place of an epilogue's tensors.
Before the compiler continues, :func:`settled` traces the nodes between stand-ins and result
(:mod:`cute_attn.epilogues.functions.program`). It replaces these arguments by the epilogue's name and the captured
tensors, which are then inputs of the graph like other tensors.

A function that the compiler cannot interpret breaks the graph before the call, which then runs eagerly between two
graphs. Importing this module loads torch's compiler.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import higher_order_ops
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from cute_attn.api import operators
from cute_attn.api.block_tables import block_tables
from cute_attn.epilogues.functions.known import held_epilogue_of, hold, with_texts
from cute_attn.epilogues.functions.program import VALUE, Nodes, Program, erase, programs
from cute_attn.epilogues.functions.trace import SIGNATURES, check_function, trace
from cute_attn.epilogues.names import TRACED, register_traced
from cute_attn.host import block_masks, doors, mask_kinds
from cute_attn.host.checks import check, check_for_kernels
from cute_attn.host.memory import Tensors

Result = TypeVar("Result")


# ---- between two graphs ----


made_block_mask = torch.compiler.disable(
    mask_kinds.made_block_mask, reason="cute_attn makes a mask's blocks outside of graphs"
)


# ---- interpreted by the compiler ----


def whole(compute: Callable[[], Result]) -> Result:
    """The results of ``compute``, which calls one operator with the arguments of :func:`stand_ins`.

    Raises:
        TypeError: a function cannot be traced, or no kernel supports it.
    """

    def body() -> Any:
        if not torch.compiler.is_dynamo_compiling():  # between two graphs
            return compute()
        found = compute()
        refusal = settled()
        return refusal or found

    found = _whole(body)
    if isinstance(found, str):
        raise TypeError(found)
    return found


def stand_ins(
    tensors: Tensors, functions: tuple[Any, Any, Any], packed: block_masks.Packed | None
) -> dict[str, tuple[Tensor, ...]]:
    """Placeholder epilogues by name, with their arguments: stand-ins, a function's results, a BlockMask's lists.

    tensors: q first. functions: score_mod, mask_mod and block_mask; packed: a BlockMask's sequences.
    """
    q, (score_mod, mask_mod, block_mask) = tensors[0], functions
    found: dict[str, tuple[Tensor, ...]] = {}
    noted: tuple[Tensor, ...] = ()
    for what, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            noted += _noted(what, function, q)
    if noted:
        found[_FUNCTIONS] = noted
    if block_mask is not None:
        block_masks.check_block_mask(block_mask)
        starts, sizes, _ = packed  # type: ignore[misc]
        kinds, *lists = block_tables(block_masks.blocks_of(block_mask), *sizes, starts=starts)
        block_masks.check_fits(block_mask, kinds, q.device, *sizes)
        if all(sizes):
            function, partial, unites = block_masks.functions_of(block_mask, kinds, *sizes)
            noted = _noted("mask_mod", function, q)
            if partial is not None:
                noted += _noted("mask_mod", partial, q)
            found[_UNITED if unites else _LISTED] = (*noted, *lists)
    return found


def _noted(what: str, function: Callable[..., Any], q: Tensor) -> tuple[Tensor, ...]:
    """Stand-ins for a function's inputs, and the function's result for them."""
    check_function(what, function)
    inputs = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(4)]
    if what == "score_mod":
        inputs = [torch.empty((), dtype=_dtype_of_scores(q), device=q.device), *inputs]
    result = function(*inputs)
    if not isinstance(result, Tensor):
        result = torch.full((), result, device=q.device)
    return (*inputs, result)


def _dtype_of_scores(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---- what it calls while it interprets ----


class _StandIn:
    """Placeholder for an epilogue from the call of an operator until :func:`settled`, which checks gradients."""

    def __init__(self, name: str) -> None:
        self.name = TRACED + name

    def with_gradients(
        self, arguments: tuple[int, ...], exact: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...]]:
        """The same name, without gradients."""
        return self.name, ()


def _stand_in(name: str) -> str:
    made = register_traced(_StandIn(name))
    hold(made.name)
    return made.name


_FUNCTIONS, _LISTED, _UNITED = map(_stand_in, ("noted", "noted_listed", "noted_united"))
_LISTS = 4
"""Number of tensors that hold a BlockMask's lists."""


@torch.compiler.assume_constant_result
def settled() -> str:
    """Replace the stand-ins of the graph's last operator by epilogues. Returns "" or an error message."""
    graph = InstructionTranslator.current_tx().output.current_tracer.graph
    node = next(x for x in reversed(graph.nodes) if _has_stand_ins(x))
    given = _Given(node)
    first = next(iter(given.inputs))
    order = list(graph.nodes)
    try:
        given.settle(graph)
    except (TypeError, ValueError, LookupError, NotImplementedError) as error:
        erase(graph, order[order.index(node) :])
        return str(error)
    finally:
        noted = order[order.index(first) : order.index(node)]
        erase(graph, _depending(noted, given.inputs))
    return ""


def _has_stand_ins(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "cute_attn":
        return False
    names = [x.name for x in node.target._schema.arguments]
    if "epilogues" not in names:
        return False
    given = node.args[names.index("epilogues")]
    return any(str(one).partition(":")[0] in (_FUNCTIONS, _LISTED, _UNITED) for one in given)  # type: ignore[union-attr]


class _Given:
    """Epilogues of an operator's node, some of them placeholders.

    Attributes:
        node: the operator's node.
        inputs: stand-ins for the inputs of functions.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node, self.inputs = node, list[fx.Node]()
        arguments = [x.name for x in node.target._schema.arguments]  # type: ignore[union-attr]
        self._places = [arguments.index(name) for name in ("epilogues", "epilogue_tensors")]
        names, tensors = (list(node.args[place]) for place in self._places)  # type: ignore[arg-type]
        self._parts: list[tuple[str, list[str], list[Any]]] = []
        for one in names:
            name, _, letters = one.partition(":")
            count = letters.count("t")
            own, tensors = tensors[:count], tensors[count:]
            whats = _noted_functions(name, own)
            self._parts.append((one, whats, own))
            for what in whats:
                self.inputs += own[: len(SIGNATURES[what])]
                own = own[len(SIGNATURES[what]) + 1 :]

    def settle(self, graph: fx.Graph) -> None:
        """Replace placeholders and their stand-ins by traced epilogues.

        Raises:
            TypeError, ValueError, LookupError, NotImplementedError: tracing failed, or no kernel supports a function.
        """
        like = self.node.all_input_nodes[0].meta[VALUE]
        nodes = Nodes(graph, self.node, like, _dtype_of_scores(like))
        names, tensors = list[str](), list[Any]()
        for one, whats, own in self._parts:
            if not whats:
                names.append(one)
                tensors += own
                continue
            functions, lists = programs(nodes, whats, own)
            name, found = _traced(nodes, one.partition(":")[0], functions)
            if name:
                captured = [*map(nodes.node_of, found), *lists]
                names.append(f"{name}:{'t' * len(captured)}" if captured else name)
                tensors += captured
        args = list[Any](self.node.args)
        for place, value in zip(self._places, (list(with_texts(names)), tensors), strict=True):
            args[place] = value
        _check_kernels(self.node, args)
        self.node.args = tuple(args)


def _traced(nodes: Nodes, stand_in: str, functions: list[Program]) -> tuple[str, tuple[Tensor, ...]]:
    """The name of the functions' epilogue, and the tensors that they capture."""
    device, dtype = nodes.like.device, nodes.dtype
    if stand_in == _FUNCTIONS:
        by_name = {one.what: one for one in functions}
        both = (by_name.get("score_mod"), by_name.get("mask_mod"))
        return held_epilogue_of(trace(*both, device, dtype, nodes.applied))
    traced, *partial = (trace(None, one, device, applied=nodes.applied) for one in functions)
    own = partial[0] if partial else None
    return held_epilogue_of(replace(traced, partial=own, unites=stand_in == _UNITED))


def _noted_functions(name: str, given: Sequence[Any]) -> list[str]:
    """The functions whose stand-ins are among an epilogue's arguments, as names in ``SIGNATURES``."""
    sizes = {what: len(SIGNATURES[what]) + 1 for what in SIGNATURES}
    if name == _FUNCTIONS:
        alone = {sizes[what]: [what] for what in sizes}
        return alone.get(len(given), list(sizes))
    if name in (_LISTED, _UNITED):
        return ["mask_mod"] * ((len(given) - _LISTS) // sizes["mask_mod"])
    return []


def _depending(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """``inputs``, and the ones of ``nodes`` that depend on ``inputs``."""
    found = dict.fromkeys(inputs)
    for node in nodes:
        if not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return list(found)


def _check_kernels(node: fx.Node, args: Sequence[Any]) -> None:
    """Raise if no kernel of the GPU supports a forward, or a gradient that the forward's tensors require."""
    if node.target is not torch.ops.cute_attn.forward.default:
        return
    call = operators.call_of(map_arg(tuple(args), lambda x: x.meta[VALUE]))
    needs = operators.requires_grad(call) and torch.is_grad_enabled()
    if not call.q.is_cuda or 0 in (*call.q.shape, *call.k.shape):
        return
    check(call)
    check_for_kernels(call)
    for op in ("forward", "backward") if needs else ("forward",):
        why = doors.why_no_kernel(call, doors.target_of(call.q.device), op)
        if why is not None:
            raise doors.Unsupported(why)


# ---- the compiler's way to interpret a call ----


class _Whole(HigherOrderOperator):
    """Calls a function without arguments. The compiler interprets it as a whole: a graph cannot break inside."""

    def __init__(self) -> None:
        super().__init__("cute_attn_call")

    def __call__(self, body: Callable[[], Any]) -> Any:
        """Call ``body`` between two graphs. Calls within a graph do not reach this: :func:`_inline` removes them."""
        return torch.compiler.disable(body)()


_whole = _Whole()


class _Elements(TorchFunctionMode):
    """Makes ``table[h, q_idx]`` an element lookup. PyTorch would read a stand-in's value, which does not exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Tensor) and x.dtype != torch.bool for x in index):
                return _element(args[0], list(index))
        if func in (torch.select, Tensor.select) and len(args) == 3 and isinstance(args[2], Tensor):
            return _element(args[0], [*[slice(None)] * (args[1] % args[0].dim()), args[2]])
        return func(*args, **(kwargs or {}))


def _element(table: Tensor, index: list[Any]) -> Tensor:
    used = sum(x is not None and x is not Ellipsis for x in index)
    for place in [place for place, x in enumerate(index) if x is Ellipsis]:
        index[place : place + 1] = [slice(None)] * (table.dim() - used)
    # Every index gives the same shape, and an index's value would become a constant.
    places = {torch.SymInt: 0}
    rest = table[tuple(slice(None) if isinstance(x, Tensor) else places.get(type(x), x) for x in index)]
    kept = [x for x in index if not isinstance(x, int | torch.SymInt)]
    return torch.ops.aten.index.Tensor(rest, [x if isinstance(x, Tensor) else None for x in kept])


class _WholeVariable(higher_order_ops.WrapHigherOrderVariable):
    """How the compiler interprets a call of :class:`_Whole`."""

    _HOP_NAME = "cute_attn's call"

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        """The function's result, with its nodes inlined into the graph."""
        with _Elements():
            found = super().call_function(tx, args, kwargs)
        _inline(tx.output)
        return found


higher_order_ops._hop_name_to_variable_class[_whole.__name__] = _WholeVariable


def _same(x: Any) -> Any:
    return x


def _made_before(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """An earlier layer's node for the same mask's tables; None if the mask's tensors may have changed since.

    values: the graph's node for each input of ``node``.
    """
    tables = torch.ops.cute_attn.block_tables.default
    if node.target is not tables:
        return None
    args = map_arg(map_arg(node.args, values.__getitem__), _by_value)
    used = {user.target for x in node.all_input_nodes for user in values[x].users}
    if not used <= {tables, _whole}:
        return None
    return next((x for x in graph.nodes if x.target is tables and map_arg(x.args, _by_value) == args), None)


def _by_value(node: fx.Node) -> Any:
    """A length's symbolic expression, since each call reads lengths by new nodes; any other node as it is."""
    value = node.meta.get(VALUE)
    return value.node.expr if isinstance(value, torch.SymInt) else node


def _inline(output: Any) -> None:
    """Replace the last node, a call of a subgraph, by the subgraph's nodes: some passes refuse such calls."""
    graph = output.current_tracer.graph
    node = next(x for x in reversed(graph.nodes) if x.target is _whole)
    holder, *given = node.args
    body = output.nn_modules[holder.target]
    values: dict[fx.Node, fx.Node] = {}
    arguments = iter(given)
    returned: Any = ()
    with graph.inserting_before(node):
        for one in body.graph.nodes:
            if one.op == "placeholder":
                values[one] = next(arguments)
            elif one.op == "output":
                (returned,) = one.args
            else:
                made = _made_before(graph, one, values)
                values[one] = graph.node_copy(one, values.__getitem__) if made is None else made
    for user in list(node.users):  # the compiler keeps these nodes
        made = values[returned[user.args[1]]]
        if made.target is operator.getitem:
            user.args = made.args
        else:
            user.target, user.args = _same, (made,)
    graph.erase_node(node)
    if not holder.users:
        graph.erase_node(holder)
        del output.nn_modules[holder.target]
