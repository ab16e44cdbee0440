"""The kernels' arithmetic on the CPU."""

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.device.math import exp2_polynomial


@cute.jit
def powers(x: cute.Tensor, out: cute.Tensor):
    for i in cutlass.range(x.shape[0]):
        out[i] = exp2_polynomial(x[i])


def test_exp2_polynomial():
    ends = torch.tensor([-float("inf"), -1e30, -126.0, 127.0, 200.0, float("inf"), float("nan")])
    x = torch.cat([ends, torch.linspace(-125, 127, 100_001), torch.linspace(-1, 1, 10_001)])
    out = torch.empty_like(x)
    powers(from_dlpack(x), from_dlpack(out))
    expected = torch.exp2(x[len(ends) :].double())
    assert ((out[len(ends) :] - expected).abs() / expected).max() < 3e-6
    # Too small is as good as zero, and too large (or nothing) so large that a row's sum shows it.
    assert (out[:3] < 1.2e-38).all()
    assert ((out[3:7] > 1e38) | out[3:7].isnan()).all()
