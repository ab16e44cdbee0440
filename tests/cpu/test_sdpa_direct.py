"""scaled_dot_product_attention past the dispatcher: which calls, what the others see, and the way back."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_attn import sdpa
from cute_attn.sdpa import direct, operators, state
from cute_attn.sdpa.operators import Options
from tests.cpu.test_sdpa_plans import Machine

FLASH = ("_scaled_dot_product_flash_attention", "")


@pytest.fixture(autouse=True)
def replaced():
    """The function is replaced for CPU tensors, which the reference computes."""
    sdpa.served.clear()
    activation = sdpa.Activation(Options(direct=True), "CPU")
    yield activation
    activation.remove()


def inputs(seed=0, rows=9, dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, rows, dim, generator=generator).to(dtype) for _ in range(3)]


def check(q, k, v, **options):
    """A call's result is PyTorch's, to the precision of 16 bits."""
    out = F.scaled_dot_product_attention(q, k, v, **options)
    wanted = direct.pytorchs(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-2)
    return out


def calls():
    return sdpa.served[FLASH]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_a_repeated_call_is_served_past_pytorchs_function(options, monkeypatch):
    check(*inputs(), **options)
    assert calls() == 0
    stock = direct.pytorchs
    monkeypatch.setattr(direct, "pytorchs", None)
    found = F.scaled_dot_product_attention(*inputs(1), **options)
    assert calls() == 1
    monkeypatch.setattr(direct, "pytorchs", stock)
    torch.testing.assert_close(found, stock(*inputs(1), **options), rtol=0, atol=2e-2)


def test_grouped_heads():
    q, k, v = inputs()
    for _ in range(2):
        check(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert calls() == 1
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[:, :2], v[:, :2])


def test_kernels_write_the_result_in_the_operators_layout(monkeypatch):
    machine = Machine(monkeypatch)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    check(q, k, v)
    out = check(q, k, v)
    assert calls() == 1 and machine.launches == 1 and out.data_ptr() == machine.written[-1]
    assert out.stride() == operators.flash_forward(Options(), q, k, v)[0].stride() == q.stride()


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    """As code that overrides functions: it compares what is called with what the name means."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is F.scaled_dot_product_attention is direct.pytorchs
        return func(*args, **(kwargs or {}))


STATES = {
    "dispatch_mode": DispatchMode,
    "function_mode": FunctionMode,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("name", STATES)
def test_a_known_call_in_another_state_is_pytorchs(name):
    for _ in range(2):
        check(*inputs())
    given = inputs()
    for _ in range(2):
        with STATES[name]():
            out = F.scaled_dot_product_attention(*given)
        assert out.dtype == (torch.float16 if name == "autocast" else torch.bfloat16)
    assert calls() == 1
    check(*inputs())
    assert calls() == 2


@pytest.mark.parametrize(
    "kind", ["mask", "dropout", "gradient", "fp32", "dim", "unaligned", "negated", "twice"]
)
def test_calls_that_are_always_pytorchs(kind):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    q, k, v = inputs(dim=20 if kind == "dim" else 16, dtype=dtype)
    check(q, k, v)
    sdpa.served.clear()
    options = {"attn_mask": torch.ones(9, 9, dtype=torch.bool)} if kind == "mask" else {}
    if kind == "gradient":
        q = q.clone().requires_grad_()
    elif kind == "unaligned":
        q = torch.empty(q.numel() + 1, dtype=dtype)[1:].view(q.shape).copy_(q)
    elif kind == "negated":
        q = torch._neg_view(q)
    elif kind == "twice":
        q = k
    for _ in range(3):
        if kind == "dropout":
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        else:
            out = check(q, k, v, **options)
    assert not sdpa.served
    if kind == "gradient":
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
        with torch.no_grad():
            check(q, k, v)
            check(q, k, v)
        assert calls() == 1


def test_transforms_tracers_and_fake_tensors_are_pytorchs():
    q, k, v = inputs()
    for _ in range(2):
        check(q, k, v)
    batched = torch.vmap(F.scaled_dot_product_attention)(*(x[None] for x in (q, k, v)))[0]
    torch.testing.assert_close(batched, check(q, k, v), rtol=0, atol=2e-2)
    traced = torch.jit.trace(lambda *x: F.scaled_dot_product_attention(*x), (q, k, v), check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph)
    graph = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q)).graph
    assert direct.pytorchs in [node.target for node in graph.nodes]
    with FakeTensorMode() as mode:
        fake = F.scaled_dot_product_attention(*map(mode.from_tensor, (q, k, v)))
    assert fake.shape == q.shape


def test_tensors_that_are_more_than_memory_are_pytorchs():
    q, k, v = inputs()
    nested = [torch.nested.nested_tensor(list(x.unbind())) for x in (q, k, v)]
    for _ in range(2):
        found = torch.stack(F.scaled_dot_product_attention(*nested).unbind())
        torch.testing.assert_close(found, direct.pytorchs(q, k, v), rtol=0, atol=2e-2)
    assert not sdpa.served
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    assert not any(
        map(direct._is_ordinary, (*nested, zero, torch._neg_view(q), torch._to_functional_tensor(q)))
    )
    with torch.inference_mode():
        assert all(map(direct._is_ordinary, (q, q + 1)))


def test_tangents_reach_pytorch():
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        for _ in range(2):
            check(q, k, v)
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward AD"):
            F.scaled_dot_product_attention(dual, k, v)


def test_inference_mode():
    with torch.inference_mode():
        for _ in range(2):
            check(*inputs())
    assert calls() == 1


def test_compiled_and_scripted_code_calls_pytorchs():
    q, k, v = inputs()
    for _ in range(2):
        check(q, k, v)
    before, seen = calls(), []

    def backend(module, _):
        seen.extend(node.target for node in module.graph.nodes)
        return module

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.compiler.reset()
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), direct.pytorchs(q, k, v, is_causal=True))
    assert direct.pytorchs in seen and calls() == before
    with contextlib.suppress(DeprecationWarning):
        scripted = torch.jit.script(scripted_source)
        torch.testing.assert_close(scripted(q, k, v), direct.pytorchs(q, k, v))


def scripted_source(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return F.scaled_dot_product_attention(q, k, v)


def test_biases_that_override_the_function():
    q, k, v = inputs()
    wanted = direct.pytorchs(q, k, v, is_causal=True)
    for _ in range(2):
        found = F.scaled_dot_product_attention(q, k, v, bias.causal_lower_right(9, 9))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)
    assert F.scaled_dot_product_attention is direct.scaled_dot_product_attention


@pytest.mark.parametrize(
    "arguments", [{"dropout_p": None}, {"scale": []}, {"is_causal": []}, {"query": None}, {"value": "v"}]
)
def test_wrong_arguments_raise_what_pytorch_raises(arguments):
    given = dict(zip(("query", "key", "value"), inputs(), strict=True)) | arguments
    with pytest.raises(TypeError) as theirs:
        direct.pytorchs(**given)
    with pytest.raises(TypeError) as ours:
        F.scaled_dot_product_attention(**given)
    assert str(ours.value).partition(":")[0] == str(theirs.value).partition(":")[0]


def test_an_observer_sees_calls_at_the_dispatcher(monkeypatch):
    for _ in range(2):
        check(*inputs())
    monkeypatch.setattr(state, "observer", lambda *arguments: None)
    check(*inputs())
    assert calls() == 1


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(direct, "_MAX_KEYS", 3)
    for rows in range(1, 8):
        check(*inputs(rows=rows))
    assert len(direct._known) <= 3
    for gap in range(1, 12):
        q, k, v = inputs()
        wide = torch.zeros(2, 4, 9, 16 + 8 * gap, dtype=q.dtype)
        wide[..., :16] = q
        check(wide[..., :16], k, v)
    assert max(map(len, direct._known.values())) == direct._MAX_ALIKE


def test_the_name_is_pytorchs_again_afterwards(replaced):
    ours = F.scaled_dot_product_attention
    for _ in range(2):
        check(*inputs())
    replaced.remove()
    assert F.scaled_dot_product_attention is direct.pytorchs
    ours(*inputs())
    assert calls() == 1 and F.scaled_dot_product_attention is direct.pytorchs


def test_anothers_replacement_is_left_alone(replaced, monkeypatch):
    replaced.remove()
    monkeypatch.setattr(F, "scaled_dot_product_attention", len)
    activation = sdpa.Activation(Options(direct=True), "CPU")
    assert F.scaled_dot_product_attention is len
    activation.remove()
    assert F.scaled_dot_product_attention is len


def test_the_function_is_replaced_only_where_asked(replaced):
    replaced.remove()
    activation = sdpa.Activation(Options(), "CPU")
    assert F.scaled_dot_product_attention is direct.pytorchs
    activation.remove()
