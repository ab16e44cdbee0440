"""Arguments of the epilogues of one launch, on the host. Imports no compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNBOUNDED = 1 << 30
"""A window bound that no sequence reaches, small enough to be added to an index in 32 bits."""


@dataclass(frozen=True)
class ScoreInputs:
    """Arguments of all epilogues; each epilogue selects the ones it needs in ``Epilogue.host_args``.

    Attributes:
        window_left, window_right: visible keys before and after the diagonal, ``UNBOUNDED`` for all.
        alibi_slopes: fp32 (batch, nheads); slopes (nheads,) are expanded over the batch with stride 0.
        bias: (batch, nheads, seqlen_q, seqlen_k), broadcast by stride 0, last stride 1.
        grad_bias: the bias gradient, zeros with the bias's extents: in its dtype if each element belongs to one score,
            otherwise fp32, added to atomically in any order.
        sinks: (nheads,), attention sinks: natural logits.
        bias_tangent, sinks_tangent: tangents, with the extents and dtypes of bias and sinks.
        tree_mask: int32 (queries of all sequences, words): bit j of a row is 1 if that query sees the j-th of its
            sequence's last seqlen_q keys.
        max_scores: fp32 like LSE, -inf: raised to each row's greatest score.
        softcap: the cap.
        dropout_p: dropout probability, in [0, 1).
        rng_state: int64 (2,) on the device: Philox seed and offset.
        extra: arguments of user epilogues, by name.
    """

    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    alibi_slopes: Any = None
    bias: Any = None
    grad_bias: Any = None
    sinks: Any = None
    bias_tangent: Any = None
    sinks_tangent: Any = None
    tree_mask: Any = None
    max_scores: Any = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng_state: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
