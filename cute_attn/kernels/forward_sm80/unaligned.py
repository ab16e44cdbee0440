"""Loads of the forward for rows that start anywhere."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute

from cute_attn.device.word_rows import WordRows


@dataclass(frozen=True)
class UnalignedLoad:
    """Loads blocks of one head's Q, K or V; see :class:`cute_attn.kernels.forward_sm80.loads.BlockLoad`."""

    rows: WordRows
    s: cute.Tensor  # (rows of a block, padded head_dim, stage)
    seqlen: Int32

    def start(self, block: Int32, stage: Int32 | int, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its rows exist. Others are zeroed, since 0 * NaN is NaN."""
        row0 = block * cute.size(self.s, mode=[0])
        self.rows.start(self.s[None, None, stage], row0, self.seqlen - row0, whole)

    def finish(self, block: Int32, stage: Int32 | int) -> None:
        """After a thread's copies of ``block`` have arrived, and before the barrier that publishes them."""
        row0 = block * cute.size(self.s, mode=[0])
        self.rows.finish(self.s[None, None, stage], row0, self.seqlen - row0)
