"""A lowered graph as CuTe DSL expressions on a score tile in registers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64, Uint8, cute
from cutlass._mlir.dialects import arith
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.math import exp2, fabs, fma, log2, reciprocal, tanh_base2
from cute_attn.device.score_tile import ScoreTile
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, KEY, LONG, QUERY, Node, ordered
from cute_attn.epilogues.functions.lowering import varies

TYPES: dict[str, Any] = {BOOL: Boolean, INT: Int32, LONG: Int64, FLOAT: Float32}
ELEMENTS: dict[str, Any] = {
    "bool": Uint8,
    "uint8": Uint8,
    "int8": Int8,
    "int16": Int16,
    "int32": Int32,
    "int64": Int64,
    "float16": Float16,
    "bfloat16": BFloat16,
    "float32": Float32,
    "float64": Float64,
}
"""Of torch's dtypes by name."""


def fake_tensor(dtype: str, rank: int, unit_stride: bool) -> cute.Tensor:
    """A captured tensor to compile with."""
    stride = [cute.sym_int64() for _ in range(rank)]
    if unit_stride:
        stride[-1] = 1
    return make_fake_tensor(ELEMENTS[dtype], tuple(cute.sym_int() for _ in range(rank)), stride=tuple(stride))


def uniform_roots(*outputs: Node) -> list[Node]:
    """The values of a work tile that others are computed from, but constants."""
    nodes = ordered(*outputs)
    used = [arg for node in nodes if node.parts for arg in node.args] + list(outputs)
    return list(dict.fromkeys(x for x in used if not x.parts and x.op != "const"))


class Expressions:
    """Computes nodes from the values of others.

    values: of the inputs, and all that is computed; tensors: the captured ones.
    """

    def __init__(self, values: dict[Node, Any], tensors: Sequence[cute.Tensor]) -> None:
        self.values, self.tensors = values, tensors

    def of(self, node: Node, known: Callable[[Node], dict[Node, Any]] | None = None) -> Any:
        """The node's value. known: where a node's value is kept, which may be for a row, a column or an element."""
        place = self.values if known is None else known(node)
        if node not in place:
            place[node] = self._computed(node, [self.of(arg, known) for arg in node.args])
        return place[node]

    def _computed(self, node: Node, args: list) -> Any:
        if node.op == "const":
            return TYPES[node.kind](node.value)
        if node.op == "load":
            return self._load(node, args)
        if node.op == "cast":
            return TYPES[node.kind](args[0])
        return TYPES[node.kind](_OPERATIONS[node.op](*args))

    def _load(self, node: Node, args: list) -> Any:
        tensor = self.tensors[node.value]
        places = args or [Int32(0)]  # of a number
        element = tensor[tuple(_within(x, size) for x, size in zip(places, tensor.shape, strict=True))]
        return element != 0 if node.kind == BOOL else TYPES[node.kind](element)


def _within(index: Any, size: Any) -> Any:
    """An index clamped to a dimension."""
    last = type(index)(size - 1)
    return Int32(cutlass.max(cutlass.min(index, last), type(index)(0)))


def over_tile(
    tile: ScoreTile,
    expressions: Expressions,
    positions: "Positions",
    outputs: Iterable[Node],
    write: Callable[..., None],
) -> None:
    """``write(r, c, *values)`` for each of a thread's elements.

    What varies with the row or the column alone is computed once for each: the more numerous of the two one after the
    other, so that few registers hold the others'.
    """
    outputs = tuple(outputs)
    rows, cols = range(len(tile.rows)), range(len(tile.cols))
    of_row: dict[int, dict[Node, Any]] = {r: positions.of_row(tile, r) for r in rows}
    of_col: dict[int, dict[Node, Any]] = {c: positions.of_col(tile, c) for c in cols}
    pairs = ((r, c) for r in rows for c in cols) if len(rows) > len(cols) else ((r, c) for c in cols for r in rows)
    for r, c in pairs:
        of_element: dict[Node, Any] = positions.of_element(tile, r, c)

        def known(node: Node, r: int = r, c: int = c, element: dict = of_element) -> dict[Node, Any]:
            if varies(node):
                return element
            return of_row[r] if node.parts & QUERY else of_col[c] if node.parts & KEY else expressions.values

        write(r, c, *(expressions.of(output, known) for output in outputs))


class Positions:
    """The inputs that vary within a tile: query, key and score.

    last_q, last_k: what positions are clamped to, or None.
    """

    def __init__(self, nodes: Iterable[Node], last_q: Int32 | None, last_k: Int32 | None) -> None:
        self.inputs = [x for x in nodes if x.op in ("query", "key", "acc", "position")]
        self.last_q, self.last_k = last_q, last_k
        self._floats: dict[str, Float32] = {}

    def of_row(self, tile: ScoreTile, r: int) -> dict[Node, Any]:
        return self._of("query", tile.row0, tile.rows[r], self.last_q)

    def of_col(self, tile: ScoreTile, c: int) -> dict[Node, Any]:
        return self._of("key", tile.col0, tile.cols[c], self.last_k)

    def of_element(self, tile: ScoreTile, r: int, c: int) -> dict[Node, Any]:
        return {x: tile.acc[r, c] for x in self.inputs if x.op == "acc"}

    def _of(self, name: str, first: Int32, offset: int, last: Int32 | None) -> dict[Node, Any]:
        values: dict[Node, Any] = {}
        for x in self.inputs:
            if x.op == name:
                values[x] = first + offset if last is None else cutlass.min(first + offset, last)
            elif x.op == "position" and x.args[0].op == name:
                if name not in self._floats:
                    self._floats[name] = Float32(first)
                value = self._floats[name] + Float32(offset)
                values[x] = value if last is None else _min(value, Float32(last))
        return values


# ---- operations ----


def _min(a: Any, b: Any) -> Any:
    return cutlass.min(a, b)


def _max(a: Any, b: Any) -> Any:
    return cutlass.max(a, b)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return cutlass.select_(condition, a, b)


def _floor_divide(a: Any, b: Any) -> Any:
    return arith.floordivsi(a.ir_value(), b.ir_value())


def _remainder(a: Any, b: Any) -> Any:
    """Of the divisor's sign, as Python's."""
    return a - b * type(a)(_floor_divide(a, b))


def _not(a: Any) -> Any:
    return ~a if not isinstance(a, Boolean) else Boolean(arith.xori(a.ir_value(), Boolean(True).ir_value()))


def _bits(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: op(a.ir_value(), b.ir_value())


_TURN = 6.283185307179586
_TURN_HIGH = 6.28125  # so few digits that its multiples are exact
_TURN_LOW = _TURN - _TURN_HIGH


def _reduced(x: Float32) -> Float32:
    """x less whole turns: the device's sine and cosine are exact near 0 alone."""
    turns = cute.math.floor(x * (1.0 / _TURN) + 0.5)
    return fma(turns, Float32(-_TURN_LOW), fma(turns, Float32(-_TURN_HIGH), x))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a * reciprocal(b),
    "neg": lambda a: -a,
    "abs": lambda a: fabs(a) if isinstance(a, Float32) else cutlass.max(a, -a),
    "floordiv": _floor_divide,
    "mod": _remainder,
    "minimum": _min,
    "maximum": _max,
    "clamp_min": _max,
    "clamp_max": _min,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": _bits(arith.andi),
    "or": _bits(arith.ori),
    "xor": _bits(arith.xori),
    "not": _not,
    "shl": _bits(arith.shli),
    "shr": _bits(arith.shrsi),
    "where": _where,
    "exp2": exp2,
    "log2": log2,
    "tanh2": tanh_base2,
    "sigmoid2": lambda x: reciprocal(1.0 + exp2(x)),
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, fastmath=True),
    "sin": lambda x: cute.math.sin(_reduced(x), fastmath=True),
    "cos": lambda x: cute.math.cos(_reduced(x), fastmath=True),
    "floor": cute.math.floor,
    "ceil": cute.math.ceil,
    "trunc": cute.math.trunc,
}
