"""The tour's levels of the backward: what they compile to, and their device code for all threads on the CPU."""

import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import compile, registry
from cute_attn.compiler.smem_layouts import reasons
from cute_attn.host import backward
from cute_attn.host.call import Call
from cute_attn.lab.copies import conflicts
from cute_attn.lab.verdict import verdict
from layouts.model import no_arguments, trace
from tests import machine
from tour.levels import BACKWARD_LEVELS

HAS = {9: ("HMMA", "LDSM", "LDGSTS", "RED"), 10: ("HGMMA", "UTMALDG", "STSM", "REDG")}
DIMS_AND_MASKS = [(64, False), (64, True), (128, False), (128, True)]


def kernel_of(number, head_dim=128, causal=True):
    entry = BACKWARD_LEVELS[number]
    return entry.kernel(entry.traits(head_dim, causal), entry.kernel.TILE)


@pytest.mark.parametrize(("head_dim", "causal"), DIMS_AND_MASKS)
@pytest.mark.parametrize("number", BACKWARD_LEVELS)
def test_a_level_builds_without_spills_and_with_its_own_instructions(number, head_dim, causal):
    entry = BACKWARD_LEVELS[number]
    compiled = compile(entry.traits(head_dim, causal), None, entry.arch)
    used = compiled.resources
    assert (used.spill_store_bytes, used.local_bytes, compiled.warnings) == (0, 0, ())
    assert all(compiled.instructions.get(name) for name in HAS[number])
    assert verdict(compiled).step is not None
    kernel = kernel_of(number, head_dim, causal)
    assert not list(reasons(kernel)) and {copy.ways for copy in conflicts(kernel)} <= {1}


def test_a_level_follows_the_one_before_and_declines_the_rest():
    for number, entry in BACKWARD_LEVELS.items():
        assert entry.module.__doc__.startswith(f"Level {number}: ") and "What to look at" in entry.text
    assert "What level 9 wasted" in BACKWARD_LEVELS[10].text
    for name in ("backward-sm80:tour9-fp16-d128", "backward-sm90:tour10-bf16-d128-causal-dropout"):
        with pytest.raises(
            registry.Unsupported, match="bf16, head dims 64 and 128, full or causal, nothing else"
        ):
            registry.lookup(name)
    for name, tile in (("sm80:tour9", "dq_vector=4"), ("sm90:tour10", "tile_n=64")):
        with pytest.raises(registry.Unsupported, match=r"accepted by this level: tile_m=64,tile_n=.* alone"):
            registry.lookup(f"backward-{name}-bf16-d64", tile, "sm90")


PACKAGES = {
    9: "num_warps=8,sdp_warps_m=4,dkv_warps_m=4,dq_warps_m=4,p_in_regs=false,v_in_regs=false,stages_q=1",
    10: "tile_m=64,tile_n=128,p_in_smem=true,num_stages_q=2,num_stages_do=2,num_stages_ds=1",
}
"""Tiles with which the package's kernels, which run on GPUs, have the products of a level."""


@pytest.mark.parametrize("number", BACKWARD_LEVELS)
def test_layouts_and_products_are_those_of_the_packages_kernels(number):
    level, arch = kernel_of(number), BACKWARD_LEVELS[number].arch
    package = registry.lookup(f"backward-{arch}-bf16-d128-causal", PACKAGES[number], "sm90")

    def shown(*mmas):
        return [(str(mma.op), str(mma.thr_layout_vmnk)) for mma in mmas]

    def of_level():
        if number == 9:
            return [*shown(*3 * (level.mma(),)), *(str(level.smem_layout(64, n, 1)) for n in (128, 64))]
        rows = ((128, 128, 1), (64, 128, 2), (64, 128, 1))
        return [
            *shown(level.mma_scores(), level.mma_dkv(), level.mma_dq()),
            *(str(level.smem_layout(*x)) for x in rows),
        ]

    def of_package():
        if number == 9:
            mmas = package.mma_sdp(), package.mma_dkv(), package.mma_dq()
            return [*shown(*mmas), *(str(package.smem_layout(64, n, 1)) for n in (128, 64))]
        mmas = package.mma_scores(), package.mma_dkv(128), package.mma_dq()
        return [*shown(*mmas), *map(str, (package.layout_k(), package.layout_q(), package.layout_ds()))]

    assert trace(of_level) == trace(of_package)


# ---- device code on the CPU ----

SEQLEN_Q, SEQLEN_K, SCALE = 150, 200, 0.125


def for_all_threads(kernel, threads, mma, query, key, scores, lse, gradient):
    """P of a tile in place of ``scores``, and the same numbers as a block of dK, times 2, in ``gradient``."""
    tile_m, tile_n, d = kernel.tile.tile_m, kernel.tile.tile_n, kernel.traits.head_dim

    @cute.jit
    def host(scores: cute.Tensor, lse: cute.Tensor, gradient: cute.Tensor):
        for thread in range(threads):
            of_scores, of_keys = mma(False), mma(True)
            modes = layouts.row_col_modes(of_scores, tile_m, tile_n)
            row, col = layouts.thread_row_col(of_scores, tile_m, tile_n, Int32(thread))
            slice_ = of_scores.get_slice(thread)
            acc = cute.make_rmem_tensor(slice_.partition_shape_C((tile_m, tile_n)), Float32)
            S = layouts.row_col_view(acc, modes)
            for r, i in enumerate(modes.rows):
                for c, j in enumerate(modes.cols):
                    S[r, c] = scores[row + i, col + j]
            kernel.probabilities(
                S, modes, query + row, key + col, SEQLEN_K - SEQLEN_Q, Int32(SEQLEN_K), lse, Float32(SCALE)
            )
            for r, i in enumerate(modes.rows):
                for c, j in enumerate(modes.cols):
                    scores[row + i, col + j] = S[r, c]
            modes = layouts.row_col_modes(of_keys, tile_n, d)
            row, col = layouts.thread_row_col(of_keys, tile_n, d, Int32(thread))
            acc = cute.make_rmem_tensor(of_keys.get_slice(thread).partition_shape_C((tile_n, d)), Float32)
            block = layouts.row_col_view(acc, modes)
            for r, i in enumerate(modes.rows):
                for c, j in enumerate(modes.cols):
                    block[r, c] = Float32(row + i) + 0.5 * Float32(col + j)
            kernel.write(acc, of_keys, gradient, Int32(key), Float32(2.0), Int32(thread))

    tensors = [from_dlpack(x, assumed_align=16) for x in (scores, lse, gradient)]
    with no_arguments():
        compiled = cute.compile[cute.GPUArch("sm_90a")](host, *tensors)
    compiled(*tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", BACKWARD_LEVELS)
def test_probabilities_and_stores_of_all_threads(number, causal):
    kernel = kernel_of(number, 64, causal)
    tile_m, tile_n = kernel.tile.tile_m, kernel.tile.tile_n
    query, key = 128, 128  # queries from 150 on, and keys from 200 on, do not exist
    torch.manual_seed(0)
    scores, lse = torch.randn(tile_m, tile_n), torch.full((query + tile_m,), float("inf"))
    lse[:SEQLEN_Q] = torch.randn(SEQLEN_Q)
    gradient = torch.full((SEQLEN_K, 64), float("nan"))  # the host cannot round to bf16
    rows, keys = query + torch.arange(tile_m), key + torch.arange(tile_n)
    expected = torch.exp2(scores * SCALE * 1.4426950408889634 - lse[query:, None])
    expected[:, keys >= SEQLEN_K] = 0
    if causal:
        expected[keys > rows[:, None] + SEQLEN_K - SEQLEN_Q] = 0

    def mma(of_keys):
        if number == 9:
            return kernel.mma()
        return kernel.mma_dkv() if of_keys else kernel.mma_scores()

    threads = 256
    for_all_threads(kernel, threads, mma, query, key, scores, lse, gradient)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    index = torch.arange(tile_n)[:, None] + 0.5 * torch.arange(64)
    written = gradient[key : min(key + tile_n, SEQLEN_K)]
    assert torch.equal(written, 2 * index[: len(written)])
    assert gradient[:key].isnan().all()


# ---- in the package ----


@pytest.mark.parametrize("number", BACKWARD_LEVELS)
def test_a_call_that_names_a_level_launches_it_between_the_packages_kernels(number, monkeypatch):
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append(kernel))
    q, grad, k, v = (torch.zeros(2, 100, heads, 64, dtype=torch.bfloat16) for heads in (4, 4, 2, 2))
    call = Call(
        q, k, v, max_seqlen_q=100, max_seqlen_k=100, mask="causal", kernel=BACKWARD_LEVELS[number].name
    )
    backward.gradients(call, grad, None, q, torch.zeros(2, 4, 100), (True, True, True, False, False))
    assert [kernel.traits.op for kernel in launched] == [
        "backward_preprocess",
        "backward",
        "backward_convert",
    ]
    assert type(launched[1]) is BACKWARD_LEVELS[number].kernel
    assert launched[1].tile.mma_threads == launched[2].tile.mma_threads == 256
    with pytest.raises(
        ValueError, match=r"deterministic is True; accepted by \w+, whose gradients' bits vary: False"
    ):
        repeated = call._replace(deterministic=True)
        backward.gradients(repeated, grad, None, q, torch.zeros(2, 4, 100), (True, True, True, False, False))
