"""What makes a level a kernel of the package: its traits, its tile and the arguments of its ``__call__``.

A level is registered as a variant of ``forward-sm80`` or ``forward-sm90``, so that the whole laboratory serves it:

    import tour.levels
    attention(q, k, v, causal=True, kernel="sm90:tour5")
    cute-attn --load tour.levels verdict forward-sm90:tour5-bf16-d128-causal --lines

A level's ``launch`` takes mQ, mO (batch, seqlen_q, nheads, head_dim); mK, mV (batch, seqlen_k, nheads_kv, head_dim);
mLSE (batch, nheads, seqlen_q) fp32; the softmax scale; and the number of multiprocessors, which level 7 reads. No level
reads the kernels' other arguments, which serve features that levels decline.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, cute

import layouts
from cute_attn.compiler import registry
from cute_attn.device.math import LOG2_E, exp2
from cute_attn.kernels import fakes
from cute_attn.kernels.base import StepContent, mma_sync_count, wgmma_count
from cute_attn.kernels.copies import Copies
from cute_attn.tiles import Tile
from cute_attn.traits import Traits

HEAD_DIMS = (64, 128)

NoScoreArgs = Annotated[tuple, lambda kernel: (Float32(1.0),)]
"""Arguments of epilogues, which no level reads; the DSL takes no empty tuple."""


@dataclass(frozen=True)
class TourTile(Tile):
    """tile_m queries times tile_n keys at a time, by num_warps warps that compute, K and V in num_stages stages."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int = 0

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Q, and the stages of K and V, after a kilobyte for barriers; nothing without stages."""
        if not self.num_stages:
            return {"none": (0, 0)}
        q, kv = (2 * traits.head_dim * rows for rows in (self.tile_m, self.tile_n * self.num_stages))
        ends = 1024, 1024 + q, 1024 + q + kv, 1024 + q + 2 * kv
        return dict(zip("qkv", itertools.pairwise(ends), strict=True))

    def registers(self, traits: Traits) -> int:
        """Estimate: scores, probabilities and O of a thread, plus about 40."""
        return 40 + 3 * self.tile_n // 4 + traits.head_dim // 2

    def shape_reason(self, traits: Traits) -> str | None:
        """A level's rows and warps are fixed; its keys and, if it has a pipeline, its stages may vary."""
        own: TourTile = registry.kernel_class(traits).TILE
        if (self.tile_m, self.num_warps) != (own.tile_m, own.num_warps):
            return f"tile_m is {self.tile_m} with {self.num_warps} warps; accepted: {own.tile_m} with {own.num_warps}"
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n is {self.tile_n}; accepted: multiples of 16 up to 256"
        if self.num_stages < own.num_stages or (own.num_stages < 2 and self.num_stages > own.num_stages):
            more = "or more" if own.num_stages > 1 else "alone"
            return f"num_stages is {self.num_stages}; accepted: {own.num_stages} {more}"
        return None


@dataclass(frozen=True)
class Level:
    """Forward attention of bf16, full or causal; a subclass has the kernel."""

    traits: Traits
    tile: TourTile

    TILE: ClassVar[TourTile]
    SCORE_MOD: ClassVar[Any] = None
    """The epilogue of levels 4 to 7: (scaled score, query, key, head) -> score. ``with_epilogue`` sets it."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(tile_m, tile_n, head_dim, num_stages)."""
        return self.tile.tile_m, self.tile.tile_n, self.traits.head_dim, self.tile.num_stages

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why no level serves ``traits``, or None."""
        return declined(traits, "forward")

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> TourTile:
        return cls.TILE

    def for_lengths(
        self,
        seqlen_q: int,
        seqlen_k: int,
        group: int,
        target: str = "sm90",
        pairs: int | None = None,
        window: int = 0,
    ) -> "Level":
        """The same kernel for all lengths."""
        return self

    def score_args(self, inputs: Any) -> tuple:
        return (1.0,)

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: NoScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        """Launch; the arguments of every forward kernel."""
        self.launch(mQ, mK, mV, mO, mLSE, softmax_scale, schedule.multiprocessors, stream)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors: Int32, stream: Any) -> None:
        """Launch the level's kernel."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tiled(Level):
    """A level whose loops have tensor core products: levels 2 to 7."""

    FACTORS: ClassVar[int] = 2
    """Exponentials per step for the factors of O, for a thread's two rows, in addition to the scores' exponentials."""
    dtype: ClassVar[Any] = BFloat16

    def copies(self) -> Copies:
        """Operands in shared memory, which ``show`` draws, and the copies whose bank conflicts a verdict counts."""
        found, (tile_m, tile_n, d, stages) = Copies(self, 32 * self.tile.num_warps), self.sizes
        if not stages:
            return found
        areas = []
        for name, rows, count in (("q", tile_m, 1), ("k", tile_n, stages), ("v", tile_n, stages)):
            places = (count,) if stages > 1 else ()
            areas.append(found.area(name, (rows, d, *places), "smem_layout", rows, *places))
        if self.traits.arch == "sm90":
            return found.part("mma-qk", "mma_qk").part("mma-pv", "mma_pv")
        threads, (q, k, v) = 32 * self.tile.num_warps, areas

        def mma() -> Any:
            return layouts.tiled_mma_sm80(BFloat16, self.tile.num_warps)

        def load() -> Any:
            return layouts.gmem_tiled_copy(BFloat16, threads, d, asynchronous=stages > 1)

        how, opcode = ("by cp.async", "LDGSTS") if stages > 1 else ("to shared memory", "STS")
        found.move(f"K {how}", opcode, load, k, "dst").move(f"V {how}", opcode, load, v, "dst")
        found.ldmatrix("Q", "A", mma, q).ldmatrix("K", "B", mma, k)
        return found.ldmatrix("V", "B", mma, v, transpose=True)

    def step_content(self) -> StepContent:
        """Contents of a step of the loop over key blocks, by which ``verdict`` finds the step in the machine code."""
        tile_m, tile_n, d, _ = self.sizes
        warps = self.tile.num_warps
        elements = tile_m * tile_n // (32 * warps)
        if self.traits.arch == "sm80":
            mma, loaded = 2 * mma_sync_count(tile_m, tile_n, d, warps), 0
        else:
            mma = wgmma_count(tile_m, tile_n, d, warps // 4) + wgmma_count(tile_m, d, tile_n, warps // 4)
            loaded = 4 * tile_n * d
        return StepContent(mma, elements + self.FACTORS, elements, warps, async_bytes=loaded)


@dataclass(frozen=True)
class BackwardLevel:
    """The main kernel of a backward of bf16, full or causal; a subclass has the kernel.

    Its tile is of the package's class. ``backward_preprocess`` and ``backward_convert`` follow from it: how many rows a
    block has, and which thread holds which elements of dQ.
    """

    traits: Traits
    tile: Any

    TILE: ClassVar[Any]
    dtype: ClassVar[Any] = BFloat16
    repeats_bits: ClassVar[bool] = False  # dQ is added in any order

    def __post_init__(self) -> None:
        if self.tile != self.TILE:
            raise registry.Unsupported(f"tile is {self.tile}; accepted by this level: {self.TILE} alone")

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why no level serves ``traits``, or None."""
        return declined(traits, "backward")

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> Any:
        return cls.TILE

    def score_args(self, inputs: Any) -> tuple:
        return (1.0,)

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mDO: fakes.HeadRows,
        mLSElog2: fakes.QueryNumbers,
        mMinusD: fakes.QueryNumbers,
        mDQaccum: fakes.Accumulators,
        mDK: fakes.HeadRows,
        mDV: fakes.HeadRows,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.BackwardCounters,
        score_args: NoScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        """Launch; the arguments of the Hopper backward."""
        tensors = (mQ, mK, mV, mDO, mLSElog2, mMinusD, mDQaccum, mDK, mDV)
        self.launch(*tensors, softmax_scale, stream)

    def launch(
        self, mQ, mK, mV, mDO, mLSE, mMinusD, mDQ, mDK, mDV, scale: Float32, stream: cuda.CUstream
    ) -> None:
        """Launch the level's kernel."""
        raise NotImplementedError

    def key_tile(self, index: Int32, n_blocks: Int32, mK, mDK) -> tuple[Int32, Int32, Int32, Int32]:
        """The key block, head of dK and dV, key head and batch of CTA ``index``."""
        heads_dkv = mDK.shape[2]
        head_dkv = index // n_blocks % heads_dkv
        head_kv = head_dkv // (heads_dkv // mK.shape[2])
        return index % n_blocks, head_dkv, head_kv, index // n_blocks // heads_dkv

    def query_heads(self, head_dkv: Int32, mQ, mK, mDK) -> tuple[Int32, Int32, Int32]:
        """The first query head of a head of dK and dV, one past the last, and the steps from one to the next.

        Where few CTAs would share many query heads, the host gives each key head several heads of dK and dV, which it
        sums afterwards. Each visits every splits-th query head.
        """
        splits, group = mDK.shape[2] // mK.shape[2], mQ.shape[2] // mK.shape[2]
        head_kv = head_dkv // splits
        return head_kv * group + head_dkv % splits, (head_kv + 1) * group, splits

    @cute.jit
    def probabilities(
        self,
        S: cute.Tensor,
        modes,
        query: Int32,
        key: Int32,
        shift: Int32,
        seqlen_k: Int32,
        lse,
        scale: Float32,
    ) -> None:
        """S becomes P = exp(scale * S - LSE), 0 for keys beyond the sequence or after the query's own.

        query, key: of S[0, 0]. lse: (rows,) times log2(e).
        """
        for r in cutlass.range_constexpr(len(modes.rows)):
            row = query + modes.rows[r]
            end = cutlass.min(seqlen_k, row + shift + 1) if self.traits.causal else seqlen_k
            for c in cutlass.range_constexpr(len(modes.cols)):
                p = exp2(S[r, c] * (scale * LOG2_E) - lse[row])
                S[r, c] = p if key + modes.cols[c] < end else Float32(0.0)

    @cute.jit
    def write(
        self, acc: cute.Tensor, mma, g: cute.Tensor, key0: Int32, factor: Float32, thread: Int32
    ) -> None:
        """A block of dK or dV, times ``factor``, to the rows of g (seqlen_k, head_dim) that exist."""
        shape = (self.tile.tile_n, self.traits.head_dim)
        modes = layouts.row_col_modes(mma, *shape)
        row, col = layouts.thread_row_col(mma, *shape, thread)
        rows = layouts.row_col_view(acc, modes)
        for r in cutlass.range_constexpr(len(modes.rows)):
            key = key0 + row + modes.rows[r]
            if key < g.shape[0]:
                for c in cutlass.range_constexpr(len(modes.cols)):
                    g[key, col + modes.cols[c]] = (rows[r, c] * factor).to(g.element_type)


def declined(traits: Traits, op: str) -> str | None:
    """Why no level serves ``traits``, or None."""
    plain = Traits(op, traits.arch, "bf16", traits.head_dim, mask=traits.mask, variant=traits.variant)
    if traits != plain or traits.mask not in ("", "causal") or traits.head_dim not in HEAD_DIMS:
        return "accepted by a level of the tour: bf16, head dims 64 and 128, full or causal, nothing else"
    return None


def with_epilogue(level: type[Level], score_mod: Callable[[Any, Any, Any, Any], Any]) -> type[Level]:
    """``level`` with a function of a file as its epilogue, registered as ``NAME_FUNCTION``.

    Raises:
        ValueError: the function has no name in a file, by which its kernel could be kept.
    """
    name = score_mod.__name__
    if score_mod.__qualname__ != name or not name.isidentifier():
        raise ValueError(f"score_mod is {score_mod.__qualname__}; accepted: a function at the top of a file")
    fields = {"SCORE_MOD": staticmethod(score_mod), "__module__": score_mod.__module__}
    changed = type(f"{level.__name__}_{name}", (level,), fields)
    ((_, arch, variant),) = (key for key, cls in registry.KERNELS.items() if cls is level)
    return registry.register(changed, variant=f"{variant}_{name.lower()}", op="forward", arch=arch)
