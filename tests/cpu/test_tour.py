"""The levels of the tour: their size, what they compile to, and their device code for all threads on the CPU."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import compile, registry, toolchain
from cute_attn.compiler.smem_layouts import reasons
from cute_attn.device.math import LOG2_E
from cute_attn.epilogues import softmax as package_softmax
from cute_attn.epilogues.softmax import OnlineSoftmax, multiply_rows
from cute_attn.host.call import Call
from cute_attn.host.choose import choose_kernel
from cute_attn.lab.copies import conflicts
from cute_attn.lab.verdict import verdict
from layouts.model import no_arguments, trace
from tour import __main__ as command
from tour import page, report
from tour.common import with_epilogue
from tour.levels import LEVELS

OWN = range(1, 8)  # the eighth is the package's
SCALE = 0.25


def kernel_of(number, causal=True, head_dim=64, score_mod=None):
    traits = LEVELS[number].traits(head_dim, causal)
    cls = LEVELS[number].kernel
    if score_mod is not None:
        cls = with_epilogue(cls, score_mod)
    return cls(traits, cls.TILE)


# ---- files and kernels ----


@pytest.mark.parametrize("number", LEVELS)
def test_a_level_is_one_short_file(number):
    entry = LEVELS[number]
    lines = Path(entry.module.__file__).read_text().splitlines()
    assert len(lines) <= 200
    imported = {line.split()[1] for line in lines if line.startswith("from tour")}
    assert imported <= {"tour.common"}
    assert entry.module.__doc__.startswith(f"Level {number}: ")
    assert number == 1 or f"What level {number - 1} wasted" in entry.text
    assert number == 8 or "What to look at" in entry.text


NEW = {1: "SHFL", 2: "HMMA", 3: "LDSM", 4: "LDGSTS", 5: "HGMMA", 6: "USETMAXREG", 7: "BAR"}
"""An instruction that the level before has none of; the seventh has named barriers."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", OWN)
def test_a_level_builds_without_spills_and_with_its_own_instructions(number, causal):
    compiled = compile(LEVELS[number].traits(128, causal), None, "sm90")
    used, count = compiled.resources, compiled.instructions
    assert (used.spill_store_bytes, used.spill_load_bytes, used.local_bytes, compiled.warnings) == (
        0,
        0,
        0,
        (),
    )
    assert count[NEW[number]] > 0
    assert bool(count.get("HMMA")) == (number in (2, 3, 4)) and bool(count.get("HGMMA")) == (number > 4)
    assert bool(count.get("UTMALDG")) == (number > 4) and bool(count.get("LDSM")) == (number in (3, 4))
    tile = LEVELS[number].kernel.TILE
    assert used.shared_memory_bytes <= tile.smem_bytes(compiled.traits)


def test_a_level_declines_in_one_sentence_what_it_does_not_compute():
    for name, message in (
        ("forward-sm80:tour3-fp16-d128", "bf16, head dims 64 and 128"),
        ("forward-sm90:tour5-bf16-d96", "bf16, head dims 64 and 128"),
        ("forward-sm90:tour7-bf16-d128-window", "full or causal, nothing else"),
        ("forward-sm90:tour6-bf16-d128-varlen", "nothing else"),
    ):
        with pytest.raises(registry.Unsupported, match=message):
            registry.lookup(registry.Traits.parse(name))
    for number, tile, message in (
        (4, "num_stages=1", "num_stages is 1; accepted: 2 or more"),
        (3, "num_stages=2", "num_stages is 2; accepted: 1 alone"),
        (7, "tile_m=64", "tile_m is 64 with 8 warps; accepted: 128 with 8"),
        (2, "tile_n=24", "tile_n is 24; accepted: multiples of 16"),
        (6, "num_stages=4", "bytes of shared memory"),
    ):
        with pytest.raises(registry.Unsupported, match=message):
            registry.lookup(LEVELS[number].traits(), tile, "sm90")


def test_a_launch_takes_the_arguments_of_the_package():
    """``attention`` launches a level as any forward: by its place, with tuples of the same form."""

    def signature(number):
        compiled, x = compile(LEVELS[number].traits(128, True), None, "sm90"), torch.zeros(1, 1, 1, 128)
        with pytest.raises((ValueError, TypeError)) as refused:
            compiled.function(x, x, x, x, x, None, 0.0, None, None)
        types = re.search(r"__call__\((.*)\)`", str(refused.value))[1]
        return re.sub(r"\w+: ", "", types).partition(", Tuple[float32")[0]

    shipped = signature(8)
    assert shipped.count("Tuple") == 2 and shipped.count("Tensor") == 6
    assert {number: signature(number) for number in OWN} == dict.fromkeys(OWN, shipped)
    taken = (
        registry.lookup(LEVELS[7].traits()).score_args(None),
        registry.lookup(LEVELS[7].traits()).fake_args()[-1],
    )
    assert [len(x) for x in taken] == [1, 1]


@pytest.mark.parametrize("number", LEVELS)
def test_a_call_gets_the_level_it_asks_for(number):
    q = torch.empty(1, 2048, 8, 128, dtype=torch.bfloat16)
    entry = LEVELS[number]
    call = Call(q, q, q, max_seqlen_q=2048, max_seqlen_k=2048, kernel=entry.name)
    kernel = choose_kernel(call, "sm90")
    assert f"{kernel.traits.arch}:{kernel.traits.variant}".rstrip(":") == entry.name


def test_the_laboratory_takes_the_levels():
    """Each clock bound is below that of the level before, down to the tensor cores' own."""
    judged = {
        number: verdict(compile(LEVELS[number].traits(128, True), None, "sm90")) for number in range(2, 8)
    }
    per_score = [max(one.step.clocks.units.values()) / one.step.scores for one in judged.values()]
    assert per_score == sorted(per_score, reverse=True) and len(set(per_score)) == 5
    assert judged[7].step.clocks.bound == "tensor cores" == judged[6].step.clocks.bound
    assert str(judged[7].proxies) == "none needed: no thread accesses what TMA fills"


def test_the_command_measures_nothing_without_a_gpu(monkeypatch, capsys):
    for words in (["--measure"], ["4", "--check"]):
        monkeypatch.setattr("sys.argv", ["tour", *words])
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(SystemExit, match="2"):
            command.main()
        assert capsys.readouterr().err.startswith("error: there is no GPU; ")
    monkeypatch.setattr("sys.argv", ["tour"])
    command.main()
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        entry.name for entry in LEVELS.values()
    ]


@pytest.mark.parametrize("number", [4, 5, 6, 7])
def test_layouts_and_products_are_those_of_the_packages_kernels(number):
    """Which run on GPUs: shared memory, where K and V lie, and both MMAs."""
    level, d = kernel_of(number, head_dim=128), 128
    rows, keys, stages = level.tile.tile_m, level.tile.tile_n, level.tile.num_stages
    arch = LEVELS[number].arch
    tile = f"tile_m={rows},tile_n={keys},num_stages={stages}"
    tile += ",num_warps=4" if arch == "sm80" else ",q_in_regs=false,speculative=false"
    package = registry.lookup(registry.Traits("forward", arch, "bf16", d), tile, "sm90")

    def of(kernel):
        if number == 4:
            return [
                str(
                    kernel.smem_layout(keys, stages)
                    if kernel is level
                    else kernel.smem_layout(keys, d, stages)
                )
            ]
        own = (keys, stages) if kernel is level else (keys, d, stages)
        products = [(str(mma.op), str(mma.thr_layout_vmnk)) for mma in (kernel.mma_qk(), kernel.mma_pv())]
        return [str(kernel.smem_layout(*own)), *products]

    assert trace(lambda: of(level)) == trace(lambda: of(package))


class WithoutSwizzle(LEVELS[3].kernel):
    def smem_layout(self, rows):
        return layouts.smem_layout(rows, self.traits.head_dim, self.dtype, swizzle_bits=0)


@pytest.mark.parametrize("number", OWN)
def test_copies_are_counted_and_layouts_are_right(number):
    kernel = kernel_of(number, head_dim=128)
    assert not list(reasons(kernel))
    found = conflicts(kernel)
    assert len(found) == (5 if number in (3, 4) else 0) and {copy.ways for copy in found} <= {1}


def test_level_3_without_its_swizzle_has_the_conflicts_that_its_text_promises():
    found = conflicts(WithoutSwizzle(LEVELS[3].traits(128, True), WithoutSwizzle.TILE))
    assert {copy.ways for copy in found if copy.opcode == "LDSM"} == {8}


def test_an_epilogue_is_a_function_of_a_file():
    with pytest.raises(ValueError, match="accepted: a function at the top of a file"):
        with_epilogue(LEVELS[4].kernel, lambda score, query, key, head: score)
    assert with_epilogue(LEVELS[4].kernel, nearer).SCORE_MOD is nearer
    assert (
        registry.KERNELS["forward", "sm80", "tour4_nearer"].__module__ == __name__
    )  # whose file is in the key


# ---- the page ----


def test_the_page_is_of_todays_texts_and_numbers():
    facts = json.loads((page.ROOT / page.FACTS).read_text())
    assert (page.ROOT / page.PAGE).read_text() == page.page(facts, page.newest_result()), "make tour"
    assert facts["bank_conflict_ways"] == report.bank_conflict_ways() == {"swizzled": 1, "plain": 8}
    if facts["toolchain"] == toolchain():
        assert facts["levels"]["7"] == report.facts(LEVELS[7]), "make tour"


RESULT = {
    "gpu": "a GPU",
    "driver": "1",
    "torch": "2",
    "cutlass_dsl": "4",
    "commit": "abc",
    "date": "2026-01-01T00:00",
    "rows": [
        {"workload": "fwd" + which, "impl": f"level {n}", "ms": 1.0, "value": 10.0 * n, "unit": "TFLOP/s"}
        for n in range(1, 8)
        for which in ("", "-causal")
    ]
    + [
        {"workload": "fwd", "impl": "level 8", "ms": 1.0, "value": 80.0, "unit": "TFLOP/s"},
        {"workload": "fwd-causal", "impl": "level 8", "error": "its check took more than 300 s"},
    ],
}


def test_a_measurement_becomes_a_table_a_page_and_a_picture(tmp_path):
    lines = report.table(RESULT).splitlines()
    assert len(lines) == 9 and lines[7].split()[-3:] == ["70.0", "88%", "70.0"] and lines[8].endswith(" -")
    text = page.page(json.loads((page.ROOT / page.FACTS).read_text()), RESULT)
    assert "| 10 | 10 |" in text and "| 80 | failed |" in text and "commit abc" in text
    assert report.plot(RESULT, tmp_path / "climb.png").stat().st_size > 1000


# ---- device code on the CPU ----


def nearer(score, query, key, head):
    """An epilogue: scores fall with the distance, by head."""
    return score - 0.05 * Float32(head + 1) * Float32(query - key)


class Quads:
    """Reductions over four lanes where threads run one after the other.

    Every thread writes its value to a table, and reduces what is there. All threads run again and again: after round n
    the first n reductions are right, since what leads to them is.
    """

    def begin(self, table, thread):
        """What follows is traced for ``thread``."""
        self.table, self.thread, self.calls = table, thread, 0

    def reduce(self, x, op):
        table, call = self.table, self.calls
        self.calls += 1
        table[self.thread, call] = x
        first = self.thread - self.thread % 4
        values = [table[first + lane, call] for lane in range(4)]
        return op(op(values[0], values[1]), op(values[2], values[3]))


@cute.jit
def attend(case: Constexpr, products: cute.Tensor, values: cute.Tensor, table: cute.Tensor, out: cute.Tensor):
    """out[thread, row] = (query, the lane's part of O, lse) of a CTA's query block."""
    for _ in cutlass.range(case.rounds):
        for thread in cutlass.range(case.threads):
            attend_thread(case, products, values, table, out, thread)


@cute.jit
def attend_thread(case: Constexpr, products, values, table, out: cute.Tensor, thread: Int32):
    case.quads.begin(table, thread)
    level, mma = case.level, case.mma()
    tile_m, tile_n, _, _ = level.sizes
    modes = layouts.row_col_modes(mma, tile_m, tile_n)
    row, col = layouts.thread_row_col(mma, tile_m, tile_n, thread)
    row += case.row0
    acc_S = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((tile_m, tile_n)), Float32)
    S = layouts.row_col_view(acc_S, modes)
    O = cute.make_rmem_tensor((len(modes.rows), 1), Float32)
    row_max, row_sum, lse = (cute.make_rmem_tensor(len(modes.rows), Float32) for _ in range(3))
    O.fill(0.0)
    row_max.fill(-Float32.inf)
    row_sum.fill(0.0)
    state = SimpleNamespace(level=level, modes=modes, row=row, S=S, O=O, max=row_max, sum=row_sum, lse=lse)
    case.steps.begin(state, case)
    for one_pass in cutlass.range_constexpr(case.steps.passes):
        for block in cutlass.range_constexpr(case.blocks):
            for r in cutlass.range_constexpr(len(modes.rows)):
                for c in cutlass.range_constexpr(len(modes.cols)):
                    S[r, c] = products[row - case.row0 + modes.rows[r], block * tile_n + col + modes.cols[c]]
            case.steps.step(state, case, one_pass, block, col)
            if cutlass.const_expr(one_pass == case.steps.passes - 1):
                for r in cutlass.range_constexpr(len(modes.rows)):
                    for c in cutlass.range_constexpr(len(modes.cols)):
                        O[r, 0] = O[r, 0] + S[r, c] * values[block * tile_n + col + modes.cols[c]]
    case.steps.finish(state, case)
    for r in cutlass.range_constexpr(len(modes.rows)):
        out[thread, r, 0] = Float32(row + modes.rows[r])
        out[thread, r, 1] = O[r, 0]
        out[thread, r, 2] = lse[r]


class TwoPasses:
    """Levels 2 and 3."""

    passes = 2

    @staticmethod
    def begin(state, case):
        pass

    @staticmethod
    def step(state, case, one_pass, block, col):
        level, fmax = state.level, package_softmax.fmax
        at = state.row, col + block * level.tile.tile_n
        level.mask(state.S, state.modes, *at, Int32(case.seqlen_q), Int32(case.seqlen_k))
        if one_pass == 0:
            for r in range(len(state.modes.rows)):
                for c in range(len(state.modes.cols)):
                    state.max[r] = fmax(state.max[r], state.S[r, c])
                if block == case.blocks - 1:
                    state.max[r] = case.quads.reduce(state.max[r], fmax)
        else:
            level.probabilities(state.S, state.max, state.sum, Float32(SCALE * LOG2_E))

    @staticmethod
    def finish(state, case):
        for r in range(len(state.modes.rows)):
            factor, state.lse[r] = state.level.finish(state.max[r], state.sum[r], Float32(SCALE * LOG2_E))
            state.O[r, 0] = state.O[r, 0] * factor


class OnlineSteps:
    """Levels 4 and 5: the file's own softmax."""

    passes = 1
    begin = TwoPasses.begin

    @staticmethod
    def step(state, case, one_pass, block, col):
        level = state.level
        shift, seqlen_k = Int32(case.seqlen_k - case.seqlen_q), Int32(case.seqlen_k)
        at = state.row, block * level.tile.tile_n + col
        level.modify(state.S, state.modes, *at, shift, seqlen_k, Int32(case.head), Float32(SCALE), True)
        level.softmax(state.S, state.O, state.max, state.sum, level.scale_log2(Float32(SCALE)))

    @staticmethod
    def finish(state, case):
        for r in range(len(state.modes.rows)):
            scale = state.level.scale_log2(Float32(SCALE))
            factor, state.lse[r] = state.level.finish(state.max[r], state.sum[r], scale)
            state.O[r, 0] = state.O[r, 0] * factor


class PackagesSteps:
    """Levels 6 and 7: the package's softmax; the seventh visits the last block first."""

    passes = 1

    @staticmethod
    def begin(state, case):
        scale = LOG2_E * (SCALE if state.level.SCORE_MOD is None else 1.0)
        state.softmax = OnlineSoftmax.make(2, Float32(scale), state.level.SCORE_MOD is not None)

    @staticmethod
    def step(state, case, one_pass, block, col):
        level, shift = state.level, case.seqlen_k - case.seqlen_q
        factors = cute.make_rmem_tensor(2, Float32)
        rest = Int32(shift), Int32(case.seqlen_k), Int32(case.head), Float32(SCALE)
        if case.number == 6:
            level.modify(state.S, state.modes, state.row, block * level.tile.tile_n + col, *rest, True)
        else:
            level.modify(state.S, state.modes, (state.row, col, *rest), Int32(block), True)
        state.softmax.advance(state.S, factors, True)
        multiply_rows(state.O, factors)

    @staticmethod
    def finish(state, case):
        state.softmax.normalize(state.O, state.lse, Float32(1.0))


STEPS = {2: TwoPasses, 3: TwoPasses, 4: OnlineSteps, 5: OnlineSteps, 6: PackagesSteps, 7: PackagesSteps}


def emulated(monkeypatch, number, level, row0, seqlen_q, seqlen_k, products, values):
    """O and LSE by query, of the level's code for all threads of the CTA at row0."""
    blocks, tile = -(-seqlen_k // level.tile.tile_n), level.tile
    quads, steps = Quads(), STEPS[number]
    module = importlib.import_module(f"tour.level{number}")
    for where in (module, package_softmax):
        if hasattr(where, "quad_reduce"):
            monkeypatch.setattr(where, "quad_reduce", quads.reduce)

    def mma():
        if number < 5:
            return layouts.tiled_mma_sm80(cutlass.BFloat16, tile.num_warps)
        return level.mma_qk()

    calls = 2 * (blocks if steps.passes == 1 else 1) + 2
    case = SimpleNamespace(
        level=level,
        mma=mma,
        quads=quads,
        steps=steps,
        number=number,
        blocks=blocks,
        rounds=calls + 1,
        row0=row0,
        threads=32 * tile.num_warps,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head=1,
    )
    out = torch.zeros(32 * tile.num_warps, 2, 3)
    tensors = [from_dlpack(x) for x in (products, values, torch.zeros(out.shape[0], calls), out)]
    with no_arguments():
        compiled = cute.compile[cute.GPUArch("sm_90a")](attend, case, *tensors)
    compiled(*tensors)
    quad = out.view(-1, 4, 2, 3)
    assert torch.equal(quad[:, :1, :, 0].expand(-1, 4, -1), quad[..., 0])  # four lanes share a row
    queries = quad[:, 0, :, 0].flatten().long()
    found_o, found_lse = torch.zeros(tile.tile_m), torch.zeros(tile.tile_m)
    found_o[queries - row0] = quad[..., 1].sum(1).flatten()
    found_lse[queries - row0] = quad[:, 0, :, 2].flatten()
    return found_o, found_lse


@pytest.mark.parametrize("number", STEPS)
@pytest.mark.parametrize("which", ["inside", "first"])
def test_masks_softmax_and_lse_are_the_definitions(monkeypatch, number, which):
    """Of a CTA in the middle of the queries, from level 4 on with an epilogue; of one whose first queries see no key.

    Keys end within a block.
    """
    score_mod = nearer if which == "inside" and number > 3 else None
    level = kernel_of(number, score_mod=score_mod)
    tile = level.tile
    blocks = 3 if number < 6 else 2
    row0, seqlen_k = tile.tile_m, blocks * tile.tile_n - 7
    seqlen_q = seqlen_k - tile.tile_n // 2 + row0  # the query row0 sees half a block
    if which == "first":
        row0, seqlen_q = 0, seqlen_k + 9
    torch.manual_seed(number)
    products = 4 * torch.randn(tile.tile_m, blocks * tile.tile_n)
    values = torch.randn(blocks * tile.tile_n)
    found_o, found_lse = emulated(monkeypatch, number, level, row0, seqlen_q, seqlen_k, products, values)

    query, key = row0 + torch.arange(tile.tile_m)[:, None], torch.arange(blocks * tile.tile_n)[None]
    scores = SCALE * products.double()
    if score_mod is not None:
        scores = scores - 0.05 * 2 * (query - key)
    scores[(key >= seqlen_k) | (key > query + seqlen_k - seqlen_q)] = -torch.inf
    lse = scores.logsumexp(-1)
    expected = scores.softmax(-1).nan_to_num(0.0) @ values.double()
    assert (which == "first") == bool(lse.isinf().any())
    torch.testing.assert_close(found_o.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(found_lse.double(), lse, rtol=0, atol=2e-5)


@cute.jit
def write_fragments(level: Constexpr, g: cute.Tensor, row0: Int32, out: cute.Tensor):
    tile_m, _, d, _ = level.sizes
    mma = layouts.tiled_mma_sm80(cutlass.BFloat16, level.tile.num_warps)
    for thread in cutlass.range(cute.size(out.shape[0])):
        mine = mma.get_slice(thread)
        coords = mine.partition_A(cute.make_identity_tensor((tile_m, d)))
        fragment = mma.make_fragment_A(mine.partition_shape_A((tile_m, d)))
        level.load_pairs(g, coords, row0, fragment)
        words = cute.recast_tensor(fragment, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            row, col = coords[2 * i]
            out[thread, i, 0], out[thread, i, 1], out[thread, i, 2] = words[i], row, col


def test_fragments_are_loaded_straight_from_global_memory():
    """Of level 2, two neighbouring elements at a time; rows beyond the end are the last row."""
    level, seqlen, row0 = kernel_of(2), 100, 64
    g = torch.randn(seqlen, 64).bfloat16()
    out = torch.zeros(128, 16, 3, dtype=torch.int32)
    tensors = from_dlpack(g, assumed_align=16), from_dlpack(out)
    with no_arguments():
        cute.compile(write_fragments, level, tensors[0], Int32(row0), tensors[1])(
            tensors[0], row0, tensors[1]
        )
    words, rows, cols = out.unbind(-1)
    expected = g.view(torch.int32)[(row0 + rows.long()).clamp(max=seqlen - 1), cols.long() // 2]
    assert torch.equal(words, expected)
    places = {(int(r), int(c)) for r, c in zip(rows.flatten(), cols.flatten(), strict=True)}
    assert places == {(r, c) for r in range(64) for c in range(0, 64, 2)}


@cute.jit
def write_work(level: Constexpr, mO: cute.Tensor, mK: cute.Tensor, out: cute.Tensor):
    for index in cutlass.range(cute.size(out.shape[0])):
        values = level.work(index, mO, mK)
        for i in cutlass.range_constexpr(6):
            out[index, i] = values[i]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 300), (129, 700), (600, 130), (1, 1)])
def test_a_persistent_cta_takes_every_work_tile_once(causal, seqlen_q, seqlen_k):
    """Level 7: each (batch, head, query block) once, with its key blocks, and those that need no mask."""
    level, batch, nheads, nheads_kv = kernel_of(7, causal), 2, 6, 3
    m_blocks, tile_m, tile_n = -(-seqlen_q // 128), *level.sizes[:2]
    o, k = torch.zeros(batch, seqlen_q, nheads, 8), torch.zeros(batch, seqlen_k, nheads_kv, 8)
    out = torch.zeros(m_blocks * nheads * batch, 6, dtype=torch.int32)
    tensors = [from_dlpack(x) for x in (o, k, out)]
    with no_arguments():
        cute.compile(write_work, level, *tensors)(*tensors)
    seen = set()
    for m_block, head, head_kv, b, n_blocks, full in out.tolist():
        seen.add((m_block, head, b))
        assert head_kv == head // 2
        queries = np.arange(m_block * tile_m, min((m_block + 1) * tile_m, seqlen_q))
        ends = (
            np.minimum(seqlen_k, queries + seqlen_k - seqlen_q + 1)
            if causal
            else np.full(len(queries), seqlen_k)
        )
        assert n_blocks >= max(0, -(-ends.max() // tile_n)) and n_blocks <= -(-seqlen_k // tile_n)
        assert full == max(0, ends.min() // tile_n) and full <= n_blocks
    assert seen == {(m, h, b) for m in range(m_blocks) for h in range(nheads) for b in range(batch)}
