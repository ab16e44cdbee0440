"""A lowered graph as CuTe DSL expressions: its values on a score tile in registers, or their bounds over a block."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64, Uint8, cute
from cutlass._mlir import ir
from cutlass._mlir_helpers.op import loc_transform
from cutlass.cutlass_dsl import dsl_user_op

from cute_attn.device.fakes import plain, strided
from cute_attn.device.score_tile import ScoreTile
from cute_attn.epilogues.functions.device_operations import (
    Interval,
    all_of,
    bounds_of,
    known_if,
    on_device,
    point,
)
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
    return (plain if unit_stride else strided)(ELEMENTS[dtype], rank)


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
        return TYPES[node.kind](on_device(node).value(*args))

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
                    values[x] = on_device(x).value(*self._ordered(tile, r, c))
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


class Intervals:
    """Bounds of a graph's nodes.

    known: bounds of varying nodes without operands; expressions: values of the nodes that do not vary.
    """

    def __init__(self, known: dict[Node, Interval], expressions: Expressions) -> None:
        self.known, self.expressions = dict(known), expressions

    def of(self, node: Node) -> Interval:
        if node not in self.known:
            self.known[node] = self._found(node)
        return self.known[node]

    def _found(self, node: Node) -> Interval:
        if not node.depends_on:
            return point(node.kind, node.value if node.op == "const" else self.expressions.of(node))
        args = [self.of(arg) for arg in node.args]
        return self._element(node, args) if node.op == "load" else bounds_of(node, args)

    def _element(self, node: Node, indices: Sequence[Interval]) -> Interval:
        """The interval of a captured tensor's element, known only if the whole block reads the same element."""
        one = all_of(index.low == index.high for index in indices)
        places = dict(zip(node.args, (index.low for index in indices), strict=True))
        element = self.expressions.of(node, lambda x: places if x is node or x in places else {})
        return known_if(one, node.kind, point(node.kind, element))
