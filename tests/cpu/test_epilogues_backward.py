"""The epilogues' derivatives, run on the CPU for every thread of real MMA tilings, against torch's autograd in float64.

Tiles are upright and transposed. The masks of dropout are those of the forward bit for bit, whichever way a tile lies.
"""

from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn import reference
from cute_attn.emulate import MASKED, UNMASKED
from cute_attn.epilogues.base import Epilogue, register_epilogue
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits
from tests.tilings import SMALL, TILINGS, TRANSPOSED, Scores

ALL = {**TILINGS, **TRANSPOSED}
SMALL_TRANSPOSED = "warps4x1-64x64-transposed"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# The loops over one thread's registers are unrolled on purpose: fragments take static indices.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")


@pytest.fixture(autouse=True)
def one_thread():
    """Problems are so small that torch's threads would spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@register_epilogue("squared")
class Squared(Epilogue):
    """score + gain[head] * score^2 / (1 + query): its derivative needs the score that it was given."""

    def fake_args(self):
        return (make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,)),)

    def host_args(self, inputs):
        return inputs.extra["squared"]

    def begin(self, args, context):
        return (args[0][context.head], context.unit)

    @cute.jit
    def forward(self, state, tile, loaded=()):
        gain, unit = state
        saved = cute.make_rmem_tensor(cute.make_layout((len(tile.rows), len(tile.cols))), Float32)
        for r in cutlass.range_constexpr(len(tile.rows)):
            factor = gain / (1.0 + Float32(tile.row0 + tile.rows[r]))
            for c in cutlass.range_constexpr(len(tile.cols)):
                score = tile.acc[r, c]
                saved[r, c] = 1.0 + 2.0 * factor * unit * score
                tile.acc[r, c] = score + factor * unit * score * score
        return saved

    @cute.jit
    def backward(self, state, tile, saved):
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] * saved[r, c]

    @staticmethod
    def reference(scores, coords, inputs):
        (gain,) = inputs.extra["squared"]
        return scores + gain[coords.head] / (1 + coords.query) * scores**2


@register_epilogue("one_way")
class OneWay(Epilogue):
    """Without a derivative."""

    def forward(self, state, tile, loaded=()):
        pass


def compare(name, features, problem, grad_bias=None):
    """The emulated backward of a problem, after comparing what it yields with autograd's.

    grad_bias: zeros for the bias's gradient as the host gives them.
    """
    bias_grad = "" if grad_bias is None else "-bias_grad"
    tiling = ALL[name].of(features + bias_grad, op="backward")
    grad_out = torch.randn(
        *problem.q.shape[:3], problem.v.shape[3], generator=torch.Generator().manual_seed(7)
    )
    expected = problem.expected_gradients(tiling.traits, grad_out)
    given = replace(problem, inputs=replace(problem.inputs, grad_bias=grad_bias))
    got = given.differentiate(tiling, grad_out, expected.lse, expected.dpsum)
    rescale = 1 / (1 - problem.inputs.dropout_p)
    torch.testing.assert_close(got.p.double(), expected.p, atol=6e-8, rtol=2**-10)
    largest = float(expected.scores.abs().max())
    rtol = 2**-10 if tiling.traits.softcap else 1e-5
    torch.testing.assert_close(
        got.scores.double() * rescale, expected.scores, atol=largest * 1e-5 + 1e-9, rtol=rtol
    )
    return got, expected


ROUND = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}


# ---- everything together ----


@pytest.mark.parametrize(
    ("name", "features"),
    [
        (SMALL, "window-softcap-alibi-bias_fp16-squared-dropout"),
        ("wgmma2-128x176", "causal-softcap-bias_fp32-dropout_mem_efficient"),
        (SMALL_TRANSPOSED, "window-softcap-alibi-bias_fp16-squared-dropout"),
        ("wgmma2-64x128-transposed", "causal-softcap-bias_bf16-dropout"),
        ("wgmma1-80x64-transposed", "window-softcap-bias_fp32-squared-dropout_mem_efficient"),
    ],
)
def test_the_whole_chain(name, features):
    dtype = next(DTYPES[word[5:]] for word in features.split("-") if word.startswith("bias_"))
    for seqlen_q, seqlen_k in [(130, 259), (70, 40)]:
        bias = torch.randn(2, 2, seqlen_q, seqlen_k).to(dtype)
        problem = Scores.random(
            *(2, 2, seqlen_q, seqlen_k),
            softcap=2.5,
            alibi_slopes=torch.rand(2, 2) if "alibi" in features else None,
            bias=bias,
            window_left=100,
            window_right=3,
            dropout_p=0.3,
            rng_state=torch.tensor([2**40 + 7, 2**33 - 4]),
            extra={"squared": (torch.rand(2),)},
        )
        grad_bias = torch.zeros_like(bias)
        got, expected = compare(name, features, problem, grad_bias)
        check_bias(grad_bias, expected)


def check_bias(grad_bias, expected):
    largest = float(expected.bias.abs().max())
    rtol = 1e-5 + ROUND[grad_bias.dtype]
    torch.testing.assert_close(grad_bias.double(), expected.bias, atol=largest * 1e-5 + 6e-8, rtol=rtol)
