"""The numbers of mem_efficient dropout's scores, in the kernels' own code and in the reference, against PyTorch's.

What PyTorch and cuRAND compute is written down in plain integers in ``tests.curand``.
"""

import functools

import cutlass
import pytest
import torch
from cutlass import Constexpr, Float32, Int32, Int64, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn import reference
from cute_attn.device.math import byte_permute
from cute_attn.device.score_tile import ScoreContext, ScoreMap
from cute_attn.epilogues import numbering
from cute_attn.epilogues.dropout import Dropout, rescale
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference.tilings import SMALL, TILINGS, TRANSPOSED
from tests import curand
from tests.tensors import score_coords

VERSIONS = [(2, 12), (2, 13), (2, 14)]
SEED = 2**63 + 12345

# batch, head, nheads, seqlen_k, max_seqlen_q, max_seqlen_k, offset, and the first query and key that are looked at.
PLACES = {
    "aligned": (1, 2, 3, 200, 70, 200, 8, 0, 0),
    "own-stride": (1, 2, 3, 131, 70, 200, 8, 3, 5),
    "longer-maxima": (2, 1, 3, 131, 333, 1001, 7, 3, 5),
    "plane-beyond-2^31": (3, 10, 11, 97, 50_000, 1000, 3, 0, 1),
    "plane-at-2^32": (16, 0, 16, 4096, 4096, 4096, 4, 100, 64),
    "plane-beyond-2^32": (7, 30, 31, 4093, 4096, 4095, 5, 4000, 4000),
    "plane-beyond-2^40": (15, 3, 64, 65_537, 65_537, 65_539, 2**33 + 1, 7, 9),
    "row-beyond-2^32": (0, 0, 1, 70_001, 70_000, 70_001, 2, 69_900, 69_930),
    "rows-around-2^32": (0, 0, 1, 2**20, 2**13, 2**20, 1, 4092, 2**20 - 40),
    "score-at-2^32": (0, 0, 1, 70_000, 70_000, 70_000, 4, 61_350, 47_280),
    "score-at-2^32-of-another-head": (1, 1, 2, 70_000, 70_000, 70_000, 8, 61_350, 47_280),
    "row-beyond-2^50": (0, 1, 2, 2**27 - 1, 2**27, 2**27 - 1, 0, 2**26, 2**26 + 1),
    "offset-beyond-2^63": (1, 1, 2, 131, 70, 131, 2**63 + 5, 3, 8),
    "number-around-2^63": (0, 0, 1, 131, 70, 131, 2**63 - 131 * 6 + 1, 3, 8),
    "number-around-2^64": (0, 0, 1, 131, 70, 131, 2**64 - 131 * 6 - 3, 3, 8),
    "number-around-2^64-aligned": (0, 0, 1, 128, 70, 128, 2**64 - 128 * 6, 3, 8),
    "number-at-2^64": (0, 0, 1, 64, 64, 64, 2**64 - 1, 0, 0),
    "number-beyond-2^64": (0, 0, 1, 131, 1000, 131, 2**64 - 131 * 6 - 3, 500, 8),
    "plane-beyond-2^64": (1, 0, 1, 131, 70, 131, 2**64 - 1, 3, 8),
}
CASES = [
    (version, varlen, place)
    for place in PLACES
    for version in VERSIONS
    for varlen in (False, True)
    # Packed or not is the same from 2.14 on; both, once.
    if version < (2, 14) or not varlen or place == "own-stride"
]
DROPOUT_P = 0.4


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of PyTorch that is numbered after."""
    return lambda version: monkeypatch.setattr(numbering, "torch_version", lambda: version)


def expected(version, varlen, place, queries, keys):
    batch, head, nheads, seqlen_k, max_q, max_k, offset, _, _ = PLACES[place]
    first = curand.first_number(version, varlen, batch, head, nheads, max_q, max_k)
    return curand.keep_mask(version, SEED, offset, first, queries, keys, seqlen_k, DROPOUT_P)


def rng_state(place):
    """Seed and offset as PyTorch has them, in int64."""
    return torch.tensor([x - 2**64 if x >= 2**63 else x for x in (SEED, PLACES[place][6])])


def kept_by_the_reference(place, varlen, queries, keys):
    batch, head, nheads, seqlen_k, max_q, max_k, *_ = PLACES[place]
    at = (batch, head, queries, keys)
    coords = score_coords(at, nheads, (max_q, seqlen_k), (max_q, max_k), varlen=varlen)
    return reference.mem_efficient_keep(coords, DROPOUT_P, rng_state(place))[0, 0]


@pytest.mark.parametrize(("version", "varlen", "place"), CASES)
def test_the_reference_numbers_as_pytorch(installed, version, varlen, place):
    installed(version)
    row0, col0 = PLACES[place][-2:]
    queries, keys = range(row0, row0 + 11), range(col0, col0 + 50)
    keep = kept_by_the_reference(place, varlen, queries, keys)
    assert torch.equal(keep, expected(version, varlen, place, queries, keys))


@pytest.mark.parametrize(
    ("text", "version", "masks"),
    [
        ("2.7.1", (2, 7), (2**32 - 1, 0, 2**32 - 1)),
        ("2.12.1", (2, 12), (2**32 - 1, 0, 2**32 - 1)),
        ("2.13.0+cpu", (2, 13), (2**32 - 1, 0, 2**64 - 1)),
        ("2.14.0a0+gitcf30153", (2, 14), (2**64 - 1,) * 3),
        ("3.0.0.dev20270101", (3, 0), (2**64 - 1,) * 3),
    ],
)
def test_what_a_version_numbers_with(monkeypatch, text, version, masks):
    monkeypatch.setattr(torch, "__version__", text)
    monkeypatch.setattr(numbering, "torch_version", numbering.torch_version.__wrapped__)
    assert numbering.torch_version() == version
    found = (numbering.plane_mask(False), numbering.plane_mask(True), numbering.score_mask())
    assert found == masks


# ---- the kernels' code ----


@cute.jit
def draw(args: tuple, numbers: cute.Tensor, kept: cute.Tensor, tiling: Constexpr):
    """kept (tile_m, tile_n): 0 where a thread drops its element, else 1."""
    batch, head, nheads, seqlen_k, max_q, max_k, row0, col0 = (numbers[i] for i in range(8))
    one, dropout = Float32(1.0), Dropout("mem_efficient")
    context = ScoreContext(batch, head, nheads, max_q, seqlen_k, max_q, max_k, Int32(0), one, one, one)
    state = dropout.begin(args, context)
    size, mma = tiling.tile, tiling.tiled_mma()
    shape = (size.tile_n, size.tile_m) if tiling.transposed else (size.tile_m, size.tile_n)
    for thread in cutlass.range(mma.size):
        score_map = ScoreMap.make(mma, size.tile_m, size.tile_n, thread, tiling.transposed)
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C(shape), Float32)
        acc.fill(1.0)
        tile = score_map.tile(acc, row0, col0)
        dropout.zero_dropped(dropout.packed_mask(state, tile), tile.acc)
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                kept[tile.row0 - row0 + tile.rows[r], tile.col0 - col0 + tile.cols[c]] = tile.acc[r, c]


@functools.cache
def compiled(name):
    """:func:`draw` for a tiling, and the tiling."""
    tiling = (TILINGS | TRANSPOSED)[name]
    state = from_dlpack(torch.zeros(2, dtype=torch.int64), assumed_align=8)
    args = (state, Int32(0), Float32(0), Int64(0), Int64(0))
    kept = from_dlpack(torch.zeros(tiling.tile.tile_m, tiling.tile.tile_n))
    numbers = from_dlpack(torch.zeros(8, dtype=torch.int32))
    return cute.compile[cute.GPUArch("sm_90a")](draw, args, numbers, kept, tiling), tiling


def kept_by_a_kernel(name, place, varlen):
    """(queries, keys) of the tile with the place, and which of its scores the kernels' code keeps."""
    function, tiling = compiled(name)
    *context, _, row0, col0 = PLACES[place]
    # Tiles begin anywhere in a sequence, but with whole groups of 8 scores.
    row0, col0 = row0 // 8 * 8, col0 // 8 * 8
    state, kept = rng_state(place), torch.full((tiling.tile.tile_m, tiling.tile.tile_n), torch.nan)
    given = ScoreInputs(dropout_p=DROPOUT_P, rng_state=state)
    _, threshold, scale, *masks = Dropout("mem_efficient", varlen).host_args(given)
    args = (from_dlpack(state, assumed_align=8), Int32(threshold), Float32(scale), *map(Int64, masks))
    numbers = torch.tensor([*context, row0, col0], dtype=torch.int32)
    function(args, from_dlpack(numbers), from_dlpack(kept))
    assert ((kept == 0) | (kept == 1)).all()
    where = (range(first, first + n) for first, n in zip((row0, col0), kept.shape, strict=True))
    return *where, kept == 1


NAMES = [SMALL, "wgmma1-64x80", "warps1x2-64x32-transposed"]


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_number_as_pytorch(installed, name):
    for version, varlen, place in CASES:
        installed(version)
        queries, keys, kept = kept_by_a_kernel(name, place, varlen)
        right = expected(version, varlen, place, queries, keys)
        assert torch.equal(kept, right), f"{place}, {version}, {varlen=}"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_keys_at_2_32_is_numbered_from_0(installed, monkeypatch, name):
    """PyTorch to 2.12 counts on within 32 keys, and so has other scores, but at most 31 and 3."""
    installed((2, 12))
    for offset in (4, 6):
        monkeypatch.setitem(PLACES, "run", (0, 0, 1, 70_001, 70_000, 70_001, offset, 61_350, 55_920))
        queries, keys, kept = kept_by_a_kernel(name, "run", False)
        assert 61_355 in queries and 55_941 in keys, "2^32 = 61355 * 70001 + 55941"
        assert torch.equal(kept, kept_by_the_reference("run", False, queries, keys))
        others = kept != expected((2, 12), False, "run", queries, keys)
        assert others.any() and not others[torch.tensor(queries) != 61_355].any()
        numbers = torch.tensor(keys)[others.any(0)] - 55_941
        assert int(numbers.min()) >= -2 and int(numbers.max()) < 32 - 55_941 % 32


# ---- thresholds and bytes ----


def test_thresholds_are_pytorchs():
    for p in [0.0, 1e-9, 2**-32, 0.1, 0.2, 1 / 3, 0.5, 0.9, 0.999, 1 - 2**-24, 127 / 255, 128 / 255]:
        one_minus_p = torch.tensor(1.0) - torch.tensor(p)
        assert reference.flash_keep_threshold(p) == int(255.0 * one_minus_p.double())
        assert rescale(p) == float(torch.tensor(1.0) / one_minus_p)


@cute.jit
def permute(words: cute.Tensor, out: cute.Tensor, selectors: Constexpr):
    for i in cutlass.range_constexpr(len(selectors)):
        out[i] = byte_permute(words[0], words[1], selectors[i])


def test_byte_permute_is_prmt():
    """The instruction's definition: byte 0 to 3 of the low operand, 4 to 7 of the high one, 8 spreads the sign."""
    words = torch.tensor([0x11F280C4, 0x7F8005A6], dtype=torch.int64).to(torch.int32)
    selectors = (0x3210, 0x7654, 0x0527, 0xBBAA, 0x9988, 0xCC88, 0xFF99, 0xD0E1)
    out = torch.empty(len(selectors), dtype=torch.int32)
    permute(from_dlpack(words), from_dlpack(out), selectors)
    source = [0xC4, 0x80, 0xF2, 0x11, 0xA6, 0x05, 0x80, 0x7F]
    for selector, word in zip(selectors, out.tolist(), strict=True):
        for i in range(4):
            nibble = selector >> 4 * i & 0xF
            byte = source[nibble & 7]
            expected = (0xFF if byte & 0x80 else 0) if nibble & 8 else byte
            assert word >> 8 * i & 0xFF == expected, hex(selector)
