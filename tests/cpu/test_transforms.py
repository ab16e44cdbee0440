"""torch.func's transforms of attention, against plain autograd and loops over calls."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

from cute_attn import attention, attention_varlen
from tests import refusals

SHAPES = {"q": (2, 5, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 4)}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def inputs(size=None):
    """q, k and v, of a batch of calls with a size."""
    lead = () if size is None else (size,)
    return tuple(randn(*lead, *shape) for shape in SHAPES.values())


def loss(q, k, v, **options):
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out.square().sum() + lse.sum()


def gradients(tensors, **options):
    own = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*own, **options), own)


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_grad_by_a_captured_tensor():
    (q, k, v), table = inputs(), randn(4, 6)

    def of_table(table):
        return loss(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j])

    tables = torch.stack((table, 2 * table))
    leaves = [x.clone().requires_grad_() for x in tables]
    expected = torch.stack([torch.autograd.grad(of_table(x), x)[0] for x in leaves])
    same(grad(of_table)(table), expected[0])
    same(vmap(grad(of_table))(tables), expected)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, None), (1, None, 2)])
def test_vmap(in_dims):
    many, one = inputs(3), inputs()
    given = [one[i] if d is None else many[i].movedim(0, d) for i, d in enumerate(in_dims)]
    found = vmap(lambda *x: attention(*x, causal=True, return_lse=True), in_dims)(*given)
    calls = [[one[j] if d is None else many[j][i] for j, d in enumerate(in_dims)] for i in range(3)]
    expected = [attention(*call, causal=True, return_lse=True) for call in calls]
    same(found, tuple(map(torch.stack, zip(*expected, strict=True))))


def pulled_back(q, k, v):
    out, pull = vjp(lambda *x: attention(*x, causal=True), q[0], k[0], v[0])
    return vmap(pull)(torch.stack([out.cos(), out.sin()]))


def dual(tensors, dots):
    with forward_ad.dual_level():
        return tuple(
            forward_ad.unpack_dual(attention(*map(forward_ad.make_dual, tensors, dots), causal=True))
        )


def score(s, b, h, i, j):
    return s * 0.5 + (i - j)


TRANSFORMED = {
    "grad": lambda q, k, v: grad(loss, argnums=(0, 1, 2))(q[0], k[0], v[0]),
    "vmap of a pull": pulled_back,
    "vmap of grad": lambda *x: vmap(grad(loss, argnums=(0, 1, 2)))(*x),
    "grad of vmap": lambda *x: grad(lambda *y: vmap(loss)(*y).sum())(*x),
    "vmap of jvp": lambda *x: vmap(lambda *y: jvp(attention, y, y))(*x),
    "grad of jvp": lambda q, k, v: grad(
        lambda x: jvp(lambda y: attention(y, k[0], v[0]), (x,), (q[1],))[0].sin().sum()
    )(q[0]),
    "jvp": lambda *x: jvp(attention, tuple(y[0] for y in x), tuple(y[1] for y in x)),
    "dual level": lambda *x: dual([y[0] for y in x], [y[1] for y in x]),
    "functions": lambda *x: vmap(grad(lambda *y: loss(*y, score_mod=score)))(*x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_in_compiled_code(name):
    torch._dynamo.reset()
    run, given = TRANSFORMED[name], inputs(3)
    same(torch.compile(run, backend="aot_eager", fullgraph=True)(*given), run(*given))


ARGUMENTS = {
    "bias": {"bias": (2, 4, 5, 6)},
    "broadcast": {"bias": (1, 1, 5, 6), "alibi_slopes": (4,)},
    "slopes": {"alibi_slopes": (2, 4)},
    "sinks": {"sinks": (4,)},
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_of_each_call(name, batched):
    """vmap of grad by q and every other differentiable tensor; and grad of vmap, which adds the gradients up."""
    shapes = ARGUMENTS[name]
    q, k, v = inputs(3)
    extra = {key: randn(*(3,) * batched, *shape).abs() for key, shape in shapes.items()}
    by = [key for key in extra if key != "alibi_slopes"]

    def run(q, k, v, extra):
        return loss(q, k, v, window=(3, 2), **extra)

    def own(q, wanted, k, v, fixed):
        return run(q, k, v, fixed | wanted)

    wanted = {key: extra[key] for key in by}
    fixed = {key: extra[key] for key in extra if key not in by}
    at = 0 if batched else None
    found = vmap(grad(own, argnums=(0, 1)), (0, at, 0, 0, at))(q, wanted, k, v, fixed)

    def of_call(i):
        leaf = q[i].clone().requires_grad_()
        more = {key: (x[i] if batched else x).clone().requires_grad_(key in by) for key, x in extra.items()}
        return torch.autograd.grad(run(leaf, k[i], v[i], more), [leaf, *(more[key] for key in by)])

    expected = [torch.stack(x) for x in zip(*map(of_call, range(3)), strict=True)]
    same([found[0], *(found[1][key] for key in by)], expected)
    total = grad(lambda x: vmap(run, (0, 0, 0, at))(x, k, v, extra).sum())(q)
    same(total, expected[0])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout(randomness):
    q, k, v = (x[:1].expand(3, *x.shape[1:]).contiguous() for x in inputs(3))
    state = torch.tensor([3, 4])

    def run(*x):
        return attention(*x, dropout_p=0.5, rng_state=state)

    found = vmap(run, randomness=randomness)(q, k, v)
    same(found[0], run(q[0], k[0], v[0]))
    assert torch.equal(found[0], found[1]) == (randomness == "same")
    states = torch.tensor([[3, 4], [5, 6], [7, 8]])
    found = vmap(lambda *x: attention(*x[:3], dropout_p=0.5, rng_state=x[3]))(q, k, v, states)
    same(found[2], attention(q[2], k[2], v[2], dropout_p=0.5, rng_state=states[2]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_have_the_mask_of_their_forward(randomness):
    q, k, v = inputs(3)
    state, cotangent = torch.tensor([3, 4]), randn(3, 2, 5, 4, 4)

    def run(v):
        return attention(q[0], k[0], v, dropout_p=0.5, rng_state=state)

    out, pull = vjp(lambda v: vmap(run, randomness=randomness)(v), v)
    (found,) = pull(cotangent)
    same((found * v).sum(), (out * cotangent).sum())  # out is linear in v
    _, pull = vjp(run, v[0])
    (found,) = vmap(pull, randomness=randomness)(cotangent)
    same(found, torch.stack([pull(x)[0] for x in cotangent]))


def test_packed_sequences():
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = randn(3, 5, 4, 8), randn(3, 5, 2, 8), randn(3, 5, 2, 8)

    def run(*x):
        return attention_varlen(*x, ends, ends, 3, 3, causal=True)

    same(vmap(run)(q, k, v), torch.stack([run(*x) for x in zip(q, k, v, strict=True)]))


def test_the_softmax():
    found = vmap(lambda *x: attention(*x, return_softmax=True))(*inputs(3))
    assert [tuple(x.shape) for x in found] == [(3, 2, 5, 4, 4), (3, 2, 4, 5, 6)]
    same(found[1].sum(-1), torch.ones(3, 2, 4, 5, dtype=torch.float64))


WRONG = """
vmap(attention)(q, k[..., :7], v) -> ValueError: k has head_dim 7; accepted: 8
vmap(lambda *x: attention(*x, dropout_p=0.5, rng_state=torch.tensor([3, 4])))(q, k, v)
    -> ValueError: randomness "error" with dropout; accepted: "same" or
grad(lambda x: loss(q[0], k[0], v[0], alibi_slopes=x))(randn(4)) -> NotImplementedError: alibi_slopes
"""


@refusals.each(WRONG)
def test_wrong_calls(call, sentence):
    refusals.check(call, sentence, globals() | dict(zip("qkv", inputs(3), strict=True)))


@pytest.mark.parametrize("kind", ["plain", "bias", "sinks", "dropout", "packed"])
def test_a_batch_of_no_calls(kind):
    own, of_all = inputs(0), {}
    if kind in ("bias", "sinks"):
        of_all = {kind: randn(2, 4, 5, 6) if kind == "bias" else randn(4)}
    elif kind == "dropout":
        of_all = {"dropout_p": 0.5}
    call = loss
    if kind == "packed":
        starts = torch.tensor([0, 2, 2], dtype=torch.int32)
        own = tuple(x[:, 0] for x in own)

        def call(q, k, v):
            return attention_varlen(q, k, v, starts, starts, 2, 2).sum()

    found = vmap(lambda *x: call(*x, **of_all), randomness="different")(*own)
    assert found.shape == (0,)
    found = vmap(grad(lambda *x: call(*x, **of_all), argnums=(0, 1, 2)), randomness="different")(*own)
    assert [x.shape for x in found] == [x.shape for x in own]
