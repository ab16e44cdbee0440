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
    return [registry.lookup(Traits.parse(name)).for_lengths(512, 512, 1) for name in names]


@pytest.mark.parametrize("traits, target", registry.defaults(), ids=lambda value: str(value))
def test_default_builds_without_spills(traits, target):
    check(compile(traits, target=target), traits)


# Beside what stands for all: head dims between, fp16, and what several epilogues together ask of a thread.
FURTHER = [
    *(
        f"{op}-{arch}-bf16-{rest}"
        for op in ("forward", "backward")
        for arch in ATTENTION
        for rest in ("d160-causal", "d224")
    ),
    "forward-sm80-bf16-d96-causal-softcap",
    "forward-sm90-fp16-d64-causal-dropout",
    "forward-sm90-bf16-d32-causal-softcap-alibi-bias_bf16-dropout",
    "forward-sm90-bf16-d64-causal-softcap-alibi",
    "forward-sm90-bf16-d64-causal-bias_bf16-dropout_mem_efficient",
    "forward-sm90-bf16-d64-causal-softcap-alibi-bias_bf16-dropout",
    "backward-sm80-fp16-d128-causal-softcap-alibi-bias_bf16-dropout-bias_grad",
    "backward-sm80-bf16-d256-causal-dropout_mem_efficient",
    "backward-sm90-fp16-d64-causal",
    "backward-sm90-fp16-d128",
    "backward-sm90-fp16-d128-causal-dropout",
    "backward-sm90-fp16-d64-causal-softcap-alibi-bias_bf16-dropout-bias_grad",
]


@pytest.mark.parametrize("name", FURTHER)
def test_further_default_builds_without_spills(name):
    traits = Traits.parse(name)
    check(compile(traits, target="sm90"), traits)


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
