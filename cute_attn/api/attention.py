"""The public functions: :func:`attention` on batches, :func:`attention_varlen` on packed sequences."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cute_attn.api import derivatives as derivatives  # registers its operators
from cute_attn.api import operators
from cute_attn.api.functions import Functions, MaskMod, ScoreMod, all_epilogues, as_one_node, packed_sequences
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.host import choose, plans, random_states, values
from cute_attn.host.bias import four_dims, with_readable_bias
from cute_attn.host.call import BIAS, NUM_TENSORS, PYTORCHS, Call, pack_epilogues, pytorchs_precision
from cute_attn.host.checks import DROPOUTS, check_like, check_starts, check_writable
from cute_attn.host.dispatch import DIFFERENTIABLE
from cute_attn.host.forward import Outputs
from cute_attn.host.memory import Tensors, materialized
from cute_attn.host.record import drawn

Result = Tensor | tuple[Tensor, ...]
Window = tuple[int | None, int | None]
Causal = bool | Literal["bottom_right", "top_left"]
RngState = Tensor | tuple[Tensor | int, Tensor | int]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: Causal = False,
    window: Window = (None, None),
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_mask: str = "flash",
    rng_state: Tensor | None = None,
    seqused_k: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    epilogues: Sequence[str] | Mapping[str, Any] = (),
    return_lse: bool = False,
    return_softmax: bool = False,
    return_max_scores: bool = False,
    kernel: str | None = None,
    tile: Any = None,
    deterministic: bool = False,
    same_bits: bool = False,
    backward_tile: Any = None,
    precision: str | None = None,
    out: Tensor | None = None,
) -> Result:
    """softmax(softmax_scale * q k^T + ...) v for batches of equally long sequences.

    Scores pass through softcap, ALiBi, bias, users' epilogues, score_mod, mask_mod and the mask, in this order, before
    a float32 softmax and dropout. For a query that sees no key, out is 0 and lse is -inf, or the sink if any.
    The definition is :mod:`cute_attn.reference`; it computes CPU tensors, in float32 or float64. Other libraries'
    is_causal, attn_mask, scale and window_size are causal, bias, softmax_scale and window here: docs/doors.md.

    out and lse are differentiable in q, k, v, bias, sinks and tensors that functions capture; on the CPU also in slopes
    and in epilogues' tensors. Forward-mode derivatives (``torch.func.jvp``, ``torch.autograd.forward_ad``) follow
    tangents of the same tensors except slopes; docs/features.md lists calls that do not support them.
    Second derivatives are computed by the definition, in blocks of scores.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, nheads, head_dim)
        fp16, bf16 or fp32 on CUDA, any float dtype on the CPU. head_dim is at most 576, seqlens at most 2**30 - 2**13.
        16-bit dtypes and head dims up to 256 are fastest, with contiguous rows whose size and address are multiples of
        16 bytes. Tensors with other rows are copied, padded to multiples of 16 bytes. Under autocast, fp32 tensors are
        cast, as by PyTorch's attention.
    k : Tensor (batch, seqlen_k, nheads_kv, head_dim)
        As q. nheads is a multiple of nheads_kv: consecutive query heads use the same key head.
    v : Tensor (batch, seqlen_k, nheads_kv, head_dim_v)
        As k; head_dim_v may differ from head_dim.
    softmax_scale : float, optional
        Factor of the products, 0 or from 2**-60 to 2**60 in magnitude. Default 1 / sqrt(head_dim). On CUDA, a scale of
        0 or below is applied to a copy of q.
    causal : bool or {"bottom_right", "top_left"}
        Hide the keys after a query's position. Positions are aligned so that the last query is at the last key
        (True, "bottom_right") or the first query at the first key ("top_left").
    window : (left, right)
        How many keys a query sees before and after its position; None or -1 means all. With
        ``shift = seqlen_k - seqlen_q`` (0 under "top_left"), query i sees keys i + shift - left to i + shift + right.
        With causal, right must be None or 0.
    alibi_slopes : Tensor (nheads,) or (batch, nheads), float32, optional
        slope * abs(i + shift - j) is subtracted from scores (Press et al. 2021, arXiv:2108.12409).
    bias : Tensor (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k or 1), fp16, bf16, fp32 or bool, optional
        Added to scores; a bool bias hides keys where it is False. Leading dimensions may be omitted. Kernels read a
        bias in place if its last dimension is seqlen_k and contiguous; any other bias, and a bool bias, is copied. -inf
        hides a key. A finite number never does, not even the dtype's minimum: if all keys that a query sees have it,
        out is the mean of their values, as in fp32. (From 1e8 on the logarithm of the sum may round away in lse. The
        backward on CUDA then expects that all keys in the mask have that number; see docs/features.md.) NaN or Inf in a
        key that a bias hides still reaches out, as in PyTorch; a key hidden by mask_mod or seqused_k has no effect.
    sinks : Tensor (nheads,), fp16, bf16 or fp32, optional
        Attention sinks, one logit per head: exp(sink) is added to the softmax denominator of each row, and so to lse,
        like an extra key with value 0 (gpt-oss, arXiv:2508.10925).
    softcap : float
        Scores become softcap * tanh(score / softcap); 0 leaves them (Gemma 2, arXiv:2408.00118). From 2**-60 to 2**12.
    dropout_p : float
        Probability of dropping an element of the softmax, 0 <= dropout_p < 1; kept elements are scaled by
        1 / (1 - dropout_p).
    dropout_mask : {"flash", "mem_efficient"}
        The PyTorch kernel whose dropout mask is reproduced, bit for bit.
    rng_state : Tensor (2,), int64, optional
        Seed and offset of the mask, on q's device. Default: drawn from torch's generator of that device, again at each
        replay of a CUDA graph. To reuse a mask, pass a state from :func:`draw_rng_state`.
    seqused_k : Tensor (batch,), int32, optional
        Number of keys of each sequence, 0 to seqlen_k; memory beyond them is never read. Values are checked on the CPU
        only: reading them on CUDA would wait for the device.
    score_mod : function (score, b, h, q_idx, kv_idx) -> score, optional
        As for FlexAttention. Traced once, so it may use torch's elementwise operations and elements of captured
        tensors; negative indices count from the end. q_idx and kv_idx count within a sequence. Applied after bias,
        so a score may be -inf; a key that mask_mod hides stays hidden whatever score_mod returns. docs/functions.md
        lists the operations.
    mask_mod : function (b, h, q_idx, kv_idx) -> bool, optional
        As for FlexAttention: keys are hidden where it is False. Applied after score_mod.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        Unlisted blocks are hidden, full blocks are visible, and the mask's function decides in partial blocks. Kernels
        skip unlisted blocks, except the sm80 backward and the kernels for few queries, which visit every block. Tables
        made of its tensors, and of cu_seqlens, are kept: change these only by torch's operations, or pass a new mask.
    epilogues : sequence of str, or mapping of str to arguments
        Users' registered epilogues, applied in this order before score_mod; arguments are tensors and numbers.
    return_lse : bool
        Also return the logarithm of each row's sum of exponentials.
    return_softmax : bool
        Also return the softmax, for inspection. On CUDA it is recomputed from lse, in plain torch and without a
        gradient. Not available during CUDA graph capture if the call has lengths, since the host reads them.
    return_max_scores : bool
        Also return each row's greatest score, without a gradient and not together with the softmax. QK-clip
        (arXiv:2507.20534) reads the maximum of each head: ``max_scores.amax((0, 2))``.
    kernel : str, optional
        The kernel, "ARCH" or "ARCH:VARIANT", such as "sm80". Default: the newest generation that supports the call.
    tile : Tile or str, optional
        A tile, or text that changes fields of the default one, such as "tile_n=32". If a generation does not support
        the tile, the previous generation is used with a warning, unless ``kernel`` is given.
    deterministic : bool
        Make gradients repeat bit for bit (the output always does). Also enabled by
        ``torch.use_deterministic_algorithms(True)``. The backward's fp32 workspace, otherwise the size of q, is then up
        to 16 times that size; on Hopper at most 4 times, or the size of k and v. The gradient of a broadcast bias needs
        4 more bytes per score, that of a tensor that a function captures mostly 264 per element, up to 4 GiB. See
        :mod:`cute_attn.host.backward`.
    same_bits : bool
        On Hopper, make a row's output, LSE and gradients depend only on its own sequence, bit for bit. Other sequences
        of the call have no effect, nor does passing sequences batched, packed, in a cache or with only some of their
        queries. Not supported with bias, dropout, block_mask or fp32; head dims must be multiples of 8.
        docs/features.md states the cost.
    backward_tile : Tile or str, optional
        As tile, for the backward.
    precision : {"fp32", "tf32"}, optional
        Precision of products of fp32 tensors on CUDA: "fp32", or "tf32" for operands rounded to tf32's 11 significant
        bits, with a third of the products. Default: PyTorch's setting in torch.backends.cuda.matmul. Large calls at
        "fp32" need a workspace of the size of k and v, and their backward of q, k, v and out; at "tf32" half as much.
    out : Tensor (batch, seqlen_q, nheads, head_dim_v), optional
        Memory for the result, returned instead of a new tensor; without gradients. Must not overlap other arguments.
        On CUDA, out must have contiguous rows that start at multiples of 16 bytes if q, k and v have such rows.

    Returns
    -------
    out : Tensor (batch, seqlen_q, nheads, head_dim_v), q's dtype
        Returned alone by default; otherwise first in a tuple, followed by lse, softmax and max_scores if requested.
    lse : Tensor (batch, nheads, seqlen_q), float32 (float64 for float64 q)
        Natural logarithm; -inf, or the sink, where a query sees no key.
    softmax : Tensor (batch, nheads, seqlen_q, seqlen_k), q's dtype
        Before dropout. Among keys that the query sees, a set sign bit marks an element that dropout drops.
    max_scores : Tensor (batch, nheads, seqlen_q), dtype of lse
        Greatest score after all modifications and masks, without the sink; -inf where a query sees no key.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here; the message names the argument, its value and the accepted values.
    Unsupported
        No kernel supports the call; a ValueError that gives each kernel's reason.
    NotImplementedError
        On CUDA, the slopes or an epilogue's tensor require a gradient that kernels do not compute. The slopes have a
        tangent, or on CUDA a tensor of an epilogue's class has one.
    """
    tensors = (q, k, v, None, None, None, seqused_k, alibi_slopes, bias, sinks, rng_state)
    options = (
        False, None, None, softmax_scale, causal, window, softcap, dropout_p, dropout_mask, epilogues,
        return_lse, return_softmax, kernel, tile, deterministic, backward_tile, precision, same_bits,
        return_max_scores,
    )  # fmt: skip
    return _attend(tensors, options, out, (score_mod, mask_mod, block_mask))


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int,
    *, softmax_scale: float | None = None, causal: Causal = False, window: Window = (None, None),
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    softcap: float = 0.0, dropout_p: float = 0.0, dropout_mask: str = "flash", rng_state: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None, block_mask: Any = None, epilogues: Sequence[str] | Mapping[str, Any] = (),
    return_lse: bool = False, return_softmax: bool = False, return_max_scores: bool = False,
    kernel: str | None = None, tile: Any = None, deterministic: bool = False, same_bits: bool = False,
    backward_tile: Any = None, precision: str | None = None, out: Tensor | None = None,
) -> Result:  # fmt: skip
    """:func:`attention` for sequences of different lengths, packed one after the other.

    Parameters
    ----------
    q : Tensor (total_q, nheads, head_dim)
        Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
    k, v : Tensor (total_k, nheads_kv, head_dim), (total_k, nheads_kv, head_dim_v)
        As q, with cu_seqlens_k.
    cu_seqlens_q, cu_seqlens_k : Tensor (batch + 1,), int32
        Start offsets of sequences, non-decreasing, on q's device. Values are checked on the CPU only: reading them
        on CUDA would wait for the device. A sequence may be empty.
    max_seqlen_q, max_seqlen_k : int
        Length of the longest sequence, or more. On CUDA, queries beyond max_seqlen_q would not be computed. Values are
        clamped to the total number of rows, except that the "mem_efficient" dropout mask depends on unclamped values.
    seqused_q, seqused_k : Tensor (batch,), int32, optional
        Number of rows of each sequence that exist, as for :func:`attention`.
    bias : Tensor (batch or 1, nheads or 1, max_seqlen_q or 1, max_seqlen_k or 1)
        As for :func:`attention`, indexed by positions within a sequence.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        As for :func:`attention`, made for the number of packed sequences, or 1, and for lengths of at least
        max_seqlen_q and max_seqlen_k. Blocks and indices count within a sequence.
    softmax_scale, causal, window, alibi_slopes, sinks, softcap, dropout_p, dropout_mask, rng_state, score_mod, \
mask_mod, epilogues, return_lse, return_softmax, return_max_scores, kernel, tile, deterministic, same_bits, \
backward_tile, precision, out
        As for :func:`attention`.

    Returns
    -------
    out : Tensor (total_q, nheads, head_dim_v)
        Returned alone, or first in a tuple, followed by lse, softmax and max_scores if requested. Rows beyond
        seqused_q are 0 (lse: -inf); rows that belong to no sequence are not written.
    lse : Tensor (nheads, total_q)
        As :func:`attention`'s.
    softmax : Tensor (batch, nheads, max_seqlen_q, max_seqlen_k)
        As :func:`attention`'s.
    max_scores : Tensor (nheads, total_q)
        As :func:`attention`'s; -inf in rows that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`attention`.
    """
    tensors = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, bias, sinks, rng_state,
    )  # fmt: skip
    options = (
        True, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap, dropout_p, dropout_mask, epilogues,
        return_lse, return_softmax, kernel, tile, deterministic, backward_tile, precision, same_bits,
        return_max_scores,
    )  # fmt: skip
    return _attend(tensors, options, out, (score_mod, mask_mod, block_mask))


def attention_backward(
    grad_out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, grad_lse: Tensor | None = None, wanted: Sequence[str] = ("q", "k", "v"),
    softmax_scale: float | None = None, causal: Causal = False, window: Window = (None, None),
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    softcap: float = 0.0, dropout_p: float = 0.0, dropout_mask: str = "flash",
    rng_state: RngState | None = None, seqused_k: Tensor | None = None, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None, block_mask: Any = None, epilogues: Sequence[str] | Mapping[str, Any] = (),
    kernel: str | None = None, tile: Any = None, deterministic: bool = False, same_bits: bool = False,
    precision: str | None = None, into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`attention` from its outputs, or from PyTorch's.

    From ``aten._flash_attention_forward`` or ``aten._efficient_attention_forward``, pass out and logsumexp; with
    dropout, also the seed and offset as rng_state, and the dropout_mask of the same name. (Causal masks of the
    efficient operator are "top_left" for custom_mask_type 1 and "bottom_right" for 2.)

    Parameters
    ----------
    grad_out : Tensor (batch, seqlen_q, nheads, head_dim_v) or None
        The gradient of out; any strides. None for zeros.
    q, k, v
        As for :func:`attention`.
    out : Tensor (batch, seqlen_q, nheads, head_dim_v)
        The forward's output.
    lse : Tensor (batch, nheads, seqlen_q), float32
        The forward's, including sinks; may be longer than seqlen_q. Rows that see no key have -inf, or PyTorch's +inf.
    grad_lse : Tensor (batch, nheads, seqlen_q), float32, optional
        The gradient of lse.
    wanted : sequence of {"q", "k", "v", "bias", "sinks"}
        Which gradients to return.
    rng_state : Tensor (2,), int64 or uint64, or (seed, offset), each a tensor or an int
        The forward's seed and offset, on any device.
    tile : Tile or str, optional
        The backward's tile.
    into : sequence of Tensor, optional
        Tensors to write the wanted gradients into, in the order of wanted; may be views of one tensor. Rows start at
        multiples of 16 bytes and do not overlap. Default: new tensors, views of one tensor if q, k and v are.
    softmax_scale, causal, window, alibi_slopes, bias, sinks, softcap, dropout_p, dropout_mask, seqused_k, score_mod, \
mask_mod, block_mask, epilogues, kernel, deterministic, same_bits, precision
        As the forward's.

    Returns
    -------
    tuple of Tensor
        The wanted gradients, in the order of wanted, each with the shape and dtype of its input.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`attention`.
    """
    tensors = (q, k, v, None, None, None, seqused_k, alibi_slopes, bias, sinks, rng_state)
    options = _Options(
        False, None, None, softmax_scale, causal, window, softcap, dropout_p, dropout_mask, epilogues,
        False, False, kernel, None, deterministic, tile, precision, same_bits,
    )  # fmt: skip
    outer, functions = (grad_out, grad_lse, out, lse), (score_mod, mask_mod, block_mask)
    return as_one_node(_gradients, functions, tensors, options, outer, wanted, into)


def attention_varlen_backward(
    grad_out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, grad_lse: Tensor | None = None, wanted: Sequence[str] = ("q", "k", "v"),
    softmax_scale: float | None = None, causal: Causal = False, window: Window = (None, None),
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    softcap: float = 0.0, dropout_p: float = 0.0, dropout_mask: str = "flash",
    rng_state: RngState | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None, block_mask: Any = None,
    epilogues: Sequence[str] | Mapping[str, Any] = (), kernel: str | None = None, tile: Any = None,
    deterministic: bool = False, same_bits: bool = False, precision: str | None = None,
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """:func:`attention_backward` for packed sequences: gradients of :func:`attention_varlen`.

    Parameters
    ----------
    grad_out, out : Tensor (total_q, nheads, head_dim_v)
        As for :func:`attention_backward`.
    lse : Tensor (nheads, total_q), or (batch, nheads, max_seqlen_q or more), float32
        PyTorch's memory-efficient attention returns the second shape.
    others
        As for :func:`attention_varlen` and :func:`attention_backward`.

    Returns
    -------
    tuple of Tensor
        The wanted gradients; 0 in rows that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`attention`.
    """
    tensors = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, bias, sinks, rng_state,
    )  # fmt: skip
    options = _Options(
        True, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap, dropout_p, dropout_mask, epilogues,
        False, False, kernel, None, deterministic, tile, precision, same_bits,
    )  # fmt: skip
    outer, functions = (grad_out, grad_lse, out, lse), (score_mod, mask_mod, block_mask)
    return as_one_node(_gradients, functions, tensors, options, outer, wanted, into)


def _gradients(
    functions: Functions,
    tensors: Tensors,
    options: "_Options",
    outer: operators.Given,
    wanted: Sequence[str],
    into: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """The wanted gradients. functions, tensors: see :func:`_attend`; outer: gradients of out and lse, then out, lse."""
    q, bias, rng_state = tensors[0], tensors[BIAS], tensors[-1]
    epilogues = all_epilogues(tensors, options.epilogues, functions, options.longest)
    state = _rng_state(rng_state, q, values.number("dropout_p", options.dropout_p))
    wants_bias = bias is not None and isinstance(wanted, tuple | list) and "bias" in wanted
    if wants_bias and isinstance(bias, Tensor) and bias.dtype == torch.bool:
        raise ValueError(
            f"wanted is {wanted!r} with a bias of bool, which has no gradient; accepted: the others"
        )
    tensors = (*tensors[:-1], state)
    if isinstance(q, Tensor):
        tensors = with_readable_bias(tensors, options.max_seqlen_k)
    precision = resolve_precision(q, options.precision)
    call = _call_of(tensors, options._replace(epilogues=epilogues, precision=precision))
    grad_out, grad_lse, out, lse = outer
    if call.cu_seqlens_q is not None:
        check_starts("cu_seqlens_q", call.cu_seqlens_q)
    values.check_dense("lse", lse)
    if lse.dim() == 3:
        lse = _lse_of_rows(call, lse)
    accepted = tuple(name for name in DIFFERENTIABLE if getattr(call, name) is not None)
    names = wanted if isinstance(wanted, tuple | list) else (None,)
    if not all(values.is_one_of(name, accepted) for name in names) or len(set(names)) != len(names):
        listed = ", ".join(map(repr, accepted))
        raise ValueError(
            f"wanted is {values.shown(wanted)}; accepted: a tuple of {listed}, each once at most"
        )
    if grad_out is None and grad_lse is None:
        raise ValueError("grad_out and grad_lse are None; accepted: one of them, or both")
    outputs = (("grad_out", grad_out), ("grad_lse", grad_lse), ("out", out), ("lse", lse))
    values.check_present((*call.tensors(), *outputs), ("out", "lse"))
    needed = tuple(name in wanted for name in DIFFERENTIABLE)
    own: dict[str, Tensor] = {}
    if into is not None:
        own = dict(
            zip(
                wanted,
                values.tensors_of("into", into, len(wanted), f", one for each of {wanted!r}"),
                strict=True,
            )
        )
        for name, x in own.items():
            check_writable(f"d{name}", x)
    dbias, read = own.get("bias"), call.bias
    if dbias is not None and read is not None:
        check_like("dbias", dbias, shape=bias.shape)
        # Kernels write a gradient of all columns; the bias may have one.
        own["bias"] = four_dims(dbias) if bias.shape[-1] == read.shape[3] else dbias.new_empty(read.shape)
    given = tuple(own.get(name) for name in DIFFERENTIABLE)
    found = operators.backward(call, (grad_out, grad_lse, out, lse), needed, into=given)  # type: ignore[arg-type]
    grads: dict[str, Any] = dict(zip(DIFFERENTIABLE, found, strict=True))
    if wants_bias:
        grad = grads["bias"].sum_to_size(four_dims(bias).shape).view(bias.shape)
        if dbias is not None:
            grad = dbias if grads["bias"].shape[3] == bias.shape[-1] else dbias.copy_(grad)
        grads["bias"] = grad
    return tuple(grads[name] for name in wanted)


def _lse_of_rows(call: Call, lse: Tensor) -> Tensor:
    """Convert lse (batch, nheads, rows) to the forward's layout. Rows that belong to no sequence are arbitrary."""
    size, total, cu_seqlens = call.batch, call.q.shape[0], call.cu_seqlens_q
    if cu_seqlens is None:
        return lse[:, :, : call.max_seqlen_q] if lse.shape[2] > call.max_seqlen_q else lse
    if not size or tuple(lse.shape[:2]) != (size, call.nheads) or lse.shape[2] < call.max_seqlen_q:
        raise values.wrong_shape(
            "lse",
            lse,
            f"({call.nheads}, {total}) or ({size}, {call.nheads}, "
            f"{call.max_seqlen_q} or more), for one sequence or more",
        )
    row = torch.arange(total, device=lse.device, dtype=cu_seqlens.dtype)
    batch = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=lse.shape[0] - 1)
    position = (row - cu_seqlens[batch]).clamp(0, lse.shape[2] - 1)
    return lse[batch, :, position].T.contiguous()


def _rng_state(rng_state: Any, q: Any, dropout_p: float) -> Tensor | None:
    """Seed and offset as the kernels read them; None without dropout."""
    if rng_state is None or not isinstance(q, Tensor):
        return None
    words = (rng_state,) if isinstance(rng_state, Tensor) else rng_state
    if isinstance(words, tuple | list):
        words = tuple(map(values.python_number, words))
    if isinstance(rng_state, Tensor):
        values.check_dense("rng_state", rng_state)
    elif not isinstance(words, tuple | list) or len(words) != 2 or not all(map(_is_word, words)):
        raise TypeError(
            f"rng_state is {values.shown(rng_state)}; accepted: int64 or uint64 (2,), or (seed, offset), each an int "
            "or a tensor of one such number"
        )
    if not q.is_meta and any(isinstance(x, Tensor) and x.is_meta for x in words):
        raise ValueError("rng_state is on meta; accepted: a device on which it has numbers")
    if not dropout_p:
        return None
    if not isinstance(rng_state, Tensor):
        both = [torch.tensor(_signed(x), device=q.device) if isinstance(x, int) else x for x in words]
        rng_state = torch.stack([x.to(q.device).view(torch.int64).flatten()[0] for x in both])
    if rng_state.dtype == torch.uint64:
        rng_state = rng_state.view(torch.int64)
    return rng_state.to(q.device)


def _is_word(x: Any) -> bool:
    """True for an int of 64 bits, or a tensor with a single 64-bit integer."""
    if isinstance(x, Tensor):
        dense = not x.is_nested and x.layout is torch.strided
        return dense and x.dtype in (torch.int64, torch.uint64) and x.numel() == 1
    return values.is_int(x) and -(2**63) <= x < 2**64


def _signed(word: int) -> int:
    """Reinterpret an unsigned 64-bit integer as signed."""
    return (word + 2**63) % 2**64 - 2**63


def draw_rng_state(device: torch.device | str) -> Tensor:
    """A dropout mask's seed and offset, int64 (2,), from torch's generator of ``device``.

    A call without ``rng_state`` would draw the same state. A CUDA graph captures the draw: each replay has new values.

    Raises:
        ValueError: ``device`` is not a device.
    """
    return random_states.draw(values.check_device(device)).clone()


class _Options(NamedTuple):
    """A call's arguments other than tensors, as the caller wrote them."""

    varlen: bool
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: Causal
    window: Window
    softcap: float
    dropout_p: float = 0.0
    dropout_mask: str = "flash"
    epilogues: Sequence[str] | Mapping[str, Any] = ()
    return_lse: bool = False
    return_softmax: bool = False
    kernel: str | None = None
    tile: Any = None
    deterministic: bool = False
    backward_tile: Any = None
    precision: str | None = None
    same_bits: bool = False
    return_max_scores: bool = False

    @property
    def longest(self) -> tuple[int | None, int | None] | None:
        """Maximum queries and keys of a packed sequence; None for batches."""
        return (self.max_seqlen_q, self.max_seqlen_k) if self.varlen else None


def _attend(
    tensors: Tensors, given: tuple, out: Tensor | None = None, functions: Functions = (None, None, None)
) -> Result:
    """Repeat a recorded call if possible, else compute and record it. given: the fields of _Options.

    tensors: q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, bias, sinks, rng_state.
    functions: score_mod, mask_mod and block_mask.
    """
    q, bias = tensors[0], tensors[BIAS]
    if not isinstance(q, Tensor):
        raise TypeError(f"q is {values.kind_of(q)}; accepted: a torch.Tensor")
    if q.dtype == torch.float32 or given[_PRECISION] is not None:
        tensors, given = _in_precision(tensors, given)
        q, bias = tensors[0], tensors[BIAS]
    if bias is not None and not (
        type(bias) is Tensor
        and bias.dtype is q.dtype
        and bias.dim() == 4
        and bias.stride(3) == 1 < bias.shape[3]
    ):
        tensors = with_readable_bias(tensors, given[_MAX_SEQLEN_K])
    dropout_p = given[_DROPOUT_P]
    if type(dropout_p) is not float:
        dropout_p = values.number("dropout_p", dropout_p)
    if dropout_p and tensors[-1] is None:
        draw = functools.partial(random_states.draw, q.device)
        tensors = (*tensors[:-1], draw() if torch.compiler.is_compiling() else drawn(draw))
    if torch.compiler.is_compiling():
        return result_of(as_one_node(_computed, functions, tensors, given, out), given[_RETURN_LSE])
    key: Hashable = given
    all_tensors, read = tensors if out is None else (*tensors, out), plans.NOTHING
    score_mod, mask_mod, block_mask = functions
    named = type(given[_EPILOGUES]) is not tuple or given[_EPILOGUES]
    if named or score_mod is not None or mask_mod is not None or block_mask is not None:
        k, packed = tensors[1], None
        if block_mask is not None and given[0]:
            packed = packed_sequences(tensors, given[1:3])
        sizes: tuple = (*q.shape[:3], *k.shape[1:3]) if isinstance(k, Tensor) else ()
        starts, sizes, _ = packed or ((), sizes, ())
        found = plans.read_by(functions, sizes, starts, given[_EPILOGUES])
        if found is None:
            return result_of(as_one_node(_computed, functions, tensors, given, out), given[_RETURN_LSE])
        own_key, own, read = found
        key = ((*given[:_EPILOGUES], (), *given[_EPILOGUES + 1 :]), own_key)
        all_tensors = (*all_tensors, *own)
    known, outputs = plans.find(key, all_tensors, read), None
    if known is not None:
        record, found = known
        if record.constant or not torch.is_grad_enabled():
            outputs = record.run(found)
        else:
            outputs = operators.repeat(record, found)
    if outputs is None:
        call = functools.partial(as_one_node, _computed, functions, tensors, given, out)
        outputs = plans.recorded(key, all_tensors, call, read)
    if outputs[2] is not None:
        return result_of(outputs, given[_RETURN_LSE])
    return outputs[:2] if given[_RETURN_LSE] else outputs[0]


_MAX_SEQLEN_K, _DROPOUT_P, _EPILOGUES, _RETURN_LSE, _PRECISION = (
    _Options._fields.index(name)
    for name in ("max_seqlen_k", "dropout_p", "epilogues", "return_lse", "precision")
)


def _computed(functions: Functions, tensors: Tensors, given: tuple, out: Tensor | None) -> Outputs:
    """out, lse, and softmax, max_scores or None, of a call without a record. Arguments: see :func:`_attend`."""
    options = _Options._make(given)
    epilogues = all_epilogues(tensors, options.epilogues, functions, options.longest)
    call = _call_of(tensors, options._replace(epilogues=epilogues))
    return operators.forward(call) if out is None else operators.forward_into(call, out)


def _in_precision(tensors: Tensors, given: tuple) -> tuple[Tensors, tuple]:
    """Cast the tensors under autocast, and resolve the precision among the options ``given``."""
    (q, k, v, *rest, bias, sinks, state), single = tensors, torch.float32
    precision = resolve_precision(q, given[_PRECISION])
    if q.dtype == single and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        cast = (q, k, v, bias, sinks)  # slopes' dtype is fixed
        q, k, v, *own = (x.to(dtype) if isinstance(x, Tensor) and x.dtype == single else x for x in cast)
        tensors, precision = (q, k, v, *rest, *own, state), ""
    return tensors, (*given[:_PRECISION], precision, *given[_PRECISION + 1 :])


def result_of(outputs: Outputs, return_lse: bool) -> Result:
    out, lse, aux = outputs
    if aux is not None:
        return (out, lse, aux) if return_lse else (out, aux)
    return (out, lse) if return_lse else out


def _call_of(tensors: Tensors, options: _Options) -> Call:
    """Check the options, and return the operator's parameters with all defaults filled in."""
    q, k = tensors[:2]
    required = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if options.varlen else ("q", "k", "v")
    values.check_present(zip(Call._fields[:NUM_TENSORS], tensors, strict=True), required)
    kernel = values.kernel_name(options.kernel)
    flags = ("return_lse", "return_softmax", "return_max_scores", "deterministic", "same_bits")
    values.check_flags(**{name: getattr(options, name) for name in flags})
    if options.return_softmax and options.return_max_scores:
        raise ValueError("return_max_scores is True with return_softmax; accepted: one of them")
    aux = "softmax" if options.return_softmax else "max_scores" if options.return_max_scores else ""
    values.check_choice("dropout_mask", options.dropout_mask, DROPOUTS)
    tile, backward_tile = (values.tile_text(x, getattr(options, x)) for x in ("tile", "backward_tile"))
    if q.device.type == "cpu" and (kernel or tile or backward_tile):
        choose.check_words(kernel, forward=tile, backward=backward_tile)
    mask, window_left, window_right = resolve_mask(options.causal, options.window)
    names, epilogue_tensors, epilogue_numbers = pack_epilogues(options.epilogues)
    tensors = materialized(tensors)
    fields = (
        *tensors[:-1], tensors[-1] if options.dropout_p else None, materialized(epilogue_tensors),
        values.length("max_seqlen_q", options.max_seqlen_q) if options.varlen else _size(q),
        values.length("max_seqlen_k", options.max_seqlen_k) if options.varlen else _size(k),
        values.scale_of(options.softmax_scale, q), mask, window_left, window_right,
        values.number("softcap", options.softcap), options.dropout_mask if options.dropout_p else "",
        values.number("dropout_p", options.dropout_p), names, epilogue_numbers, aux, kernel, tile,
        bool(options.deterministic or options.same_bits), backward_tile, options.precision or "",
        bool(options.same_bits),
    )  # fmt: skip
    call = Call(*fields)
    if q.device.type == "cpu" and (tile or backward_tile):
        for op, text in (("forward", tile), ("backward", backward_tile)):
            choose.check_tile(call, op, text)
    return call


def _size(x: Tensor) -> int:
    """The seqlen of a batch; 0 if x lacks that dimension, which a later check rejects."""
    return x.shape[1] if x.dim() > 1 else 0


def resolve_precision(q: Tensor, precision: str | None = None) -> str:
    """The precision for the traits: ``precision``, or by default PyTorch's for fp32 tensors; empty for other dtypes."""
    single = isinstance(q, Tensor) and q.dtype == torch.float32
    if precision is None:
        # Compiled code reads PyTorch's setting when it runs.
        following = PYTORCHS if torch.compiler.is_compiling() else pytorchs_precision()
        return following if single else ""
    if not single or not values.is_one_of(precision, ("fp32", "tf32")):
        accepted = "'fp32', 'tf32', or None" if single else "None, for tensors that are not float32"
        raise ValueError(f"precision is {values.shown(precision)}; accepted: {accepted}")
    return "" if precision == "fp32" else precision


def resolve_mask(causal: Causal, window: Window) -> tuple[str, int, int]:
    """The traits' name of the mask, and the bounds left and right."""
    values.check_choice("causal", causal, (False, True, "bottom_right", "top_left"))
    if not (isinstance(window, tuple | list) and len(window) == 2):
        raise ValueError(
            f"window is {values.shown(window)}; accepted: (left, right), each None or a number of keys"
        )
    left, right = (_bound(window, side) for side in (0, 1))
    where = "_top_left" if causal == "top_left" else ""
    if causal:
        if right not in (0, UNBOUNDED):
            raise ValueError(f"window is {values.shown(window)}; accepted with causal: a right of None or 0")
        return ("causal" + where, left, 0) if left == UNBOUNDED else ("window" + where, left, 0)
    return ("", left, right) if left == right == UNBOUNDED else ("window", left, right)


def _bound(window: Window, side: int) -> int:
    bound = values.python_number(window[side])
    if bound is None:
        return UNBOUNDED
    if not (values.is_int(bound) or isinstance(bound, torch.SymInt)) or bound < -1:
        raise ValueError(
            f"window is {values.shown(window)}; accepted: numbers of keys from 0, or None or -1 for no bound"
        )
    return UNBOUNDED if bound == -1 else min(bound, UNBOUNDED)
