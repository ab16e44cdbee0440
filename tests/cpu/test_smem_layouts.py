"""Layouts of shared memory: no two elements in one place, and no more memory than the tile has for them."""

import dataclasses

import pytest
from cutlass import cute

import layouts
from cute_attn import compile, lookup
from cute_attn.compiler import registry
from cute_attn.compiler.smem_layouts import smem_layouts, smem_reasons
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.tiles import ForwardSm80Tile, padded
from cute_attn.traits import Traits
from tests import processes
from tests.defaults import representative

PLAIN = Traits.parse("forward-sm80-bf16-d64")


class Overlapping(ForwardSm80):
    """Each row starts in the middle of the one before."""

    def smem_layout(self, rows, head_dim, stages=1):
        stride = padded(head_dim) // 2
        return cute.make_layout((rows, padded(head_dim), stages), stride=(stride, 1, rows * stride))


class Twice(ForwardSm80):
    """Every other row is left empty."""

    def smem_layout(self, rows, head_dim, stages=1):
        stride = 2 * padded(head_dim)
        return cute.make_layout((rows, padded(head_dim), stages), stride=(stride, 1, rows * stride))


class RoomElsewhere(ForwardSm80Tile):
    """More shared memory in all, and none of it where rows are padded."""

    def smem_bytes(self, traits):
        return super().smem_bytes(traits) + 32768


@pytest.fixture
def variant(monkeypatch):
    """Register a class as a variant for the test; returns its traits."""

    def add(kernel):
        name = kernel.__name__.lower()
        monkeypatch.setitem(registry.KERNELS, ("forward", "sm80", name), kernel)
        return dataclasses.replace(PLAIN, variant=name)

    return add


ONE_EACH = {
    (d.traits.op, d.traits.arch, max(d.traits.head_dim, d.traits.head_dim_v), d.traits.dtype): d
    for d in representative()
    if smem_layouts(d.kernel)
}


@pytest.mark.parametrize("default", ONE_EACH.values(), ids=str)
def test_the_packages_layouts_are_right(default):
    assert list(smem_reasons(default.kernel)) == []


def test_rows_that_overlap(variant):
    first, *_ = smem_reasons(lookup(variant(Overlapping)))
    assert first == "the layout of q in shared memory has elements (0, 32, 0) and (1, 0, 0) in one place"


def test_more_memory_than_the_tile_states(variant):
    reasons = list(smem_reasons(lookup(variant(Twice))))
    assert [reason.split()[3] for reason in reasons] == ["q", "k", "v", "o"]
    assert reasons[0] == (
        "the layout of q takes 32,640 bytes of shared memory; its tile's smem_areas has 16,384 for it"
    )
    tile = RoomElsewhere(**vars(lookup(PLAIN).tile))
    assert list(smem_reasons(Twice(variant(Twice), tile))) == reasons


@pytest.mark.parametrize("kernel", [Overlapping, Twice])
def test_a_wrong_layout_is_not_compiled(variant, kernel):
    with pytest.raises(ValueError, match=r"forward-sm80:\w+-bf16-d64: the layout of q "):
        compile(variant(kernel))


FILE = """
from cute_attn import register
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.kernels.forward_sm90 import ForwardSm90
from tests.cpu.test_smem_layouts import Overlapping

register(Overlapping, variant="overlapping")
"""


def test_check_says_it(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    done = processes.run(
        *("-m", "cute_attn", "--load", str(tmp_path / "mine.py")),
        "check",
        "forward-sm80:overlapping-bf16-d64",
    )
    assert done.returncode == 1, done.stderr
    assert "failed: the layout of q in shared memory has elements" in done.stdout.replace("\n", " ")
    assert "passed" not in done.stdout


def test_an_unswizzled_layout_is_right(variant):
    class Unswizzled(ForwardSm80):
        def smem_layout(self, rows, head_dim, stages=1):
            return layouts.smem_layout(rows, padded(head_dim), self.dtype, stages=stages, swizzle_bits=0)

    assert list(smem_reasons(lookup(variant(Unswizzled)))) == []


class PlainSm90(ForwardSm90):
    """Rows that are not swizzled, which TMA and wgmma cannot take."""

    def smem_layout(self, rows, head_dim, stages=1):
        return cute.make_layout((rows, head_dim, stages), stride=(head_dim, 1, rows * head_dim))


def test_a_layout_that_wgmma_cannot_read_is_refused_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(registry, "KERNELS", dict(registry.KERNELS))
    registry.register(PlainSm90, variant="plain")
    with pytest.raises(ValueError, match="accepted on sm90: a swizzle over a plain layout") as error:
        compile("forward-sm90:plain-bf16-d64")
    assert "layouts.wgmma_smem_layout" in str(error.value) and "\n" not in str(error.value)
