"""A user's layouts, copies and MMAs: a wrong one gets a sentence with its method, its operand and the accepted ones."""

import dataclasses
import re

import pytest
from cutlass import BFloat16, cute

import layouts
from cute_attn import compile, lookup
from cute_attn.compiler import registry
from cute_attn.compiler.smem_layouts import reasons
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.tiles import ForwardSm80Tile, padded
from cute_attn.traits import Traits
from tests import processes
from tests.defaults import representative

PLAIN, WIDE = Traits.parse("forward-sm80-bf16-d64"), Traits.parse("forward-sm90-bf16-d128")


def forward(layout, kernel=ForwardSm80):
    """A class of forward-sm80, or of another kernel, whose layouts are ``layout(rows, columns, stages)``."""

    class Mine(kernel):
        def smem_layout(self, rows, head_dim, stages=1):
            return layout(rows, padded(head_dim), stages)

    return Mine


def strided(*strides):
    return lambda *shape: cute.make_layout(shape, stride=tuple(f(*shape) for f in strides))


ONE = (lambda r, c, s: 1,)
OVERLAPPING = strided(lambda r, c, s: c // 2, *ONE, lambda r, c, s: r * c // 2)
"""Each row starts in the middle of the previous one."""
TWICE = strided(lambda r, c, s: 2 * c, *ONE, lambda r, c, s: 2 * r * c)
"""Every second row is left empty."""


class RoomElsewhere(ForwardSm80Tile):
    """A tile with more shared memory in total, but none where rows are padded."""

    def smem_bytes(self, traits):
        return super().smem_bytes(traits) + 32768


@pytest.fixture
def variant(monkeypatch):
    """Register a class as a variant of forward-sm80, or of another kernel, for the test; returns its traits."""

    def add(kernel, traits=PLAIN):
        name = kernel.__name__.lower()
        monkeypatch.setitem(registry.KERNELS, (traits.op, traits.arch, name), kernel)
        return dataclasses.replace(traits, variant=name)

    return add


ONE_EACH = {
    (d.traits.op, d.traits.arch, max(d.traits.head_dim, d.traits.head_dim_v), d.traits.dtype): d
    for d in representative()
    if hasattr(d.kernel, "copies")
}


@pytest.mark.parametrize("default", ONE_EACH.values(), ids=str)
def test_the_packages_layouts_are_right(default):
    assert default.kernel.copies().parts
    assert list(reasons(default.kernel)) == []


def missing(*shape):
    return {}["missing"]


def overriding(**methods):
    return type("Mine", (ForwardSm80,), methods)


SHAPE = r"accepted: a layout of \(rows, columns, stages\) = \(128, 64, 1\)"
WRONG = {
    "no stages": (forward(lambda r, c, s: cute.make_layout((r, c))), rf"q returns a layout of \(128, 64\); {SHAPE}"),
    "coordinates": (
        forward(lambda *shape: cute.make_identity_layout(shape)),
        rf"q returns \S+; {SHAPE} with integers alone",
    ),
    "a number": (forward(lambda *shape: 3), rf"q returns an int; {SHAPE}, or a swizzle over one"),
    "raises": (forward(missing), rf"q raises KeyError: 'missing' \(test_smem_layouts.py, line \d+\); {SHAPE}"),
    "raises in the package": (
        forward(lambda r, c, s: layouts.smem_layout(r, c, BFloat16, stages=s, swizzle_bits=9)),
        rf"q raises ValueError: swizzle_bits=9: .* \(test_smem_layouts.py, line \d+\); {SHAPE}",
    ),
    "column-major": (
        forward(strided(*ONE, lambda r, c, s: r, lambda r, c, s: r * c)),
        r"q returns \(128,64,1\):\S+, in which the 16 bytes at element \(0, 0, 0\) are not contiguous and aligned; "
        "accepted: rows of whole 16 bytes",
    ),
    "overlap": (
        forward(OVERLAPPING),
        r"q has elements \(0, 32, 0\) and \(1, 0, 0\) in one place; accepted: a place for each",
    ),
    "negative": (
        forward(strided(lambda r, c, s: -c, *ONE, lambda r, c, s: r * c)),
        "q has elements before its start; accepted: strides that are not negative",
    ),
    "few threads": (
        overriding(tiled_mma=lambda self: layouts.tiled_mma_sm80(self.dtype, 2)),
        r"tiled_mma\(\) is of 64 threads; accepted: a cute.TiledMma of 128 threads, which its tile has",
    ),
    "across warps": (
        overriding(tiled_mma=lambda self: layouts.tiled_mma_sm80(self.dtype, 4, warps_n=2)),
        r"tiled_mma\(\) divides the columns of a row over 2 warps; accepted: 1, its tile's warps_n",
    ),
    "no mma": (
        overriding(tiled_mma=lambda self: self.gmem_load(64)),
        r"tiled_mma\(\) returns a TiledCopy; accepted: a cute.TiledMma of 128 threads",
    ),
    "no copy": (
        overriding(gmem_load=lambda self: None),
        r"gmem_load\(64\) raises TypeError: .*takes 1 positional argument.*; accepted: a cute.TiledCopy of 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_layout_mma_or_copy_is_not_compiled(variant, kernel, message):
    of = "smem_layout of " if message.startswith("q ") else ""
    with pytest.raises(ValueError, match=f"^forward-sm80:mine-bf16-d64: {of}{message}"):
        compile(variant(kernel), "tile_m=128,num_warps=4")


NAMES = (
    "forward-sm80-bf16-d64",
    "forward-sm80-fp32-d64",
    "kvcache-sm80-bf16-d128-seqused_k-split_fixed",
    "backward-sm80-bf16-d64",
    "backward-sm80-fp32-d512",
    "backward_convert-sm80-bf16-d64",
    "forward-sm90-bf16-d128-bias_bf16",
    "forward-sm90-bf16-d512",
    "kvcache-sm90-bf16-d128-seqused_k-split_fixed",
    "backward-sm90-bf16-d128-bias_bf16",
    "backward-sm90-bf16-d192",
    "backward_convert-sm90-bf16-d96",
)
METHODS = {
    *("smem_layout", "bias_layout", "values_layout", "probabilities_layout", "gradient_layout"),
    *(f"layout_{name}" for name in ("k", "v", "q", "do", "ds", "bias")),
    *("gmem_load", "gmem_store", "gmem_copy", "tiled_mma", "mma_qk", "mma_pv", "mma_sdp", "mma_dkv"),
    *("mma_dq", "mma_scores", "scores_store", "gradient_store", "store_copy"),
}
"""Names of all methods that return a layout, a copy or an MMA."""


@pytest.mark.parametrize("name", NAMES)
def test_each_method_of_each_kernel_is_named(name):
    kernel = lookup(Traits.parse(name))
    methods = {method for method in METHODS if hasattr(kernel, method)}
    called = {layout.method for layout in kernel.copies().layouts.values()}
    called |= {part.call.partition("(")[0] for part in kernel.copies().parts.values()}
    unused = set() if "bias" in name else {"bias_layout", "layout_bias"}
    assert called == methods - unused
    for method in called:
        mine = type("Mine", (type(kernel),), {method: lambda self, *args, **kwargs: None})
        found = list(reasons(mine(kernel.traits, kernel.tile)))
        assert any(re.match(rf"{method}(\([^)]*\)| of \w+) returns None; accepted: a ", one) for one in found)


def test_more_memory_than_the_tile_states(variant):
    twice = forward(TWICE)
    found = list(reasons(lookup(variant(twice))))
    assert [reason.split()[2] for reason in found] == ["q", "k", "v", "o"]
    assert found[0] == (
        "smem_layout of q takes 32,640 bytes of shared memory; accepted: at most 16,384, which its tile's smem_areas "
        "has for it"
    )
    tile = RoomElsewhere(**vars(lookup(PLAIN).tile))
    assert list(reasons(twice(variant(twice), tile))) == found


FILE = """
from cute_attn import register
from tests.cpu.test_smem_layouts import OVERLAPPING, forward

register(forward(OVERLAPPING), variant="overlapping")
"""


@pytest.mark.parametrize("command", ["check", "compile", "verdict", "show"])
def test_each_command_says_it(command, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    done = processes.run(
        *("-m", "cute_attn", "--load", str(tmp_path / "mine.py")),
        *(command, "forward-sm80:overlapping-bf16-d64", "--target", "sm80"),
        environment={"CUTE_ATTN_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == (1 if command == "check" else 2), done.stderr
    said = " ".join((done.stdout if command == "check" else done.stderr).split())
    assert (
        "smem_layout of q has elements (0, 32, 0) and (1, 0, 0) in one place; accepted: a place for" in said
    )
    assert "passed" not in done.stdout and "Traceback" not in done.stderr


def unswizzled(rows, cols, stages):
    return layouts.smem_layout(rows, cols, BFloat16, stages=stages, swizzle_bits=0)


def narrow(rows, cols, stages):
    atom = layouts.wgmma_smem_layout(8, 32, BFloat16)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2))


@pytest.mark.parametrize(
    ("layout", "kernel", "traits"), [(unswizzled, ForwardSm80, PLAIN), (narrow, ForwardSm90, WIDE)]
)
def test_other_swizzles_are_right(variant, layout, kernel, traits):
    assert list(reasons(lookup(variant(forward(layout, kernel), traits)))) == []


PLAIN_ROWS = strided(lambda r, c, s: c, *ONE, lambda r, c, s: r * c)


def amperes(rows, cols, stages):
    return layouts.smem_layout(rows, cols, BFloat16, stages=stages)


def long_rows(*shape):
    """Rows of 256 bytes with a swizzle of 128 bytes, in which an atom's eight rows are not adjacent."""
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, PLAIN_ROWS(*shape))


def shifted_stages(rows, cols, stages):
    """The second stage starts within an atom."""
    one = layouts.wgmma_smem_layout(rows, cols, BFloat16)
    stage = cute.make_layout(stages, stride=rows * cols + 8)
    return cute.make_composed_layout(one.inner, 0, cute.append(one.outer, stage))


@pytest.mark.parametrize("layout", [PLAIN_ROWS, amperes, long_rows, shifted_stages])
def test_a_layout_that_wgmma_cannot_read_is_refused_with_what_it_needs(variant, layout):
    with pytest.raises(
        ValueError, match=r"smem_layout of k returns .*; accepted on sm90: a swizzle of"
    ) as error:
        compile(variant(forward(layout, ForwardSm90), WIDE))
    assert "layouts.wgmma_smem_layout" in str(error.value) and "\n" not in str(error.value)
