"""Second derivatives by the operator ``cute_attn::second``, against torch's derivatives of the definition."""

import functools

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from cute_attn import attention, attention_varlen
from cute_attn.host.call import ATTENTION, Call
from cute_attn.reference import definition
from tests import tensors as drawn
from tests.tensors import int32

randn = functools.partial(drawn.randn, dtype=torch.float64)
BATCHES = ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 4))
PACKED = ((9, 4, 8), (11, 2, 8), (11, 2, 4))
STARTS = {
    "cu_seqlens_q": int32(0, 2, 2, 7),
    "cu_seqlens_k": int32(0, 3, 6, 10),
    "max_seqlen_q": 5,
    "max_seqlen_k": 4,
}
TABLE = randn(4, 9, seed=8)


def mod(table):
    return lambda score, b, h, i, j: torch.tanh(score) * table[h, i - j + 4] + score * b


CASES = {
    "grouped": {},
    "causal": {"causal": True, "softmax_scale": -0.3},
    "window": {"window": (1, 0), "softcap": 1.5},
    "slopes": {"alibi_slopes": randn(4).abs().float()},
    "bias": {"bias": randn(2, 4, 5, 6), "softcap": 2.0},
    "broadcast bias": {"bias": randn(1, 4, 1, 6), "causal": True},
    "sinks": {"sinks": randn(4), "causal": "top_left"},
    "lengths": {"seqused_k": int32(0, 4)},
    "dropout": {"dropout_p": 0.4, "rng_state": torch.tensor([3, 4])},
    "the other dropout": {
        "dropout_p": 0.4,
        "rng_state": torch.tensor([3, 4]),
        "dropout_mask": "mem_efficient",
    },
    "function": {"table": TABLE},
    "mask": {"mask_mod": lambda b, h, i, j: (i >= j - 2) & (h != 1)},
    "packed": {**STARTS, "causal": True, "seqused_k": int32(3, 2, 4)},
    "packed bias": {**STARTS, "bias": randn(3, 1, 5, 4), "sinks": randn(4)},
}
"""Options of calls; ``table`` is a tensor that a function captures."""


def inputs(name):
    """The call's learned tensors by name, and the function of them that returns out and lse."""
    options = dict(CASES[name])
    packed = "cu_seqlens_q" in options
    shapes = PACKED if packed else BATCHES
    given = {key: randn(*shape, seed=i) for i, (key, shape) in enumerate(zip("qkv", shapes, strict=True))}
    given |= {key: options.pop(key) for key in ("bias", "sinks", "table") if key in options}
    door = attention_varlen if packed else attention

    def run(table=None, **tensors):
        own = {} if table is None else {"score_mod": mod(table)}
        return door(**tensors, **own, **options, return_lse=True)

    return given, run


def second_derivatives(given, run):
    """The gradients of gradients, by every tensor and by the gradients of out and lse."""
    leaves = {key: x.detach().requires_grad_() for key, x in given.items()}
    outputs = run(**leaves)
    outer = [randn(*x.shape, seed=20 + i).requires_grad_() for i, x in enumerate(outputs)]
    kept = [
        x if key == "out" else x.masked_fill(x.isinf(), 0.0)
        for key, x in zip(("out", "lse"), outputs, strict=True)
    ]
    wanted = list(leaves.values())
    firsts = torch.autograd.grad(kept, wanted, outer, create_graph=True)
    tangents = [randn(*x.shape, seed=30 + i) for i, x in enumerate(wanted)]
    return firsts, torch.autograd.grad(firsts, [*wanted, *outer], tangents)


class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode under which calls go to the operators, which it notes."""

    called = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called = [*self.called, function]
        return function(*args, **(kwargs or {}))


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("scores", [2**23, 12, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients(name, scores, monkeypatch):
    given, run = inputs(name)
    expected = second_derivatives(given, run)
    monkeypatch.setattr(definition, "_CHUNK_SCORES", scores)
    with Dispatched() as noted:
        found = second_derivatives(given, run)
    ours = [x for x in noted.called if x.namespace == "cute_attn"]
    assert ours == [getattr(torch.ops.cute_attn, x).default for x in ("forward", "backward", "second")]
    same(found, expected)
    assert all(x.is_contiguous() for x in found[1])


def call(q, k, v, **options):
    return Call(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], softmax_scale=0.4, **options)


def loss(q, k, v, **options):
    out, lse = attention(q, k, v, return_lse=True, causal=True, **options)
    return out.sin().sum() + lse.square().sum()


TENSORS = tuple(randn(*shape, seed=i) for i, shape in enumerate(((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 3))))
DOTS = tuple(randn(*x.shape, seed=5 + i) for i, x in enumerate(TENSORS))


@pytest.mark.parametrize("by", [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(jacfwd(f))])
def test_hessians(by):
    q, k, v = TENSORS
    expected = torch.autograd.functional.hessian(lambda *x: loss(q, *x), (k, v))
    found = by(lambda x: loss(q, *x))((k, v))
    same(found, expected)


def product(q, k, v):
    """A Hessian's product with a vector, by a tangent of a gradient."""
    return jvp(grad(loss, argnums=(0, 1, 2)), (q, k, v), DOTS)[1]


def test_products_with_hessians():
    (_, expected) = torch.autograd.functional.hvp(loss, TENSORS, DOTS)
    same(product(*TENSORS), expected)
    of_tangent = grad(lambda *x: jvp(loss, x, DOTS)[1], argnums=(0, 1, 2))
    same(of_tangent(*TENSORS), expected)
    many = tuple(torch.stack((x, 2 * x)) for x in TENSORS)
    same(tuple(x[0] for x in vmap(product)(*many)), expected)


def test_gradients_by_tangents():
    """Of a tangent of out, by the tangents of q, k and v: the gradient of out."""
    seed = randn(1, 3, 2, 3)

    def of_dots(*dots):
        return (jvp(lambda *x: attention(*x, causal=True), TENSORS, dots)[1] * seed).sum()

    leaves = [x.clone().requires_grad_() for x in TENSORS]
    expected = torch.autograd.grad(attention(*leaves, causal=True), leaves, seed)
    same(grad(of_dots, argnums=(0, 1, 2))(*DOTS), expected)


def test_in_compiled_code():
    torch._dynamo.reset()
    same(torch.compile(product, backend="aot_eager", fullgraph=True)(*TENSORS), product(*TENSORS))


def test_the_operator():
    q, k, v = (x.float() for x in TENSORS)
    given = call(q, k, v, bias=randn(1, 2, 1, 4).float(), sinks=randn(2).float())
    tangents = [torch.randn_like(x) for x in (q, k, v)]
    arguments = ([*tangents, None, None], torch.randn(1, 3, 2, 3), torch.randn(1, 2, 3))
    for needed in ([True] * 7, [False, True, False, True, False, False, False]):
        torch.library.opcheck(
            torch.ops.cute_attn.second.default,
            (*arguments, needed, *given.values(ATTENTION)),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_of_v_alone():
    """out is linear in v: the gradient's derivative is 0, and of out's gradient the product with v's tangent."""
    q, k, v = (*TENSORS[:2], TENSORS[2].clone().requires_grad_())
    for learned in (False, True):
        with Dispatched():
            out = attention(q, k, v, causal=True)
            seed = randn(*out.shape, seed=3).requires_grad_(learned)
            (first,) = torch.autograd.grad(out, v, seed, create_graph=True)
            found = torch.autograd.grad(first, (v, seed) if learned else (v,), DOTS[2], allow_unused=True)
        assert found[0] is None or not found[0].any()
        if learned:
            same(found[1], attention(q, k, DOTS[2], causal=True))


def test_half_precision():
    """Products and sums are fp32, also under autocast; results have the tensors' dtypes."""
    leaves = [x.bfloat16().requires_grad_() for x in TENSORS]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = []
    for own in (leaves, exact):
        with Dispatched():
            firsts = torch.autograd.grad(attention(*own, causal=True).sum(), own, create_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(
                torch.autograd.grad(firsts, own, [x.to(y.dtype) for x, y in zip(DOTS, own, strict=True)])
            )
    for x, right in zip(*found, strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "third",
    [
        lambda q, k, v: grad(lambda x: grad(lambda y: grad(loss)(y, k, v).sum())(x).sum())(q),
        lambda q, k, v: jvp(lambda x: jvp(lambda y: loss(y, k, v), (x,), (x,))[1], (q,), (q,)),
    ],
)
def test_third_derivatives_are_refused(third):
    with pytest.raises(
        NotImplementedError, match="a third derivative of attention, or a tangent of its tangent"
    ):
        third(*TENSORS)
