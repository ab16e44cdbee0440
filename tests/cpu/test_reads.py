"""A function's reads have their current values in each call: nothing is kept that may have changed since."""

import gc
import operator
import sys
import threading
import types

import pytest
import torch

from cute_attn import attention, block_mask, check_epilogue, score_mod
from cute_attn.compiler import compiled
from cute_attn.epilogues import names
from cute_attn.epilogues.functions import known
from cute_attn.epilogues.functions.known import epilogue_of
from tests import refusals
from tests.fuzz import oracle

TABLE = torch.tensor([1.0, 1.0])
QUERIES, KEYS, VALUES = torch.randn(3, 1, 12, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()


def check(function):
    expected = oracle.batched(QUERIES, KEYS, VALUES, score_mod=function)[0]
    torch.testing.assert_close(attention(QUERIES, KEYS, VALUES, score_mod=function), expected)


MODULE = """
sys.modules["changing_settings"] = m = types.ModuleType("changing_settings")
def function(s, b, h, i, j):
    from changing_settings import n
    return s * n
"""
CLOSURE = """
def made():
    n = 1.0
    def change(x):
        nonlocal n
        n = x
    return lambda s, b, h, i, j: s * n, change
function, change = made()
"""
SCALED = """
class Scaled:
    def __call__(self, s, b, h, i, j): return s * self.factor
    def method(self, s, b, h, i, j): return s * self.factor + self.factor
scaled = Scaled()
"""
PARTIAL = """
import functools
values = [1.0]
function = functools.partial(lambda v, s, b, h, i, j: s * v[0], values)
"""
# definitions, a function of scores unless they define one, and code that sets the value it reads
SOURCES = {
    "global": ("", "s * n + i - j", "n = x"),
    "a helper's global": ("def helper(s): return s * n", "helper(s) + i", "n = x"),
    "globals()": ("", "s * globals()['n']", "n = x"),
    "closure": (CLOSURE, "", "change(x)"),
    "default": ("def function(s, b, h, i, j, n=1.0): return s * n", "", "function.__defaults__ = (x,)"),
    "keyword default": ("def function(s, b, h, i, j, *, n=1): return s * n", "", "function.__kwdefaults__ = {'n': x}"),
    "attribute of the function": ("", "s * function.factor", "function.factor = x"),
    "code": ("", "s * 2", "function.__code__ = eval(f'lambda s, b, h, i, j: s * {x!r}').__code__"),
    "module": ("m = types.ModuleType('settings')", "s * m.factor", "m.factor = x"),
    "import": (MODULE, "", "m.n = x"),
    "dict": ("values = {}", "s * values['factor']", "values['factor'] = x"),
    "nested list": ("values = [[1.0]]", "s * values[0][0]", "values[0][0] = x"),
    "class attribute": ("class Config: pass", "s * Config.factor", "Config.factor = x"),
    "object": (SCALED + "function = scaled", "", "scaled.factor = x"),
    "bound method": (SCALED + "function = scaled.method", "", "scaled.factor = x"),
    "partial": (PARTIAL, "", "values[0] = x"),
    "environment": ("import os", "s * float(os.environ['FACTOR'])", "os.environ['FACTOR'] = str(x)"),
    "attribute of a tensor": ("t = torch.ones(2)", "s * t.factor", "t.factor = x"),
}  # fmt: skip
SOURCES |= {
    read: ("t = torch.tensor([1.0, 1.0])", f"s * ({read})", "t.fill_(x)")
    for read in (
        *("t[0]", "t.max()", "t[0].item()", "float(t[1])", "sum(t.tolist())", "3.0 if t[0] > 2 else 1.0"),
        *("int(t.max())", "2.0 if (t > 2).any() else 1.0", "float(t.numpy()[0])", "float(str(t[0].item()))"),
        "2.0 if torch.equal(t, torch.ones(2)) else 1.0",
    )
}
ROWS = torch.randn(4, 12)
SOURCES |= {
    read: ("n = torch.tensor(0)", f"s * {read}", "n.fill_(int(x))")
    for read in (
        *("ROWS[n][j]", "ROWS[n:][0, j]", "ROWS.narrow(0, start=n, length=1)[0, j]", "ROWS[h, n:][j % 9]"),
        *("ROWS.view(2 * n + 2, -1)[h, j % 4]", "ROWS[h].view(n + 1, -1)[0, j % 3]"),
    )
}
SOURCES |= {
    read: ("t = torch.tensor([1.0, 1.0])", read, "t.fill_(x)")
    for read in (
        *(
            "torch.add(s, s * j, alpha=t[0])",
            "s * torch.full((), fill_value=t[0])",
            "s * torch.as_tensor(data=t[0])",
        ),
    )
}


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_each_source_of_values(source):
    setup, score, change = SOURCES[source]
    names = vars(sys.modules[__name__]) | {"__name__": "read_by_tests"}
    exec(setup, names)
    if score:
        names["function"] = eval(f"lambda s, b, h, i, j: {score}", names)
    for value in (2.0, 0.5, 3.0, 2.0):
        names["x"] = value
        exec(change, names)
        check(names["function"])


def test_another_tensor_of_a_new_closure_is_read():
    def bounded(n):
        return lambda s, b, h, i, j: torch.where(j < n.item(), s, -torch.inf)

    for n in (12, 3, 7):
        check(bounded(torch.tensor(n)))


def test_a_number_is_not_its_text():
    def scaled(factor):
        return lambda s, b, h, i, j: s if factor == "2.0" else s * factor

    for factor in (2.0, "2.0", 2.0):
        check(scaled(factor))


def test_a_block_mask_reads_its_function_anew():
    n = torch.tensor(500)
    q, k, v = torch.randn(3, 1, 512, 2, 16)
    for keys in (500, 100):
        n.fill_(keys)
        mask = block_mask(lambda b, h, i, j: (j < n.item()) & (i > -1), 1, None, 512, 512, device="cpu")
        torch.testing.assert_close(
            attention(q, k, v, block_mask=mask), attention(q, k[:, :keys], v[:, :keys])
        )


def test_torchs_default_dtype_and_grad_mode_are_read_in_each_call():
    def function(s, b, h, i, j):
        if torch.is_grad_enabled():
            return s * 2
        return s * (3.0 if torch.get_default_dtype() == torch.float64 else 1.0)

    check(function)
    with torch.no_grad():
        check(function)
        torch.set_default_dtype(torch.float64)
        try:
            check(function)
        finally:
            torch.set_default_dtype(torch.float32)


BYTES = torch.tensor([0, 1], dtype=torch.uint8)


@torch.library.custom_op("test_reads::square", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.floor(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Unchanged(Floor):
    @staticmethod
    def forward(ctx, x):
        return x


KEPT = []


def keeps(s, b, h, i, j):
    KEPT.append(s)
    return s


def without_gradients(s, b, h, i, j):
    with torch.inference_mode():
        return s * 2


def catches(s, b, h, i, j):
    try:
        return torch.special.i0(s)
    except TypeError:
        return s


def compares(s, b, h, i, j):
    return s * 2 if s != None and not s == "text" else s  # noqa: E711, SIM201


REFUSED = """
lambda s: s -> TypeError: score_mod takes (s); accepted: (score, batch, head, query, key)
catches -> TypeError: uses special_i0
lambda s, *_: torch.ops.test_reads.square(s) -> TypeError: uses test_reads::square
lambda s, *_: tripled(s) -> TypeError: uses test_reads::square
lambda s, *_: Floor.apply(s) -> TypeError: a torch.autograd.Function, whose backward would be ignored
lambda s, *_: Unchanged.apply(s) -> TypeError: a torch.autograd.Function, whose backward would be ignored
without_gradients -> TypeError: something else than torch.no_grad has turned gradients off
lambda s, *_: s * torch.rand(()) -> TypeError: draws random numbers by rand
lambda s, *_: s * torch.bernoulli(TABLE)[0] -> TypeError: draws random numbers by bernoulli
lambda s, *_: torch.nn.functional.dropout(s) -> TypeError: uses dropout
lambda s, *_: s if s.requires_grad else s * 2 -> TypeError: uses requires_grad
lambda s, *_: s.grad_fn -> TypeError: uses grad_fn
lambda s, *_: s.type() and s -> TypeError: uses type with arguments that are not traced
lambda s, b, h, i, j: s + i.mul_(0.5) -> TypeError: writes a float in place of an integer by mul_
lambda s, *_: torch.nn.functional.relu(s.detach(), inplace=True) + s -> TypeError: changes a value in place by relu
lambda s, *_: s.detach().add_(1) + s -> TypeError: changes a value in place by add_
lambda s, b, h, i, j: s + TABLE[BYTES[h]] -> TypeError: indexes a tensor by a torch.uint8
lambda s, *_: s * (TABLE.sum() * s).sum() * TABLE -> TypeError: uses sum
"""


@refusals.each(REFUSED)
def test_refused(call, sentence):
    refusals.check(f"attention(QUERIES, KEYS, VALUES, score_mod={call})", sentence, globals())


def test_a_traced_value_is_of_one_trace():
    attention(QUERIES, KEYS, VALUES, score_mod=keeps)
    with pytest.raises(TypeError, match="uses a traced value of another call"):
        attention(QUERIES, KEYS, VALUES, score_mod=lambda s, *_: s + KEPT[0])
    with pytest.raises(
        RuntimeError, match="add uses a traced value after the end of score_mod, which kept it"
    ):
        KEPT[0] + 1


def chained(count):
    def function(s, b, h, i, j):
        for n in range(count):
            s = torch.tanh(s) if n % 2 else s + i * 0.001
        return s

    return function


def test_long_chains_are_traced_or_refused():
    check(chained(200))
    q = QUERIES.clone().requires_grad_()
    attention(q, KEYS, VALUES, score_mod=chained(200)).sum().backward()
    assert q.grad.isfinite().all()
    with pytest.raises(TypeError, match="score_mod chains too many operations; accepted: up to 256"):
        attention(QUERIES, KEYS, VALUES, score_mod=chained(400))


def doubled(x):
    getattr(
        x, str(x.dtype).removeprefix("torch.").replace("float16", "half").replace("float32", "float")
    )().mul_(2)
    return x


def as_number(x):
    return x * 2 if isinstance(x, torch.Tensor) else x * 0


@pytest.mark.parametrize(
    "function",
    [
        lambda s, *_: torch.nn.functional.relu(s, inplace=True) * 0 + s,
        lambda s, *_: torch.nn.functional.hardtanh(s * 3, -0.1, 0.1, inplace=True) + s,
        lambda s, *_: s.to(s.dtype, copy=True).mul_(3) + s.to(torch.float32, False, True).mul_(2) + s,
        lambda s, *_: torch.as_tensor(s).mul_(3) * 0 + s,
        lambda s, *_: s.conj().mul_(3) * 0 + s,
        lambda s, *_: doubled(s.half()) + doubled((s * 2).float()),
        lambda s, *_: as_number(s),
        compares,
        lambda s, *_: s * 2 if torch.is_tensor(s) else s * 0,
        lambda s, *_: s * 0 if s.is_cuda else s * 2,
        lambda s, *_: s * 2 if hasattr(s, "clamp") and not hasattr(s, "clmap") else s,
        lambda s, *_: s * 2 if s.dim() == s.ndim == 0 and s.shape == () and s.is_floating_point() else s,
        lambda s, b, h, i, j: s + TABLE[h] if isinstance(TABLE[h], torch.Tensor) else s,
        lambda s, *_: torch.ops.aten.tanh(s) + torch.ops.aten.mul.Scalar(s, 2.0),
        lambda s, *_: operator.mul(s, 2) - operator.neg(s),
    ],
)
def test_a_traced_value_is_a_tensor(function):
    check(function)


def gradients(function, *tensors):
    q = QUERIES.double().requires_grad_()
    k, v = KEYS.double(), VALUES.double()
    return torch.autograd.grad(attention(q, k, v, score_mod=function).square().sum(), (q, *tensors))


def dense_gradients(function, *tensors):
    q = QUERIES.double().requires_grad_()
    scores = function(torch.einsum("bihd,bjhd->bhij", q, KEYS.double()) / 4, 0, 0, 0, 0)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), VALUES.double())
    return torch.autograd.grad(out.square().sum(), (q, *tensors))


def in_place(s, b, h, i, j):
    same = s.contiguous().float() if s.dtype == torch.float32 else s
    other = s.clone()
    s += other.tanh_()
    s.mul_(2).clamp_(-1, 1.5)
    return same + s - other


def gated(s, b, h, i, j):
    with torch.no_grad():
        gate = torch.sigmoid(s)
    return s * gate


LEARNED = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)


def learned_gate(s, *_):
    with torch.no_grad():
        gate = torch.sigmoid(s * LEARNED)
    with torch.enable_grad():
        return s * gate + LEARNED * s.tanh()


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (gated, ()),
        (lambda s, *_: s * s.detach(), ()),
        (lambda s, *_: s * s.data + torch.tanh(s), ()),
        (lambda s, *_: s + torch.no_grad()(torch.tanh)(s), ()),
        (in_place, ()),
        (learned_gate, (LEARNED,)),
        (lambda s, *_: s * LEARNED.detach() + LEARNED * s, (LEARNED,)),
    ],
)
def test_what_is_detached_has_no_derivative(function, tensors):
    found, wanted = gradients(function, *tensors), dense_gradients(function, *tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def by_floor(s, b, h, i, j):
    return Floor.apply(s)


def test_a_trace_without_gradients_serves_calls_with_some():
    function = learned_gate
    known._known.clear()
    with torch.no_grad():
        attention(QUERIES.double(), KEYS.double(), VALUES.double(), score_mod=function)
    torch.testing.assert_close(gradients(function, LEARNED), dense_gradients(function, LEARNED))
    with torch.no_grad():  # without gradients only a Function's forward matters
        found = attention(QUERIES, KEYS, VALUES, score_mod=by_floor)
    expected = oracle.batched(QUERIES, KEYS, VALUES, score_mod=lambda s, *_: torch.floor(s))[0]
    torch.testing.assert_close(found, expected)


def test_detached_values_are_checked_on_the_device():
    assert check_epilogue(gated).passed


# ---- registered functions ----


def test_a_registered_function_refuses_a_value_that_changed():
    factor = [2.0]

    @score_mod("scaled_by_a_list")
    def scaled(score, b, h, q_idx, kv_idx):
        return score * factor[0]

    attention(QUERIES, KEYS, VALUES, epilogues=("scaled_by_a_list",))
    factor[0] = 3.0
    with pytest.raises(ValueError, match="'scaled_by_a_list' refers to a value that has changed since"):
        attention(QUERIES, KEYS, VALUES, epilogues=("scaled_by_a_list",))
    with pytest.raises(TypeError, match="refers to a tensor that is none of its arguments"):
        score_mod("scaled_by_an_item")(lambda s, b, h, q, k: s * TABLE[0].item())


# ---- how long an epilogue lives ----


def test_functions_are_let_go():
    def annealed(factor):
        return lambda s, b, h, i, j: s * factor

    gc.collect()
    before = len(names._TRACED)
    for n in range(3 * known._MOST):
        epilogue_of(annealed(1.5 + n), None)
    assert len(names._TRACED) <= before + known._MOST and len(known._known) <= known._MOST
    assert len({epilogue_of(annealed(2.5), None)[0] for _ in range(10)}) == 1


def test_a_gradient_keeps_its_function():
    q = QUERIES.double().requires_grad_()
    factor = torch.tensor(2.0, dtype=torch.float64)
    out = attention(q, KEYS.double(), VALUES.double(), score_mod=lambda s, *_: s * factor)
    for n in range(2 * known._MOST):
        epilogue_of(lambda s, b, h, i, j, n=n: s * (n + 2.5), None)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.isfinite().all()


def test_what_graphs_name_is_held():
    name, _ = epilogue_of(lambda s, *_: s * 7.25, None)
    known.hold(name)
    known._known.clear()
    gc.collect()
    assert names.user_epilogue(name).name == name


class Kernel:
    def __init__(self, name):
        self.traits = types.SimpleNamespace(epilogues=(name,))


def test_kernels_and_plans_go_with_their_function(monkeypatch):
    kernels = {"a": Kernel("traced_gone"), "b": Kernel("scaled_by_a_list"), "c": Kernel("traced_gone")}
    monkeypatch.setattr(compiled, "_kernels", kernels)
    monkeypatch.setattr(compiled, "_requests", {})
    name, _ = epilogue_of(lambda s, *_: s * 9.25, None)
    kernels["d"] = Kernel(name)
    compiled._let_go(kernels["b"].traits)
    assert len(kernels) == 4  # nothing is asked where no traced function's kernel comes
    compiled._let_go(kernels["d"].traits)
    assert set(kernels) == {"b", "d"}


def test_functions_come_from_many_threads(monkeypatch):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    table, errors = torch.randn(4, 64), []

    def work(number):
        try:
            for n in range(100):
                shaped = torch.empty(4, 5 + number * 1000 + n)
                epilogue_of(lambda s, b, h, i, j, x=shaped: s + x[h, i] * table[h, 0], None)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(known, "_MOST", 16)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and len(known._known) <= 16


def test_functions_of_no_module_and_lists_that_hold_themselves():
    exec("def f(s, b, h, i, j): return s * 2", found := {})
    found["f"].__module__ = None
    check(found["f"])
    values = [2.0]
    values.append(values)
    check(lambda s, b, h, i, j: s * values[1][1][0])
