"""The append kernel: every thread of every CTA, compiled for the CPU, against the definition bit for bit."""

import dataclasses

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.compiler import compile
from cute_attn.device.key_rows import CacheTables, KeyRows
from cute_attn.device.seqlen import sequence_of_row
from cute_attn.host import append
from cute_attn.reference import kvcache as ref
from cute_attn.traits import Traits
from tests import emulated_append, refusals
from tests.kvcache_problem import CASES, UNALIGNED, Case, Problem, random_case


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Run the kernel on the CPU in place of its launch."""
    emulated_append.patch(monkeypatch)


def emulated(problem: Problem, q: torch.Tensor | None = None) -> torch.Tensor | None:
    """Append on every thread, and with ``q`` return its rotated copy."""
    return append.launch(problem.append()._replace(cu_seqlens_q=problem.cu_q, mask=problem.case.mask), q)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; rotated fp32 up to how the compiler fuses multiply and add."""
    if found.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    return found.contiguous().view(torch.int16).equal(expected.contiguous().view(torch.int16))


def check(case: Case, seed: int = 0, dtype: torch.dtype = torch.float16) -> None:
    found, expected = (Problem(case, seed, dtype) for _ in range(2))
    lengths = expected.int32(case.lengths)
    if expected.new is not None:
        ref.append(
            expected.cache, *expected.new, lengths, cu_seqlens_k_new=expected.cu_new, rotary=expected.rotary
        )
    rotated = emulated(found, found.q if case.rotary and found.q.numel() else None)
    assert same(found.k, expected.k) and same(found.v, expected.v)
    if rotated is not None:
        start = lengths if expected.rotary.seqlens is None else expected.rotary.seqlens
        positions = ref.query_positions(start, expected.cu_q, found.q.shape[:-2], bool(case.mask))
        whole = ref.rotate(found.q.flatten(0, -3), positions, expected.rotary)
        assert same(rotated, whole.view(found.q.shape))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.new or case.rotary])
def test_every_thread_against_the_definition(name):
    check(CASES[name])


@pytest.mark.parametrize("alignment", UNALIGNED)
@pytest.mark.parametrize("name", ["page-3", "rotary-halves-causal", "packed-append", "rotary-seqlens"])
def test_head_dims_of_rows_that_start_anywhere(name, alignment):
    case = dataclasses.replace(CASES[name], dims=UNALIGNED[alignment])
    assert Problem(case, dtype=torch.float16).append().alignment == alignment
    check(case)


@pytest.mark.parametrize("dims", [(16, 8), (18, 6), (13, 12)])
@pytest.mark.parametrize("name", ["page-3", "rotary-halves-causal", "packed-append", "rotary-seqlens"])
def test_fp32(name, dims):
    check(dataclasses.replace(CASES[name], dims=dims), dtype=torch.float32)


@pytest.mark.parametrize("seed", range(30))
def test_random_cases(seed):
    check(random_case(seed, appends=True), seed)


@pytest.mark.parametrize("page", [0, 4])
def test_heads_before_rows_and_gaps_between(page):
    """A cache (entries, heads, rows, dim) seen transposed, in the middle of other memory, which stays."""
    case = dataclasses.replace(CASES["batch-idx"], page=page, heads=(4, 2), rotary=8)
    problem, expected = (Problem(case, 1, torch.float16) for _ in range(2))
    storages = []
    for name in ("k", "v"):
        x = getattr(problem, name)
        entries, rows, heads, dim = x.shape
        storage = torch.full((entries, heads + 1, rows, dim + 8), 7.0, dtype=x.dtype)
        view = storage[:, :heads, :, :dim].transpose(1, 2)
        setattr(problem, name, view.copy_(x))
        storages.append((storage, heads, dim))
    emulated(problem)
    ref.append(expected.cache, *expected.new, expected.int32(case.lengths), rotary=expected.rotary)
    assert same(problem.k, expected.k) and same(problem.v, expected.v)
    for storage, heads, dim in storages:
        assert (storage[:, heads:] == 7).all() and (storage[..., dim:] == 7).all()


def test_rows_beyond_the_capacity_are_written_nowhere():
    """Nothing is written to the next entry or through an invalid page number; negative lengths have no rows."""
    for page in (0, 4):
        case = Case((10, 12, -3), new=(5, 5, 5), capacity=12, page=page)
        problem = Problem(dataclasses.replace(case, lengths=(10, 12, 0)), dtype=torch.float16)
        problem.case = case
        before = problem.k.clone()
        emulated(problem)
        changed = {problem.place(0, row) for row in (10, 11)} | {problem.place(2, row) for row in (0, 1)}
        for entry in range(problem.k.shape[0]):
            for row in range(problem.k.shape[1]):
                unchanged = same(problem.k[entry, row], before[entry, row])
                assert unchanged == ((entry, row) not in changed)


def test_offsets_have_64_bits():
    """The address of a row far beyond 2**31 elements."""
    table = torch.tensor([[3, 1 << 20]], dtype=torch.int32)

    @cute.jit
    def offset(table: cute.Tensor, out: cute.Tensor):
        layout = cute.make_layout((1 << 21, 16, 8, 128), stride=(1 << 20, 1 << 13, 1 << 10, 1))
        cache = cute.make_tensor(cute.make_ptr(cutlass.Float16, 0, cute.AddressSpace.generic), layout)
        rows = KeyRows.make(cache, CacheTables(table, None))
        where = rows.row(cache, rows.place(Int32(0), Int32(17)), Int32(3)).iterator
        out[0] = where.toint()

    out = torch.zeros(1, dtype=torch.int64)
    offset(from_dlpack(table), from_dlpack(out))
    assert out.item() == 2 * ((1 << 40) + (1 << 13) + 3 * (1 << 10))


def test_packed_rows_find_their_sequence():
    @cute.jit
    def find(cu_seqlens: cute.Tensor, out: cute.Tensor):
        for row in cutlass.range(out.shape[0]):
            out[row] = sequence_of_row(cu_seqlens, row)

    for ends in ([2, 5, 5, 5, 9], [0, 0, 3], [0, 4], [1, 1, 1, 2]):
        out = torch.full((ends[-1] + 2,), -1, dtype=torch.int32)
        find(from_dlpack(torch.tensor(ends, dtype=torch.int32)), from_dlpack(out))
        starts = ends[:-1]
        assert out.tolist() == [max(0, sum(s <= row for s in starts) - 1) for row in range(len(out))]


# ---- what is built ----

NAMES = [
    "append-sm90-bf16-d128-rotary_halves-rotate_q-paged-batch_idx",
    "append-sm80-fp16-d64x256-varlen-rotary_interleaved-rotate_q-varlen_new",
    "append-sm80-bf16-d256-paged",
]


@pytest.mark.parametrize("name", NAMES)
def test_kernels_build(name):
    assert Traits.parse(name).name == name
    compiled = compile(name)
    assert compiled.resources.spill_store_bytes == compiled.resources.local_bytes == 0
    assert "st.global.v4" in compiled.ptx


@refusals.each("""
Traits("append", "sm80", "bf16", 64, rotate_q=True)
    -> ValueError: rotate_q is True without rotary; accepted: with rotary interleaved or
""")
def test_traits_that_say_nothing_are_refused(call, sentence):
    refusals.check(call, sentence, globals())
