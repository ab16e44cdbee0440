"""block_mask: the kernels' device code on the CPU, with bounds of blocks, against the definition and torch's lists."""

import copy
import operator

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cute_attn import Traits, attention, block_mask, lookup
from cute_attn.api import in_graphs
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.host import block_masks, mask_kinds
from cute_attn.host.block_masks import block_lists, epilogue_of_block_mask, kinds_of
from cute_attn.host.mask_kinds import lists_of
from cute_attn.traits import FULL, LISTED_ROWS, PARTIAL
from tests import machine, refusals
from tests.compared import same
from tests.emulated_blocks import ByBounds, emulated_kinds, emulated_lists, emulated_visits

CPU = torch.device("cpu")
BATCH, NHEADS = 2, 3
LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)
generator = torch.Generator().manual_seed(0)
DOCUMENT = torch.tensor([0] * 37 + [1] * 90 + [2] * 64 + [3] * 200)
SHUFFLED = torch.randint(0, 50, (BATCH, 400), generator=generator, dtype=torch.int16)
PREFIX = torch.tensor([17, 130], dtype=torch.int32)
BLOCKS = torch.rand(NHEADS, 9, 9, generator=generator) > 0.5
PADDED = torch.arange(400) < torch.tensor([[170], [64]])
TIME = torch.cumsum(torch.randint(0, 2**33, (400,), generator=generator), 0)
PLACE = torch.rand(400, 2, generator=generator)
PLACE[100] = float("nan")
SPAN = torch.tensor(0.2)
ELSEWHERE = torch.ones(3, device="meta")
EDGES = torch.tensor([30, 100, 190])


def near(b, h, q, k):
    x, y = PLACE[q, 0] - PLACE[k, 0], PLACE[q, 1] - PLACE[k, 1]
    return (x * x + y * y < SPAN) & (x.abs() + 0.5 * q < y + 3.0 * k)


def truncated(b, h, q, k):
    near = (torch.fmod(q - k, 40) >= 0) & (torch.div(k - q, 50, rounding_mode="trunc") > -3)
    return (torch.bucketize(q, EDGES) == torch.bucketize(k, EDGES)) | (near & ((5 * k).byte() < 200))


def of_floats(b, h, q, k):
    distance = torch.copysign(torch.hypot(q / 9, k / 7), q - k)
    return (distance > -20) & ~torch.signbit(PLACE[:, 0][q % 90]) & (torch.pow(k + 1.0, 1.5) < 40.0 * q + 900)


MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k <= 50) & (k - q < 20),
    "documents": lambda b, h, q, k: (q >= k) & (DOCUMENT[q] == DOCUMENT[k]),
    "shuffled": lambda b, h, q, k: SHUFFLED[b, q] == SHUFFLED[b, k],
    "neighbourhood": lambda b, h, q, k: ((q // 20 - k // 20).abs() <= 3) & ((q % 20 - k % 20).abs() <= 3),
    "prefix": lambda b, h, q, k: (k < PREFIX[b]) | (q >= k),
    "dilated": lambda b, h, q, k: ((q - k).abs() < 90) & ((q - k) % 16 == 0),
    "of heads": lambda b, h, q, k: torch.where(h == 0, q >= k, (q - k).abs() <= 32 * h),
    "of a table": lambda b, h, q, k: BLOCKS[h, q // 48, k // 48],
    "padded": lambda b, h, q, k: PADDED[b, k] & PADDED[b, q],
    "in time": lambda b, h, q, k: (TIME[q] - TIME[k] < 2**36) & (TIME[q] >= TIME[k]),
    "near": near,
    "everywhere": lambda b, h, q, k: q >= 0,
    "always": lambda b, h, q, k: torch.ones((), dtype=torch.bool) | (q == k),
    "nowhere": lambda b, h, q, k: (q < k) & (q > k + 10),
    "of queries": lambda b, h, q, k: (q % 64 < 32) & (h < 2),
    "bits": lambda b, h, q, k: ((q ^ k) & 64 == 0) & ((q | 1) - (k << 1) < 100) & ((~q >> 3) + (k >> 2) < 40),
    "truncated": truncated,
    "of floats": of_floats,
}
causal = MASKS["causal"]


def kinds_of_elements(mask_mod, batch, nheads, lengths, block_size):
    """Kinds of blocks by brute force: the function is evaluated at every element."""
    index = torch.meshgrid(*map(torch.arange, (batch, nheads, *lengths)), indexing="ij")
    seen = torch.as_tensor(mask_mod(*index)).expand(batch, nheads, *lengths)
    beyond = [-n % size for n, size in zip(lengths, block_size, strict=True)]
    seen = torch.nn.functional.pad(seen, (0, beyond[1], 0, beyond[0]))
    blocks = seen.unflatten(3, (-1, block_size[1])).unflatten(2, (-1, block_size[0]))
    some, whole = blocks.any(5).any(3), blocks.all(5).all(3)
    return PARTIAL * (some & ~whole) + FULL * whole


SIZES = (((200, 250), (16, 32)), ((97, 384), (32, 64)), ((384, 13), (64, 16)))
"""Lengths and block sizes; masks alternate between them."""


@pytest.mark.parametrize(
    ("name", "lengths", "block_size"),
    [(name, *SIZES[place % 3]) for place, name in enumerate((*MASKS, "causal", "causal"))],
)
def test_device_code_finds_the_kinds(name, lengths, block_size):
    sizes = (BATCH, NHEADS, lengths, block_size)
    found, expected = emulated_kinds(MASKS[name], *sizes), kinds_of_elements(MASKS[name], *sizes)
    assert torch.equal(found.expand_as(expected), expected)


@pytest.mark.parametrize("mask_mod", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("lengths", "block_size"), [((200, 250), 32), ((384, 96), (64, 96)), ((40, 390), 128)]
)
def test_on_the_cpu_it_is_torch_s(mask_mod, lengths, block_size):
    mask = block_mask(mask_mod, BATCH, NHEADS, *lengths, block_size=block_size, device="cpu")
    expected = create_block_mask(mask_mod, BATCH, NHEADS, *lengths, device="cpu", BLOCK_SIZE=block_size)
    for name in LISTS:
        found, wanted = getattr(mask, name), getattr(expected, name)
        assert torch.equal(found.expand_as(wanted), wanted), name
        assert found.dtype == wanted.dtype and found.is_contiguous()
    for name in ("seq_lengths", "BLOCK_SIZE", "mask_mod"):
        assert getattr(mask, name) == getattr(expected, name)


@pytest.mark.parametrize(
    ("name", "batch", "nheads"), [("causal", 1, 1), ("of heads", 1, NHEADS), ("padded", BATCH, 1)]
)
def test_sequences_and_heads_that_are_alike_share_a_mask(name, batch, nheads):
    for sizes, found in (((BATCH, NHEADS), (batch, nheads)), ((None, None), (1, 1))):
        mask = block_mask(MASKS[name], *sizes, 200, 200, device="cpu")
        assert mask.kv_num_blocks.shape[:2] == found


@pytest.mark.parametrize(
    ("name", "distances"),
    [("causal", {0}), ("window", {-2, -1, 3, 4}), ("everywhere", set()), ("nowhere", {0}), ("of a table", set())],
)  # fmt: skip
def test_bounds_decide_all_blocks_but_those_at_edges(name, distances):
    """distances: how many blocks below the diagonal the blocks lie that bounds do not decide."""
    evaluated = emulated_kinds(MASKS[name], 1, 1, (256, 256), (16, 16), ByBounds)[0, 0] == PARTIAL
    rows, columns = evaluated.nonzero().T.tolist()
    assert {i - j for i, j in zip(rows, columns, strict=True)} == distances


def test_bounds_of_documents_are_those_of_their_ends():
    evaluated = emulated_kinds(MASKS["documents"], 1, 1, (384, 384), (16, 16), ByBounds)[0, 0] == PARTIAL
    ends = {37 // 16, 127 // 16, 191 // 16}
    rows, columns = evaluated.nonzero().T.tolist()
    assert all(i == j or ends & {i, j} for i, j in zip(rows, columns, strict=True))
    assert evaluated.sum() < 24 + 3 * 24


# ---- what bounds decide is what every element says ----

TABLES = {
    "int": torch.randint(-40, 40, (120,), generator=generator, dtype=torch.int32),
    "long": torch.randint(-(2**62), 2**62, (120,), generator=generator),
    "float": torch.randn(120, generator=generator) * 30,
    "huge": torch.where(torch.rand(120, generator=generator) < 0.05, torch.inf, 1e38),
    "bool": torch.rand(120, generator=generator) > 0.1,
    "pairs": torch.randint(-20, 20, (8, 8), generator=generator),
    "nan": torch.where(torch.rand(120, generator=generator) < 0.05, torch.nan, 20.0),
}


THRESHOLDS = torch.tensor([-9000, -300, -90, -41, -17, -5, -1, 0, 1, 3, 6, 15, 33, 80, 250, 7000])


OPERATIONS = {
    "add": lambda q, k: q + k,
    "sub": lambda q, k: 2 * q - k,
    "mul": lambda q, k: (q - 50) * (k - 30),
    "neg": lambda q, k: -(q - k),
    "abs": lambda q, k: (q - 2 * k + 9).abs(),
    "floordiv": lambda q, k: (q - k) // 7,
    "floordiv by both": lambda q, k: (q - 50) // (k // 16 + 1),
    "mod": lambda q, k: (q // 16 - k) % 37,
    "mod by both": lambda q, k: (q - k) % (k // 16 + 30),
    "fmod": lambda q, k: torch.fmod(q // 16 - k, 37),
    "div towards 0": lambda q, k: torch.div(q - k, 7, rounding_mode="trunc"),
    "bucketize": lambda q, k: torch.bucketize(q - k, THRESHOLDS.sort().values) * 4 - 30,
    "and": lambda q, k: (q - k) & (k // 2 + 20),
    "and of the signed": lambda q, k: (q - k) & (k - 40),
    "or": lambda q, k: (q * 2) | (k + 3),
    "xor": lambda q, k: q ^ (k * 3),
    "not": lambda q, k: ~(q - k),
    "shl": lambda q, k: (q - k) << 2,
    "shl by a table": lambda q, k: (q + k) << (TABLES["pairs"][q // 16, k // 16].int().abs() % 4),
    "shr": lambda q, k: (q - k) >> 3,
    "minimum": lambda q, k: torch.minimum(q, 2 * k),
    "maximum": lambda q, k: torch.maximum(-q, k - 50),
    "clamp": lambda q, k: (q - k).clamp(-20, 35),
    "where": lambda q, k: torch.where(q > k + 20, -q, k // 2),
    "load": lambda q, k: TABLES["pairs"][q // 48, k // 32] * 9,
    "long": lambda q, k: TABLES["long"][q] // 2**54 - TABLES["long"][k] // 2**56,
    "bools": lambda q, k: ((q > 40) ^ (k > 60)).int() * 5,
    "float": lambda q, k: (q - k).float() * 0.71 - q,
    "product of floats": lambda q, k: (q * 0.5 - 20.0) * (k - 40.0) + q * k,
    "neg and abs of floats": lambda q, k: -((q - 1.5 * k).abs()),
    "floor": lambda q, k: ((q - k) * 0.3).floor(),
    "ceil": lambda q, k: ((q - k) * 0.3).ceil(),
    "trunc": lambda q, k: ((q - k) * 0.3).trunc().int(),
    "min and max of floats": lambda q, k: torch.minimum(torch.maximum(q * 0.5, k * 1.0), q + k * 0.1),
    "where of floats": lambda q, k: torch.where(q > k, q * 0.5, -k * 1.5),
}


def decided(made, compare):
    """Which blocks bounds decide, and the kinds of all blocks; checks that decisions agree with the elements."""
    mask = lambda b, h, q, k: compare(made(q, k), THRESHOLDS[h]), 1, len(THRESHOLDS), (96, 112), (16, 16)
    by_bounds, right = emulated_kinds(*mask, ByBounds), kinds_of_elements(*mask)
    known = by_bounds != PARTIAL
    assert torch.equal(by_bounds[known], right[known])
    return known, right


def compared_in_turn(names):
    """Names, each with one of two comparisons."""
    turns = [(name, (operator.lt, operator.ge)[place % 2]) for place, name in enumerate(names)]
    return pytest.mark.parametrize(("name", "compare"), turns, ids=lambda x: getattr(x, "__name__", None))


@compared_in_turn(OPERATIONS)
def test_bounds_of_each_operation(name, compare):
    """For values of both signs and several thresholds, bounds decide most blocks that lie entirely in or out."""
    known, right = decided(OPERATIONS[name], compare)
    assert known.sum() > 0.6 * (right != PARTIAL).sum()


BEYOND = {
    "products": lambda q, k: (q - k) * 2**26,
    "sums": lambda q, k: q * 2**24 + k * 2**24,
    "shifts": lambda q, k: (q + k) << 25,
    "bytes": lambda q, k: (3 * q).byte() - (k * 2).to(torch.int8),
    "powers": lambda q, k: (q - 50.0) ** 3 - (k - 0.5) ** 1.5 * 9,
    "sums of 64 bits": lambda q, k: TABLES["long"][q] * 2 + TABLES["long"][k],
    "products of 64 bits": lambda q, k: (TABLES["long"][q] // 2**20) * (k - 50),
    "integers of 64 bits": lambda q, k: TABLES["long"][q].to(torch.int32) - k,
    "infinities": lambda q, k: TABLES["huge"][q] * (k * 0.5) - TABLES["huge"][k] * 9.0,
    "infinite products": lambda q, k: (TABLES["huge"][q] * 1.0) * (TABLES["huge"][k] - 1e38),
    "NaN": lambda q, k: torch.maximum(TABLES["nan"][q], TABLES["nan"][k] + q),
}


@compared_in_turn(BEYOND)
def test_bounds_of_what_wraps_or_is_no_number(name, compare):
    decided(BEYOND[name], compare)


@pytest.mark.parametrize("compare", [operator.le, operator.gt, operator.eq, operator.ne])
def test_bounds_of_comparisons(compare):
    mask = lambda b, h, q, k: compare(q // 16 - k // 16, THRESHOLDS[h]), 1, 16, (96, 112), (16, 16)
    by_bounds, right = emulated_kinds(*mask, ByBounds), kinds_of_elements(*mask)
    assert torch.equal(by_bounds, right) and len(right.unique()) == 2


def test_kernels_get_the_arguments_that_they_take(monkeypatch):
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append((kernel.traits.op, given)))
    kinds = mask_kinds._kinds_by_kernel(causal, (1, 2, 300, 256), (128, 128), torch.device("cpu", 0))
    of_queries, of_keys = mask_kinds.lists_of(kinds)
    (made, first), (listed, second) = launched
    assert (made, listed) == ("block_kinds", "block_lists") and first.mKinds.shape == (1, 1, 3, 2)
    assert (first.seqlen_q, first.seqlen_k, first.mask_args) == (300, 256, None)
    for given, own in ((second.of_queries, of_queries), (second.of_keys, of_keys)):
        assert [x.data_ptr() for x in given] == [x.data_ptr() for x in own]


# ---- lists ----


@pytest.mark.parametrize("shape", [(1, 1, 7, 5), (2, 3, 1, 40), (1, 2, 33, 64), (2, 1, 3, 1)])
def test_device_code_lists_blocks_in_order(shape):
    kinds = torch.randint(0, 3, shape, generator=generator, dtype=torch.uint8)
    for found, expected in zip(emulated_lists(kinds), lists_of(kinds), strict=True):
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("block_size", "lengths"), [((128, 128), (500, 1300)), ((64, 256), (256, 200)), ((32, 96), (90, 128))]
)
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 2), (4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("cached", [(), (1,)])
def test_device_code_lists_what_kernels_visit(lengths, heads, heads_kv, block_size, cached):
    """heads: the table's heads; one of them stands for four."""
    sizes = (2, lengths[0], max(heads, 4) if heads == 1 else heads, lengths[1], heads_kv, *cached)
    rows, columns = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
    chances = torch.rand(2, heads, rows, columns, generator=generator)
    kinds = (chances > 0.2).byte() + (chances > 0.5).byte()
    both = (lists(kinds, block_size, *sizes) for lists in (emulated_visits, block_lists))
    assert all(map(torch.equal, *both))


# ---- calls ----


def test_its_kinds_are_known(monkeypatch):
    """Attention takes the kinds from the mask until a list changes; then it derives them from the lists."""
    made, (q, k) = [], (torch.ones(1, 300, 2, 16) for _ in range(2))
    monkeypatch.setattr(block_masks, "kinds_of", lambda mask: made.append(mask) or kinds_of(mask))
    mask = block_mask(causal, 1, None, 300, 300, device="cpu")
    found = epilogue_of_block_mask(mask, q, k)[1]
    assert not made
    for x, y in zip(found, epilogue_of_block_mask(copy.copy(mask), q, k)[1], strict=True):
        assert torch.equal(x, y)
    assert len(made) == 1
    mask.full_kv_num_blocks[..., 1] = 0
    changed = epilogue_of_block_mask(mask, q, k)[1]
    assert len(made) == 2 and changed[-4][0, 0, :, 1].tolist() == [128, 128, 300]


def test_attention_takes_it():
    q, k, v = (torch.randn(BATCH, 300, 4, 16, generator=generator, requires_grad=True) for _ in range(3))
    padded = MASKS["padded"]
    mask = block_mask(padded, BATCH, None, 300, 300, device="cpu")
    same(attention(q, k, v, block_mask=mask), attention(q, k, v, mask_mod=padded), (q, k, v))


def test_inside_torch_compile():
    def lists(document):
        twice = document * 2
        mask = block_mask(lambda b, h, q, k: twice[q] == twice[k], None, None, 390, 390, device="cpu")
        return mask.kv_indices + 1, mask.full_kv_num_blocks

    assert callable(in_graphs.made_block_mask)
    compiled = torch.compile(lists, backend="aot_eager")(DOCUMENT)
    for x, y in zip(compiled, lists(DOCUMENT), strict=True):
        assert torch.equal(x, y)


def many_values(b, h, q, k):
    found = q == k
    for i in range(33):
        found = found | (q % (i + 3) == k)
    return found


def kernel_of(*functions):
    """The kernel that makes a mask of these functions."""
    name, _ = epilogue_of(*functions, CPU)
    return lookup(Traits("block_kinds", "sm80", "bf16", LISTED_ROWS, epilogues=(name,)))


def told(mask_mod=causal, b=1, h=None, q_len=200, kv_len=300, device="cpu", **options):
    return block_mask(mask_mod, b, h, q_len, kv_len, device=device, **options)


WRONG = """
kernel_of(None, many_values) -> Unsupported: the mask has 33 values of a query; accepted: up to 32
kernel_of(lambda s, b, h, q, k: s * 2, causal) -> Unsupported: does more than hide keys; accepted: a mask_mod
told(3) -> TypeError: mask_mod is an int; accepted: a function of (batch, head, query, key)
told(lambda b, h, q, k: q - k) -> TypeError: mask_mod returned an integer; accepted: a bool
told(lambda b, h, q, k: q.sort()) -> TypeError: mask_mod uses sort; accepted
told(b=0) -> ValueError: b is 0; accepted: 1 to 1073741824
told(h=True) -> TypeError: h is True; accepted: a Python int
told(kv_len=2.0) -> TypeError: kv_len is 2.0; accepted: a Python int
told(block_size=48) -> ValueError: block_size is 48; accepted: a multiple of 32 up to 512, or two
told(block_size=(128, 1024)) -> ValueError: block_size is (128, 1024); accepted
told(block_size=None) -> ValueError: block_size is None; accepted
told(device="nowhere") -> ValueError: device is 'nowhere'; accepted: a torch.device
told(device="meta") -> ValueError: device is meta; accepted: a GPU's or the CPU
told(lambda b, h, q, k, t=ELSEWHERE: t[q] > 0)
    -> ValueError: mask_mod captures a tensor on meta; accepted: cpu, the mask's device
"""


@refusals.each(WRONG)
def test_wrong_arguments_are_refused(call, sentence):
    refusals.check(call, sentence, globals())
