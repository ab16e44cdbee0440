"""The choice of the kernel and the tile for a call."""

import logging
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from cute_attn.compiler import registry
from cute_attn.compiler.registry import changes_the_result
from cute_attn.epilogues.names import TRACED, user_epilogue
from cute_attn.host.call import Call
from cute_attn.host.memory import ALIGNMENT_BYTES, is_aligned
from cute_attn.tiles import MEASURED
from cute_attn.traits import Traits, did_you_mean

_log = logging.getLogger("cute_attn")


def user_classes(call: Call, op: str = "forward") -> tuple[Any, ...]:
    """The users' classes that a call names. The plan's key contains them, since they may be re-registered at any time.

    A traced function is returned as a weak reference, so that a plan does not keep it alive.
    """
    if not (call.epilogues or ":" in call.kernel):
        return ()
    arch, _, variant = call.kernel.partition(":")
    kernel = registry.KERNELS.get((op, arch, variant))
    found = ((name, user_epilogue(name)) for name in call.epilogue_names)
    return (kernel, *(weakref.ref(x) if name.startswith(TRACED) else x for name, x in found))


def choose_kernel(call: Call, target: str, *, op: str = "forward", **own: Any) -> Any:
    """The kernel that the call names, or the newest on ``target`` that supports the call, with its tile.

    Lengths, heads and the bias's layout may change the default tile: see :mod:`cute_attn.compiler.registry`.
    own: traits that do not follow from the call.

    A variant that is registered only for the forward leaves the backward to its generation's default kernel. If a
    newer generation declines the call's tile, for instance for an older generation's fields, a warning gives the
    reason. If it declines the traits, the log gives the reason at level DEBUG.
    """
    tile = {"forward": call.tile, "backward": call.backward_tile}.get(op, "")
    check_kernel(call.kernel, ("forward", op))
    names = [call.kernel] if call.kernel else registry.generations(target)
    reasons: list[str] = []
    for name in names:
        arch, _, variant = name.partition(":")
        if op != "forward" and (op, arch, variant) not in registry.KERNELS:
            variant = ""
        try:
            kernel = registry.lookup(call.traits(arch, variant, op=op, **own), tile or None, target)
            if not (tile or call.same_bits) and hasattr(kernel, "for_lengths"):  # a user's may have one tile
                pairs = None if call.varlen else call.batch * call.nheads
                kernel = kernel.for_lengths(*call.longest, call.group, target, pairs, call.window)
            reason = _tma_bias_reason(call, kernel)
            if reason and tile:
                raise registry.Unsupported(f"{reason} with tile {kernel.tile}")
            if reasons and tile:
                warnings.warn(f"{kernel.traits} serves the call, since {'; '.join(reasons)}", stacklevel=2)
            if reason:
                kernel = kernel.without_tma_bias()
            why = f"; for TMA, {reason.rstrip(',')}" if reason else "".join(f"; {x}" for x in reasons)
            _log.debug("%s on %s takes tile %s%s", kernel.traits, target, kernel.tile, why)
            return kernel
        except ValueError as reason:
            if len(names) == 1:
                raise
            reasons.append(str(reason))
    raise registry.Unsupported("; ".join(reasons))


def check_kernel(kernel: str, ops: Iterable[str]) -> dict[str, str]:
    """Refuse a name under which no kernel of ``ops`` is registered, except "".

    Returns the generation of each accepted name.
    """
    names = {
        f"{arch}:{variant}" if variant else arch: arch for op, arch, variant in registry.KERNELS if op in ops
    }
    if kernel and kernel not in names:
        raise ValueError(
            f"kernel is {kernel!r}{did_you_mean(kernel, names)}; accepted: {', '.join(map(repr, names))}, or None"
        )
    return names


def check_words(kernel: str, **tiles: str) -> None:
    """Refuse an unregistered kernel and tile text that no kernel accepts, for tensors that no kernel computes.

    tiles: tile text for each op of the call, "" for the default tile.
    """
    names = check_kernel(kernel, tiles)
    if ":" in kernel:
        _check_variant(kernel, tiles)
    for op, text in tiles.items():
        if ":" in kernel and op != "backward":
            continue  # a variant may define other fields
        reasons = []
        for arch in [names[kernel]] if kernel else sorted(set(names.values())):
            try:
                registry.lookup(Traits(op, arch, "bf16", 64)).tile.override(text)
                break
            except ValueError as reason:
                reasons.append(reason)
        else:
            argument = "backward_" if op == "backward" else ""  # then "tile has ..."
            raise type(reasons[-1])(f"{argument}{reasons[-1]}")


def _check_variant(kernel: str, ops: Iterable[str]) -> None:
    """Refuse a variant that may compute something other than the definition."""
    arch, _, variant = kernel.partition(":")
    for op in ops:
        registered = registry.KERNELS.get((op, arch, variant))
        reason = registered and changes_the_result(registered)
        if reason:
            raise ValueError(
                f"kernel is {kernel!r}, and {reason}; accepted on the CPU, where the definition computes: a class that "
                "overrides layouts, copies, MMAs and tiles alone; others need a GPU"
            )


def check_tile(call: Call, op: str, text: str) -> None:
    """Refuse tile text with which no kernel would serve the call on a GPU, for tensors that no kernel computes.

    If no kernel serves the call with its default tile either, the text is accepted: a call on a GPU gives the reason.
    """
    reasons: list[ValueError] = []
    for name in [call.kernel] if call.kernel else registry.generations("sm90") if text else []:
        arch, _, variant = name.partition(":")
        target = MEASURED
        try:
            variant = variant if (op, arch, variant) in registry.KERNELS else ""
            traits = call.traits(arch, variant, op=op)
            registry.lookup(traits, None, target)
        except (KeyError, ValueError):
            continue
        try:
            registry.lookup(traits, text, target)
            return
        except ValueError as reason:
            reasons.append(reason)
    if reasons:
        raise next((reason for reason in reasons if isinstance(reason, registry.Unsupported)), reasons[-1])


def _tma_bias_reason(call: Call, kernel: Any) -> str | None:
    """Why TMA does not load the bias, or store its gradient, with the kernel's tile; or None.

    A bias of a single row is cheaper to load without TMA.
    """
    bias = call.bias
    if bias is None or not getattr(kernel.tile, "bias_stages", 0):
        return None
    if getattr(kernel, "stores_bias_gradient", False):
        full = (call.batch, call.nheads, call.max_seqlen_q, call.max_seqlen_k)
        if tuple(bias.shape) != full or bias.shape[3] % 8:
            return (
                f"bias has shape {tuple(bias.shape)} and a gradient; accepted: {full} with a last size that is a "
                "multiple of 8,"
            )
    whole = ALIGNMENT_BYTES // bias.element_size()
    steps = [step for size, step in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1]
    aligned = is_aligned(bias)
    rows = bias.shape[2] > 1 and bias.stride(2) != 0
    if rows and aligned and bias.stride(-1) == 1 and all(step % whole == 0 <= step for step in steps):
        return None
    past = bias.data_ptr() % ALIGNMENT_BYTES
    address = f" and starts {past} bytes past a multiple of 16" if past else ""
    return (
        f"bias has shape {tuple(bias.shape)}, strides {tuple(bias.stride())}{address}; accepted: more rows than one, "
        f"multiples of {whole} elements before the last stride, and data aligned to {ALIGNMENT_BYTES} bytes,"
    )
