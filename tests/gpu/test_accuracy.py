"""Accuracy on the card against PyTorch's kernels: the ratio of root mean square errors of outputs and gradients.

Errors are against float64. Of few elements errors of equal kernels differ by chance, so that short sequences come in
large batches, and what chance may still do is added to the limit (:func:`chance`). Ratios are printed; ``-rP`` shows
those of tests that pass.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import attention, reference
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host.backward import kernels_of
from tests.gpu.archs import runnable_archs
from tests.problem import DTYPES, Case

ARCHS = runnable_archs("backward")
LIMIT = 1.25
"""Maximum ratio of the package's error to the peer's."""
FP32_LIMIT = 3.0
"""The same for fp32's gradients, if inputs are not normal. LSE is rounded once more, to base 2; scores are not. A
kernel that rounds both in the same way has P = 1 where one score makes up the LSE (errors of 1e-8 to 1e-5 both)."""
MIN_ROWS = 16384
"""Rows of queries, and of keys, of a comparison."""
NHEADS = 4
OUTPUTS = ("out", "dq", "dk", "dv", "dbias")


# ---- what is compared ----


@dataclass(frozen=True)
class Setting:
    """One comparison: the case, and how q, k and v are distributed.

    Attributes:
        inputs: one of INPUTS or UNKIND.
        visible: to how many keys of each row the bias, if any, leaves a way.
        peer: a name in PEERS.
    """

    case: Case
    inputs: str = "normal"
    visible: int = 0
    peer: str = "flash"

    def __str__(self) -> str:
        case = self.case
        words = [f"{case.dtype} d{case.head_dim} s{case.seqlen_q} {self.inputs}"]
        words += ["causal"] if case.causal else []
        words += ["dropout"] if case.dropout_p else []
        words += [f"bias with {self.visible} keys per row"] if case.bias else []
        words += ["against mem-efficient"] if self.peer == "mem-efficient" else []
        return " ".join(words)


def case_of(dtype: str, head_dim: int, seqlen: int, **options: Any) -> Case:
    """The case of a setting, with enough batches for ``MIN_ROWS`` rows, at least two."""
    batch = max(2, MIN_ROWS // (NHEADS * seqlen))
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "nheads": NHEADS, "nheads_kv": NHEADS}
    return Case("", dtype=dtype, head_dim=head_dim, **sizes, **options)


def draw(kind: str, shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> Tensor:
    """Random numbers: of mean 0 and deviation 1, in [0, 1), around 3, or with one in fifty ten times as large."""
    options: dict[str, Any] = {"device": generator.device, "generator": generator}
    if kind == "uniform":
        x = torch.rand(shape, **options)
    else:
        x = torch.randn(shape, **options)
        if kind == "large-mean":
            x += 3.0
        if kind == "heavy-tailed":
            x *= torch.where(torch.rand(shape, **options) < 0.02, 10.0, 1.0)
    return x.to(DTYPES[dtype])


INPUTS = ("normal", "uniform", "large-mean", "heavy-tailed")
UNKIND = ("large-scores", "equal-keys")
"""Scores of deviation 10,000, so that nearly all rows see one key; and one key, many times."""


def tensors_of(setting: Setting, generator: torch.Generator) -> list[Tensor]:
    """q, k, v and perhaps the bias."""
    case = setting.case
    shape = (case.batch, case.seqlen_q, NHEADS, case.head_dim)
    q, k, v = (draw(setting.inputs, shape, case.dtype, generator) for _ in range(3))
    if setting.inputs == "large-scores":
        q, k = 100 * q, 100 * k
    if setting.inputs == "equal-keys":
        k = k[:, :1].expand_as(k).contiguous()
    return [q, k, v, hiding_bias(setting, generator)] if case.bias else [q, k, v]


@dataclass(frozen=True)
class Comparison:
    """A setting's tensors, their results by definition, and a peer's error of each result, row by row.

    Attributes:
        tensors: q, k, v and perhaps the bias.
        grad: the gradient of the output.
        rng_state: what the peer drew its dropout mask from, or None.
        exact: by name, in float64.
        peer: squared errors, see :func:`squared_errors`.
    """

    tensors: list[Tensor]
    grad: Tensor
    rng_state: Tensor | None
    exact: dict[str, Tensor]
    peer: dict[str, Tensor]


# One after the other each arch asks for all settings of a dtype and a head dim.
@functools.lru_cache(maxsize=64)
def compared(setting: Setting, device: str = "cuda") -> Comparison:
    """Compare with the setting's peer."""
    case = setting.case
    generator = torch.Generator(device).manual_seed(0)
    tensors = tensors_of(setting, generator)
    grad = draw("normal", tuple(tensors[0].shape), case.dtype, generator)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, rng_state = PEERS[setting.peer](leaves, case)
    peer = with_gradients(out, leaves, grad)
    leaves = [x.double().requires_grad_() for x in tensors]
    exact = with_gradients(by_definition(leaves, case, rng_state), leaves, grad.double())
    errors = {name: squared_errors(peer[name], exact[name]) for name in exact}
    return Comparison(tensors, grad, rng_state, exact, errors)


def hiding_bias(setting: Setting, generator: torch.Generator) -> Tensor:
    """A bias that is -inf except for ``visible`` keys of each row, where it is random."""
    case = setting.case
    shape = (case.batch, NHEADS, case.seqlen_q, case.seqlen_k)
    order = torch.rand(shape, device=generator.device, generator=generator).argsort(-1)
    return draw("normal", shape, case.bias, generator).masked_fill(order >= setting.visible, -math.inf)


def with_gradients(out: Tensor, leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """out, dq, dk, dv and perhaps dbias, by name; of leaves that require a gradient."""
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(out, wanted, grad)
    return dict(zip(OUTPUTS, (out.detach(), *grads), strict=False))


def flash(leaves: list[Tensor], case: Case) -> tuple[Tensor, Tensor | None]:
    """FlashAttention-2's output, and the state of its dropout."""
    torch.manual_seed(1)
    out, _, state, *_ = torch.ops.aten._flash_attention_forward(
        *leaves, None, None, case.seqlen_q, case.seqlen_k, case.dropout_p, bool(case.causal), False
    )
    return out, state.view(torch.int64).cuda() if case.dropout_p else None


def mem_efficient(leaves: list[Tensor], case: Case) -> tuple[Tensor, None]:
    """The memory-efficient attention's output, without dropout."""
    bias = leaves[3] if case.bias else None
    out, *_ = torch.ops.aten._efficient_attention_forward(
        *leaves[:3], bias, None, None, None, None, 0.0, 0, True
    )
    return out, None


PEERS = {"flash": flash, "mem-efficient": mem_efficient}


def by_definition(leaves: list[Tensor], case: Case, rng_state: Tensor | None) -> Tensor:
    """The output in the leaves' own precision."""
    features = reference.Features("causal" if case.causal else "", "flash" if case.dropout_p else "")
    inputs = ScoreInputs(bias=leaves[3] if case.bias else None, dropout_p=case.dropout_p, rng_state=rng_state)
    scale = case.head_dim**-0.5
    return reference.attention(*leaves[:3], scale, features, inputs, compute_dtype=leaves[0].dtype)[0]


def ours(x: Comparison, case: Case, arch: str, bias_grad: bool) -> dict[str, Tensor]:
    """This package's results by name."""
    leaves = [tensor.clone().requires_grad_(i < 3 or bias_grad) for i, tensor in enumerate(x.tensors)]
    options: dict[str, Any] = {"causal": case.causal, "dropout_p": case.dropout_p, "rng_state": x.rng_state}
    out = attention(*leaves[:3], bias=leaves[3] if case.bias else None, kernel=arch, **options)
    return with_gradients(out, leaves, x.grad)


# ---- ratios ----


def squared_errors(actual: Tensor, exact: Tensor) -> Tensor:
    """Squared error of each row, (rows,): a row's elements share roundings of their addends; two rows share none."""
    return (actual.double() - exact).square().sum(-1).flatten()


def chance(*errors: Tensor) -> float:
    """How far, by chance, a ratio of root mean squares of independent rows' errors may be from the ratio of the means.

    The sum of squares s_i of rows has a variance of at most sum s_i^2, relative to its square that is v. Half of it is
    the logarithm's of the root; three standard deviations of the difference of two of them.
    """
    relative = sum(float(x.square().sum() / x.sum().square()) for x in errors if x.any())
    return math.exp(3 * 0.5 * math.sqrt(relative))


@dataclass(frozen=True)
class Ratio:
    """Root mean square errors of an output, the package's and the peer's, and the effect of chance on their ratio."""

    arch: str
    setting: Setting
    output: str
    ours: float
    theirs: float
    chance: float
    floor: float = 0.0
    limit: float = LIMIT

    @property
    def fails(self) -> bool:
        """Written so that a NaN fails."""
        return not self.ours <= self.limit * self.chance * self.theirs + self.floor

    def __str__(self) -> str:
        ratio = self.ours / self.theirs if self.theirs else math.inf if self.ours else 1.0
        return (
            f"{self.arch} {self.setting}: {self.output} has error {self.ours:.3e}, {ratio:.2f} of their "
            f"{self.theirs:.3e}, where chance may make {self.chance:.2f}"
        )


def ratios(setting: Setting, arch: str, bias_grad: bool = False, floor: float = 0.0) -> Iterator[Ratio]:
    """Ratios of all outputs."""
    x = compared(setting)
    for name, result in ours(x, setting.case, arch, bias_grad).items():
        own, theirs = squared_errors(result, x.exact[name]), x.peer[name]
        rms = [float(errors.sum() / result.numel()) ** 0.5 for errors in (own, theirs)]
        yield Ratio(arch, setting, name, *rms, chance(own, theirs), floor)


def check_all(found: list[Ratio]) -> None:
    print(*found, sep="\n")
    failed = [str(ratio) for ratio in found if ratio.fails]
    assert not failed, f"{len(failed)} of {len(found)} ratios are too large:\n" + "\n".join(failed[:20])


# ---- against FlashAttention-2 ----

SEQLENS = (4, 100, 1024)
PLAIN = [(causal, dropout_p) for causal in (False, True) for dropout_p in (0.0, 0.48)]


def plain_cases(dtype: str, head_dim: int) -> list[Case]:
    return [
        case_of(dtype, head_dim, seqlen, causal=causal, dropout_p=p)
        for seqlen in SEQLENS
        for causal, p in PLAIN
    ]


# The arch varies fastest, so that both compare with a reference that is computed once.
@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    [(dtype, d, arch) for dtype in ("fp16", "bf16") for d in (16, 32, 64, 128, 256) for arch in ARCHS],
)
def test_errors_are_those_of_flash_attention_2(dtype, head_dim, arch):
    settings = [Setting(case, inputs) for case in plain_cases(dtype, head_dim) for inputs in INPUTS]
    check_all([ratio for setting in settings for ratio in ratios(setting, arch)])


# ---- against the memory-efficient attention, where rows see few keys ----

FLOOR = 1e-6
"""Rounding of dP - D in float32, over the root of the head dim, if both are equal, as in a row with one key."""
BIASED = ((32, 200), (64, 200), (64, 1024), (128, 200), (128, 1024), (256, 200))
"""Head dims and seqlens. The latter are multiples of 8, since TMA loads the bias."""


def biased_case(dtype: str, head_dim: int, seqlen: int) -> Case:
    return case_of(dtype, head_dim, seqlen, bias=dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "seqlen", "bias_grad", "arch"),
    [
        (dtype, *shape, bias_grad, arch)
        for dtype in ("fp16", "bf16")
        for shape in BIASED
        for bias_grad in (False, True)
        for arch in ARCHS
    ],
)
def test_rows_of_few_keys_are_those_of_mem_efficient(dtype, head_dim, seqlen, bias_grad, arch):
    """A row with one key has no gradient except rounding, which P's rounding must not enlarge."""
    case = biased_case(dtype, head_dim, seqlen)
    settings = [
        Setting(case, inputs, n, "mem-efficient") for n in (1, 2, 5) for inputs in ("normal", "large-mean")
    ]
    check_all([ratio for setting in settings for ratio in ratios(setting, arch, bias_grad, FLOOR)])


# ---- unkind inputs, and fp32 ----

UNKIND_SEQLEN = 512


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("inputs", UNKIND)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    [(dtype, d, arch) for dtype in ("fp16", "bf16") for d in (64, 128, 256) for arch in ARCHS],
)
def test_unkind_inputs(dtype, head_dim, arch, inputs, peer):
    """Errors are no larger than both peers' where all scores of a row are large, or equal.

    A key of probability 1 has no gradient; the memory-efficient kernel's is 0 there, if P of its score is exactly 1.
    Keys that are all equal leave no gradient of q but the rounding of O, from which D is computed, and of dS.

    dV of large scores is compared with the memory-efficient kernel's alone. FlashAttention-2's backward rounds scaled
    scores by themselves, as its LSE was, so that P of a single key is 1 where the scale is a power of two: another
    instruction for each score. Without it P errs by the last digit of LSE, and dV 4.3 times as much.
    """
    setting = Setting(case_of(dtype, head_dim, UNKIND_SEQLEN), inputs, peer=peer)
    found = list(ratios(setting, arch, floor=FLOOR))
    if (inputs, peer) == ("large-scores", "flash"):
        found = [ratio for ratio in found if ratio.output != "dv"]
    check_all(found)


@pytest.mark.parametrize("fp32_dim", [64, 96, 128])
def test_fp32(fp32_dim):
    """Three products of tf32 or fp16 terms: outputs, and gradients of normal inputs, like PyTorch's three products."""
    cases = [case_of("fp32", fp32_dim, n) for n in (128, 1024)]
    settings = [Setting(case, inputs, peer="mem-efficient") for case in cases for inputs in INPUTS]
    found = [ratio for setting in settings for ratio in ratios(setting, "sm80")]
    unkind = [x for x in found if x.output != "out" and x.setting.inputs != "normal"]
    check_all([replace(x, limit=FP32_LIMIT) if x in unkind else x for x in found])


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple]:
    """(traits, tile, target) of all that a test launches, for ``conftest.py`` to build beforehand."""
    dtype, head_dim, arch = (params.get(name) for name in ("dtype", "head_dim", "arch"))
    bias_grad = params.get("bias_grad", False)
    if "fp32_dim" in params:
        arch, cases = "sm80", [case_of("fp32", params["fp32_dim"], n) for n in (128, 1024)]
    elif "inputs" in params:
        cases = [case_of(dtype, head_dim, UNKIND_SEQLEN)]
    elif "seqlen" in params:
        cases = [biased_case(dtype, head_dim, params["seqlen"])]
    else:
        cases = plain_cases(dtype, head_dim)
    for case in cases:
        forward = registry.lookup(case.traits(arch), None, target)
        yield forward.traits, forward.for_lengths(*case.longest, case.group, target, case.pairs).tile, target
        backward = registry.lookup(replace(case.traits(arch, "backward"), bias_grad=bias_grad), None, target)
        backward = backward.for_lengths(*case.longest, case.group, target, case.pairs)
        yield from ((traits, tile, target) for traits, tile in kernels_of(backward))
