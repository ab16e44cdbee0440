"""The forward of fp32 in fp16 terms: its kernels, and the calls that use it."""

import functools
import re

import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.compiler import compile
from cute_attn.compiler.arguments import fakes
from cute_attn.compiler.registry import lookup
from cute_attn.device.math import LOG2_E
from cute_attn.host import forward
from cute_attn.host.choose import choose_kernel
from cute_attn.host.split_fp32 import both_kernels
from cute_attn.kernels.fp32_sm80.kernel import terms_serve
from tests import emulated_kvcache, machine
from tests.cpu.test_divided import call

# ---- kernels ----

PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k16\S*\s*" + r",\s*".join([r"\{([^}]*)\}"] * 4))
ONE = [("terms-fp32-d128-causal", "sm90"), ("terms-fp32-d128-tf32-causal", "sm90")]
TF32 = "terms-fp32-d{}-tf32"
FEATURES = "-causal-softcap-alibi-bias_fp32-dropout"
EVERY = [
    *((f"terms-fp32-d{dim}{rest}", "sm90") for dim in (32, 64, 96, 128, 192, 256) for rest in ("", FEATURES)),
    *((f"terms-fp32-d{dim}-window-bias_fp32-dropout_mem_efficient", "sm90") for dim in (64, 96, 128, 256)),
    *((f"terms-fp32-{dims}", "sm90") for dims in ("d320", "d512", "d576x512-causal", "d60-varlen-seqused_q")),
    *((f"terms-fp32-d{dim}", target) for dim in (64, 128, 256) for target in ("sm80", "sm86")),
    *((f"fallback-fp32-d{dim}-causal", "sm90") for dim in (64, 128, 256)),
    *((TF32.format(dim) + rest, "sm90") for dim in (32, 64, 96, 128, 192, 256) for rest in ("", FEATURES)),
    *((TF32.format(dim) + "-bias_fp32", "sm90") for dim in (64, 128, 320)),
    *((TF32.format(dim), "sm90") for dim in ("320", "512", "576x512")),
    *((TF32.format(dim), target) for dim in (64, 128, 256) for target in ("sm80", "sm86")),
    ("terms-fp32-d60-tf32-varlen-seqused_q", "sm90"),
    ("fallback-fp32-d64-tf32-causal", "sm90"),
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
    assert bool(products) == name.startswith("terms") and ("m16n8k8" in compiled.ptx) == name.startswith(
        "fallback"
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
    kernel = choose_kernel(params, target)
    return both_kernels(params, kernel, target)


LARGE = {
    "plain": single(1024, 2048, (16, 16)),
    "packed": single(1024, 1024, (16, 2), 128, batch=3, packed=True, causal=True),
    "d36": single(2048, 4096, (16, 16), 36),
    "d256": single(1024, 1024, (16, 16), 256),
    "d512": single(1024, 1024, (16, 16), 512),
    "tf32": single(1024, 2048, (16, 16), precision="tf32"),
    "tf32, d512": single(1024, 1024, (16, 16), 512, precision="tf32"),
    "small, by name": single(64, 64, kernel="sm80:terms"),
    "fallback, by name": single(64, 64, kernel="sm80:fallback"),
    "tile": single(64, 64, kernel="sm80:terms", tile="tile_n=32"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_calls_take_both_kernels(name):
    params = LARGE[name]
    speculative, exact = wanted(params)
    assert (speculative.traits.variant, exact.traits.variant) == ("terms", "fallback")
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


@pytest.mark.parametrize("name", ["plain", "packed", "tf32"])
def test_launches_have_the_arguments_that_kernels_declare(name, monkeypatch):
    count, launched = 1 if name == "tf32" else 2, []
    machine.device(monkeypatch, target="sm90")
    machine.kernels(monkeypatch, lambda kernel, target: lambda given: launched.append((kernel, given)))
    options = {"packed": name == "packed", "precision": "tf32" if count == 1 else "", "kernel": "sm80:terms"}
    params = single(5, 3, (4, 2), 36, batch=2, **options)
    forward.forward(params)
    for kernel, given in launched:
        emulated_kvcache.check_arguments(fakes(kernel), tuple(vars(given).values()))
    (_, split), (terms, speculative), (fallback, exact) = launched
    assert (terms.traits.variant, fallback.traits.variant) == ("terms", "fallback")
    assert split.mX == (exact.mQ, exact.mK, exact.mV) == params[:3] and speculative.mQ is exact.mQ
    assert split.mScales is speculative.mScales is exact.mScales
    for rows, own in zip((speculative.mK, speculative.mV), split.mTerms, strict=True):
        assert rows.data_ptr() == own.data_ptr()
        assert rows.shape[-1] == count * 64 and own.shape[-2:] == (count, 64)


# ---- which kernel computes ----


@cute.jit
def write_choice(scales: cute.Tensor, serve: cute.Tensor, scale_log2: Float32):
    serve[0] = Int32(1) if terms_serve(scales, scale_log2, 128) else Int32(0)


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
