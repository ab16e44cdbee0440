"""Matrix products of an mma.sync kernel: operands in shared memory, and the loop over K that all products use.

An operand is the sum of its terms: a single 16-bit term, or for fp32 the terms of :mod:`cute_attn.device.gemm_terms`.
With several terms, a few steps along K are summed from zero, and their sum is then added to the accumulator in fp32: a
tensor core rounds its sums toward zero, and in long sums that does not average out (Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341).

ptxas hoists ldmatrix as far as registers last, and then spills values with longer lifetimes. It moves no load across
iterations: a loop over K steps, instead of unrolled code, bounds the registers of Q K^T. P V needs no such loop, since
the scores' registers are free by then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

import layouts
from cute_attn.device.math import rematerialize
from cute_attn.device.terms import Terms, multiply
from layouts.mma import row_col_modes, row_col_view, thread_row_col

Dual = tuple[Any, Any]
"""An accumulator or an operand, and its tangent."""


@dataclass(frozen=True)
class SmemOperand:
    """A thread's slice of an MMA operand in shared memory, or of one of its terms, and its register fragment.

    tile: (rows, cols, stage); fragment: (mma, rows, k); view: the fragment retiled for the copy, (copy, subtile, k),
    one ldmatrix per ``subtile``. first_step, first_subtile, offset: start of the term in the tile; ``offset`` is in
    elements and a multiple of the swizzle's period.
    """

    tiled_copy: cute.TiledCopy
    tile: cute.Tensor
    fragment: cute.Tensor
    view: cute.Tensor
    thread: Int32
    first_step: Constexpr = 0
    first_subtile: Constexpr = 0
    offset: Constexpr = 0

    loads_ahead = True
    """B is loaded for all ``together`` steps of :func:`gemm` before any of them is multiplied."""
    width = 2
    """Number of MMAs along N in a sub-tile of B."""

    @staticmethod
    def a(
        tiled_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        tile: cute.Tensor,
        thread: Int32,
        shape: tuple[int, int] | None = None,
        **place: int,
    ) -> "SmemOperand":
        """The A operand (M, K) in ``tile`` (rows, cols, stage); shape: of one term, None for the tile's shape."""
        mma = tiled_mma.get_slice(thread)
        fragment = mma.make_fragment_A(mma.partition_A(_plane(tile, shape)))
        return SmemOperand._of(tiled_copy, tile, fragment, thread, place)

    @staticmethod
    def b(
        tiled_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        tile: cute.Tensor,
        thread: Int32,
        shape: tuple[int, int] | None = None,
        **place: int,
    ) -> "SmemOperand":
        """The B operand (N, K); arguments as for :meth:`a`."""
        mma = tiled_mma.get_slice(thread)
        fragment = mma.make_fragment_B(mma.partition_B(_plane(tile, shape)))
        return SmemOperand._of(tiled_copy, tile, fragment, thread, place)

    @staticmethod
    def _of(
        tiled_copy: cute.TiledCopy, tile: cute.Tensor, fragment: cute.Tensor, thread: Int32, place: dict
    ) -> "SmemOperand":
        view = tiled_copy.get_slice(thread).retile(fragment)
        return SmemOperand(tiled_copy, tile, fragment, view, thread, **place)

    @property
    def subtiles(self) -> int:
        """Number of ldmatrix instructions per K step."""
        return cute.size(self.view, mode=[1])

    @property
    def steps(self) -> int:
        """Number of MMA steps along K."""
        return cute.size(self.fragment, mode=[2])

    @property
    def terms(self) -> Terms:
        """The fragment as terms, for an operand that stays in registers."""
        return (self.fragment,)

    def start(self, stage: Int32) -> Int32:
        """The address of the thread's first vector in ``stage``, rematerialized so that it occupies no register."""
        rows, cols, _ = self.tile.layout.shape
        coords = self.tiled_copy.get_slice(below_1024(rematerialize(self.thread))).partition_S(
            cute.make_identity_tensor((cute.size(rows), cute.size(cols)))
        )
        row, col = coords[0]
        return (self.tile.iterator + cute.crd2idx((row, col, stage), self.tile.layout)).toint()

    def at_step(self, start: Int32, k: Int32) -> Int32:
        """``start`` moved to step k, which may be dynamic."""
        steps = cute.size(self.tile, mode=[1]) * self.tile.element_type.width // 256  # steps of all terms
        k = k + self.first_step if self.first_step else k
        return moved_to_step(self.tile, start, k, steps, lambda n: self._distance(0, n))

    def address(self, start: Int32, subtile: int, k: int) -> cute.Pointer:
        """The address of the thread's vector of a sub-tile, k steps after ``start``."""
        return moved_by(self.tile, start, self._distance(subtile + self.first_subtile, k), 16, self.offset)

    def load(self, start: Int32, subtile: int, k: int, to: int | None = None) -> None:
        """Load the sub-tile k steps after ``start`` into step ``to`` (default k) of the fragment."""
        elements = 128 // self.tile.element_type.width
        source = cute.make_tensor(self.address(start, subtile, k), cute.make_layout(elements))
        cute.copy(self.tiled_copy, source, self.view[None, subtile, k if to is None else to])

    def _distance(self, subtile: int, k: int) -> int:
        """Distance in elements from a thread's first vector to another vector, without the swizzle."""
        plain = cute.make_tensor(self.tile.iterator, unswizzled(self.tile.layout))
        vectors = self.tiled_copy.get_slice(0).partition_S(plain)
        return cute.crd2idx((0, subtile, k, 0), vectors.layout)

    def load_a(self, start: Int32, k: int) -> Terms:
        """Load all sub-tiles of A, k steps after ``start``."""
        for subtile in range(self.subtiles):
            self.load(start, subtile, k)
        return (self.fragment[None, None, k],)

    def load_b(self, start: Int32, subtile: int, k: int) -> Terms:
        """Load a sub-tile of B, k steps after ``start``."""
        self.load(start, subtile, k)
        return (cute.logical_divide(self.fragment, (None, self.width, None))[None, (None, subtile), k],)

    def load_all(self) -> None:
        """Load all steps of the first stage, for an operand that stays in registers."""
        start = self.start(Int32(0))
        for k in range(self.steps):
            for subtile in range(self.subtiles):
                self.load(start, subtile, k + self.first_step, k)


def _plane(tile: cute.Tensor, shape: tuple[int, int] | None) -> cute.Tensor:
    """The first stage of a tile, or a tensor of ``shape`` from which to make a fragment."""
    if shape is None:
        return tile[None, None, 0]
    return cute.make_tensor(tile.iterator, cute.make_layout(shape))


@cute.jit
def gemm(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: Any,
    b: Any,
    stage: Int32,
    unroll: Constexpr,
    a_stage: Int32 | int = 0,
    together: Constexpr = 1,
    factor: Float32 | None = None,
) -> None:
    """acc += A B^T with both operands in shared memory; the loop over K is unrolled by ``unroll``.

    Args:
        a, b: operands with equal numbers of terms.
        together: number of K steps for which A is loaded before B; with several terms they are summed from zero.
        factor: multiplies the product; only with several terms.
    """
    a_start, b_start = a.start(Int32(a_stage)), b.start(stage)
    for first in cutlass.range(0, b.steps, unroll, unroll=1):
        a_here, b_here = a.at_step(a_start, first), b.at_step(b_start, first)
        for k in cutlass.range_constexpr(0, unroll, together):
            own = [a.load_a(a_here, k + i) for i in range(together)]
            _times_b(tiled_mma, acc, own, b, b_here, k, factor)


@cute.jit
def gemm_rs(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: Terms,
    b: Any,
    stage: Int32,
    together: Constexpr = 1,
    factor: Float32 | None = None,
    row_factors: cute.Tensor | None = None,
    ahead: Constexpr = 0,
) -> None:
    """acc += A B^T with A in registers.

    Args:
        a: terms (mma, M, k).
        b, together, factor: see :func:`gemm`.
        row_factors: (2 M), two per M: multiply acc's rows before the sum. Requires ``together`` to cover all of K.
        ahead: maximum number of sub-tiles of B whose products are in flight, or 0 for no limit.
    """
    b_start = b.start(stage)
    for k in cutlass.range_constexpr(0, b.steps, together):
        own = [tuple(term[None, None, k + i] for term in a) for i in range(together)]
        _times_b(tiled_mma, acc, own, b, b_start, k, factor, row_factors, ahead)


@cute.jit
def dual_gemm(tiled_mma: cute.TiledMma, acc: Dual, a: Dual, b: Dual, stage: Int32, unroll: Constexpr) -> None:
    """acc += A B^T for dual numbers in shared memory: each operand and its tangent are in adjacent stages.

    Each element is loaded once for three products. stage: index of B's pair of stages; unroll: see :func:`gemm`.
    """
    starts = [x.start(Int32(i)) for i, x in enumerate(a)]
    starts += [x.start(2 * stage + i) for i, x in enumerate(b)]
    for first in cutlass.range(0, b[0].steps, unroll, unroll=1):
        here = [x.at_step(start, first) for x, start in zip((*a, *b), starts, strict=True)]
        for k in cutlass.range_constexpr(unroll):
            own = [x.load_a(start, k) for x, start in zip(a, here[:2], strict=True)]
            _times_dual(tiled_mma, acc, own, b, here[2:], k)


@cute.jit
def dual_gemm_rs(tiled_mma: cute.TiledMma, acc: Dual, a: Dual, b: Dual, stage: Int32) -> None:
    """Like :func:`dual_gemm`, but with A, (mma, M, k), and its tangent in registers."""
    starts = [x.start(2 * stage + i) for i, x in enumerate(b)]
    for k in cutlass.range_constexpr(b[0].steps):
        _times_dual(tiled_mma, acc, [(x[None, None, k],) for x in a], b, starts, k)


def _times_dual(tiled_mma: cute.TiledMma, acc: Dual, a: list[Terms], b: Dual, starts: list, k: int) -> None:
    """Run one step along K: for each sub-tile, load B and its tangent, then issue the three products."""
    targets = [cute.logical_divide(x, (None, None, b[0].width)) for x in acc]
    for subtile in range(b[0].subtiles):
        total, dot = (x[None, None, (None, subtile)] for x in targets)
        own = [x.load_b(start, subtile, k) for x, start in zip(b, starts, strict=True)]
        multiply(tiled_mma, total, a[:1], own[:1])
        multiply(tiled_mma, dot, a[1:], own[:1])
        multiply(tiled_mma, dot, a[:1], own[1:])


@cute.jit
def gemm_sr(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: SmemOperand, b: cute.Tensor, stage: Int32) -> None:
    """acc += A B^T with B in registers."""
    a_start = a.start(stage)
    for k in cutlass.range_constexpr(a.steps):
        multiply(tiled_mma, acc, [a.load_a(a_start, k)], [(b[None, None, k],)])


@cute.jit
def _times_b(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: list[Terms],
    b: Any,
    start: Any,
    first: Constexpr,
    factor: Float32 | None,
    row_factors: cute.Tensor | None = None,
    ahead: Constexpr = 0,
) -> None:
    """Run the K steps ``a``, from step ``first`` on: load each sub-tile of B, then issue the MMAs that read it."""
    subtiles = cute.logical_divide(acc, (None, None, b.width))
    at_once: Constexpr = len(a) if b.loads_ahead else 1
    zero = rematerialize(b.thread) >> 31 if ahead else None  # a zero that the compiler cannot fold
    for subtile in cutlass.range_constexpr(b.subtiles):
        target, here = subtiles[None, None, (None, subtile)], start
        if cutlass.const_expr(ahead and subtile >= ahead):
            here = _after(start, subtiles[None, None, (None, subtile - ahead)], zero)
        total = target
        if cutlass.const_expr(len(a[0]) > 1):
            total = cute.make_rmem_tensor(cute.make_layout(target.shape), Float32)
            total.fill(0.0)
        elif cutlass.const_expr(row_factors is not None):
            _scale_and_add(target, row_factors, None, None)
        for k in cutlass.range_constexpr(0, len(a), at_once):
            own = [b.load_b(here, subtile, first + k + i) for i in range(at_once)]
            multiply(tiled_mma, total, a[k : k + at_once], own)
        if cutlass.const_expr(len(a[0]) > 1):
            # A vector for a single step: as scalars, streamed backwards have 1% more instructions.
            if cutlass.const_expr(row_factors is None and factor is None and len(a) == 1):
                target.store(target.load() + total.load())
            else:
                _scale_and_add(target, row_factors, total, factor)


def _after(starts: tuple[Int32, ...], results: cute.Tensor, zero: Int32) -> tuple[Int32, ...]:
    """``starts``, made to depend on ``results``, so that loads wait for these."""
    bits = Int32(0)
    for i in range(cute.size(results)):
        bits = bits | results[i].bitcast(Int32)
    return tuple(start | (bits & zero) for start in starts)


@cute.jit
def _scale_and_add(target: cute.Tensor, row_factors: Any, total: Any, factor: Float32 | None) -> None:
    """target = row_factors * target + factor * total; None: factors 1, total 0. ((2, 2), M, N), row_factors (2 M)."""
    for n in cutlass.range_constexpr(cute.size(target, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
            for i in cutlass.range_constexpr(4):
                x = target[i, m, n]
                if cutlass.const_expr(row_factors is not None):
                    x = x * row_factors[i // 2 + 2 * m]
                if cutlass.const_expr(total is not None):
                    x = x + (total[i, m, n] if factor is None else total[i, m, n] * factor)
                target[i, m, n] = x


@dataclass(frozen=True)
class SmemResult:
    """Stores a thread's 16-bit fragment of an accumulator to row-major shared memory.

    tile: (rows, cols), with at least the product's columns. apart: elements from one term to the next.
    """

    tiled_mma: cute.TiledMma
    shape: Constexpr  # (M, N) of the product
    tile: cute.Tensor
    thread: Int32
    apart: Constexpr = 0

    def start(self) -> Int32:
        """The address of the thread's first element, rematerialized so that it occupies no register."""
        rows, cols = self.shape
        row, col = thread_row_col(self.tiled_mma, rows, cols, below_1024(rematerialize(self.thread)))
        return (self.tile.iterator + cute.crd2idx((row, col), self.tile.layout)).toint()

    def address(self, start: Int32, row: int, col: int) -> cute.Pointer:
        """The address of the pair ``row`` rows and ``col`` columns after the first."""
        distance = cute.crd2idx((row, col), unswizzled(self.tile.layout))
        return moved_by(self.tile, start, distance, 2 * self.tile.element_type.width // 8)

    def store(self, terms: Terms, col0: int = 0) -> None:
        """Store ``terms``, with the accumulator's layout, at column ``col0``."""
        modes = row_col_modes(self.tiled_mma, *self.shape)
        start = self.start()
        for i, fragment in enumerate(terms):
            view = row_col_view(fragment, modes)
            pairs = cute.recast_tensor(fragment, Int32)
            pairs = cute.make_tensor(pairs.iterator, cute.make_layout(cute.size(fragment) // 2))
            for r, row in enumerate(modes.rows):
                for c in range(0, len(modes.cols), 2):
                    target = self.address(start, row, modes.cols[c] + col0) + i * self.apart
                    pair = pairs[cute.crd2idx((r, c), view.layout) // 2]
                    word = cute.recast_ptr(target, dtype=Int32)
                    cute.make_tensor(word, cute.make_layout(1))[0] = pair


def below_1024(thread: Int32) -> Int32:
    """The thread index, masked so that the compiler knows it is not negative: divisions become shifts."""
    return thread & Int32(1023)


def moved_by(tile: cute.Tensor, start: Int32, distance: int, align: int, offset: int = 0) -> cute.Pointer:
    """The address ``distance`` elements of ``tile``, without its swizzle, after ``start``, plus ``offset`` elements.

    Without the swizzle, elements are at static offsets from the first one. The swizzle is linear under xor, so one xor
    of the first address accounts for the swizzled bits, and one register serves all addresses.
    """
    element, swizzled = tile.element_type, distance & swizzled_bits(tile.layout)
    moved = start ^ (swizzled * (element.width // 8)) if swizzled else start
    pointer = cute.make_ptr(element, moved, cute.AddressSpace.smem, assumed_align=align)
    return pointer + (distance - swizzled + offset)


def moved_to_step(
    tile: cute.Tensor, start: Int32, k: Int32, steps: int, distance_of: Callable[[int], int]
) -> Int32:
    """``start`` moved to step k of ``steps``, which may be dynamic.

    distance_of: the distance in elements of ``tile`` from the first step to another, without the swizzle.
    """
    size = tile.element_type.width // 8
    step = distance_of(1) if steps > 1 else 0
    # Steps within a row of the layout's atom are equally far apart, and so are atoms.
    row = next((n for n in range(1, steps) if distance_of(n) != n * step), steps)
    atom = distance_of(row) if row < steps else 0
    in_row = k % row * step
    swizzled = in_row & swizzled_bits(tile.layout)
    return (start ^ (swizzled * size)) + (in_row - swizzled + k // row * atom) * size


def unswizzled(layout: Any) -> cute.Layout:
    return layout.outer if isinstance(layout, cute.ComposedLayout) else layout


def swizzled_bits(layout: object) -> int:
    """The bits of an element offset that the layout's swizzle changes."""
    if not isinstance(layout, cute.ComposedLayout):
        return 0
    swizzle = layout.inner
    return ((1 << swizzle.num_bits) - 1) << swizzle.num_base


# ---- wgmma ----


@cute.jit
def start_gemm(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr
) -> None:
    """Issue acc (+)= A B^T and commit it as one wgmma group. acc must not be accessed before a wait for the group."""
    warpgroup.fence()
    issue(tiled_mma, acc, a, b, accumulate)
    warpgroup.commit_group()


@cute.jit
def issue(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr
) -> None:
    """Issue acc (+)= A B^T, one product of a wgmma group."""
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(tiled_mma, acc, a[None, None, k], b[None, None, k], acc)


def operand_layout(rows: int, cols: int, dtype: Any, *, stages: int | None = None, parts: int = 1) -> Any:
    """A shared-memory layout (rows, cols[, stages]), cols contiguous, for TMA and for wgmma with either major mode.

    parts: number of warpgroups that divide the columns. A warpgroup's columns must be whole swizzle atoms, so the
    swizzle is the widest whose atom divides them.
    """
    atom = layouts.wgmma_smem_layout(8, layouts.atom_cols(cols // parts, dtype.width), dtype)
    shape, order = ((rows, cols), (0, 1)) if stages is None else ((rows, cols, stages), (0, 1, 2))
    return cute.tile_to_shape(atom, shape, order=order)
