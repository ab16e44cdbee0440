"""FlashAttention's rotary embedding (``layers.rotary`` and ``ops.triton.rotary``) in torch operators.

Libraries import these functions together with FlashAttention's attention (Megatron-LM, models of Hugging Face), some
without checking that they exist (vLLM). The rotation, :func:`cute_attn.reference.kvcache.rotate`, is that of Su et al.
2021, arXiv:2104.09864, in fp32 and then rounded. FlashAttention has a Triton kernel for it; the functions here need a
few launches, or one under ``torch.compile``. With a cache, the append kernel rotates: see rotary_cos of
``flash_attn_with_kvcache``.

    x            (batch, seqlen, nheads, head_dim), or packed (total, nheads, head_dim) with cu_seqlens
    cos, sin     (positions, rotary_dim / 2); the first rotary_dim elements of each head are rotated
    interleaved  pairs are elements (2i, 2i + 1) rather than (i, i + rotary_dim / 2)
    seqlen_offsets   int, or int32 or int64 (batch,): the position of each sequence's first row
    inplace      x is changed and returned

Functions raise TypeError or ValueError for an argument that is not as described.
"""

from typing import Any

import torch
from torch import Tensor

from cute_attn.flash_attn.conventions import check_tensors, flag, tensors_of, whole_number
from cute_attn.host.checks import check_starts
from cute_attn.host.values import is_int, python_number, shown, wrong_shape
from cute_attn.reference.kvcache import Rotary, rotate

__all__ = [
    "RotaryEmbedding", "apply_rotary", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_", "apply_rotary_emb_torch",
]  # fmt: skip


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate x; with conjugate by the negative angles, as for gradients. Differentiable in x.

    Rows that no sequence owns, and rows whose positions lie beyond the tables, stay as they are.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    dims = 3 if cu_seqlens is not None else 4
    if x.dim() != dims:
        accepted = "(batch, seqlen, nheads, head_dim)" if dims == 4 else "(total, nheads, head_dim)"
        raise wrong_shape("x", x, accepted)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; accepted: (positions, up to "
            f"{x.shape[-1] // 2}), both alike"
        )
    if cu_seqlens is not None:
        check_starts("cu_seqlens", cu_seqlens)
    seqlen_offsets = python_number(seqlen_offsets)
    _check_offsets(seqlen_offsets, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    longest = None if max_seqlen is None else whole_number("max_seqlen", max_seqlen)
    longest = x.shape[1] if cu_seqlens is None else longest
    interleaved, inplace = flag("interleaved", interleaved), flag("inplace", inplace)
    if isinstance(seqlen_offsets, int) and longest is not None and seqlen_offsets + longest > cos.shape[0]:
        raise ValueError(
            f"cos has {cos.shape[0]} positions; accepted: {seqlen_offsets + longest} or more, for {longest} rows from "
            f"position {seqlen_offsets} on"
        )
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    rotary = Rotary(cos, -sin if flag("conjugate", conjugate) else sin, interleaved)
    rows = x.flatten(0, -3)
    turned = rotate(rows, positions, rotary)
    if cu_seqlens is not None or isinstance(seqlen_offsets, Tensor):
        in_tables = (positions >= 0) & (positions < cos.shape[0])
        turned = torch.where(in_tables[:, None, None], turned, rows)
    turned = turned.view(x.shape)
    return _replaced(x, turned) if inplace else turned


def _check_offsets(seqlen_offsets: Any, batch: int) -> None:
    """Raise unless seqlen_offsets has a valid type and shape."""
    accepted = f"int32 or int64 ({batch},), or an int of 0 or more"
    if isinstance(seqlen_offsets, Tensor):
        check_tensors(seqlen_offsets=seqlen_offsets)
        if seqlen_offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"seqlen_offsets has dtype {seqlen_offsets.dtype}; accepted: {accepted}")
        if tuple(seqlen_offsets.shape) != (batch,):
            raise wrong_shape("seqlen_offsets", seqlen_offsets, accepted)
    elif not (is_int(seqlen_offsets) or isinstance(seqlen_offsets, torch.SymInt)):
        raise TypeError(f"seqlen_offsets is {shown(seqlen_offsets)}; accepted: {accepted}")
    elif seqlen_offsets < 0:
        raise ValueError(f"seqlen_offsets is {seqlen_offsets}; accepted: {accepted}")


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """:func:`apply_rotary` with its arguments in another order."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x in the common dtype of x and cos; row i of each sequence is at position i.

    Parameters
    ----------
    x : Tensor (batch, seqlen, nheads, head_dim)
    cos, sin : Tensor (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2)
    interleaved : bool
    """
    check_tensors(x=x, cos=cos, sin=sin)
    table = (*x.shape[:2], cos.shape[-1])[-cos.dim() :] if cos.dim() else None
    fits = x.dim() == 4 and cos.dim() in (2, 3) and tuple(cos.shape) == tuple(sin.shape) == table
    if not fits or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}; accepted: (batch, "
            "seqlen, nheads, head_dim), and twice (seqlen, pairs) or (batch, seqlen, pairs), up to head_dim / 2 pairs"
        )
    interleaved, pairs = flag("interleaved", interleaved), cos.shape[-1]
    cos, sin, own = cos.unsqueeze(-2), sin.unsqueeze(-2), x[..., : 2 * pairs]
    first, second = (own[..., 0::2], own[..., 1::2]) if interleaved else (own[..., :pairs], own[..., pairs:])
    halves = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((turned, x[..., 2 * pairs :]), -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate q and k of qkv in place.

    Parameters
    ----------
    qkv : Tensor (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, heads, head_dim) with num_heads_q
        With num_heads_q: heads of q first, then of k, then as many of v.
    cos_k, sin_k : Tensor, optional
        Tables for k; by default cos and sin.
    num_heads_q : int, optional
        Number of q's heads.
    """
    check_tensors(qkv=qkv, cos=cos, sin=sin)
    q, k, v = tensors_of({"qkv": qkv, "num_heads_q": num_heads_q})
    own_k = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    options: dict[str, Any] = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets}
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        for x, angles in ((q, (cos, sin)), (k, own_k)):
            apply_rotary(x, *angles, inplace=True, **options)
        return qkv
    parts = (apply_rotary(q, cos, sin, **options), apply_rotary(k, *own_k, **options), v)
    return _replaced(qkv, torch.stack(parts, 2) if qkv.dim() == 5 else torch.cat(parts, 2))


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of kv (batch, seqlen, 2, nheads, head_dim) in place."""
    check_tensors(kv=kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise wrong_shape("kv", kv, "(batch, seqlen, 2, nheads, head_dim)")
    k, v = kv.unbind(2)
    if not (torch.is_grad_enabled() and kv.requires_grad):
        apply_rotary(k, cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
        return kv
    turned = apply_rotary(k, cos, sin, seqlen_offsets, interleaved=interleaved)
    return _replaced(kv, torch.stack((turned, v), 2))


class RotaryEmbedding(torch.nn.Module):
    """Rotates pair j of q and k at position i by the angle i * base ** (-2j / dim). Tables are kept between calls.

    With scale_base, q and k are also scaled by position, and their products by distance (xPos, Sun et al. 2022,
    arXiv:2212.10554).

    Parameters
    ----------
    dim : int
        Number of elements of a head that are rotated.
    base : float
    interleaved : bool
        See :func:`apply_rotary`.
    scale_base : float, optional
    device : device of the frequencies
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-even / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Make tables for ``seqlen`` positions, unless the current tables can be used."""
        cos = self._cos_cached
        if (
            cos is not None
            and seqlen <= self._seq_len_cached
            and cos.device == device
            and cos.dtype == dtype
            and not (self.training and cos.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        inv_freq: Any = self.inv_freq
        if inv_freq.dtype != torch.float32:  # the model was cast
            inv_freq = self._compute_inv_freq(device)
        angles = torch.outer(positions, inv_freq.to(positions.device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale: Any = self.scale
        power = ((positions - seqlen // 2) / self.scale_base)[:, None]
        scale = scale.to(positions.device, torch.float32) ** power
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place.

        Parameters
        ----------
        qkv : Tensor
            See :func:`apply_rotary_emb_qkv_`; with kv it is q (batch, seqlen, nheads, head_dim).
        kv : Tensor (batch, seqlen, 2, nheads, head_dim), optional
        seqlen_offset : int, or Tensor (batch,)
            The position of each sequence's first row. A tensor requires max_seqlen.
        max_seqlen : int, optional
            Number of positions.
        num_heads_q : int, optional
            See :func:`apply_rotary_emb_qkv_`.

        Returns
        -------
        qkv, or with kv (q, kv)
        """
        seqlen_offset = python_number(seqlen_offset)
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError(
                "max_seqlen is None with a tensor as seqlen_offset; accepted: how many positions there are"
            )
        of_k = (cos, sin) if self._cos_k_cached is None else (self._cos_k_cached, self._sin_k_cached)
        options: dict[str, Any] = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, *of_k, num_heads_q=num_heads_q, **options)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, *of_k, **options)  # type: ignore[arg-type]


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Positions of all rows, one sequence after the other; -1 for rows that no sequence owns."""
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        row = torch.arange(seqlen, device=x.device)
        offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        return (row + offsets).expand(batch, seqlen).flatten()
    row = torch.arange(x.shape[0], device=x.device)
    starts = cu_seqlens.long()
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=len(starts) - 2)
    offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    owned = (row >= starts[0]) & (row < starts[-1])
    return torch.where(owned, row - starts[sequence] + offsets, -1)


def _replaced(x: Tensor, turned: Tensor) -> Tensor:
    """Copy ``turned`` to x's memory. Returns x, or a tensor in x's memory if autograd records."""
    if torch.is_grad_enabled() and turned.requires_grad:
        return _InMemory.apply(x.detach(), turned)
    return x.copy_(turned)


class _InMemory(torch.autograd.Function):
    """Writes a result to given memory, even to that of a leaf, which torch's operators refuse to change."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, result: Tensor) -> Tensor:
        memory.copy_(result)
        ctx.mark_dirty(memory)
        return memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Pass the gradient to the result; ``memory`` has no gradient."""
        return None, grad
