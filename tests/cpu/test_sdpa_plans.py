"""Plans of PyTorch's operators: found again by metadata, and launches that write PyTorch's layouts without copies.

The launchers here compute forwards by the reference and backwards in plain torch, and write where a kernel would.
"""

import contextlib
import functools
import inspect
import itertools
import math

import pytest
import torch
import tvm_ffi

from cute_attn import reference
from cute_attn.host import backward, memory
from cute_attn.host import plans as known
from cute_attn.host.backward import NOTHING
from cute_attn.host.call import Call
from cute_attn.host.record import Record
from cute_attn.sdpa import operators
from cute_attn.sdpa.operators import Options
from cute_attn.sdpa.overrides import Override
from tests import machine, tensors
from tests.cpu.test_backward_launch import Torch

OPTIONS = Options()
aten = torch.ops.aten
randn = functools.partial(tensors.randn, dtype=torch.float16)
SHAPES = ((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 24))


@pytest.fixture(autouse=True)
def no_plans():
    known.forget()
    yield
    known.forget()


def in_order(shape, order, seed=0, gap=0):
    """Random, with dimensions in memory in that order and ``gap`` elements after each row."""
    order = (*order, 3)
    stored = randn(*(shape[i] + gap * (i == 3) for i in order), seed=seed)[..., : shape[3]]
    return stored.permute([order.index(i) for i in range(4)])


# ---- launches that write where kernels would ----


WRITTEN = {"backward": ("mDK", "mDV"), "backward_convert": ("mDQ",)}


class Launchers(Torch):
    """Replaces the kernels, through TVM FFI on prepared arguments or through Python, and records written addresses."""

    def __init__(self, monkeypatch, prepared=False):
        super().__init__()
        self.written, self.launches = [], 0
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
        monkeypatch.setattr(operators, "runs_kernels", lambda q: True)
        machine.device(monkeypatch, schedule=tvm_ffi.convert((machine.COUNTERS, 132)), target="sm90")
        machine.kernels(monkeypatch, self.kernel, prepared)
        machine.poison(monkeypatch)

    def kernel(self, kernel, target):
        """The function that the kernel's launch runs."""
        if kernel.traits.op == "forward":
            return lambda given: self.forward(kernel, given)
        run, names = super().kernel(kernel, target), WRITTEN.get(kernel.traits.op, ())
        names = (*names, "mDQaccum") if getattr(kernel.tile, "dq_direct", False) else names

        def function(given):
            run(given)
            self.written += [getattr(given, name).data_ptr() for name in names]

        return function

    def forward(self, kernel, given):
        self.launches += 1
        q, k, v, out, lse = given.mQ, given.mK, given.mV, given.mO, given.mLSE
        assert all(memory.rows_are_regular(x) for x in (q, k, v, out)) and lse.stride(-1) == 1
        flat = [x for one in given.score_args for x in (one if isinstance(one, tuple) else (one,))]
        biases = [x for x in flat if isinstance(x, torch.Tensor) and x.dim() == 4]
        found, found_lse, _ = reference.attention(
            *(q, k, v, given.softmax_scale),
            reference.Features(kernel.traits.mask),
            reference.ScoreInputs(bias=biases[0] if biases else None),
            reference.Lengths(*given.seqlens[:6]),
        )
        out.copy_(found)
        lse[..., : found_lse.shape[-1]].copy_(found_lse)
        self.written.append(out.data_ptr())


@pytest.fixture(params=["python", "tvm_ffi"])
def launchers(request, monkeypatch):
    return Launchers(monkeypatch, request.param == "tvm_ffi")


def laid_out(name, arguments):
    """An operator's outputs, which are as PyTorch's meta function lays them out."""
    on_meta = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
    wanted, outputs = getattr(aten, name)(*on_meta), ALL[name](OPTIONS, *arguments)
    assert not isinstance(outputs, str), outputs
    for a, b in zip(outputs, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return outputs


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel():
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=2e-2)


FLASH, CUDNN, EFFICIENT = (
    f"_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn", "efficient")
)
ALL = {name: run for own in operators.OPERATORS.values() for name, run in own.items()}


def backward_of(name):
    return f"{name.removesuffix('_forward')}_backward"


def saved_of(name, arguments, outputs, grad_out=None):
    """The arguments of an operator's backward, after a forward with these arguments and outputs."""
    bound = inspect.signature(ALL[name]).bind(OPTIONS, *arguments)
    bound.apply_defaults()
    q, k = arguments[:2]
    seed, offset = outputs[6:8] if len(outputs) == 9 else outputs[2:4]
    given = {"cum_seq_q": None, "cum_seq_k": None, "max_q": q.shape[2], "max_k": k.shape[2]} | bound.arguments
    given |= {"grad_out": outputs[0] if grad_out is None else grad_out, "grad_input_mask": [True] * 4}
    given |= {"out": outputs[0], "logsumexp": outputs[1], "philox_seed": seed, "philox_offset": offset}
    given |= {"rng_state": seed, "unused": offset}
    _, *names = inspect.signature(ALL[backward_of(name)]).parameters.values()
    return [given[x.name] for x in names if x.kind is x.POSITIONAL_OR_KEYWORD]


@contextlib.contextmanager
def by_reference():
    """No kernel runs, and plans are other ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "runs_kernels", lambda q: False)
        machine.forget_plans(patch)
        yield


def with_reference(function, *arguments):
    """The operator's results where no kernel runs."""
    with by_reference():
        return function(OPTIONS, *arguments)


def check_in_place(name, arguments, launchers):
    """Outputs and gradients of an operator: their layouts, their values, and that nothing was copied."""
    outputs = laid_out(name, arguments)
    same(outputs, with_reference(ALL[name], *arguments))
    assert launchers.written == [outputs[0].data_ptr()]
    launchers.written.clear()
    saved, backward = saved_of(name, arguments, outputs), backward_of(name)
    grads = laid_out(backward, saved)
    same(grads, with_reference(ALL[backward], *saved))
    assert sorted(launchers.written) == sorted(x.data_ptr() for x in grads)


@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [(FLASH, ((2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16)), (0.0, True)), (CUDNN, SHAPES, (None, True))],
)
def test_outputs_and_gradients_are_written_in_place(name, shapes, options, order, gap, launchers):
    tensors = (in_order(shape, order, seed=i, gap=gap) for i, shape in enumerate(shapes))
    check_in_place(name, (*tensors, *options), launchers)


@pytest.mark.parametrize("shape", [(2, 4, 9, 11), (1, 1, 9, 11), (2, 1, 1, 11)])
@pytest.mark.parametrize("rows", [9, 64])
def test_efficient_pads_lse_and_narrows_a_bias(shape, rows, launchers):
    q, k, v = (
        in_order((2, 4, n, d), (0, 2, 1), seed=i) for i, (n, d) in enumerate(((rows, 16), (11, 16), (11, 24)))
    )
    size = (*shape[:2], rows if shape[2] > 1 else 1, 11)
    bias = randn(*size, seed=5)
    bias[..., :1, 3:] = -math.inf
    expanded = bias.expand(2, 4, rows, 11)
    arguments = (q, k, v, expanded, True)
    outputs = laid_out(EFFICIENT, arguments)
    assert (outputs[1][:, :, rows:] == math.inf).all() and launchers.written == [outputs[0].data_ptr()]
    same(outputs, with_reference(operators.efficient_forward, *arguments))
    saved = saved_of(EFFICIENT, arguments, outputs)
    grads = operators.efficient_backward(OPTIONS, *saved)
    same(grads, with_reference(operators.efficient_backward, *saved))
    assert grads[3].shape == expanded.shape and grads[3].stride(2) % 16 == 0
    hidden = operators.efficient_forward(OPTIONS, q, k, v, torch.full_like(expanded, -math.inf), True)
    assert (hidden[1] == math.inf).all() and not hidden[0].any()
    assert operators.efficient_forward(OPTIONS, q, k, v, expanded, False)[1].shape == (2, 4, 0)


@pytest.mark.parametrize("heads_first", [False, True])
def test_packed_rows_are_written_in_place(heads_first, launchers):
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    q, k = randn(16, 4, 16), randn(16, 2, 16, seed=1)
    if heads_first:
        q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    check_in_place("_flash_attention_forward", (q, k, k, cu, cu, 11, 11, 0.0, True, False), launchers)


def test_what_kernels_cannot_read_or_write_is_copied(launchers):
    turned = randn(2, 4, 16, 9).transpose(2, 3)  # a last stride of 9
    unaligned = randn(2, 4, 9, 24)[..., 1:17]
    for x in (turned, unaligned):
        outputs = laid_out(FLASH, (x, x, x))
        same(outputs, with_reference(operators.flash_forward, x, x, x))
    assert launchers.launches == 2


def test_strides_of_dimensions_of_size_1_cost_no_copy(launchers):
    q, k, v = (randn(1, 2, n, 16, seed=n).as_strided((1, 2, n, 16), (3, n * 16, 16, 1)) for n in (5, 7, 7))
    same(operators.flash_forward(OPTIONS, q, k, v), with_reference(operators.flash_forward, q, k, v))
    read = operators._for_kernels(Call(q, q, q)).q
    assert read.data_ptr() == q.data_ptr() and read.stride() == (0, 80, 16, 1)


# ---- calls that repeat ----


@functools.cache
def override(function):
    return Override(function.__name__, function, None)


def serve(function, *arguments):
    """Outputs of an operator's override, for its third call, which follows a record."""
    return override(function)._served(OPTIONS, arguments, {})


def records():
    return [one for one in known._records.values() if isinstance(one, Record)]


@pytest.mark.parametrize("heads, heads_kv, rows", [(4, 2, 1), (1, 1, 9), (4, 1, 9)])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_dimensions_of_size_1_are_not_exchanged(heads, heads_kv, rows, order, monkeypatch):
    """Rows and heads: then layouts differ, though strides may not."""
    Launchers(monkeypatch, prepared=True)
    for seed in range(4):
        q, k, v = (
            in_order((2, h, n, 16), order).copy_(randn(2, h, n, 16, seed=seed + i))
            for i, (h, n) in enumerate(((heads, rows), (heads_kv, 11), (heads_kv, 11)))
        )
        outputs = serve(operators.flash_forward, q, k, v)
        saved = saved_of(FLASH, (q, k, v), outputs)
        grads = serve(operators.flash_backward, *saved)
        same(outputs[:1], with_reference(operators.flash_forward, q, k, v)[:1])
        same(grads, with_reference(operators.flash_backward, *saved))
    assert len(records()) == 2


# ---- backwards that repeat ----


def a_call(q, k, v):
    return Call(q, k, v, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], softmax_scale=0.25)


def outer_of(call):
    q = call.q
    return torch.ones_like(q), None, torch.ones_like(q), torch.ones(q.shape[0], q.shape[2], q.shape[1])


NEEDED = (True, True, True, False, False)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_gradients_are_packed_if_inputs_are(order, monkeypatch):
    """This holds for functions. Outputs of the operator share no memory. Addresses may change from call to call."""

    def inputs(adjacent):
        whole = [torch.randn(1, 8, 3, 2, 64).half() for _ in range(3)]
        return whole[0].unbind(2) if adjacent else tuple(x.unbind(2)[0] for x in whole)

    Launchers(monkeypatch)
    kinds = ((True, NOTHING, True), (False, NOTHING, False), (True, None, False))
    for i in (*order, *order, *order):
        adjacent, into, packs = kinds[i]
        call = a_call(*inputs(adjacent))
        dq, dk, dv, *_ = backward.gradients(call, outer_of(call), NEEDED, into)
        together = len({x.untyped_storage().data_ptr() for x in (dq, dk, dv)}) == 1
        assert together == packs and dq.is_contiguous() != packs
