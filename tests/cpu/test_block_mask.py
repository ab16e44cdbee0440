"""Block masks: their lists, the reference, and the forward kernels' visits of listed blocks, emulated on the CPU."""

import operator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cute_attn import attention, attention_varlen
from cute_attn.api import operators
from cute_attn.api.attention import attention_varlen_backward
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host import block_masks
from cute_attn.host.backward import BiasGradient
from cute_attn.host.block_masks import FULL, PARTIAL, Packed, block_lists, epilogue_of_block_mask, kinds_of
from cute_attn.reference import Lengths
from cute_attn.reference.tilings import TILINGS, TRANSPOSED, Scores
from cute_attn.traits import LISTED_ROWS
from tests import refusals
from tests.compared import same
from tests.tensors import int32

DOCUMENT = torch.tensor([0] * 130 + [1] * 300 + [2] * 400)


def causal_document(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (DOCUMENT[q_idx] == DOCUMENT[kv_idx])


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 40 + 60 * (h % 2)


def blocks_of(*rows):
    """A BlockMask without a function: the partial blocks that each row lists."""
    most = max(map(len, rows))
    counts = torch.tensor([len(row) for row in rows])[None, None]
    indices = torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])[None, None]
    columns = 1 + max(map(max, filter(None, rows)))
    indices = torch.nn.functional.pad(indices, (0, columns - most))
    return BlockMask.from_kv_blocks(counts, indices)


def full_blocks(mask_mod):
    """A BlockMask with one full block per row, the last one, and no partial ones: its function hides nothing."""
    none = torch.zeros(1, 1, 3, dtype=torch.int32)
    indices = torch.arange(3).expand(1, 1, 3, 3).int().contiguous()
    last = indices.flip(-1).contiguous()
    return BlockMask.from_kv_blocks(none, indices, none + 1, last, mask_mod=mask_mod)


def qkv(batch=2, seqlen_q=300, seqlen_k=300, nheads=4, nheads_kv=2, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    sizes = ((seqlen_q, nheads), (seqlen_k, nheads_kv), (seqlen_k, nheads_kv))
    return [torch.randn(batch, *size, head_dim, generator=generator) for size in sizes]


def test_blocks_without_a_function():
    """Unlisted blocks stay hidden where torch's eager FlexAttention would see all keys."""
    q, k, v = qkv(seqlen_q=300, seqlen_k=384)
    rows = ((0, 2), (1,), ())
    got = attention(q, k, v, block_mask=blocks_of(*rows))
    visible = torch.zeros(384, 384, dtype=torch.bool)
    for i, row in enumerate(rows):
        for j in row:
            visible[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = True
    want = attention(q, k, v, bias=torch.where(visible[:300], 0.0, -torch.inf)[None, None])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("block_size", [(128, 128), (64, 32), (256, 128), (96, 384)])
def test_lists_are_of_the_blocks_with_visible_keys(block_size):
    """Lists of blocks of 128 agree with the mask of every element."""
    seqlen_q, seqlen_k, heads = 500, 700, 4
    mask = create_block_mask(window, None, heads, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block_size)
    lists = block_lists(kinds_of(mask), block_size, 1, seqlen_q, heads, seqlen_k, 2)
    index = [torch.arange(n) for n in (heads, seqlen_q, seqlen_k)]
    visible = window(0, index[0][:, None, None], index[1][:, None], index[2])
    grown = torch.zeros(heads, -(-seqlen_q // 128) * 128, -(-seqlen_k // 128) * 128, dtype=torch.bool)
    grown[:, :seqlen_q, :seqlen_k] = visible
    seen = grown.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).any(4).any(2)
    key_counts, key_blocks, query_counts, query_blocks = lists
    shared = seen.unflatten(0, (2, 2)).any(1).repeat_interleave(2, 0)
    for wanted, counts, blocks in ((seen, key_counts, key_blocks), (shared.mT, query_counts, query_blocks)):
        for head in range(heads):
            for row in range(wanted.shape[1]):
                full, end = (-(-n // 128) for n in counts[0, head, row].tolist())
                listed = (blocks[0, head, row, :end] // 2).tolist()
                assert set(listed) >= set(wanted[head, row].nonzero().flatten().tolist())
                assert len(set(listed)) == end and 0 <= full <= end
                if block_size == (128, 128):
                    assert set(listed) == set(wanted[head, row].nonzero().flatten().tolist())
                reaches = (
                    wanted.shape[2] - 1
                )  # beyond the sequence: masked, last, not all of its rows visited
                if reaches in listed:
                    assert listed.index(reaches) == end - 1 >= full
                    assert counts[0, head, row, 1] % 128 == (seqlen_k if wanted is seen else seqlen_q) % 128


def test_full_blocks_need_no_mask():
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    counts, blocks, _, _ = block_lists(kinds_of(mask), mask.BLOCK_SIZE, 1, 512, 1, 512, 1)
    assert counts[0, 0].tolist() == [[128 * i, 128 * (i + 1)] for i in range(4)]
    listed = [(row[: n // 128] // 2).tolist() for row, (_, n) in zip(blocks[0, 0], counts[0, 0], strict=True)]
    assert listed == [[*range(i), i] for i in range(4)]
    assert (kinds_of(mask)[0, 0].diagonal() == PARTIAL).all() and kinds_of(mask)[0, 0, 3, 0] == FULL


def test_keys_beyond_the_sequence_are_masked_for_all_queries():
    """Their scores are 0, so if a query's other scores are far below, P would be infinite and dQ NaN."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    _, _, counts, blocks = block_lists(kinds_of(mask), mask.BLOCK_SIZE, 1, 512, 1, 200, 1)
    assert counts[0, 0].tolist() == [[384, 512], [0, 384]]
    # The first of these blocks is partial. The others are full: the mask itself hides nothing in them.
    assert blocks[0, 0, 1, :3].tolist() == [2 * 1 + 1, 2 * 2, 2 * 3]


@pytest.mark.parametrize("lengths", [(128, 512), (512, 128), (128, 128)])
def test_lists_have_unit_strides(lengths):
    """Kernels are compiled for unit strides, so a list of a single block has one too."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, *lengths, device="cpu")
    made = block_lists(kinds_of(mask), mask.BLOCK_SIZE, 2, lengths[0], 4, lengths[1], 2)
    assert [x.stride(-1) for x in made] == [1] * 4


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_lists_that_a_transform_meets_first_outlive_it(transform):
    q = torch.randn(1, 300, 1, 16)
    mask = create_block_mask(causal_document, None, None, 300, 300, device="cpu")
    transform(lambda x: attention(x, x, x, block_mask=mask).sum())(q)
    kept = block_masks.tables_of(mask, (1, 300, 1, 300, 1))
    assert kept is not None
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in kept)


def test_a_bias_gradient_is_zero_where_no_block_is_listed(monkeypatch):
    calls, (q, k, v) = [], qkv()
    monkeypatch.setattr(operators, "forward", lambda call: calls.append(call) or (call.q, call.q, None))
    mask = create_block_mask(causal_document, None, None, 300, 300, device="cpu")
    bias = torch.zeros(2, 4, 300, 300)
    for block_mask in (None, mask):
        attention(q, k, v, bias=bias, block_mask=block_mask)
    assert [BiasGradient.of(call, False).clear for call in calls] == [False, True]


def test_equal_masks_share_a_kernel():
    names = set()
    for n in (300, 700):
        mask = create_block_mask(causal_document, None, None, n, n, device="cpu")
        names.add(epilogue_of_block_mask(mask, *qkv(seqlen_q=n, seqlen_k=n)[:2])[0])
    assert len(names) == 1


# ---- visits ----

LENGTHS_Q, LENGTHS_K = [300, 0, 130, 40], [200, 70, 300, 0]


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 30 + 60 * b + 20 * h


def blocks_of_each_head():
    """Different blocks for each head, without a function: a function would hide the unlisted blocks itself."""
    one, other = (blocks_of(*rows) for rows in (((0, 2), (1,), (2,)), ((1,), (0, 2), (0,))))
    lists = ((x.kv_num_blocks, x.kv_indices) for x in (one, other))
    return BlockMask.from_kv_blocks(*(torch.cat(both, 1) for both in zip(*lists, strict=True)))


def made(function, batch=None, heads=None, keys=300, block_size=128):
    return create_block_mask(function, batch, heads, 300, keys, device="cpu", BLOCK_SIZE=block_size)


MASKS = {
    "document": lambda: made(causal_document),
    "causal": lambda: made(lambda b, h, i, j: i >= j),
    "window": lambda: made(window, heads=2),
    "small blocks": lambda: made(window, heads=2, block_size=32),
    "of each": lambda: made(near, 4, 2),
    "small blocks of each": lambda: made(near, 4, 2, 384, 32),
    "blocks": lambda: blocks_of((0, 2), (1,), ()),
    "full blocks": lambda: full_blocks(causal_document),
    "blocks of each head": blocks_of_each_head,
}


def emulated(case, are_packed, nheads_kv):
    """One sequence of 300 or several packed ones: arguments of kernels and of the definition, each with its lengths."""
    problem = Scores.random(4 if are_packed else 1, 2, 300, 300)
    both, given, packed = ([300], [300]), (problem.q, problem.k[:, :, :nheads_kv]), None
    lengths = each = Lengths()
    if are_packed:
        both, given = (LENGTHS_Q, LENGTHS_K), (problem.q[0], problem.k[0, :, :nheads_kv])
        used = [int32(*own) for own in both]
        starts = tuple(torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in used)
        packed = Packed(starts, (4, 300, 2, 300, nheads_kv))
        lengths, each = Lengths(*starts, None, None, 300, 300), Lengths(None, None, *used)
    name, tensors = epilogue_of_block_mask(MASKS[case](), *given, packed)
    problem = replace(problem, inputs=ScoreInputs(extra={name: tensors}))
    return (
        name,
        tensors,
        [*zip(*both, strict=True)],
        *(replace(problem, lengths=own) for own in (lengths, each)),
    )


def visited(counts, rows_of_tile, columns_of_tile, tiles):
    """How many of the other side's blocks each block of a tile visits by its list, of every sequence and head."""
    row = torch.arange(tiles) * rows_of_tile // LISTED_ROWS
    found = (counts[:, :, row, 1] + columns_of_tile - 1) // columns_of_tile
    return found.expand(-1, 2, -1)


@pytest.mark.parametrize(
    ("case", "tiling", "are_packed"),
    [
        ("document", "warps4x1-128x32", False),
        ("window", "warps2x2-64x64", False),
        ("blocks", "wgmma2-64x128-along-n", False),
        ("full blocks", "warps4x1-128x32", False),
        ("small blocks", "wgmma2-64x128-along-n", False),
        ("window", "wgmma1-64x80", False),
        ("causal", "wgmma2-64x128-along-n", True),
        ("of each", "warps4x1-128x32", True),
        ("small blocks of each", "warps2x2-64x64", True),
        ("blocks", "warps2x2-64x64", True),
        ("full blocks", "wgmma2-64x128-along-n", True),
    ],
)
def test_kernels_visit_listed_blocks(case, tiling, are_packed):
    """Blocks of 80 keys are no divisions of listed ones: that tiling visits all."""
    name, tensors, lengths, problem, each = emulated(case, are_packed, nheads_kv=2)
    made = TILINGS[tiling].of(f"{name}-varlen" if are_packed else name)
    tile = made.tile
    assert made.epilogues.visits_lists == (tile.tile_n != 80)
    found, (out, lse) = problem.emulate(made), each.expected(TILINGS[tiling].of(name).traits)
    for b, (rows, keys) in enumerate(lengths):
        seen = lse[b, :, :rows].isfinite()
        assert torch.equal(found.lse[b, :, :rows].isfinite(), seen)
        torch.testing.assert_close(found.lse[b, :, :rows][seen], lse[b, :, :rows][seen], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found.out[b, :, :rows], out[b, :, :rows], atol=2e-3, rtol=1e-2)
        if made.epilogues.visits_lists:
            tiles = -(-rows // tile.tile_m)
            listed = visited(tensors[-4], tile.tile_m, tile.tile_n, tiles)[b]
            assert torch.equal((found.visits[b, :, :tiles] > 0).sum(-1), listed)
            assert not found.visits[b, :, :, -(-keys // tile.tile_n) :].any()
            assert not found.visits[b, :, tiles:].any()


@pytest.mark.parametrize(
    ("case", "tiling", "pack", "mask"),
    [
        ("document", "warps4x1-64x32", 2, ""),
        ("causal", "wgmma2-64x128-along-n", 1, ""),
        ("blocks", "warps2x2-64x64", 2, "causal"),
        ("window", "warps4x1-128x32", 2, ""),
        ("of each", "warps2x4-32x128", 1, "window"),
        ("small blocks of each", "warps2x2-64x64", 2, ""),
        ("full blocks", "warps4x1-64x32", 2, "window"),
        ("blocks of each head", "warps2x2-64x64", 2, ""),
    ],
)
def test_kernels_with_a_cache_visit_listed_blocks(case, tiling, pack, mask):
    """A work tile visits what either of its kv head's two heads lists, within the band and the keys that exist."""
    sizes, (left, right) = (4, 300, 2, 300, 1), (90, 20)
    problem = Scores.random(4, 2, 300, 300)
    problem = replace(
        problem, k=problem.k[:, :, :1].expand_as(problem.k), v=problem.v[:, :, :1].expand_as(problem.v)
    )
    block_mask = MASKS[case]()
    name, tensors = epilogue_of_block_mask(block_mask, problem.q, problem.k, Packed((), (*sizes, 1), (case,)))
    inputs = ScoreInputs(left, right, extra={name: tensors})
    problem = replace(problem, inputs=inputs, lengths=Lengths(seqused_k=int32(*LENGTHS_K)))
    made = TILINGS[tiling].of("-".join(filter(None, (mask, name, "seqused_k"))), op="kvcache")
    made = replace(made, tile=replace(made.tile, pack_heads=pack))
    assert made.epilogues.visits_lists and made.epilogues.in_order
    found, (out, lse) = problem.emulate(made), problem.expected(made.traits)
    assert torch.equal(found.lse.isfinite(), lse.isfinite())
    torch.testing.assert_close(found.lse, lse, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.out, out, atol=2e-3, rtol=1e-2)
    counts, blocks, *_ = block_lists(kinds_of(block_mask), block_mask.BLOCK_SIZE, *sizes)
    rows, columns = made.tile.tile_m // pack, made.tile.tile_n
    expected = torch.zeros_like(found.visits, dtype=torch.bool)
    for b, keys in enumerate(LENGTHS_K):
        for i, row in enumerate(range(0, 300, rows)):
            at, last = row // LISTED_ROWS, min(row + rows, 300) - 1
            lists = (blocks[b, h, at, : -(-counts[b, h, at, 1] // LISTED_ROWS)] // 2 for h in range(2))
            listed = set(torch.cat([*lists]).tolist())
            first = max(row + keys - 300 - left, 0) if mask == "window" else 0
            end = min(last + keys - 300 + (right if mask == "window" else 0) + 1, keys) if mask else keys
            for n in range(first // columns, -(-end // columns)) if first < end else ():
                expected[b, :, i, n] = n * columns // LISTED_ROWS in listed
    assert torch.equal(found.visits > 0, expected)


@pytest.mark.parametrize(
    ("case", "tiling", "are_packed"),
    [
        ("document", "warps4x1-64x64-transposed", False),
        ("window", "wgmma2-64x128-transposed", False),
        ("full blocks", "warps4x1-64x64-transposed", False),
        ("blocks of each head", "wgmma2-64x128-transposed", False),
        ("causal", "warps4x1-64x64-transposed", True),
        ("of each", "wgmma2-64x128-transposed", True),
        ("full blocks", "warps4x1-64x64-transposed", True),
    ],
)
def test_backward_kernels_visit_listed_blocks(case, tiling, are_packed):
    """Two heads share a kv head: a key block is visited with every query block that either head lists."""
    name, tensors, lengths, problem, each = emulated(case, are_packed, nheads_kv=1)
    made = TRANSPOSED[tiling].of(f"{name}-varlen" if are_packed else name, op="backward")
    assert made.epilogues.visits_lists
    tile, grad_out = made.tile, torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(7))
    expected = each.expected_gradients(TRANSPOSED[tiling].of(name, op="backward").traits, grad_out)
    found = problem.differentiate(made, grad_out, expected.lse, -expected.dpsum)
    for b, (rows, keys) in enumerate(lengths):
        tiles = -(-keys // tile.tile_n)
        listed = visited(tensors[-2], tile.tile_n, tile.tile_m, tiles)[b]
        assert torch.equal((found.visits[b] > 0).sum(1)[:, :tiles], listed)
        assert not found.visits[b, :, -(-rows // tile.tile_m) :].any()
        for got, want, atol in ((found.p, expected.p, 6e-8), (found.scores, expected.scores, 1e-4)):
            own = (x[b, :, :rows, :keys].double() for x in (got, want))
            torch.testing.assert_close(*own, atol=atol, rtol=2**-10)


# ---- packed sequences ----

STARTS_Q, STARTS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 130, 130, 300], [0, 200, 210, 300]))
LONGEST = (170, 200)
KINDS_OF_SEQUENCES = torch.tensor([3, 40, 90])


def of_sequences(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= KINDS_OF_SEQUENCES[b] + 20 * h


def of_each(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) | (kv_idx % 3 == 0)


def packed(q, k, v, **options):
    return attention_varlen(q[0], k[0], v[0], STARTS_Q, STARTS_K, *LONGEST, **options)


def one_by_one(q, k, v, mask_mod, **options):
    """Evaluate each sequence by itself, with its number as the batch."""
    outs = []
    for b in range(3):
        rows = [
            x[:, starts[b] : starts[b + 1]] for x, starts in ((q, STARTS_Q), (k, STARTS_K), (v, STARTS_K))
        ]
        outs.append(attention(*rows, mask_mod=lambda _, h, i, j, b=b: mask_mod(b, h, i, j), **options)[0])
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("mask_mod", "sizes", "block_size", "compiled"),
    [
        (of_sequences, (3, 4), (64, 96), False),
        (of_each, (None, None), (128, 128), False),
        (of_sequences, (3, 4), (128, 128), True),
    ],
)
def test_packed_sequences(mask_mod, sizes, block_size, compiled):
    """Blocks and functions count within a sequence; the mask may be longer than the longest."""
    torch.compiler.reset()
    leaves = [x.requires_grad_() for x in qkv(1)]
    mask = create_block_mask(mask_mod, *sizes, 190, 256, device="cpu", BLOCK_SIZE=block_size)
    call = torch.compile(packed, backend="aot_eager", fullgraph=True) if compiled else packed
    same(call(*leaves, block_mask=mask, causal=True), one_by_one(*leaves, mask_mod, causal=True), leaves)


def test_lists_of_packed_sequences_are_kept_while_these_start_there():
    q, k, _ = (x[0] for x in qkv(1))
    mask = create_block_mask(of_sequences, 3, 4, 170, 200, device="cpu")
    starts = (STARTS_Q.clone(), STARTS_K.clone())
    packed = Packed(starts, (3, 170, 4, 200, 2))

    def lists(packed):
        return epilogue_of_block_mask(mask, q, k, packed)[1][-4:]

    first = lists(packed)
    assert all(map(operator.is_, lists(packed), first))
    others = lists(packed._replace(starts=(starts[0], starts[1].clone())))
    assert not any(map(operator.is_, others, first)) and all(map(torch.equal, others, first))
    starts[1][1:3] = torch.tensor([10, 20])
    assert not torch.equal(lists(packed)[0], first[0])


def test_packed_sequences_with_other_functions():
    q, k, v = qkv(1)
    mask = create_block_mask(of_sequences, 3, 4, 170, 200, device="cpu")
    options = {"score_mod": lambda s, b, h, i, j: s * (i - j).abs(), "softcap": 3.0}
    got = packed(q, k, v, block_mask=mask, mask_mod=of_each, **options)
    want = one_by_one(q, k, v, lambda b, h, i, j: of_sequences(b, h, i, j) & of_each(b, h, i, j), **options)
    torch.testing.assert_close(got, want)
    listed = packed(q, k, v, block_mask=blocks_of((0,), (0, 1)))
    seen = one_by_one(q, k, v, lambda b, h, i, j: (i >= 128) | (j < 128))
    torch.testing.assert_close(listed, seen)


def test_the_gradient_of_packed_sequences_as_a_call():
    q, k, v = qkv(1)
    mask = create_block_mask(of_sequences, 3, 4, 170, 200, device="cpu")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = packed(*leaves, block_mask=mask, return_lse=True)
    expected = torch.autograd.grad(out, leaves, torch.ones_like(out))
    given = [x.detach() for x in (q[0], k[0], v[0], out, lse)]
    found = attention_varlen_backward(
        torch.ones_like(out), *given, STARTS_Q, STARTS_K, *LONGEST, block_mask=mask
    )
    torch.testing.assert_close([x[None] for x in found], expected)


def test_lists_of_fake_tensors_are_not_kept():
    """A mask that has been used may then be traced with fake tensors of other lengths."""
    mask, (q, k, v) = create_block_mask(causal_document, None, None, 300, 300, device="cpu"), qkv()
    expected = attention(q, k, v, block_mask=mask)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        epilogue_of_block_mask(mask, *(fake.from_tensor(x[:, :200]) for x in (q, k)))
    shorter = attention(q[:, :200], k[:, :200], v[:, :200], block_mask=mask)
    torch.testing.assert_close(shorter, expected[:, :200])


def told(tensors=None, **options):
    """Call attention with a mask of 4 heads of 300 queries and keys; tensors: replace the ones of ``qkv`` by name."""
    mask = create_block_mask(window, None, 4, 300, 300, device="cpu")
    given = dict(zip("qkv", qkv(), strict=True)) | (tensors or {})
    return attention(**given, **({"block_mask": mask} | options))


def of_sizes(**sizes):
    return dict(zip("qkv", qkv(**sizes), strict=True))


def of(*sizes):
    return create_block_mask(of_each, *sizes, device="cpu")


def from_starts(*starts):
    return attention_varlen(*(x[0] for x in qkv(1)), *starts, *LONGEST, block_mask=of(3, 4, 170, 200))


WRONG = """
packed(*qkv(1), block_mask=of(2, 4, 170, 200)) -> ValueError: block_mask has batch 2; accepted: 3, q's, or 1
packed(*qkv(1), block_mask=of(3, 4, 130, 200)) -> ValueError: block_mask has 130 queries; accepted: 170 or more
packed(*qkv(1), block_mask=of_each) -> TypeError: block_mask is ...; accepted: torch's BlockMask, or None
packed([[1]], *qkv(1)[1:], block_mask=of(3, 4, 170, 200)) -> TypeError: q is a list; accepted: a torch.Tensor
from_starts(STARTS_Q, STARTS_K[:3]) -> ValueError: cu_seqlens_k has shape (3,); accepted: (4,)
from_starts(STARTS_Q, STARTS_K.to("meta")) -> ValueError: cu_seqlens_k is on meta; accepted: cpu, where q is
from_starts(STARTS_Q.long(), STARTS_K) -> TypeError: cu_seqlens_q has dtype torch.int64; accepted: torch.int32
told(block_mask=torch.ones(3, 3)) -> TypeError: block_mask is a Tensor; accepted: torch's BlockMask
told(seqused_k=torch.tensor([3, 3], dtype=torch.int32)) -> ValueError: block_mask is given with seqused_k
told(block_mask=of(3, 4, 300, 300)) -> ValueError: block_mask has batch 3; accepted: 2, q's, or 1
told(of_sizes(nheads=6)) -> ValueError: block_mask has heads 4; accepted: 6, q's, or 1
told(of_sizes(nheads_kv=3)) -> ValueError: q has 4 heads; accepted: a multiple of k's 3
told(of_sizes(nheads_kv=0)) -> ValueError: q has 4 heads; accepted: a multiple of k's 0
told(of_sizes(seqlen_k=500)) -> ValueError: block_mask has 300 keys; accepted: 500 or more
told({"q": 3}) -> TypeError: q is an int; accepted: a torch.Tensor
told({"q": torch.ones(300, 4, 16)})
    -> ValueError: q has shape (300, 4, 16); accepted: (batch, seqlen, heads, head_dim)
told({"k": None}) -> TypeError: k is a NoneType; accepted: a torch.Tensor
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_refused(call, sentence):
    refusals.check(call, sentence, globals())
