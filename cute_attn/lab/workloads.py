"""Workloads given as text: sizes such as ``b2-s8192-h16``, or a workload's whole name."""

import re
from dataclasses import replace

from cute_attn.lab.benchmark.workload import Workload, mixed_lengths, of_traits
from cute_attn.traits import Traits

SEQLENS = (2048, 8192)
"""Lengths of the default workloads, of 16k tokens each."""

_SIZES = {
    "batch": re.compile(r"b(\d+)"),
    "seqlen": re.compile(r"s(\d+)(?:x(\d+))?"),
    "nheads": re.compile(r"h(\d+)(?:x(\d+))?"),
    "window": re.compile(r"window(\d*)(?:_(\d+))?"),
}
_SECOND = {"seqlen": "seqlen_k", "nheads": "nheads_kv", "window": "window_right"}


def parse(text: str, traits: Traits) -> Workload:
    """A workload for a kernel with these traits.

    Args:
        text: ``bBATCH-sSEQLEN[xSEQLEN_K]-hHEADS[xKV_HEADS]`` in any order. A missing size is that of 16k tokens of
            hidden size 2048. Traits with a window also accept ``window[LEFT][_RIGHT]``. A varlen kernel gets BATCH
            times SEQLEN tokens in sequences of up to SEQLEN. A workload's name is accepted if it matches the traits.
    """
    given: dict[str, int] = {}
    others = []
    for word in text.split("-"):
        for name, pattern in _SIZES.items():
            found = pattern.fullmatch(word)
            if found and (name != "window" or traits.windowed):
                given[name] = int(found[1] or 0)
                if name in _SECOND and found[2]:
                    given[_SECOND[name]] = int(found[2])
                break
        else:
            others.append(word)
    if "nheads" in given:
        given.setdefault("nheads_kv", given["nheads"])
    base = of_traits(traits, given.get("seqlen", SEQLENS[-1]))
    if "window_right" in given:
        given.setdefault("window", 0)
        base = replace(base, causal=False)
    if traits.varlen:
        tokens = given.get("batch", base.batch) * base.seqlen
        base = replace(base, lengths=mixed_lengths(tokens, base.seqlen))
    workload = replace(base, **given)  # type: ignore[arg-type]
    unknown = [word for word in others if word not in workload.name.split("-")]
    if unknown or not text:
        raise ValueError(
            f"workload has {', '.join(map(repr, unknown)) or repr(text)}; accepted: bBATCH, sSEQLEN[xSEQLEN_K], "
            f"hHEADS[xKV_HEADS] and the words of {workload.name}"
        )
    return workload


def default_workloads(traits: Traits) -> tuple[Workload, ...]:
    """The workloads that a kernel is timed on by default. Raises ValueError if no workload has the traits."""
    return tuple(of_traits(traits, seqlen) for seqlen in SEQLENS)
