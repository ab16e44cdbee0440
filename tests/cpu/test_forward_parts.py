"""The forward of fp32 in fp16 parts: operands, numerics, kernels, and which calls take it."""

import functools
import re
from dataclasses import replace

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Float16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import compile
from cute_attn.compiler.registry import Unsupported, lookup
from cute_attn.device.forward_parts import P_SCALE, parts_of_probabilities, store_pairs
from cute_attn.device.gemm import SmemOperand
from cute_attn.device.math import LOG2_E
from cute_attn.device.score_tile import ScoreMap
from cute_attn.host.choose import choose_kernel
from cute_attn.host.split_fp32 import SpeculativeForward, SpeculativeKernels, SplitLauncher
from cute_attn.kernels.fp32_sm80.kernel import parts_serve
from cute_attn.reference import emulate
from cute_attn.traits import Traits
from layouts.host import run_on_host
from tests.cpu.test_divided import call

# The loops over one thread's pieces are unrolled on purpose: fragments take static indices.

# ---- operands and results of a thread ----


@cute.jit
def write_addresses(which: cutlass.Constexpr, dim: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, k, piece, part] = addresses of step k: as ``gemm_qk_parts`` finds them, and the layout's."""
    warps, rows, steps = 2, 64, dim // 16
    tiled_mma = layouts.tiled_mma_sm80(Float16, warps)
    pointer = cute.make_ptr(Float16, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    tile = cute.make_tensor(pointer, layouts.smem_layout(rows, 2 * dim, Float16, stages=1))
    for thread in cutlass.range(cute.size(out.shape[0])):
        if cutlass.const_expr(which == "q"):
            copy = layouts.ldmatrix_copy_a(tiled_mma, Float16)
            operand = SmemOperand.a(tiled_mma, copy, tile, thread)
        else:
            copy = layouts.ldmatrix_copy_b(tiled_mma, Float16)
            operand = SmemOperand.b(tiled_mma, copy, tile, thread)
        identity = cute.make_identity_tensor(tile.layout.shape)
        reference = operand.tiled_copy.get_slice(thread).partition_S(identity)
        start = operand.start(Int32(0))
        for k in cutlass.range_constexpr(steps):
            for part in cutlass.range_constexpr(2):
                here = operand.at_step(start, Int32(k - k % 2) + part * steps)
                for piece in cutlass.range_constexpr(operand.pieces):
                    row, col, _ = reference[0, piece, k + part * steps, 0]
                    out[thread, k, piece, part, 0] = operand.address(here, piece, k % 2).toint()
                    out[thread, k, piece, part, 1] = 2 * cute.crd2idx((row, col, 0), tile.layout)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("which", ["q", "k"])
def test_addresses_of_both_parts(which, dim):
    pieces = 2 if which == "q" else 4
    found = run_on_host(lambda out: write_addresses(which, dim, out), 64, dim // 16, pieces, 2, 2)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])


@cute.jit
def write_parts(out: cute.Tensor):
    """out[i] = bits of P, of hi and of lo."""
    size = cute.size(out.shape[0])
    p = cute.make_rmem_tensor(cute.make_layout(((2, 2), 1, 16)), Float32)
    for i in cutlass.range_constexpr(size):
        p[i] = Float32(1.0) / Float32(i * i * i + 1)
        out[i, 0] = p[i].bitcast(Int32)
    hi, lo = parts_of_probabilities(p)
    for i in cutlass.range_constexpr(size):
        out[i, 1], out[i, 2] = Float32(hi[i]).bitcast(Int32), Float32(lo[i]).bitcast(Int32)


def test_parts_of_probabilities():
    p, hi, lo = (x.copy().view(np.float32) for x in run_on_host(write_parts, 64, 3).T)
    scaled = p * np.float32(2.0**P_SCALE)
    np.testing.assert_array_equal(hi, scaled.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(lo, (scaled - hi).astype(np.float16).astype(np.float32))
    assert (np.abs(hi + lo - scaled) <= np.maximum(scaled * 2.0**-23, 2.0**-25)).all()


@cute.jit
def write_output(head_dim: cutlass.Constexpr, aligned: cutlass.Constexpr, out: cute.Tensor):
    """Store an accumulator whose elements are 1000 times their row plus their column."""
    rows, cols, warps = 64, 64, 2
    tiled_mma = layouts.tiled_mma_sm80(Float16, warps)
    pointer = cute.recast_ptr(out.iterator, dtype=Float32)
    o = cute.make_tensor(pointer, cute.make_layout((rows, head_dim), stride=(Int64(head_dim), 1)))
    for thread in cutlass.range(32 * warps):
        coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((rows, cols)))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((rows, cols)), Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = Float32(1000 * coords[i][0] + coords[i][1])
        score_map = ScoreMap.make(tiled_mma, rows, cols, thread)
        store_pairs(o, score_map.view(acc), score_map, Int32(0), Int32(rows - 3), head_dim, aligned)


@pytest.mark.parametrize("head_dim, aligned", [(64, True), (36, True), (59, False)])
def test_the_output_is_stored_in_place(head_dim, aligned):
    found = run_on_host(lambda out: write_output(head_dim, aligned, out), 64, head_dim)
    wanted = 1000 * np.arange(64)[:, None] + np.arange(head_dim)
    np.testing.assert_array_equal(found.view(np.float32)[:-3], wanted[:-3])
    assert (found[-3:] == -1).all()  # rows beyond the sequence


# ---- numerics ----


def toward_zero(x):
    """fp64 numbers rounded toward zero to the 24 bits of fp32, as a tensor core rounds its sums."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2.0**24), exponent - 24)


def in_parts(x, exponent):
    scaled = np.float32(x) * np.float32(2.0**exponent)
    hi = scaled.astype(np.float16)
    return [part.astype(np.float64) for part in (hi, (scaled - hi.astype(np.float32)).astype(np.float16))]


def product(a, b, chunk):
    """(rows, k) by (k, cols) from parts as the kernel has it: chunks along K summed from zero, then added in fp32."""
    (a_hi, a_lo), (b_hi, b_lo) = in_parts(a, 12), in_parts(b, 12)
    result = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for first in range(0, a.shape[1], chunk):
        total = np.zeros(result.shape)
        for x, y in ((a_lo, b_hi), (a_hi, b_lo), (a_hi, b_hi)):
            for k in range(first, first + chunk, 16):
                total = toward_zero(total + x[:, k : k + 16] @ y[k : k + 16])
        result += (total * 2.0**-24).astype(np.float32)
    return result


@pytest.mark.parametrize("k, chunk", [(64, 32), (128, 32), (256, 32), (4096, 64), (4096, 32)])
def test_products_are_as_exact_as_plain_fp32(k, chunk):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, k)), rng.standard_normal((k, 64))
    if k == 4096:
        a = np.exp(a) / 60  # P and V
    a, b = a.astype(np.float32), b.astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    plain = np.abs((torch.from_numpy(a) @ torch.from_numpy(b)).numpy() - exact)
    error = np.abs(product(a, b, chunk) - exact)
    assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((plain**2).mean()) + 2.0**-24 * np.abs(exact).mean()
    whole = np.abs(product(a, b, k) - exact)
    assert k < 4096 or whole.mean() > 4 * error.mean(), "long sums would show"


def rounded_to_tf32(x):
    """11 significant bits, half-way cases away from 0."""
    bits = (np.float32(x).view(np.int32) + 0x1000) & np.int32(~0x1FFF)
    return bits.view(np.float32).astype(np.float64)


def in_one_part(x):
    """Of a tensor, times its power of two, in fp16; back in its own units."""
    exponent = 14 - int(np.floor(np.log2(np.abs(x).max())))
    return np.float64((x * 2.0**exponent).astype(np.float16)) * 2.0**-exponent


def p_in_one_part(p):
    return np.float64((p * 2.0**P_SCALE).astype(np.float16)) * 2.0**-P_SCALE


def attend(q, k, v, rounded=np.float64, p_rounded=np.float64):
    """Softmax of scores from rounded q and k, rounded again, times rounded v; sums are exact."""
    q, k, v = (rounded(x) for x in (q, k, v))
    scores = q @ k.T * q.shape[1] ** -0.5
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p_rounded(p) @ v / p.sum(1, keepdims=True)


@pytest.mark.parametrize("what", ["normal", "small rows", "small elements", "sink", "heavy tails"])
def test_one_part_is_as_exact_as_tf32(what):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((256, 64)) for _ in range(3))
    if what == "small rows":  # as small as fits
        factors = 2.0 ** -rng.uniform(0, 23, (256, 1))
        k, v = k * factors, v * factors[::-1]
    elif what == "small elements":
        v = v * 2.0 ** -rng.uniform(0, 20, v.shape)
    elif what == "sink":  # nearly all of P for a key whose value is 0: the rest of P is small
        q[:, 0], k[:, 0], k[0, 0], v[0] = 8.0, 0.0, 14.0, 0.0
    elif what == "heavy tails":
        q, k, v = (x**3 for x in (q, k, v))
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    exact = attend(q, k, v)

    def rms(*rounded):
        return np.sqrt(((attend(q, k, v, *rounded) - exact) ** 2).mean())

    tf32 = rms(rounded_to_tf32, rounded_to_tf32)
    assert rms(in_one_part, p_in_one_part) <= 1.1 * tf32
    unscaled = rms(in_one_part, lambda p: p.astype(np.float16))
    assert what != "sink" or unscaled > 1.5 * tf32, "the scale of P would not be needed"


# ---- kernels ----

PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k16\S*\s*" + r",\s*".join([r"\{([^}]*)\}"] * 4))
ONE = [("parts-fp32-d128-causal", "sm90"), ("parts-fp32-d128-tf32-causal", "sm90")]
TF32 = "parts-fp32-d{}-tf32"
FEATURES = "-causal-softcap-alibi-bias_fp32-dropout"
EVERY = [
    *((f"parts-fp32-d{dim}{rest}", "sm90") for dim in (32, 64, 96, 128, 192, 256) for rest in ("", FEATURES)),
    *((f"parts-fp32-d{dim}-window-bias_fp32-dropout_mem_efficient", "sm90") for dim in (64, 96, 128, 256)),
    *(
        (f"parts-fp32-{dims}", "sm90")
        for dims in ("d320", "d512", "d576x512-causal", "d59-unaligned-varlen-seqused_q")
    ),
    *((f"parts-fp32-d{dim}", target) for dim in (64, 128, 256) for target in ("sm80", "sm86")),
    *((f"exact-fp32-d{dim}-causal", "sm90") for dim in (64, 128, 256)),
    *((TF32.format(dim) + rest, "sm90") for dim in (32, 64, 96, 128, 192, 256) for rest in ("", FEATURES)),
    *((TF32.format(dim) + "-bias_fp32", "sm90") for dim in (64, 128, 320)),
    *((TF32.format(dim), "sm90") for dim in ("320", "512", "576x512")),
    *((TF32.format(dim), target) for dim in (64, 128, 256) for target in ("sm80", "sm86")),
    ("parts-fp32-d59-tf32-unaligned-varlen-seqused_q", "sm90"),
    ("exact-fp32-d64-tf32-causal", "sm90"),
]


def pytest_generate_tests(metafunc):
    if "name_on_target" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-default", default=False)
        metafunc.parametrize("name_on_target", [*ONE, *(EVERY if every else [])], ids="-".join)


def test_kernels_do_not_spill(name_on_target):
    name, target = name_on_target
    compiled = compile(f"forward-sm80:{name}", None, target)
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    products = PRODUCT.findall(compiled.ptx)
    assert bool(products) == name.startswith("parts") and ("m16n8k8" in compiled.ptx) == name.startswith(
        "exact"
    )
    for _, a, b, _ in products:
        assert len({x.strip() for x in a.split(",")}) == 4 and len({x.strip() for x in b.split(",")}) == 2, a
    if name_on_target in ONE:  # a step without masks and one with; in each Q K^T is a loop
        tile, traits = compiled.tile, compiled.traits
        kernel = lookup(traits, None, target)
        qk = kernel.products.each * (tile.tile_m // tile.num_warps // 16) * (tile.tile_n // 8)
        in_loop = qk * (traits.head_dim // 16 - tile.qk_unroll)
        assert len(products) == 2 * (kernel.step_content().mma - in_loop)


# ---- which calls take it ----


def single(*shape, precision="", **changes):
    return call(*shape, precision=precision, dtype=torch.float32, **changes)


def wanted(params, target="sm90"):
    kernel = choose_kernel(params, target, aligned=params.q.shape[-1] % 4 == 0)
    return SpeculativeKernels.wanted(params, kernel, target)


LARGE = {
    "plain": single(1024, 2048, (16, 16)),
    "packed": single(1024, 1024, (16, 2), 128, batch=3, packed=True, causal=True),
    "d36": single(2048, 4096, (16, 16), 36),
    "unaligned": single(2048, 4096, (16, 16), 35),
    "d256": single(1024, 1024, (16, 16), 256),
    "d512": single(1024, 1024, (16, 16), 512),
    "tf32": single(1024, 2048, (16, 16), precision="tf32"),
    "tf32, unaligned": single(1024, 2048, (16, 16), 123, precision="tf32"),
    "tf32, d512": single(1024, 1024, (16, 16), 512, precision="tf32"),
    "small, by name": single(64, 64, kernel="sm80:parts"),
    "exact, by name": single(64, 64, kernel="sm80:exact"),
    "tile": single(64, 64, kernel="sm80:parts", tile="tile_n=32"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_calls_take_both_kernels(name):
    params = LARGE[name]
    speculative, exact = wanted(params)
    assert (speculative.traits.variant, exact.traits.variant) == ("parts", "exact")
    assert speculative.traits.precision == exact.traits.precision == params.precision
    assert speculative.tile.tile_n == (32 if params.tile else speculative.tile.tile_n)
    for kernel in (speculative, exact):
        assert kernel.tile.reject(kernel.traits, "sm90") is None


OTHERS = {
    "small": single(512, 512),
    "few queries": single(64, 65536, (16, 16)),
    "few keys": single(65536, 64, (16, 16)),
    "tf32, fewer keys": single(2048, 1000, (16, 16), precision="tf32"),
    "bf16": call(1024, 2048, (16, 16)),
    "tile": single(1024, 2048, (16, 16), kernel="sm80", tile="num_stages=1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_take_one(name):
    assert wanted(OTHERS[name]) is None


def assert_declared(declared, given):
    if isinstance(declared, tuple):
        assert len(declared) == len(given)
        for own, other in zip(declared, given, strict=True):
            assert_declared(own, other)
    elif isinstance(declared, cute.Tensor):
        emulate._check(declared, given)


@pytest.mark.parametrize("name, head_dim", [("plain", 36), ("packed", 36), ("unaligned", 35), ("tf32", 36)])
def test_launches_have_the_arguments_that_kernels_declare(name, head_dim):
    packed, count = name == "packed", 1 if name == "tf32" else 2
    q, k, v = (torch.randn(2, n, h, head_dim) for n, h in ((5, 4), (3, 2), (3, 2)))
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    traits = Traits("forward", "sm80", "fp32", head_dim, aligned=name != "unaligned", varlen=packed)
    traits = replace(traits, precision="tf32" if count == 1 else "")
    launched = []
    functions = [
        lambda *args, name=name: launched.append((name, args)) for name in ("split", "parts", "exact")
    ]
    split = SplitLauncher(functions[0], (64, 64), 256, count)
    lse = torch.empty(*((4, 10) if packed else (2, 4, 5)))
    rest = (torch.empty_like(q), lse, None, 1.0, None, ())
    SpeculativeForward(split, *functions[1:])(q, k, v, *rest)
    (_, of_split), (_, of_parts), (_, of_exact) = launched
    assert [name for name, _ in launched] == ["split", "parts", "exact"]
    assert of_exact[:3] == of_split[0] == (q, k, v) and of_parts[3:] == of_exact[3:]
    assert of_parts[0] is q
    assert of_split[3] is of_parts[-1] is of_exact[-1]
    assert_declared(lookup(traits.split_fp32("forward_split"), None, "sm90").fake_args(), of_split)
    for variant, given in (("parts", of_parts), ("exact", of_exact)):
        declared = lookup(replace(traits, variant=variant), None, "sm90").fake_args()
        assert_declared((*declared[:5], declared[-1]), (*given[:5], given[-1]))
    assert len(of_split[1]) == 2
    for rows, own in zip(of_parts[1:], of_split[1], strict=False):
        assert rows.data_ptr() == own.data_ptr()
        assert rows.shape[-1] == count * 64 and own.shape[-2:] == (count, 64)


def test_what_the_kernels_decline():
    with pytest.raises(Unsupported, match="it computes fp32, not bf16"):
        lookup(Traits.parse("forward-sm80:exact-bf16-d64"), None, "sm90")
    parts = Traits.parse("forward-sm80:parts-fp32-d64")
    for tile, reason in {
        "key_groups=2": "accepted for fp32 in parts",
        "qk_unroll=4": "accepted: 1 or 2 steps",
    }.items():
        with pytest.raises(Unsupported, match=reason):
            lookup(parts, tile, "sm90")


# ---- which kernel computes ----


@cute.jit
def write_choice(scales: cute.Tensor, serve: cute.Tensor, scale_log2: Float32):
    serve[0] = Int32(1) if parts_serve(scales, scale_log2, 128) else Int32(0)


@pytest.mark.parametrize(
    ("q", "k", "v", "expected"),
    [
        (2.0**-12, 2.0**-12, 1.0, 1),  # elements up to 8
        (2.0**-5, 2.0**-5, 1.0, 1),  # up to 1,024
        (2.0**5, 2.0**5, 1.0, 0),  # up to 2**20, scores up to 2**44
        (2.0**-40, 2.0**10, 1.0, 1),
        (2.0**48, 2.0**48, 1.0, 0),
        (0.0, 1.0, 1.0, 0),
        (1.0, 0.0, 1.0, 0),
        (2.0**-12, 2.0**-12, 0.0, 0),
    ],
)
def test_parts_serve_where_all_fit_and_no_score_is_huge(q, k, v, expected):
    scales, serve = torch.tensor([q, k, v]), torch.full((1,), -1, dtype=torch.int32)
    compiled_choice()(from_dlpack(scales), from_dlpack(serve), 128**-0.5 * LOG2_E)
    assert serve.item() == expected


@functools.cache
def compiled_choice():
    fakes = from_dlpack(torch.zeros(3)), from_dlpack(torch.zeros(1, dtype=torch.int32))
    return cute.compile(write_choice, *fakes, Float32(1.0), options="--gpu-arch sm_90a")
