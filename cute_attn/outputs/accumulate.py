"""Adding register fragments into fp32 memory that other blocks add to as well, and reading them back.

Memory holds fragments in the order of threads rather than of a matrix, a warp's after each other: value i of a warp's
lane l, where a thread has ``size`` of them, is the warp's float

    (i // vector * 32 + l) * vector + i % vector        of 32 * size

so that a warp always touches whole lines, whatever MMA the fragment is of. Whoever reads it makes the same fragment.

Registers can be added directly (:func:`add_fragment`), by one reduction a vector. They wait for the memory pipe in the
same queue as everything that the warp reads of shared memory, though. Or they are copied to shared memory
(:func:`stage_fragment`), from where a bulk reduction adds them while the warp goes on (:func:`add_staged`).
"""

from cutlass import Float32, Int32, cute

from cute_attn.device.math import on_device

WARP = 32
VECTORS = (1, 2, 4)
"""Floats that one reduction adds: 1 everywhere, 2 and 4 (red.global.add.v2/.v4.f32) from sm90 on."""


def add_fragment(acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int) -> None:
    """Add ``acc`` (fp32 in registers, read in its own flat order) to the fragment of ``thread`` at ``base``.

    base: global memory of all threads' fragments, aligned to 4 * vector bytes. No order is kept among threads that add
    to the same fragment.
    """
    values = _flat(acc, vector)
    first = base + _first_float(thread, cute.size(values), vector)
    for i in range(0, cute.size(values), vector):
        _reduce(first, i * WARP, [values[i + j] for j in range(vector)])


def load_fragment(
    acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int, more: bool = False
) -> None:
    """Read into ``acc`` what :func:`add_fragment` added up at ``base``; ``more``: add it to what acc holds."""
    values = _flat(acc, vector)
    first = base + cute.assume(_first_float(thread, cute.size(values), vector), divby=vector)
    piece = cute.make_rmem_tensor(cute.make_layout(vector), Float32)
    for i in range(0, cute.size(values), vector):
        cute.autovec_copy(cute.make_tensor(first + i * WARP, cute.make_layout(vector)), piece)
        for j in range(vector):
            values[i + j] = values[i + j] + piece[j] if more else piece[j]


def stage_fragment(acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int) -> None:
    """Copy ``acc`` to the fragment of ``thread`` in shared memory at ``base``, aligned to 16 bytes."""
    values = _flat(acc, vector)
    first = base + cute.assume(_first_float(thread, cute.size(values), vector), divby=vector)
    for i in range(0, cute.size(values), vector):
        piece = cute.make_tensor(values.iterator + i, cute.make_layout(vector))
        cute.autovec_copy(piece, cute.make_tensor(first + i * WARP, cute.make_layout(vector)))


def add_staged(staged: cute.Pointer, base: cute.Pointer, floats: int) -> None:
    """By one thread: start adding ``floats`` of staged fragments to ``base``, as a bulk group."""
    cute.arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {4 * floats};",
        read_only_args=[base.toint(), staged.toint()],
    )
    cute.arch.cp_async_bulk_commit_group()


def _first_float(thread: Int32, size: int, vector: int) -> Int32:
    """Where a thread's fragment begins, of all threads' fragments of ``size``."""
    return thread // WARP * (WARP * size) + thread % WARP * vector


def _flat(acc: cute.Tensor, vector: int) -> cute.Tensor:
    """acc's registers as one mode."""
    size = cute.cosize(acc.layout)
    if size != cute.size(acc) or size % vector or vector not in VECTORS:
        raise ValueError(
            f"acc has layout {acc.layout} and vector is {vector}: whole vectors of {VECTORS} are accepted"
        )
    return cute.make_tensor(acc.iterator, cute.make_layout(size))


def _reduce(first: cute.Pointer, offset: int, values: list[Float32]) -> None:
    """first[offset:] += values, by one instruction; on the host by plain additions."""
    if not on_device():
        place = cute.make_tensor(first + offset, cute.make_layout(len(values)))
        for i, value in enumerate(values):
            place[i] = place[i] + value
        return
    kind = "f32" if len(values) == 1 else f"v{len(values)}.f32"
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    operands = operands if len(values) == 1 else f"{{{operands}}}"
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.{kind} [{{$r0}} + {4 * offset}], {operands};",
        read_only_args=[first.toint(), *values],
    )
