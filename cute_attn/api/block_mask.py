""":func:`block_mask`: FlexAttention's BlockMask of a function, made by two kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from cute_attn.epilogues.functions.trace import check_function
from cute_attn.host.mask_kinds import LISTED_ROWS, made_block_mask
from cute_attn.host.values import check_device, is_int, length, python_number, shown

_UNIT, _MOST_ROWS, _MOST_LENGTH = 32, 512, 1 << 30


def block_mask(
    mask_mod: Callable[..., Any],
    b: int | None,
    h: int | None,
    q_len: int,
    kv_len: int,
    *,
    block_size: int | tuple[int, int] = LISTED_ROWS,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Make a function's BlockMask, as create_block_mask does, for ``attention(..., block_mask=)`` and FlexAttention.

    On a GPU no (q_len, kv_len) tensor is made. One kernel classifies blocks: most by bounds of the compared values,
    the others by evaluating elements until the kind of block is known. A second kernel makes the lists. The host reads
    nothing, so a CUDA graph can capture the call: each replay reads the values of captured tensors again.

    Parameters
    ----------
    mask_mod : function (b, h, q_idx, kv_idx) -> bool
        See :func:`cute_attn.attention`. Traced once; captured tensors must be on ``device``.
    b, h : int or None
        Number of sequences and of query heads. The mask has size 1 in that dimension if the number is None, or if the
        function does not depend on the index.
    q_len, kv_len : int
        Number of queries and of keys per sequence.
    block_size : int or (int, int)
        Queries and keys per block: multiples of 32 up to 512. Kernels visit blocks of 128.
    device : torch.device or str, optional
        Default: the current GPU if any, else the CPU. On the CPU the function is evaluated for every query and key.

    Returns
    -------
    BlockMask
        Lists full and partial blocks separately, by query block and by key block. A block that reaches beyond a
        sequence is not full.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here; the message names the argument, its value and the accepted values.
    Unsupported
        The function reads more than 32 values per query, which is as many as the kernel keeps.
    """
    check_function("mask_mod", mask_mod)
    given = {"b": 1 if b is None else b, "h": 1 if h is None else h, "q_len": q_len, "kv_len": kv_len}
    sizes: Any = tuple(length(name, n, 1, _MOST_LENGTH) for name, n in given.items())
    where = _device(device)
    if torch.compiler.is_compiling():
        from cute_attn.api import in_graphs  # loads torch's compiler

        return in_graphs.made_block_mask(mask_mod, sizes, _block_size(block_size), where)
    return made_block_mask(mask_mod, sizes, _block_size(block_size), where)


def _block_size(given: Any) -> tuple[int, int]:
    both = tuple(map(python_number, given if isinstance(given, tuple | list) else (given, given)))
    right = len(both) == 2 and all(map(is_int, both))
    if not right or any(x % _UNIT or not _UNIT <= x <= _MOST_ROWS for x in both):
        accepted = f"a multiple of {_UNIT} up to {_MOST_ROWS}, or two, of queries and of keys"
        raise ValueError(f"block_size is {shown(given)}; accepted: {accepted}")
    return both[0], both[1]


def _device(given: Any) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    device = check_device(given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device is {device}; accepted: a GPU's or the CPU")
    return device
