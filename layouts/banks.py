"""Bank conflicts of a copy with a shared-memory layout, counted without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cutlass.cute.nvgpu import cpasync, warp

from .model import SmemMap, ThreadValueMap, read_copy, read_smem, trace
from .swizzle import BANK_BYTES, BANKS

_WARP = 32
_READS_SMEM = (warp.LdMatrix8x8x16bOp,)
_WRITES_SMEM = (warp.StMatrix8x8x16bOp, cpasync.CopyG2SOp)


@dataclass(frozen=True)
class BankConflicts:
    """The cost of copying one whole tile.

    instructions: warp-wide instructions. wavefronts: shared-memory wavefronts, each of at most 128 bytes. minimum: the
    wavefronts needed without conflicts. ways: maximum wavefronts of one group of lanes (1 without conflicts).
    """

    instructions: int
    wavefronts: int
    minimum: int
    ways: int

    @property
    def extra(self) -> int:
        """Wavefronts due to conflicts."""
        return self.wavefronts - self.minimum


def bank_conflicts(
    copy: Callable[[], Any],
    layout: Callable[[], Any],
    dtype: Any,
    *,
    side: str | None = None,
    arch: str = "sm_90a",
) -> BankConflicts:
    """Counts the wavefronts of a tiled copy over a whole shared-memory tile (its first stage).

    copy and layout are functions that build the copy and the layout, such as ``lambda: smem_layout(128, 64, dtype)``;
    they are called in a trace. side: "src" or "dst", the side of the copy in shared memory; not needed for ldmatrix,
    stmatrix and cp.async.
    Model: lanes are served in groups: 32 lanes if each accesses 4 bytes, 16 for 8 bytes, 8 for 16 bytes (including
    ldmatrix's row addresses). In one wavefront, a bank serves one 4-byte word to any number of lanes.
    Raises ValueError if the copy does not divide the tile, or a thread's vector is not contiguous and aligned there.
    """

    def read() -> tuple[ThreadValueMap, SmemMap]:
        built = copy()
        return read_copy(built, side or _smem_side(built)), read_smem(layout(), dtype)

    threads, smem = trace(read, arch)
    groups = _lane_groups(threads, smem)
    wavefronts, words = _wavefronts(groups)
    vector_bytes = threads.vector * smem.width // 8
    return BankConflicts(
        instructions=len(groups) * _lanes_together(vector_bytes) // _WARP,
        wavefronts=int(wavefronts.sum()),
        minimum=int((-(-words // BANKS)).sum()),
        ways=int(wavefronts.max()),
    )


def _smem_side(copy: Any) -> str:
    if isinstance(copy.op, _READS_SMEM):
        return "src"
    if isinstance(copy.op, _WRITES_SMEM):
        return "dst"
    raise ValueError(f"side=None: accepted for {type(copy.op).__name__}: 'src' or 'dst'")


def _lanes_together(vector_bytes: int) -> int:
    return min(_WARP, 128 // max(vector_bytes, BANK_BYTES))


def _lane_groups(threads: ThreadValueMap, smem: SmemMap) -> np.ndarray:
    """The 4-byte words that each group of lanes accesses, over all steps of the copy: (groups, words)."""
    offsets = smem.offsets if smem.offsets.ndim == 2 else smem.offsets[:, :, 0]
    (rows, cols), (step_rows, step_cols) = offsets.shape, threads.shape
    if rows % step_rows or cols % step_cols:
        raise ValueError(
            f"layout is {rows} x {cols}; accepted: multiples of {step_rows} x {step_cols}, a step of the copy"
        )
    if threads.row.shape[0] % _WARP:
        raise ValueError(f"copy has {threads.row.shape[0]} threads; accepted: multiples of {_WARP}")
    row = np.arange(0, rows, step_rows)[:, None, None, None] + threads.row
    col = np.arange(0, cols, step_cols)[None, :, None, None] + threads.col
    vectors = offsets[row, col].reshape(*row.shape[:1], *col.shape[1:3], -1, threads.vector)
    vector_bytes = threads.vector * smem.width // 8
    first = vectors[..., 0] * smem.width // 8
    if (np.diff(vectors, axis=-1) != 1).any() or (first % vector_bytes).any():
        raise ValueError(
            f"layout is {smem.text}; accepted: the copy's vectors of {vector_bytes} bytes contiguous and aligned"
        )
    # (row step, col step, thread, vector) -> (group, lane).
    lanes = _lanes_together(vector_bytes)
    grouped = first.swapaxes(-1, -2).reshape(-1, lanes)
    words = grouped[..., None] // BANK_BYTES + np.arange(max(1, vector_bytes // BANK_BYTES))
    return words.reshape(len(grouped), -1)


def _wavefronts(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(wavefronts, distinct words) of each group: every distinct word of a bank needs a separate wavefront."""
    words = np.sort(groups, axis=1)
    distinct = np.ones(words.shape, dtype=bool)
    distinct[:, 1:] = words[:, 1:] != words[:, :-1]
    load = np.zeros((len(words), BANKS), dtype=np.int64)
    group = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    np.add.at(load, (group[distinct], words[distinct] % BANKS), 1)
    return load.max(axis=1), distinct.sum(axis=1)
