"""A process in which nvidia-cutlass-dsl cannot be imported, as on a machine that has a bundle and no compiler.

    python -m tests.without_compiler RUNTIME                                CUTE_ATTN_BUNDLE names the bundle

Prints its findings as a line of JSON: each error's sentence under the name of the step. RUNTIME: a library with
the functions of a CUDA runtime, all of which fail.
"""

# ruff: noqa: E402

import contextlib
import ctypes
import importlib.util
import json
import sys

sys.path[:] = [path for path in sys.path if "nvidia_cutlass_dsl" not in path]

import torch

import cute_attn

loaded = set(sys.modules)

from cute_attn import attention, compiler, reference
from cute_attn.host import counters, forward, memory, split_kv
from cute_attn.host.call import Call
from cute_attn.host.slots import slot

BF16 = torch.bfloat16
found = {}


@contextlib.contextmanager
def sentence(name):
    try:
        yield
        found[name] = "no error"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"


def imports():
    """Imports of missing packages still fail in the usual way, before this package is loaded and after."""
    with sentence("import cutlass"):
        import cutlass  # noqa: F401
    found["cutlass is found"] = importlib.util.find_spec("cutlass") is not None
    found["cutlass is loaded"] = any(name.partition(".")[0] == "cutlass" for name in sys.modules)


def on_the_cpu():
    q, k, v = (torch.randn(1, 9, 2, 32, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, causal=True)
    expected = reference.attention(q, k, v, 32**-0.5, reference.Features(mask="causal"))[0]
    out.sum().backward()
    found["attention on the CPU"] = torch.allclose(out, expected) and q.grad is not None


def calls():
    """Calls of tensors on the CPU, planned as if they were on a GPU: the kernels refuse them before any launch."""
    compiler.default_target = lambda arch: "sm80"
    memory.current_device = lambda: -1
    split_kv.multiprocessors = forward.multiprocessors = lambda device: 4
    counters.schedule = lambda device: (torch.zeros(4, dtype=torch.int32), 4)
    q = torch.randn(1, 200, 2, 64, dtype=BF16)
    call = Call(q, q, q, max_seqlen_q=200, max_seqlen_k=200, mask="causal")
    planned = forward.plan_of(call)
    found["planned"] = planned.functions["main"].name
    with sentence("launch"):
        forward.forward(call)
    with sentence("not bundled"):
        forward.plan_of(call._replace(mask=""))
    cache = Call(q, k_cache=q, v_cache=q, max_seqlen_q=200, max_seqlen_k=200)
    with sentence("cache not bundled"):
        split_kv.plan_of(cache)


def on_a_gpu(*shape, dtype=BF16):
    """A contiguous tensor that claims to be on a GPU, without memory."""
    strides = torch.empty(shape, device="meta").stride()
    return slot(shape, strides, dtype, torch.device("cuda", 0)).tensor


def kernels(runtime):
    """The kernels themselves, in separate libraries."""
    kernel = cute_attn.compile("append-sm80-bf16-d64", target="sm80")
    with sentence("no CUDA runtime"):
        kernel.function  # noqa: B018
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    forward = cute_attn.compile("forward-sm80-bf16-d64-causal", target="sm80")
    for name, one in (("append", kernel), ("forward", forward)):
        with sentence(f"{name} without arguments"):
            one.function()
    caches, new = ((on_a_gpu(2, rows, 2, 64), on_a_gpu(2, rows, 2, 64)) for rows in (8, 1))
    with sentence("append on a GPU"):
        kernel.function(*caches, None, (*new, on_a_gpu(2, dtype=torch.int32), None), None, None)
    with sentence("ptx"):
        kernel.ptx  # noqa: B018
    found["registers"] = kernel.resources.registers
    found["how built"] = kernel.how_built
    with sentence("a call of the DSL"):
        cute_attn.lookup(forward.traits).epilogues.fake_args()


imports()
on_the_cpu()
kernels(sys.argv[1])
calls()
imports()
found["imported since"] = sorted(
    name for name in {*sys.modules} - loaded if name.startswith(("cute_attn", "layouts"))
)
print(json.dumps(found))
