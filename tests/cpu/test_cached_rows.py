"""Rows of a cache in shared memory: boxes make up the tile that wgmma reads; elements of rows that start anywhere."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import registry
from cute_attn.device.copy import RowCopy
from cute_attn.device.key_rows import CacheTables, KeyRows
from cute_attn.device.seqlen import sequence
from cute_attn.device.wgmma import operand_layout
from cute_attn.host.call import is_latent
from cute_attn.kernels.forward_sm80.key_groups import KeyGroup
from cute_attn.kernels.forward_sm80.loads import BlockLoad
from cute_attn.kernels.kvcache_sm80.loads import PagedLoad
from cute_attn.tiles import padded
from cute_attn.traits import Traits


@cute.jit
def offsets(
    whole: cute.Tensor, boxes: cute.Tensor, rows: Constexpr, cols: Constexpr, box: Constexpr, parts: Constexpr
):
    """Of each element, before the swizzle: in the whole tile, and as its box's place plus its offset in a box."""
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
    """Also one whose columns two warpgroups divide."""
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
    with pytest.raises(registry.Unsupported, match=f"head_dim_v is {dim_v} with latent"):
        registry.lookup(Traits.parse(f"kvcache-sm90-bf16-d576x{dim_v}-latent"))


# ---- rows that start anywhere ----

KEYS, ROWS, PAGE = 64, 40, 3
"""Keys of a block, of a sequence, and rows of a page."""


@cute.jit
def load_elements(
    cache: cute.Tensor, table: cute.Tensor | None, found: cute.Tensor, kernel: Constexpr, first: Int32
):
    """A block of keys as all threads load it, the rows [first, ROWS), to a row-major tile."""
    dim, threads = kernel.traits.head_dim, kernel.tile.group_threads
    rows = KeyRows.make(cache, CacheTables(table, None))
    for thread in cutlass.range(threads, unroll=1):
        group = KeyGroup(Int32(0), thread, 1, 4)
        copy = RowCopy(kernel.gmem_load(dim), thread, padded(dim), dim, alignment=1, by_elements=True)
        if cutlass.const_expr(table is None):
            entry = sequence(cache, Int32(0), Int32(1), Int32(0), False)
            BlockLoad(copy, entry, found, Int32(ROWS), group, first).start(Int32(0), Int32(0), False)
        else:
            pages = kernel.page_numbers(copy)
            where = (cache, Int32(1), rows, Int32(0), found, first, Int32(ROWS), group, pages)
            load = PagedLoad(copy, *where)
            load.find(Int32(0))
            load.start(Int32(0), Int32(0), False)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dim", [13, 59, 100, 201])
def test_elements_of_rows_that_start_anywhere(dim, paged):
    """Each is where it belongs; columns and rows beyond are zero, whatever is next to them in memory."""
    traits = Traits("kvcache", "sm80", "fp16", dim, paged=paged, alignment=1)
    kernel = registry.lookup(traits, f"tile_m=64,tile_n={KEYS},num_warps=4,key_groups=1")
    pages = 16
    entry = torch.randn(pages * PAGE, 2, dim).half()
    table = torch.randperm(pages).int()[None, : pages - 2] if paged else None
    # At an odd address, after and before NaN.
    memory = torch.full((entry.numel() + 2 * dim + 1,), torch.nan, dtype=torch.float16)
    shape = (pages, PAGE, 2, dim) if paged else (1, pages * PAGE, 2, dim)
    cache = memory[dim + 1 - dim % 2 :][: entry.numel()].view(shape).copy_(entry.view(shape))
    keys = cache[table[0].long()].flatten(0, 1)[:, 1] if paged else cache[0, :, 1]
    wanted = torch.zeros(KEYS, padded(dim), dtype=torch.float16)
    first = 2
    wanted[first:ROWS, :dim] = keys[first:ROWS]
    found = torch.full((KEYS, padded(dim), 1), torch.nan, dtype=torch.float16)

    def dynamic(x, leading, align):
        return from_dlpack(x, assumed_align=align).mark_layout_dynamic(leading_dim=leading)

    tables = None if table is None else dynamic(table, 1, 4)
    load_elements(dynamic(cache, 3, 2), tables, from_dlpack(found, assumed_align=8), kernel, first)
    assert found[..., 0].equal(wanted)
