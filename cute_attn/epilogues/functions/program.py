"""Functions that torch's compiler has inlined: nodes of its graph, as functions to trace. Imports no compiler.

Inside a compiled program a function of scores is not an object that can be called. The compiler interprets the function
where it is called, even if it is defined there, and records torch's operations as nodes. If the arguments include
placeholders for a score and its indices, these nodes are the function.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from cute_attn.epilogues.functions.graph import Place
from cute_attn.epilogues.functions.symbols import Symbol
from cute_attn.epilogues.functions.trace import SIGNATURES, Recorder

VALUE = "example_value"
"""The compiler's key for a node's value: a tensor without memory, or a number."""
_MAKE_NUMBERS = frozenset((torch.tensor, torch.full, torch.zeros, torch.ones, torch.scalar_tensor))
_PYTHONS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_CLAMPS = frozenset(("clamp", "clip"))
_ARITHMETIC = _CLAMPS | frozenset(
    (
        *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "remainder", "iadd", "isub", "imul"),
        *("lt", "le", "gt", "ge", "eq", "ne", "where", "minimum", "maximum"),
    )
)
"""Operations that accept a tensor without dimensions wherever they accept a number."""


class Nodes:
    """The values of a graph's nodes, and new nodes for the tensors that a trace makes of them.

    Attributes:
        graph: the compiler's graph.
        before: new nodes are inserted before this node.
        like: a tensor on the device of the call.
        dtype: the scores' dtype.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, like: Tensor, dtype: torch.dtype) -> None:
        self.graph, self.before, self.like, self.dtype = graph, before, like, dtype
        self._nodes: dict[int, fx.Node] = {}
        self._numbers: dict[fx.Node, Tensor] = {}

    def value_of(self, node: fx.Node, as_tensor: bool) -> Any:
        """A node's value. as_tensor: True to return a number that is known only at run time as a tensor.

        Otherwise such a number becomes a constant, and the compiler recompiles for another number.
        """
        value = node.meta.get(VALUE)
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node
        kind = _PYTHONS.get(type(value))
        if kind is None:
            return value
        if as_tensor and kind is not bool:
            return self._number(node, value)
        try:
            return kind(value)
        except RuntimeError as error:  # the compiler's: the number depends on a tensor's value
            raise TypeError(
                f"a function asks for the number of a tensor's value ({error}); accepted: the tensor"
            ) from None

    def node_of(self, tensor: Tensor) -> fx.Node:
        found = self._nodes.get(id(tensor))
        if found is None or found.meta[VALUE] is not tensor:
            raise TypeError(
                f"a function makes a tensor of shape {tuple(tensor.shape)} of parts that the compiler's graph does not "
                "have; accepted: views of captured tensors"
            )
        return found

    def applied(self, function: Callable[..., Tensor], tensor: Tensor, *args: Any) -> Tensor:
        """``function(tensor, *args)``; adds a node for the result."""
        value = function(tensor, *args)
        self._new("call_function", function, (self.node_of(tensor), *args), value)
        return value

    def _new(
        self, op: str, target: Any, args: tuple, value: Tensor, kwargs: dict[str, Any] | None = None
    ) -> None:
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(op, target, args, kwargs)
        node.meta[VALUE] = value
        self._nodes[id(value)] = node

    def _number(self, node: fx.Node, value: Any) -> Tensor:
        if node not in self._numbers:
            is_float = isinstance(value, torch.SymFloat)
            dtype = self.dtype if is_float else torch.int64
            made = self.like.new_empty((), dtype=dtype)
            source = node.args[0] if node.op == "call_method" and node.target == "item" else None
            if isinstance(source, fx.Node) and is_float:
                self._new("call_method", "to", (source, self.like.device, dtype), made)
            else:
                options = {"dtype": dtype, "device": self.like.device}
                self._new("call_function", torch.full, ((), node), made, options)
            self._numbers[node] = made
        return self._numbers[node]


class Program:
    """A function: the nodes of a graph between its inputs and its result.

    Attributes:
        what: score_mod or mask_mod.
        inputs: the placeholders, in the order of the function's arguments.
        result: the node of the returned value.
        steps: the nodes that a call runs, in order: nodes that depend on the inputs or make tensors of numbers, and
            changes of torch's gradient mode.
    """

    def __init__(
        self, nodes: Nodes, what: str, inputs: Sequence[fx.Node], result: fx.Node, segment: Sequence[fx.Node]
    ) -> None:
        """segment: all nodes that the compiler recorded while it interpreted the function."""
        self.nodes, self.what, self.inputs, self.result = nodes, what, tuple(inputs), result
        depending, steps = set(self.inputs), list[fx.Node]()
        for node in segment:
            if not depending.isdisjoint(node.all_input_nodes) or _makes_number(node):
                depending.add(node)
                steps.append(node)
            elif node.target is torch._C._set_grad_enabled:
                steps.append(node)
        self.steps = steps

    def __call__(self, *inputs: Symbol) -> Any:
        values: dict[fx.Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        recorder = inputs[0].recorder
        for node in self.steps:
            recorder.line = line_of(node)
            values[node] = self._run(recorder, node, values)
        recorder.line = None
        found = values.get(self.result)
        return self.nodes.value_of(self.result, True) if found is None else found

    def _value(self, x: fx.Node, values: dict[fx.Node, Any], as_tensor: bool) -> Any:
        return values[x] if x in values else self.nodes.value_of(x, as_tensor)

    def _run(self, recorder: Recorder, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        name = getattr(node.target, "__name__", node.target)
        given = node.args
        if name == "getitem" and isinstance(given[1], tuple):  # bounds of slices are constants
            index = [self._value(x, values, True) if isinstance(x, fx.Node) else x for x in given[1]]
            given = (given[0], tuple(index))
        args, kwargs = map_arg((given, node.kwargs), lambda x: self._value(x, values, name in _ARITHMETIC))
        if name in _CLAMPS and any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values())):
            args, kwargs = map_aggregate((args, kwargs), recorder.as_tensor)  # torch allows no mixture
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        raise TypeError(f"a function calls {node.target}; accepted: torch's functions and methods")


def _makes_number(node: fx.Node) -> bool:
    """True if a node makes a tensor of one float or bool; a trace treats the tensor as a number."""
    if node.op != "call_function" or node.target not in _MAKE_NUMBERS or node.all_input_nodes:
        return False
    made = node.meta[VALUE]
    return made.numel() == 1 and (made.dtype.is_floating_point or made.dtype == torch.bool)


_LINE = re.compile(r'File "(.*?)", line (\d+)')


def line_of(node: fx.Node) -> Place | None:
    """The line that the compiler interpreted when it made a node."""
    found = _LINE.findall(node.stack_trace or "")
    return (found[-1][0], int(found[-1][1])) if found else None


def programs(
    nodes: Nodes, whats: Sequence[str], given: Sequence[fx.Node]
) -> tuple[list[Program], Sequence[fx.Node]]:
    """(functions, remaining nodes) from ``given``, which has the inputs and the result of each function in turn.

    whats: the functions' names in :data:`.trace.SIGNATURES`.
    """
    order = list(nodes.graph.nodes)
    numbered = {node: place for place, node in enumerate(order)}
    parts = []
    for what in whats:
        count = len(SIGNATURES[what])
        parts.append((what, given[:count], given[count]))
        given = given[count + 1 :]
    ends = [*(numbered[inputs[0]] for _, inputs, _ in parts[1:]), numbered[nodes.before]]
    found = [
        Program(nodes, what, inputs, result, order[numbered[inputs[-1]] + 1 : end])
        for (what, inputs, result), end in zip(parts, ends, strict=True)
    ]
    return found, given


def erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase the nodes that have no users, last node first."""
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
