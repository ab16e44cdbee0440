"""The torch operator: its schema, its fakes, its gradient under a compiler, and the kernels' arguments."""

import contextlib
import dataclasses
import functools
import math
import textwrap
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from cute_attn import attention, attention_varlen, attention_with_kvcache, reference
from cute_attn.api import operators
from cute_attn.compiler import registry
from cute_attn.epilogues import names
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host import checks, choose, memory
from cute_attn.host.call import ATTENTION, NUM_TENSORS, Call
from cute_attn.host.plans import no_dispatch_mode
from cute_attn.tiles import ForwardSm90Tile
from cute_attn.traits import PADDED_TENSORS
from tests import machine, processes, refusals
from tests.cpu.test_second import Dispatched
from tests.padded_rows import copy_rows
from tests.tensors import LAZY, randn, tensors_in

BF16 = torch.bfloat16


def inputs(dtype=torch.float32, requires_grad=False):
    shapes = ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8))
    return [randn(*s, seed=i, dtype=dtype).requires_grad_(requires_grad) for i, s in enumerate(shapes)]


def call(q, k, v, **changes) -> Call:
    """A call of the operator with all unnamed features switched off."""
    plain = Call(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], softmax_scale=0.25)
    return plain._replace(**changes)


CU_Q, CU_K = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 8, 11], dtype=torch.int32)
RNG = torch.tensor([5, 6])
CHANGES = {
    "plain": {},
    "causal_softcap": {"mask": "causal", "softcap": 1.5},
    "window_alibi": {"mask": "window", "window_left": 3, "window_right": 2, "alibi_slopes": randn(4).abs()},
    "bias": {"bias": randn(1, 4, 1, 11)},
    "sinks": {"sinks": randn(4), "mask": "causal"},
    "dropout_softmax": {"dropout": "flash", "dropout_p": 0.3, "rng_state": RNG, "aux": "softmax"},
    "mem_efficient": {"dropout": "mem_efficient", "dropout_p": 0.3, "rng_state": RNG},
    "seqused_k": {"seqused_k": torch.tensor([3, 11], dtype=torch.int32)},
    "varlen": {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 5, "max_seqlen_k": 5},
}


def make(name, **options) -> Call:
    tensors = inputs(**options)
    if name == "varlen":
        tensors = [x.detach()[0].requires_grad_(x.requires_grad) for x in tensors]
    return call(*tensors, **CHANGES[name])


def test_the_schema_is_the_call():
    arguments = torch.ops.cute_attn.forward.default._schema.arguments
    assert tuple(a.name for a in arguments) == ATTENTION
    assert [a.name for a in torch.ops.cute_attn.backward.default._schema.arguments[5:]] == list(ATTENTION)


@pytest.mark.parametrize(
    ("name", "requires_grad", "dtype"),
    [
        *((name, True, torch.float32) for name in CHANGES),
        ("plain", False, torch.float32),
        ("plain", True, torch.float16),
    ],
)
def test_opcheck(name, requires_grad, dtype):
    arguments = make(name, dtype=dtype, requires_grad=requires_grad)
    torch.library.opcheck(torch.ops.cute_attn.forward.default, arguments.values(ATTENTION))


@pytest.mark.parametrize(
    ("name", "needed"), [*((name, (True, True, True)) for name in CHANGES), ("plain", (False, True, False))]
)
def test_opcheck_of_the_backward(name, needed):
    arguments = make(name)
    out, lse, _ = torch.ops.cute_attn.forward.default(*arguments.values(ATTENTION))
    flags = [*needed, arguments.bias is not None, arguments.sinks is not None]
    for grads in ((out, lse), (out, None), (None, lse)) if name == "plain" else ((out, lse),):
        torch.library.opcheck(
            torch.ops.cute_attn.backward.default, (*grads, out, lse, flags, *arguments.values(ATTENTION))
        )


# ---- under a compiler ----


def test_one_graph_serves_other_lengths():
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k: attention(q, k, k, causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    for seqlen_q, seqlen_k in ((9, 11), (12, 20), (5, 7)):
        q, k = randn(2, seqlen_q, 4, 16), randn(2, seqlen_k, 2, 16)
        torch.testing.assert_close(compiled(q, k), attention(q, k, k, causal=True))
    assert counter.frame_count == 1


def test_a_compiled_function_gets_a_new_mask_at_every_call():
    torch.compiler.reset()
    q, k, v = inputs()
    compiled = torch.compile(lambda: attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(), compiled())


def test_a_gradient_the_operator_lacks_is_not_lost():
    torch.compiler.reset()
    q, k, v = inputs()
    slopes = randn(4).requires_grad_()
    compiled = torch.compile(lambda: attention(q, k, v, alibi_slopes=slopes), backend="aot_eager")
    with pytest.raises(Exception, match="alibi_slopes or an epilogue's tensor requires a gradient"):
        compiled()
    attention(q, k, v, alibi_slopes=slopes).sum().backward()
    assert slopes.grad.any()


def test_checkpointing_repeats_the_same_mask():
    q, k, v = inputs(requires_grad=True)

    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.5).square()

    grads = []
    for use in (False, True):
        torch.manual_seed(3)
        out = torch.utils.checkpoint.checkpoint(f, q, k, v, use_reentrant=False) if use else f(q, k, v)
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.fixture
def written(monkeypatch):
    """Outputs that callers gave: without a GPU torch copies to no fake tensor on CUDA."""
    written = []
    for module in (operators, memory):
        monkeypatch.setattr(module, "write_owned", lambda out, *_: written.append(out) or out)
    return written


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("door", ["attention", "bias", "varlen", "kvcache", "append"])
def test_no_address_of_a_fake_tensor_is_read(door, device, inside, written, recwarn):
    """With a given output no lengths are read either. A fake tensor counts as fake outside of its mode too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with mode:
        x, out, new, *caches = (
            torch.empty(2, rows, 4, 64, dtype=BF16, device=device) for rows in (9, 9, 1, 16, 16)
        )
        packed, packed_out = (torch.empty(9, 4, 64, dtype=BF16, device=device) for _ in range(2))
        bias = torch.empty(1, 4, 1, 9, device=device)
        starts, lengths = (torch.empty(n, dtype=torch.int32, device=device) for n in (3, 2))
    used = {"seqused_q": lengths, "seqused_k": lengths}
    calls = {
        "attention": lambda: attention(x, x, x, seqused_k=lengths, out=out),
        "bias": lambda: attention(x, x, x, bias=bias),
        "varlen": lambda: attention_varlen(
            packed, packed, packed, starts, starts, 9, 9, **used, out=packed_out
        ),
        "kvcache": lambda: attention_with_kvcache(x, *caches, cache_seqlens=lengths, out=out),
        "append": lambda: attention_with_kvcache(x, *caches, k=new, v=new, cache_seqlens=lengths, out=out),
    }
    with mode if inside else contextlib.nullcontext():
        found = calls[door]()
    assert found.shape == (packed_out if door == "varlen" else out).shape and not recwarn.list
    assert bool(written) == (door != "bias")


def test_a_given_output_in_one_graph():
    """This includes packed sequences, whose lengths are read when the graph runs, calls with a cache, and exports."""
    torch.compiler.reset()
    q, k, v = inputs()
    cache, used = randn(2, 16, 2, 16, seed=4), torch.tensor([2, 9], dtype=torch.int32)
    calls = [
        lambda out: attention(q, k, v[..., :8], out=out[..., :8]),
        lambda out: attention_varlen(
            q[0], k[0], k[0], CU_Q, CU_K, 5, 5, seqused_k=CU_K[1:] - CU_K[:-1], out=out[0]
        ),
        lambda out: attention_with_kvcache(q, cache, cache, cache_seqlens=used, out=out),
    ]
    for call in calls:
        expected, found = torch.zeros(2, 9, 4, 16), torch.zeros(2, 9, 4, 16)
        call(expected)
        torch.compile(call, fullgraph=True, backend="aot_eager")(found)
        assert expected.any() and torch.equal(found, expected)
    module = torch.nn.Module()
    module.forward = lambda out: calls[0](out) * 1
    exported = torch.export.export(module, (torch.zeros(2, 9, 4, 16),), strict=False).module()
    assert torch.equal(exported(torch.zeros(2, 9, 4, 16)), calls[0](torch.zeros(2, 9, 4, 16)))


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, causal=True)


def program(tmp_path):
    """An exported program, its inputs and its result; the latter two are saved."""
    inputs = tuple(torch.randn(1, 9, 2, 16) for _ in range(3))
    torch.save((inputs, attention(*inputs, causal=True)), tmp_path / "call")
    return torch.export.export(Causal(), inputs)


LOADED = """
    import sys, cute_attn, torch
    inputs, out = torch.load(sys.argv[2])
    assert "cute_attn.api.operators" not in sys.modules
    module = {load}(sys.argv[1]){module}
    torch.testing.assert_close(module(*inputs), out)
    with torch.inference_mode():
        torch.testing.assert_close(module(*inputs), out)
    assert "cutlass" not in sys.modules
"""


def load(tmp_path, saved, how, module=""):
    """Load and run the program in a new process, which imports the package and nothing from it."""
    script = textwrap.dedent(LOADED.format(load=how, module=module))
    done = processes.alone("-c", script, tmp_path / saved, tmp_path / "call")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_saved_export_finds_the_operators(tmp_path):
    torch.export.save(program(tmp_path), tmp_path / "saved.pt2")
    load(tmp_path, "saved.pt2", "torch.export.load", ".module()")


@pytest.mark.slow
def test_an_aotinductor_package_finds_the_operators(tmp_path):
    """AOTInductor passes None for an empty list of tensors."""
    torch._inductor.aoti_compile_and_package(program(tmp_path), package_path=str(tmp_path / "saved.pt2"))
    load(tmp_path, "saved.pt2", "torch._inductor.aoti_load_package")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["rows first", "heads first"])
def test_gradients_have_the_strides_of_fake_ones(order):
    """Gradients of eager calls on the CPU, of compiled calls and of kernels are all contiguous."""
    q, k, v = (x.permute(order).contiguous().permute(order).requires_grad_() for x in inputs())
    bias, sinks = randn(1, 4, 9, 11).requires_grad_(), randn(4).requires_grad_()
    for tensors, call in (
        ((q, k, v, bias, sinks), lambda q, k, v, bias, sinks: attention(q, k, v, bias=bias, sinks=sinks)),
        ((q, k, v), lambda *x: attention_varlen(*(y.flatten(0, 1) for y in x), 9 * CU_2, 11 * CU_2, 9, 11)),
    ):
        torch._dynamo.reset()
        for run in (call, torch.compile(call, backend="aot_eager")):
            out = run(*tensors)
            grad_out = torch.randn(out.shape).transpose(0, 1).contiguous().transpose(0, 1)
            found = torch.autograd.grad(out, tensors, grad_out)
            assert all(x.is_contiguous() for x in found)


CU_2 = torch.arange(3, dtype=torch.int32)


# ---- kernels' arguments: CPU tensors on the CUDA path, with a kernel that records them ----


class Recorder:
    """Records every kernel that is built and launched; torch makes the padding copies."""

    def __init__(self):
        self.built, self.launched = [], []

    def kernel(self, kernel, target):
        if kernel.traits.op in PADDED_TENSORS:
            return functools.partial(copy_rows, kernel.traits)
        self.built.append((kernel.traits, kernel.tile, target))
        return self.function

    def function(self, given):
        self.launched.append(given)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    machine.device(monkeypatch, target="sm90")
    machine.kernels(monkeypatch, recorder.kernel)
    monkeypatch.setattr(operators, "forward_cpu", operators.launch)
    return recorder


@pytest.fixture
def scale_keys(monkeypatch):
    """A user's epilogue: scores times a number, and times a tensor's value for each key."""

    class ScaleKeys(Epilogue):
        def host_args(self, inputs):
            return inputs.extra["scale_keys"]

        @staticmethod
        def reference(scores, coords, inputs):
            values, factor = inputs.extra["scale_keys"]
            return scores * factor * values[coords.key]

    monkeypatch.setattr(names, "_REGISTERED", {})
    return names.register_epilogue("scale_keys")(ScaleKeys)


def kernel_inputs():
    return randn(2, 9, 4, 16, dtype=BF16), randn(2, 11, 2, 16, dtype=BF16), randn(2, 11, 2, 8, dtype=BF16)


def test_a_kernel_gets_the_calls_arguments(recorder):
    q, k, v = kernel_inputs()
    out, lse = attention(
        q, k, v, causal=True, softmax_scale=0.3, return_lse=True, kernel="sm80", tile="tile_n=32"
    )
    ((traits, tile, target),) = recorder.built
    assert traits.name == "forward-sm80-bf16-d16x8-causal" and tile.tile_n == 32 and target == "sm90"
    (given,) = recorder.launched
    assert given.mQ is q and given.mK is k and given.mV is v and given.mO is out and given.mLSE is lse
    assert out.shape == (2, 9, 4, 8) and lse.shape == (2, 4, 9) and given.softmax_scale == 0.3
    assert tuple(given.seqlens) == (None, None, None, None, 9, 11, None, None)
    assert given.schedule == (machine.COUNTERS, 132) and not tensors_in(given.score_args)


@pytest.mark.parametrize(("scale", "sign"), [(-0.3, -1), (0.0, 0)])
def test_a_kernel_gets_a_positive_scale(recorder, scale, sign):
    """Kernels get q times the scale's sign, contiguous; other tensors are passed unchanged, at any alignment."""
    storage = randn(2 * 9 * 4 * 16 + 1, dtype=BF16)
    for first in (0, 1):
        _, k, v = kernel_inputs()
        q = storage[first : first + 2 * 9 * 4 * 16].view(2, 4, 9, 16).transpose(1, 2)
        bias = randn(1, 4, 1, 11)
        for _ in range(2):
            attention(q, k, v, softmax_scale=scale, bias=bias)
            given = recorder.launched[-1]
            assert given.mQ.is_contiguous() and torch.equal(given.mQ, q * sign) and given.mK is k
            assert given.softmax_scale == (0.3 if sign else 1.0)
            assert [x.data_ptr() for x in tensors_in(given.score_args)] == [bias.data_ptr()]


@pytest.mark.parametrize("dim", [301, 43])
@pytest.mark.parametrize("given", [False, True])
def test_rows_of_odd_head_dims_are_padded(recorder, monkeypatch, given, dim):
    """The kernel gets aligned rows that end in zeros; the caller gets the first columns of its results."""
    q, k, v = (
        randn(2, 9, 4, dim, dtype=BF16),
        randn(2, 11, 2, dim, dtype=BF16),
        randn(2, 11, 2, 4, dtype=BF16),
    )
    monkeypatch.setattr(recorder, "launched", Writes())
    out = q.new_full((2, 9, 4, 4, 2), 9.0)[..., 0] if given else None
    wide = -(-dim // 8) * 8
    for _ in range(2):
        found, lse = attention(q, k, v, return_lse=True, softmax_scale=-0.5, out=out)
        wrote = recorder.launched.last
        m_q, m_k, m_v, m_out = wrote.mQ, wrote.mK, wrote.mV, wrote.mO
        assert wrote.softmax_scale == 0.5
        assert m_q.shape == (2, 9, 4, wide) and m_v.shape == (2, 11, 2, 8) and m_out.shape == (2, 9, 4, 8)
        assert m_q[..., :dim].equal(-q) and m_k[..., :dim].equal(k) and m_v[..., :4].equal(v)
        assert not any(x[..., d:].any() for x, d in ((m_q, dim), (m_k, dim), (m_v, 4)))
        assert (
            (out is not None or found.is_contiguous()) and found.shape == (2, 9, 4, 4) and wrote.mLSE is lse
        )
        assert found.equal(m_out[..., :4]) and (out is None or found is out)
    (built,) = recorder.built
    assert built[0].name == f"forward-sm90-bf16-d{wide}x8"


def test_only_rows_that_start_anywhere_are_copied(recorder):
    """Calls have equal metadata, but one has to copy q, and another k and v."""
    q, k, v = kernel_inputs()
    for moved in (("q",), ("k", "v"), ()) * 3:
        given = {"q": q, "k": k, "v": v}
        for name in moved:
            x = given[name]
            given[name] = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x)
        out = attention(**given)
        launched = recorder.launched[-1]
        assert launched.mO is out
        for name, x in zip("qkv", (launched.mQ, launched.mK, launched.mV), strict=True):
            assert x.equal(given[name]) and (x is given[name]) == (name not in moved)
            assert x.data_ptr() % 16 == 0


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_a_given_output_that_starts_anywhere(recorder, monkeypatch, scale):
    """The padding's inverse writes it if q is padded, even if kernels get a copy of q times the scale's sign."""
    q, k, v = kernel_inputs()
    q = torch.empty(q.numel() + 1, dtype=BF16)[1:].view(q.shape).copy_(q)
    out = q.new_empty(2 * 9 * 4 * 8 + 1)[1:].view(2, 9, 4, 8)
    monkeypatch.setattr(recorder, "launched", Writes())
    attention(q, k, v, softmax_scale=scale, out=out)
    written = recorder.launched.last.mO
    assert written.data_ptr() % 16 == 0 and out.equal(written)


@pytest.mark.parametrize("given", [False, True])
def test_rows_of_packed_queries_without_an_owner(recorder, monkeypatch, given):
    """A padded output leaves these rows unchanged in a given output, and sets them to 0 in a new one."""
    monkeypatch.setattr(recorder, "launched", Writes())
    q, k, v = (randn(12, 4, 43, dtype=BF16) for _ in range(3))
    cu_q, used = torch.tensor([2, 5, 9], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    out = q.new_full(q.shape, 9.0) if given else None
    found = attention_varlen(q, k, v, cu_q, cu_q, 5, 5, seqused_q=used, out=out)
    assert found[2:9].equal(recorder.launched.last.mO[2:9, :, :43])
    assert (torch.cat((found[:2], found[9:])) == (9.0 if given else 0.0)).all()


class Writes(list):
    """Launches of a kernel that writes its place in the output."""

    def append(self, given):
        self.last = given
        given.mO.copy_(torch.arange(given.mO.numel()).view(given.mO.shape))


def all_tensors():
    """Every tensor argument of attention except lengths, and a user's epilogue with one tensor."""
    scores = {"bias": randn(1, 4, 1, 11), "alibi_slopes": randn(4), "sinks": randn(4)}
    return dict(zip("qkv", kernel_inputs(), strict=True)) | scores | {"rng_state": torch.tensor([5, 6])}


@pytest.mark.parametrize("which", [*all_tensors(), "epilogue"])
@pytest.mark.parametrize("name", LAZY)
def test_no_kernel_gets_a_lazy_view(scale_keys, recorder, name, which):
    """It gets a tensor of the view's values, also if a call with this metadata is known."""
    given, values = all_tensors() | {"dropout_p": 0.5}, randn(9, 11)
    if which == "epilogue":
        given["epilogues"] = {"scale_keys": (values, 0.5)}
    lazy = LAZY[name](values if which == "epilogue" else given[which])
    changed = {"epilogues": {"scale_keys": (lazy, 0.5)}} if which == "epilogue" else {which: lazy}
    for _ in range(2):
        attention(**given)
    attention(**given | changed)
    launched = tensors_in(vars(recorder.launched[-1]))
    assert not any(x.is_neg() or x._is_zerotensor() for x in launched)
    shape = (2, *lazy.shape) if which == "alibi_slopes" else (2, 4, 9, 11) if which == "bias" else lazy.shape
    assert any(x.dtype == lazy.dtype and x.equal(lazy.clone().expand(shape)) for x in launched)


@pytest.mark.parametrize("name", ["kernel", "reference"])
def test_autograd_knows_that_an_output_was_written(request, name):
    if name == "kernel":
        request.getfixturevalue("recorder")
    q, k, v = kernel_inputs()
    out, weight = q.new_zeros(2, 9, 4, 8), torch.ones(8, dtype=BF16, requires_grad=True)
    y = (out * weight).sum()  # saves out
    assert attention(q, k, v, out=out) is out
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        attention(q, k, v, out=torch.empty_like(out))


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_the_softmax_follows_the_forward(recorder, monkeypatch, scale):
    """The reference computes it from the launch's LSE; the forward is the same without it."""
    q, k, v = kernel_inputs()
    bias, state = randn(1, 1, 1, 11), torch.tensor([3, 8])
    options = {"causal": True, "dropout_p": 0.5, "softmax_scale": scale, "return_lse": True}
    options |= {"bias": bias, "rng_state": state}
    features = reference.Features("causal", "flash")
    inputs = ScoreInputs(bias=bias, dropout_p=0.5, rng_state=state)
    _, own_lse, expected = reference.attention(q, k, v, scale, features, inputs, return_softmax=True)
    launched = recorder.function

    def function(given):
        given.mLSE.copy_(own_lse)
        launched(given)

    monkeypatch.setattr(recorder, "function", function)
    _, lse, softmax = attention(q, k, v, **options, return_softmax=True)
    attention(q, k, v, **options)
    assert [str(built[0]).split("-")[0] for built in recorder.built] == ["forward", "forward"]
    assert len(recorder.launched) == 2 and torch.equal(lse, own_lse)
    assert softmax.shape == (2, 4, 9, 11) and softmax.dtype == BF16 and not softmax.requires_grad
    torch.testing.assert_close(softmax, expected)
    assert torch.equal(softmax.signbit(), expected.signbit()) and softmax.signbit().any()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_the_softmax_has_the_calls_precision(recorder, monkeypatch, precision):
    seen = []
    monkeypatch.setattr(reference, "softmax", lambda *given: seen.append(given[-1]))
    attention(*inputs(), precision=precision, return_softmax=True)
    assert seen == [precision.replace("fp32", "")]


def test_a_captured_softmax_with_lengths_launches_nothing(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    used = torch.tensor([3, 11], dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match=r"return_softmax is True with lengths, .* accepted: without len"
    ):
        attention(*kernel_inputs(), seqused_k=used, return_softmax=True)
    assert not recorder.launched
    attention(*kernel_inputs(), return_softmax=True)


def test_a_users_kernel_computes_its_arguments_at_every_call(recorder, monkeypatch):
    """The arguments may depend on a tensor's values."""
    from cute_attn.kernels.forward_sm80 import ForwardSm80

    class Later(ForwardSm80):
        def score_args(self, inputs):
            return super().score_args(dataclasses.replace(inputs, rng_state=inputs.rng_state + 1))

    monkeypatch.setattr(registry, "KERNELS", dict(registry.KERNELS))
    monkeypatch.setattr(choose, "_check_variant", lambda *args: None)  # the tensors stand for a GPU's
    registry.register(Later, variant="later")
    q, k, v = kernel_inputs()
    for state in (torch.tensor([0, 2]), torch.tensor([0, 3])):
        attention(q, k, v, rng_state=state, dropout_p=0.5, kernel="sm80:later")
        assert torch.equal(recorder.launched[-1].score_args[-1][0], state + 1)
    assert len(recorder.built) == 1


PACKED_BIAS = {"bias": torch.zeros(1, 1, 1, 2**16)}
LONGEST = {
    "plain": ({}, (9, 11)),
    "flash": ({"dropout_p": 0.5}, (9, 11)),
    "bias": (PACKED_BIAS, (9, 11)),
    "honest": ({"max_seqlen_q": 5, "max_seqlen_k": 5}, (5, 5)),
    "mem_efficient": ({"dropout_p": 0.5, "dropout_mask": "mem_efficient"}, (2**23, 2**16)),
}


@pytest.mark.parametrize("name", LONGEST)
def test_varlen_sequences_are_no_longer_than_all_rows(recorder, name):
    """The grid has no more rows; only the mem-efficient mask uses max_seqlen as stated."""
    options, expected = LONGEST[name]
    q, k, v = (x[0] for x in kernel_inputs())
    options = {"max_seqlen_q": 2**23, "max_seqlen_k": 2**16} | options
    attention_varlen(q, k, v, CU_Q, CU_K, **options)
    (given,) = recorder.launched
    assert given.seqlens[4:6] == expected
    if name == "bias":
        assert given.score_args[-1][0].shape == (3, 4, 2**23, 2**16)


def test_an_epilogue_sees_the_lengths_that_were_stated(scale_keys, recorder):
    q, k, v = (x[0] for x in kernel_inputs())
    attention_varlen(q, k, v, CU_Q, CU_K, 2**23, 2**16, epilogues={"scale_keys": (randn(11), 0.5)})
    assert recorder.launched[0].seqlens[4:6] == (2**23, 2**16)


def test_a_grid_ends_where_32_bits_do(recorder):
    """The Ampere forward has a CTA for each block of queries."""
    row, cu_seqlens = torch.zeros(16, dtype=BF16), torch.zeros(2**20 + 1, dtype=torch.int32)
    q, k = row.expand(2**16, 4, 16), row.expand(8, 4, 16)
    options = {"max_seqlen_k": 8, "kernel": "sm80", "tile": "tile_m=64"}
    attention_varlen(q, k, k, cu_seqlens, cu_seqlens, 511 * 64, **options)
    each = f"{2**20} sequences of 4 heads of 512 blocks of 64 queries, {2**31} in all"
    with pytest.raises(
        ValueError, match=f"max_seqlen_q is 32768, which makes {each}; accepted on CUDA: up to"
    ):
        attention_varlen(q, k, k, cu_seqlens, cu_seqlens, 512 * 64, **options)
    assert len(recorder.launched) == 1


def many(sequences, heads):
    """A varlen call of expanded tensors, which need no memory."""
    x = torch.zeros(16, dtype=BF16).expand(8, heads, 16)
    starts = torch.zeros(1, dtype=torch.int32).expand(sequences + 1)
    changes = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 8, "max_seqlen_k": 8}
    return call(x, x, x, **changes)


def blocks(sequences, heads):
    """The Hopper forward has enough blocks for all rows, even if max_seqlen is larger."""
    one = many(sequences, heads)
    checks.check_query_blocks(one, registry.lookup(one.traits("sm90"), "tile_m=64", "sm90"))


def steps(seqlen, **changes):
    """Check the number of steps of a launch, one of which would run for half an hour."""
    x = torch.zeros(16, dtype=BF16).expand(1, seqlen, 1, 16)
    checks.check_steps(call(x, x, x, **changes), seqlen // 64, ForwardSm90Tile(64, 64), 132)


def operator(device="cpu", **changes):
    """Arguments that only the operator accepts."""
    q, k, v = (x.to(device) for x in inputs())
    operators.forward_cpu(call(q, k, v, **changes))


WRONG = f"""
operator(max_seqlen_q=8) -> ValueError: max_seqlen_q is 8; accepted: 9, q's seqlen
operator(max_seqlen_k=2**40) -> ValueError: max_seqlen_k is {2**40}; accepted: 11, k's seqlen
operator(dropout_p=0.5) -> ValueError: dropout_p is 0.5 and dropout empty; accepted: a name of a mask, or 0
operator("meta") -> ValueError: q is on meta; accepted: cuda and cpu tensors
blocks(2**25, 4) -> ValueError: q has 8 rows in {2**25} sequences, each padded to blocks of 64, {2**31} in all
blocks(2**24, 128)
    -> ValueError: q has 128 heads of 8 rows in {2**24} sequences, each padded to blocks of 64: blocks, {2**31}
steps(2**27)
    -> ValueError: k has up to {2**21 + 1} key blocks for each of {2**21} blocks of queries: steps of each of 132
"""


@refusals.each(WRONG)
def test_wrong_calls_and_calls_beyond_32_bits(call, sentence):
    refusals.check(call, sentence, globals())


def test_calls_just_within_32_bits():
    blocks(2**24, 127)
    steps(2**24)
    steps(2**27, mask="window", window_left=128, window_right=0)


def test_meaningless_strides_are_replaced(recorder):
    q, k, v = kernel_inputs()
    odd = q[:1, :1].as_strided((1, 1, 4, 16), (3, 5, 16, 1))
    attention(odd, k[:1], v[:1])
    m_q = recorder.launched[0].mQ
    assert m_q.stride() == (0, 0, 16, 1) and torch.equal(m_q, odd)


def test_rows_that_no_thread_writes_are_zero(recorder):
    q, k, v = (x[0] for x in kernel_inputs())
    used = torch.tensor([2, 0, 5], dtype=torch.int32)
    out, lse = attention_varlen(q, k, v, CU_Q, CU_K, 5, 5, seqused_q=used, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert recorder.launched[0].seqlens.seqused_q is used


def test_divided_keys_are_read_from_aligned_rows(recorder):
    """Tensors that do not start at a multiple of 16 bytes are padded first, also in calls with too few work tiles."""
    storage = [torch.zeros(1 * 8192 * 2 * 64 + 1, dtype=BF16)[1:].view(1, 8192, 2, 64) for _ in range(2)]
    attention(randn(1, 1, 8, 64, dtype=BF16), *storage)
    of_attention = [
        x for given in recorder.launched if "mK" in vars(given) for x in (given.mQ, given.mK, given.mV)
    ]
    assert of_attention and not any(x.data_ptr() % 16 for x in of_attention)


def test_an_arch_that_declines_names_the_reason(recorder):
    q, k, v = kernel_inputs()
    with pytest.warns(
        UserWarning, match="forward-sm80-bf16-d16x8 serves the call, since tile has 'num_warps=8'"
    ):
        attention(q, k, v, tile="tile_m=128,num_warps=8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, tile="tile_m=128,num_warps=8")
        attention(q, k, v, kernel="sm80", tile="tile_m=128,num_warps=8")
        attention(q, k, v, tile="tile_n=64")


# ---- users' epilogues ----


@pytest.mark.parametrize("compiled", [False, True])
def test_a_users_epilogue_on_the_cpu(scale_keys, compiled):
    torch.compiler.reset()
    q, k, v = inputs()
    values = randn(11)

    def f(q, k, v):
        return attention(q, k, v, epilogues={"scale_keys": (values, 0.5)}, causal=True)

    out = torch.compile(f, backend="aot_eager", fullgraph=True)(q, k, v) if compiled else f(q, k, v)
    torch.testing.assert_close(out, attention(q, k * values[:, None, None] * 0.5, v, causal=True))


def test_a_users_epilogue_for_a_kernel(scale_keys, recorder):
    from cute_attn.epilogues import names

    q, k, v = kernel_inputs()
    for n, values in enumerate((randn(11), randn(11, seed=1)), 1):
        attention(q, k, v, epilogues={"scale_keys": (values, 0.5)})
        assert len(recorder.built) == 1 and len(recorder.launched) == n
        own = recorder.launched[-1].score_args[-1]
        assert own[0] is values and own[1] == 0.5
    assert recorder.built[0][0].epilogues == ("scale_keys",)
    changed = type("ScaleKeys", (scale_keys,), {"__qualname__": scale_keys.__qualname__})
    names.register_epilogue("scale_keys")(changed)
    attention(q, k, v, epilogues={"scale_keys": (randn(11), 0.5)})
    assert len(recorder.built) == 2, "a class that was registered again is another kernel"


def test_subclasses_and_dispatch_modes_go_through_the_dispatcher(recorder):
    class Sub(torch.Tensor):
        pass

    q, k, v = inputs()
    assert no_dispatch_mode() and memory.all_plain(call(q, k, v)[:NUM_TENSORS])
    assert not memory.all_plain((q.as_subclass(Sub),))
    with Dispatched() as watch:
        assert not no_dispatch_mode()
        attention(q, k, v)
    assert torch.ops.cute_attn.forward.default in watch.called
    with torch.profiler.profile() as profile:
        attention(q, k, v)
    assert any(event.key == "cute_attn::forward" for event in profile.key_averages())
