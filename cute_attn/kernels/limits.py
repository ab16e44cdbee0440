"""Reasons to decline traits that several kernels' ``supports`` have in common."""

from collections.abc import Sequence

from cute_attn.traits import LARGE_HEAD_DIM, Traits, head_dims_text

HALF = ("fp16", "bf16")


def beyond(
    traits: Traits,
    computes: str = "",
    *,
    dtypes: tuple[str, ...] = HALF,
    most: int = LARGE_HEAD_DIM,
    multiple: int = 8,
) -> str | None:
    """Why a kernel with these limits cannot serve ``traits``, or None.

    Args:
        computes: the kernel's operation and generation, such as ``"forward-sm80"``; "" if the registry knows.
        dtypes: supported dtypes of q, k, v and o.
        most: the largest supported head dim.
        multiple: head dims are multiples of this, or of the traits' ``alignment`` if given.
    """
    if computes and f"{traits.op}-{traits.arch}" != computes:
        return f"it computes {computes}, not {traits.op}-{traits.arch}"
    multiple = traits.alignment or multiple
    if traits.dtype not in dtypes:
        return f"dtype is {traits.dtype}; accepted: {', '.join(dtypes)}"
    for name in ("head_dim", "head_dim_v"):
        dim = getattr(traits, name)
        if dim > most or dim % multiple:
            return f"{name} is {dim}; accepted: {head_dims_text(multiple, most)}"
    return None


def more_than(traits: Traits, ops: Sequence[str], used: Sequence[str], words: str) -> str | None:
    """Why a kernel that computes ``ops`` with the features ``used`` alone cannot serve ``traits``, or None.

    words: what it uses, for the message.
    """
    if traits.op not in ops:
        return f"it computes {' and '.join(ops)}, not {traits.op}"
    own = {name: getattr(traits, name) for name in ("arch", "dtype", "head_dim", *used)}
    plain = Traits(traits.op, **own)
    return None if traits == plain else f"it uses {words}; accepted: {plain}"


def beyond_cache(
    traits: Traits,
    arch: str,
    lacks: tuple[str, ...] = (),
    most: int = LARGE_HEAD_DIM,
    dtypes: tuple[str, ...] = HALF,
    folds: bool = False,
) -> str | None:
    """Why a kvcache kernel of ``arch`` cannot serve ``traits``, or None.

    Args:
        lacks: features that the kernel does not support.
        most: the largest supported head dim.
        dtypes: supported dtypes of q, k, v and o.
        folds: True if the kernel supports the split "folded".
    """
    for name in ("dropout", "seqused_q", *lacks):
        if getattr(traits, name):
            return f"{name} is {getattr(traits, name)}; accepted: none"
    if traits.split == "fixed" and traits.sinks:
        return f"sinks is {traits.sinks} with split parts; accepted: none, since combine adds them"
    if traits.split == "folded" and not folds:
        return f"split is {traits.split}; accepted: the others"
    if traits.top_left:
        return f"mask is {traits.mask}; accepted: bottom right ones"
    return beyond(traits, f"kvcache-{arch}", dtypes=dtypes, most=most, multiple=traits.row_alignment)
