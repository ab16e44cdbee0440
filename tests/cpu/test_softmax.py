"""The kernel that writes a forward's probabilities: its score tiles on the CPU, its traits, its builds."""

from dataclasses import replace
from itertools import pairwise

import cutlass
import pytest
import torch
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn import reference
from cute_attn.compiler import compile, registry
from cute_attn.epilogues.base import Epilogue, register_epilogue
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference.emulate import softmax_on_host
from cute_attn.tiles import TARGETS, SoftmaxTile
from cute_attn.traits import Traits

SCALE = 0.4


@register_epilogue("by_key")
class ByKey(Epilogue):
    """score * table[head, key % 8]."""

    def fake_args(self):
        return (make_fake_tensor(Float32, (cute.sym_int(), 8), stride=(cute.sym_int64(), 1)),)

    def host_args(self, inputs):
        return inputs.extra["by_key"]

    def begin(self, args, context):
        return (args[0][context.head, None],)

    @cute.jit
    def forward(self, state, tile, loaded=()):
        for c in cutlass.range_constexpr(len(tile.cols)):
            factor = state[0][(tile.col0 + tile.cols[c]) % 8]
            for r in cutlass.range_constexpr(len(tile.rows)):
                tile.acc[r, c] = tile.acc[r, c] * factor

    @staticmethod
    def reference(scores, coords, inputs):
        (table,) = inputs.extra["by_key"]
        return scores * table[coords.head, coords.key % 8]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(features: str, shape, inputs=reference.NO_INPUTS, lengths=reference.FULL_LENGTHS, tile=None):
    """Probabilities by the kernel's threads, from the reference's LSE, compared with the reference's.

    ``shape``: (batch, nheads, max_seqlen_q, max_seqlen_k); ``lengths`` may be varlen.
    """
    traits = Traits.parse("forward-sm80-fp16-d64" + features).softmax()
    kernel = registry.lookup(traits, tile)
    batch, nheads, seqlen_q, seqlen_k = shape
    varlen = lengths.cu_seqlens_q is not None
    rows = [(batch, n) for n in (seqlen_q, seqlen_k)]
    if varlen:
        rows = [(int(cu[-1]) + 3,) for cu in (lengths.cu_seqlens_q, lengths.cu_seqlens_k)]
    q, k = (randn(*n, nheads, 8, seed=i).double() for i, n in enumerate(rows))
    users = (ByKey.reference,) if traits.epilogues else ()
    kinds = reference.Features(traits.mask, traits.dropout, users)
    _, lse, expected = reference.attention(q, k, k, SCALE, kinds, inputs, lengths, return_softmax=True)
    products = torch.einsum(
        "bqhd,bkhd->bhqk", *(as_batches(x, lengths, i, shape) for i, x in enumerate((q, k)))
    )
    got = softmax_on_host(kernel, products.float(), lse.float(), SCALE, inputs, lengths)
    check(got, expected, kernel, inputs)
    return got


def as_batches(x, lengths, axis, shape):
    """q (axis 0) or k padded to (batch, max_seqlen, ...) with NaN."""
    cu_seqlens = (lengths.cu_seqlens_q, lengths.cu_seqlens_k)[axis]
    if cu_seqlens is None:
        return x
    result = torch.full((shape[0], shape[2 + axis], *x.shape[1:]), torch.nan, dtype=x.dtype)
    for b, (start, end) in enumerate(pairwise(cu_seqlens)):
        result[b, : end - start] = x[start:end]
    return result


def check(got, expected, kernel, inputs):
    written = ~got.isnan()
    assert not expected[~written].abs().any(), "what some query sees was not written"
    torch.testing.assert_close(
        got[written].double().abs(), expected[written].abs(), atol=2e-7, rtol=2**-11 + 2e-5
    )
    if kernel.traits.dropout:
        seen = written & (expected != 0)
        dropped = expected.signbit()[seen]
        assert torch.equal(got.signbit()[seen], dropped)
        assert abs(float(dropped.double().mean()) - inputs.dropout_p) < 0.05
    else:
        assert not got[written].signbit().any()


@pytest.mark.parametrize("mask", ["", "-causal", "-window", "-causal_top_left"])
def test_masks(mask):
    inputs = ScoreInputs(window_left=30, window_right=3)
    for seqlen_q, seqlen_k in [(1, 1), (70, 200), (200, 70), (64, 128)]:
        got = compare(mask, (1, 2, seqlen_q, seqlen_k), inputs)
        if mask == "-causal" and seqlen_q > seqlen_k:  # the first queries see no key
            assert not got[:, :, : seqlen_q - seqlen_k].nan_to_num().any()


@pytest.mark.parametrize("dropout", ["dropout", "dropout_mem_efficient"])
def test_the_whole_chain(dropout):
    """Softcap, ALiBi, a bias that hides rows, a user's epilogue, a window and dropout, in several blocks."""
    bias = randn(2, 2, 130, 259, seed=5).half()
    bias[:, :, 3:5] = -torch.inf
    inputs = ScoreInputs(
        softcap=2.5,
        alibi_slopes=randn(2, 2, seed=6).abs(),
        bias=bias,
        window_left=100,
        window_right=3,
        dropout_p=0.3,
        rng_state=torch.tensor([2**40 + 7, 2**33 - 4]),
        extra={"by_key": (randn(2, 8, seed=7).abs(),)},
    )
    got = compare(f"-window-softcap-alibi-bias_fp16-by_key-{dropout}", (2, 2, 130, 259), inputs)
    assert not got[:, :, 3:5].nan_to_num().any()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_used_lengths():
    """Nothing is written beyond them or beyond the end of a row."""
    lengths = reference.Lengths(seqused_q=int32(70, 0, 5), seqused_k=int32(33, 9, 0))
    got = compare("-causal-seqused_q-seqused_k", (3, 2, 70, 83), lengths=lengths)
    assert got[1, :, :].isnan().all() and got[2].isnan().all() and got[0, :, :, 33:].isnan().all()


@pytest.mark.parametrize("features", ["-varlen", "-causal-dropout_mem_efficient-varlen"])
def test_varlen_sequences(features):
    """Their LSE is (nheads, total_q); rows between sequences are NaN."""
    lengths = reference.Lengths(int32(2, 7, 7, 77), int32(1, 71, 80, 120), max_seqlen_q=70, max_seqlen_k=70)
    inputs = ScoreInputs(dropout_p=0.2, rng_state=torch.tensor([3, 8]))
    got = compare(features, (3, 2, 70, 70), inputs if "dropout" in features else reference.NO_INPUTS, lengths)
    assert got[0, :, 5:].isnan().all() and got[1].isnan().all() and got[2, :, :, 40:].isnan().all()


def test_another_tile_gives_the_same():
    inputs = ScoreInputs(dropout_p=0.4, rng_state=torch.tensor([9, 16]))
    tiles = (None, "tile_m=32,tile_n=96,num_warps=2")
    first, second = (compare("-dropout", (1, 1, 90, 150), inputs, tile=tile) for tile in tiles)
    assert torch.equal(first, second)


def test_a_row_whose_lse_is_minus_infinity_is_zero():
    """Whatever its scores are."""
    kernel = registry.lookup(Traits("softmax", "sm80", "fp16", 64))
    lse = torch.zeros(1, 1, 4).index_fill(2, torch.tensor([1, 3]), -torch.inf)
    got = softmax_on_host(kernel, torch.zeros(1, 1, 4, 5), lse, 1.0, reference.NO_INPUTS)
    assert torch.equal(got[0, 0, :, 0], torch.tensor([1.0, 0.0, 1.0, 0.0]).half())


# ---- traits and builds ----


@pytest.mark.parametrize(
    "name", ["forward-sm90-bf16-d64x128-window-bias_bf16-dropout-varlen", "forward-sm80:mine-fp16-d40"]
)
def test_one_kernel_serves_every_forward(name):
    forward = Traits.parse(name)
    traits = forward.softmax()
    assert traits == replace(forward, op="softmax", arch="sm80", head_dim_v=forward.head_dim, variant="")
    assert Traits.parse(traits.name) == traits
    for target in TARGETS:
        assert registry.lookup(traits, None, target).traits == traits


def test_declined_traits():
    with pytest.raises(
        registry.Unsupported, match="head_dim_v is 128; accepted: 64, head_dim: it reads no V"
    ):
        registry.lookup(Traits("softmax", "sm80", "bf16", 64, 128))
    with pytest.raises(registry.Unsupported, match="softmax-sm90"):
        registry.lookup(Traits("softmax", "sm90", "bf16", 64))


@pytest.mark.parametrize(
    "tile, features, message",
    [
        (SoftmaxTile(num_warps=0), "", "num_warps is 0; accepted: 1 to 16"),
        (SoftmaxTile(tile_m=96), "", "tile_m is 96; accepted: multiples of 16 rows for each of 4 warps"),
        (SoftmaxTile(tile_n=48), "-dropout", "tile_n is 48; accepted: multiples of 32"),
        (SoftmaxTile(tile_n=72), "", "tile_n is 72; accepted: multiples of 16"),
        (SoftmaxTile(128, 512), "", "bytes of shared memory"),
        (SoftmaxTile(64, 384), "", "registers a thread"),
    ],
)
def test_a_rejected_tile_names_the_reason(tile, features, message):
    assert message in (tile.reject(Traits.parse("softmax-sm80-bf16-d96" + features), "sm86") or "")


@pytest.mark.parametrize(
    "name, target",
    [
        ("softmax-sm80-bf16-d256-causal-softcap-alibi-bias_fp32-dropout_mem_efficient-varlen", "sm86"),
        ("softmax-sm80-fp16-d128-causal-softcap-alibi-bias_fp16-dropout-varlen", "sm89"),
    ],
)
def test_everything_at_once_spills_nothing(name, target):
    compiled = compile(name, target=target)
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert resources.shared_memory_bytes == compiled.tile.smem_bytes(compiled.traits)
