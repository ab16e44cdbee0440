"""Every kernel that a user gets without naming a tile: it builds for each target, and spills nothing."""

import pytest

from cute_attn import registry
from cute_attn.compiler import compile


@pytest.mark.parametrize("traits, target", registry.defaults(), ids=lambda value: str(value))
def test_default_builds_without_spills(traits, target):
    compiled = compile(traits, target=target)
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert compiled.warnings == ()
    assert resources.shared_memory_bytes <= compiled.tile.smem_bytes(traits)
    products, copies = {"sm80": ("HMMA", "LDGSTS"), "sm90": ("HGMMA", "UTMALDG")}[traits.arch]
    assert compiled.instructions[products] > 0 and compiled.instructions[copies] > 0
