"""What a caller hands to the epilogues of one launch, on the host. Light to import: no compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNBOUNDED = 1 << 30
"""A window bound that no sequence reaches, small enough to be added to an index in 32 bits."""


@dataclass(frozen=True)
class ScoreInputs:
    """The epilogues' arguments as a caller knows them; an epilogue picks its own (``Epilogue.host_args``).

    Attributes:
        window_left, window_right: keys seen before and after a query's own, ``UNBOUNDED`` for all of them.
        alibi_slopes: fp32 (batch, nheads); a slope for each head is expanded over the batch with stride 0.
        bias: (batch, nheads, seqlen_q, seqlen_k), broadcast by stride 0, last stride 1.
        grad_bias: the bias's gradient, as the bias and all zeros: in its dtype if each element belongs to one score,
            else fp32, to which gradients are added in any order.
        softcap: the cap.
        dropout_p: probability of dropping, in [0, 1).
        rng_state: int64 (2,) on the device: seed and offset.
        extra: for each user's epilogue, by name, what it wants to be given.
    """

    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    alibi_slopes: Any = None
    bias: Any = None
    grad_bias: Any = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng_state: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
