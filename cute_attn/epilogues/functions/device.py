"""A lowered graph as CuTe DSL expressions on a score tile in registers."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64, Uint8, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith
from cutlass._mlir_helpers.op import loc_transform
from cutlass.cute.runtime import make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op

from cute_attn.device.math import LARGEST, LOG2_E, exp2, fabs, fma, log2, reciprocal, tanh_base2
from cute_attn.device.score_tile import ScoreTile
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, KEY, LONG, QUERY, Node, ordered
from cute_attn.epilogues.functions.lowering import varies
from cute_attn.epilogues.functions.operations import bounds

TYPES: dict[str, Any] = {BOOL: Boolean, INT: Int32, LONG: Int64, FLOAT: Float32}
ELEMENTS: dict[str, Any] = {
    "bool": Uint8, "uint8": Uint8, "int8": Int8, "int16": Int16, "int32": Int32, "int64": Int64,
    "float16": Float16, "bfloat16": BFloat16, "float32": Float32, "float64": Float64,
}  # fmt: skip
"""The DSL's types by the names of torch's dtypes."""


NUMBERS: dict[str, Any] = {"int": Int32, "float": Float32}
"""Types of numbers that a launch passes, by Python's types."""


def fake_tensor(dtype: str, rank: int, unit_stride: bool) -> Any:
    """A fake of a captured tensor, or of a call's number, for compilation."""
    if dtype in NUMBERS:
        return NUMBERS[dtype](1)
    stride = [cute.sym_int64() for _ in range(rank)]
    if unit_stride:
        stride[-1] = 1
    return make_fake_tensor(ELEMENTS[dtype], tuple(cute.sym_int() for _ in range(rank)), stride=tuple(stride))


@dsl_user_op
def _location(*, loc: Any = None) -> Any:
    """The location that the DSL gives an operation here; None in a build without line info."""
    return loc


@contextlib.contextmanager
def in_source(node: Node) -> Iterator[None]:
    """With line info, give operations the location of the line in the user's function that creates the node."""
    if node.place is None or _location() is None:
        yield
        return
    here = ir.Location.file(*node.place, 0)
    # MLIR's builders read the first, the DSL's operations the second.
    with here, loc_transform(lambda _: here):
        yield


def uniform_roots(*outputs: Node) -> list[Node]:
    """The nodes that are uniform in a work tile and used by varying nodes or outputs; constants are left out."""
    nodes = ordered(*outputs)
    used = [arg for node in nodes if node.depends_on for arg in node.args] + list(outputs)
    return list(dict.fromkeys(x for x in used if not x.depends_on and x.op != "const"))


Row = tuple[int, tuple[Node, ...]]


def row_of(load: Node) -> Row | None:
    """(number of the captured tensor, its leading indices that are uniform in a work tile); None if there are none.

    The last index is never included, so the row is a tensor.
    """
    first = tuple(itertools.takewhile(lambda x: not x.depends_on, load.args[:-1]))
    return (load.value, first) if first and load.depends_on else None


def rows_of(*outputs: Node) -> list[Row]:
    found = (row_of(x) for x in ordered(*outputs) if x.op == "load")
    return list(dict.fromkeys(x for x in found if x is not None))


class Expressions:
    """Computes nodes from the values of others.

    values: inputs and computed values; tensors: captured tensors by number; rows: their slices, see :func:`row_of`.
    """

    def __init__(
        self,
        values: dict[Node, Any],
        tensors: Sequence[Any] | Mapping[int, Any],
        rows: Mapping[Row, cute.Tensor] | None = None,
    ) -> None:
        self.values, self.tensors, self.rows = values, tensors, rows or {}

    def row(self, row: Row) -> cute.Tensor:
        """The slice of a captured tensor at a row's indices."""
        number, indices = row
        tensor = self.tensors[number]
        first = [element_index(x, self.of(x), size) for x, size in zip(indices, tensor.shape, strict=False)]
        return tensor[(*first, *(None,) * (len(tensor.shape) - len(first)))]

    def of(self, node: Node, known: Callable[[Node], dict[Node, Any]] | None = None) -> Any:
        """The node's value. known: returns the dict in which a node's value is stored, of a row, column or element."""
        place = self.values if known is None else known(node)
        if node not in place:
            args = [self.of(arg, known) for arg in node.args]
            with in_source(node):
                place[node] = self._computed(node, args)
        return place[node]

    def _computed(self, node: Node, args: list) -> Any:
        if node.op == "const":
            return TYPES[node.kind](node.value)
        if node.op == "load":
            return self._load(node, args)
        if node.op == "extent":
            number, axis = node.value
            return Int32(self.tensors[number].shape[axis])
        if node.op == "cast":
            return TYPES[node.kind](args[0])
        op = {"distance": "sub", "order": node.value}.get(node.op, node.op)
        return TYPES[node.kind](_OPERATIONS[op](*args))

    def _load(self, node: Node, args: list) -> Any:
        tensor = self.tensors[node.value]
        if not args:
            element = tensor[0] if isinstance(tensor, cute.Tensor) else tensor
        else:
            indices = list(zip(node.args, args, tensor.shape, strict=True))
            row = row_of(node)
            if row is not None and row in self.rows:
                tensor, indices = self.rows[row], indices[len(row[1]) :]
            element = tensor[tuple(element_index(*one) for one in indices)]
        if node.kind == BOOL:
            return element != 0
        if node.dtype == "uint8":  # the DSL extends its sign
            return Int32(element) & 255
        return TYPES[node.kind](element)


def element_index(node: Node, index: Any, size: Any) -> Any:
    """The element's index: a negative index counts from the end; an index out of bounds becomes the nearest one."""
    kind = type(index)
    index = cutlass.min(index, kind(size - 1))
    if bounds(node)[0] >= 0:
        return Int32(index)
    index = Int32(cutlass.max(index, -kind(size)))  # so that 64 bits are left before the end is added
    return cutlass.select_(index < 0, index + Int32(size), index)


def over_tile(
    tile: ScoreTile,
    expressions: Expressions,
    positions: "Positions",
    outputs: Iterable[Node],
    write: Callable[..., None],
) -> None:
    """Call ``write(r, c, *values)`` for each of a thread's elements.

    Values that vary with only the row or only the column are computed once per row or column. The outer loop is over
    the more numerous of the two, so that few values stay in registers. Values that vary with only the distance are
    computed once per diagonal.
    """
    outputs, of_tile = tuple(outputs), expressions.values
    with_distance = positions.with_distance(ordered(*outputs))
    of_diagonal: dict[int, dict[Node, Any]] = {}
    rows, cols = range(len(tile.rows)), range(len(tile.cols))
    of_row: dict[int, dict[Node, Any]] = {r: positions.of_row(tile, r) for r in rows}
    of_col: dict[int, dict[Node, Any]] = {c: positions.of_col(tile, c) for c in cols}
    pairs = itertools.product(rows, cols) if len(rows) > len(cols) else ((r, c) for c in cols for r in rows)
    for r, c in pairs:
        of_element: dict[Node, Any] = positions.of_element(tile, r, c)
        diagonal = of_diagonal.setdefault(tile.rows[r] - tile.cols[c], dict(of_element))

        def known(
            node: Node, r: int = r, c: int = c, element: dict = of_element, diagonal: dict = diagonal
        ) -> dict[Node, Any]:
            if varies(node):
                return diagonal if node in with_distance else element
            return of_row[r] if node.depends_on & QUERY else of_col[c] if node.depends_on & KEY else of_tile

        write(r, c, *(expressions.of(output, known) for output in outputs))


class Positions:
    """The inputs that vary within a tile: query, key, values derived from both, and the accumulator.

    heads: each row's head, if rows have different heads; the head is then an input as well.
    """

    counts_from = False
    """True if key 0 need not be the first key of a block; keys before it are treated as key 0."""

    def __init__(self, nodes: Iterable[Node], heads: tuple = ()) -> None:
        varying = ("query", "key", "acc", "distance", "order", *(("head",) if heads else ()))
        self.inputs, self.heads = [x for x in nodes if x.op in varying], heads
        self._known: dict[tuple, Any] = {}

    def with_distance(self, nodes: Iterable[Node]) -> set[Node]:
        """Nodes that vary only with query - key. nodes: operands first."""
        found: set[Node] = set()
        for x in nodes:
            varying = [arg for arg in x.args if arg.depends_on]
            if x.op in ("distance", "order") or (varying and found.issuperset(varying)):
                found.add(x)
        return found

    def of_row(self, tile: ScoreTile, r: int) -> dict[Node, Any]:
        values = {x: tile.row0 + tile.rows[r] for x in self.inputs if x.op == "query"}
        return values | {x: self.heads[r] for x in self.inputs if x.op == "head"}

    def of_col(self, tile: ScoreTile, c: int) -> dict[Node, Any]:
        key = tile.col0 + tile.cols[c]
        key = cutlass.max(key, 0) if self.counts_from else key
        return {x: key for x in self.inputs if x.op == "key"}

    def of_element(self, tile: ScoreTile, r: int, c: int) -> dict[Node, Any]:
        values: dict[Node, Any] = {x: tile.acc[r, c] for x in self.inputs if x.op == "acc"}
        for x in self.inputs:
            with in_source(x):
                if x.op == "distance":
                    values[x] = self._distance(tile, r, c, TYPES[x.kind], x.args[0].op == "query")
                elif x.op == "order":
                    values[x] = _OPERATIONS[x.value](*self._ordered(tile, r, c))
        return values

    def _kept(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _distance(self, tile: ScoreTile, r: int, c: int, kind: Any, of_query: bool) -> Any:
        """query - key in type ``kind``, from a constant and a value per row, or per column if columns are fewer.

        of_query: False for key - query. That is a subtraction, too, since negating a float 0 gives -0.
        """
        if len(tile.rows) <= len(tile.cols):
            of_row = self._kept(("row", r, kind), lambda: kind(tile.row0 + tile.rows[r] - tile.col0))
            return of_row - kind(tile.cols[c]) if of_query else kind(tile.cols[c]) - of_row
        of_col = self._kept(("col", c, kind), lambda: kind(tile.row0 - tile.col0 - tile.cols[c]))
        return of_col + kind(tile.rows[r]) if of_query else kind(-tile.rows[r]) - of_col

    def _ordered(self, tile: ScoreTile, r: int, c: int) -> tuple[Int32, Int32]:
        """Two numbers that compare like query and key; one of them is a constant."""
        if len(tile.rows) <= len(tile.cols):
            first = self._kept(("row", r, Int32), lambda: tile.row0 + tile.rows[r] - tile.col0)
            return first, Int32(tile.cols[c])
        of_col = self._kept(("col", c, Int32), lambda: tile.row0 - tile.col0 - tile.cols[c])
        return of_col, Int32(-tile.rows[r])


# ---- operations ----


def _floor_divide(a: Any, b: Any) -> Any:
    bits = _bits_of_power(b)
    if bits is not None:
        return arith.shrsi(a.ir_value(), type(a)(bits).ir_value())
    return arith.floordivsi(a.ir_value(), b.ir_value())


def _remainder(a: Any, b: Any) -> Any:
    """The remainder with the divisor's sign, as in Python."""
    if _bits_of_power(b) is not None:
        return arith.andi(a.ir_value(), type(a)(b.value - 1).ir_value())
    return a - b * type(a)(_floor_divide(a, b))


def _bits_of_power(x: Any) -> int | None:
    """n if x is the constant 2**n, else None: a shift or an "and" then replaces a division of nine instructions."""
    value = x.value
    power = isinstance(value, int) and value > 0 and not value & (value - 1)
    return value.bit_length() - 1 if power else None


def _not(a: Any) -> Any:
    return ~a if not isinstance(a, Boolean) else Boolean(arith.xori(a.ir_value(), Boolean(True).ir_value()))


def _signbit(x: Float32) -> Boolean:
    return Int32(arith.bitcast(Int32.mlir_type, x.ir_value())) < 0


def _bits(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: op(a.ir_value(), b.ir_value())


def quotient(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """a / b as torch rounds it. inverse: 1 / b, to 1 ulp."""
    near = a * inverse
    found = fma(fma(-near, b, a), inverse, near)
    return cutlass.select_(found == found, found, near)  # NaN if a number or the quotient is infinite


def _fmod(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """a - trunc(a / b) * b without rounding; each of two rounds takes 23 digits off a quotient below 2^46."""
    size, divisor = fabs(a), fabs(b)
    rest = size
    for _ in range(2):
        rest = fma(-cute.math.trunc(quotient(rest, divisor, fabs(inverse))), divisor, rest)
    rest = cutlass.select_(rest < 0.0, rest + divisor, rest)
    rest = cutlass.select_((divisor > LARGEST) & (size <= LARGEST), size, rest)
    return cutlass.select_(a < 0.0, -rest, rest)


def _is_opposite(rest: Float32, b: Float32) -> Boolean:
    return cutlass.select_(b < 0.0, rest > 0.0, rest < 0.0)


def remainder(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """a - floor(a / b) * b."""
    rest = _fmod(a, b, inverse)
    return cutlass.select_(_is_opposite(rest, b), rest + b, rest)


def floor_quotient(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """floor(a / b), from the remainder as in torch."""
    rest = _fmod(a, b, inverse)
    whole = cute.math.roundeven(quotient(a - rest, b, inverse))
    whole = cutlass.select_(_is_opposite(rest, b), whole - 1.0, whole)
    return cutlass.select_(b == 0.0, a * inverse, whole)


_TURN = 6.283185307179586
_TURN_HIGH = 6.28125  # so few digits that its multiples are exact
_TURN_LOW = _TURN - _TURN_HIGH


def _reduced(x: Float32) -> Float32:
    """x minus a multiple of 2 pi: the device's sine and cosine are exact only near 0."""
    turns = cute.math.floor(x * (1.0 / _TURN) + 0.5)
    return fma(turns, Float32(-_TURN_LOW), fma(turns, Float32(-_TURN_HIGH), x))


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7."""


def _erf(x: Float32) -> Float32:
    size = fabs(x)
    t = reciprocal(fma(size, Float32(0.3275911), Float32(1.0)))
    rest = Float32(_ERF[0])
    for factor in _ERF[1:]:
        rest = fma(rest, t, Float32(factor))
    value = 1.0 - rest * t * exp2(size * size * -LOG2_E)
    return cutlass.select_(x < 0.0, -value, value)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a * reciprocal(b),
    "quotient": quotient,
    "floor_quotient": floor_quotient,
    "remainder": remainder,
    "fmod": _fmod,
    "neg": lambda a: -a,
    "abs": lambda a: fabs(a) if isinstance(a, Float32) else cutlass.max(a, -a),
    "floordiv": _floor_divide,
    "mod": _remainder,
    "minimum": cutlass.min,
    "maximum": cutlass.max,
    "clamp_min": cutlass.max,
    "clamp_max": cutlass.min,
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
    "where": cutlass.select_,
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
    "round": cute.math.roundeven,
    "erf": _erf,
    "signbit": _signbit,
    **{name: getattr(cute.math, name) for name in ("atan", "expm1", "log1p")},
}
