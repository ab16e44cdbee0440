"""The tests' own tools: the cover of all default kernels, quick builds, forked processes."""

from dataclasses import asdict
from itertools import product

import pytest
import torch
from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl
from cutlass.base_dsl.compiler import Compiler
from cutlass.cutlass_dsl import tvm_ffi_provider

from cute_attn import compiler
from cute_attn.compiler import compiled
from cute_attn.reference import emulate
from cute_attn.reference.tilings import TINY, Scores
from tests import processes, quick_builds, toy
from tests.defaults import STORAGE, cover, covering, demands, every, representative

# ---- defaults ----


def test_the_cover_meets_the_demands_of_all_defaults():
    defaults, chosen = representative(), cover()
    assert set().union(*map(demands, chosen)) == set().union(*map(demands, defaults))
    assert len(chosen) == len(set(chosen)) < len(defaults)
    tiles, covered = (
        {(d.traits.op, d.traits.arch, without_storage(d.kernel.tile)) for d in some if is_tight(d)}
        for some in (defaults, chosen)
    )
    assert tiles == covered and len(tiles) > 40
    common = {f"{op}-{arch}-bf16-d{d}-causal-{arch}" for op, arch, d in product(OPS, ARCHS, (64, 128))}
    assert common <= set(map(str, chosen))
    for default in chosen:
        others = set().union(*(demands(other) for other in chosen if other != default))
        assert demands(default) - others or str(default) in common


OPS, ARCHS = ("forward", "backward"), ("sm80", "sm90")


def is_tight(default) -> bool:
    """Whether a kernel with products of 16 bits takes most of a thread's registers, as its tile estimates."""
    tile, traits = default.kernel.tile, default.traits
    of_hopper = {1: 255, 2: 240, 3: 160}.get(getattr(tile, "warpgroups", 0), 255)
    return traits.op in OPS and traits.dtype != "fp32" and tile.registers(traits) > 0.7 * of_hopper


def without_storage(tile):
    """A tile without what says where its data lies."""
    return tuple((name, value) for name, value in asdict(tile).items() if name not in STORAGE)


def named(name: str):
    (default,) = (d for d in every() if str(d) == name)
    return default


def test_demands_of_a_kernel():
    """Worked out by hand: tiles, targets, where data lies and each trait."""
    plain = named("forward-sm90-bf16-d64-causal-sm90")
    short = named("forward-sm90-bf16-d64-causal-sm90-512x512x1")
    alibi = named("forward-sm90-bf16-d64-causal-alibi-sm90")
    kernel = ("forward", "sm90")
    common = {(kernel, "dtype", "bf16"), (kernel, "mask", "causal"), (kernel, "target", "sm90")}
    assert all(common <= demands(default) for default in (plain, short, alibi))
    assert demands(alibi) - demands(plain) == {(kernel, "alibi", True)}
    assert not demands(plain) - demands(alibi)  # one tile
    more = dict(demand[1:] for demand in demands(short) - demands(plain))
    assert more.pop("num_stages") == short.kernel.tile.num_stages
    assert "'blocks_per_sm': 3" in more["tile"] and "num_stages" not in more["tile"]


def test_of_a_tile_with_registers_to_spare_switches_count():
    """Of the decode tile of few rows, not of a tight one, nor of fp32, whose estimates are low."""
    decode, causal, fp32 = map(
        named,
        (
            "forward-sm80-bf16-d64-sm80-1x4096x8",
            "forward-sm80-bf16-d64-causal-sm80",
            "backward-sm80-fp32-d64-causal-sm90",
        ),
    )
    found = [{demand[1] for demand in demands(default)} for default in (decode, causal, fp32)]
    assert [("tile" in names, "q_in_regs" in names) for names in found] == [
        (False, True),
        (True, False),
        (True, False),
    ]


def test_of_head_dims_with_one_tile_the_largest_counts():
    small, large = (
        {demand for demand in demands(named(f"backward-sm90-bf16-d{name}-sm90")) if "head_dim" in demand}
        for name in ("224", "256-causal")
    )
    assert not small and large == {(("backward", "sm90"), "head_dim", 256)}


def test_kernels_without_products_are_one_kernel_on_both_generations():
    ampere, hopper = (demands(named(f"combine-{arch}-fp16-d64-sm90")) for arch in ("sm80", "sm90"))
    assert ampere ^ hopper == {(("combine", ""), "arch", arch) for arch in ("sm80", "sm90")}


def test_tiles_that_differ_in_storage_are_one():
    def found(name: str) -> set:
        return {demand for demand in demands(named(name)) if demand[1] in ("tile", "dq_vector")}

    ampere, hopper = (found(f"backward-sm80-bf16-d128-{target}") for target in ("sm80", "sm90"))
    kernel = ("backward", "sm80")
    assert ampere ^ hopper == {(kernel, "dq_vector", 1), (kernel, "dq_vector", 4)} and ampere & hopper


def test_a_greedy_cover():
    """Of sets of letters: the one that adds most for its cost, of equals the largest, in the order given."""
    sets = ["ab", "bc", "cd", "abe", "f", "cF"]

    def letters(word: str) -> set:
        return set(word.lower())

    assert covering(sets, letters) == ["cd", "abe", "cF"]
    assert covering(sets, letters, cost=lambda word: 1 + 3 * (word == "cF")) == ["cd", "abe", "f"]
    assert covering(["ab", "abe", "e"], letters, cost=lambda word: 9 if word == "abe" else 1) == ["ab", "e"]
    assert covering(sets, letters, always=["bc"]) == ["bc", "cd", "abe", "cF"]
    assert covering(["abcd", "abe", "cdf"], set) == ["abe", "cdf"], (
        "the first has nothing that these have not"
    )
    assert covering([], set) == []


# ---- builds ----


@pytest.mark.parametrize(
    "name, tile", [(toy.NAME, "values=256"), ("backward_convert-sm80-bf16-d64", None)], ids=["spills", "real"]
)
@pytest.mark.filterwarnings("ignore::cute_attn.SpillWarning")
def test_quick_builds_yield_the_same_kernels(name, tile, fresh_cache, tmp_path, monkeypatch):
    quick = compiler.compile(name, tile, "sm90")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setattr(compiled, "_requests", {})
    monkeypatch.setattr(compiled, "_kernels", {})
    tracking = []

    def track(enable):
        tracking.append(enable)
        op._set_enable_frame_filtering(enable)

    monkeypatch.setattr(dsl, "_set_enable_frame_filtering", track)
    monkeypatch.setattr(tvm_ffi_provider, "_aot_support", quick_builds.EXPORTER)
    looked_at = []
    monkeypatch.setattr(op, "log", quick_builds.LOG)
    monkeypatch.setattr(op, "_pyir_auto_load_arg", lambda x: looked_at.append(x) or quick_builds.LOOK(x))
    slow = compiler.compile(name, tile, "sm90")
    op._set_enable_frame_filtering(False)
    assert tracking == [True] and looked_at and not quick.from_cache and not slow.from_cache
    assert (quick.cubin, quick.ptx) == (slow.cubin, slow.ptx)
    assert (quick.resources, quick.warnings) == (slow.resources, slow.warnings)


def test_emulated_code_computes_the_same_without_optimisation(monkeypatch):
    """To the last bit."""
    tiling = TINY["warps2x1-32x32"].of("causal-softcap-alibi-sinks_fp32")
    tensors = {"alibi_slopes": torch.rand(1, 2), "sinks": torch.randn(2)}
    problem, levels = Scores.random(1, 2, 40, 70, softcap=2.5, **tensors), []
    quick = problem.emulate(tiling)

    def jit(compiler, module, opt_level=2, shared_libs=()):
        levels.append(opt_level)
        return quick_builds.JIT(compiler, module, opt_level, shared_libs)

    monkeypatch.setattr(Compiler, "jit", jit)
    emulate._compiled.cache_clear()
    slow = problem.emulate(tiling)
    assert levels == [2]
    for name in ("scores", "visits", "out", "lse"):
        one, other = getattr(quick, name), getattr(slow, name)
        assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


# ---- processes ----


SCRIPT = """
import atexit, os, sys
from cute_attn.compiler import registry
atexit.register(print, "at the end")
print(sys.argv[1:], __name__, os.environ.get("GIVEN"), os.environ.get("SET"), sys.stdin.read())
print(any(variant == "toy" for *_, variant in registry.KERNELS), file=sys.stderr)
sys.exit({"number": 3, "text": "why", "nothing": None}[sys.argv[1]])
"""


def test_a_forked_process_behaves_as_a_new_one(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("SET", "here")
    commands = [(str(script), argument) for argument in ("number", "text", "nothing", "unknown")]
    number, text, nothing, unknown = processes.run_at_once(commands, {"GIVEN": "there"})
    assert [done.returncode for done in (number, text, nothing, unknown)] == [3, 1, 0, 1]
    assert number.stdout == "['number'] __main__ there here \nat the end\n"
    assert number.stderr == "False\n", "what this process registered is seen in a forked one"
    assert text.stderr == "False\nwhy\n" and nothing.stderr == "False\n"
    assert "KeyError: 'unknown'" in unknown.stderr and "at the end" in unknown.stdout
    module = processes.run("-m", "cute_attn", "--help")
    assert module.returncode == 0 and "Usage: " in module.stdout
