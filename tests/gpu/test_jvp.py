"""Forward-mode derivatives on the GPU: every named case by the tolerance rule, and of functions of scores."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp
from torch.nn.attention.flex_attention import create_block_mask

from cute_attn import flex
from cute_attn.compiler import registry
from cute_attn.traits import MAX_DUAL_COLUMNS, Traits
from tests.cases import BY_NAME, CASES
from tests.checks import assert_same, check
from tests.gpu.compare import randn
from tests.problem import Case, Problem

FAR = ("expanded", "far")
"""Layouts for which torch makes no dual tensors, or whose tangents would need as much memory."""
SERVED = [
    replace(case, return_softmax=False)
    for case in CASES
    if case.dtype != "fp32" and case.layout not in FAR and case.head_dim <= 256
]
OF_HEAD_DIMS = [
    Case(f"d{d}x{dv}", head_dim=d, head_dim_v=dv, causal=True, seqlen_q=150, seqlen_k=170)
    for d, dv in ((59, 21), (8, 128), (160, 160), (256, 256), (64, 200), (192, 128))
]
CAUSAL = BY_NAME["causal-203x113"]
MORE = {"bias": "bf16", "bias_broadcast": "b", "sinks": "fp32", "softcap": 12.0}
WITH_MORE = Case("bias-and-sinks", causal=True, seqlen_q=203, seqlen_k=113, **MORE)  # type: ignore[arg-type]
NAMES = ("q", "k", "v")


def tangents(of: Case, seed: int = 1) -> dict[str, Tensor]:
    """Tangents with the tensors' shapes and layouts, and NaN in rows that no sequence owns."""
    dots = moving(of.build("cuda", seed=seed))
    return dots | {name: x.nan_to_num(neginf=0.0) for name, x in dots.items() if name not in NAMES}


def moving(problem: Problem) -> dict[str, Tensor]:
    """The tensors that may have a tangent: q, k, v, and a bias and sinks if there are any."""
    more = {name: getattr(problem.inputs, name) for name in ("bias", "sinks")}
    tensors = dict(zip(NAMES, problem.tensors, strict=True))
    return tensors | {name: x for name, x in more.items() if x is not None}


def moved(problem: Problem, changed: dict[str, Tensor]) -> Problem:
    """The problem with other tensors, by name."""
    q, k, v, *_ = (moving(problem) | changed).values()
    own = {name: x for name, x in changed.items() if name not in NAMES}
    return replace(problem, tensors=(q, k, v), inputs=replace(problem.inputs, **own))


def followed(problem: Problem, dots: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and their tangents."""
    given = moving(problem)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(given[name], dot) for name, dot in dots.items()}
        found = [forward_ad.unpack_dual(x) for x in moved(problem, duals)._run()]
    return named(problem, [x.primal for x in found], [x.tangent for x in found])


def defined(problem: Problem, dots: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Results in torch by the reference in ``dtype``."""

    def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to(dtype) if name in NAMES else x for name, x in tensors.items()}

    given = wide(moving(problem))

    def call(changed: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return moved(problem, given | changed)._define(dtype)[:2]

    return named(problem, *jvp(call, ({name: given[name] for name in dots},), (wide(dots),)))


def named(problem: Problem, primals: Any, found: Any) -> dict[str, Tensor]:
    pairs = (problem._named(primals), problem._named(found))
    return {f"{name}{dot}": x for of, dot in zip(pairs, ("", "_dot"), strict=True) for name, x in of.items()}


def check_tangents(of: Case, dots: dict[str, Tensor], **options: Any) -> None:
    problem = of.build("cuda")
    actual = followed(problem, dots)
    assert_same(actual, followed(problem, dots))
    if of.compare:
        index = list(of.compare)
        actual = {name: x[index] for name, x in actual.items()}
        own = {name: x[index] for name, x in dots.items() if name in NAMES}
        problem, dots = problem.compared(), dots | own
    exact, plain, plain32 = (
        defined(problem, dots, dtype) for dtype in (torch.float64, problem.tensors[0].dtype, torch.float32)
    )
    for name, x in actual.items():
        single = name.startswith("lse")
        # The relative error of P is lse's absolute one: lse_dot, a sum of P S_dot of both signs, takes it over.
        roundings = {"roundings": {"lse": 32.0, "lse_dot": 128.0}[name]} if single else {}
        right = exact[name]
        if name == "lse_dot":  # 0 in rows without keys
            right = right.masked_fill(exact["lse"].isinf(), 0.0)
        check(name, x, right, plain32[name] if single else plain[name], **roundings)


@pytest.mark.parametrize("of", [*SERVED, *OF_HEAD_DIMS], ids=lambda case: case.name)
def test_case(of: Case) -> None:
    check_tangents(of, tangents(of))


ONE = [(of, name) for of in (CAUSAL, BY_NAME["varlen-causal"]) for name in NAMES]
ONE += [(WITH_MORE, name) for name in ("q", "bias", "sinks")]


@pytest.mark.parametrize(("of", "name"), ONE, ids=lambda x: getattr(x, "name", x))
def test_a_tangent_of_one_tensor(of: Case, name: str) -> None:
    check_tangents(of, {name: tangents(of)[name]})


def test_tangents_of_a_bias_whose_columns_are_not_contiguous() -> None:
    problem, dots = WITH_MORE.build("cuda"), tangents(WITH_MORE)
    turned = dots | {
        "bias": dots["bias"].mT.contiguous().mT,
        "sinks": dots["sinks"].repeat_interleave(2)[::2],
    }

    def call(tensors: dict[str, Tensor]) -> Any:
        return moved(problem, tensors)._run()

    for found, right in zip(*(jvp(call, (moving(problem),), (x,)) for x in (turned, dots)), strict=True):
        assert all(map(torch.equal, found, right))


def test_a_part_that_all_keys_have_in_common() -> None:
    """S_dot has a large mean; the component that changes out keeps its digits."""
    of = replace(CAUSAL, name="common")
    problem = of.build("cuda")
    q, k, _ = problem.tensors
    k[..., 0] = 2.0
    given = {name: x.clone() for name, x in tangents(of).items()}
    given["q"][..., 0] = 64.0
    actual, exact = followed(problem, given), defined(problem, given, torch.float64)
    check("out_dot", actual["out_dot"], exact["out_dot"], defined(problem, given, q.dtype)["out_dot"])


def score_mod_of(table: Tensor, distances: Tensor) -> Any:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score * table[h]) + distances[h, (i - j).clamp(-100, 100) + 100]

    return score_mod


@pytest.mark.parametrize(
    ("head_dim", "moved", "masked"),
    [*((64, moved, masked) for moved in (3, 5) for masked in (False, True)), (128, 5, False), (192, 5, True)],
)
def test_functions(head_dim: int, moved: int, masked: bool) -> None:
    """Tangents of q, k and v, or also of what a function captures."""
    shapes = ((2, 4, 300, head_dim), (2, 2, 300, head_dim), (2, 2, 300, head_dim), (4,), (4, 201))
    given, dots = (tuple(randn(*shape, seed=first + i) for i, shape in enumerate(shapes)) for first in (0, 5))
    kept = given[moved:]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i // 100 == j // 100)

    block_mask = create_block_mask(mask_mod, None, None, 300, 300) if masked else None  # type: ignore[arg-type]

    def call(*tensors: Tensor) -> Tensor:
        q, k, v, *captured = (*tensors, *kept)
        return flex.flex_attention(q, k, v, score_mod_of(*captured), block_mask=block_mask, enable_gqa=True)

    def by_definition(*tensors: Tensor) -> Tensor:
        q, k, v, *captured = (*tensors, *(x.to(tensors[0].dtype) for x in kept))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        index = [torch.arange(n, device="cuda") for n in (2, 4, 300, 300)]
        b, h, i, j = (x.view([-1 if a == axis else 1 for a in range(4)]) for axis, x in enumerate(index))
        s = score_mod_of(*captured)((q @ k.transpose(-1, -2)) * head_dim**-0.5, b, h, i, j)
        if masked:
            s = s.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
        return (s.softmax(-1) @ v).to(q.dtype)

    own = (given[:moved], dots[:moved])
    found = jvp(call, *own)
    exact, plain = (
        jvp(by_definition, *(tuple(x.to(dtype) for x in some) for some in own))
        for dtype in (torch.float64, torch.float32)
    )
    for name, x, right, other in zip(("out", "out_dot"), found, exact, plain, strict=True):
        check(name, x, right, other.bfloat16(), factor=4.0)


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The kernel of a case, for the columns of V of a launch."""
    of = params.get("of")
    if of is None or not of.launches:
        return
    launches = -(-of.traits("sm80", "jvp").head_dim_v // MAX_DUAL_COLUMNS)
    columns = -(-of.size_v // (8 * launches)) * 8
    names = [params["name"]] if "name" in params else ["bias", "sinks"]
    moves = {f"{name}_tangent": bool(getattr(of, name)) for name in names if name not in NAMES}
    kernels = (
        replace(of.traits(arch, "jvp"), head_dim_v=columns, **moves) for arch in registry.generations(target)
    )
    yield next(x for x in kernels if registry.known_class(x).supports(x) is None), None, target
