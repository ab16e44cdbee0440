"""The kernels that a user gets without naming a tile: they build for each target, and spill nothing."""

import pytest

from cute_attn.compiler import compile
from cute_attn.traits import SPLIT_TENSORS
from tests.defaults import Default, cover, every, representative

# Instructions that kernels must have, in PTX and in SASS.
PTX = {
    "sm80": ("mma.sync", "ldmatrix.sync", "cp.async.cg"),
    "sm90": ("wgmma.mma_async", "cp.async.bulk.tensor"),
    "backward_preprocess": ("ld.global", "shfl.sync", "st.global"),
    "backward_convert": ("ld.global", "ld.shared", "st.global"),
    "append": ("ld.global.v4", "st.global.v4"),
    **dict.fromkeys(SPLIT_TENSORS, ("ld.global.v4", "redux.sync.max", "cvt.rn.f16", "st.global")),
    "combine": ("ld.global.v4", "ex2.approx", "st.global"),
    "combine_shares": ("ld.global.v4", "ex2.approx", "st.global"),
}
SASS = {
    "sm80": ("HMMA", "LDSM", "LDGSTS"),
    "sm90": ("HGMMA", "UTMALDG"),
    "backward_preprocess": ("LDG", "SHFL", "STG"),
    "backward_convert": ("LDG", "LDS", "STG"),
    "append": ("LDG", "STG"),
    **dict.fromkeys(SPLIT_TENSORS, ("LDG", "REDUX", "STG")),
    "combine": ("LDG", "LDS", "MUFU", "STG"),
    "combine_shares": ("LDG", "LDS", "MUFU", "STG"),
}


COVER = cover()


def pytest_generate_tests(metafunc):
    if "default" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--every-default", default=False)
        metafunc.parametrize("default", every() if whole else COVER, ids=str)


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
    words = PTX.get(traits.op) or PTX[traits.arch]
    if not traits.aligned:
        words = tuple(word.replace("cp.async.cg", "cp.async.ca") for word in words)
    assert not [word for word in words if word not in compiled.ptx]


# ptxas turns the same PTX into the same instructions whatever the head dim, so one of a kind is disassembled. Kernels
# with instructions of their own in SASS are the same for both generations.
KINDS = {
    (default.traits.op,) if default.traits.op in SASS else (default.traits.op, default.traits.arch): default
    for default in COVER
}


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_machine_code_has_its_instructions(kind):
    default = KINDS[kind]
    instructions = build(default).instructions
    assert all(instructions[name] > 0 for name in SASS.get(default.traits.op) or SASS[default.traits.arch])


@pytest.mark.parametrize("name", ["forward-sm80-bf16-d128-causal", "backward-sm80-bf16-d64-causal"])
def test_lanes_take_the_same_branches(name):
    """ptxas sees it: there is no second copy of the code around a shuffle, for lanes that left a loop."""
    sass = compile(name, None, "sm80").sass
    assert "SHFL" in sass and "BRA.DIV" not in sass and "BRA.CONV" not in sass


def test_every_default_has_the_ampere_kernels_for_each_size_of_shared_memory():
    whole = set(every())
    assert {d for d in representative() if d.traits.arch == "sm90"} < whole
    ampere = {(d.traits, d.lengths) for d in whole if d.traits.arch == "sm80"}
    assert len(ampere) > 150
    assert not [d for d in ampere for t in ("sm80", "sm86", "sm90") if Default(d[0], t, d[1]) not in whole]


def test_the_cover_has_what_costs_registers_on_each_everyday_ampere_kernel():
    found = {
        (d.traits.op, d.traits.head_dim, feature)
        for d in COVER
        if d.target == d.traits.arch == "sm80"
        for feature in ("dropout", "softcap", "alibi", "bias", "varlen", "windowed", "causal")
        if getattr(d.traits, feature)
    }
    features = {"dropout", "softcap", "alibi", "bias", "varlen", "windowed", "causal"}
    wanted = {(op, dim, f) for op in ("forward", "backward") for dim in (64, 128) for f in features}
    assert wanted <= found


def test_few_queries_have_tiles_of_their_own():
    for default in every():
        if default.lengths:
            tile = default.kernel.tile
            assert tile != Default(default.traits, default.target).kernel.tile, str(default)
            assert tile.pack_heads == default.lengths[2], str(default)
