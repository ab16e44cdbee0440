"""Blocks of threads that run at the same time and reach into each other's shared memory."""

from cutlass import Int32, cute


def rank_in_cluster() -> Int32:
    """The running block's number in its cluster."""
    return Int32(cute.arch.block_idx_in_cluster())


@cute.jit
def meet_cluster() -> None:
    """All threads of all blocks of the cluster that have not ended."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def store_in_cluster(pointer: cute.Pointer, value: Int32, rank: Int32) -> None:
    """``value`` to where ``pointer`` points to in shared memory, in the block of that rank."""
    cute.arch.inline_ptx(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1}; st.shared::cluster.u32 [a], {$r2}; }",
        read_only_args=[Int32(pointer.toint()), rank, value],
    )
