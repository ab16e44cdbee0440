"""Which overrides in a user's kernel class keep results as defined: only layouts, copies, MMAs and tiles."""

from typing import Any

HOW = frozenset(
    (
        *("smem_layout", "bias_layout", "values_layout", "probabilities_layout", "gradient_layout"),
        *(f"layout_{name}" for name in ("k", "v", "q", "do", "ds", "bias")),
        *("gmem_load", "gmem_store", "gmem_copy", "store_copy", "scores_store", "gradient_store"),
        *("tiled_mma", "mma_qk", "mma_pv", "mma_sdp", "mma_scores", "mma_dkv", "mma_dq"),
        *("swizzle_bits", "unroll", "step_content", "supports", "default_tile", "for_lengths", "beside"),
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
