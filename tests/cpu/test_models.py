"""The rows of ``bench.models``: distinct, of sizes that fit, and served by kernels of both directions."""

import pytest

from bench import models
from cute_attn import lookup

ROWS = models.rows("both")


def test_what_is_served_has_no_backward():
    served = {model for model, _ in models.served()}
    assert served and not served & {model for model, w in ROWS if w.op == "backward"}
    assert len(models.rows("backward")) == len([*models.trained()])


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_kernels_compute_every_row(arch):
    """Of the generation, or for large head dims and their backwards of the older one."""
    for model, workload in ROWS:
        older = arch == "sm90" and workload.op == "backward" and workload.head_dim > 256
        for op in {"forward", workload.op}:
            traits = workload.traits("sm80" if older else arch, op)
            assert lookup(traits).traits == traits, model


def test_a_bias_has_a_gradient_in_a_backward_alone():
    assert {w.op for _, w in ROWS if w.bias_grad} == {"backward"}
