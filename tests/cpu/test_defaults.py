"""The kernels that a user gets without naming a tile: they build for each target, spill nothing, and their machine code
is what it should be."""

from collections.abc import Hashable
from dataclasses import asdict

import pytest

from cute_attn.compiler import compile
from cute_attn.lab import sass
from cute_attn.lab.proxies import proxy_order
from cute_attn.lab.sass import BYTES, Code, StepNotFound
from cute_attn.traits import BLOCK_OPS, PADDED_TENSORS, SPLIT_TENSORS, Traits
from tests.defaults import Default, cover, covering, every

# Instructions that kernels must have, in PTX and in SASS: those with products of matrices, and other operations.
PRODUCTS = {
    "sm80": (("mma.sync", "ldmatrix.sync", "cp.async.cg"), ("HMMA", "LDSM", "LDGSTS")),
    "sm90": (("wgmma.mma_async", "cp.async.bulk.tensor"), ("HGMMA", "UTMALDG")),
}
LISTS = (("vote.sync.ballot", "popc", "ld.global.b8", "st.global"), ("VOTE", "POPC", "LDG", "STG"))
SPLIT = (("ld.global.v4", "redux.sync.max", "cvt.rn.f16", "st.global"), ("LDG", "REDUX", "STG"))
OTHERS = {
    "backward_preprocess": (("ld.global", "shfl.sync", "st.global"), ("LDG", "SHFL", "STG")),
    "backward_convert": (("ld.global", "ld.shared", "st.global"), ("LDG", "LDS", "STG")),
    "append": (("ld.global.v4", "st.global.v4"), ("LDG", "STG")),
    "block_kinds": (("st.global.b8",), ("STG",)),
    "combine": (("ld.global.v4", "ex2.approx", "st.global"), ("LDG", "LDS", "MUFU", "STG")),
    **dict.fromkeys(BLOCK_OPS[1:], LISTS),
    **dict.fromkeys(PADDED_TENSORS, (("ld.global", "st.global.v"), ("LDG", "STG"))),
    **dict.fromkeys(SPLIT_TENSORS, SPLIT),
}

COVER = cover()
LOOPS = ("forward", "jvp", "backward", "kvcache")


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("--every-default", default=False)
    if "default" in metafunc.fixturenames:
        metafunc.parametrize("default", every() if whole else marked(COVER), ids=str)
    if "disassembled" in metafunc.fixturenames:
        metafunc.parametrize("disassembled", every() if whole else marked(to_disassemble()), ids=str)


def marked(defaults: list[Default]) -> list:
    """Some of the cover as parameters: those beyond one of each kind, dtype and feature are slow tests."""
    first = covering(COVER, kinds)
    return [x if x in first else pytest.param(x, marks=pytest.mark.slow) for x in defaults]


def kinds(default: Default) -> set[Hashable]:
    """Op and generation of a kernel; for each op also every dtype, range of head dims and feature of its loop."""
    traits = default.traits
    found: set[Hashable] = {(traits.op, traits.arch if traits.op in LOOPS else ""), (traits.op, traits.dtype)}
    if traits.op not in LOOPS:
        return found
    sizes = (traits.head_dim > 128) + (traits.head_dim > 256)
    features = ("dropout", "softcap", "alibi", "bias", "varlen", "windowed", "causal", "sinks", "paged")
    return found | {(traits.op, x) for x in (sizes, *(x for x in features if getattr(traits, x)))}


def to_disassemble() -> list[Default]:
    """Kernels of the cover with TMA, and enough others to have every value of every tile field and one of each kind."""
    return covering(
        COVER, what_shapes_machine_code, always=[default for default in COVER if uses_tma(default)]
    )


def what_shapes_machine_code(default: Default) -> set[Hashable]:
    """ptxas makes the same instructions from the same PTX at every head dim; a tile shapes the steady step."""
    traits = default.traits
    kind = (traits.op, "" if traits.op in OTHERS else traits.arch)  # OTHERS are the same on both generations
    if not has_one_step(default):
        return {kind}
    values = asdict(default.kernel.tile) | {"dtype": traits.dtype}
    return {kind, *((*kind, name, value) for name, value in values.items())}


def uses_tma(default: Default) -> bool:
    return default.traits.arch == "sm90" and default.traits.op in ("forward", "backward", "kvcache")


def has_one_step(default: Default) -> bool:
    """True if a loop of the kernel is a whole step; a tile that streams operands by columns has several a step."""
    return hasattr(default.kernel, "step_content") and not getattr(default.kernel.tile, "columns", 0)


def loads_elements(traits: Traits) -> bool:
    """Rows start at multiples of 2 bytes, which cp.async does not copy."""
    return traits.alignment * traits.element_bytes == 2


def build(default: Default):
    return compile(default.traits, default.kernel.tile, default.target)


def test_default_builds_without_spills(default):
    compiled, traits = build(default), default.traits
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert compiled.warnings == ()
    assert resources.shared_memory_bytes <= compiled.tile.smem_bytes(traits)
    if (traits.op, traits.arch) == ("forward", "sm90"):
        assert resources.shared_memory_bytes == compiled.tile.smem_bytes(traits)
    words, _ = OTHERS.get(traits.op) or PRODUCTS[traits.arch]
    if traits.alignment and traits.op in OTHERS:
        words = ("ld.global", "st.global")
    elif traits.alignment:  # copies of fewer than 16 bytes are cached in L1
        words = (*words[:2], "ld.global" if loads_elements(traits) else "cp.async.ca")
    assert not [word for word in words if word not in compiled.ptx]


def test_the_machine_code_of_a_default(disassembled):
    """It has the expected instructions, fences between the two proxies of shared memory, and its tile's steady step."""
    traits = disassembled.traits
    if traits.op in OTHERS:  # some have two kernels
        assert set(OTHERS[traits.op][1]) <= build(disassembled).instructions.keys()
        return
    code = Code.of(build(disassembled).cubin, traits.name)
    _, words = PRODUCTS[traits.arch]
    loads = ("LDG", "STS") if loads_elements(traits) else words[2:]
    assert {i.opcode for i in code.instructions}.issuperset((*words[:2], *loads))
    if uses_tma(disassembled):
        order = proxy_order(code)
        assert len(order.pipelines) >= 3  # pipelines of Q, K and V
        assert order.releases >= len(order.pipelines)
        unordered = list(order.unordered)
        if getattr(disassembled.kernel.tile, "dq_rows", 0):
            # Threads alone access dQ there, 16 bytes at a time; no stage's release has to wait for that.
            unordered = [x for x in unordered if {i.modifiers for i in x.accesses} != {("128",)}]
        assert unordered == []
    if has_one_step(disassembled):
        content = disassembled.kernel.step_content()
        step = code.step(content)
        assert step.steps == 1
        assert step.count(*sass.MMA) == content.mma
        assert step.count("MUFU.EX2") == content.exp2
        assert step.stalls >= step.count() > content.mma + content.exp2
        assert step.count("LDL", "STL") == 0
        assert all(i.address // BYTES < len(code.instructions) for i, _ in step.instructions)


def test_streamed_operands_have_no_single_step():
    default = next(x for x in COVER if getattr(x.kernel.tile, "columns", 0))
    with pytest.raises(StepNotFound, match="the step was not found: no loop of backward-sm80-"):
        Code.of(build(default).cubin, default.traits.name).step(default.kernel.step_content())


@pytest.mark.parametrize(
    "name", ["forward-sm80-bf16-d192-causal", "backward-sm80-bf16-d64-window-varlen-seqused_k"]
)
def test_lanes_take_the_same_branches(name):
    """ptxas sees it: there is no second copy of the code around a shuffle, for lanes that left a loop.

    Other tests build these kernels, too.
    """
    sass = compile(name, None, "sm80").sass
    assert "SHFL" in sass and "BRA.DIV" not in sass and "BRA.CONV" not in sass


def test_few_queries_and_little_work_have_tiles_of_their_own():
    for default in every():
        if default.lengths:
            tile = default.kernel.tile
            if (
                default.traits.arch == "sm80" and default.lengths[0] > tile.tile_m
            ):  # packing would spare no rows
                assert tile.pack_heads == 1, str(default)
                continue
            assert tile != Default(default.traits, default.target).kernel.tile, str(default)
            assert getattr(tile, "pack_heads", 1) == default.lengths[2], str(default)
