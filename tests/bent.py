"""A user's epilogue that is symmetric in nothing and whose derivative needs its input."""

import cutlass
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.names import register_epilogue

# The loops over one thread's registers are unrolled on purpose: fragments take static indices.


@register_epilogue("bent")
class Bent(Epilogue):
    """score + table[head, key % 8] * score / (1 + score^2) / (1 + query / 64) - batch."""

    def fake_args(self):
        return (make_fake_tensor(Float32, (cute.sym_int(), 8), stride=(cute.sym_int64(), 1)),)

    def host_args(self, inputs):
        return inputs.extra["bent"]

    def begin(self, args, context):
        scales = (context.score_scale, context.inv_score_scale)
        return (args[0][context.head, None], Float32(context.batch), *scales)

    @cute.jit
    def forward(self, state, tile, loaded=()):
        table, batch, unit, inv_score_scale = state
        saved = cute.make_rmem_tensor(cute.make_layout((len(tile.rows), len(tile.cols))), Float32)
        for r in cutlass.range_constexpr(len(tile.rows)):
            of_row = 1.0 / (1.0 + Float32(tile.row0 + tile.rows[r]) * (1 / 64))
            for c in cutlass.range_constexpr(len(tile.cols)):
                own = table[(tile.col0 + tile.cols[c]) % 8] * of_row
                score = tile.acc[r, c] * unit
                inverse = 1.0 / (1.0 + score * score)
                saved[r, c] = 1.0 + own * (1.0 - score * score) * inverse * inverse
                tile.acc[r, c] = (score + own * score * inverse - batch) * inv_score_scale
        return saved

    @cute.jit
    def backward(self, state, tile, saved):
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] * saved[r, c]

    @staticmethod
    def reference(scores, coords, inputs):
        (table,) = inputs.extra["bent"]
        own = table[coords.head, coords.key % 8] / (1 + coords.query / 64)
        return scores + own * scores / (1 + scores**2) - coords.batch
