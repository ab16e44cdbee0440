"""The padding copies in plain torch, for tests of the host that have no GPU."""

from cute_attn.host.memory import is_aligned
from cute_attn.traits import PADDED_TENSORS, aligned_head_dim


def copy_rows(traits, given):
    """Copy rows like :class:`cute_attn.kernels.pad_rows.PadRows` of these traits, from its launch's arguments."""
    which, cu_seqlens = given.which, given.mCuSeqlens
    dims = [getattr(traits, name) for name in PADDED_TENSORS[traits.op]]
    pads = traits.op.endswith("_pad")
    assert (cu_seqlens is not None) == (traits.varlen and traits.op == "forward_unpad")
    assert 0 < which < 1 << len(dims)
    for i, (x, y, dim) in enumerate(zip(given.mSource, given.mTarget, dims, strict=True)):
        padded = y if pads else x
        assert padded.is_contiguous() and is_aligned(padded)
        if not which & 1 << i:
            continue
        assert padded.shape[-1] == aligned_head_dim(traits.dtype, dim)
        assert x.shape[:-1] == y.shape[:-1] and (x if pads else y).shape[-1] == dim
        if pads:
            y.zero_()
            y[..., :dim] = x
        else:
            owned = slice(None) if cu_seqlens is None else slice(cu_seqlens[0], cu_seqlens[-1])
            y[owned] = x[owned, ..., :dim]
