"""The device code of a case's functions, run on the CPU for all threads of a tile, forward and backward."""

from dataclasses import replace

import torch
from torch import Tensor

from cute_attn.epilogues.functions.gradients import one_copy
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.epilogue_gradients import gradient_of
from cute_attn.reference.tilings import TINY, Scores
from tests import checks
from tests.fuzz import oracle
from tests.fuzz.case import Case, Functions
from tests.fuzz.judge import CLEAN, Fault, Outcome

FORWARD = ("warps2x1-32x16", "wgmma1-64x16")
BACKWARD = ("warps2x1-32x16", "wgmma1-16x64-transposed")
FLOOR = 1e-4
"""Tolerance relative to the largest value: above float32's and fast functions' rounding, far below a wrong result."""


def judge(case: Case) -> Outcome:
    """The outcome of a case's functions on score tiles.

    Raises:
        Fault: the device code computes something else than torch.
    """
    case = replace(case, batch=2, seqlen_q=35, seqlen_k=44, nheads=2, nheads_kv=2, lengths=(), grads=())
    functions = Functions.of(case)
    try:
        exact = _expected(case, functions.wide(), torch.float64)
        plain = _expected(case, functions, torch.float32)
    except Exception as error:
        return Outcome("invalid", f"torch: {type(error).__name__}: {error}")
    finite = exact["scores"][exact["scores"].isfinite()]
    if finite.numel() and float(finite.abs().max()) > 100:
        return Outcome("invalid", "large scores")
    if any(
        not x.isfinite().equal(exact[name].isfinite()) or exact[name].isnan().any()
        for name, x in plain.items()
    ):
        return Outcome("invalid", "torch's own result is not finite")
    try:
        got = _emulated(case, functions, exact)
    except CLEAN as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}") from error
    for name, found in got.items():
        right = exact[name.split(",")[0]]
        size = max(1.0, float(right[right.isfinite()].abs().max()) if right.isfinite().any() else 0.0)
        if name.startswith("d"):
            size = max(size, float(exact["dp"].abs().max()))
        try:
            checks.check(name, found, right, plain[name.split(",")[0]], factor=4.0, floor=FLOOR * size)
        except AssertionError as error:
            raise Fault(str(error)) from None
    return Outcome("right")


def _problem(case: Case) -> tuple[Scores, Tensor]:
    problem = Scores.random(case.batch, case.nheads, case.seqlen_q, case.seqlen_k, seed=case.seed)
    return problem, torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(case.seed + 1))


def _expected(case: Case, functions: Functions, dtype: torch.dtype) -> dict[str, Tensor]:
    """Scores, their gradients before functions, gradients of captured floats; lse and dpsum, which a backward reads."""
    problem, grad_out = _problem(case)
    raw = (problem.products.to(dtype) * problem.scale).requires_grad_()
    leaves = {name: x.requires_grad_() for name, x in functions.values.items() if _is_float(x)}
    options = oracle.Options(1.0, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
    v = problem.v.to(dtype)
    with oracle.default_dtype(dtype):
        scores = [oracle.modified(raw[b], options, b, 0) for b in range(case.batch)]
        outs, lses = zip(*(oracle.weighted(x, v[b]) for b, x in enumerate(scores)), strict=True)
    out, lse = torch.stack(outs), torch.stack(lses)
    grads = torch.autograd.grad(
        out, (raw, *leaves.values()), grad_out.to(dtype), allow_unused=True, materialize_grads=True
    )
    for x in leaves.values():
        x.requires_grad_(False)
    found = {
        "scores": torch.stack(scores),
        "lse": lse,
        "dpsum": (out * grad_out.to(dtype)).sum(-1).transpose(1, 2),
    }
    found["dp"] = torch.einsum("bqhd,bkhd->bhqk", grad_out.to(dtype), v)
    found |= dict(zip(("dscores", *(f"d{name}" for name in leaves)), grads, strict=True))
    return {name: x.detach() for name, x in found.items()}


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _emulated(case: Case, functions: Functions, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of the emulated threads; for a captured tensor, the sum that the threads add to its gradient."""
    problem, grad_out = _problem(case)
    name, tensors = epilogue_of(functions.score_mod, functions.mask_mod)
    if not name:
        return {}
    with_tensors = replace(problem, inputs=replace(problem.inputs, extra={name: tensors}))
    tiling = case.extra % 2
    found = {"scores": with_tensors.emulate(TINY[FORWARD[tiling]].of(name)).scores}
    floats = tuple(i for i, x in enumerate(tensors) if _is_float(x))
    bins = (0, 9, 33)[case.extra // 2 % 3]
    binned = floats if bins else ()
    own, numbers = user_epilogue(name).with_gradients(floats, binned) if floats else (name, ())
    targets = tuple(one_copy(tensors[i], bins) for i in numbers)
    given = replace(problem, inputs=replace(problem.inputs, extra={own: (*tensors, *targets)}))
    lse, minus_d = exact["lse"].float(), -exact["dpsum"].float()
    found["dscores"] = given.differentiate(
        TINY[BACKWARD[tiling]].of(own, op="backward"), grad_out, lse, minus_d
    ).scores
    names = {id(x): f"d{name}" for name, x in functions.values.items()}  # others are computed from these
    pairs = zip(numbers, targets, strict=True)
    return found | {
        names[id(tensors[i])]: gradient_of(tensors[i], x).float() for i, x in pairs if id(tensors[i]) in names
    }
