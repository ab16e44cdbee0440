"""Tiled copies between global memory, shared memory and registers. All functions run inside a trace."""

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import CopyUniversalOp, LoadCacheMode, cpasync, warp

from .swizzle import atom_cols, bits_of


def gmem_tiled_copy(
    dtype: Any, num_threads: int, cols: int, *, asynchronous: bool, bits: int = 128, thread_bits: int = 0
) -> cute.TiledCopy:
    """Copies row-major (rows, cols) tiles between global memory and shared memory or registers.

    A thread copies ``thread_bits`` adjacent bits (default: one vector) in vectors of ``bits`` bits. Adjacent threads
    cover up to 128 bytes of a row: one row of the swizzle atom of ``smem_layout``. The remaining threads cover more
    rows in the same step. With a swizzled layout, ``thread_bits`` must be at least 128: the DSL (4.8.1) computes wrong
    addresses for fewer.
    asynchronous: True for cp.async (global to shared memory; 128 bits bypass L1), False for loads and stores.
    Raises ValueError unless the threads fill whole rows and the vectors contain whole elements.
    """
    if bits not in (16, 32, 64, 128) or bits % bits_of(dtype) or (bits == 16 and asynchronous):
        raise ValueError(
            f"bits={bits}: a copy moves 32, 64 or 128 bits, without cp.async also 16, whole elements of "
            f"{dtype.width} bits"
        )
    own = max(bits, thread_bits) // dtype.width
    threads_per_row = atom_cols(cols, dtype.width) // own
    if num_threads % threads_per_row:
        raise ValueError(
            f"num_threads={num_threads}: must be a multiple of the {threads_per_row} threads of a row"
        )
    if asynchronous:
        cache = LoadCacheMode.GLOBAL if bits == 128 else LoadCacheMode.ALWAYS
        op: Any = cpasync.CopyG2SOp(cache_mode=cache)
    else:
        op = CopyUniversalOp()
    atom = cute.make_copy_atom(op, dtype, num_bits_per_copy=bits)
    threads = cute.make_layout((num_threads // threads_per_row, threads_per_row), stride=(threads_per_row, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, own)))


def ldmatrix_copy_a(tiled_mma: cute.TiledMma, dtype: Any, transpose: bool = False) -> cute.TiledCopy:
    """Loads the A operand by ldmatrix.x4, 16 x 32 bytes per warp. transpose: M is contiguous; 16-bit types only."""
    return cute.make_tiled_copy_A(_ldmatrix(dtype, transpose), tiled_mma)


def ldmatrix_copy_b(tiled_mma: cute.TiledMma, dtype: Any, transpose: bool = False) -> cute.TiledCopy:
    """Loads the B operand by ldmatrix.x4, 16 x 32 bytes per warp. transpose: N is contiguous; 16-bit types only.

    For P V with V stored (keys, dims), use ``transposed(sV)`` as the (N, K) tensor and ``transpose=True``.
    """
    return cute.make_tiled_copy_B(_ldmatrix(dtype, transpose), tiled_mma)


def store_copy_c(
    tiled_mma: cute.TiledMma, dtype: Any, arch: str, transpose: bool = False, columns: int = 16
) -> cute.TiledCopy:
    """Stores an accumulator, already converted to ``dtype``, to row-major shared memory.

    arch: "sm80" stores pairs of elements, "sm90" uses stmatrix (16-bit types).
    transpose: M is contiguous, stmatrix only.
    columns: number of columns (N) that one stmatrix stores, 16 or 8.
    """
    if arch not in ("sm80", "sm90"):
        raise ValueError(f"arch={arch!r}: accepted are 'sm80' and 'sm90'")
    if arch == "sm90" and dtype.width == 16:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose, columns // 4), dtype)
    elif transpose:
        raise ValueError(f"transpose=True: accepted with 16-bit types on 'sm90', not {dtype} on {arch!r}")
    else:
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=2 * dtype.width)
    return cute.make_tiled_copy_C(atom, tiled_mma)


def _ldmatrix(dtype: Any, transpose: bool) -> cute.CopyAtom:
    if dtype.width != 16 and (dtype.width != 32 or transpose):
        raise ValueError(f"dtype={dtype}: ldmatrix serves 16-bit types, and 32-bit ones without transpose")
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), dtype)
