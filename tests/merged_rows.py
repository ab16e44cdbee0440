"""A CTA of the combine kernel on the CPU: its code, all threads through one step after the other."""

import cutlass
from cutlass import Constexpr, Float32, cute


@cute.jit
def merge_rows(
    kernel: Constexpr,
    at: Constexpr,
    partials: tuple,
    memory: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    mSinks: cute.Tensor | None,
):
    """Run all threads between barriers. at: from a thread to its rows; memory: replaces shared memory."""
    threads: Constexpr = kernel.tile.num_threads(kernel.traits)
    shared, outs, lses = kernel.shared_memory(memory.iterator), partials[0].iterator, partials[1].iterator
    for thread in cutlass.range(threads, unroll=1):
        place, own = at(thread)
        kernel.load_lse(lses, own, shared, place)
    for thread in cutlass.range(threads, unroll=1):
        place, own = at(thread)
        kernel.compute_weights(own.count, shared, place)
    for thread in cutlass.range(threads, unroll=1):
        place, own = at(thread)
        acc = cute.make_rmem_tensor(cute.make_layout((4, kernel.tile.vectors(kernel.traits))), Float32)
        acc.fill(0.0)
        if cutlass.const_expr(kernel.tile.in_order):
            row_max, total = kernel.add_in_order(acc, outs, own, shared, place)
        else:
            row_max, largest = kernel.compute_weights(own.count, shared, place)
            loaded = None
            if cutlass.const_expr(kernel.tile.eager):
                loaded = kernel.load_first(outs, own, place)
            total = kernel.add_partials(acc, outs, own, largest, shared, place, loaded)
        if cutlass.const_expr(kernel.tile.groups > 1):
            kernel.store_sums(acc, total, shared, place)
        elif place.exists:
            if cutlass.const_expr(kernel.traits.sinks != ""):
                row_max, total = kernel.add_sink(acc, total, row_max, mSinks, place)
            kernel.store(acc, total, row_max, mO, mLSE, place)
    if cutlass.const_expr(kernel.tile.groups > 1):
        for thread in cutlass.range(threads, unroll=1):
            place, own = at(thread)
            row_max, _ = kernel.compute_weights(own.count, shared, place)
            acc = cute.make_rmem_tensor(cute.make_layout((4, kernel.tile.vectors(kernel.traits))), Float32)
            total = kernel.add_groups(acc, shared, place)
            if cutlass.const_expr(kernel.traits.sinks != ""):
                row_max, total = kernel.add_sink(acc, total, row_max, mSinks, place)
            if place.exists and place.group == 0:
                kernel.store(acc, total, row_max, mO, mLSE, place)
