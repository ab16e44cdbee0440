"""Rows of a paged cache in shared memory: boxes make up the tile that wgmma reads."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import registry
from cute_attn.device.wgmma import operand_layout
from cute_attn.host.call import is_latent
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
