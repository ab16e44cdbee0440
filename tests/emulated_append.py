"""The append kernel on the CPU: its code, every thread of every CTA, behind the host code that launches it."""

import functools

import cutlass
from cutlass import Constexpr, cute

from cute_attn.compiler import arguments
from cute_attn.device.key_rows import KeyRows
from cute_attn.kernels.append_kv import AppendKv
from cute_attn.reference import emulate
from cute_attn.rows.new_rows import number_of_rows
from cute_attn.tiles.inference import AppendTile
from cute_attn.traits import Traits
from tests import machine


@cute.jit
def append(given: tuple, kernel: Constexpr):
    """Run every CTA and thread, one after the other, including CTAs beyond the grid's second extent."""
    mKcache, mVcache, tables, new, angles, queries = given
    key_rows = KeyRows.make(mKcache, tables)
    vectors: Constexpr = 1024
    for number in cutlass.range(number_of_rows(new.k), unroll=1):
        for vector in cutlass.range(vectors, unroll=1):
            kernel.append_vector(mKcache, mVcache, key_rows, new, angles, number, vector)
    if cutlass.const_expr(queries is not None):
        for number in cutlass.range(number_of_rows(queries.q), unroll=1):
            for vector in cutlass.range(vectors, unroll=1):
                kernel.rotate_query(queries, angles, number, vector)


@functools.cache
def compiled(traits: Traits):
    kernel = AppendKv(traits, AppendTile())
    fakes = arguments.fakes(kernel)

    @cute.jit
    def host(values: tuple):
        append(emulate._arguments(fakes, values), kernel)

    return cute.compile(host, emulate._values(fakes), options="--gpu-arch sm_90a"), fakes


def launched(kernel: AppendKv, target: str):
    """Replaces a launch: runs the kernel on the CPU, and checks the tensors against the kernel's fakes."""
    function, fakes = compiled(kernel.traits)
    return lambda given: function(emulate._values(fakes, tuple(vars(given).values())))


def patch(monkeypatch) -> None:
    """CUDA launches accept CPU tensors, in fp16, and run the append kernel on the CPU."""
    machine.device(monkeypatch)
    machine.kernels(monkeypatch, launched)
