"""Second derivatives of attention by its definition, in plain torch, some scores at a time.

Of the differentiable tensors x, with tangents t, and cotangents u = (grad_out, grad_lse) of (out, lse) = F(x)::

    J t               the tangents of out and lse
    d(u . J t)/dx     the derivative of a gradient J^T u, multiplied by t, and of a tangent J t, multiplied by u

Scores of a block are computed again and differentiated twice by torch; results are sums over blocks. The memory is that
of a few dozen matrices of a block's scores, whatever the lengths.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference.definition import Block, Features, Lengths, attend, blocks, extents

Some = Sequence[Tensor | None]
_KEYS = (3, 4)
_BIAS = 5
"""Places in lists of cotangents or outputs, q, k, v, bias, sinks, and the tensors of epilogues."""


def second(
    tensors: Some,
    tangents: Some,
    cotangents: Some,
    needed: Sequence[bool],
    softmax_scale: float,
    described: Callable[[Sequence[Any]], tuple[Features, ScoreInputs, Lengths]],
) -> list[Tensor | None]:
    """J t, and the gradient of u . J t; see the module.

    Args:
        tensors: q, k, v, bias, sinks, and the tensors of epilogues, as :func:`.definition.attention` takes them.
        tangents: t, one for each of ``tensors``; None for zeros.
        cotangents: u, of out and of lse; None for zeros.
        needed: whether J t is needed for each of ``cotangents``, and the gradient for each of ``tensors``; False for
            what is None.
        softmax_scale: factor of the products.
        described: the call without its bias, with other sinks and tensors of epilogues.

    Returns:
        fp32 or float64 tensors in the order of ``needed``, None where it is False.
    """
    features, _, lengths = described(tensors[4:])
    packed = lengths.cu_seqlens_q is not None

    def batched(some: Some) -> list[Any]:
        """With a dimension of sequences also for packed rows."""
        return [x.unsqueeze(0) if packed and x is not None and i < _BIAS else x for i, x in enumerate(some)]

    given, dots = batched((*cotangents, *tensors)), batched((None, None, *tangents))
    q, k, v = given[2:_BIAS]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    learned = [wanted or t is not None for wanted, t in zip(needed, dots, strict=True)]
    likes = (
        (*q.shape[:3], v.shape[3]),
        (q.shape[0], q.shape[2], q.shape[1]),
        *(None if x is None else x.shape for x in given[2:]),
    )
    sums = [
        q.new_zeros(like, dtype=dtype) if wanted else None for like, wanted in zip(likes, needed, strict=True)
    ]
    for block in blocks(q, k, lengths, features, extents(q, k, lengths)[1]):
        leaves = [
            x if x is None else x.detach().to(dtype if i <= _BIAS else x.dtype).requires_grad_(own)
            for i, (x, own) in enumerate(zip(_of(block, given), learned, strict=True))
        ]
        found = _differentiated(block, leaves, _of(block, dots), needed, softmax_scale, described)
        for i, (target, x) in enumerate(zip(_of(block, sums, whole=_KEYS), found, strict=True)):
            if x is None:
                continue
            if i in _KEYS:  # heads of a group add to the same rows
                target[block.where, block.rows_k].index_add_(2, block.heads_kv, x)
            else:
                target.add_(x)
    return [x.squeeze(0) if packed and x is not None and i < _BIAS else x for i, x in enumerate(sums)]


def _of(block: Block, some: Some, whole: Sequence[int] = ()) -> list[Any]:
    """The block's elements of each tensor, except of those at the places ``whole``; views of all except keys."""
    readers = (block.queries, block.lse, block.queries, block.keys, block.keys, block.biases)
    return [x if x is None or i > _BIAS or i in whole else readers[i](x) for i, x in enumerate(some)]


def _differentiated(
    block: Block,
    leaves: Sequence[Any],
    dots: Some,
    needed: Sequence[bool],
    softmax_scale: float,
    described: Callable[[Sequence[Any]], tuple[Features, ScoreInputs, Lengths]],
) -> list[Tensor | None]:
    """The results of a block; None for zeros."""
    features, inputs, _ = described(leaves[_BIAS + 1 :])
    bias = leaves[_BIAS]
    if bias is not None:
        features = dataclasses.replace(
            features, epilogues=(lambda scores, *_: scores + bias, *features.epilogues)
        )
    q, k, v = leaves[2:_BIAS]
    outputs = attend(q, k, v, softmax_scale, features, inputs, block.coords)[:2]
    found: list[Tensor | None] = [None] * len(needed)
    pairs = [(y, u) for y, u in zip(outputs, leaves[:2], strict=True) if u is not None and y.requires_grad]
    moved = [(x, t) for x, t in zip(leaves, dots, strict=True) if t is not None]
    places = [i for i, wanted in enumerate(needed) if wanted]
    if not pairs or not moved:
        return found
    ys, us = zip(*pairs, strict=True)
    firsts = torch.autograd.grad(ys, [x for x, _ in moved], us, create_graph=True, allow_unused=True)
    products = [(g * t.to(g.dtype)).sum() for g, (_, t) in zip(firsts, moved, strict=True) if g is not None]
    terms = [x for x in products if x.requires_grad]
    if terms and places:
        by = [leaves[i] for i in places]
        for i, x in zip(
            places, torch.autograd.grad(torch.stack(terms).sum(), by, allow_unused=True), strict=True
        ):
            found[i] = x
    return found
