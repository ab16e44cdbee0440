"""Rows of a cache in shared memory: boxes make up the tile that wgmma reads; elements of rows that start anywhere."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import registry
from cute_attn.device.copy import RowCopy
from cute_attn.device.gemm import operand_layout
from cute_attn.device.key_rows import CacheTables, KeyRows
from cute_attn.device.seqlen import sequence
from cute_attn.host.call import is_latent
from cute_attn.kernels import fakes
from cute_attn.kernels.forward_sm80.storage import BlockLoad, KeyGroup
from cute_attn.kernels.kvcache_sm80.kernel import KvcacheSm80, PagedLoad
from cute_attn.reference import emulate
from cute_attn.tiles import padded
from cute_attn.traits import Traits


@cute.jit
def offsets(
    whole: cute.Tensor, boxes: cute.Tensor, rows: Constexpr, cols: Constexpr, box: Constexpr, parts: Constexpr
):
    """Offsets of elements before the swizzle: in the whole tile, and as a box's start plus the offset in the box."""
    dtype = cutlass.BFloat16
    width = layouts.atom_cols(cols // parts, dtype.width)
    tile = operand_layout(rows, cols, dtype, parts=parts).outer
    own = layouts.wgmma_smem_layout(box, width, dtype).outer
    for r in cutlass.range(rows):
        for c in cutlass.range(cols):
            whole[r, c] = Int32(tile((r, c)))
            first = tile((r // box * box, c // width * width))
            boxes[r, c] = Int32(first + own((r % box, c % width)))


@pytest.mark.parametrize(
    ("cols", "parts"), [(32, 1), (64, 1), (96, 1), (128, 1), (256, 1), (320, 2), (64, 2), (512, 2)]
)
@pytest.mark.parametrize(("rows", "box"), [(64, 8), (64, 16), (128, 64), (48, 16), (80, 80)])
def test_boxes_make_up_the_tile(rows, box, cols, parts):
    """This includes tiles whose columns two warpgroups divide."""
    whole, boxes = (torch.full((rows, cols), -1, dtype=torch.int32) for _ in range(2))
    offsets(from_dlpack(whole), from_dlpack(boxes), rows, cols, box, parts)
    assert whole.equal(boxes)
    width = layouts.atom_cols(cols // parts, 16)
    # A swizzle repeats after 8 rows of an atom, so that it is the same at each box's start.
    assert not (whole[::box, ::width] % (8 * width)).any()
    assert whole.flatten().sort()[0].equal(torch.arange(rows * cols, dtype=torch.int32))


@cute.jit
def latent(keys: cute.Tensor, values: cute.Tensor, kernel: Constexpr, columns: Constexpr):
    """Offsets of the first columns of a stage of keys, and of values, with their swizzles."""
    tile, dim = kernel.tile, kernel.traits.head_dim
    of_keys, of_values = kernel.smem_layout(tile.tile_n, dim, 1), kernel.values_layout(1)
    assert str(of_keys.inner) == str(of_values.inner)
    for r in cutlass.range(tile.tile_n):
        for c in cutlass.range(columns):
            keys[r, c], values[r, c] = Int32(of_keys.outer((r, c, 0))), Int32(of_values.outer((r, c, 0)))


@pytest.mark.parametrize(("dim", "dim_v"), [(576, 512), (320, 128), (512, 376), (264, 256)])
def test_latent_values_are_where_keys_are(dim, dim_v):
    kernel = registry.lookup(Traits.parse(f"kvcache-sm90-bf16-d{dim}x{dim_v}-latent"))
    keys, values = (torch.full((kernel.tile.tile_n, dim_v), -1, dtype=torch.int32) for _ in range(2))
    latent(from_dlpack(keys), from_dlpack(values), kernel, dim_v)
    assert keys.equal(values)


@pytest.mark.parametrize("dim_v", [64, 8, 320, 136])
def test_values_of_other_widths_are_loaded_on_their_own(dim_v):
    """Two warpgroups would read narrower swizzle atoms."""
    keys = torch.empty(1, 16, 1, 576, dtype=torch.bfloat16)
    assert not is_latent(keys, keys[..., :dim_v]) and is_latent(keys, keys[..., :512])


# ---- rows that start anywhere ----

KEYS, ROWS, PAGE = 64, 40, 3
"""Keys of a block, of a sequence, and rows of a page."""


class WithoutCpAsync(KvcacheSm80):
    """The same copies by loads and stores, which run on the host. Out of bounds they write nothing."""

    def gmem_load(self, head_dim):
        return layouts.gmem_tiled_copy(
            self.dtype,
            self.tile.group_threads,
            padded(head_dim),
            asynchronous=False,
            bits=self.dtype.width * self.traits.alignment,
            thread_bits=128,
        )


@cute.jit
def load(given: tuple, kernel: Constexpr):
    """A block of keys as all threads load it, the rows [first, ROWS). memory: for the kernel's shared memory."""
    cache, table, memory, found, first = given
    traits, threads = kernel.traits, kernel.tile.group_threads
    dim, rows = traits.head_dim, KeyRows.make(cache, CacheTables(table, None))
    target = cute.make_tensor(memory.iterator, kernel.smem_layout(KEYS, dim, 1))
    for thread in cutlass.range(threads, unroll=1):
        group = KeyGroup(Int32(0), thread, 1, 4)
        how = {"alignment": traits.alignment, "by_elements": kernel.loads_elements}
        copy = RowCopy(kernel.gmem_load(dim), thread, padded(dim), dim, **how)
        if cutlass.const_expr(table is None):
            entry = sequence(cache, Int32(0), Int32(1), Int32(0), False)
            BlockLoad(copy, entry, target, Int32(ROWS), group, first).start(Int32(0), Int32(0), False)
        else:
            pages = kernel.page_numbers(copy)
            where = (cache, Int32(1), rows, Int32(0), target, first, Int32(ROWS), group, pages)
            paged = PagedLoad(copy, *where)
            paged.find(Int32(0))
            paged.start(Int32(0), Int32(0), False)
    for row in cutlass.range(KEYS):
        for col in cutlass.range(padded(dim)):
            found[row, col] = target[row, col, 0]


@pytest.mark.parametrize(
    ("dim", "alignment", "paged"),
    [
        *((dim, 1, paged) for dim in (13, 59, 100, 201) for paged in (False, True)),
        *((34, 2, True), (250, 2, True), (100, 4, True), (76, 4, True)),
    ],
)
def test_rows_that_start_anywhere(dim, alignment, paged):
    """Each element is in its place; columns and rows out of bounds are zero, whatever lies next to them in memory."""
    traits = Traits("kvcache", "sm80", "fp16", dim, paged=paged, alignment=alignment)
    tile = registry.lookup(traits, f"tile_m=64,tile_n={KEYS},num_warps=4,key_groups=1").tile
    kernel = (KvcacheSm80 if alignment == 1 else WithoutCpAsync)(traits, tile)
    pages, heads = 16, 2
    table = torch.randperm(pages).int()[None, : pages - 2] if paged else None
    # Between multiples of more elements, after and before NaN.
    size, before = pages * PAGE * heads * dim, dim // 16 * 16 + 16 + alignment
    around = torch.full((before + size + dim,), torch.nan, dtype=torch.float16)
    shape = (pages, PAGE, heads, dim) if paged else (1, pages * PAGE, heads, dim)
    cache = around[before:][:size].view(shape).copy_(torch.randn(shape))
    keys = cache[table[0].long()].flatten(0, 1)[:, 1] if paged else cache[0, :, 1]
    wanted, first = torch.zeros(KEYS, padded(dim), dtype=torch.float16), 2
    wanted[first:ROWS, :dim] = keys[first:ROWS]
    memory = torch.full((KEYS * padded(dim),), torch.nan if alignment == 1 else 0.0, dtype=torch.float16)
    found = torch.full_like(wanted, torch.nan)

    declared = (
        fakes.rows(cutlass.Float16, 4, alignment),
        fakes.plain(Int32, 2) if paged else None,
        fakes.rows(cutlass.Float16, 1),
        fakes.rows(cutlass.Float16, 2),
        Int32(0),
    )

    @cute.jit
    def host(values: tuple):
        load(emulate._arguments(declared, values), kernel)

    compiled = cute.compile(host, emulate._values(declared), options="--gpu-arch sm_90a")
    compiled(emulate._values(declared, (cache, table, memory, found, first)))
    assert found.equal(wanted)
