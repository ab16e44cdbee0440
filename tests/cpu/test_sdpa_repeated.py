"""Repeated calls of scaled_dot_product_attention: which are served, what the others see, and the way back."""

import json

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_attn import sdpa
from cute_attn.host import doors
from cute_attn.host import plans as known
from cute_attn.host.activation import Options
from cute_attn.sdpa import operators, repeated
from tests import processes
from tests.cpu.test_sdpa_plans import Launchers

FLASH = ("_scaled_dot_product_flash_attention", "")


@pytest.fixture(autouse=True)
def active():
    """For CPU tensors, which the reference computes."""
    sdpa.served.clear()
    known.forget()
    activation = sdpa.Activation(Options(), "CPU")
    yield activation
    activation.remove()
    known.forget()


pytorchs = torch._C._nn.scaled_dot_product_attention


def inputs(seed=0, rows=9, dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, rows, dim, generator=generator).to(dtype) for _ in range(3)]


def check(q, k, v, **options):
    """A call's result is PyTorch's of doubles, which require a gradient so that none is a repeated call."""
    out = F.scaled_dot_product_attention(q, k, v, **options)
    wanted = pytorchs(q.double().requires_grad_(), k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), wanted.double(), rtol=0, atol=2e-2)
    return out


def calls():
    return sdpa.served[FLASH]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_a_repeated_call_is_served_past_pytorchs_function(options, monkeypatch):
    for _ in range(2):
        check(*inputs(), **options)
    assert calls() == 0
    wanted = pytorchs(*(x.double() for x in inputs(1)), **options)
    monkeypatch.setattr(repeated, "learn", None)
    found = F.scaled_dot_product_attention(*inputs(1), **options)
    assert calls() == 1
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-2)


def test_grouped_heads():
    q, k, v = inputs()
    for _ in range(3):
        check(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert calls() == 1
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[:, :2], v[:, :2])


@pytest.mark.parametrize("prepared", [False, True])
def test_kernels_write_the_result_in_the_operators_layout(prepared, monkeypatch):
    machine = Launchers(monkeypatch, prepared)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    for _ in range(2):
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
        assert func is F.scaled_dot_product_attention is pytorchs
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
    for _ in range(3):
        check(*inputs())
    given = inputs()
    for _ in range(3):
        with STATES[name]():
            out = F.scaled_dot_product_attention(*given)
        assert out.dtype == (torch.float16 if name == "autocast" else torch.bfloat16)
    # The override lies below autocast, which has cast its arguments, and sees no function mode.
    more = {"autocast": 2, "function_mode": 3}.get(name, 0)
    assert calls() == 1 + more
    check(*inputs())
    assert calls() == 2 + more


@pytest.mark.parametrize(
    "kind", ["mask", "dropout", "gradient", "key", "fp32", "dim", "unaligned", "negated"]
)
def test_calls_that_are_always_pytorchs(kind):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    q, k, v = inputs(dim=20 if kind == "dim" else 16, dtype=dtype)
    check(q, k, v)
    sdpa.served.clear()
    options = {"attn_mask": torch.ones(9, 9, dtype=torch.bool)} if kind == "mask" else {}
    if kind == "gradient":
        q = q.clone().requires_grad_()
    elif kind == "key":
        k = k.clone().requires_grad_()
    elif kind == "unaligned":
        q = torch.empty(q.numel() + 1, dtype=dtype)[1:].view(q.shape).copy_(q)
    elif kind == "negated":
        q = torch._neg_view(q)
    for _ in range(3):
        if kind == "dropout":
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        else:
            out = check(q, k, v, **options)
    assert not sdpa.served
    if kind == "gradient":
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
        with torch.no_grad():
            for _ in range(3):
                check(q, k, v)
        assert calls() == 2


def learnt():
    return [plan for plan in known._plans.values() if isinstance(plan, repeated.Known)]


def test_a_call_that_comes_once_is_not_learnt(monkeypatch):
    monkeypatch.setattr(repeated.plans, "keep", None)
    for rows in range(1, 5):
        check(*inputs(rows=rows))
    assert not learnt()


def test_an_unaligned_call_is_not_learnt():
    q, k, v = inputs()
    unaligned = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    for _ in range(3):
        check(unaligned, k, v)
    assert not learnt()


def test_transforms_tracers_and_fake_tensors_are_pytorchs():
    q, k, v = inputs()
    for _ in range(3):
        check(q, k, v)
    batched = torch.vmap(F.scaled_dot_product_attention)(*(x[None] for x in (q, k, v)))[0]
    torch.testing.assert_close(batched, check(q, k, v), rtol=0, atol=2e-2)
    traced = torch.jit.trace(lambda *x: F.scaled_dot_product_attention(*x), (q, k, v), check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph)
    graph = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q)).graph
    assert pytorchs in [node.target for node in graph.nodes]
    with FakeTensorMode() as mode:
        fake = F.scaled_dot_product_attention(*map(mode.from_tensor, (q, k, v)))
    assert fake.shape == q.shape


def test_tensors_that_are_more_than_memory_are_pytorchs():
    q, k, v = inputs()
    nested = [torch.nested.nested_tensor(list(x.unbind())) for x in (q, k, v)]
    wanted = pytorchs(*(x.double() for x in (q, k, v)))
    for _ in range(3):
        found = torch.stack(F.scaled_dot_product_attention(*nested).unbind())
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-2)
    assert not sdpa.served
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    assert not any(
        map(repeated._is_ordinary, (*nested, zero, torch._neg_view(q), torch._to_functional_tensor(q)))
    )
    with torch.inference_mode():
        assert all(map(repeated._is_ordinary, (q, q + 1)))


def test_tangents_reach_pytorch():
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        for _ in range(3):
            check(q, k, v)
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward AD"):
            F.scaled_dot_product_attention(dual, k, v)


def test_inference_mode():
    """It calls no override above autograd."""
    with torch.inference_mode():
        for _ in range(3):
            check(*inputs())
    assert calls() == 0


def test_biases_that_override_the_function():
    q, k, v = inputs()
    wanted = pytorchs(q, k, v, is_causal=True)
    for _ in range(3):
        found = F.scaled_dot_product_attention(q, k, v, bias.causal_lower_right(9, 9))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


def test_an_observer_sees_calls_at_the_dispatcher(monkeypatch):
    for _ in range(3):
        check(*inputs())
    monkeypatch.setattr(doors, "observer", lambda *arguments: None)
    check(*inputs())
    assert calls() == 1


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(repeated, "_MAX_KEYS", 3)
    monkeypatch.setattr(known, "_MAX_PLANS", 3)
    for rows in range(1, 8):
        for _ in range(2):
            check(*inputs(rows=rows))
    assert 0 < len(learnt()) <= 3 and len(repeated.current().seen) <= 3


# ---- what the override leaves as it is ----


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def recorded(kind):
    """What exports, compilers, tracers, modes and profilers see of a call."""
    q, k, v = inputs()
    if kind == "export":
        program = torch.export.export(Attention(), (q, k, v))
        return targets(program.graph), targets(program.run_decompositions().graph)
    if kind == "compile":
        graphs = []

        def keep(module, _):
            graphs.append(targets(module.graph))
            return make_boxed_func(module.forward)

        torch.compiler.reset()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        compiled = torch.compile(Attention(), backend=aot_autograd(fw_compiler=keep))
        compiled(q, k, v), compiled(*leaves).sum().backward()
        return graphs
    if kind == "make_fx":
        return [targets(make_fx(Attention(), pre_dispatch=early)(q, k, v).graph) for early in (False, True)]
    if kind == "vmap":
        batch = [x.float()[None] for x in (q, k, v)]
        return [torch.vmap(Attention())(*batch), torch.func.grad(lambda q: Attention()(q, k, v).sum())(q)]
    if kind == "mode":
        seen = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Mode():
            Attention()(q, k, v)
        return seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Attention()(q, k, v)
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


KINDS = ["export", "compile", "make_fx", "mode", "profile"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """What is recorded in a process that has overridden nothing."""
    script = tmp_path_factory.mktemp("stock") / "record.py"
    script.write_text(
        f"import json\nfrom tests.cpu.test_sdpa_repeated import *\nprint(json.dumps([*map(recorded, {KINDS})]))\n"
    )
    done = processes.run(str(script))
    assert done.returncode == 0, done.stderr
    return dict(zip(KINDS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_see_of_a_call_stays(kind, active, stock):
    for _ in range(3):
        check(*inputs(), is_causal=True)
    assert calls() == 1
    assert json.loads(json.dumps(recorded(kind))) == stock[kind]
    assert calls() == 1 + (kind == "make_fx")  # once it has recorded a composite operator it calls it
    active.remove()
    assert json.loads(json.dumps(recorded(kind))) == stock[kind]


def test_transforms_of_a_call_stay(active):
    ours = recorded("vmap")
    active.remove()
    torch.testing.assert_close(ours, recorded("vmap"), rtol=0, atol=2e-2)


def test_what_was_known_is_forgotten_when_it_ends(active):
    for _ in range(3):
        check(*inputs())
    active.remove()
    check(*inputs())
    assert calls() == 1 and repeated.current() is None
    again = sdpa.Activation(Options(), "CPU")
    check(*inputs())
    assert calls() == 1
    again.remove()


def test_a_call_that_began_before_the_end_is_finished(active, monkeypatch):
    """Another thread may end it between two steps of a call."""
    check(*inputs())
    stock = torch._fused_sdp_choice
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **k: active.remove() or stock(*a, **k))
    check(*inputs())
    assert repeated.current() is None


def test_an_activation_that_ended_leaves_nothing(active):
    for _ in range(3):
        activation = sdpa.Activation(Options(), "CPU")
        for _ in range(3):
            check(*inputs())
        activation.remove()
        assert not learnt() and not [key for key in known._guarded if repeated.Memory in map(type, key[0])]


def test_functional_tensors_have_no_plan():
    for _ in range(3):
        check(*inputs())
    wrapped = tuple(map(torch._to_functional_tensor, inputs()))
    for key, *_ in list(known._plans):
        assert known.find(key, wrapped) is None
