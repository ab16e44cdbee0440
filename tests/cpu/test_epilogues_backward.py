"""The epilogues' derivatives, run on the CPU for every thread of real MMA tilings, against torch's autograd in float64.

Tiles are transposed or not. In both cases dropout masks equal the forward's bit for bit.
"""

from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn import reference
from cute_attn.device.score_tile import ScoreMap
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.bias import untransposed
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import register_epilogue
from cute_attn.reference.emulate import MASKED, UNMASKED, UNVISITED
from cute_attn.reference.tilings import SMALL, TILINGS, TINY, TRANSPOSED, Scores
from cute_attn.traits import Traits
from tests import bent  # noqa: F401  # registers the epilogue
from tests.problem import DTYPES
from tests.tensors import far_apart, inputs_of, int32, randn

ALL = {**TILINGS, **TRANSPOSED, **TINY}
SMALL_TRANSPOSED = "warps4x1-64x64-transposed"
# The loops over one thread's registers are unrolled on purpose: fragments take static indices.


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@register_epilogue("one_way")
class OneWay(Epilogue):
    """An epilogue without a derivative."""

    def forward(self, state, tile, loaded=()):
        pass


def compare(name, features, problem, grad_bias=None, **how):
    """Differentiate a problem by the emulated backward, compare with autograd's gradients, and return the result.

    grad_bias: zeros to which the bias's gradient is added, as allocated by the host.
    """
    bias_grad = "" if grad_bias is None else "-bias_grad"
    tiling = replace(ALL[name], **how).of(features + bias_grad, op="backward")
    grad_out = randn(*problem.q.shape[:3], problem.v.shape[3], seed=7)
    expected = problem.expected_gradients(tiling.traits, grad_out)
    given = replace(problem, inputs=replace(problem.inputs, grad_bias=grad_bias))
    got = given.differentiate(tiling, grad_out, expected.lse, -expected.dpsum)
    rescale = 1 / (1 - problem.inputs.dropout_p)
    torch.testing.assert_close(got.p.double(), expected.p, atol=6e-8, rtol=2**-10)
    # A gradient is a difference of two numbers as large as those of P.
    largest = float(torch.einsum("bqhd,bkhd->bhqk", grad_out, problem.v).abs().max())
    rtol = 2**-10 if tiling.traits.softcap else 1e-5
    torch.testing.assert_close(got.scores.double() * rescale, expected.scores, atol=largest * 2e-6, rtol=rtol)
    return got, expected


ROUND = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}


def check_bias(grad_bias, expected):
    largest = float(expected.bias.abs().max())
    rtol = 1e-5 + ROUND[grad_bias.dtype]
    torch.testing.assert_close(grad_bias.double(), expected.bias, atol=largest * 1e-5 + 1e-6, rtol=rtol)


# ---- everything together ----


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("warps2x1-32x16", "window-softcap-alibi-bias_fp16-bent-dropout"),
        ("wgmma1-64x16", "causal-softcap-bias_fp32-dropout_mem_efficient"),
        ("wgmma1-16x64-transposed", "causal-softcap-bias_bf16-dropout"),
        ("warps2x1-16x32-transposed", "window-softcap-bias_fp32-bent-dropout_mem_efficient"),
    ],
)
def test_the_whole_chain(name, features):
    """The epilogues run in this order, over several blocks; the gradient of the bias is written too."""
    dtype = next(DTYPES[word[5:]] for word in features.split("-") if word.startswith("bias_"))
    for seqlen_q, seqlen_k in [(130, 259), (70, 40)]:
        bias = torch.randn(2, 2, seqlen_q, seqlen_k).to(dtype)
        given = inputs_of(features, 2, 2, seqlen_q, seqlen_k) | {"bias": bias, "window_left": 100}
        problem = Scores.random(2, 2, seqlen_q, seqlen_k, **given, extra={"bent": (torch.rand(2, 8),)})
        grad_bias = torch.zeros_like(bias)
        _, expected = compare(name, features, problem, grad_bias)
        check_bias(grad_bias, expected)


# ---- masks and the order of blocks ----


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        (SMALL, "causal"),
        (SMALL_TRANSPOSED, ""),
        ("warps2x2-32x96-transposed", "window"),
        ("warps1x2-64x32-transposed", "causal_top_left"),
        ("wgmma3-64x192-transposed", "window_top_left"),
    ],
)
def test_masks(name, mask):
    """Blocks that hide nothing are visited without a mask, blocks that hide some with one, others not at all."""
    tile = ALL[name].tile
    for seqlen_q, seqlen_k in [(130, 200), (200, 130), (1, 1), (65, 321), (300, 64)]:
        for left, right in [(0, 0), (70, 5), (0, 130)] if "window" in mask else [(0, 0)]:
            problem = Scores.random(1, 1, seqlen_q, seqlen_k, window_left=left, window_right=right)
            got, _ = compare(name, mask, problem)
            hidden = problem.expected_scores(ALL[name].of(mask).traits)[0, 0] == -torch.inf
            for m, row in enumerate(got.visits[0, 0].tolist()):
                for n, visit in enumerate(row):
                    columns = slice(n * tile.tile_n, (n + 1) * tile.tile_n)
                    block = hidden[m * tile.tile_m : (m + 1) * tile.tile_m, columns]
                    partial = bool(block.any()) or columns.stop > seqlen_k
                    if visit != UNVISITED:
                        assert visit == (MASKED if partial else UNMASKED)
                    else:
                        assert block.all()


@pytest.mark.parametrize(
    ("name", "features"),
    [(SMALL, "bias_fp32"), (SMALL_TRANSPOSED, "causal-bias_bf16"), (SMALL, "softcap-bias_fp32")],
)
def test_rows_of_large_numbers(name, features):
    """In some rows every visible key has a bias of finfo.min, so that their P are equal; other keys are hidden."""
    dtype = next(DTYPES[word[5:]] for word in features.split("-") if word.startswith("bias_"))
    smallest, bias = torch.finfo(dtype).min, torch.randn(1, 1, 100, 70).to(dtype)
    bias[:, :, 40:42] = smallest
    bias[:, :, 45, 3:] = smallest
    bias[:, :, 47, :50] = smallest
    bias[:, :, 50] = -torch.inf
    problem = Scores.random(1, 1, 100, 70, bias=bias, softcap=3.0 if "softcap" in features else 0.0)
    grad_bias = torch.zeros_like(bias)
    _, expected = compare(name, features, problem, grad_bias)
    assert (expected.p[0, 0, 41] > 0).any() and expected.scores[0, 0, 41].abs().max() > 0
    check_bias(grad_bias, expected)


@pytest.mark.parametrize("name", ["warps2x1-32x16", "wgmma1-16x64-transposed"])
def test_lengths_of_each_batch(name):
    """seqused: rows beyond a batch's used queries and keys are neither read nor written."""
    used_q, used_k = [130, 1, 64, 0, 70], [200, 3, 0, 9, 65]
    features = "window_top_left-alibi-bias_fp16-dropout-seqused_q-seqused_k"
    given = inputs_of(features, 5, 2, 130, 200) | {"window_left": 90, "window_right": 20}
    given["bias"] = torch.randn(5, 1, 130, 200).half().expand(5, 2, 130, 200)
    problem = Scores.random(5, 2, 130, 200, **given)
    lengths = reference.Lengths(seqused_q=int32(*used_q), seqused_k=int32(*used_k))
    grad_bias = torch.full((5, 2, 130, 200), torch.nan)
    for batch, (n_q, n_k) in enumerate(zip(used_q, used_k, strict=True)):
        grad_bias[batch, :, :n_q, :n_k] = 0.0
    problem = replace(problem, lengths=lengths)
    _, expected = compare(name, features, problem, grad_bias)
    for batch, (n_q, n_k) in enumerate(zip(used_q, used_k, strict=True)):
        assert grad_bias[batch, :, n_q:].isnan().all() and grad_bias[batch, :, :, n_k:].isnan().all()
    check_bias(grad_bias.nan_to_num(), expected)


# ---- softcap and users' epilogues ----


@pytest.mark.parametrize("name", [SMALL, SMALL_TRANSPOSED])
def test_softcap_of_fp32(name):
    """Saved derivatives have fp32's precision."""
    problem = Scores.random(1, 2, 70, 140, softcap=2.0, head_dim=64)
    tiling = ALL[name].of("softcap", op="backward")
    tiling = replace(tiling, traits=replace(tiling.traits, dtype="fp32"))
    grad_out = torch.randn(*problem.q.shape[:3], problem.v.shape[3])
    expected = problem.expected_gradients(tiling.traits, grad_out)
    got = problem.differentiate(tiling, grad_out, expected.lse, -expected.dpsum)
    error = got.scores.double() - expected.scores
    assert error.square().mean().sqrt() < 2e-6 * expected.scores.square().mean().sqrt()


def test_an_epilogue_without_a_derivative_is_refused():
    traits = Traits("backward", "sm80", "bf16", 64, epilogues=("bent", "one_way"))
    reason = "epilogue 'one_way' has no backward: a forward kernel can use it, no backward can"
    assert EpilogueChain.decline(traits) == reason
    with pytest.raises(NotImplementedError, match="'one_way' has no backward"):
        EpilogueChain.of(traits)
    forward = replace(traits, op="forward")
    assert EpilogueChain.decline(forward) is None
    assert not EpilogueChain.of(forward).differentiable
    only = replace(traits, epilogues=("bent",))
    assert EpilogueChain.decline(only) is None and EpilogueChain.of(only).differentiable


# ---- dropout ----


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, ("dropout", "dropout_mem_efficient")[i % 2]) for i, name in enumerate(TRANSPOSED)],
        ("warps2x2-64x64", "dropout"),
        ("warps2x4-32x128", "dropout_mem_efficient"),
    ],
)
def test_dropout_draws_pytorchs_masks(name, kind):
    """Masks are equal bit for bit, for score numbers aligned to Philox calls and unaligned ones, for P and dP."""
    for seqlen_q, seqlen_k, dropout_p, rng_state in [
        (70, 200, 0.1, (2**40 + 12345, 8)),
        (65, 131, 0.5, (-5, 7)),
        (33, 66, 0.9, (3, 2**62 + 1)),
    ]:
        check_mask(name, kind, seqlen_q, seqlen_k, dropout_p, rng_state)


def check_mask(name, kind, seqlen_q, seqlen_k, dropout_p, rng_state, **how):
    problem = Scores.random(
        *(1, 3, seqlen_q, seqlen_k), dropout_p=dropout_p, rng_state=torch.tensor(rng_state)
    )
    # No P is so small that it is 0 in fp16.
    got, expected = compare(name, kind, replace(problem, scale=0.05), **how)
    keep = expected.p != 0  # the forward's tests have its definition
    assert torch.equal(got.p != 0, keep)
    assert abs(float(keep.double().mean()) - (1 - dropout_p)) < 0.03


def test_dropout_refuses_tiles_that_cut_its_blocks():
    """Tiles have 24 queries, while flash's masks are made for 16 at a time."""
    tiling = TRANSPOSED["wgmma1-80x64-transposed"]
    tiling = replace(tiling, tile=replace(tiling.tile, tile_m=24))
    problem = Scores.random(1, 1, 24, 64, dropout_p=0.5, rng_state=torch.tensor([1, 0]))
    zeros = torch.zeros(1, 1, 24)
    with pytest.raises(ValueError, match="whole blocks of 16 queries"):
        problem.differentiate(tiling.of("dropout", op="backward"), torch.zeros_like(problem.q), zeros, zeros)


# ---- the bias's gradient ----


def gradient_like(bias, dtype, pad=(1, 1), offset=0):
    """Zeros with a bias's extents and broadcasts in the midst of NaN, where nothing must be written."""
    sizes = [1 if step == 0 else size for size, step in zip(bias.shape, bias.stride(), strict=True)]
    *outer, rows, cols = sizes
    size = outer[0] * outer[1] * (rows + pad[0]) * (cols + pad[1])
    storage = torch.full((offset + size,), torch.nan, dtype=dtype)
    whole = storage[offset:].view(*outer, rows + pad[0], cols + pad[1])
    inner = whole[:, :, :rows, :cols]
    inner.zero_()
    return storage, inner, inner.expand(bias.shape)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("warps2x1-32x16", "fp32"), ("warps2x1-16x32-transposed", "fp16"), ("wgmma1-64x16", "bf16")),
        *(("wgmma1-16x64-transposed", "bf16"), ("warps2x1-16x32-transposed", "fp32")),
    ],
)
def test_bias_gradient(name, dtype):
    """It is written if the bias is full, and added up in fp32 if it is broadcast; any strides and alignment."""
    dtype_of = DTYPES[dtype]
    for seqlen_q, seqlen_k in [(64, 128), (70, 83), (1, 1), (33, 2)]:
        for broadcast in [(), (0,), (1,), (2,), (0, 1, 2)]:
            sizes = [1 if axis in broadcast else n for axis, n in enumerate((2, 2, seqlen_q))]
            bias = torch.randn(*sizes, seqlen_k).to(dtype_of).expand(2, 2, seqlen_q, seqlen_k)
            problem = Scores.random(
                *(2, 2, seqlen_q, seqlen_k), bias=bias, dropout_p=0.2, rng_state=torch.tensor([4, 4])
            )
            shared = any(step == 0 and n > 1 for n, step in zip(bias.shape, bias.stride(), strict=True))
            for pad, offset in [((0, 0), 0), ((1, 16 - seqlen_k % 16), 0), ((2, 1), 1)]:
                storage, inner, grad = gradient_like(bias, torch.float32 if shared else dtype_of, pad, offset)
                _, expected = compare(name, f"bias_{dtype}-dropout", problem, grad)
                written = int(storage.isfinite().sum())
                assert written == inner.numel(), "written outside"
                summed = expected.bias.sum_to_size(inner.shape)
                check_bias(inner, replace(expected, bias=summed))


@cute.jit
def record_places(tiling: Constexpr, own: cute.Tensor, other: cute.Tensor):
    """own[thread, i] and other[thread, i]: (query, key) of both elements of word i, without and with an exchange."""
    mma, size = tiling.tiled_mma(), tiling.tile
    for thread in cutlass.range(mma.size):
        score_map = ScoreMap.make(mma, size.tile_m, size.tile_n, thread, True)
        shape = mma.get_slice(thread).partition_shape_C((size.tile_n, size.tile_m))
        tile = score_map.tile(cute.make_rmem_tensor(shape, Float32), Int32(0), Int32(0))
        swapped = untransposed(tile)
        for r in cutlass.range_constexpr(len(swapped.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                word = r * len(tile.cols) + c
                for i in cutlass.range_constexpr(2):
                    own[thread, word, i, 0] = tile.row0 + tile.rows[2 * r + i]
                    own[thread, word, i, 1] = tile.col0 + tile.cols[c]
                    other[thread, word, i, 0] = swapped.row0 + swapped.rows[r]
                    other[thread, word, i, 1] = swapped.col0 + swapped.cols[2 * c + i]


THREADS = {"warps4x1": 128, "warps2x2": 128, "warps1x2": 64, "wgmma1": 128, "wgmma2": 256, "wgmma3": 384}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_lanes_exchange_what_they_read_for_each_other(name):
    """The definition of movmatrix replaces the instruction, which only a GPU can run."""
    tiling, threads = TRANSPOSED[name], THREADS[name.split("-")[0]]
    words = tiling.tile.tile_m * tiling.tile.tile_n // threads // 2
    own = torch.full((threads, words, 2, 2), -1, dtype=torch.int32)
    other = torch.full_like(own, -2)
    args = from_dlpack(own), from_dlpack(other)
    cute.compile(record_places, tiling, *args, options="--gpu-arch sm_90a")(*args)
    # (warp, word, row, column): lane i has row i / 4, columns 2 (i % 4) and the next one; transposed, and back.
    matrices = other.view(-1, 8, 4, words, 2, 2).permute(0, 3, 1, 2, 4, 5).reshape(-1, words, 8, 8, 2)
    received = matrices.transpose(2, 3).reshape(-1, words, 8, 4, 2, 2).permute(0, 2, 3, 1, 4, 5)
    assert torch.equal(received.reshape(own.shape), own)
    assert len(set(map(tuple, own.view(-1, 2).tolist()))) == tiling.tile.tile_m * tiling.tile.tile_n


def test_full_bias_gradient_in_fp32():
    """In the deterministic mode, a broadcast 16-bit bias has a full fp32 gradient: no element is added to twice."""
    bias = torch.randn(1, 1, 70, 90).half().expand(2, 2, 70, 90)
    for name in ("warps2x1-32x16", "warps2x1-16x32-transposed"):
        grad = torch.zeros(2, 2, 70, 90)
        _, expected = compare(name, "bias_fp16", Scores.random(2, 2, 70, 90, bias=bias), grad)
        check_bias(grad, expected)


def test_bias_gradient_far_apart(tmp_path):
    """Batches lie 2^32 elements apart, in a sparse file."""
    grad, bias = far_apart(tmp_path), torch.randn(2, 1, 8, 64).half()
    for name in ("warps2x1-32x16", "warps2x1-16x32-transposed"):
        grad.zero_()
        _, expected = compare(name, "bias_fp16", Scores.random(2, 1, 8, 64, bias=bias), grad)
        check_bias(grad, expected)


def test_bias_gradients_that_cannot_be_are_refused():
    chain = EpilogueChain.of(Traits("backward", "sm80", "bf16", 64, bias="bf16", bias_grad=True))
    bias = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="grad_bias is None; accepted: zeros with the bias's extents"):
        chain.host_args(ScoreInputs(bias=bias))
    for grad, message in [
        (torch.zeros(1, 1, 8, 8).half(), "grad_bias is torch.float16; accepted: torch.float32, or"),
        (torch.zeros(1, 1, 1, 8).bfloat16().expand(1, 1, 8, 8), "torch.bfloat16 and broadcast; accepted"),
    ]:
        with pytest.raises(ValueError, match=message):
            chain.host_args(ScoreInputs(bias=bias, grad_bias=grad))
