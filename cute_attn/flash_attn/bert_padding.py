"""Convert padded batches to packed sequences and back: FlashAttention-2's ``bert_padding`` in torch operators."""

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
    """Gather rows ``indices``, int64 (n,), of input (rows, ...). Returns (n, ...), differentiable in input."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`index_first_axis`, but also return input, for a residual connection."""
    return input.index_select(0, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatter values (n, ...) to rows ``indices`` of zeros (first_axis_dim, ...). Differentiable in values."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Invert :func:`unpad_input`: scatter rows (total, ...) to (batch, seqlen, ...), with 0 elsewhere.

    Parameters
    ----------
    hidden_states : Tensor (total, ...)
    indices : Tensor (total,), int64
        Index of each row in the flattened batch, as returned by :func:`unpad_input`.
    batch, seqlen : int
        Sizes of the padded batch.
    """
    check_tensors(hidden_states=hidden_states, indices=indices)
    batch, seqlen = whole_number("batch", batch), whole_number("seqlen", seqlen)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the unmasked rows of a padded batch, one sequence after the other.

    Parameters
    ----------
    hidden_states : Tensor (batch, seqlen, ...)
    attention_mask : Tensor (batch, seqlen), bool or int
        1 for tokens, 0 for padding.
    unused_mask : Tensor (batch, seqlen), bool or int, optional
        1 for padding rows that are packed as well.

    Returns
    -------
    hidden_states : Tensor (total, ...)
        Differentiable in the argument of that name.
    indices : Tensor (total,), int64
        Index of each row in the flattened batch.
    cu_seqlens : Tensor (batch + 1,), int32
    max_seqlen : int
        Read from the device; this waits for it.
    seqused : Tensor (batch,), int32
        Number of tokens of each sequence, without unused_mask.

    Raises
    ------
    TypeError, ValueError
        An argument is not a tensor, or the shape of a mask differs from the first two sizes of hidden_states.
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
        The lengths of the sequences in each row, then zeros: ``[2, 3, 0, 0, 0, 0]`` means sequences of 2 and 3 tokens,
        and one of padding.

    Returns
    -------
    hidden_states, indices, cu_seqlens, max_seqlen
        As from :func:`unpad_input`, for each short sequence.

    Raises
    ------
    TypeError, ValueError
        An argument is not a tensor, or the shape of the mask differs from the first two sizes of hidden_states.
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
    """Pack the rows where ``counts`` (batch, seqlen) is not 0. lengths: lengths of the packed sequences."""
    indices = counts.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        int(lengths.max().item()) if lengths.numel() else 0,
    )
