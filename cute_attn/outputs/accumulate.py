"""Atomically adds register fragments to fp32 memory to which several CTAs add, and reads the sums.

Memory holds fragments in thread order, not in matrix order, one warp after the other. Value i of lane l, with ``size``
values per thread, is float

    (i // vector * 32 + l) * vector + i % vector        of the warp's 32 * size,

so that a warp accesses whole cache lines with any MMA's fragment. A reader must use the same fragment layout.

:func:`add_fragment` adds registers directly, by one reduction per vector, in the same memory queue as the warp's reads
of shared memory. :func:`stage_fragment` copies them to shared memory instead, and :func:`add_staged` adds from there by
one asynchronous bulk reduction. :func:`send_fragment` stores them to shared memory of another CTA of the cluster.
"""

from cutlass import Float32, Int32, cute

from cute_attn.device.math import on_device

WARP = 32
VECTORS = (1, 2, 4)
"""Numbers of floats that one reduction can add: 1 on all targets, 2 and 4 (red.global.add.v2/.v4.f32) from sm90 on."""


def add_fragment(acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int) -> None:
    """Add ``acc`` (fp32 in registers, in register order) to the fragment of ``thread`` at ``base``.

    base: global memory of all threads' fragments, aligned to 4 * vector bytes. CTAs that add to the same fragment do so
    in any order.
    """
    values = _flat(acc, vector)
    first = base + _first_float(thread, cute.size(values), vector)
    for i in range(0, cute.size(values), vector):
        _reduce(first, i * WARP, [values[i + j] for j in range(vector)])


def load_fragment(
    acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int, more: bool = False
) -> None:
    """Load the sums of :func:`add_fragment` at ``base`` into ``acc``; ``more``: add the sums to acc."""
    values = _flat(acc, vector)
    first = base + cute.assume(_first_float(thread, cute.size(values), vector), divby=vector)
    piece = cute.make_rmem_tensor(cute.make_layout(vector), Float32)
    for i in range(0, cute.size(values), vector):
        cute.autovec_copy(cute.make_tensor(first + i * WARP, cute.make_layout(vector)), piece)
        for j in range(vector):
            values[i + j] = values[i + j] + piece[j] if more else piece[j]


def stage_fragment(acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int) -> None:
    """Store ``acc`` to the fragment of ``thread`` in shared memory at ``base``, aligned to 16 bytes."""
    values = _flat(acc, vector)
    first = base + cute.assume(_first_float(thread, cute.size(values), vector), divby=vector)
    for i in range(0, cute.size(values), vector):
        piece = cute.make_tensor(values.iterator + i, cute.make_layout(vector))
        cute.autovec_copy(piece, cute.make_tensor(first + i * WARP, cute.make_layout(vector)))


def add_staged(staged: cute.Pointer, base: cute.Pointer, floats: int) -> None:
    """By one thread: start adding ``floats`` floats at ``staged``, in shared memory, to ``base``, as a bulk group."""
    cute.arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {4 * floats};",
        read_only_args=[base.toint(), staged.toint()],
    )
    cute.arch.cp_async_bulk_commit_group()


def send_fragment(acc: cute.Tensor, base: Int32, barrier: Int32, thread: Int32, vector: int) -> None:
    """Start storing ``acc`` to the fragment of ``thread`` at ``base``, in shared memory of a CTA of the cluster.

    The stores count their bytes at the mbarrier ``barrier`` of that CTA.
    """
    values = _flat(acc, vector)
    first = base + 4 * _first_float(thread, cute.size(values), vector)
    operands = ", ".join(f"{{$r{j + 2}}}" for j in range(vector))
    for i in range(0, cute.size(values), vector):
        cute.arch.inline_ptx(
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{vector}.f32 "
            f"[{{$r0}} + {4 * i * WARP}], {{{operands}}}, [{{$r1}}];",
            read_only_args=[first, barrier, *(values[i + j] for j in range(vector))],
        )


def _first_float(thread: Int32, size: int, vector: int) -> Int32:
    """The offset of a thread's fragment among the fragments of all threads, ``size`` floats each."""
    return thread // WARP * (WARP * size) + thread % WARP * vector


def _flat(acc: cute.Tensor, vector: int) -> cute.Tensor:
    """acc in one mode, in register order."""
    size = cute.cosize(acc.layout)
    if size != cute.size(acc) or size % vector or vector not in VECTORS:
        raise ValueError(
            f"acc has layout {acc.layout} and vector is {vector}: whole vectors of {VECTORS} are accepted"
        )
    return cute.make_tensor(acc.iterator, cute.make_layout(size))


def _reduce(first: cute.Pointer, offset: int, values: list[Float32]) -> None:
    """first[offset:] += values, by one instruction; on the host by ordinary additions."""
    if not on_device():
        target = cute.make_tensor(first + offset, cute.make_layout(len(values)))
        for i, value in enumerate(values):
            target[i] = target[i] + value
        return
    kind = "f32" if len(values) == 1 else f"v{len(values)}.f32"
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    operands = operands if len(values) == 1 else f"{{{operands}}}"
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.{kind} [{{$r0}} + {4 * offset}], {operands};",
        read_only_args=[first.toint(), *values],
    )
