"""From padded batches to packed sequences and back: FlashAttention-2's ``bert_padding`` in torch operators."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_attn.flash_attn.conventions import check_tensors, whole_number
from cute_attn.host.values import wrong_shape

__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices``, int64 (n,), of input (rows, ...): (n, ...). Differentiable in input."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`index_first_axis`, and input itself for a residual connection."""
    return input.index_select(0, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) of zeros with values (n, ...) in rows ``indices``. Differentiable in values."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: rows (total, ...) as (batch, seqlen, ...), 0 elsewhere.

    Parameters
    ----------
    hidden_states : Tensor (total, ...)
    indices : Tensor (total,), int64
        Of each row in the flattened batch, as :func:`unpad_input` returns them.
    batch, seqlen : int
        Of the padded batch.
    """
    check_tensors(hidden_states=hidden_states, indices=indices)
    batch, seqlen = whole_number("batch", batch), whole_number("seqlen", seqlen)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that count, one sequence after the other.

    Parameters
    ----------
    hidden_states : Tensor (batch, seqlen, ...)
    attention_mask : Tensor (batch, seqlen), bool or int
        1 for rows that count.
    unused_mask : Tensor (batch, seqlen), bool or int, optional
        1 for rows that are packed although they do not count.

    Returns
    -------
    hidden_states : Tensor (total, ...)
        Differentiable in the argument of that name.
    indices : Tensor (total,), int64
        Of each row in the flattened batch.
    cu_seqlens : Tensor (batch + 1,), int32
    max_seqlen : int
        Read from the device; this waits for it.
    seqused : Tensor (batch,), int32
        How many rows of each sequence count.

    Raises
    ------
    TypeError, ValueError
        An argument is no tensor, or a mask has another shape than hidden_states' first two dimensions.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None:
            _check_mask(name, mask, hidden_states)
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = packed.sum(-1, dtype=torch.int32)
    return *_pack(hidden_states, packed, lengths), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As :func:`unpad_input` where each row of the batch holds several short sequences, then padding.

    Parameters
    ----------
    hidden_states : Tensor (batch, seqlen, ...)
    attention_mask_in_length : Tensor (batch, seqlen), int
        In each row the lengths of its sequences, 0 for none: ``[2, 3, 0, 0, 0, 0]`` has two and one row of padding.

    Returns
    -------
    hidden_states, indices, cu_seqlens, max_seqlen
        As from :func:`unpad_input`, for each short sequence.

    Raises
    ------
    TypeError, ValueError
        An argument is no tensor, or the mask has another shape than hidden_states' first two dimensions.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    counted = attention_mask_in_length.sum(-1, keepdim=True)
    position = torch.arange(attention_mask_in_length.shape[1], device=counted.device)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _pack(hidden_states, position < counted, lengths)


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensors(hidden_states=hidden_states, **{name: mask})
    if mask.shape != hidden_states.shape[:2]:
        accepted = tuple(hidden_states.shape[:2])
        raise wrong_shape(name, mask, f"{accepted}, hidden_states' first two")


def _pack(hidden_states: Tensor, counts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """counts: (batch, seqlen), not 0 for rows to keep. lengths: of the sequences they make."""
    indices = counts.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        int(lengths.max().item()) if lengths.numel() else 0,
    )
