"""The default kernels, and a cover of them that the tests build.

Building all of them takes an hour and a half of two cores. The cover has, for each op and arch:

- every default tile, for one of the targets that it is the default of; of tiles that differ in ``STORAGE`` alone, one
  that has each value of it;
- every value of every trait that occurs in the list, and every target. Kernels that are the same on both generations
  are one kernel in this;
- the causal kernels of head dims 64 and 128, which most users run;
- of every Ampere forward and backward, built for the GPU it is named after, each feature that costs registers at each
  head dim of ``EVERYDAY``, several at once where the tile stays: ptxas spills on one target what it keeps on another.

Spills and serialised wgmma depend on the tile, and on the registers that features need in addition. How many stages a
tile has, how many heads it packs or how it adds to dQ says where data lies, and takes next to none. Errors of one head
dim or target with one feature, or of two features together, may be missed:
``pytest tests/cpu/test_defaults.py --every-default`` builds all defaults.
"""

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from cute_attn.compiler import registry
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import Traits

Item = TypeVar("Item")


@dataclass(frozen=True)
class Default:
    """A kernel's traits, target and lengths, for which a tile is chosen.

    Attributes:
        lengths: (seqlen_q, seqlen_k, query heads of a key head) that the tile is chosen for, and perhaps how many
            sequences and heads there are; () for many long sequences. Of a kvcache kernel the fields of ``CacheCall``.
    """

    traits: Traits
    target: str
    lengths: tuple[int, ...] = ()

    @functools.cached_property
    def kernel(self) -> Any:
        """The kernel and its tile."""
        kernel = registry.lookup(self.traits, None, self.target)
        if self.lengths and self.traits.op == "kvcache":
            return kernel.for_cache(CacheCall(*self.lengths), self.target)
        lengths, pairs = self.lengths[:3], self.lengths[3:]
        kernel = kernel.for_lengths(*lengths, self.target, *pairs) if lengths else kernel
        if pairs and hasattr(kernel, "storing_dq"):
            return kernel.storing_dq(*lengths, *pairs, MULTIPROCESSORS)
        return kernel

    def __str__(self) -> str:
        return "-".join(
            (self.traits.name, self.target, *("x".join(map(str, n)) for n in [self.lengths] if n))
        )


# Other head dims and dtypes, and several epilogues together.
FURTHER = [
    "forward-sm80-bf16-d320",
    "forward-sm80-bf16-d576x512-causal",
    "forward-sm90-bf16-d512x8-causal",
    "forward-sm90-bf16-d512-causal-softcap-alibi-bias_bf16-dropout-varlen-seqused_k",
    "forward-sm80-fp32-d64-causal",
    "forward-sm80-fp32-d128-causal",
    "forward_split-sm80-fp32-d96-tf32",
    "forward-sm80-fp32-d128-tf32-causal-softcap-alibi-bias_fp32-dropout",
    *(
        f"{op}-{arch}-bf16-{rest}"
        for op in ("forward", "backward")
        for arch in ("sm80", "sm90")
        for rest in ("d160-causal", "d224")
    ),
    "backward-sm80-fp32-d64-causal",
    "backward-sm80-fp32-d64-tf32-causal",
    "backward-sm80-fp32-d512-tf32",
    "backward-sm80-fp32-d64-tf32-causal-softcap-alibi-bias_fp32-dropout-bias_grad",
    "backward-sm80-fp32-d128-causal",
    "backward-sm80-fp32-d256-causal",
    "backward-sm80-fp32-d512-causal",
    "backward-sm80-bf16-d512-causal",
    "forward-sm80-bf16-d96-causal-softcap",
    "forward-sm90-bf16-d72",
    "forward-sm90-bf16-d88-causal",
    "forward-sm90-bf16-d104-window",
    "forward-sm90-fp16-d64-causal-dropout",
    "forward-sm90-bf16-d32-causal-softcap-alibi-bias_bf16-dropout",
    "forward-sm90-bf16-d64-causal-softcap",
    "forward-sm90-bf16-d64-causal-softcap-alibi",
    "forward-sm90-bf16-d64-causal-bias_bf16-dropout_mem_efficient",
    "forward-sm90-bf16-d64-causal-softcap-alibi-bias_bf16-dropout",
    "backward-sm80-fp16-d128-causal-softcap-alibi-bias_bf16-dropout-bias_grad",
    "backward-sm80-bf16-d256-causal-dropout_mem_efficient",
    "backward-sm90-fp16-d64-causal",
    "backward-sm90-fp16-d128",
    "backward-sm90-fp16-d128-causal-dropout",
    "backward-sm90-fp16-d64-causal-softcap-alibi",
    "backward-sm90-fp16-d64-causal-softcap-alibi-bias_bf16-dropout-bias_grad",
    "append-sm90-bf16-d59-rotary_interleaved-rotate_q-aligned_1",
    "append-sm90-fp32-d128-rotary_halves-rotate_q",
    "combine-sm90-bf16-d59-aligned_1",
    # These replace several kernels, each with one of the features.
    "jvp-sm80-bf16-d64-window-softcap-alibi-bias_bf16-sinks_bf16-dropout_mem_efficient-varlen-bias_tangent-sinks_tangent",
    "jvp-sm80-fp16-d128-causal-softcap-alibi-bias_fp32-dropout-varlen-seqused_k-bias_tangent",
    "forward-sm80-bf16-d64-causal-sinks_bf16-dropout_mem_efficient",
    "forward-sm90-fp16-d128-causal-sinks_bf16-dropout_mem_efficient",
    "backward-sm90-fp16-d64-window-softcap-alibi-dropout_mem_efficient-varlen-seqused_k",
    "kvcache-sm80-bf16-d64-sinks_bf16-seqused_k-batch_idx-leftpad-tree",
    "kvcache-sm90-bf16-d64-sinks_bf16-seqused_k-batch_idx-leftpad-tree",
    "kvcache-sm80-bf16-d128-causal-bias_fp32-seqused_k-paged-leftpad-split_fixed",
    "kvcache-sm90-bf16-d128-causal-bias_fp32-seqused_k-paged-leftpad-split_fixed",
]
MULTIPROCESSORS = 132
BY_CACHE = """
# On Hopper: decoding and chunked prefill, with pages of 8.
kvcache-sm90-bf16 1,65536,4,0: d128-seqused_k-split_fixed
kvcache-sm90-bf16 1,65536,8,8: d128-causal-seqused_k-paged-leftpad-split_fixed d64-seqused_k-paged-split_fixed
kvcache-sm90-bf16 16,65536,4,16: d128-causal-softcap-alibi-varlen-seqused_k-paged-leftpad-split_fixed
kvcache-sm90-bf16 512,65536,4,0: d64-causal-seqused_k-split_fixed d128-causal-seqused_k-split_fixed
kvcache-sm90-bf16 512,65536,4,0: d256-causal-seqused_k-split_fixed
kvcache-sm90-bf16 512,65536,8,16: d128-causal-seqused_k-paged d64-causal-alibi-varlen-seqused_k
kvcache-sm90-bf16 512,65536,4,8: d128-causal-softcap-alibi-varlen-seqused_k-paged-split_fixed
# On Ampere: rows that start anywhere, and fp32.
kvcache-sm80 1,65536,4,3: bf16-d59-causal-varlen-seqused_k-paged-leftpad-split_fixed-aligned_1
kvcache-sm80 1,65536,4,3: fp32-d256-causal-softcap-alibi-varlen-seqused_k-paged-leftpad-split_fixed
kvcache-sm80 1,65536,4,3: bf16-d576x512-causal-softcap-alibi-varlen-seqused_k-paged-leftpad-split_fixed
kvcache-sm80 16,65536,4,0: bf16-d122-causal-softcap-alibi-seqused_k-split_fixed-aligned_2
kvcache-sm80 16,65536,4,0: fp32-d64-causal-seqused_k-split_fixed
kvcache-sm80 16,65536,4,0: fp32-d128-causal-softcap-alibi-seqused_k-split_fixed
kvcache-sm80 512,65536,4,16: bf16-d252-causal-varlen-seqused_k-paged-split_fixed-aligned_4
kvcache-sm80 512,65536,4,16: fp32-d128-tf32-causal-varlen-seqused_k-paged-split_fixed
kvcache-sm80 512,65536,4,16: fp32-d253-window-seqused_k-paged-split_fixed-aligned_1
kvcache-sm80 512,65536,4,16: bf16-d573x511-causal-seqused_k-paged-split_fixed-aligned_1
"""
"""Kvcache kernels and the lengths they are chosen for: the rest of their names."""
BY_LENGTHS = """
# Forward kernels that have another tile for few queries, or on Hopper for short sequences.
forward-sm90-bf16 512,512,1: d32 d32-causal d64 d64-causal d64-window d64-causal-varlen-seqused_k
forward-sm90-bf16 1,4096,8: d64 d128 d256-causal
forward-sm90-bf16 4,4096,4: d64-window-softcap-alibi-varlen-seqused_k d128-window-softcap-alibi-varlen-seqused_k
forward-sm90-bf16 4,4096,4: d256-window-softcap-alibi-varlen-seqused_k
forward-sm90-bf16 64,4096,4: d64-causal d128-causal-alibi d256-causal-softcap
forward-sm90-bf16 1,4096,1: d128
forward-sm90-bf16 4096,77,1: d64 d128-causal_top_left
forward-sm90-bf16 64,64,1: d32-bias_bf16 d64-causal-bias_fp16 d64-bias_bf16 d128-causal-bias_bf16
forward-sm90-bf16 2048,2048,1,4: d64 d64-causal d128 d128-causal d256 d256-causal
forward-sm90-bf16 512,50176,1,32: d64 d64-window
backward-sm90-bf16 64,128,1: d32-bias_bf16-bias_grad d64 d64-causal-dropout d64-bias_bf16-bias_grad
backward-sm90-bf16 197,197,1,132: d64-window d64-causal-dropout d96-alibi d32-bias_bf16-bias_grad
backward-sm90-bf16 512,512,1,132: d64-causal d64-softcap
backward-sm90-bf16 1000,77,1,132: d64 d128-dropout
backward-sm80-fp32 -: d256-causal
forward-sm80-bf16 1,4096,8: d64 d128
forward-sm80-bf16 4,4096,4: d128-window-softcap-alibi-varlen-seqused_k
"""
"""Tiles by lengths, like ``BY_CACHE`` for kernels with a cache."""

STORAGE = (
    *("num_stages", "num_stages_q", "num_stages_do", "num_stages_ds", "stages_q", "stages_do"),
    *("pack_heads", "page_rows", "share_qo_smem", "dq_vector"),
)
"""Fields of tiles that say where data lies or how it is addressed, and hardly how many registers hold it."""
ATTENDS = ("forward", "backward", "kvcache")
"""Operations of kernels with products of matrices."""
AMPERE_TARGETS = ("sm80", "sm86", "sm90", "sm100", "sm120")
"""Targets of Ampere kernels, except sm89, which has sm86's registers and shared memory."""
BLACKWELL = {
    "sm100": (
        "forward-sm80-bf16-d128-causal-dropout",
        "forward-sm80-bf16-d128-window-softcap-alibi-varlen-seqused_k",
        "kvcache-sm80-bf16-d256-causal-softcap-alibi-seqused_k-split_fixed",
        "backward-sm80-bf16-d64-causal-dropout",
    ),
    "sm120": (
        "forward-sm80-bf16-d128-causal",
        "backward-sm80-bf16-d64-causal-dropout",
        "kvcache-sm80-bf16-d128-seqused_k-split_fixed",
        "block_lists-sm80-bf16-d128",
        "block_visits-sm80-bf16-d128",
    ),
}
"""Kernels that spill on Blackwell with the tile that they have on Ampere."""
EVERYDAY_DIMS = (64, 128)
EVERYDAY = tuple(
    f"{op}-sm80-bf16-d{dim}{mask}{feature}"
    for op in ("forward", "backward")
    for dim in EVERYDAY_DIMS
    for mask, feature in (
        *itertools.product(
            ("", "-causal"),
            ("", "-softcap", "-alibi", "-softcap-alibi", "-bias_bf16", "-dropout", "-varlen-seqused_k"),
        ),
        ("-window", ""),
        ("-window", "-varlen-seqused_k"),
        *([("-window", "-softcap-alibi-varlen-seqused_k")] if op == "forward" else []),
    )
)
"""Ampere kernels with the features that programs use, one at a time, and those that share a tile at once."""


def every() -> list[Default]:
    """All kernels of ``representative()``, and the Ampere ones for each of ``AMPERE_TARGETS``."""
    return list(dict.fromkeys(one for default in representative() for one in _on_targets(default)))


def representative() -> list[Default]:
    """``registry.defaults()``, FURTHER ones, EVERYDAY ones and those chosen by lengths, most for one target."""
    listed = [
        *_by_lengths(BY_CACHE),
        *(Default(*pair) for pair in registry.defaults()),
        *(Default(Traits.parse(name), "sm90") for name in FURTHER),
        *(Default(Traits.parse(name), "sm80") for name in EVERYDAY),
        *(Default(Traits.parse(name), target) for target, names in BLACKWELL.items() for name in names),
        *_by_lengths(BY_LENGTHS),
    ]
    return list(dict.fromkeys(listed))


def _by_lengths(table: str) -> Iterator[Default]:
    """Kernels by lengths, each for the generation that it is named after."""
    for start, lengths, names in re.findall(r"^([^#\s]+) (\S+): (.*)", table, re.M):
        for rest in names.split():
            traits = Traits.parse(f"{start}-{rest}")
            yield Default(traits, traits.arch, tuple(map(int, re.findall(r"\d+", lengths))))


def _on_targets(default: Default) -> Iterator[Default]:
    """The kernel itself, and an Ampere kernel also for each other target."""
    yield default
    if default.traits.arch == "sm80":
        for target in AMPERE_TARGETS:
            yield replace(default, target=target)


@functools.cache
def cover() -> tuple[Default, ...]:
    """A cover of the demands of ``representative()``, in their order."""
    pool = representative()
    return tuple(covering(pool, demands, always=[default for default in pool if _is_common(default)]))


def covering(
    items: Iterable[Item],
    demands: Callable[[Item], AbstractSet[Hashable]],
    cost: Callable[[Item], float] = lambda _: 1,
    always: Sequence[Item] = (),
) -> list[Item]:
    """Items that have all demands of all items, in their order, chosen by how many more they have for their cost.

    Of equals, the one with the most demands is chosen. Each item except ``always`` has a demand that no other one has.
    """
    pool = list(items)
    chosen = [i for i, item in enumerate(pool) if item in always]
    done: set[Hashable] = set().union(*(demands(item) for item in always))
    missing = [demands(item) - done for item in pool]
    while any(missing):
        best = max(range(len(pool)), key=lambda i: (len(missing[i]) / cost(pool[i]), len(demands(pool[i]))))
        chosen.append(best)
        done = missing[best]
        missing = [wanted - done for wanted in missing]
    for i in sorted(chosen, key=lambda i: -cost(pool[i])):  # later ones may have all that an earlier one has
        others = (demands(pool[j]) for j in chosen if j != i)
        if pool[i] not in always and demands(pool[i]) <= set().union(*others):
            chosen.remove(i)
    return [pool[i] for i in sorted(chosen)]


@functools.cache
def demands(default: Default) -> frozenset[Hashable]:
    """Demands that a kernel covers: its tile, its target and each of its traits."""
    traits, tile, kernel = default.traits, asdict(default.kernel.tile), _kind(default)
    values: dict[str, Hashable] = {field.name: getattr(traits, field.name) for field in fields(traits)}
    values |= {name: tile[name] for name in STORAGE if name in tile}
    values |= {
        name: min(tile[name], 2) for name in tile if name == "pack_heads"
    }  # more heads differ by a shift
    values["tile"] = str({name: value for name, value in tile.items() if name not in STORAGE})
    values["target"] = default.target
    found: set[Hashable] = {(kernel, name, value) for name, value in values.items() if value}
    return frozenset(found | {(kernel, traits.head_dim, feature) for feature in _costly_features(default)})


def _kind(default: Default) -> tuple[str, str]:
    """A kernel's op and generation; a kernel without MMA is the same on both."""
    traits = default.traits
    return traits.op, traits.arch if traits.op in ATTENDS else ""


def _costly_features(default: Default) -> Iterator[str]:
    """Features that need registers in addition to the scores, of an Ampere kernel for the generation in its name."""
    traits = default.traits
    attends = traits.op in ("forward", "backward") and traits.dtype == "bf16"
    if default.target == traits.arch == "sm80" and attends and traits.head_dim in EVERYDAY_DIMS:
        features = ("dropout", "softcap", "alibi", "bias", "varlen", "windowed")
        yield from (name for name in features if getattr(traits, name))


def _is_common(default: Default) -> bool:
    traits = default.traits
    names = (f"{traits.op}-{traits.arch}-bf16-d{dim}-causal" for dim in (64, 128))
    return traits.name in names and default.target == traits.arch and not default.lengths
