"""PyTorch's scaled_dot_product_attention with the kernels active: every backend, against float64 and stock PyTorch."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_attn import reference, sdpa
from tests.checks import GRADIENT, check
from tests.doors import EMPTY

BF16 = torch.bfloat16
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@pytest.fixture(autouse=True)
def restored():
    sdpa.served.clear()
    yield
    sdpa.restore()


def tensors(rows=200, keys=333, dim=64, order="bshd", heads_kv=4):
    generator = torch.Generator("cuda").manual_seed(0)
    found = []
    for heads, n in ((4, rows), (heads_kv, keys), (heads_kv, keys)):
        shape = (2, n, heads, dim) if order == "bshd" else (2, heads, n, dim)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=BF16)
        found.append((x.transpose(1, 2) if order == "bshd" else x).requires_grad_())
    return found


def results(inputs, bias=None, **options):
    """out and gradients by name."""
    out = scaled_dot_product_attention(*inputs, attn_mask=bias, **options)
    return with_gradients(out, inputs, bias)


def with_gradients(out, inputs, bias):
    leaves = [*inputs, bias] if bias is not None and bias.requires_grad else inputs
    generator = torch.Generator(out.device).manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, device=out.device).to(BF16).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, weight)
    return dict(zip(("out", "dq", "dk", "dv", "dbias"), (out.detach(), *grads), strict=False))


def defined(dtype, inputs, bias, *, is_causal=False, scale=None, dropout="", rng_state=None):
    """Results by the reference, every step in ``dtype``; dropout: the mask for a probability of 0.3."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill(~bias, -torch.inf)
    elif bias is not None:
        bias = bias.detach().to(dtype).requires_grad_(bias.requires_grad)
    out, _, _ = reference.attention(
        *(x.transpose(1, 2) for x in inputs),
        scale or inputs[0].shape[-1] ** -0.5,
        reference.Features("causal" if is_causal else "", dropout),
        reference.ScoreInputs(bias=bias, dropout_p=0.3 if dropout else 0.0, rng_state=rng_state),
        compute_dtype=dtype,
    )
    return with_gradients(out.transpose(1, 2), inputs, bias)


def check_results(found, inputs, bias=None, **options):
    exact, plain = (defined(dtype, inputs, bias, **options) for dtype in (torch.float64, BF16))
    assert found.keys() == exact.keys()
    for name, value in found.items():
        factor = 2.0 if name == "out" else GRADIENT
        check(name, value, exact[name], plain[name], factor=factor, floor=1e-5)


def both_served(backend):
    assert not [key for key in sdpa.served if key[1]]
    names = {name for name, _ in sdpa.served}
    assert any(backend in name and name.endswith("_backward") for name in names) and len(names) == 2


CASES = {
    "flash": [{}, {"is_causal": True}, {"scale": 0.2}],
    "efficient": [{}, {"is_causal": True}, {"bias": "bool"}, {"bias": "grad"}, {"bias": "broadcast"}],
    "cudnn": [{}, {"is_causal": True}, {"bias": "bool"}],
}


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize(("backend", "options"), [(b, o) for b in CASES for o in CASES[b]])
def test_values_and_gradients(backend, options, order):
    options = dict(options)
    rows = 333 if options.get("is_causal") else 200
    inputs, kind = tensors(rows, order=order), options.pop("bias", "")
    bias = None
    if kind:
        generator = torch.Generator("cuda").manual_seed(2)
        shape = (1, 1, rows, 333) if kind == "broadcast" else (2, 4, rows, 333)
        bias = torch.randn(shape, generator=generator, device="cuda", dtype=BF16)
        bias = bias > -1 if kind == "bool" else bias.requires_grad_(kind == "grad")
    with sdpa.active(), sdpa_kernel(BACKENDS[backend]):
        found = [results(inputs, bias, **options) for _ in range(2)]  # the second by prepared launches
    both_served(backend)
    for actual in found:
        check_results(actual, inputs, bias, **options)


MASKS = {
    "two-dims": (200, 333),
    "keys": (2, 1, 1, 333),
    "heads": (1, 4, 1, 333),
    "rows": (2, 4, 200, 1),
    "a-column": (200, 1),
}


@pytest.mark.parametrize("kind", ["bool", "float", "smallest"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_any_shape(name, kind):
    """Broadcast over any dimensions, also over keys; whole rows of finfo.min. PyTorch gives another last stride than 1
    to no kernel."""
    generator = torch.Generator("cuda").manual_seed(2)
    inputs, numbers = tensors(), torch.randn(MASKS[name], generator=generator, device="cuda", dtype=BF16)
    mask = numbers > -1 if kind == "bool" else numbers
    if kind == "smallest":
        mask = numbers.masked_fill(numbers < 0, torch.finfo(BF16).min)
        mask[..., -1, :] = torch.finfo(BF16).min
    with sdpa.active(), sdpa_kernel(BACKENDS["efficient"]):
        actual = [results(inputs, mask) for _ in range(2)][1]  # the second call uses prepared launches
    both_served("efficient")
    whole = mask if mask.dim() == 4 else mask[None, None]
    check_results(actual, inputs, whole)


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_few_queries_with_many_keys(backend, order):
    """Keys are divided among CTAs then, and another kernel writes the output."""
    inputs = tensors(3, 9000, 128, order=order)
    with sdpa.active(), sdpa_kernel(BACKENDS[backend]):
        actual = results(inputs)
    both_served(backend)
    check_results(actual, inputs)


@pytest.mark.parametrize("backend", ["flash", "efficient"])
def test_rng_torch_changes_no_mask(backend):
    inputs = tensors()
    found = []
    for active in (False, True):
        torch.manual_seed(5)
        torch.rand(7, device="cuda")
        if active:
            sdpa.activate(rng="torch", unsupported="error")
        with sdpa_kernel(BACKENDS[backend]):
            found.append([results(inputs, dropout_p=0.3), results(inputs, dropout_p=0.3)])
        found[-1].append({"next": torch.rand(3, device="cuda")})
    both_served(backend)
    # Another mask would differ everywhere by about as much as the values.
    torch.testing.assert_close(*reversed(found), rtol=0.05, atol=0.05)


def test_flash_debug_masks_are_equal_bit_for_bit():
    q, k, v = (x.detach() for x in tensors(130, 200))
    masks = []
    for active in (False, True):
        torch.manual_seed(5)
        if active:
            sdpa.activate(rng="torch", unsupported="error")
        masks.append(torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3, False, True)[-1])
    assert masks[0].shape == masks[1].shape
    assert torch.equal(*(mask[:, :, :130, :200].signbit() for mask in masks))


# ---- dropout whose mask is drawn here ----


def with_dropout(backend, inputs, **options):
    """Output and state by PyTorch's operator, whose seed and offset scaled_dot_product_attention does not return."""
    name = f"_scaled_dot_product_{backend}_attention"
    found = getattr(torch.ops.aten, name)(*inputs, None, True, 0.3, **options)
    state = found[-2:] if backend == "efficient" else found[-3:-1]
    return found[0], torch.stack([x.view(torch.int64) for x in state])


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_dropout_and_its_gradients(backend, order):
    inputs = tensors(order=order)
    with sdpa.active(unsupported="error"):
        both = [with_dropout(backend, inputs) for _ in range(2)]  # the second by prepared launches
        actual = [with_gradients(out, inputs, None) for out, _ in both]
    both_served(backend)
    assert not torch.equal(both[0][1], both[1][1])
    mask = "mem_efficient" if backend == "efficient" else "flash"
    for found, (_, state) in zip(actual, both, strict=True):
        check_results(found, inputs, dropout=mask, rng_state=state)


RUN = """if True:
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("ONLY", "0")
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    assert not torch.cuda.is_initialized()
    child = os.fork()
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    encoder = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, device="cuda", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        scaled_dot_product_attention(q, q, q)
        encoder(q[0])
    torch.cuda.synchronize()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        os._exit(0)
"""


def test_a_program_that_is_run(tmp_path):
    """The program starts CUDA itself, after it has chosen a GPU and forked."""
    path, results = tmp_path / "program.py", tmp_path / "out.json"
    path.write_text(RUN)
    command = [sys.executable, "-m", "cute_attn", "run", "--shadow", "1", "--json", str(results), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    assert sum(row["calls"] for row in rows) == 2 and {row["reason"] for row in rows} == {None}
    assert all(row["gain"].startswith(("nothing: PyTorch's is", *"0123456789")) for row in rows)


REPEATED = {"flash": {"is_causal": True}, "efficient": {"scale": 0.2}, "cudnn": {}}


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_are_the_operators_bit_for_bit(backend, order):
    inputs, options = [x.detach() for x in tensors(333, order=order)], REPEATED[backend]
    with sdpa_kernel(BACKENDS[backend]):
        with sdpa.active():
            wanted = F.scaled_dot_product_attention(*inputs, **options)
        sdpa.served.clear()
        with sdpa.active():
            found = [F.scaled_dot_product_attention(*inputs, **options) for _ in range(3)]
            torch.cuda.synchronize()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream):
                captured = F.scaled_dot_product_attention(*inputs, **options)
            captured.zero_()
            graph.replay()
            with torch.autocast("cuda", torch.float16):
                assert F.scaled_dot_product_attention(*inputs, **options).dtype == torch.float16
            learned = [inputs[0].clone().requires_grad_(), *inputs[1:]]
            assert F.scaled_dot_product_attention(*learned, **options).requires_grad
    name = f"_scaled_dot_product_{backend}_attention"
    assert sdpa.served == {(name, ""): 6}
    for x in (*found, captured):
        assert torch.equal(x, wanted) and x.stride() == wanted.stride()


def test_repeated_calls_change_their_backend_with_pytorchs():
    inputs = [x.detach() for x in tensors(333)]
    with sdpa.active():
        for backend in (*BACKENDS, *BACKENDS):
            with sdpa_kernel(BACKENDS[backend]):
                for _ in range(2):
                    F.scaled_dot_product_attention(*inputs)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(*inputs)
    assert sdpa.served == {(f"_scaled_dot_product_{backend}_attention", ""): 4 for backend in BACKENDS}


def test_threads_and_streams_have_arguments_of_their_own():
    """Launching functions run without the interpreter's lock, on a plan that all threads share."""
    inputs = [[x.detach() + i for x in tensors()] for i in range(3)]
    leaves = [[x.clone().requires_grad_() for x in one] for one in inputs]

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            out = [scaled_dot_product_attention(*inputs[i]) for _ in range(30)]
            grads = [results(leaves[i]) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return out, grads

    with sdpa.active(unsupported="error"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = [results(one) for one in leaves]
        torch.cuda.synchronize()
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(run, range(3)))
    for (outs, grads), own in zip(found, wanted, strict=True):
        assert all(torch.equal(out, own["out"]) for out in (*outs, *(one["out"] for one in grads)))
        for one in grads:  # dq is added up in any order
            torch.testing.assert_close(one, own, rtol=0.05, atol=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_on_another_gpu_than_the_current_one():
    inputs = tensors()
    others = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    with sdpa.active(unsupported="error"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = results(inputs)
        for _ in range(2):
            found = results(others)
            plain = scaled_dot_product_attention(*(x.detach() for x in others))
            assert plain.device == found["dq"].device == others[0].device
            assert torch.equal(plain.cpu(), wanted["out"].cpu())
            for name in ("out", "dk", "dv"):  # the other GPU's random gradient of out is the same
                torch.testing.assert_close(found[name].cpu(), wanted[name].cpu(), rtol=0.05, atol=0.02)


@pytest.mark.unguarded
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_in_cuda_graphs(backend):
    """torch warms a graph up on a separate stream, in memory that nothing may keep alive."""
    torch.compiler.reset()
    q, k, v = (x.detach() for x in tensors(order="bhsd"))
    sdpa.activate(unsupported="error")

    def f(q, k, v):
        return scaled_dot_product_attention(q * 1.5, k, v) + 1

    with sdpa_kernel(BACKENDS[backend]):
        wanted, compiled = f(q, k, v), torch.compile(f, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.testing.assert_close(compiled(q, k, v), wanted)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
@pytest.mark.parametrize("what", EMPTY)
def test_scaled_dot_product_attention_of_nothing(what, options):
    """PyTorch's cuDNN attention returns None if there is no sequence."""
    sizes = EMPTY[what]
    shapes = [
        (sizes.batch, sizes.nheads, rows, sizes.head_dim) for rows in (sizes.seqlen_q, *[sizes.seqlen_k] * 2)
    ]
    masks = [None, torch.zeros(sizes.seqlen_q, sizes.seqlen_k, device="cuda", dtype=BF16)]
    for mask, learns in itertools.product(masks[: 1 if options.get("is_causal") else 2], (False, True)):
        with sdpa.active():
            for _ in range(4):
                inputs = [torch.randn(x, device="cuda", dtype=BF16, requires_grad=learns) for x in shapes]
                out = F.scaled_dot_product_attention(*inputs, mask, **options)
                assert out.shape == inputs[0].shape and not out.any()
                if learns:
                    grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
                    assert all(x.shape == y.shape and not y.any() for x, y in zip(inputs, grads, strict=True))
