"""Every kernel that a user gets without naming a tile: it builds for each target, and spills nothing."""

import pytest

from cute_attn import registry
from cute_attn.compiler import compile

# What a kernel must be made of.
ATTENTION = {"sm80": ("HMMA", "LDGSTS"), "sm90": ("HGMMA", "UTMALDG")}
PARTS = {"backward_preprocess": ("LDG", "SHFL", "STG"), "backward_convert": ("LDG", "LDS", "STG")}


@pytest.mark.parametrize("traits, target", registry.defaults(), ids=lambda value: str(value))
def test_default_builds_without_spills(traits, target):
    compiled = compile(traits, target=target)
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert compiled.warnings == ()
    assert resources.shared_memory_bytes <= compiled.tile.smem_bytes(traits)
    characteristic = PARTS.get(traits.op) or ATTENTION[traits.arch]
    assert all(compiled.instructions[name] > 0 for name in characteristic)
