"""Registry: which kernel computes some traits, with which tile.

``KERNELS`` is a plain dict. A kernel of your own goes in with :func:`register`; a lookup either returns a kernel or
says, kernel by kernel, why each declined. Nothing falls back silently.
"""

import dataclasses
from typing import Any

from cute_attn.kernels.backward_convert import BackwardConvert
from cute_attn.kernels.backward_preprocess import BackwardPreprocess
from cute_attn.kernels.backward_sm80 import BackwardSm80
from cute_attn.kernels.backward_sm90 import BackwardSm90
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.tiles import TARGETS, Tile
from cute_attn.traits import PARTS, Traits

KERNELS: dict[tuple[str, str, str], Any] = {
    ("forward", "sm80", ""): ForwardSm80,
    ("forward", "sm90", ""): ForwardSm90,
    ("backward", "sm80", ""): BackwardSm80,
    ("backward", "sm90", ""): BackwardSm90,
    ("backward_convert", "sm80", ""): BackwardConvert,
    ("backward_convert", "sm90", ""): BackwardConvert,
    ("backward_preprocess", "sm80", ""): BackwardPreprocess,
    ("backward_preprocess", "sm90", ""): BackwardPreprocess,
}
"""(op, arch, variant) -> kernel class."""

RUNS_ON = {"sm80": TARGETS, "sm90": ("sm90",)}
"""The targets that a kernel's generation can be built for."""


class Unsupported(ValueError):
    """No kernel computes these traits with this tile on this target; the message says why each declined."""


def register(kernel: Any, *, variant: str, op: str = "forward", arch: str = "sm80") -> Any:
    """Make a kernel class known under a variant's name: traits with that ``variant`` find it.

    Raises:
        ValueError: the place is taken by another class, or the variant has no name.
    """
    if not variant:
        raise ValueError("variant is ''; accepted: a name for the changed kernel, such as 'padded'")
    place = (op, arch, variant)
    known = KERNELS.get(place)
    if known is not None and known.__qualname__ != kernel.__qualname__:
        raise ValueError(
            f"variant {variant!r} of {op}-{arch} is taken by {known.__module__}.{known.__qualname__}"
        )
    KERNELS[place] = kernel
    return kernel


def native_target(arch: str) -> str:
    """The target that an arch's kernels are built for when no GPU says otherwise."""
    return arch


def lookup(traits: Traits, tile: Tile | str | None = None, target: str | None = None) -> Any:
    """The kernel for ``traits`` with its tile: the default one, the one given, or the default changed by a text.

    Raises:
        Unsupported: with the reason of every registered kernel.
        ValueError: a target or a tile text that does not exist.
    """
    target = target or native_target(traits.arch)
    if target not in TARGETS:
        raise ValueError(f"target is {target!r}; accepted: {', '.join(TARGETS)}")
    reasons = []
    for (op, arch, variant), kernel in KERNELS.items():
        label = f"{op}-{arch}" + (f":{variant}" if variant else "")
        if (op, arch, variant) != (traits.op, traits.arch, traits.variant):
            reasons.append(f"{label}: another kernel")
            continue
        if target not in RUNS_ON[arch]:
            raise Unsupported(f"{label} runs on {', '.join(RUNS_ON[arch])}, not on {target}")
        reason = kernel.supports(traits)
        if reason is None:
            chosen = _tile(kernel, traits, tile, target)
            reason = chosen.reject(traits, target)
            if reason is None:
                return kernel(traits, chosen)
        raise Unsupported(f"{label} declined {traits}: {reason}")
    raise Unsupported(f"no kernel computes {traits}; registered: {'; '.join(reasons)}")


def _tile(kernel: Any, traits: Traits, tile: Tile | str | None, target: str) -> Tile:
    if isinstance(tile, Tile):
        return tile
    default = _default_tile(kernel, traits, target)
    return default.override(tile) if tile else default


def _default_tile(kernel: Any, traits: Traits, target: str) -> Tile:
    """The kernel's own choice; a part of the backward goes by the main kernel's."""
    if traits.op not in PARTS:
        return kernel.default_tile(traits, target)
    main = dataclasses.replace(traits, op="backward", lse_grad=False)
    return kernel.beside(traits, KERNELS["backward", traits.arch, ""].default_tile(main, target))


def defaults() -> list[tuple[Traits, str]]:
    """(traits, target) pairs that stand for all that a user gets without naming a tile; tests build a cover of them.

    Every head dim, plain and causal, for the oldest and the newest target; every feature at the two commonest head
    dims; and on the targets with the least shared memory what has the most to keep in it. Of the backward's small
    parts, which know of no scores, a few.
    """
    pairs: list[tuple[Traits, str]] = []
    for op, arch, variant in KERNELS:
        if variant:
            continue
        targets = RUNS_ON[arch]
        if op in PARTS:
            pairs += _part_defaults(op, arch)
            continue
        for head_dim in (32, 64, 96, 128, 192, 256):
            for mask in ("", "causal"):
                for target in sorted({targets[0], targets[-1]}):
                    pairs.append((Traits(op, arch, "bf16", head_dim, mask=mask), target))
        for head_dim in (64, 128):
            pairs += [(Traits(op, arch, "bf16", head_dim, **extra), targets[-1]) for extra in _features(op)]
        if "sm86" in targets:
            pairs += [(Traits(op, arch, "bf16", dim, mask="causal"), "sm86") for dim in (64, 128, 256)]
            pairs.append((Traits(op, arch, "fp16", 128, mask="causal"), "sm89"))
    return pairs


def _features(op: str) -> list[dict[str, Any]]:
    """Every feature of an attention kernel once."""
    grad = {"bias_grad": True} if op == "backward" else {}
    return [
        {"mask": "window"},
        {"mask": "causal", "dropout": "flash"},
        {"mask": "causal", "dropout": "mem_efficient"},
        {"bias": "bf16", **grad},
        {"mask": "causal", "bias": "fp32"},
        {"alibi": True, "mask": "causal"},
        {"softcap": True},
        {"varlen": True, "mask": "causal", "seqused_k": True},
    ]


def _part_defaults(op: str, arch: str) -> list[tuple[Traits, str]]:
    """A part of the backward at the head dims whose rows are cut in different ways, and packed."""
    targets = RUNS_ON[arch]
    pairs = [(Traits(op, arch, "bf16", dim), targets[-1]) for dim in (40, 64, 128, 256)]
    pairs.append((Traits(op, arch, "fp16", 192, 128, varlen=True, seqused_q=True), targets[0]))
    if op == "backward_preprocess":
        pairs.append((Traits(op, arch, "bf16", 128, lse_grad=True), targets[0]))
    return pairs
