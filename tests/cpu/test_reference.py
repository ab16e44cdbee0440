"""The reference: lengths, precision, the softmax and random numbers. ``tests/fuzz`` covers modified scores."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_attn import reference
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference import FULL_LENGTHS, Features, Lengths, ScoreCoords, definition
from tests.curand import philox
from tests.tensors import score_coords

F64 = torch.float64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def attend(q, k, v, scale, lengths=FULL_LENGTHS, *, mask="", dropout="", epilogues=(), **options):
    """The reference with features and their inputs as plain keywords; a softmax from its LSE is the same."""
    own = {name: options.pop(name) for name in ("return_softmax", "compute_dtype") if name in options}
    given = (scale, Features(mask, dropout, epilogues), ScoreInputs(**options), lengths)
    out, lse, p = reference.attention(q, k, v, *given, **own)
    if p is not None:
        again = reference.softmax(q, k, lse, *given)
        torch.testing.assert_close(again, p)
        assert torch.equal(again.signbit(), p.signbit())
    return out, lse, p


def coords(*sizes: int) -> ScoreCoords:
    """Coordinates of all scores of (batch, nheads, seqlen_q, seqlen_k)."""
    return score_coords([torch.arange(n) for n in sizes], sizes[1], sizes[2:])


# ---- empty rows, lengths, memory out of bounds ----


def test_row_masked_by_the_smallest_finite_number_averages():
    q, k, v = (randn(1, 3, 1, 8, seed=s) for s in (1, 2, 3))
    bias = torch.full((1, 1, 1, 3), torch.finfo(torch.float32).min, dtype=torch.float32)
    out, lse, _ = attend(q, k, v, 1.0, bias=bias)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(v))
    assert lse.isfinite().all()


def test_varlen_is_a_loop_and_never_reads_out_of_bounds():
    lengths_q, lengths_k, used_q, used_k = [5, 0, 7, 3], [6, 4, 0, 9], [4, 0, 7, 3], [6, 2, 0, 5]
    cu_q = torch.tensor([2, *np.cumsum(lengths_q) + 2], dtype=torch.int32)
    cu_k = torch.tensor([1, *np.cumsum(lengths_k) + 1], dtype=torch.int32)
    q, k, v = randn(20, 4, 8, seed=1), randn(25, 2, 8, seed=2), randn(25, 2, 16, seed=3)
    owned = torch.zeros(25, dtype=torch.bool)
    owned_q = torch.zeros(20, dtype=torch.bool)
    for b in range(4):
        owned[int(cu_k[b]) : int(cu_k[b]) + used_k[b]] = True
        owned_q[int(cu_q[b]) : int(cu_q[b]) + used_q[b]] = True
    q[~owned_q], k[~owned], v[~owned] = math.nan, math.nan, math.nan
    rng_state = torch.tensor([3, 5])
    args = {"mask": "causal", "softcap": 3.0, "dropout": "flash", "dropout_p": 0.3, "rng_state": rng_state}
    lengths = Lengths(
        cu_q, cu_k, torch.tensor(used_q), torch.tensor(used_k), max_seqlen_q=max(lengths_q), max_seqlen_k=9
    )
    out, lse, p = attend(q, k, v, 0.5, lengths, **args, return_softmax=True)
    assert out.isfinite().all() and not lse.isnan().any() and not out[~owned_q].any()
    assert p is not None and p.shape == (4, 4, 7, 9)
    for b in range(4):
        rows, keys = (
            slice(int(cu_q[b]), int(cu_q[b]) + used_q[b]),
            slice(int(cu_k[b]), int(cu_k[b]) + used_k[b]),
        )
        # Dropout depends on the batch index: keep the sequence's index among others of the same length.
        same = [x[None].expand(4, -1, -1, -1) for x in (q[rows], k[keys], v[keys])]
        one_out, one_lse, one_p = attend(*same, 0.5, **args, return_softmax=True)
        assert one_p is not None
        torch.testing.assert_close(out[rows], one_out[b])
        torch.testing.assert_close(lse[:, rows], one_lse[b])
        torch.testing.assert_close(p[b, :, : used_q[b], : used_k[b]], one_p[b])


def test_gradients_of_several_query_heads_are_rounded_once():
    q, k, v = (randn(1, 1, n, 8, seed=n, dtype=torch.bfloat16).requires_grad_() for n in (8, 1, 2))
    k = k.expand(-1, -1, 2, -1)
    grad_out = randn(1, 1, 8, 8, seed=3, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(attend(q, k, v, 1.0)[0], v, grad_out)
    assert torch.equal(grad, grad_out.double().unflatten(2, (2, 4)).sum(3).bfloat16())  # P is 1


def test_chunks_of_batches_and_heads_change_nothing(monkeypatch):
    q, k, v = randn(3, 5, 6, 8, seed=1), randn(3, 7, 2, 8, seed=2), randn(3, 7, 2, 8, seed=3)
    args = {"dropout": "mem_efficient", "dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}
    whole = attend(q, k, v, 1.0, **args, return_softmax=True)
    for size in (1, 21, 75, 150, 300):
        monkeypatch.setattr(definition, "_CHUNK_SCORES", size)
        for a, b in zip(whole, attend(q, k, v, 1.0, **args, return_softmax=True), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("longest", [(3, 4), (5, 7), (9, 11)])
def test_a_softmax_has_the_size_that_the_call_states(longest):
    """It has that size even if a sequence is longer, which only the lengths on the GPU tell."""
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 7))
    q, k = randn(5, 2, 8, seed=1), randn(7, 2, 8, seed=2)
    whole, stated = (Lengths(cu_q, cu_k, max_seqlen_q=m, max_seqlen_k=n) for m, n in ((5, 7), longest))
    _, lse, p = reference.attention(q, k, k, 1.0, lengths=whole, return_softmax=True)
    found = reference.softmax(q, k, lse, 1.0, lengths=stated)
    assert found.shape == (1, 2, *longest)
    rows, cols = (min(pair) for pair in zip(longest, (5, 7), strict=True))
    torch.testing.assert_close(found[..., :rows, :cols], p[..., :rows, :cols])
    assert not found[..., rows:, :].any() and not found[..., cols:].any()


def test_a_softmax_takes_memory_for_some_queries_at_a_time(monkeypatch):
    """A head of 300 x 500 scores needs no more memory than 2,000 scores do."""
    monkeypatch.setattr(definition, "_CHUNK_SCORES", 2000)
    q, k, sizes = randn(1, 300, 2, 8), randn(1, 500, 2, 8), []
    modify_scores = definition.modify_scores
    monkeypatch.setattr(
        definition, "modify_scores", lambda x, *rest: sizes.append(x.numel()) or modify_scores(x, *rest)
    )
    args = {"mask": "causal", "dropout": "flash", "dropout_p": 0.3, "rng_state": torch.tensor([7, 8])}
    attend(q, k, k, 1.0, **args, return_softmax=True)
    assert max(sizes) == 2000 and sum(sizes) == 2 * 2 * 300 * 500


# ---- precision, softmax, gradients ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_inputs_compute_in_float32(dtype):
    q, k, v = (randn(1, 40, 2, 16, seed=s, dtype=dtype) for s in (1, 2, 3))
    out, lse, _ = reference.attention(q, k, v, 0.25)
    exact, exact_lse, _ = reference.attention(q, k, v, 0.25, compute_dtype=F64)
    plain, plain_lse, _ = reference.attention(q, k, v, 0.25, compute_dtype=dtype)
    assert out.dtype == plain.dtype == dtype and lse.dtype == plain_lse.dtype == torch.float32
    assert exact_lse.dtype == F64
    assert (lse - exact_lse).abs().max() < 1e-5 < (plain_lse - exact_lse).abs().max()
    assert (out.double() - exact.double()).abs().mean() < (plain.double() - exact.double()).abs().mean()


class ProductsInTf32(TorchDispatchMode):
    """Multiplies like PyTorch does on CUDA under ``torch.backends.cuda.matmul.fp32_precision = "tf32"``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            args = tuple(definition._rounded_to_tf32(x) if x.dtype == torch.float32 else x for x in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("precision", ["", "tf32"])
def test_a_softmax_has_a_precision_of_its_own_whatever_pytorchs_is(dtype, precision):
    q, k = (8 * randn(1, 40, 2, 32, seed=s, dtype=dtype) for s in (1, 2))
    if precision == "tf32" and dtype != torch.float32:
        return
    _, lse, p = reference.attention(q, k, k, 0.25, return_softmax=True)
    found = reference.softmax(q, k, lse, 0.25, precision=precision)
    with ProductsInTf32():
        assert torch.equal(reference.softmax(q, k, lse, 0.25, precision=precision), found)
        followed = reference.attention(q, k, k, 0.25, return_softmax=True)[2]
    assert torch.equal(followed, p) == (dtype != torch.float32), "the mode changes products in fp32"
    rounded = [definition._rounded_to_tf32(x) for x in (q, k)] if precision else [q, k]
    exact = reference.softmax(*(x.double() for x in rounded), lse.double(), 0.25)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-2 * tolerance)


def test_numbers_are_rounded_to_tf32():
    x = torch.tensor(
        [1.0, 1 + 2**-11, 1 + 2**-10, 1 + 2**-11 - 2**-20, -1 - 2**-11, math.inf, -math.inf, math.nan]
    )
    expected = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10, math.inf, -math.inf, math.nan])
    assert torch.equal(definition._rounded_to_tf32(x).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dropout", ["", "flash", "mem_efficient"])
def test_softmax_is_what_multiplies_v(dropout):
    q, k, v = (randn(2, 33, 2, 8, seed=s) for s in (1, 2, 3))
    args = {"mask": "causal", "dropout": dropout, "dropout_p": 0.4, "rng_state": torch.tensor([7, 8])}
    out, _, p = attend(q, k, v, 1.0, **args, return_softmax=True)
    assert p is not None
    torch.testing.assert_close(p.abs().sum(-1), torch.ones(2, 2, 33, dtype=F64))
    hidden = torch.ones(33, 33, dtype=torch.bool).triu(1)
    assert not p.signbit()[..., hidden].any() and not p[..., hidden].any()
    if dropout:
        keep = reference.DROPOUT_KEEP[dropout](coords(2, 2, 33, 33), 0.4, args["rng_state"])
        assert torch.equal(p.signbit(), ~keep & ~hidden)
    else:
        assert not p.signbit().any()
    kept = p.masked_fill(p.signbit(), 0.0) / (0.6 if dropout else 1.0)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out)


@pytest.mark.parametrize("dropout", ["flash", "mem_efficient"])
def test_a_dropped_element_too_small_for_its_dtype_is_minus_zero(dropout):
    """Only elements that the mask hides have no sign."""
    q, k = torch.full((1, 1, 1, 8), 30.0, dtype=F64), torch.full((1, 16, 1, 8), -30.0, dtype=F64)
    k[:, 0] = 30.0
    args = {"dropout": dropout, "dropout_p": 0.5, "rng_state": torch.tensor([7, 8]), "return_softmax": True}
    p = attend(q, k, k, 1.0, **args)[2]
    assert p is not None and not p[..., 1:].any()
    keep = reference.DROPOUT_KEEP[dropout](coords(1, 1, 1, 16), 0.5, args["rng_state"])
    assert torch.equal(p.signbit(), ~keep) and p[..., 1:].signbit().any()


# ---- random numbers ----


ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# Random123's published known answers (kat_vectors): the digits of pi are counter and key of the third.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (*PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ((0, 0, 0, 0), (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ((ONES,) * 4, (ONES,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (*PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


@pytest.mark.parametrize(("counter", "key", "rounds", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, rounds, answer):
    words = [int(word, 16) for word in answer.split()]
    assert list(philox(counter, key, rounds)) == words
    tensors = [[torch.tensor([x]) for x in values] for values in (counter, key)]
    assert [int(x) for x in reference.philox4x32(*tensors, rounds)] == words


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("state", [(0, 0), (42, 1234), (-5, 2**32 - 17), (2**63 - 1, 2**40 + 3)])
def test_flash_mask_is_its_definition(dropout_p, state):
    batch, nheads, seqlen_q, seqlen_k = 2, 3, 37, 70
    keep = reference.flash_keep(coords(batch, nheads, seqlen_q, seqlen_k), dropout_p, torch.tensor(state))
    assert keep.shape == (batch, nheads, seqlen_q, seqlen_k)
    seed, offset = state
    threshold = math.floor(255 * float(np.float32(1) - np.float32(dropout_p)))
    rng = np.random.default_rng(0)
    for b, h, q, k in zip(*(rng.integers(0, n, 200) for n in keep.shape), strict=True):
        lane = 4 * (q % 8) + (k % 8) // 2
        low = int(offset + (b * nheads + h) * 32 + lane) % 2**64
        words = philox(
            (low % 2**32, low >> 32, int(q) // 16, int(k) // 32), (seed % 2**32, (seed >> 32) % 2**32), 7
        )
        data = np.array(words, dtype="<u4").tobytes()
        byte = data[4 * ((k >> 3) & 3) + 2 * ((q >> 3) & 1) + (k & 1)]
        assert bool(keep[b, h, q, k]) == (byte <= threshold)


@pytest.mark.parametrize("dropout_p", [0.0, 1e-12, 0.1, 1 / 3, 0.5, 0.75, 1 - 2**-24])
def test_mem_efficient_threshold_is_tight(dropout_p):
    threshold = reference.mem_efficient_keep_threshold(dropout_p)

    def kept(x):
        return np.float32(x) * np.float32(2.0**-32) + np.float32(2.0**-33) > np.float32(dropout_p)

    assert threshold == 0 or not kept(threshold - 1)
    assert threshold == 2**32 or kept(threshold)


@pytest.mark.parametrize("sinks", [False, True])
def test_p_of_rows_whose_lse_has_no_digits_left_sums_to_one(sinks):
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 7, 2, 8)
    bias = torch.zeros(1, 1, 3, 7)
    bias[..., 1, :] = torch.finfo(torch.float32).min
    inputs = ScoreInputs(bias=bias, sinks=torch.randn(2) if sinks else None)
    _, lse, _ = reference.attention(q, k, k, 0.3, inputs=inputs)
    p = reference.softmax(q, k, lse, 0.3, inputs=inputs)
    total = p.sum(-1)
    assert total[..., 1].isclose(torch.tensor(0.0 if sinks else 1.0)).all()
    assert (total <= 1 + 1e-5).all() and (sinks or total.isclose(torch.tensor(1.0)).all())
