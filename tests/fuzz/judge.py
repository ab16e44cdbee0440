"""Whether a case's door is right: a call made twice or more, a value changed before the last, against the oracle."""

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cute_attn
from tests import checks
from tests.fuzz import oracle
from tests.fuzz.case import DTYPES, Case, Functions, Inputs, tensors_of
from tests.fuzz.doors import DOORS, NotDrawn, Results

CLEAN = (TypeError, ValueError, NotImplementedError, IndexError)
LARGEST = {"fp64": 1e5, "fp32": 200.0, "fp16": 30.0, "bf16": 30.0}
"""Cases with larger scores are left out: their rounding alone exceeds the tolerance."""
FLOOR = {"fp64": 1e-9, "fp32": 1e-5, "fp16": 1e-4, "bf16": 1e-4}

ROUNDINGS = 4
"""How many roundings of a function's coarsest dtype are no error: under vmap torch rounds in other places."""


class Fault(Exception):
    """A result that is neither right nor a refusal."""


@dataclass(frozen=True)
class Outcome:
    """kind: "right", "refused", or "invalid" where torch or the oracle have no value. detail: why."""

    kind: str
    detail: str = ""


def judge(case: Case, device: str = "cpu") -> Outcome:
    """The outcome of a case.

    Raises:
        Fault: the call is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs, functions = Inputs.of(case, device), Functions.of(case, device)
        outcome = first = None
        calls = 4 if device == "cuda" else 2  # the third follows the record of the second
        for number in range(calls):
            if number == calls - 1 and case.change:
                functions.change()
            try:
                right = _expected(case, inputs, functions)
            except Exception as error:  # torch refuses it
                right = Outcome("invalid", f"torch: {type(error).__name__}: {error}")
            if isinstance(right, Outcome):
                return right
            got = _called(case, inputs, functions)
            if isinstance(got, Outcome):
                outcome = outcome or got
                continue
            _compare(case, got, *right, _floor(case, functions))
            if first is not None and not case.change and device == "cpu" and not _equal(first, got):
                raise Fault("a second call gives other bits")
            first, outcome = got, outcome or Outcome("right")
    assert outcome is not None
    return outcome


TORCHS = (
    "derivative for aten",  # for a function's operations on captured tensors
    "Negation, the `-` operator, on a bool tensor",  # if the oracle has no score to call the function with
    "Explicit attn_mask should not be set when is_causal=True",  # raised by scaled_dot_product_attention
    "(*bias): last dimension must be contiguous",  # its kernel's on CUDA, also without us
    "mha_graph.execute",  # cuDNN's, which fails where a bias has one key for all
)
"""Messages with which torch itself refuses a case."""


def _called(case: Case, inputs: Inputs, functions: Functions) -> Results | Outcome:
    """The door's results and gradients."""
    leaves = inputs.leaves(case, functions)
    given = [x for x in (inputs.q, inputs.k, inputs.v, *functions.values.values()) if isinstance(x, Tensor)]
    versions = [x._version for x in given]
    try:
        with DOORS[case.door].around():
            found = DOORS[case.door].call(case, inputs, functions)
            gradients = _gradients(case, found, leaves)
    except NotDrawn as error:
        return Outcome("invalid", str(error))
    except CLEAN as error:
        sentence = str(error)
        if "accepted" not in sentence or ("\n" in sentence and not isinstance(error, cute_attn.Unsupported)):
            raise Fault(f"{type(error).__name__}, no sentence of what is accepted: {sentence!r}") from error
        return Outcome("refused", f"{type(error).__name__}: {sentence}")
    except Exception as error:
        if any(x in str(error) for x in TORCHS):
            return Outcome("invalid", str(error))
        raise Fault(f"{type(error).__name__}: {error}") from error
    if versions != [x._version for x in given]:
        raise Fault("an argument is changed")
    return found | gradients


def _expected(case: Case, inputs: Inputs, functions: Functions) -> tuple[Results, Results] | Outcome:
    """Exact results and plain torch's, or why there are none."""
    wide = functions.wide()
    with oracle.default_dtype(torch.float64):
        exact = _defined(case, _copied(case, inputs, torch.float64), wide, torch.float64)
    plain = _defined(case, _copied(case, inputs), functions, DTYPES[case.dtype])
    finite = exact["lse"][exact["lse"].isfinite()].abs()
    if finite.numel() and finite.max().item() > LARGEST[case.dtype]:
        return Outcome("invalid", "large scores")
    for name, x in exact.items():
        if x.isnan().any() or not plain[name].isfinite().equal(x.isfinite()):
            return Outcome("invalid", "torch's own result is not finite")
    return exact, plain


def _copied(case: Case, inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Independent leaves with floats of ``dtype``."""
    made = {}
    for name in ("q", "k", "v", "bias", "sinks", "alibi"):
        x = getattr(inputs, name)
        if x is not None:
            x = x.detach().to(dtype) if dtype is not None and x.is_floating_point() else x.detach()
            made[name] = x.requires_grad_(name in case.grads)
    return replace(inputs, **made)


def _defined(case: Case, inputs: Inputs, functions: Functions, dtype: torch.dtype) -> Results:
    """The oracle's results for all sequences, with gradients."""
    outs, lses, maxima, sums, starts = [], [], [], [], [0, 0]
    for b, (rows, keys) in enumerate(case.sequences):
        q, k, v = inputs.q, inputs.k, inputs.v
        if case.lengths:
            q = q[starts[0] : starts[0] + rows]
            k, v = (x[starts[1] : starts[1] + keys] for x in (k, v))
            starts = [starts[0] + rows, starts[1] + keys]
        else:
            q, k, v = q[b], k[b], v[b]
        if case.used:
            k, v = k[: case.used[b]], v[: case.used[b]]
        shift = 0 if case.causal == "top_left" else k.shape[0] - rows
        left, right = case.window
        options = oracle.Options(
            scale=case.head_dim**-0.5 if case.scale is None else case.scale,
            softcap=case.softcap,
            alibi=inputs.alibi,
            bias=inputs.bias,
            score_mod=functions.score_mod,
            mask_mod=functions.mask_mod,
            window=(left, 0 if case.causal else right),
            sinks=inputs.sinks,
        )
        out, lse = oracle.attend(q, k, v, options, dtype, b, shift)
        outs.append(out)
        lses.append(lse)
        with torch.no_grad():
            scores = oracle.scores(q, k, options, dtype, b, shift)
        maxima.append(scores.amax(-1) if len(k) else torch.full_like(lse, -torch.inf).detach())
        if case.door == "attention_sums":
            p = (scores - lse[..., None]).exp().nan_to_num(0.0)
            sums.append(torch.nn.functional.pad(p.sum(1), (0, keys - len(k))))
    if case.lengths:
        found = {"out": torch.cat(outs), "lse": torch.cat(lses, -1), "max_scores": torch.cat(maxima, -1)}
    else:
        rows, heads = case.seqlen_q, case.nheads
        empty = inputs.q.new_zeros
        found = {
            "out": torch.stack(outs) if outs else empty(0, rows, heads, case.head_dim_v, dtype=dtype),
            "lse": torch.stack(lses) if lses else empty(0, heads, rows, dtype=dtype),
            "max_scores": torch.stack(maxima) if lses else empty(0, heads, rows, dtype=dtype),
        }
    if sums:
        found["sums"] = torch.cat(sums, -1) if case.lengths else torch.stack(sums)
    return found | _gradients(case, found, inputs.leaves(case, functions))


def _gradients(case: Case, found: Results, leaves: dict[str, Tensor]) -> Results:
    """Gradients of the leaves, for random gradients of out and, if the case's seed is odd, of lse."""
    if not leaves:
        return {}
    generator = torch.Generator().manual_seed(case.seed)
    outputs = [found["out"]] + (
        [found["lse"]] if "lse" in found and case.seed % 2 and case.door != "sdpa" else []
    )
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x) for x in outputs]
    pairs = [pair for pair in zip(outputs, weights, strict=True) if pair[0].requires_grad]
    if not pairs:
        return {f"d{name}": torch.zeros_like(x) for name, x in leaves.items()}
    outputs, weights = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(
        outputs, tuple(leaves.values()), weights, materialize_grads=True, allow_unused=True
    )
    return {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def _floor(case: Case, functions: Functions) -> float:
    """Tolerance relative to the largest value."""
    dtypes = [x.dtype for x in tensors_of(list(functions.values.values())) if x.is_floating_point()]
    if re.search(r"float\(\)|float32", case.score + case.mask):
        dtypes.append(torch.float32)
    coarsest = max((torch.finfo(x).eps for x in dtypes if x != torch.float64), default=0.0)
    return max(FLOOR[case.dtype], ROUNDINGS * coarsest)


def _compare(case: Case, got: Results, exact: Results, plain: Results, floor: float) -> None:
    for name, found in got.items():
        is_gradient = name.startswith("d")
        finite = exact[name].detach()[exact[name].isfinite()].abs()
        own = 0.0
        if is_gradient:  # sums that cancel, and a backward reads a rounded out
            own = max(torch.finfo(x).eps for x in (found.dtype, DTYPES[case.dtype]))
            if found.dtype != DTYPES[case.dtype]:  # added up in the captured tensor's dtype
                own *= 256
            elif name == "dbias" and found.is_cuda and case.bias_broadcast:  # a kernel rounds the addends
                own *= 16
        size = max(1.0, float(finite.max()) if finite.numel() else 0.0)
        try:
            three = (x.detach() for x in (found, exact[name], plain[name]))
            factor = checks.GRADIENT if is_gradient else checks.FORWARD
            roundings = 32 if name in ("lse", "max_scores", "sums") else 8 if is_gradient else 2
            checks.check(name, *three, factor=factor, roundings=roundings, floor=max(floor, own) * size)
        except AssertionError as error:
            raise Fault(str(error)) from None


def _equal(first: Results, second: Results) -> bool:
    return all(torch.equal(x.detach(), second[name].detach()) for name, x in first.items())


def shrunk(data: bytes, draw: Any, fails: Any, tries: int = 400) -> bytes:
    """The simplest decisions found for which ``fails(draw(data))``: fewest, and then smallest."""
    found = list(zip(data[::2], data[1::2], strict=True))
    while found and found[-1] == (0, 0):
        found.pop()
    step = max(1, len(found) // 2)
    while tries > 0:
        improved = False
        for i in range(0, len(found), step):
            for other in ([], [(0, 0)] * step, [(0, 1)] * step):
                trial = found[:i] + other + found[i + step :]
                tries -= 1
                if len(trial) <= len(found) and trial != found and fails(draw(bytes(sum(trial, ())))):
                    found, improved = trial, True
                    break
        if step == 1 and not improved:
            break
        step = max(1, step // 2)
    return bytes(sum(found, ()))
