"""Attention sinks: one learnable logit per head, added to the softmax denominator like a key without a value.

Agarwal et al. 2025, gpt-oss (https://arxiv.org/abs/2508.10925), after Xiao et al. 2023
(https://arxiv.org/abs/2309.17453).
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cute_attn.device.fakes import strided
from cute_attn.device.math import CUTE_DTYPES
from cute_attn.device.score_tile import ScoreMap
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class Sinks:
    """Adds exp(sink) to each row's final sum of exponentials; see ``OnlineSoftmax.finish_with_sink``. Sinks: (nheads,).

    The backward needs no epilogue: its P follows from the LSE, which includes the sink.

    tangent: the launch also has tangents of the sinks.
    """

    dtype: str
    tangent: bool = False

    def fake_args(self) -> tuple:
        """A fake tensor of (nheads,) sinks, and one of their tangents."""
        return tuple(strided(CUTE_DTYPES[self.dtype], 1) for _ in range(1 + self.tangent))

    def host_args(self, inputs: ScoreInputs) -> tuple:
        """The sinks of one launch, and their tangents."""
        return (inputs.sinks, inputs.sinks_tangent)[: 1 + self.tangent]

    def of_rows(
        self, sinks: cute.Tensor, head: Int32, heads_left: Int32 | None, score_map: ScoreMap
    ) -> tuple[Float32, ...]:
        """The sink of each of a thread's rows, read after the main loop to keep registers free there.

        Args:
            sinks: (nheads,), the sinks or their tangents.
            head: the work tile's first head.
            heads_left: in tiles of several heads, the number of heads from ``head`` on; a tile may have rows for more.
        """
        rows = len(score_map.modes.rows)
        if score_map.heads == 1:
            return (Float32(sinks[head]),) * rows
        assert heads_left is not None
        own = (head + cutlass.min(score_map.head(r), heads_left - 1) for r in range(rows))
        return tuple(Float32(sinks[one]) for one in own)
