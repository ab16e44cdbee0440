"""A bias loaded by TMA: which tiles can do it, which tensors TMA can read, and how other tensors are loaded."""

import itertools
import re
from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import cute

import layouts
from cute_attn import compiler
from cute_attn.compiler.registry import Unsupported
from cute_attn.host import choose, forward, plans
from cute_attn.host.call import Call
from cute_attn.kernels.backward_sm90.heuristics import TABLE, keys
from cute_attn.kernels.backward_sm90.kernel import BackwardSm90
from cute_attn.rows.tma_bias import ROW_COLS, ROWS, lane_address, lane_address_transposed
from cute_attn.tiles import BackwardSm90Tile, ForwardSm90Tile, padded
from cute_attn.traits import Traits
from layouts import model

TRAITS = Traits("forward", "sm90", "bf16", 64, bias="bf16")
TMA_TILE = ForwardSm90Tile(192, 96, bias_stages=2, speculative=True)
BACKWARD = Traits("backward", "sm90", "bf16", 64, bias="bf16")


def tensor(*shape: int, first: int = 0, row: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Zeros whose rows are ``row`` elements apart, starting at element ``first`` of the memory."""
    batch, nheads, rows, cols = shape
    row = row or cols
    memory = torch.zeros(batch * nheads * rows * row + first + 8, dtype=dtype)
    return memory.as_strided(shape, (nheads * rows * row, rows * row, row, 1), first)


def best_tile(traits: Traits) -> BackwardSm90Tile:
    """The backward's first tile for a bias loaded by TMA."""
    return TABLE.tiles(*keys(traits, "sm90"))[0]


def call(bias: torch.Tensor, tile: str = "", **options) -> Call:
    """A call with two heads and a batch of two, with as many queries as keys."""
    length = bias.shape[3]
    q = torch.empty(2, length, 2, 64, dtype=torch.bfloat16)
    return Call(q, q, q, bias=bias, max_seqlen_q=length, max_seqlen_k=length, tile=tile, **options)


READABLE = {
    "full": tensor(2, 2, 64, 64),
    "one batch": tensor(1, 2, 64, 64),
    "one head": tensor(2, 1, 64, 64),
    "expanded": tensor(1, 1, 64, 64).expand(2, 2, 64, 64),
    "padded": tensor(2, 2, 60, 60, row=64),
    "aligned start": tensor(2, 2, 64, 64, first=8),
    "odd strides of single ones": tensor(1, 1, 64, 64).as_strided((1, 1, 64, 64), (3, 5, 64, 1)),
}
OTHERS = {
    "odd rows": tensor(2, 2, 63, 63),
    "odd heads": tensor(2, 2, 64, 64, row=72).as_strided((2, 2, 64, 64), (9216, 4601, 72, 1)),
    "odd start": tensor(2, 2, 64, 64, first=1),
    "a row": tensor(2, 2, 1, 64),
    "expanded rows": tensor(2, 2, 1, 64).expand(2, 2, 64, 64),
}


@pytest.mark.parametrize("seqlen_k", [64, 4096])
@pytest.mark.parametrize("name", [*READABLE, *OTHERS])
def test_a_bias_is_loaded_by_tma_where_tma_can_read_it(name, seqlen_k):
    """The tile for short sequences does it, and so does the tile for few queries and many keys."""
    bias = (READABLE | OTHERS)[name]
    kernel = choose.choose_kernel(call(bias)._replace(max_seqlen_k=seqlen_k), "sm90")
    assert kernel.loads_bias_by_tma == (name in READABLE)
    assert (kernel.tile.tile_m, kernel.tile.tile_n) == (64, 64 if seqlen_k == 64 else 128)
    assert kernel.tile.reject(kernel.traits, "sm90") is None


@pytest.mark.parametrize("name", OTHERS)
def test_a_named_tile_is_never_replaced(name):
    with pytest.raises(Unsupported, match=r"bias has shape .* accepted: more rows than one, multiples of 8 "):
        choose.choose_kernel(call(OTHERS[name], str(TMA_TILE)), "sm90")


@pytest.fixture
def tma_backward_default(monkeypatch):
    """The backward's default tile loads the bias by TMA."""
    best = classmethod(lambda cls, traits, target: best_tile(traits))
    monkeypatch.setattr(BackwardSm90, "default_tile", best)


@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("name", [*READABLE, *OTHERS])
def test_a_backward_loads_the_bias_by_tma_where_it_can_read_it_and_store_its_gradient(
    tma_backward_default, name, bias_grad
):
    bias = (READABLE | OTHERS)[name]
    storable = bias.shape == (2, 2, bias.shape[3], bias.shape[3]) and bias.shape[3] % 8 == 0
    kernel = choose.choose_kernel(call(bias), "sm90", op="backward", bias_grad=bias_grad)
    assert kernel.loads_bias_by_tma == (name in READABLE and (storable or not bias_grad))
    assert kernel.tile.reject(kernel.traits, "sm90") is None


def test_a_named_backward_tile_is_never_replaced():
    unstorable = call(READABLE["one head"], backward_tile="bias_stages=2")
    assert choose.choose_kernel(unstorable, "sm90", op="backward").loads_bias_by_tma
    with pytest.raises(
        Unsupported, match=r"bias has shape .* and a gradient; accepted: \(2, 2, 64, 64\) with "
    ):
        choose.choose_kernel(unstorable, "sm90", op="backward", bias_grad=True)


def test_plans_of_aligned_and_other_addresses_differ(monkeypatch):
    monkeypatch.setattr(plans, "plan", lambda key, *_: key)
    q = torch.randn(2, 64, 2, 64)
    biases = [tensor(2, 2, 64, 64, first=first) for first in (0, 1, 8, 2)]
    keys = [forward.plan_of(Call(q, q, q, bias=bias)) for bias in biases]
    assert keys[0] == keys[2] != keys[1] == keys[3]


def test_shared_memory_and_registers_of_a_tma_bias():
    without = replace(TMA_TILE, bias_stages=0)
    assert TMA_TILE.smem_bytes(TRAITS) - without.smem_bytes(TRAITS) == 2 * 2 * 192 * 96
    assert TMA_TILE.registers(TRAITS) == without.registers(replace(TRAITS, bias=""))


def test_a_tma_bias_is_read_by_ldmatrix():
    """The kernels are ones that test_defaults.py builds too."""
    compiled = compiler.compile(TRAITS, target="sm90")
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.local_bytes == 0 and compiled.warnings == ()
    assert resources.shared_memory_bytes == compiled.tile.smem_bytes(TRAITS)
    assert compiled.tile.bias_stages == 2 and compiled.instructions["LDSM"] > 0
    direct = compiler.compile(replace(TRAITS, mask="causal", bias="fp32"), target="sm90")
    assert "LDG" not in compiled.instructions
    assert direct.tile.bias_stages == 0 and direct.instructions["LDG"] > 0


@pytest.mark.parametrize("cols", [16, 32, 80, 96, 128, 192])
def test_lane_addresses_of_rows_match_tmas_layout(cols):
    """ldmatrix's addresses match the swizzled layout that TMA writes."""
    swizzle = layouts.choose_swizzle(cols, 16)
    bytewise = layouts.Swizzle(swizzle.bits, 4, 3)
    width, wrong = layouts.atom_cols(cols, 16), []

    def compare():
        outer = layouts.wgmma_smem_layout(ROWS, cols, cutlass.BFloat16).outer
        for lane, first in itertools.product(range(128), range(0, cols, 16)):
            row, half = lane // 32 * 16 + lane % 16, lane // 16 % 2
            expected = bytewise(2 * cute.crd2idx((row, first + 8 * half), outer))
            found = (lane_address(0, lane, cols) ^ 2 * (first % width)) + 2 * ROWS * (first - first % width)
            if found != expected:
                wrong.append((lane, first))

    model.trace(compare)
    assert not wrong


@pytest.mark.parametrize("queries, groups", [(48, 2), (64, 1), (128, 2), (64, 3)])
def test_lane_addresses_of_queries_match_tmas_layout(queries, groups):
    """The same for the backward: 16 keys per warp, eight queries at a time."""
    bytewise, wrong = layouts.Swizzle(3, 4, 3), []

    def compare():
        outer = layouts.wgmma_smem_layout(queries, groups * ROW_COLS, cutlass.BFloat16).outer
        for thread, first in itertools.product(range(128 * groups), range(0, queries, 16)):
            lane, matrix = thread % 8, thread // 8 % 4  # four matrices of 8 x 8: keys first, then queries
            position = (first + 8 * (matrix // 2) + lane, thread // 32 * 16 + 8 * (matrix % 2))
            expected = bytewise(2 * cute.crd2idx(position, outer))
            if lane_address_transposed(0, thread, queries) + 2 * ROW_COLS * first != expected:
                wrong.append((thread, first))

    model.trace(compare)
    assert not wrong


def with_constants(ptx: str) -> str:
    """``ptx`` with constants for the registers that they are moved to."""
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    return re.sub(r"%r\d+", lambda found: constants.get(found[0], found[0]), ptx)


@pytest.mark.slow
def test_a_backward_reads_a_tma_bias_transposed_and_stores_its_gradient_by_tma():
    """Under a softcap threads store the gradient instead."""
    traits = replace(BACKWARD, bias_grad=True)
    for softcap in (False, True):
        kernel = BackwardSm90(replace(traits, softcap=softcap), best_tile(traits))
        assert kernel.stores_bias_gradient != softcap
    compiled = compiler.compile(traits, best_tile(traits), "sm90")
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.local_bytes == 0 and compiled.warnings == ()
    assert compiled.tile.bias_stages == 2 and "LDG" not in compiled.instructions
    assert "LDSM.16.MT88.4" in compiled.sass
    expected_bytes = {int(n) for n in re.findall(r"expect_tx\S* .*, (\d+);", with_constants(compiled.ptx))}
    tile, d = compiled.tile, padded(traits.head_dim)
    rows = tile.tile_m * (2 * d + 4)  # Q with LSE, and dO with D
    assert expected_bytes == {2 * tile.tile_n * d, rows, rows + 2 * tile.tile_m * tile.tile_n}
    assert "STG" not in compiled.instructions
