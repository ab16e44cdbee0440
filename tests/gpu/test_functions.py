"""score_mod and mask_mod on the GPU: forward and backward against dense torch in float64, and FlexAttention.

Kernels are built here, one after the other: the processes that build for other tests know no traced functions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cute_attn import attention, attention_varlen, flex
from cute_attn.host.block_masks import _made_of
from cute_attn.reference.check_epilogue import for_each
from tests import machine
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import captured, int32, randn

ARCHS = runnable_archs()
Made = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
SEQLEN, NHEADS = 300, 4


def tensors(device: str) -> dict[str, Tensor]:
    """Tensors that the functions capture."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "slopes": torch.rand(NHEADS, generator=generator),
        "table": torch.randn(NHEADS, 257, generator=generator).bfloat16(),
        "document": torch.randint(0, 4, (2, SEQLEN), generator=generator).sort().values,
        "kept": torch.rand(2, SEQLEN, generator=generator) > 0.3,
        "cap": torch.tensor(20.0),
    }
    return {name: x.to(device) for name, x in made.items()}


def functions(name: str, x: dict[str, Tensor]) -> Made:
    """score_mod and mask_mod of a case, of captured tensors ``x``."""

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return x["document"][b, q] == x["document"][b, k]

    cases: dict[str, Made] = {
        "causal": (None, causal),
        "document": (None, document),
        "padding": (None, lambda b, h, q, k: x["kept"][b, k]),
        "alibi": (lambda s, b, h, q, k: s - x["slopes"][h] * (q - k).abs(), causal),
        "relative": (lambda s, b, h, q, k: s + x["table"][h, (k - q).clamp(-128, 128) + 128], None),
        "softcap": (lambda s, b, h, q, k: x["cap"] * torch.tanh(s / x["cap"]), document),
        "wave": (lambda s, b, h, q, k: s * (1 + torch.sin(q * 0.37 - k) / 2) + torch.log(1 + s * s), None),
        "angles": (lambda s, b, h, q, k: torch.atan2(s, (q - k).float()) + s * torch.acos(torch.tanh(s) / 2), None),
        "powers": (lambda s, b, h, q, k: (torch.tanh(s) + 1.5) ** (1 + x["slopes"][h]) + s.tanh() ** (h + 1), causal),
        "signs": (lambda s, b, h, q, k: s + torch.copysign(s, (q % 7 - k % 5).float()) / 2, None),
        "smooth": (lambda s, b, h, q, k: torch.sinc(s) + torch.logaddexp(s, 0.5 * s) + torch.asinh(s), document),
        "integers": (lambda s, b, h, q, k: s + torch.fmod(q - k, 7) / 8 + (q * 2**33 + k) % 5 + (7 * k).byte() / 64,
            None),
        "rows": (lambda s, b, h, q, k: s + x["table"][:, 1:][h, (q + k) % 256] + x["table"].T[k % 257, h], causal),
        "negative": (lambda s, b, h, q, k: s + x["table"][h, -1 - (q + k) % 257], None),
        "nan": (
            # A quotient's gradient would be NaN in torch too, where it is infinite.
            lambda s, b, h, q, k: (
                torch.nan_to_num(torch.where(q == k, torch.inf, s), 0.5, 2.0) / 64 + torch.fmax(s, -s)
            ),
            None,
        ),
    }  # fmt: skip
    return cases[name]


CASES = ("causal", "document", "padding", "alibi", "relative", "softcap", "wave", "angles", "powers", "signs")
CASES += ("smooth", "integers", "rows", "nan")


def dense_scores(q: Tensor, k: Tensor, score_mod: Any, mask_mod: Any) -> Tensor:
    """Scores (batch, nheads, seqlen_q, seqlen_k) in q's dtype, or in the dtype of captured tensors."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    at = [torch.arange(n, device=q.device) for n in scores.shape]
    if score_mod is not None:
        scores = for_each(score_mod, True)(scores, *at)
    if mask_mod is not None:
        scores = scores.masked_fill(~for_each(mask_mod)(*at), -torch.inf)
    return scores


def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any) -> tuple[Tensor, Tensor]:
    """Attention in q's dtype, in plain torch; with float64 it is the reference."""
    scores = dense_scores(q, k, score_mod, mask_mod)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    seen = scores.isfinite().any(-1, keepdim=True)
    p = torch.where(seen, scores, 0.0).softmax(-1) * seen
    return torch.einsum("bhqk,bkhd->bqhd", p.to(v.dtype), v), scores.logsumexp(-1)


def inputs(head_dim: int = 64) -> list[Tensor]:
    heads = (NHEADS, NHEADS // 2, NHEADS // 2)
    return [randn(2, SEQLEN, n, head_dim, seed=i).requires_grad_() for i, n in enumerate(heads)]


@pytest.mark.parametrize(("arch", "head_dim"), [x for x in (("sm80", 64), ("sm90", 128)) if x[0] in ARCHS])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_torch(name: str, head_dim: int, arch: str) -> None:
    score_mod, mask_mod = functions(name, tensors("cuda"))
    leaves = inputs(head_dim)
    got = attention(*leaves, score_mod=score_mod, mask_mod=mask_mod, return_lse=True, kernel=arch)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = dense(*exact, score_mod, mask_mod)
    rounded = [x.detach().requires_grad_() for x in leaves]
    torchs = dense(*rounded, score_mod, mask_mod)
    grad = torch.randn_like(got[0])
    found = torch.autograd.grad(got[0], leaves, grad)
    expected = torch.autograd.grad(right[0], exact, grad.double())
    theirs = torch.autograd.grad(torchs[0], rounded, grad.to(torchs[0].dtype))
    seen = right[1].isfinite()
    assert torch.equal(got[1].isfinite(), seen)
    torch.testing.assert_close(got[1][seen].double(), right[1][seen], atol=2e-3, rtol=1e-3)
    ours, exact_ones, plain = (got[0], *found), (right[0], *expected), (torchs[0], *theirs)
    check_errors(("out", "dq", "dk", "dv"), ours, exact_ones, plain, floor=2**-8)


def check_errors(names: Sequence[str], *results: Sequence[Tensor], floor: float) -> None:
    """Ours are at most three times plain torch's, and ``floor`` of the largest value; results: ours, exact, plain."""
    for name, own, right, plain in zip(names, *results, strict=True):
        error, allowed = (float((x.detach().double() - right.detach()).abs().max()) for x in (own, plain))
        assert error <= 3 * allowed + floor * float(right.abs().max()), (
            f"{name}: {error} for torch's {allowed}"
        )


def test_what_lies_beyond_the_sequences_reaches_no_gradient() -> None:
    """Tensors that are NaN beyond a sequence's last position, and no multiple of a tile's."""
    scale = torch.full((NHEADS, 2 * SEQLEN), torch.nan, device="cuda")
    scale[:, :SEQLEN] = torch.rand(NHEADS, SEQLEN, device="cuda")
    leaves = inputs()
    out = attention(*leaves, score_mod=lambda s, b, h, q, k: s * scale[h, k] * scale[h, q])
    assert out.isfinite().all()  # type: ignore[union-attr]
    for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):  # type: ignore[arg-type]
        assert grad.isfinite().all()


HIDDEN: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "reciprocal": lambda t: lambda s, b, h, q, k: s * t[h] / (q - k + 1),
    "kerple": lambda t: lambda s, b, h, q, k: s - t[h] * torch.log(1 + t[h] * (q - k)),
    "of the score": lambda t: lambda s, b, h, q, k: torch.sqrt(t[h] * (q - k) + 20 + s),
}


@pytest.mark.parametrize("hides", ["causal", "mask_mod", "window", "varlen"])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_scores_reach_no_gradient(name: str, arch: str, hides: str) -> None:
    """Functions that are infinite or NaN at hidden keys, against float64 of the visible keys only."""
    leaves, own = inputs(), learned("slopes", "cuda")
    score_mod, options = HIDDEN[name](own), dict[str, Any](kernel=arch)
    if hides == "varlen":
        starts = int32(0, SEQLEN, 2 * SEQLEN)
        packed = [x.flatten(0, 1) for x in leaves]
        rows = attention_varlen(
            *packed, starts, starts, SEQLEN, SEQLEN, score_mod=score_mod, causal=True, **options
        )
        out: Tensor = rows.view(2, SEQLEN, NHEADS, 64)  # type: ignore[union-attr]
    else:
        masks: dict[str, dict[str, Any]] = {
            "causal": {"causal": True},
            "window": {"window": (100, 0)},
            "mask_mod": {"mask_mod": causal},
        }
        out = attention(*leaves, score_mod=score_mod, **masks[hides], **options)  # type: ignore[assignment]
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (*leaves, own), grad)
    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    table = own.detach().double().requires_grad_()
    scores = dense_scores(q, k, None, None)
    at = torch.arange(SEQLEN, device="cuda")
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance <= (100 if hides == "window" else SEQLEN))
    cells = seen.expand(scores.shape).nonzero(as_tuple=True)
    scores = torch.full_like(scores, -torch.inf).index_put(cells, HIDDEN[name](table)(scores[cells], *cells))
    p = scores.softmax(-1)
    right = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2))
    expected = torch.autograd.grad(right, (q, k, v, table), grad.double())
    torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
    for ours, exact in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-2 * float(exact.abs().max()), rtol=2e-2)
    assert found[3].isfinite().all()


LEARNED = {
    "relative": ("table", lambda t: lambda s, b, h, q, k: s + t[h, (k - q).clamp(-128, 128) + 128]),
    "near": ("table", lambda t: lambda s, b, h, q, k: s + t[h, (k - q) % 257]),
    "slopes": ("slopes", lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).abs() / 64),
    "temperature": ("slopes", lambda t: lambda s, b, h, q, k: s * t[h]),
    "cap": ("cap", lambda t: lambda s, b, h, q, k: t * torch.tanh(s / t)),
    "row": ("table", lambda t: lambda s, b, h, q, k: s + t[h, 1:].view(2, 128)[q % 2, k % 128]),
    "negative": ("table", lambda t: lambda s, b, h, q, k: s + t[h, -1 - (q + k) % 257]),
    "column": ("table", lambda t: lambda s, b, h, q, k: s + t[..., (k - q) % 257][h]),
    "power": ("slopes", lambda t: lambda s, b, h, q, k: s * (1 + t[h]) ** ((q - k).abs() % 3)),
    "keys": ("document", lambda t: lambda s, b, h, q, k: s + t[b, k] * t[b, q]),
}


def learned(name: str, device: str) -> Tensor:
    """The captured tensor of a learned function; it requires a gradient."""
    return tensors(device)[LEARNED[name][0]].float().requires_grad_()


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def exact_captured(
    leaves: Sequence[Tensor], out: Tensor, grad: Tensor, score_mod: Any, own: Tensor, mask: Any
) -> Tensor:
    """The gradient of ``own``, which ``score_mod`` captures, in float64, given the kernel's ``out``.

    Rounding of out changes all dS of a row by one number, and their sums over many rows by percents. So the exact
    gradient is no reference for the sums, but the gradient for the rounded out is one, up to fp32's rounding.
    """
    q, k, v = (x.detach().double() for x in leaves)
    table = own.detach().double().requires_grad_()
    scores = dense_scores(q, k, score_mod(table), mask)
    p = scores.detach().softmax(-1).nan_to_num()
    dp = torch.einsum("bqhd,bkhd->bhqk", grad.double(), v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    d = (grad.double() * out.detach().double()).sum(-1).transpose(1, 2)[..., None]
    return torch.autograd.grad(scores, table, p * (dp - d))[0]


def check_captured(found: Tensor, *given: Any) -> None:
    """Compare a gradient with :func:`exact_captured`, which has the other arguments."""
    expected = exact_captured(*given)
    torch.testing.assert_close(found.double(), expected, atol=2e-3 * float(expected.abs().max()), rtol=0)


CAPTURED = [(*kernel, name) for kernel in (("sm80", 64), ("sm90", 64), ("sm90", 128)) for name in LEARNED]
CAPTURED += [(arch, 512, "temperature") for arch in ("sm80", "sm90")]  # several CTAs have the same scores


@pytest.mark.parametrize(("arch", "head_dim", "name"), [row for row in CAPTURED if row[0] in ARCHS])
def test_captured_tensors_have_gradients(name: str, head_dim: int, arch: str) -> None:
    grad = randn(2, SEQLEN, NHEADS, head_dim, seed=3)
    leaves, own = inputs(head_dim), learned(name, "cuda")
    out: Tensor = attention(*leaves, score_mod=LEARNED[name][1](own), causal=True, kernel=arch)  # type: ignore[assignment]
    found = torch.autograd.grad(out, (*leaves, own), grad)
    check_captured(found[-1], leaves, out, grad, LEARNED[name][1], own, causal)
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        exact = [x.detach().to(dtype).requires_grad_() for x in leaves]
        right = dense(*exact, LEARNED[name][1](own.detach().double()), causal)[0]  # type: ignore[misc]
        results.append(torch.autograd.grad(right, exact, grad.to(right.dtype)))
    check_errors(("dq", "dk", "dv"), found[:-1], *results, floor=2**-7)
    again = torch.autograd.grad(  # nothing but the captured tensor's
        attention(*(x.detach() for x in leaves), score_mod=LEARNED[name][1](own), causal=True, kernel=arch),  # type: ignore[misc]
        own,
        grad,
    )
    largest = float(found[-1].abs().max())
    torch.testing.assert_close(again[0], found[-1], atol=1e-4 * largest, rtol=0)


def buckets(table: Tensor) -> Callable[..., Any]:
    """T5's: 16 near distances, then 16 for longer and longer ones."""

    def t5(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (q - k).clamp(min=0)
        far = 16 + (torch.log(distance.clamp(min=1) / 16.0) / math.log(8) * 16).to(torch.int32)
        return s + table[h, torch.where(distance < 16, distance, far.clamp(max=31))]

    return t5


LONG = 1037
REPEATING: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "t5": ((NHEADS, 32), buckets),
    "amplitude": ((NHEADS,), lambda t: lambda s, b, h, q, k: s * (1 + t[h])),
    "positions": ((NHEADS, LONG, LONG), lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
    "keys": ((3, LONG), lambda t: lambda s, b, h, q, k: s + t[b, k] * t[b, q]),
    "number": ((), lambda t: lambda s, b, h, q, k: s * (1 + t)),
}
"""Functions of a tensor of this shape, which requires a gradient."""
REPEATED = [(*kernel, name) for kernel in (("sm80", 64), ("sm90", 64)) for name in REPEATING]
REPEATED += [(arch, 128, "t5") for arch in ("sm80", "sm90")] + [
    ("sm90", 128, "amplitude"),
    ("sm90", 256, "t5"),
]
REPEATED += [(arch, 512, "amplitude") for arch in ("sm80", "sm90")]  # several CTAs have the same scores


@pytest.mark.parametrize(("arch", "head_dim", "name"), [row for row in REPEATED if row[0] in ARCHS])
def test_gradients_of_captured_tensors_repeat(name: str, head_dim: int, arch: str) -> None:
    """Equal bits, whatever else the GPU does, and no more error than that of sums in any order."""
    shape, function = REPEATING[name]
    sizes = [(3, LONG, n, head_dim) for n in (NHEADS, NHEADS // 2, NHEADS // 2)]
    leaves = [randn(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]
    grad, own = randn(*sizes[0], seed=3), (randn(*shape, seed=4).float() / 4).requires_grad_()
    other, square = torch.cuda.Stream(), randn(1024, 1024)

    def gradients(number: int, **options: Any) -> list[Tensor]:
        with torch.cuda.stream(other):
            for _ in range(number % 7):
                square @ square
        out: Tensor = attention(*leaves, score_mod=function(own), causal=True, kernel=arch, **options)  # type: ignore[assignment]
        return [out, *torch.autograd.grad(out, (*leaves, own), grad)]

    first = gradients(0, deterministic=True)
    for number in range(50):
        for found, expected in zip(gradients(number, deterministic=True), first, strict=True):
            assert torch.equal(found, expected)
    exact = exact_captured(leaves, first[0], grad, function, own, causal)
    ours, free = (float((x.double() - exact).abs().max()) for x in (first[-1], gradients(0)[-1]))
    print(f"error {ours:.3g}, in any order {free:.3g}, largest {float(exact.abs().max()):.3g}")
    assert ours <= 1.25 * free + 5e-6 * float(exact.abs().max())


@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_that_repeat_in_other_calls(arch: str) -> None:
    """Packed sequences, block masks, a table with one score for an element, and a CUDA graph; by torch's option."""
    leaves, grad, starts = inputs(), randn(2, SEQLEN, NHEADS, 64, seed=3), int32(0, SEQLEN, 2 * SEQLEN)
    mask = create_block_mask(lambda b, h, q, k: q >= 0, None, None, SEQLEN, SEQLEN, device="cuda")
    own, function = learned("relative", "cuda"), LEARNED["relative"][1]
    table, of_table = torch.zeros(NHEADS, SEQLEN, SEQLEN, device="cuda"), REPEATING["positions"][1]

    def call(function: Any, own: Tensor, packed: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        options |= {"score_mod": function(own), "kernel": arch}
        if packed:
            rows = attention_varlen(
                *(x.flatten(0, 1) for x in leaves), starts, starts, SEQLEN, SEQLEN, **options
            )  # type: ignore[misc]
            out: Tensor = rows.view(2, SEQLEN, NHEADS, 64)  # type: ignore[union-attr]
        else:
            out = attention(*leaves, **options)  # type: ignore[assignment]
        return out.detach(), torch.autograd.grad(out, own, grad)[0]

    calls = {
        "dense": lambda: call(function, own),
        "packed": lambda: call(function, own, packed=True),
        "listed": lambda: call(function, own, block_mask=mask),
        "positions": lambda: call(of_table, table.requires_grad_()),
    }
    with machine.deterministic():
        first = {name: one() for name, one in calls.items()}
        for name, one in calls.items():
            for _ in range(10):
                assert torch.equal(one()[1], first[name][1]), name
        graph, found = captured(calls["dense"])
        for _ in range(3):
            graph.replay()
            assert torch.equal(found[1], first["dense"][1])
    for name, (out, gradient) in first.items():
        given = (of_table, table) if name == "positions" else (function, own)
        check_captured(gradient, leaves, out, grad, *given, None)


@pytest.mark.once  # a checkpoint counts the tensors that a call saves
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpoint"])
@pytest.mark.parametrize("rows", [64, 128])
def test_block_masks_in_a_whole_graph(rows: int, recomputed: bool) -> None:
    """Two layers that share a mask, whose tables a graph makes again for another mask."""
    torch.compiler.reset()
    leaves, slopes = inputs(), learned("slopes", "cuda")
    grad = randn(2, SEQLEN, NHEADS, 64, seed=3)

    def layer(x: Tensor, k: Tensor, v: Tensor, slopes: Tensor, mask: Any) -> Any:
        def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slopes[h] * (i - j).abs() / 64

        return x + attention(x, k, v, score_mod=alibi, block_mask=mask)  # type: ignore[operator]

    def model(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, mask: Any) -> Any:
        for _ in range(2):
            if recomputed:
                q = checkpoint(layer, q, k, v, slopes, mask, use_reentrant=False)
            else:
                q = layer(q, k, v, slopes, mask)
        return q

    compiled = torch.compile(model, fullgraph=True)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        document = torch.randint(0, 4, (2, SEQLEN), generator=generator).sort().values.cuda()
        mask = documents(document, rows)
        found, expected = (
            (out, *torch.autograd.grad(out, (*leaves, slopes), grad))
            for out in (run(*leaves, slopes, mask) for run in (compiled, model))
        )
        for ours, theirs in zip(found, expected, strict=True):
            atol = 2e-2 * max(1.0, float(theirs.detach().abs().max()))
            torch.testing.assert_close(ours.float(), theirs.float(), atol=atol, rtol=2e-2)


def documents(document: Tensor, rows: int) -> Any:
    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[b, i] == document[b, j]) & (i >= j)

    return create_block_mask(seen, 2, None, SEQLEN, SEQLEN, device="cuda", BLOCK_SIZE=rows)


@pytest.mark.unguarded
def test_a_whole_graph_replayed_by_cuda() -> None:
    torch.compiler.reset()
    q, k, v = (x.detach() for x in inputs())
    slopes, mask = learned("slopes", "cuda").detach(), documents(tensors("cuda")["document"], 128)

    def call(q: Tensor, slopes: Tensor) -> Any:
        return attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), block_mask=mask
        )

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for factor in (1.0, 2.0, 3.0, 4.0):
        given = (q * factor, slopes * factor)
        torch.testing.assert_close(compiled(*given), call(*given), atol=1e-2, rtol=1e-2)


# ---- FlexAttention's function ----


def heads_first() -> list[Tensor]:
    return [x.detach().transpose(1, 2).contiguous() for x in inputs()]


def test_lists_are_made_without_waiting_and_again_within_a_graph() -> None:
    mask = documents(tensors("cuda")["document"], 128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = _made_of(mask).kinds
        assert _made_of(mask).kinds is first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert _made_of(mask).kinds is not first
    x = heads_first()
    eager = flex.flex_attention(*x, block_mask=mask, enable_gqa=True)
    graph, out = captured(lambda: flex.flex_attention(*x, block_mask=mask, enable_gqa=True))
    graph.replay()
    assert torch.equal(out, eager)  # type: ignore[arg-type]
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        counts[..., 1] = 0  # type: ignore[index]
    graph.replay()
    assert not out[:, :, 128:256].any() and torch.equal(out[:, :, :128], eager[:, :, :128])  # type: ignore[union-attr,index,call-overload]
