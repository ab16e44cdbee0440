"""The epilogues themselves, run on the CPU for every thread of real MMA tilings, against their definition in torch.

``cute_attn.reference.emulate`` compiles for the host what kernels do between their two matrix products: the code is
tested as it runs on the GPU, except for approximate instructions and for lanes exchanging numbers.
"""

import ctypes
import mmap
import os
from dataclasses import replace

import pytest
import torch

from cute_attn import reference
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.reference.emulate import MASKED, UNMASKED, UNVISITED, features_of
from cute_attn.reference.tilings import SMALL, TILINGS, Scores
from tests import bent  # noqa: F401  # registers the epilogue
from tests.problem import DTYPES
from tests.tensors import far_apart, inputs_of


def compare(tiling, problem, *, scores=True):
    """The emulation of a problem, after comparing everything it yields with the definition."""
    got = problem.emulate(tiling)
    if scores:
        expected = problem.expected_scores(tiling.traits)
        visited = ~got.scores.isnan()
        assert (expected[~visited] == -torch.inf).all(), "a block that a query sees was not visited"
        torch.testing.assert_close(got.scores[visited], expected[visited], atol=2e-5, rtol=2e-6)
    out, lse = problem.expected(tiling.traits)
    largest = problem.v.abs().max() * (1 / (1 - problem.inputs.dropout_p))
    torch.testing.assert_close(got.lse, lse, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(got.out, out, atol=float(largest) * 2**-10, rtol=0.0)
    return got


def keep_mask(tiling, problem):
    mask = reference.DROPOUT_KEEP[tiling.traits.dropout]
    return mask(problem.coords(tiling.traits), problem.inputs.dropout_p, problem.inputs.rng_state)


def signs(tiling, problem):
    """Signs of P by definition: dropped elements are negative."""
    tensors = (x.double() for x in (problem.q, problem.k, problem.v))
    features = features_of(tiling.traits)
    return reference.attention(
        *tensors, problem.scale, features, problem.inputs, problem.lengths, return_softmax=True
    )[2].signbit()


# ---- everything together ----


@pytest.mark.parametrize(
    ("name", "dropout"),
    [(SMALL, "dropout"), ("warps2x2-64x64", "dropout_mem_efficient"), ("wgmma1-64x80", "dropout")],
)
def test_the_whole_chain(name, dropout):
    """Softcap, ALiBi, a bias, a user's epilogue, a window and dropout, in this order and over several blocks."""
    features = f"window-softcap-alibi-bias_fp16-bent-{dropout}"
    tiling = TILINGS[name].of(features)
    for seed, (seqlen_q, seqlen_k) in enumerate([(130, 259), (70, 40)]):
        torch.manual_seed(seed)
        given = inputs_of(features, 2, 2, seqlen_q, seqlen_k) | {"window_left": 100}
        extra = {"bent": (torch.randn(2, 8),)}
        problem = Scores.random(2, 2, seqlen_q, seqlen_k, seed, **given, extra=extra)
        got = compare(tiling, problem)
        assert torch.equal(got.dropped, signs(tiling, problem))
        seen = got.scores > -torch.inf  # unvisited scores are NaN
        assert torch.equal(got.dropped[seen], ~keep_mask(tiling, problem)[seen]) and got.dropped.any()


@pytest.mark.parametrize(
    ("name", "features"),
    [
        (SMALL, "causal-alibi-max_scores"),
        ("warps2x4-32x128", "softcap-max_scores"),
        ("wgmma2-128x112", "window-bias_fp16-max_scores-varlen"),
    ],
)
def test_greatest_scores(name, features):
    """Rows that see no key keep -inf, and padding rows write nothing."""
    tiling = TILINGS[name].of(features)
    for seqlen_q, seqlen_k in ((130, 259), (70, 40)):
        given = inputs_of(features, 2, 2, seqlen_q, seqlen_k) | {"window_left": 100}
        shape = (2, 2 * seqlen_q) if tiling.traits.varlen else (2, 2, seqlen_q)
        found = torch.full(shape, -torch.inf)
        problem = Scores.random(2, 2, seqlen_q, seqlen_k, **given, max_scores=found)
        compare(tiling, problem)
        expected = problem.expected_scores(tiling.traits).amax(-1)
        if tiling.traits.varlen:
            expected = expected.transpose(0, 1).flatten(1)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-6)


# ---- masks ----

LENGTHS = [(64, 64), (1, 1), (130, 200), (200, 130), (65, 321), (321, 63), (5, 128), (128, 7)]
WINDOWS = [
    (0, 0),
    (1, 2),
    (5, 2),
    (64, 0),
    (0, 300),
    (1000, 1000),
    (70, UNBOUNDED),
    (UNBOUNDED, 1),
    (127, 64),
]


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        *[(mask, SMALL) for mask in ("", "causal", "causal_top_left", "window", "window_top_left")],
        ("window", "wgmma2-128x112"),
        ("window_top_left", "warps2x4-32x128"),
    ],
)
def test_masks(mask, name):
    tiling = TILINGS[name].of(mask)
    for seqlen_q, seqlen_k in LENGTHS:
        for left, right in WINDOWS if mask.startswith("window") else [(0, 0)]:
            problem = Scores.random(1, 1, seqlen_q, seqlen_k, window_left=left, window_right=right)
            got = compare(tiling, problem)
            hidden = problem.expected_scores(tiling.traits) == -torch.inf
            check_visits(tiling.tile, got.visits[0, 0], hidden[0, 0])


def check_visits(tile, visits, hidden):
    """Every key block is visited unmasked, visited masked or not visited, as BlockRange.of_queries documents.

    Unmasked: all queries see the whole block, and it lies before the block of the first query's last key.
    Not visited: no query sees any of it, and it does not lie between two blocks that are seen.
    """
    seqlen_q, seqlen_k = hidden.shape
    for m, row in enumerate(visits.tolist()):
        rows = slice(m * tile.tile_m, min((m + 1) * tile.tile_m, seqlen_q))
        first_query_keys = (~hidden[rows.start]).nonzero()
        last_block = int(first_query_keys.max()) // tile.tile_n if len(first_query_keys) else 0
        for n, visit in enumerate(row):
            columns = slice(n * tile.tile_n, (n + 1) * tile.tile_n)
            block = hidden[rows, columns]
            # With a window of one key, a block between two that are seen may hide everything.
            between = (~hidden[rows, : columns.start]).any() and (~hidden[rows, columns.stop :]).any()
            unmasked = not block.any() and columns.stop <= seqlen_k and n < last_block
            if block.all() and not between:
                assert visit == UNVISITED
            else:
                assert visit == (UNMASKED if unmasked else MASKED)


# ---- softcap and ALiBi ----


@pytest.mark.parametrize(
    ("name", "features"),
    [
        (SMALL, "sinks_fp32"),
        (SMALL, "window-softcap-alibi-bias_fp16-sinks_fp32-dropout"),
        ("wgmma1-64x80", "causal-sinks_fp16"),
    ],
)
def test_sinks(name, features):
    """Sinks are below, among and above all scores; some rows see no key."""
    tiling = TILINGS[name].of(features)
    sinks = torch.tensor([-200.0, 1.5, 300.0]).to(DTYPES["fp16" if "sinks_fp16" in features else "fp32"])
    for seqlen_q, seqlen_k in ((130, 210), (210, 130)):
        shape = (2, 3, seqlen_q, seqlen_k)
        got = compare(tiling, Scores.random(*shape, **inputs_of(features, *shape), sinks=sinks))
        assert (got.lse[:, 2] == 300).all() and (got.out[:, 2] == 0).all()
        if "causal" in features and seqlen_q > seqlen_k:
            assert (got.lse[:, 1, : seqlen_q - seqlen_k] == 1.5).all()


@pytest.mark.parametrize("features", ["", "causal-sinks_fp32", "window-bias_fp16-dropout"])
def test_p_times_a_power_of_two(features):
    """P is scaled as for one fp16 term of fp32 operands; outputs and LSE are unchanged, also in rows without keys."""
    tiling = replace(TILINGS[SMALL].of(features), p_exponent=14)
    for seqlen_q, seqlen_k in ((130, 210), (210, 130)):
        shape = (2, 3, seqlen_q, seqlen_k)
        given = inputs_of(features, *shape)
        if "bias" in features:
            given["bias"][:, :, 5] = -torch.inf
        if "sinks" in features:
            given["sinks"] = torch.tensor([-200.0, 1.5, 300.0])
        compare(tiling, Scores.random(*shape, **given))


# ---- bias ----


def in_nan(bias, pad_rows=1, pad_cols=1, offset=0):
    """The same bias surrounded by NaN: its neighbours in memory must not be read."""
    batch, nheads, rows, cols = bias.shape
    storage = torch.full((batch, nheads, rows + pad_rows, cols + pad_cols), torch.nan, dtype=bias.dtype)
    flat = torch.cat([torch.full((offset + 16,), torch.nan, dtype=bias.dtype), storage.flatten()])
    around = flat[offset + 16 :].view(storage.shape)[:, :, :rows, :cols]
    return around.copy_(bias)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("fp16", SMALL), ("bf16", "warps2x2-64x64"), ("fp32", SMALL), ("bf16", "wgmma1-64x80")],
)
def test_bias(dtype, name):
    """Any broadcast, aligned and odd row strides, unaligned starts, lengths at and across the tile's edge."""
    tiling = TILINGS[name].of(f"bias_{dtype}")
    for seqlen_q, seqlen_k in [(64, 160), (70, 83), (1, 1), (33, 2)]:
        for broadcast in [(), (0,), (1,), (2,), (0, 1, 2)]:
            sizes = [1 if axis in broadcast else n for axis, n in enumerate((2, 2, seqlen_q))]
            values = torch.randn(*sizes, seqlen_k).to(DTYPES[dtype])
            for pad_cols, offset in [(0, 0), (1, 0), (2, 1), (16 - seqlen_k % 16, 0)]:
                bias = in_nan(values, 1, pad_cols, offset).expand(2, 2, seqlen_q, seqlen_k)
                assert all(bias.stride(axis) == 0 for axis in broadcast if bias.shape[axis] > 1)
                compare(tiling, Scores.random(2, 2, seqlen_q, seqlen_k, bias=bias))


@pytest.mark.parametrize("features", ["bias_fp32", "softcap-bias_fp32", "alibi-bias_bf16"])
def test_rows_of_large_numbers(features):
    """finfo.min or -1e12 for all keys of a row, or for all that are not -inf: the average over those keys."""
    dtype = torch.bfloat16 if "bf16" in features else torch.float32
    smallest, bias = torch.finfo(dtype).min, torch.randn(1, 1, 70, 192).to(dtype)
    bias[:, :, 3:5] = smallest
    bias[:, :, 6, 30:] = smallest  # visited first, hidden by what follows
    bias[:, :, 7, :150] = smallest
    bias[:, :, 9] = -1e12
    bias[:, :, 11, ::2], bias[:, :, 11, 1::2] = smallest, -torch.inf
    bias[:, :, 13, ::2], bias[:, :, 13, 1::2] = smallest, -1e12
    bias[:, :, 15] = 1e12
    bias[:, :, 17] = -torch.inf
    given = inputs_of(features, 1, 1, 70, 192) | {"bias": bias}
    problem = Scores.random(1, 1, 70, 192, **given | ({"softcap": 30.0} if "softcap" in features else {}))
    tiling = TILINGS[SMALL].of(features)
    got, (out, lse) = problem.emulate(tiling), problem.expected(tiling.traits)
    of_keys = {3: slice(None), 4: slice(None), 9: slice(None), 15: slice(None), 11: slice(0, None, 2)}
    for row, keys in (of_keys | {13: slice(1, None, 2)}).items():
        out[:, :, row] = problem.v[:, keys].mean(1)
    assert (got.lse[..., 3] == torch.finfo(dtype).min).all() and (got.lse[..., 17] == -torch.inf).all()
    torch.testing.assert_close(got.lse, lse.float(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(got.out, out, atol=4e-3, rtol=0.0)


@pytest.mark.parametrize("features", ["causal", "causal-bias_fp32-sinks_fp32"])
@pytest.mark.parametrize("size", [1e4, -1e4, 1e6])
def test_rows_of_one_key_among_large_scores(features, size):
    """Out is the value of a key whose probability is 1, to fp32's precision, though the kernel's is not exactly 1.

    The maximum times log2(e) is rounded, by up to 2^-11 at 10^4 and 2^-4 at 10^6, and subtracted from exact scores.
    """
    extra = {"bias": torch.zeros(1, 1, 70, 192)} if "bias" in features else {}
    extra |= {"sinks": torch.full((1,), -2e6)} if "sinks" in features else {}
    random = Scores.random(1, 1, 70, 192, **extra)
    # One column of q and k makes all scores large, the others draw them apart.
    shared = torch.tensor([abs(size) ** 0.5] + [0.0] * 7)
    q, k = 6 * random.q + shared, 6 * random.k + shared * (1 if size > 0 else -1)
    problem = replace(random, q=q, k=k)
    tiling = TILINGS[SMALL].of(features)
    got, (out, lse) = problem.emulate(tiling), problem.expected(tiling.traits)
    hidden = torch.ones(70, 192, dtype=torch.bool).triu(123)
    p = problem.expected_scores(tiling.traits).double().masked_fill(hidden, -torch.inf).softmax(-1)
    alone = p.amax(-1) > 1 - 1e-6
    assert alone.sum() > 35
    torch.testing.assert_close(got.out[alone], out[alone], atol=0.0, rtol=4e-6)
    torch.testing.assert_close(got.lse, lse, atol=0.0, rtol=1e-6)


def test_bias_far_apart(tmp_path):
    """Batches lie 2^32 elements apart, in a sparse file."""
    bias = far_apart(tmp_path).copy_(torch.randn(2, 1, 8, 64))
    compare(TILINGS[SMALL].of("bias_fp16"), Scores.random(2, 1, 8, 64, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_not_read_beyond_its_end(dtype):
    """The bias ends at the end of a page, and the next page is unreadable. A child process reads it and survives."""
    tiling = TILINGS[SMALL].of(f"bias_{dtype}")
    values = torch.randn(1, 1, 33, 83).to(DTYPES[dtype])
    compare(tiling, Scores.random(1, 1, 33, 83, bias=values))  # compiled here, for the child to find
    pages = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    end = start + 15 * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    for cols in (83, 82):
        offset = 15 * mmap.PAGESIZE - 33 * cols * values.element_size()
        bias = torch.frombuffer(pages, dtype=values.dtype, offset=offset, count=33 * cols)
        bias = bias.view(1, 1, 33, cols)
        assert bias.data_ptr() + bias.numel() * bias.element_size() == end
        bias.copy_(values[..., :cols])
        problem = Scores.random(1, 1, 33, cols, bias=bias)
        child = os.fork()
        if child == 0:
            problem.emulate(tiling)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, f"{cols} columns: read beyond the last element"


# ---- dropout ----


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (("dropout", "dropout_mem_efficient")[place % 2], name)
        for place, name in enumerate(TILINGS)  # kinds alternate
    ],
)
def test_dropout_draws_pytorchs_masks(kind, name):
    """Masks are equal bit for bit in all tilings, for score numbers aligned to Philox calls and unaligned ones."""
    tiling = TILINGS[name].of(kind)
    for seqlen_q, seqlen_k, dropout_p, rng_state in [
        (70, 200, 0.1, (2**40 + 12345, 8)),
        (65, 131, 0.5, (-5, 7)),
        (130, 97, 0.9, (1, 2**33 + 6)),
        (33, 66, 0.001, (3, 2**62 + 1)),
    ]:
        drawn = {"dropout_p": dropout_p, "rng_state": torch.tensor(rng_state)}
        problem = Scores.random(2, 3, seqlen_q, seqlen_k, **drawn)
        got = compare(tiling, problem)
        keep = keep_mask(tiling, problem)
        assert torch.equal(got.dropped, ~keep)
        assert abs(float((~keep).double().mean()) - dropout_p) < 0.02


def test_flash_dropout_keeps_all_bytes_up_to_its_threshold():
    """Every threshold a byte can have, on both sides of its top bit."""
    tiling = TILINGS[SMALL].of("dropout")
    for byte in (0, 1, 63, 126, 127, 128, 129, 200, 254, 255):
        dropout_p = 1 - (byte + 0.5) / 255 if byte < 255 else 0.0
        assert reference.flash_keep_threshold(dropout_p) == byte
        problem = Scores.random(1, 1, 64, 256, dropout_p=dropout_p, rng_state=torch.tensor([11, 4]))
        assert torch.equal(problem.emulate(tiling).dropped, ~keep_mask(tiling, problem)), byte


def test_mem_efficient_dropout_keeps_a_word_equal_to_its_threshold(monkeypatch):
    """No p that PyTorch accepts has a threshold that occurs here, so the test sets the threshold to a word."""
    tiling = TILINGS[SMALL].of("dropout_mem_efficient")
    problem = Scores.random(1, 1, 8, 64, dropout_p=0.5, rng_state=torch.tensor([3, 0]))
    zero = torch.zeros(128, dtype=torch.int64)
    words = reference.philox4x32((torch.arange(128), zero, zero, zero), (zero + 3, zero), rounds=10)
    words = torch.stack(words, 1).view(1, 1, 8, 64)
    for threshold in words[0, 0, 5, [7, 20, 33, 62]].tolist():
        monkeypatch.setattr(
            "cute_attn.epilogues.numbering.mem_efficient_keep_threshold", lambda p, t=threshold: t
        )
        assert torch.equal(problem.emulate(tiling).dropped, words < threshold)


@pytest.mark.parametrize(
    ("mask", "dropout", "name"),
    [("causal", "dropout", "warps4x1-128x32"), ("window", "dropout_mem_efficient", SMALL)],
)
def test_only_what_a_query_sees_is_marked_as_dropped(mask, dropout, name):
    """Whichever blocks are visited: -0.0 where P is 0 but seen, 0 where the mask hides a key."""
    tiling = TILINGS[name].of("-".join(filter(None, (mask, "alibi", dropout))))
    for seqlen_q, seqlen_k in [(130, 150), (150, 130)]:
        shape = (1, 2, seqlen_q, seqlen_k)
        steep = {"alibi_slopes": torch.full((1, 2), 40.0)}  # so that most of P is 0
        problem = Scores.random(*shape, **inputs_of(f"alibi-{dropout}", *shape) | steep)
        assert torch.equal(problem.emulate(tiling).dropped, signs(tiling, problem))


# ---- softmax ----


@pytest.mark.parametrize(("name", "threshold"), [(SMALL, 0), (SMALL, 8), ("wgmma1-64x80", 8)])
def test_softmax_over_many_blocks(name, threshold):
    """Maxima that rise and fall from block to block, and scores far beyond the range of exp."""
    tiling = TILINGS[name].of("")
    tiling = replace(tiling, tile=replace(tiling.tile, rescale_threshold=threshold))
    problem = Scores.random(1, 2, 130, 700, head_dim=16)
    ramp = torch.linspace(-6, 6, 700).view(1, -1, 1, 1)
    for k in (problem.k * ramp, problem.k * ramp.flip(1), problem.k * 30):
        compare(tiling, replace(problem, k=k), scores=False)
    low = replace(problem, q=torch.full_like(problem.q, -2.5), k=torch.full_like(problem.k, 5.0))
    assert float(low.expected_scores(tiling.traits).max()) == pytest.approx(-120)
    compare(tiling, low)


# ---- packed heads ----


@pytest.mark.parametrize(
    ("name", "heads", "features"),
    [
        ("wgmma1-64x80", 2, "causal_top_left"),
        ("wgmma1-64x80", 8, "causal-alibi"),
        ("wgmma1-64x80", 8, "window-softcap-alibi-sinks_fp32"),
        ("wgmma1-64x80", 64, "window-softcap-alibi-sinks_fp32"),
        ("wgmma2-128x112", 16, ""),
        ("wgmma2-128x112", 16, "causal-alibi"),
        ("wgmma1-64x80", 8, "causal-alibi-max_scores"),
    ],
)
def test_rows_have_the_scores_of_their_query_and_head(name, heads, features):
    """Scores, softmax and log-sum-exps of every query and head, on real accumulators; two packs a batch."""
    tiling = TILINGS[name].of(features)
    tiling = replace(tiling, tile=replace(tiling.tile, pack_heads=heads))
    for seqlen_q, seqlen_k in ((1, 100), (7, 60), (70, 300)):
        problem = Scores.random(
            *(1, 2 * heads, seqlen_q, seqlen_k),
            softcap=2.5 if "softcap" in features else 0.0,
            alibi_slopes=torch.rand(1, 2 * heads) if "alibi" in features else None,
            sinks=3 * torch.randn(2 * heads) if "sinks" in features else None,
            window_left=20,
            window_right=3,
            max_scores=torch.full((1, 2 * heads, seqlen_q), -torch.inf),
        )
        first = [heads * (head // heads) for head in range(2 * heads)]
        problem = replace(problem, k=problem.k[:, :, first], v=problem.v[:, :, first])
        got = compare(tiling, problem)
        if tiling.traits.max_scores:
            expected = problem.expected_scores(tiling.traits).amax(-1)
            torch.testing.assert_close(problem.inputs.max_scores, expected, atol=2e-5, rtol=2e-6)
        assert got.visits.shape[1] == 2 and got.visits.shape[2] == -(-seqlen_q * heads // tiling.tile.tile_m)


# ---- lengths ----
