"""The tour's levels of the backward: what they compile to, what they decline, and how calls launch them."""

import pytest
import torch

from cute_attn.compiler import compile, registry
from cute_attn.compiler.smem_layouts import reasons
from cute_attn.host import backward
from cute_attn.host.call import Call
from cute_attn.lab.copies import conflicts
from cute_attn.lab.verdict import verdict
from tests import machine
from tour.levels import LEVELS

HAS = {9: ("HMMA", "LDSM", "LDGSTS", "RED"), 10: ("HGMMA", "UTMALDG", "STSM", "REDG")}
DIMS_AND_MASKS = [(64, False), (128, True)]


def kernel_of(number, head_dim=128, causal=True):
    entry = LEVELS[number]
    return entry.kernel(entry.traits(head_dim, causal), entry.kernel.TILE)


@pytest.mark.parametrize(("head_dim", "causal"), DIMS_AND_MASKS)
@pytest.mark.parametrize("number", (9, 10))
def test_a_level_builds_without_spills_and_with_its_own_instructions(number, head_dim, causal):
    entry = LEVELS[number]
    compiled = compile(entry.traits(head_dim, causal), None, entry.arch)
    used = compiled.resources
    assert (used.spill_store_bytes, used.local_bytes, compiled.warnings) == (0, 0, ())
    assert all(compiled.instructions.get(name) for name in HAS[number])
    assert verdict(compiled).step is not None
    kernel = kernel_of(number, head_dim, causal)
    assert not list(reasons(kernel)) and {copy.ways for copy in conflicts(kernel)} <= {1}


def test_a_level_declines_the_rest():
    for name in ("backward-sm80:tour9-fp16-d128", "backward-sm90:tour10-bf16-d128-causal-dropout"):
        with pytest.raises(
            registry.Unsupported, match="bf16, head dims 64 and 128, full or causal, nothing else"
        ):
            registry.lookup(name)
    for name, tile in (("sm80:tour9", "dq_vector=4"), ("sm90:tour10", "tile_n=64")):
        with pytest.raises(registry.Unsupported, match=r"accepted by this level: tile_m=64,tile_n=.* alone"):
            registry.lookup(f"backward-{name}-bf16-d64", tile, "sm90")


# ---- in the package ----


@pytest.mark.parametrize("number", (9, 10))
def test_a_call_that_names_a_level_launches_it_between_the_packages_kernels(number, monkeypatch):
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append(kernel))
    q, grad, k, v = (torch.zeros(2, 100, heads, 64, dtype=torch.bfloat16) for heads in (4, 4, 2, 2))
    call = Call(q, k, v, max_seqlen_q=100, max_seqlen_k=100, mask="causal", kernel=LEVELS[number].name)
    backward.gradients(call, grad, None, q, torch.zeros(2, 4, 100), (True, True, True, False, False))
    ops = ["backward_preprocess", "backward", "backward_convert"]
    assert [kernel.traits.op for kernel in launched] == ops
    assert type(launched[1]) is LEVELS[number].kernel
    assert launched[1].tile.mma_threads == launched[2].tile.mma_threads == 256
    with pytest.raises(
        ValueError, match=r"deterministic is True; accepted by \w+, whose gradients' bits vary: False"
    ):
        repeated = call._replace(deterministic=True)
        backward.gradients(repeated, grad, None, q, torch.zeros(2, 4, 100), (True, True, True, False, False))
