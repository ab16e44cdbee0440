"""Repeated calls of scaled_dot_product_attention: served calls, what observers of other calls see, and deactivation."""

import functools
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

from cute_attn import sdpa
from cute_attn.host import doors
from cute_attn.host import plans as known
from cute_attn.host.activation import Options
from cute_attn.sdpa import operators, overrides
from tests import machine, processes
from tests.cpu.test_sdpa_plans import Launchers
from tests.cpu.test_second import Dispatched

pytorchs = torch._C._nn.scaled_dot_product_attention
SERVING = functools.partial(overrides.serving, "CPU")


@pytest.fixture(autouse=True)
def active():
    """Activate the kernels for CPU tensors."""
    known.forget()
    activation = sdpa.Activation(Options(), "CPU")
    yield activation
    activation.remove()
    known.forget()


def inputs(seed=0, rows=9, dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, rows, dim, generator=generator).to(dtype) for _ in range(3)]


class Function:
    """The override, above a function that calls the flash operator, as PyTorch's does on a GPU.

    The operator launches by the reference. calls: how many came to that function.
    """

    def __init__(self, monkeypatch):
        self.calls, self.launchers = 0, Launchers(monkeypatch, prepared=True)
        self.run = overrides.repeating(self.stock, SERVING)

    def stock(
        self, keyset, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        self.calls += 1
        if attn_mask is not None or dropout_p or q.dtype == torch.float64:
            return pytorchs(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return operators.flash_forward(Options(), q, k, v, 0.0, is_causal, scale=scale)[0]

    def __call__(self, *tensors, **options):
        return self.run(None, *tensors, **options)

    def check(self, q, k, v, **options):
        """Check a call's result against PyTorch's in float64; returns whether the call reached PyTorch's function."""
        before = self.calls
        found = self(q, k, v, **options)
        wanted = pytorchs(q.double(), k.double(), v.double(), **options)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=2e-2)
        return self.calls > before


@pytest.fixture
def function(monkeypatch):
    return Function(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_a_repeated_call_is_served_past_pytorchs_function(options, function):
    assert [function.check(*inputs(seed), **options) for seed in range(4)] == [True, True, False, False]


def test_grouped_heads(function):
    q, k, v = inputs()
    came = [function.check(q, k[:, :2], v[:, :2], enable_gqa=True) for _ in range(3)]
    assert came == [True, True, False]
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[:, :2], v[:, :2])


def test_kernels_write_the_result_in_the_operators_layout(function):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    for _ in range(3):
        out = function(q, k, v)
    assert function.calls == 2 and out.data_ptr() == function.launchers.written[-1]
    assert out.stride() == operators.flash_forward(Options(), q, k, v)[0].stride() == q.stride()


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


STATES = {
    "deterministic": machine.deterministic,
    "dispatch_mode": Dispatched,
    "function_mode": FunctionMode,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("name", STATES)
def test_a_known_call_in_another_state_comes_to_the_function(name, function):
    for _ in range(3):
        function(*inputs())
    with STATES[name]():
        assert function.check(*inputs())
    assert not function.check(*inputs())


@pytest.mark.parametrize("kind", ["mask", "dropout", "gradient", "key", "unaligned", "negated"])
def test_calls_that_always_come_to_the_function(kind, function):
    q, k, v = inputs()
    options = {"attn_mask": torch.ones(9, 9, dtype=torch.bool)} if kind == "mask" else {}
    if kind in ("gradient", "key"):
        leaf = inputs()[0].requires_grad_()
        q, k = (leaf, k) if kind == "gradient" else (q, leaf)
    elif kind == "unaligned":
        for _ in range(3):
            function(q, k, v)
        q = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    elif kind == "negated":
        q = torch._neg_view(q)
    elif kind == "dropout":
        options = {"dropout_p": 0.5}
    before = function.calls
    for _ in range(3):
        function(q, k, v, **options)
    assert function.calls == before + 3
    if kind == "gradient":
        with torch.no_grad():
            assert [function.check(q, k, v) for _ in range(3)] == [True, True, False]


def test_a_call_that_comes_once_is_not_recorded(function):
    for rows in range(1, 5):
        assert function.check(*inputs(rows=rows))
    assert not [one for one in known._records.values() if one is not True]


def test_an_observer_sees_calls_at_the_dispatcher(monkeypatch, function):
    for _ in range(3):
        function(*inputs())
    monkeypatch.setattr(doors, "observer", lambda *arguments: None)
    assert function.check(*inputs())


def test_what_was_known_is_forgotten_when_it_ends(active, function):
    for _ in range(3):
        function(*inputs())
    active.remove()
    assert function.check(*inputs()) and SERVING() is None
    again = sdpa.Activation(Options(), "CPU")
    assert [function.check(*inputs()) for _ in range(3)] == [True, True, False]
    again.remove()
    assert not [key for key in known._guarded if again in key[0]]


def test_a_call_that_began_before_the_end_is_finished(active, function):
    """Another thread may end it between two steps of a call."""
    function(*inputs())
    stock = function.stock
    function.run = overrides.repeating(lambda *a, **k: active.remove() or stock(*a, **k), SERVING)
    assert function.check(*inputs()) and SERVING() is None


# ---- in the dispatcher ----


def check(q, k, v, **options):
    """Call PyTorch's function, through the override, and compare with the definition."""
    out = F.scaled_dot_product_attention(q, k, v, **options)
    wanted = pytorchs(q.double().requires_grad_(), k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), wanted.double(), rtol=0, atol=2e-2)
    return out


def test_transforms_tracers_and_fake_tensors_are_pytorchs():
    q, k, v = inputs()
    for _ in range(3):
        check(q, k, v)
    batched = torch.vmap(F.scaled_dot_product_attention)(*(x[None] for x in (q, k, v)))[0]
    torch.testing.assert_close(batched, check(q, k, v), rtol=0, atol=2e-2)
    learnt = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(pytorchs(learnt, k, v).sum(), learnt)
    found = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)
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


def test_tangents_reach_pytorch():
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        for _ in range(3):
            check(q, k, v)
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward AD"):
            F.scaled_dot_product_attention(dual, k, v)


def test_inference_mode_and_autocast():
    for state in (torch.inference_mode, lambda: torch.autocast("cpu", torch.float16)):
        given = inputs()
        for _ in range(3):
            with state():
                out = F.scaled_dot_product_attention(*given)
        assert out.dtype == (torch.bfloat16 if state is torch.inference_mode else torch.float16)


def test_biases_that_override_the_function():
    q, k, v = inputs()
    wanted = pytorchs(q, k, v, is_causal=True)
    for _ in range(3):
        found = F.scaled_dot_product_attention(q, k, v, bias.causal_lower_right(9, 9))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


# ---- what the override leaves as it is ----


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def recorded(kind):
    """A call as exports, compilers, tracers, modes and profilers record it."""
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
    if kind == "mode":
        with Dispatched() as mode:
            Attention()(q, k, v)
        return list(map(str, mode.called))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Attention()(q, k, v)
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


KINDS = ["export", "compile", "make_fx", "mode", "profile"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The same recordings from a process that has overridden nothing."""
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
    assert json.loads(json.dumps(recorded(kind))) == stock[kind]
    active.remove()
    assert json.loads(json.dumps(recorded(kind))) == stock[kind]
