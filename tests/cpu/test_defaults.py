"""Every kernel that a user gets without naming a tile: it builds for each target, and spills nothing."""

import pytest

from cute_attn import registry
from cute_attn.compiler import compile
from cute_attn.traits import Traits

# What a kernel must be made of.
ATTENTION = {"sm80": ("HMMA", "LDGSTS"), "sm90": ("HGMMA", "UTMALDG")}
PARTS = {"backward_preprocess": ("LDG", "SHFL", "STG"), "backward_convert": ("LDG", "LDS", "STG")}


def short_defaults() -> list:
    """Kernels that have another tile for short sequences."""
    names = [f"forward-sm90-bf16-d{dim}{mask}" for dim in (32, 64, 192, 256) for mask in ("", "-causal")]
    names += ["forward-sm90-bf16-d64-window", "forward-sm90-bf16-d64-causal-varlen-seqused_k"]
    return [registry.lookup(Traits.parse(name)).for_lengths(512) for name in names]


@pytest.mark.parametrize("traits, target", registry.defaults(), ids=lambda value: str(value))
def test_default_builds_without_spills(traits, target):
    check(compile(traits, target=target), traits)


@pytest.mark.parametrize("kernel", short_defaults(), ids=lambda kernel: str(kernel.traits))
def test_short_default_builds_without_spills(kernel):
    assert kernel.tile != registry.lookup(kernel.traits).tile
    check(compile(kernel.traits, kernel.tile), kernel.traits)


def check(compiled, traits):
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert compiled.warnings == ()
    assert resources.shared_memory_bytes <= compiled.tile.smem_bytes(traits)
    characteristic = PARTS.get(traits.op) or ATTENTION[traits.arch]
    assert all(compiled.instructions[name] > 0 for name in characteristic)
