"""Every tile that is some call's default on this GPU, at every padded head dim that it serves, against the definition.

Calls are small, so tiles are named: the ones for long sequences, and in fp32 the ones for operands in terms.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from cute_attn.compiler import registry
from tests.cases import FEATURES, MASKS
from tests.gpu import test_backward, test_fp32_backward
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import compare
from tests.gpu.tile_cases import target
from tests.problem import Case

HEAD_DIMS = [(d, d) for d in range(32, 257, 32)]
HEAD_DIMS += (
    [(64, dv) for dv in (96, 160, 256)] + [(96, dv) for dv in (64, 128, 160)] + [(128, 96), (128, 192)]
)
HEAD_DIMS += [(160, 96), (192, 96), (192, 128), (192, 160), (256, 64), (256, 96)]
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": MASKS["causal"],
    "window": MASKS["window"],
    "packed": {"lengths_q": (130, 1, 70), "lengths_k": (200, 65, 3), "batch": 3, "causal": True},
    "softcap": FEATURES["softcap"],
    "alibi": FEATURES["alibi"],
    "bias": {"bias": "own"},
    "dropout": FEATURES["dropout"],
    "many-words": FEATURES["mem_efficient"],
    "bias-many-words": {"bias": "own"} | FEATURES["mem_efficient"],
    "everything": {"softcap": 12.0, "alibi": "heads", "bias": "own", "dropout_p": 0.2, "causal": True},
}


def cases(dtype: str) -> Iterator[Case]:
    for d, dv in HEAD_DIMS:
        for kind, own in KINDS.items():
            own = own | ({"bias": dtype} if "bias" in own else {})
            lengths = {} if "lengths_q" in own else {"seqlen_q": 130, "seqlen_k": 200}
            yield Case(f"{dtype}-d{d}x{dv}-{kind}", head_dim=d, head_dim_v=dv, dtype=dtype, **lengths, **own)


def defaults() -> list[Any]:
    """(op, case, arch, tile): the first case of each default tile and pair of head dims."""
    found: dict[tuple[Any, ...], Any] = {}
    kinds = [("forward", "bf16"), ("backward", "bf16"), ("forward", "fp32"), ("backward", "fp32")]
    for (op, dtype), arch in itertools.product(kinds, runnable_archs()):
        for case in cases(dtype):
            try:
                tile = registry.lookup(case.traits(arch, op), None, target()).tile.text
            except registry.Unsupported:  # another generation's kernel serves it
                continue
            key = op, dtype, arch, tile, case.head_dim, case.head_dim_v
            found.setdefault(key, pytest.param(op, case, arch, tile, id=f"{op}-{case.name}-{arch}"))
    return list(found.values())


@pytest.mark.parametrize(("op", "case", "arch", "tile"), defaults())
def test_default_tile(op, case, arch, tile):
    if op == "forward":
        compare(case.build("cuda"), kernel=arch, tile=tile)
    elif case.dtype == "fp32":
        test_fp32_backward.compare(case, tile=tile)
    else:
        test_backward.check_case(case, kernel=arch, backward_tile=tile)
