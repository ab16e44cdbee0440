"""Registry: which kernel computes given traits, and with which tile.

``KERNELS`` is a plain dict; :func:`register` adds a user's kernel. A lookup returns a kernel, or raises with the reason
why the kernel declined.

The default tile follows from traits and target. A call that names no tile may use another tile of the same kernel,
which the logger ``cute_attn`` reports at level DEBUG:

* The kernel's ``for_lengths``, if its class defines this, chooses a tile by the sequences' lengths, the heads per group
  and the numbers of sequences and heads.
* An fp32 backward that is too small to gain from splitting operands into terms, or has too many rows for terms, uses
  the default tile of unsplit operands.
* If the default tile loads a bias (or stores its gradient) by TMA, and the bias has a single row, or strides or an
  address that TMA cannot use, the call uses the tile without TMA: see :func:`other_tiles`, which ``cute-attn list``
  shows. A call that names a TMA tile raises instead.
"""

import dataclasses
import importlib
import itertools
from typing import Any

from cute_attn.epilogues.names import user_epilogue
from cute_attn.tiles import MEASURED, TARGETS, TILES_OF, Tile, check_target, check_tile
from cute_attn.traits import (
    BLOCK_OPS,
    LARGE_HEAD_DIM,
    LISTED_ROWS,
    OPS,
    PADDED_TENSORS,
    PARTS,
    Traits,
    did_you_mean,
    is_word,
)

_OWN = {
    ("forward", "sm80", ""): "forward_sm80.ForwardSm80",
    ("forward", "sm90", ""): "forward_sm90.ForwardSm90",
    ("jvp", "sm80", ""): "jvp_sm80.kernel.JvpSm80",
    ("jvp", "sm90", ""): "jvp_sm90.kernel.JvpSm90",
    ("backward", "sm80", ""): "backward_sm80.kernel.BackwardSm80",
    ("backward", "sm90", ""): "backward_sm90.kernel.BackwardSm90",
    ("backward_convert", "sm80", ""): "backward_convert.BackwardConvert",
    ("backward_convert", "sm90", ""): "backward_convert.BackwardConvert",
    ("backward_preprocess", "sm80", ""): "backward_preprocess.BackwardPreprocess",
    ("backward_preprocess", "sm90", ""): "backward_preprocess.BackwardPreprocess",
    ("append", "sm80", ""): "append_kv.AppendKv",
    ("append", "sm90", ""): "append_kv.AppendKv",
    ("kvcache", "sm80", ""): "kvcache_sm80.kernel.KvcacheSm80",
    ("kvcache", "sm90", ""): "kvcache_sm90.kernel.KvcacheSm90",
    ("combine", "sm80", ""): "combine.Combine",
    ("combine", "sm90", ""): "combine.Combine",
    ("forward_split", "sm80", ""): "split_fp32.SplitFp32",
    ("backward_split", "sm80", ""): "split_fp32.SplitFp32",
    **{(op, "sm80", ""): "pad_rows.PadRows" for op in PADDED_TENSORS},
    ("block_kinds", "sm80", ""): "block_kinds.BlockKinds",
    ("block_lists", "sm80", ""): "block_lists.ListBlocks",
    ("block_visits", "sm80", ""): "block_lists.ListVisits",
    ("forward", "sm80", "terms"): "fp32_sm80.kernel.ForwardTerms",
    ("forward", "sm80", "fallback"): "fp32_sm80.kernel.ForwardFallback",
}
"""The package's kernels, by module and class."""

_LARGE = {
    ("forward", "sm90"): "head_dim_512_sm90.kernel.ForwardLargeSm90",
    ("kvcache", "sm90"): "kvcache_512_sm90.kernel.KvcacheLargeSm90",
}
"""(op, arch) -> the kernel that replaces the one in ``_OWN`` for head dims above ``LARGE_HEAD_DIM``."""


def __getattr__(name: str) -> Any:
    """``KERNELS``: (op, arch, variant) -> class. Loaded on first use, since kernels import the DSL, which is slow."""
    if name != "KERNELS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for path in _LARGE.values():
        _loaded(path)
    return globals().setdefault(name, {key: _loaded(path) for key, path in _OWN.items()})


def _kernels() -> dict[tuple[str, str, str], Any]:
    return globals().get("KERNELS") or __getattr__("KERNELS")


def _registered(key: tuple[str, str, str]) -> Any:
    """A class of ``KERNELS``, or None. Does not load the other classes."""
    known = globals().get("KERNELS")
    if known is None:
        return _loaded(_OWN[key]) if key in _OWN else None
    return known.get(key)


def _loaded(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"cute_attn.kernels.{module}"), name)


SPECULATIVE_PAIR = ("terms", "fallback")
"""The package's variants that large fp32 calls launch together: :mod:`cute_attn.host.split_fp32`."""

RUNS_ON = {"sm80": TARGETS, "sm90": ("sm90",)}
"""Kernel generation -> targets on which its kernels run, the oldest first."""


def generations(target: str) -> list[str]:
    """The generations whose kernels run on ``target``, the newest first."""
    return [arch for arch in reversed(RUNS_ON) if target in RUNS_ON[arch]]


class Unsupported(ValueError):
    """No kernel computes these traits with this tile on this target; the message says why."""


def register(kernel: Any, *, variant: str, op: str = "", arch: str = "") -> Any:
    """Register a kernel class for traits with that ``variant``.

    Args:
        kernel: the class: a subclass of one of the package's kernels, or a class with the same methods.
        variant: name of the variant, a lower-case word that follows the arch in a kernel's name:
            ``forward-sm80:variant-bf16-d128``.
        op, arch: the kernel's operation and generation; by default those of the package's class that it extends, or
            ``"forward"`` and ``"sm80"`` if it extends none.

    Raises:
        TypeError: ``kernel`` is not a class, or lacks a method that kernels need.
        ValueError: ``variant`` is taken by another class or is not a word; ``op`` or ``arch`` does not exist or differs
            from that of the extended class; or that class serves several, and the arguments do not say which.
    """
    if not isinstance(variant, str) or not is_word(variant):
        raise ValueError(
            f"variant is {variant!r}; accepted: a lower-case word such as 'padded' or 'my_layout'"
        )
    _check_class(kernel)
    op, arch = _computed(kernel, op, arch)
    key = (op, arch, variant)
    known = _kernels().get(key)
    if known is not None and known.__qualname__ != kernel.__qualname__:
        raise ValueError(
            f"variant {variant!r} of {op}-{arch} is taken by {known.__module__}.{known.__qualname__}; accepted: "
            "another word"
        )
    _kernels()[key] = kernel
    return kernel


def _check_class(kernel: Any) -> None:
    """Raise TypeError unless a user's object is a class with the methods that a lookup and a build call."""
    accepted = "accepted: a class that extends one of the package's kernels, such as ForwardSm80"
    if not isinstance(kernel, type):
        raise TypeError(f"kernel is {kernel!r}; {accepted}")
    has = {name for base in kernel.__mro__[:-1] for name, value in vars(base).items() if value is not None}
    missing = [name for name in ("supports", "__call__") if name not in has]
    missing += [] if has & {"default_tile", "beside"} else ["default_tile"]
    if missing:
        raise TypeError(
            f"kernel is {kernel.__qualname__}, without {', '.join(missing)}; {accepted}, or has its methods"
        )


def _computed(kernel: Any, op: str, arch: str) -> tuple[str, str]:
    """Op and arch of a class: the ones of the package's class that it is or extends, else the given ones."""
    classes = [*_kernels().items(), *(((*key, ""), _loaded(path)) for key, path in _LARGE.items())]
    bases = (
        [key[:2] for key, cls in classes if cls is base and not (cls is kernel and key[2])]
        for base in kernel.__mro__
    )
    extended = next(filter(None, bases), [])
    fitting = [one for one in extended if one[0] == (op or one[0]) and one[1] == (arch or one[1])]
    if not extended:
        op, arch = op or "forward", arch or "sm80"
        for name, value, known in (("op", op, OPS), ("arch", arch, tuple(RUNS_ON))):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; accepted: {', '.join(known)}")
        return op, arch
    if len(set(fitting)) == 1:
        return fitting[0]
    given = f"op is {op!r} and arch {arch!r}"
    accepted = " or ".join(f"{one[0]!r} and {one[1]!r}" for one in dict.fromkeys(extended))
    raise ValueError(f"{given} for {kernel.__qualname__}; accepted of what it extends: {accepted}")


def label(key: tuple[str, str, str]) -> str:
    """A registered kernel's name in messages: ``"forward-sm80"``, or ``"forward-sm80:variant"``."""
    op, arch, variant = key
    return f"{op}-{arch}" + (f":{variant}" if variant else "")


def lookup(traits: Traits | str, tile: Tile | str | None = None, target: str | None = None) -> Any:
    """The kernel for traits or their name, with a tile: ``tile``, or the default one with fields that a text overrides.

    The default target is the kernel's generation.

    Raises:
        Unsupported: no kernel is registered for the traits, or it declines the traits, tile or target.
        TypeError: the traits or the tile have another type, or the tile is another kernel's.
        ValueError: the name, the target or the tile's text is invalid, or the traits name an epilogue that is not
            registered.
    """
    traits = Traits.of(traits, "traits")
    target = target or traits.arch
    check_target(target)
    check_tile(tile)
    for name in traits.epilogues:
        user_epilogue(name)
    kernel, key = known_class(traits), (traits.op, traits.arch, traits.variant)
    if target not in RUNS_ON[traits.arch]:
        raise Unsupported(f"{label(key)} runs on {', '.join(RUNS_ON[traits.arch])}, not on {target}")
    reason = kernel.supports(traits)
    if reason is None:
        chosen = _tile(kernel, traits, tile, target)
        reason = chosen.reject(traits, target)
        if reason is None:
            return kernel(traits, chosen)
    raise declined(traits, reason)


def declined(traits: Traits, reason: str) -> Unsupported:
    """The error of a kernel that declines traits or a tile; it names the kernel once."""
    return Unsupported(reason if traits.name in reason else f"{traits}: {reason}")


def known_class(traits: Traits) -> Any:
    """The class that is registered for ``traits``. Raises Unsupported if none is."""
    found = kernel_class(traits)
    if found is None:
        own = label((traits.op, traits.arch, traits.variant))
        others = [label(other) for other in globals().get("KERNELS", _OWN) if other[0] == traits.op]
        hint = "; a variant is registered by the file that defines it (--load FILE)" if traits.variant else ""
        raise Unsupported(
            f"no kernel computes {traits}: none is registered as {own}{did_you_mean(own, others)}; accepted: "
            f"{', '.join(others)}{hint}"
        )
    return found


def kernel_class(traits: Traits) -> Any:
    """The class that is registered for ``traits``, or None."""
    large = max(traits.head_dim, traits.head_dim_v) > LARGE_HEAD_DIM and not traits.variant
    if large and (traits.op, traits.arch) in _LARGE:
        return _loaded(_LARGE[traits.op, traits.arch])
    return _registered((traits.op, traits.arch, traits.variant))


def other_tiles(kernel: Any) -> list[tuple[str, Tile]]:
    """(condition, tile) pairs: other tiles that a kernel uses if a tensor's layout rules out its default tile."""
    if not getattr(kernel.tile, "bias_stages", 0):
        return []
    which = "cannot read or whose gradient it cannot store" if kernel.traits.bias_grad else "cannot read"
    return [(f"a bias of one row, or that TMA {which}", kernel.without_tma_bias().tile)]


def _tile(kernel: Any, traits: Traits, tile: Tile | str | None, target: str) -> Tile:
    default = _default_tile(kernel, traits, target)
    if not isinstance(tile, Tile):
        return default.override(tile) if tile else default
    if not {field.name for field in dataclasses.fields(default)} <= vars(tile).keys():  # type: ignore[arg-type]
        raise TypeError(
            f"tile is a {type(tile).__name__}; accepted for {label((traits.op, traits.arch, traits.variant))}: a "
            f"{type(default).__name__}"
        )
    return tile


def _default_tile(kernel: Any, traits: Traits, target: str) -> Tile:
    """The kernel's default tile; the backward's preprocess and convert follow the main kernel's."""
    if traits.op not in PARTS:
        return kernel.default_tile(traits, target)
    main = dataclasses.replace(traits, op="backward", lse_grad=False)
    return kernel.beside(traits, _registered(("backward", traits.arch, "")).default_tile(main, target))


def defaults() -> list[tuple[Traits, str]]:
    """(traits, target) pairs that represent the default tiles; tests build a subset that covers them.

    The pairs are: every head dim, plain and causal, for the oldest and the measured target; every feature at the two
    most common head dims; one large head dim on Hopper; kernels that need the most shared memory on the targets with
    the least; a few of the other ops.
    """
    pairs: list[tuple[Traits, str]] = []
    for op, arch, variant in _kernels():
        if variant:
            continue
        if op not in _FEW:
            pairs += _attention_defaults(op, arch)
        for text in _FEW.get(op, "").split():
            oldest, _, name = text.rpartition(":")
            pairs.append((Traits.parse(f"{op}-{arch}-{name}"), RUNS_ON[arch][0] if oldest else MEASURED))
    return [(traits, target) for traits, target in pairs if known_class(traits).supports(traits) is None]


def _attention_defaults(op: str, arch: str) -> list[tuple[Traits, str]]:
    """Default kernels of a forward, a forward with tangents or a backward."""
    pairs, targets = [], RUNS_ON[arch]
    for head_dim in (32, 64, 96, 128, 192, 256):
        for mask in ("", "causal"):
            traits = Traits(op, arch, "bf16", head_dim, _columns(op, head_dim), mask=mask)
            pairs += [(traits, target) for target in sorted({targets[0], MEASURED})]
    features = _FEATURES
    if op == "backward":
        features = features.replace("bias_bf16", "bias_bf16-bias_grad").replace("causal-sinks_bf16", "")
    if op == "jvp":
        for moved in ("bias_bf16", "sinks_bf16"):
            features = features.replace(moved, f"{moved}-{moved.partition('_')[0]}_tangent")
    for head_dim, extra in itertools.product((64, 128), features.split()):
        pairs.append((Traits.parse(f"{op}-{arch}-bf16-d{head_dim}-{extra}"), MEASURED))
    if arch == "sm90":
        pairs.append((Traits(op, arch, "bf16", 512, mask="causal"), MEASURED))
    if "sm86" in targets:
        for dim in (64, 128, 256):
            pairs.append((Traits(op, arch, "bf16", dim, _columns(op, dim), mask="causal"), "sm86"))
        pairs.append((Traits(op, arch, "fp16", 128, mask="causal"), "sm89"))
    return pairs


def defaults_on(target: str | None) -> list[tuple[Traits, str]]:
    """:func:`defaults` for one target or for all; a target in ``TILES_OF`` has the ``MEASURED`` ones that run on it."""
    if target in TILES_OF:
        return [(t, target) for t, on in defaults() if on == MEASURED and target in RUNS_ON[t.arch]]
    return [pair for pair in defaults() if target in (None, pair[1])]


_OF_ROWS = "bf16-d40 bf16-d64 bf16-d128 bf16-d256 oldest:fp16-d192x128-varlen-seqused_q"
_FEW = {
    "backward_convert": _OF_ROWS,
    "backward_preprocess": f"{_OF_ROWS} oldest:bf16-d128-lse_grad",
    "append": """
        bf16-d128 bf16-d128-rotary_interleaved-rotate_q-batch_idx
        bf16-d128-varlen-rotary_halves-rotate_q-varlen_new-paged
    """,
    "kvcache": """
        bf16-d128-seqused_k-split_fixed bf16-d64-causal-varlen-seqused_k-paged-split_fixed
        bf16-d128-window-seqused_k-batch_idx-leftpad-split_fixed
        bf16-d256-causal-softcap-alibi-seqused_k-split_fixed bf16-d128-causal-seqused_k-paged
        bf16-d128-sinks_bf16-varlen-seqused_k bf16-d64-seqused_k-tree-split_fixed
    """,
    "combine": "fp16-d64 bf16-d96 bf16-d128 fp32-d256",
    "forward_split": "fp32-d96",
    "backward_split": "fp32-d256",
    **dict.fromkeys(PADDED_TENSORS, "bf16-d59-varlen oldest:fp32-d574"),
    **dict.fromkeys(BLOCK_OPS, f"oldest:bf16-d{LISTED_ROWS} bf16-d{LISTED_ROWS}"),
}
"""Op -> the names of its few defaults, after op and arch, on the measured target unless they are for the oldest.

The others are in :func:`_attention_defaults`.
"""
_FEATURES = """
    window causal-dropout causal-dropout_mem_efficient bias_bf16 causal-bias_fp32 causal-alibi softcap
    causal-sinks_bf16 causal-varlen-seqused_k
"""
"""Sets of features that together have every feature of an attention kernel."""


def _columns(op: str, head_dim: int) -> int:
    """The head dim of V for a head dim of Q and K: kernels with tangents support at most 128."""
    return min(head_dim, 128) if op == "jvp" else head_dim


HOW = frozenset(
    (
        *("smem_layout", "bias_layout", "values_layout", "probabilities_layout", "gradient_layout"),
        *(f"layout_{name}" for name in ("k", "v", "q", "do", "ds", "bias")),
        *("gmem_load", "gmem_store", "gmem_copy", "store_copy", "scores_store", "gradient_store"),
        *("tiled_mma", "mma_qk", "mma_pv", "mma_sdp", "mma_scores", "mma_dkv", "mma_dq"),
        *("swizzle_bits", "unroll", "step_content", "supports", "default_tile", "for_lengths"),
        *("tile_for", "beside"),
    )
)
"""Methods of kernels that decide how a result is computed, but do not change the result."""


def changes_the_result(kernel: type) -> str | None:
    """Text that says why a class may change its kernel's results, or None.

    Methods with new names do not count, since the package does not call them.
    """
    bases = [base for base in kernel.__mro__ if _is_ours(base)]
    if not bases:
        return f"{kernel.__qualname__} extends no kernel of the package"
    # Methods that every dataclass has do not count.
    own = (name for base in kernel.__mro__[:-1] if not _is_ours(base) for name in vars(base))
    called = [name for name in dict.fromkeys(own) if name == "__call__" or not name.startswith("__")]
    changed = [name for name in called if hasattr(bases[0], name) and name not in HOW]
    return f"{kernel.__qualname__} overrides {', '.join(changed)}" if changed else None


def _is_ours(base: Any) -> bool:
    return base.__module__.startswith("cute_attn.")
