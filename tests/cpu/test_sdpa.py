"""PyTorch's attention operators on the kernels: which calls are served, layouts, values, and the way back."""

import functools
import inspect
import math
import random
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from cute_attn import reference, sdpa
from cute_attn.compiler import registry
from cute_attn.host import doors
from cute_attn.host import plans as known
from cute_attn.host.activation import Options
from cute_attn.host.call import NUM_TENSORS, Call
from cute_attn.sdpa import calls, operators, overrides, slower
from cute_attn.sdpa.calls import request_of, why_not, why_not_drawn
from cute_attn.sdpa.operators import OPERATORS, STATES
from tests import machine, processes, refusals
from tests.cpu.test_sdpa_plans import saved_of
from tests.tensors import randn

BF16 = torch.bfloat16
aten = torch.ops.aten
NAMES = [name for backend in OPERATORS.values() for name in backend]
with_pages = pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="flash attention has neither pages nor a given output in this torch",
)


def serving():
    """The operators that are served on a GPU, with the options."""
    return {name: one.options for name, one in overrides.overrides("CUDA").items() if one.options is not None}


@pytest.fixture
def on_cpu():
    """The operators are served for CPU tensors, which the reference computes."""
    sdpa.served.clear()
    activation = sdpa.Activation(Options(), "CPU")
    yield activation
    activation.remove()


# ---- which calls are served: a function of metadata ----

META = {
    "dtype": (BF16, torch.float16, torch.float32),
    "shape": (  # batch, heads, kv heads, rows, keys, head dim, head dim of v
        (2, 4, 4, 128, 128, 64, 64),
        (1, 8, 2, 100, 333, 128, 128),
        (2, 4, 4, 65, 64, 96, 96),
        (2, 4, 2, 64, 64, 64, 128),
        (1, 1, 1, 16, 16, 12, 12),
        (1, 2, 2, 16, 16, 512, 512),
        (1, 3, 2, 16, 16, 64, 64),
        (0, 2, 2, 16, 16, 64, 64),
    ),
    "bias": ("", "full", "expanded", "fp32"),
    "causal": (False, True),
    "dropout_p": (0.0, 0.25, 1.0),
    "scale": (None, 0.5, -1.0),
    "order": ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)),  # order of dimensions in memory
    "rng": ("ours", "torch"),
    "target": ("sm90", "sm80", "sm86", ""),
}


def sampled(count, seed=0):
    """Combinations of META."""
    draw = random.Random(seed)
    return [{name: draw.choice(values) for name, values in META.items()} for _ in range(count)]


def in_order(shape, order, dtype):
    """A meta tensor whose dimensions have that order in memory."""
    stored = torch.empty([shape[i] for i in order], dtype=dtype, device="meta")
    return stored.permute([order.index(i) for i in range(4)])


def tensors_of(meta, order):
    """query, key, value and attn_bias."""
    batch, heads, heads_kv, rows, keys, dim, dim_v = meta["shape"]
    shapes = ((batch, heads, rows, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim_v))
    bias = None
    if meta["bias"]:
        dtype = torch.float32 if meta["bias"] == "fp32" else meta["dtype"]
        bias = torch.empty(1, 1, 1, keys, dtype=dtype, device="meta").expand(batch, heads, rows, keys)
        bias = bias if meta["bias"] == "expanded" else bias.contiguous()
    return *(in_order(shape, order, meta["dtype"]) for shape in shapes), bias


def both_calls(backend, meta, monkeypatch):
    """The metadata that a forward and its backward, whose saved tensors have other strides, decide by."""
    seen = []
    known.forget()
    monkeypatch.setattr(operators, "why_not", lambda call: seen.append(call) or "recorded")
    monkeypatch.setattr(calls, "target_of", lambda device: meta["target"])
    monkeypatch.setattr(operators, "_is_capturing", lambda device: True)
    options = Options(rng=meta["rng"])
    forward, backward = (function for name, function in OPERATORS[backend].items() if "scaled" in name)
    query, key, value, bias = tensors_of(meta, meta["order"])
    own = {"attn_bias": None if backend == "flash" else bias, "compute_log_sumexp": True}
    common = {name: meta[name] for name in ("dropout_p", "scale")} | {"is_causal": meta["causal"]}
    saved = tensors_of(meta, (0, 1, 2, 3))
    lse = torch.empty(query.shape[:3], device="meta")
    own |= {"grad_out": saved[0], "out": saved[0], "logsumexp": lse, "grad_input_mask": [True] * 4}
    seed = torch.empty((), dtype=torch.uint64, device="meta")
    own |= {"philox_seed": seed, "philox_offset": seed, "cum_seq_q": None, "cum_seq_k": None}
    own |= {"max_q": query.shape[2], "max_k": key.shape[2]}
    for function, (q, k, v) in ((forward, (query, key, value)), (backward, saved[:3])):
        names = inspect.signature(function).parameters
        given = {"query": q, "key": k, "value": v} | common | own
        function(options, **{name: x for name, x in given.items() if name in names})
    monkeypatch.undo()
    known.forget()
    return [call._replace(devices=frozenset([torch.device("cuda", 0)])) for call in seen]


def described(request):
    """A request without data and strides."""
    tensors, options = request.call.metadata()
    return request._replace(call=options), [None if x is None else (x.shape, x.dtype) for x in tensors]


@pytest.mark.parametrize("backend", OPERATORS)
def test_a_forward_and_its_backward_decide_alike(backend, monkeypatch):
    decisions = []
    for meta in sampled(200):
        forward, backward = both_calls(backend, meta, monkeypatch)
        assert described(forward) == described(backward)
        decisions.append(why_not(forward))
        assert decisions[-1] is None or ("\n" not in decisions[-1] and len(decisions[-1]) > 20)
    assert {None} < set(decisions)


def test_a_served_call_has_both_kernels_and_passes_all_checks(monkeypatch):
    count = 0
    for meta in sampled(150, seed=1):
        for backend in OPERATORS:
            call, _ = both_calls(backend, meta, monkeypatch)
            if why_not(call) is not None:
                continue
            count += 1
            for op in ("forward", "backward"):
                archs = [arch for arch, targets in registry.RUNS_ON.items() if call.target in targets]
                assert any(
                    registry.lookup(call.call.traits(arch, op=op), None, call.target) for arch in archs
                )
    assert count > 30


def good(**changes):
    """Arguments of ``request_of`` for a call that is served, with changes."""
    shapes = {"q": (2, 128, 4, 64), "k": (2, 128, 2, 64), "v": (2, 128, 2, 64)}
    inputs = {name: torch.empty(shape, dtype=BF16, device="cpu") for name, shape in shapes.items()}
    arguments = {"causal": False, "dropout_p": 0.0, "scale": None}
    inputs |= {name: changes.pop(name) for name in list(changes) if name in Call._fields[:NUM_TENSORS]}
    return inputs, arguments | changes


def empty(*shape, dtype=BF16, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


CU = torch.tensor([0, 5, 16], dtype=torch.int32)
DECLINED = """
declined("flash", **{name: empty(2, 8, 4, 64, dtype=torch.float64) for name in "qkv"}) -> ValueError: q has dtype
declined("flash", **{name: empty(2, 8, 4, 584) for name in "qkv"}) -> ValueError: q has head_dim 584; accepted
declined("efficient", **{name: empty(2, 8, 4, 20) for name in "qkv"}) -> ValueError: q has head_dim 20; accepted: mult
declined("flash", v=empty(2, 128, 2, 32)) -> ValueError: v has head_dim 32; accepted by flash attention: 64
declined("flash", **{name: empty(2, 8, 4, 0) for name in "qkv"}) -> ValueError: q and v have head dims 0 and 0; acc
declined("flash", q=empty(2, 128, 4, 64, device="meta")) -> ValueError: tensors are on cpu, meta; accepted: one
declined("flash", dropout_p=1.0) -> ValueError: dropout_p is 1.0
declined("efficient", q=empty(2, 1, 4, 64), bias=empty(2, 4, 1, 128))
    -> ValueError: PyTorch's kernel is faster for one query with a mask: 12.0 ms, here 19.9 ms (gpt-fast
declined("cudnn", **{name: empty(2, 128, 4, 72) for name in "qkv"})
    -> ValueError: PyTorch's kernel is faster for inference with head dim 72 under cuDNN: 19.3 ms, here 21.1 ms
declined("flash", cu_seqlens_q=CU) -> ValueError: one of cum_seq_q and cum_seq_k is missing
declined("flash", **{name: empty(16, 4, 64) for name in "qkv"} | {"cu_seqlens_q": CU, "cu_seqlens_k": CU.long()})
    -> ValueError: cu_seqlens_k has dtype torch.int64
"""


def declined(backend, **changes):
    """Raises why the operator does not serve the good call with these changes."""
    inputs, arguments = good(**changes)
    if "cu_seqlens_q" in inputs:
        arguments |= {"longest": (11, 11)}
    raise ValueError(why_not(request_of(backend, Call(**inputs), **arguments)))


@refusals.each(DECLINED)
def test_declined(call, sentence):
    refusals.check(call, sentence, globals())


MASKED = {"q": empty(2, slower.MASKED_QUERIES + 1, 4, 64), "bias": empty(2, 4, 2, 128)}
OF_72 = {name: empty(2, 128, 4, 72) for name in "qkv"}
SERVED = [(backend, {}, {}) for backend in OPERATORS]
SERVED += [("efficient", MASKED, {}), ("cudnn", MASKED, {}), ("flash", OF_72, {}), ("efficient", OF_72, {})]
SERVED += [("cudnn", OF_72, {"target": "sm80"}), ("cudnn", OF_72, {"learns": True})]


@pytest.mark.parametrize(("backend", "tensors", "changes"), SERVED)
def test_served(backend, tensors, changes):
    """This includes call classes in which PyTorch serves only some calls faster."""
    inputs, arguments = good(**tensors)
    call = request_of(backend, Call(**inputs), **arguments)._replace(**changes)
    assert why_not(call) is None
    assert "no kernel is built for this GPU" in why_not(call._replace(target=""))


@pytest.mark.parametrize("backend", OPERATORS)
def test_whose_masks_are_drawn_here(backend):
    inputs, arguments = good(dropout_p=0.5)
    call = request_of(backend, Call(**inputs), **arguments)
    assert why_not(call) is None
    assert why_not_drawn(call, "ours", capturing=True) is None
    assert "rng='torch' cannot advance" in why_not_drawn(call, "torch", capturing=True) or backend == "cudnn"
    outside = why_not_drawn(call, "torch", capturing=False)
    if backend == "cudnn":
        assert outside.startswith("rng is 'torch' with dropout; accepted under cuDNN")
    else:
        assert outside is None
    inputs, arguments = good()
    assert why_not_drawn(request_of(backend, Call(**inputs), **arguments), "torch", capturing=True) is None


def test_a_capture_decides_no_backward(monkeypatch):
    """A forward before a CUDA graph, under rng="torch", and its backward inside."""
    monkeypatch.setattr(operators, "_generator", lambda device: machine.Generator(5, 0))
    q = randn(1, 2, 8, 16, dtype=BF16)
    options = Options(rng="torch", unsupported="error")
    given = (q, q, q, 0.5)
    outputs = operators.flash_forward(options, *given)
    monkeypatch.setattr(operators, "_is_capturing", lambda device: True)
    assert "cannot advance" in operators.flash_forward(options, *given)
    assert not isinstance(
        operators.flash_backward(options, *saved_of("_scaled_dot_product_flash_attention", given, outputs)),
        str,
    )


def test_reason_takes_the_arguments_of_scaled_dot_product_attention():
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, 128, 60, device="cuda", dtype=BF16) for heads in (4, 2))
        mask = torch.empty(128, 128, device="cuda", dtype=torch.bool)
        q3 = torch.empty(2, 4, 128, device="cuda", dtype=BF16)
        q64, k64 = (torch.empty(2, 4, rows, 64, device="cuda", dtype=BF16) for rows in (128, 64))
        assert sdpa.reason(q, k, k, enable_gqa=True) is None
        assert sdpa.reason(q, k, k) == "key has 2 heads; accepted without enable_gqa: 4, query's"
        # PyTorch pads for flash attention only.
        assert "head_dim 60" in sdpa.reason(q, q, q, mask)
        assert sdpa.reason(q64, q64, q64, mask, 0.1, scale=0.3) is None
        assert sdpa.reason(q64, k64, k64, is_causal=True) is None
        assert "attn_mask has shape (128, 128)" in sdpa.reason(q64, k64, k64, mask)
        assert "q has dtype torch.float64" in sdpa.reason(*(q64.double(),) * 3)
        assert "query has shape (2, 4, 128)" in sdpa.reason(q3, q64, q64)
        assert "tensors are on cpu, cuda:0" in sdpa.reason(q64, q64, q64, torch.empty(1, 128, device="cpu"))
    assert sdpa.reason(*(randn(1, 1, 8, 8),) * 3) == "query is on cpu; accepted: cuda"


# ---- values and gradients, through PyTorch's dispatcher and autograd ----


def leaves(*shapes):
    return [randn(*s, seed=i, dtype=torch.float16).requires_grad_() for i, s in enumerate(shapes)]


def compare(out, tensors, **arguments):
    """Compare out and its gradients with scaled_dot_product_attention's math in float64."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    bias = {"attn_mask": exact[3]} if len(exact) > 3 else {}
    wanted = scaled_dot_product_attention(*exact[:3], **bias, **arguments)
    equal_with_gradients(out, wanted, tensors, exact)


def equal_with_gradients(out, wanted, tensors, exact):
    weight = randn(*wanted.shape, seed=9)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=4e-3)
    grads = [torch.autograd.grad((x * weight).sum(), of) for x, of in ((out, tensors), (wanted, exact))]
    torch.testing.assert_close(*grads, rtol=0, atol=3e-2, check_dtype=False)


FLASH = aten._scaled_dot_product_flash_attention
EFFICIENT = aten._scaled_dot_product_efficient_attention
CUDNN = aten._scaled_dot_product_cudnn_attention
SHAPES = ((2, 4, 5, 16), (2, 4, 11, 16), (2, 4, 11, 24))
BIAS = randn(1, 1, 5, 11, seed=5, dtype=torch.float16)
# The operator, its shapes, and the arguments of scaled_dot_product_attention that it means.
VALUES = {
    "flash": (
        lambda *x: FLASH(*x, 0.0, True, scale=0.3),
        ((2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)),
        {"is_causal": True, "scale": 0.3, "enable_gqa": True},
    ),
    "efficient from the first key": (lambda *x: EFFICIENT(*x, None, True, 0.0, True), SHAPES, {"is_causal": True}),
    "efficient with a bias": (lambda *x: EFFICIENT(*x[:3], wide(x[3]), True), (*SHAPES, (2, 4, 5, 11)), {}),
    "of keys": (lambda *x: EFFICIENT(*x[:3], wide(x[3]), True), (*SHAPES, (1, 4, 1, 11)), {}),
    "of all heads": (lambda *x: EFFICIENT(*x[:3], wide(x[3]), True), (*SHAPES, (2, 1, 5, 11)), {}),
    "of one number": (lambda *x: EFFICIENT(*x[:3], wide(x[3]), True), (*SHAPES, (1, 1, 1, 1)), {}),
    "cudnn": (lambda *x: CUDNN(*x, None, True, 0.0, True), SHAPES, {"is_causal": True}),
    "cudnn with a bias": (lambda *x: CUDNN(*x, wide(BIAS), True), SHAPES, {"attn_mask": BIAS.double()}),
    "of two dimensions": (lambda *x: CUDNN(*x, BIAS[0, 0], True), SHAPES, {"attn_mask": BIAS.double()}),
}  # fmt: skip


def wide(bias):
    return bias.expand(2, 4, 5, 11)


@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients(name, on_cpu):
    call, shapes, arguments = VALUES[name]
    tensors = leaves(*shapes)
    compare(call(*tensors)[0], tensors, **arguments)
    assert len(sdpa.served) == 2 and set(sdpa.served.values()) == {1} and not any(r for _, r in sdpa.served)


def test_flash_is_causal_from_the_last_key_and_marks_rows_without_keys(on_cpu):
    tensors = leaves((1, 2, 9, 16), (1, 2, 5, 16), (1, 2, 5, 16))
    out, lse, *_ = FLASH(*tensors, 0.0, True)
    assert (lse[:, :, :4] == math.inf).all() and lse[:, :, 4:].isfinite().all()
    assert not out[:, :, :4].any()
    rows = [tensors[0][:, :, 4:].detach().requires_grad_(), *tensors[1:]]
    compare(FLASH(*rows, 0.0, True)[0], rows, is_causal=True)


def test_lse_of_efficient_is_infinite_in_rows_that_pad_it(on_cpu):
    lse = EFFICIENT(*leaves(*SHAPES), None, True)[1]
    assert lse.shape == (2, 4, 32) and lse[:, :, :5].isfinite().all() and (lse[:, :, 5:] == math.inf).all()


@pytest.mark.parametrize("backend", ["flash", "efficient"])
def test_dropout_draws_pytorchs_mask_of_the_returned_state(backend, on_cpu):
    q, k, v = leaves((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16))
    if backend == "flash":
        out, *_, seed, _, debug = FLASH(q, k, v, 0.4, False, True)
        state, mask = seed.view(torch.int64), "flash"
        assert seed.dtype == torch.uint64 and debug.shape == (2, 4, 128, 128)
    else:
        out, _, seed, offset = EFFICIENT(q, k, v, None, True, 0.4)
        state, mask = torch.stack([seed.view(torch.int64), offset.view(torch.int64)]), "mem_efficient"
        assert seed.dtype == offset.dtype == torch.uint64
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, _, softmax = reference.attention(
        *(x.transpose(1, 2) for x in exact),
        0.25,
        reference.Features(dropout=mask),
        reference.ScoreInputs(dropout_p=0.4, rng_state=state),
        return_softmax=True,
    )
    equal_with_gradients(out, wanted.transpose(1, 2), (q, k, v), exact)
    if backend == "flash":
        assert torch.equal(debug[:, :, :9, :11].signbit(), softmax.signbit())
        assert not debug[:, :, 9:].any() and not debug[:, :, :, 11:].any()


@pytest.mark.parametrize("of_torch", [False, True], ids=["operator", "varlen_attn"])
def test_packed_rows(of_torch, on_cpu):
    tensors = leaves((16, 4, 16), (16, 4, 16), (16, 4, 16))
    if of_torch:
        out = varlen_attn(*tensors, CU, CU, 11, 11, window_size=(3, 0))
    else:
        bounds = {"window_size_left": 3, "window_size_right": 2}
        out, lse, *_ = aten._flash_attention_forward(*tensors, CU, CU, 11, 11, 0.0, True, False, **bounds)
        assert lse.shape == (4, 16)
    distance = torch.arange(16)[:, None] - torch.arange(16)
    seen = (distance >= 0) & (distance <= 3)
    seen[5:, :5] = False
    exact = [x.detach().double().requires_grad_() for x in tensors]
    wanted = scaled_dot_product_attention(*(x.transpose(0, 1) for x in exact), attn_mask=seen).transpose(0, 1)
    equal_with_gradients(out, wanted, tensors, exact)
    assert set(sdpa.served) == {("_flash_attention_forward", ""), ("_flash_attention_backward", "")}


@with_pages
@pytest.mark.parametrize("target", ["sm90", "sm80"])
def test_one_split_promises_the_same_bits(target, on_cpu, monkeypatch):
    made, request_of = [], operators.request_of
    monkeypatch.setattr(calls, "target_of", lambda device: target)
    monkeypatch.setattr(operators, "request_of", lambda *a, **b: made.append(request_of(*a, **b)) or made[-1])
    q = randn(16, 4, 16, dtype=torch.float16)
    run = functools.partial(aten._flash_attention_forward, q, q, q, CU, CU, 11, 11, 0.0, True, False)
    run()
    if target == "sm90":
        run(num_splits=1)
        assert [request.call.same_bits for request in made] == [False, True]
    else:
        with pytest.raises(registry.Unsupported, match="num_splits is 1 on sm80"):
            run(num_splits=1)
    with pytest.raises(registry.Unsupported, match="num_splits is 2; accepted: None, or 1"):
        run(num_splits=2)


@with_pages
def test_packed_rows_into_a_given_output(on_cpu):
    q = randn(19, 4, 16, dtype=torch.float16)  # no sequence owns the last rows
    arguments = (q, q, q, CU, CU, 11, 11, 0.0, True, False)
    out = torch.full((19, 8, 16), 7.0, dtype=torch.float16)[:, ::2]
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *arguments, window_size_left=3)
    wanted = aten._flash_attention_forward(*arguments, window_size_left=3)
    assert torch.equal(out[:16], wanted[0][:16]) and torch.equal(lse, wanted[1]) and (out[16:] == 7).all()
    for wrong in (out.float(), out[None]):
        with pytest.raises(registry.Unsupported, match=r"out has (dtype|shape)"):
            aten._flash_attention_forward_no_dropout_inplace(wrong, *arguments)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(registry.Unsupported, match="block_table needs kernels for paged keys"):
        aten._flash_attention_forward_no_dropout_inplace(out, *arguments, block_table=table)


@pytest.mark.parametrize("how", ["compiled", "hooks"])
@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_what_saves_tensors_keeps_whose_a_mask_is(backend, how, on_cpu):
    tensors = leaves((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16))

    def f(q, k, v):
        return getattr(aten, f"_scaled_dot_product_{backend}_attention")(q * 2, k, v, None, True, 0.5)[0]

    sdpa.served.clear()
    if how == "compiled":
        torch.compiler.reset()
        out = torch.compile(f, fullgraph=True, backend="aot_eager")(*tensors)
    else:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            out = f(*tensors)
    torch.autograd.grad(out.sum(), tensors)
    assert len(sdpa.served) == 2 and not any(reason for _, reason in sdpa.served)


# ---- dropout from torch's generator ----


def test_rng_torch_takes_and_advances_torchs_generator(monkeypatch):
    generator = machine.Generator(2**64 - 5, 12)
    monkeypatch.setattr(operators, "_generator", lambda device: generator)
    options = Options(rng="torch")
    q, k = randn(2, 3, 5, 16, dtype=BF16), randn(2, 3, 7, 16, dtype=BF16)
    *_, state, _, _ = operators.flash_forward(options, q, k, k, 0.5)
    assert state.view(torch.int64).tolist() == [-5, 12] and generator.offset == 12 + 2 * 3 * 32
    _, _, seed, offset = operators.efficient_forward(options, q, k, k, None, True, 0.5)
    assert (seed.item(), offset.item()) == (2**64 - 5, 204)
    assert generator.offset == 204 + 212  # 2 * 3 * 5 * 7 in fours
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, k)]
    cu = [torch.tensor([0, n, 2 * n, 2 * n], dtype=torch.int32) for n in (5, 7)]
    operators.rows_forward(options, *packed, *cu, 5, 7, 0.5, False, False)
    assert generator.offset == 416 + 3 * 3 * 32
    operators.flash_forward(options, q, k, k)  # without dropout nothing is drawn
    assert generator.offset == 416 + 3 * 3 * 32


# ---- the dispatcher ----

NAME = "_scaled_dot_product_cudnn_attention"


class Kernel:
    """Replaces PyTorch's kernel of an operator; records its calls, and returns ones."""

    def __init__(self):
        self.calls = []

    def call_boxed(self, keyset, *args, **kwargs):
        self.calls.append((args, kwargs))
        one, number = args[0].new_ones(()), torch.zeros((), dtype=torch.int64)
        return one.expand(args[0].shape), one, None, None, 1, 1, number, number, None


@pytest.fixture
def stock(monkeypatch):
    """PyTorch has a cuDNN kernel for CPU tensors."""
    kernel = Kernel()
    monkeypatch.setattr(overrides.overrides("CPU")[NAME], "stock", kernel)
    return kernel.calls


def test_what_is_declined_falls_through(stock):
    q, odd = randn(1, 2, 8, 16, dtype=BF16), randn(1, 2, 8, 20, dtype=BF16)
    sdpa.served.clear()
    activation = sdpa.Activation(Options(), "CPU")
    served = CUDNN(q, q, q, None, True)[0]
    assert not stock and not torch.equal(served, torch.ones_like(q))
    out = CUDNN(odd, odd, odd, None, True, 0.5, scale=2.0)[0]
    assert torch.equal(out, torch.ones_like(odd))
    assert [(args[5:], kwargs) for args, kwargs in stock] == [((0.5,), {"scale": 2.0})]
    (_, reason) = sdpa.served
    assert reason[0] == NAME and "head_dim 20; accepted: multiples of 8" in reason[1]
    assert set(sdpa.served.values()) == {1}
    activation.remove()
    activation.remove()
    assert torch.equal(CUDNN(q, q, q, None, True)[0], torch.ones_like(q))
    stock.clear()
    activation = sdpa.Activation(Options(unsupported="error"), "CPU")
    with pytest.raises(registry.Unsupported, match=f"aten::{NAME} is not served: q has head_dim 20"):
        CUDNN(odd, odd, odd, None, True, 0.5)
    assert not stock
    activation.remove()


def test_threads_call_while_another_turns_it_on_and_off(tmp_path):
    """A registration that is taken back leaves them in memory that is free."""
    (tmp_path / "script.py").write_text("""if True:
        import sys, threading, torch
        from torch.nn.functional import scaled_dot_product_attention
        from cute_attn import sdpa
        from cute_attn.sdpa.operators import Options
        torch.set_num_threads(1)
        q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
        leaf = q.clone().requires_grad_()
        first = sdpa.Activation(Options(), "CPU")
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
        first.remove()
        sys.setswitchinterval(1e-4)
        stop, failed = threading.Event(), []

        def call(step):
            while not stop.is_set():
                try:
                    step()
                except NotImplementedError as error:
                    assert "has no kernel of PyTorch's" in str(error)
                except Exception as error:
                    failed.append(error)

        steps = (
            lambda: scaled_dot_product_attention(q, q, q),
            lambda: scaled_dot_product_attention(leaf, leaf, leaf).sum().backward(),
            lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q),
        )
        threads = [threading.Thread(target=call, args=(step,)) for step in steps]
        [thread.start() for thread in threads]
        for i in range(200):
            activation = sdpa.Activation(Options(), "CPU")
            steps[0]()
            activation.remove()
        stop.set()
        [thread.join() for thread in threads]
        assert not failed, failed[0]
    """)
    done = processes.run(str(tmp_path / "script.py"))
    assert (done.returncode, done.stderr) == (0, "")


def with_dropout(backend, q):
    """The backward of an operator with dropout, and its arguments after a forward."""
    name, arguments = f"_scaled_dot_product_{backend}_attention", (q, q, q, None, True, 0.5)
    outputs = getattr(aten, name)(*arguments)
    saved = saved_of(name, arguments, outputs, torch.ones_like(q))
    return getattr(aten, name + "_backward"), saved


@pytest.mark.parametrize("end", ["removed", "others", "rng"])
@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_backward_of_our_dropout_is_ours_whatever_serves_by_then(backend, end, on_cpu):
    backward, saved = with_dropout(backend, randn(1, 2, 8, 16, dtype=torch.float16))
    wanted = backward(*saved)[:3]
    if end == "removed":
        on_cpu.remove()
    else:
        sdpa.Activation(Options(("flash",)) if end == "others" else Options(rng="torch"), "CPU")
    assert all(torch.equal(a, b) for a, b in zip(backward(*saved)[:3], wanted, strict=True))
    name = f"_scaled_dot_product_{backend}_attention_backward"
    assert sdpa.served[name, ""] == 2
    overrides.serving("CPU") and overrides.serving("CPU").remove()


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_backward_of_pytorchs_dropout_is_pytorchs(backend, on_cpu, monkeypatch):
    backward, saved = with_dropout(backend, randn(1, 2, 8, 16, dtype=torch.float16))
    name = f"_scaled_dot_product_{backend}_attention_backward"
    place, theirs = STATES[name], list(saved)
    theirs[place] = theirs[place].view(torch.int64)
    asked = []

    class Stock:
        def call_boxed(self, keyset, grad, *args):
            asked.append(args)
            return (grad,) * (4 if backend == "efficient" else 3)

    monkeypatch.setattr(overrides.overrides("CPU")[name], "stock", Stock())
    assert torch.equal(backward(*theirs)[0], saved[0]) and len(asked) == 1
    ((_, reason),) = (key for key in sdpa.served if key[1])
    assert reason.startswith("the forward drew its dropout mask by PyTorch's kernel")


def test_an_activation_is_quiet(tmp_path):
    """PyTorch warns of the first override in a process."""
    (tmp_path / "script.py").write_text("""if True:
        import warnings, torch
        from cute_attn import sdpa
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_dot_product_cudnn_attention", lambda *a, **k: None, "CPU")
        warnings.simplefilter("error")
        sdpa.Activation(sdpa.Options(), "CPU")
    """)
    done = processes.run(str(tmp_path / "script.py"))
    assert (done.returncode, done.stderr) == (0, "")


def test_only_the_named_backends_are_served(on_cpu):
    q = randn(1, 2, 8, 16, dtype=BF16)
    activation = sdpa.Activation(Options(backends=("flash",)), "CPU")
    assert FLASH(q, q, q)[0].shape == q.shape
    with pytest.raises(NotImplementedError):
        CUDNN(q, q, q, None, True)
    on_cpu.remove()  # it leaves operators that another activation has replaced
    assert FLASH(q, q, q)[0].shape == q.shape
    activation.remove()


@pytest.fixture
def with_a_gpu(monkeypatch):
    """Lets :func:`sdpa.activate` serve CUDA on a machine without it, until the end."""
    monkeypatch.setattr(doors, "why_nothing_is_served", lambda: None)
    yield
    sdpa.restore()


def test_activate_and_restore(with_a_gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa.activate()
        sdpa.activate(rng="torch")
    assert torch.nn.attention.current_flash_attention_impl() == sdpa.NAME
    assert serving() == {name: Options(rng="torch") for name in NAMES if hasattr(aten, name)}
    sdpa.restore()
    sdpa.restore()
    assert not serving() and torch.nn.attention.current_flash_attention_impl() is None
    with sdpa.active(backends=["efficient"]):
        assert serving().keys() == OPERATORS["efficient"].keys()
    assert not serving()


def test_a_block_inside_another_one_ends_alone(with_a_gpu):
    sdpa.activate(rng="torch")
    outer = overrides.serving()
    with sdpa.active(backends=["efficient"]):
        with sdpa.active():
            assert set(serving().values()) == {Options()}
        assert serving().keys() == OPERATORS["efficient"].keys()
    assert overrides.serving() is outer and set(serving().values()) == {Options(rng="torch")}
    torch.nn.attention.restore_flash_attention_impl()
    assert not serving()


def test_operators_are_registered_once(with_a_gpu):
    sdpa.activate()
    tables = [torch._C._dispatch_dump(f"aten::{name}") for name in NAMES]
    for _ in range(2):
        sdpa.restore()
        sdpa.activate()
    assert [torch._C._dispatch_dump(f"aten::{name}") for name in NAMES] == tables


def test_pytorchs_own_functions_activate_and_restore(with_a_gpu):
    assert sdpa.NAME in torch.nn.attention.list_flash_attention_impls()
    sdpa.activate(rng="torch", unsupported="error")
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    assert set(serving().values()) == {Options()}
    torch.nn.attention.restore_flash_attention_impl()
    assert not serving()


def test_activation_without_a_gpu_warns_once_and_does_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doors, "_warned", set())
    with pytest.warns(UserWarning, match="activate.. does nothing here: there is no CUDA device") as warned:
        sdpa.activate()
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa.activate()
        with sdpa.active(), pytest.raises(ValueError, match="rng is 'cuda'"):
            sdpa.activate(rng="cuda")
    message = "there is no CUDA device; accepted: a GPU of compute capability"
    with pytest.raises(ValueError, match=message):
        sdpa.activate(strict=True)
    with pytest.raises(ValueError, match=message):
        torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    assert not serving()


def test_a_gpu_that_kernels_are_not_built_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    with pytest.raises(
        ValueError, match=r"the GPU's compute capability is 7\.0; accepted: 8\.x, 9\.x, 10\.x or 12\.x"
    ):
        sdpa.activate(strict=True)


WRONG = """
sdpa.activate(backends="flash") -> ValueError: backends is 'flash'; accepted: a tuple of 'flash', 'efficient', 'cudnn'
sdpa.activate(backends=("math",)) -> ValueError: backends is ('math',)
sdpa.activate(backends=([],)) -> ValueError: backends is ([],); accepted: a tuple of 'flash'
sdpa.activate(unsupported=np.ones(2)) -> ValueError: unsupported is array(...); accepted: 'fall_back', 'error'
sdpa.activate(rng="cuda") -> ValueError: rng is 'cuda'; accepted: 'ours', 'torch'
sdpa.activate(strict="no") -> TypeError: strict is 'no'; accepted: False or True
reason(query=3) -> TypeError: query is an int; accepted: a torch.Tensor
reason(attn_mask=[1]) -> TypeError: attn_mask is a list; accepted: a torch.Tensor
reason(dropout_p="a") -> TypeError: dropout_p is 'a'; accepted: a Python number
reason(scale=torch.ones(2)) -> TypeError: scale is a Tensor of shape (2,); accepted: a Python number
reason(is_causal="yes") -> TypeError: is_causal is 'yes'; accepted: False or True
"""


@refusals.each(WRONG)
def test_wrong_options_and_questions(call, sentence, with_a_gpu):
    given = dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 8, 16))
    names = {"reason": lambda **changes: sdpa.reason(**given | changes)}
    refusals.check(call, sentence, globals() | names)
    assert not serving()


def test_an_operator_that_pytorchs_operator_calls_is_pytorchs():
    """PyTorch's flash operator calls another one. If it falls through, so does the other one, uncounted."""
    calls: list[str] = []

    class Kernel:
        def __init__(self, name, below):
            self.name, self.below = name, below

        def call_boxed(self, keyset):
            self.below()
            calls.append(f"PyTorch's {self.name}")
            return ()

    def ours(options):
        calls.append("ours")
        return ()

    def overriding(name, implementation, below):
        made = overrides.Override(name, implementation, Kernel(name, below))
        made.options = Options()
        return made

    sdpa.served.clear()
    inner = overriding("inner", ours, lambda: None)
    outer = overriding("outer", lambda options: "no", lambda: inner(None))
    outer(None)
    assert calls == ["PyTorch's inner", "PyTorch's outer"] and sdpa.served == {("outer", "no"): 1}
    calls.clear()
    inner(None)
    assert calls == ["ours"]

    def fail():
        raise RuntimeError("an error of PyTorch's")

    with pytest.raises(RuntimeError):
        overriding("outer", lambda options: "no", fail)(None)
    inner(None)
    assert calls == ["ours", "ours"]
