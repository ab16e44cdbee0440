"""The kernels that make block masks on the CPU: their device code, with warps of one lane."""

import cutlass
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.epilogues.functions.blocks import MaskState, kept_type
from cute_attn.epilogues.functions.epilogue import as_kernels_read
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.kernels.block_kinds import BlockKinds
from cute_attn.kernels.block_lists import BlockCounts, BlockSizes, ListBlocks, ListVisits
from cute_attn.tiles.helpers import BlockKindsTile, BlockListsTile
from cute_attn.traits import LISTED_ROWS, Traits
from layouts.model import no_arguments


def emulated_kinds(mask_mod, batch, nheads, lengths, block_size, kernel_class=BlockKinds):
    """The table of kinds."""
    name, tensors = epilogue_of(None, mask_mod, torch.device("cpu"))
    traits = Traits("block_kinds", "sm80", "bf16", LISTED_ROWS, epilogues=(name,) if name else ())
    assert BlockKinds.supports(traits) is None
    kernel = kernel_class(traits, BlockKindsTile(*block_size))
    predicate = kernel.predicate
    rows, columns = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
    shape = (batch if predicate.batched else 1, nheads if predicate.headed else 1, rows, columns)
    kinds = torch.full(shape, 77, dtype=torch.uint8)
    table, *captured = (dynamic(x) for x in (kinds, *map(as_kernels_read, tensors)))
    with no_arguments():
        compiled = cute.compile(_find, kernel, lengths, table, tuple(captured) or None)
    compiled(table, tuple(captured) or None)
    return kinds


def dynamic(x):
    """A tensor of sizes and strides that the code does not know."""
    return from_dlpack(x).mark_layout_dynamic(leading_dim=x.dim() - 1 if x.stride(-1) == 1 else None)


class ByBounds(BlockKinds):
    """Replaces the evaluation of elements: blocks that bounds do not decide count as partial."""

    def evaluate(self, *block):
        return cutlass.Boolean(True), cutlass.Boolean(True)


@cute.jit
def _find(kernel: Constexpr, lengths: Constexpr, kinds: cute.Tensor, captured):
    """Run all CTAs, of one warp and one thread each; two CTAs share a block of queries."""
    batch, nheads, rows, _ = kinds.shape
    nodes = kernel.predicate.of_queries
    values = tuple(
        cute.make_rmem_tensor(cute.make_layout(kernel.tile.tile_m), kept_type(node)) for node in nodes
    )
    tensors = () if cutlass.const_expr(captured is None) else captured
    seqlen_q, seqlen_k = (Int32(n) for n in lengths)
    for b in cutlass.range(batch):
        for h in cutlass.range(nheads):
            for row in cutlass.range(rows):
                state = MaskState.begin(kernel.predicate, tensors, Int32(b), Int32(h))
                for thread in cutlass.range(3):
                    kernel.keep_queries(state, values, Int32(row), seqlen_q, Int32(thread), 3)
                for group in cutlass.range(2):
                    line = kinds[b, h, row, None]
                    kernel.find(state, values, line, Int32(row), seqlen_q, seqlen_k, Int32(group), Int32(2))


def emulated_lists(kinds):
    """Lists of a table of kinds in both directions, each as ``BlockCounts`` makes them."""
    batch, nheads, rows, columns = kinds.shape
    kernel = ListBlocks(Traits("block_lists", "sm80", "bf16", LISTED_ROWS), BlockListsTile())
    lists = [
        [
            torch.full(shape, -7, dtype=torch.int32)
            for shape in ((batch, nheads, n), (batch, nheads, n, m)) * 2
        ]
        for n, m in ((rows, columns), (columns, rows))
    ]
    arguments = [dynamic(kinds), *(tuple(map(dynamic, own)) for own in lists)]
    with no_arguments():
        compiled = cute.compile(_list, kernel, *arguments)
    compiled(*arguments)
    return lists


@cute.jit
def _list(kernel: Constexpr, kinds: cute.Tensor, of_queries: tuple, of_keys: tuple):
    batch, nheads, rows, columns = kinds.shape
    lines = batch * nheads * (rows + columns)
    for line in cutlass.range(lines + 3):  # the last CTA may have warps beyond them
        kernel.write(kinds, BlockCounts(*of_queries), BlockCounts(*of_keys), Int32(line))


def emulated_visits(kinds, block_size, batch, seqlen_q, nheads, seqlen_k, nheads_kv, in_order=0):
    """The result of :func:`cute_attn.host.block_masks.block_lists`."""
    kernel = ListVisits(Traits("block_visits", "sm80", "bf16", LISTED_ROWS), BlockListsTile())
    rows, columns = (-(-n // LISTED_ROWS) for n in (seqlen_q, seqlen_k))
    shapes = ((rows, 2), (rows, columns), (columns, 2), (columns, rows))
    lists = [torch.full((*kinds.shape[:2], *shape), -7, dtype=torch.int32) for shape in shapes]
    group = nheads // nheads_kv if kinds.shape[1] > 1 else 1
    table, *written = map(dynamic, (kinds, *lists))
    numbers = seqlen_q, seqlen_k, *block_size, group, in_order
    with no_arguments():
        compiled = cute.compile(_visit, kernel, table, tuple(written[:2]), tuple(written[2:]), numbers)
    compiled(table, tuple(written[:2]), tuple(written[2:]))
    return tuple(x.expand(batch, nheads, -1, -1) for x in lists)


@cute.jit
def _visit(kernel: Constexpr, kinds: cute.Tensor, of_queries: tuple, of_keys: tuple, numbers: Constexpr):
    lines = kinds.shape[0] * kinds.shape[1] * (of_queries[0].shape[2] + of_keys[0].shape[2])
    sizes = BlockSizes(*(Int32(n) for n in numbers))
    for line in cutlass.range(lines + 3):
        kernel.write(kinds, of_queries, of_keys, sizes, Int32(line))
