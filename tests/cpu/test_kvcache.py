"""attention_with_kvcache and append_kv: operators, checks, and their path on CUDA with kernels that run on the CPU.

There the append kernel's code runs on every thread, and attention is the reference's on the very arguments that
the forward kernel would get.
"""

import contextlib
import dataclasses

import pytest
import torch

from cute_attn import compiler
from cute_attn.api import append, kvcache
from cute_attn.api.append import append_kv
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.host import append as host_append
from cute_attn.host import checks, plans, split_kv
from cute_attn.host.call import Call
from cute_attn.host.memory import is_lazy
from tests import emulated_kvcache, machine, refusals
from tests.cpu.test_examples import load
from tests.kvcache_problem import CASES, UNALIGNED, Case, Problem, block_mask_of, shown_by
from tests.tensors import LAZY, int32


def run(problem: Problem, **options):
    given = problem.options() | options
    return attention_with_kvcache(problem.q, problem.k, problem.v, return_lse=True, **given)


# ---- on the CPU ----


@pytest.mark.parametrize("name", CASES)
def test_the_function_is_the_definition(name):
    problem, expected = Problem(CASES[name]), Problem(CASES[name])
    if CASES[name].rotary and not CASES[name].rotary_seqlens:
        assert problem.rotary.cos.shape[0] >= CASES[name].capacity
    torch.testing.assert_close(run(problem), expected.run())
    assert problem.k.nan_to_num(7.0).equal(expected.k.nan_to_num(7.0))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.new])
def test_append_alone(name):
    problem = Problem(CASES[name])
    expected = problem.appended()
    append_kv(**problem.append_arguments())
    torch.testing.assert_close((problem.k, problem.v), expected, equal_nan=True)


def latent(name: str, dtype: torch.dtype) -> tuple[Problem, Problem]:
    """A problem whose values are views of the keys, and the same problem with values in separate memory."""
    case = dataclasses.replace(CASES[name], rotary=0)
    return Problem(case, dtype=dtype).share(), Problem(case, dtype=dtype).share().apart()


LATENT = ["append-beyond-capacity", "page-3", "packed-append", "page-batch-idx", "leftpad-append"]


@pytest.mark.parametrize("name", LATENT)
def test_latent_rows_are_appended_once(name):
    """Values that are views of the keys, in the cache and in new rows, are written as equal keys are."""
    for call in (run, lambda problem: append_kv(**problem.append_arguments())):
        problem, expected = latent(name, torch.float64)
        torch.testing.assert_close(call(problem) or (), call(expected) or ())
        assert problem.v.data_ptr() == problem.k.data_ptr()
        caches = (problem.k, problem.v), (expected.k, expected.v)
        torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)


def test_a_length_for_all_and_none_for_full_entries():
    case = Case((9, 9), queries=(2, 2), mask="causal")
    expected, _ = run(Problem(case))
    problem = Problem(case)
    assert run(problem, cache_seqlens=9)[0].equal(expected)
    full = Problem(dataclasses.replace(case, lengths=(24, 24)))
    assert run(full, cache_seqlens=None)[0].equal(run(full)[0])


def test_a_window_that_hides_nothing_still_moves_the_angle():
    """Positions follow from the arguments as given: a window of any width gives each query a different position."""
    wide = run(Problem(CASES["rotary-wide-window"]))[0]
    case = dataclasses.replace(CASES["rotary-wide-window"], mask="", window=(UNBOUNDED, UNBOUNDED))
    none = run(Problem(case))[0]
    assert not torch.allclose(wide[:, 1:], none[:, 1:])
    torch.testing.assert_close(wide[:, 0], none[:, 0])


# ---- the path on CUDA ----


@pytest.fixture
def cuda_on_cpu(monkeypatch):
    """The operators' CUDA implementations for CPU tensors in fp16; the kvcache kernels that were chosen."""
    return emulated_kvcache.patch(monkeypatch)


def params_of(problem: Problem, **options) -> Call:
    """The arguments that reach the operator."""
    seen = []

    class Operator:
        @staticmethod
        def default(*arguments):
            seen.append(Call.of(kvcache.ARGUMENTS, arguments))
            return problem.q, problem.q, problem.q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.cute_attn, "attention_with_kvcache", Operator)
        run(problem, **options)
    return seen[0]


def arguments_of(problem: Problem, **options) -> tuple:
    return params_of(problem, **options).values(kvcache.ARGUMENTS)


def check_attention(problem: Problem, expected: Problem, **options):
    for slopes in (problem, expected):
        slopes.slopes = None if slopes.slopes is None else slopes.slopes.float()
    found = kvcache.attend_cuda(*arguments_of(problem, **options))[:2]
    torch.testing.assert_close(found, expected.run(), rtol=1e-3, atol=1e-3)
    for one, whole in zip((problem.k, problem.v), (expected.k, expected.v), strict=True):
        if one.dtype == torch.float32:
            assert torch.allclose(one, whole, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert one.view(torch.int16).equal(whole.view(torch.int16))


def check_case(case: Case, dtype: torch.dtype = torch.float16, **options):
    check_attention(*(Problem(case, dtype=dtype) for _ in range(2)), **options)


@pytest.mark.parametrize("name", CASES)
def test_the_launches_equal_the_definition(name, cuda_on_cpu):
    check_case(CASES[name])


@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 3}, {}], ids=str)
@pytest.mark.parametrize("alignment", UNALIGNED)
@pytest.mark.parametrize(
    "name", ["plain", "packed-append", "page-16", "rotary-halves", "leftpad-page", "sinks"]
)
def test_head_dims_of_rows_that_start_anywhere(name, alignment, options, cuda_on_cpu):
    """The Ampere kernel serves them without a warning, and the cache is not copied."""
    case = dataclasses.replace(
        CASES[name], dims=UNALIGNED[alignment], capacity=144 if CASES[name].page else 150
    )
    check_case(case, **options)
    (kernel,) = cuda_on_cpu
    assert (kernel.traits.arch, kernel.traits.alignment) == ("sm80", alignment)


@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 3}, {}], ids=str)
@pytest.mark.parametrize("dims", [(16, 8), (18, 6), (13, 12)])
@pytest.mark.parametrize("name", ["packed-append", "page-16", "rotary-halves", "sinks"])
def test_fp32_caches(name, dims, options, cuda_on_cpu):
    """The Ampere kernel serves them without a warning."""
    check_case(dataclasses.replace(CASES[name], dims=dims), torch.float32, **options)
    (kernel,) = cuda_on_cpu
    assert (kernel.traits.arch, kernel.traits.dtype, kernel.traits.precision) == ("sm80", "fp32", "")


def test_fp32_has_pytorchs_precision(cuda_on_cpu, monkeypatch):
    """Each call has the precision set at its time: a plan of another precision does not serve it."""
    for precision in ("", "tf32", ""):
        monkeypatch.setattr(kvcache, "pytorchs_precision", lambda precision=precision: precision)
        check_case(CASES["plain"], torch.float32)
    assert [kernel.traits.precision for kernel in cuda_on_cpu] == ["", "tf32"]


def test_keys_and_values_between_each_other(cuda_on_cpu):
    """Views of one tensor: values start at an odd address."""
    problem, expected = (
        Problem(dataclasses.replace(CASES["append"], dims=(13, 13)), dtype=torch.float16) for _ in range(2)
    )
    both = torch.cat((problem.k, problem.v), -1)
    problem.k, problem.v = both[..., :13], both[..., 13:]
    assert problem.v.data_ptr() % 4 == 2
    check_attention(problem, expected)


@pytest.mark.parametrize(
    ("dims", "page", "arch"),
    [((576, 512), 16, "sm90"), ((576, 512), 12, "sm80"), ((300, 260), 0, "sm80"), ((261, 35), 3, "sm80")],
)
def test_large_head_dims(dims, page, arch, cuda_on_cpu):
    """The Hopper kernel serves rows that TMA can load; the Ampere kernel serves all others. Both pack heads."""
    check_case(Case((5, 19), new=(2, 2), queries=(2, 2), heads=(6, 1), dims=dims, page=page, capacity=48))
    (kernel,) = cuda_on_cpu
    assert kernel.traits.arch == arch and kernel.tile.pack_heads > 1


@pytest.mark.parametrize("name", LATENT)
def test_latent_rows_are_appended_by_the_launches(name, cuda_on_cpu):
    check_attention(*latent(name, torch.float16))


SPLITS = {
    "none": ({"num_splits": 1}, ""),
    "fixed": ({"num_splits": 3}, "fixed"),
    "same-bits": ({"same_bits": True}, "folded"),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("packed", [False, True])
def test_splits_equal_the_definition(split, packed, cuda_on_cpu):
    options, kind = SPLITS[split]
    queries = (2, 3) if packed else (2, 2)
    more = {"packed": packed, "capacity": 300, "alibi": "batch", "sinks": True}
    check_case(Case((150, 290), new=queries, queries=queries, **more), **options)
    (kernel,) = cuda_on_cpu
    assert kernel.traits.split == kind


def test_boxes_of_pages(cuda_on_cpu):
    """Pages with other numbers of rows use the Ampere kernel."""
    for page, box in ((16, 16), (64, 64), (256, 64), (48, 16), (8, 8), (1, None), (12, None)):
        check_case(Case((150, 290), page=page, capacity=page * -(-300 // page), dims=(128, 128)))
        assert getattr(cuda_on_cpu[-1].tile, "page_rows", None) == box


def test_a_tile_changes_the_one_of_the_call(cuda_on_cpu):
    check_case(dataclasses.replace(PAGES_OF_16, heads=(4, 1)), tile="num_stages=4")
    tile = cuda_on_cpu[-1].tile
    assert (tile.num_stages, tile.pack_heads, tile.page_rows) == (4, 4, 16)


@pytest.mark.parametrize("flag", ["return_lse", "return_max_scores", "check_lengths"])
def test_flags_are_checked_of_a_known_call_as_well(flag, monkeypatch):
    problem = Problem(CASES["plain"])
    monkeypatch.setattr(plans, "repeat", lambda *_: ("out", "lse", None))
    assert run(problem) == ("out", "lse"), "the record is taken"
    with pytest.raises(TypeError, match=f"^{flag} is 'yes'; accepted: False or True$"):
        attention_with_kvcache(problem.q, problem.k, problem.v, **problem.options() | {flag: "yes"})


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_kernel_gets_a_positive_scale(scale, cuda_on_cpu):
    """Kernels get q times the scale's sign, rotated or not, like the kernels without a cache."""
    for rotary in (0, 4):
        case = Case((5, 9), new=(2, 2), queries=(3, 3), rotary=rotary, mask="causal", alibi="heads")
        problem, expected = (Problem(case, dtype=torch.float16) for _ in range(2))
        for one in (problem, expected):
            one.slopes = one.slopes.float()
        options = expected.options() | {"softmax_scale": scale, "return_lse": True}
        exact = attention_with_kvcache(expected.q, expected.k, expected.v, **options)
        found = kvcache.attend_cuda(*arguments_of(problem, softmax_scale=scale))[:2]
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


PAGES_OF_16 = Case((150, 290), page=16, capacity=304, dims=(128, 128))


def launched(case, dtype=torch.float16, shifted=False, capacity=None, **options):
    """A call of a case; shifted: its keys start 4 bytes behind a multiple of 16; capacity: of copies of a row."""
    problem = Problem(case, dtype=dtype)
    if capacity:
        problem.k, problem.v = (x[:, :1].expand(-1, capacity, -1, -1) for x in (problem.k, problem.v))
    if shifted:
        problem.k = torch.zeros(problem.k.numel() + 2, dtype=dtype)[2:].view(problem.k.shape)
    return kvcache.attend_cuda(*arguments_of(problem, **options))


REFUSED = """
launched(Case((5, 0), new=(1, 1), dims=(20, 12)), shifted=True)
    -> ValueError: k_cache starts 4 bytes past a multiple of 8; accepted: aligned as its rows are
launched(Case((5,), dims=(320, 320)), capacity=1024 * 513, same_bits=True)
    -> ValueError: same_bits is True with a capacity of 525312 and head dims above 256; accepted: up to 524288
launched(Case((150, 290), page=12, capacity=300, dims=(128, 128)), same_bits=True)
    -> Unsupported: same_bits is True on sm90, with pages of 12 rows ... accepted: on Hopper, pages of multiples of 8
launched(Case((5, 9), dims=(300, 300)), torch.float32)
    -> Unsupported: kvcache-sm80-fp32-d300...: head_dim is 300; accepted: multiples of 4 up to 256
launched(Case((150, 290), page=12, capacity=300, dims=(128, 128)), kernel="sm90")
    -> Unsupported: kvcache-sm90-...: pages have 12 rows; accepted: multiples of 8
launched(PAGES_OF_16, tile="page_rows=32")
    -> Unsupported: ...page_rows is 32; accepted: divisors of the page's 16 rows
launched(PAGES_OF_16, tile="tile_m=65") -> Unsupported: ...tile_m is 65; accepted
"""


@refusals.each(REFUSED)
def test_what_no_kernel_takes_is_told(call, sentence, cuda_on_cpu):
    refusals.check(call, sentence, globals())


def test_new_rows_of_any_strides_and_sizes_of_one(cuda_on_cpu):
    """Rows that kernels cannot read are copied; the stride of a dimension of size 1 does not matter."""
    case = Case((5,), new=(1,), queries=(1,), heads=(1, 1), rotary=2)
    problem, expected = (Problem(case, dtype=torch.float16) for _ in range(2))
    expected.run()
    problem.new = [torch.stack((x, x), -1)[..., 0] for x in problem.new]
    problem.k = problem.k.as_strided(problem.k.shape, (3, problem.k.stride(1), 5, 1))
    kvcache.attend_cuda(*arguments_of(problem))
    assert problem.k.contiguous().view(torch.int16).equal(expected.k.view(torch.int16))


def test_nothing_to_do_launches_nothing(cuda_on_cpu, monkeypatch):
    monkeypatch.setattr(compiler, "compile", None)
    problem = Problem(Case((5, 3), new=(0, 0), packed=True, queries=(0, 0)), dtype=torch.float16)
    params = problem.append()
    arguments, rows = host_append.kernel_arguments(params, None, None)
    assert rows == 0 and arguments["new"][0].shape[0] == 0
    append.append_cuda(*problem.append_arguments().values())


def test_rows_of_no_sequence_launch_nothing(cuda_on_cpu, monkeypatch):
    """Without sequences there are no lengths to read."""
    monkeypatch.setattr(compiler, "compile", None)
    k_cache, k, none = torch.zeros(0, 4, 1, 8).half(), torch.zeros(3, 1, 8).half(), int32()
    append.append_cuda(k_cache, k_cache, k, k, none, None, None, int32(0), *[None] * 3, True)


@pytest.mark.parametrize("name", LAZY)
def test_kernels_never_read_lazy_views(name):
    """This holds for every argument: views are materialized, and caches that the call writes are refused."""
    params = params_of(
        Problem(Case((5, 9), new=(1, 1), rotary=4, alibi="heads", sinks=True), dtype=torch.float16)
    )
    for field, x in params.tensors():
        lazy = params._replace(**{field: LAZY[name](x)})
        kept = field in ("k_cache", "v_cache")
        assert is_lazy(getattr(lazy.materialized(), field)) == kept, field


def test_only_plain_tensors_go_without_the_dispatcher(monkeypatch):
    """A subclass may override the operator."""
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append(kernel))
    q, k = torch.zeros(2, 1, 2, 64).half(), torch.zeros(2, 24, 2, 64).half()
    own = q.as_subclass(type("Own", (torch.Tensor,), {}))
    attention_with_kvcache(own, k, k)
    assert not launched
    attention_with_kvcache(q, k, k)
    assert launched


def test_outputs_that_kernels_do_not_write_directly(cuda_on_cpu):
    out = torch.zeros(2, 1, 2, 8, dtype=torch.float16)
    assert kvcache._is_written_directly(out, 0) and not kvcache._is_written_directly(torch._neg_view(out), 0)
    assert not kvcache._is_written_directly(torch.zeros(2, 1, 2, 9, dtype=torch.float16)[..., 1:], 0)
    assert kvcache._is_written_directly(torch.zeros(2, 1, 2, 9, dtype=torch.float16)[..., 1:], 1)


@pytest.mark.parametrize("path", ["append", "attention", "append-cpu", "attention-cpu", "out", "out-cpu"])
def test_autograd_knows_what_was_written(path, cuda_on_cpu):
    problem = Problem(Case((5, 9), new=(1, 1)), dtype=torch.float16)
    problem.k, problem.v = (x.nan_to_num_(0.0, 0.0) for x in (problem.k, problem.v))
    out = torch.zeros(2, 1, 2, 8, dtype=torch.float16)
    saved = (out,) if path.startswith("out") else (problem.k, problem.v)
    weights = [torch.ones(x.shape[-1], dtype=torch.float16, requires_grad=True) for x in saved]
    sums = [(x * weight).sum() for x, weight in zip(saved, weights, strict=True)]
    params = tuple(problem.append_arguments().values())
    if path.startswith("append"):
        (append.append_cuda(*params) if path == "append" else append_kv(*params[:5]))
    elif path.endswith("cpu"):
        run(problem, out=out)
    else:
        whole = params_of(problem)
        kvcache.attend(whole, out)
    for y in sums:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_caches_of_inference_mode_are_appended_to(cuda_on_cpu):
    with torch.inference_mode():
        problem = Problem(Case((5, 9), new=(1, 1)), dtype=torch.float16)
    before = problem.k.clone()
    append.append_cuda(*problem.append_arguments().values())
    assert not before.view(torch.int16).equal(problem.k.view(torch.int16))


def test_caches_may_share_memory(cuda_on_cpu):
    """They may if nothing is written, or if no element of one is an element of the other."""
    case = Case((5, 9), new=(1, 1), dims=(16, 16))
    params = params_of(Problem(dataclasses.replace(case, new=()), dtype=torch.float16))
    kvcache.attend_cuda(*params._replace(v_cache=params.k_cache).values(kvcache.ARGUMENTS))
    k, v = torch.zeros(2, 24, 2, 1, 16, dtype=torch.float16).unbind(2)
    params = params_of(Problem(case, dtype=torch.float16))
    kvcache.attend_cuda(*params._replace(k_cache=k, v_cache=v).values(kvcache.ARGUMENTS))


def rows_of_keys(dims: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A call's tensors: latent values, in the cache and in new rows."""
    q, cache, new = (torch.zeros(2, n, heads, dims[0]).half() for n, heads in ((1, 4), (24, 1), (1, 1)))
    values = {"v_cache": cache[..., : dims[1]], "v": new[..., : dims[1]]}
    return {"q": q, "k_cache": cache, "k": new, "cache_seqlens": int32(5, 9)} | values


def elsewhere(given: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """The same call with equal metadata, but some tensors in other memory."""
    others = {name: given[name].new_zeros(given["k" + name[1:]].shape) for name in names}
    return given | {name: x[..., : given[name].shape[-1]] for name, x in others.items()}


@pytest.mark.parametrize("dims", [(576, 512), (64, 48)])
def test_a_record_knows_whether_values_are_latent(dims, monkeypatch):
    """Whichever call is recorded: metadata does not show it."""
    launched, made = [], []

    def launch(kernel, target):
        def note(given):
            if kernel.traits.op == "append":
                caches = (given.mKcache, given.mVcache, given.new.k, given.new.v)
                launched.append(tuple(x.data_ptr() for x in caches))

        return note

    machine.gpu(monkeypatch, launch)
    right = kvcache._attend
    monkeypatch.setattr(kvcache, "_attend", lambda *given: made.append(1) or right(*given))
    names = ("k_cache", "v_cache", "k", "v")
    kinds = ((), ("v_cache",), ("v_cache", "v"))
    for first in kinds:
        machine.forget_plans(monkeypatch)
        for apart in (first, first, first, *kinds, first):
            given = elsewhere(rows_of_keys(dims), *apart)
            made.clear()
            attention_with_kvcache(**given)
            assert launched[-1] == tuple(given[name].data_ptr() for name in names)
        assert not made, "the last call is repeated from its record"
        with pytest.raises(ValueError, match=r"^v_cache shares memory with k_cache; accepted: memory of its"):
            attention_with_kvcache(**elsewhere(rows_of_keys(dims), "v"))


SHARED = {"k": "k_cache shares memory with k", "v": "v_cache shares memory with v"}
SHARED["v_cache"] = "v_cache shares memory with k_cache"


@pytest.mark.parametrize("before", [0, 1, 4], ids=["unknown", "planned", "recorded"])
@pytest.mark.parametrize("name", SHARED)
def test_written_memory_that_is_shared_is_refused(name, before, monkeypatch):
    """It is also refused in known calls, whose guards see no addresses: new rows in a cache, values in K's cache."""
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: None)
    problem = Problem(Case((5, 9), new=(1, 1), dims=(16, 16)), dtype=torch.float16)
    given = {key: x for key, x in problem.append_arguments().items() if x is not None}
    inside = given["k_cache"] if name == "v_cache" else given[f"{name}_cache"][:, 3:4]
    apart = torch.zeros_like(given[f"{name[0]}_cache"])
    writing = (
        append_kv,
        lambda **given: attention_with_kvcache(problem.q, **given),
        lambda **given: append.append_cuda(*(problem.append_arguments() | given).values()),
    )
    for call in writing:
        for _ in range(before):
            call(**given | {name: apart if name == "v_cache" else apart[:, 3:4]})
        with pytest.raises(ValueError, match=f"^{SHARED[name]}; accepted: memory of its own"):
            call(**given | {name: inside})


def test_rows_of_more_elements_than_a_grid_has_are_told(cuda_on_cpu, monkeypatch):
    monkeypatch.setattr(compiler, "compile", None)
    heads = 65_535 * 128 // 2  # each with 2 vectors of 8 elements, one per thread
    for more in (0, 1):
        x = torch.zeros(1, 1, 1, 8, dtype=torch.float16).expand(1, 1, heads + more, 8)
        cache = torch.zeros(1, 1, 1, 8, dtype=torch.float16).expand(1, 1, heads + more, 8)
        given = Call(k_cache=cache, v_cache=cache, k=x, v=x, cache_seqlens=int32(0))
        message = "k and v, or q, have elements in a row of all heads, 67107856 in all"
        with pytest.raises(ValueError, match=message) if more else contextlib.nullcontext():
            host_append.kernel_arguments(given, None, None)


# ---- the operators ----


@pytest.mark.parametrize(
    "name", ["plain", "packed-append", "page-batch-idx", "leftpad-append", "rotary-window"]
)
def test_opcheck(name):
    problem = Problem(CASES[name], dtype=torch.float32)
    for x in (problem.k, problem.v):
        x.nan_to_num_(0.0, 0.0)  # it compares tensors
    torch.library.opcheck(torch.ops.cute_attn.attention_with_kvcache.default, arguments_of(problem))
    if CASES[name].new:
        torch.library.opcheck(
            torch.ops.cute_attn.append_kv.default, tuple(problem.append_arguments().values())
        )


def test_schemas_say_what_is_written():
    for operator, fields in (("append_kv", append.ARGUMENTS), ("attention_with_kvcache", kvcache.ARGUMENTS)):
        schema = getattr(torch.ops.cute_attn, operator).default._schema
        assert tuple(x.name for x in schema.arguments) == fields
        written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        assert written == ["k_cache", "v_cache"]


@pytest.mark.parametrize(
    "name",
    [
        "packed-append",
        "page-3",
        "rotary-halves-causal",
        "latent",
        "bias",
        "bias as a mask",
        "bias and blocks",
    ],
)
def test_under_torch_compile(name):
    own = {}
    if name == "latent":
        problem, expected = latent("page-3", torch.float32)
    else:
        case = CASES[name.split()[0]]
        problem, expected = (Problem(case, dtype=torch.float32) for _ in range(2))
    if name == "bias as a mask":
        own = {"bias": problem.bias > 0}
    if name == "bias and blocks":
        own = {"block_mask": block_mask_of(1, 6, 3, 24)}
    traced = torch.compile(attention_with_kvcache, fullgraph=True, backend="aot_eager")
    found = traced(problem.q, problem.k, problem.v, return_lse=True, **(problem.options() | own))
    torch.testing.assert_close(found, run(expected, **own))
    assert problem.k.nan_to_num(7.0).equal(expected.k.nan_to_num(7.0))


# ---- wrong calls ----

PLAIN = Case((4, 6), new=(2, 2), queries=(2, 2), rotary=4)


def told(**options):
    return run(Problem(PLAIN, dtype=torch.float32), **options)


def changed(tensor, change, **options):
    """The same call with another q, or another cache of k or v."""
    problem = Problem(PLAIN, dtype=torch.float32)
    setattr(problem, tensor, change(getattr(problem, tensor)))
    return run(problem, **options)


def appended(problem, **options):
    return append_kv(**problem.append_arguments(), **options)


def negated():
    """A problem whose cache is a view."""
    problem = Problem(Case((5, 9), new=(2, 2)), dtype=torch.float32)
    problem.v = torch._neg_view(problem.v)
    return problem


def of_pages(case, *entry):
    """A problem with an absurd page there."""
    problem = Problem(case, dtype=torch.float32)
    problem.table[entry] = 2**31 - 1
    return problem


def bounded(case, **options):
    """A call that reads lengths and tables."""
    return run(Problem(case, dtype=torch.float32), check_lengths=True, **options)


BY_INDEX, IN_PADDING = CASES["page-batch-idx"], Case((1,), leftpad=(6,), new=(8,), page=3)
WRONG = """
bounded(Case((23, 5), new=(2, 2))) -> ValueError: cache_seqlens[0] is 23 and 2 rows are appended; accepted: up to the
appended(of_pages(BY_INDEX, 2, 1), check_lengths=True) -> ValueError: page_table[2, 1] is 2147483647; accepted: 0 to
run(of_pages(IN_PADDING, 0, 0), check_lengths=True) -> ValueError: page_table[0, 0] is 2147483647; accepted: 0 to
run(negated()) -> ValueError: v_cache is a view that torch negates where it is read; accepted: a tensor to write
appended(negated()) -> ValueError: v_cache is a view that torch negates where it is read; accepted: a tensor to write
told(k=3, v=3) -> TypeError: k is an int; accepted: a torch.Tensor
told(v=None) -> ValueError: v is None; accepted: both k and v, or neither
told(cache_seqlens=None) -> ValueError: cache_seqlens is None; accepted with k and v: rows in use
told(k=torch.zeros(2, 2, 3, 16)) -> ValueError: k has shape (2, 2, 3, 16); accepted: (2, rows, 1, 16)
told(v=torch.zeros(2, 3, 1, 8)) -> ValueError: v has shape (2, 3, 1, 8); accepted: k's rows, (2, 2, 1)
told(k=torch.zeros(2, 2, 1, 16).half()) -> TypeError: k has dtype torch.float16; accepted: torch.float32, k_ca
told(k=None, v=None, cu_seqlens_k_new=int32(0, 1, 2)) -> ValueError: cu_seqlens_k_new is given without
told(cache_seqlens=torch.tensor([1, 2])) -> TypeError: cache_seqlens has dtype torch.int64; accepted: tor
told(cache_seqlens=int32(1, 2, 3)) -> ValueError: cache_seqlens has shape (3,); accepted: (2,)
told(cache_seqlens=True) -> TypeError: cache_seqlens is True; accepted: int32
told(page_table=int32(1, 2)) -> ValueError: page_table has shape (2,) and strides (1,); accepted: (entri
told(page_table=int32(1, 2).view(1, 2)) -> ValueError: page_table has 1 entries; accepted: 2, the batch, or
told(page_table=torch.zeros(2, 1)) -> TypeError: page_table has dtype torch.float32; accepted: torch.int32
told(rotary_sin=None) -> ValueError: rotary_sin is None; accepted: both rotary_cos and rotary_sin, or neither
told(rotary_sin=torch.zeros(40, 3)) -> ValueError: rotary_sin has shape (40, 3); accepted: (40, 2), rotary
told(rotary_cos=torch.zeros(40, 9)) -> ValueError: rotary_cos has shape (40, 9) ... with up to 8 pairs
told(rotary_cos=torch.zeros(23, 2), rotary_sin=torch.zeros(23, 2))
    -> ValueError: rotary_cos has 23 positions; accepted: 24 or more, the cache's capacity, or rotary_seqlens
told(rotary_cos=torch.zeros(40, 2).double()) -> TypeError: rotary_cos has dtype torch.float64; accepted: torc
told(k=None, v=None, cache_seqlens=None) -> ValueError: cache_seqlens is None; accepted with rotary_cos
told(rotary_cos=None, rotary_sin=None, rotary_seqlens=int32(1, 2))
    -> ValueError: rotary_seqlens is given without rotary_cos and rotary_sin; accepted: with them
told(causal="top_left") -> ValueError: causal is 'top_left'; accepted: False or True, aligned bottom right
told(num_splits=513) -> ValueError: num_splits is 513; accepted: 0 to 512
told(same_bits=True) -> ValueError: same_bits is True with torch.float32; accepted: fp16 or bf16
run(Problem(Case((7,), leftpad=(3,)), dtype=torch.float16), same_bits=True)
    -> ValueError: same_bits is True with cache_leftpad; accepted: fp16 or bf16
told(alibi_slopes=torch.zeros(3)) -> ValueError: alibi_slopes has shape (3,); accepted: (2,) or (2, 2)
told(bias=torch.zeros(2, 3, 2, 24)) -> ValueError: bias has shape (2, 3, 2, 24); accepted: (2, 2, 2, 24), where each may
told(bias=torch.zeros(9)) -> ValueError: bias has shape (9,); accepted: (2, 2, 2, 9), where each may be 1, without
told(bias=torch.zeros(2, 7)) -> ValueError: bias has 7 columns; accepted: 8 or more, the keys of sequence 1
told(bias=torch.zeros(2, 24).int()) -> TypeError: bias has dtype torch.int32; accepted: torch.float16, torch.bfloat16
bounded(Case((7, 9), leftpad=(0, 3)), bias=torch.zeros(1, 6)) -> ValueError: bias has 6 columns; accepted: 7 or more
told(block_mask=3) -> TypeError: block_mask is an int; accepted: torch's BlockMask, or None
told(block_mask=block_mask_of(1, 1, 2, 23)) -> ValueError: block_mask has 23 keys; accepted: 24 or more, for these q
told(block_mask=block_mask_of(3, 1, 2, 24)) -> ValueError: block_mask has batch 3; accepted: 2, q's, or 1
told(block_mask=block_mask_of(1, 1, 2, 24), mask_mod=3) -> TypeError: mask_mod is an int; accepted: a function of
told(k=torch.zeros(2, 2, 1, 16, device="meta")) -> ValueError: k is on meta; accepted: cpu, where q is
told(cu_seqlens_q=int32(0, 2, 4)) -> ValueError: q has shape (2, 2, 2, 16); accepted: (total, nheads, head_dim)
changed("q", lambda x: x.half()) -> TypeError: q has dtype torch.float16; accepted: torch.float32, k_cache's
changed("q", lambda x: x[..., :8]) -> ValueError: q has head_dim 8; accepted: 16, k_cache's
changed("v", lambda x: x[:, :3]) -> ValueError: v_cache has shape (2, 3, 1, 8); accepted: (2, 24, 1) and a head_dim_v
changed("v", lambda x: x.half()) -> TypeError: v_cache has dtype torch.float16; accepted: torch.float32, k_cache's
changed("k", lambda x: x[0]) -> ValueError: k_cache has shape (24, 1, 16); accepted: (entries, capacity, nheads_kv
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_told(call, sentence):
    refusals.check(call, sentence, globals())


def test_no_heads_have_no_output():
    assert changed("q", lambda x: x[:, :, :0])[0].shape == (2, 2, 0, 8)


@pytest.mark.parametrize(("tensor", "rank"), [("q", 0), ("q", 2), ("v", 0)])
def test_wrong_ranks_are_told_before_shapes_are_derived(tensor, rank):
    for options in ({"out": torch.zeros(2, 2, 2, 8)}, {"cache_seqlens": 4}):
        with pytest.raises(ValueError, match=r"^(q|v_cache) has shape"):
            changed(tensor, lambda x: x[(0,) * (4 - rank)], **options)


def test_functions_read_heads_of_rows_and_classes_do_not():
    """With a function, a work tile has several heads. With a class it has one: classes take cache rows for keys."""
    packs = []
    load("custom_epilogue")
    table = torch.zeros(8, 41)
    own_function = {"score_mod": lambda score, b, h, i, j: score * h}
    for own in (own_function, {"epilogues": {"relative_position": table}}):
        problem = Problem(Case((9,), heads=(8, 1), dims=(64, 64)), dtype=torch.float16)
        kernel, _ = split_kv.choose_kernel(params_of(problem, **own), "sm90", 132)
        packs.append(kernel.tile.pack_heads)
    assert packs == [8, 1]
    with pytest.raises(
        ValueError, match="epilogue 'relative_position', a class, is given with cache_leftpad"
    ):
        run(problem, epilogues={"relative_position": table}, cache_leftpad=int32(3))


def test_a_record_follows_a_block_mask(monkeypatch):
    """Its lists change in place, and another mask of the same sizes takes its place."""
    case, made = Case((30, 61), capacity=64, heads=(4, 2), dims=(16, 16)), []
    problem = Problem(case, dtype=torch.float16)

    def results(options_of):
        masks = [block_mask_of(1, 1, 1, 64) for _ in range(2)]
        for step in range(30):
            mask = masks[step // 10 % 2]
            if step % 5 == 4:
                for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
                    counts.fill_(step % 3 + 1)
            yield run(problem, **options_of(mask))

    expected = list(results(lambda mask: {"mask_mod": shown_by(mask)}))
    with monkeypatch.context() as patch:
        emulated_kvcache.patch(patch, gpu=True)
        right = kvcache._attend
        patch.setattr(kvcache, "_attend", lambda *given: made.append(1) or right(*given))
        found = list(results(lambda mask: {"block_mask": mask}))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert len(made) < len(found)


def test_a_plan_serves_tensors_of_its_functions_of_one_kind(monkeypatch):
    """Arguments of a registered epilogue are checked once for all calls of the same metadata."""
    load("custom_epilogue")
    problem = Problem(Case((9,), heads=(8, 1), dims=(64, 64)), dtype=torch.float16)
    machine.forget_plans(monkeypatch)
    monkeypatch.setattr(split_kv, "make_plan", lambda call: object())
    tables = (torch.zeros(8, 41), torch.zeros(8, 41), torch.zeros(8, 43))
    calls = [params_of(problem, epilogues={"relative_position": table}) for table in tables]
    made = [split_kv.plan_of(call) for call in calls]
    assert made[0] is made[1] is not made[2]


def test_a_record_follows_what_a_function_reads(monkeypatch):
    """The reads change: values of the tensor, the tensor, a number in the closure, and values that are a view of K."""
    reads = {"factor": 0.5, "table": torch.randn(4)}

    def score_mod(score, b, h, i, j):
        return score * reads["factor"] + reads["table"][h]

    def dense(q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * 0.1
        scores = score_mod(scores, 0, torch.arange(4)[:, None, None], 0, 0)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())

    q, k = torch.randn(2, 3, 4, 320).half(), torch.randn(2, 40, 4, 320).half()
    expected, found, made = [], [], []
    with monkeypatch.context() as patch:
        emulated_kvcache.patch(patch, gpu=True)
        right = kvcache._attend
        patch.setattr(kvcache, "_attend", lambda *given: made.append(1) or right(*given))
        for step in range(32):
            reads["factor"] = 0.5 + step // 8
            if step % 8 > 5:
                reads["table"].mul_(2)
            if step % 8 == 7:
                reads["table"] = torch.randn(4)
            v = k[..., :128] if step % 2 else torch.randn(2, 40, 4, 320)[..., :128].half()
            found.append(attention_with_kvcache(q, k, v, score_mod=score_mod, softmax_scale=0.1))
            expected.append(dense(q, k, v))
    assert len(made) < len(found)
    torch.testing.assert_close([x.float() for x in found], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("case", "name"), [(CASES["functions"], "added"), (PLAIN, "q")])
def test_a_gradient_is_refused(case, name):
    problem = Problem(case, dtype=torch.float32)
    getattr(problem, name).requires_grad_()
    wanted = "^q " if name == "q" else ""
    message = f"{wanted}requires a gradient, which attention_with_kvcache does not"
    with pytest.raises(NotImplementedError, match=message):
        run(problem)
    with torch.no_grad():
        run(problem)


def test_pages_that_no_sequence_reaches_may_be_any():
    problem = Problem(BY_INDEX, dtype=torch.float32)
    problem.table[:, -1] = -1
    run(problem, check_lengths=True)
    bounded(IN_PADDING)


PACKED = """
read(cu_seqlens_q=int32(0, 2, 6, 7)) -> ValueError: cu_seqlens_q is [0, 2, 6, 7]; accepted: rising numbers from 0
read(max_seqlen_q=3) -> ValueError: max_seqlen_q is 3; accepted: 4 or more, cu_seqlens_q's longest
read(cu_seqlens_k_new=int32(0, 2, 6, 99)) -> ValueError: cu_seqlens_k_new is [0, 2, 6, 99]; accepted: rising numbers
"""


@refusals.each(PACKED)
def test_packed_rows_out_of_bounds_are_told_where_asked(call, sentence, monkeypatch):
    """No other check reads a GPU's tensors; here CPU tensors replace the ones to read."""
    given = params_of(Problem(CASES["packed-append"], dtype=torch.float32))
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)

    def read(**wrong):
        call = given._replace(**wrong)
        monkeypatch.setattr(checks, "on_host", lambda x: not any(x is y for _, y in call.tensors()))
        checks.check_lengths(call)

    read()
    refusals.check(call, sentence, {**globals(), "read": read})


def test_a_grid_beyond_32_bits_is_told():
    """An Ampere kernel has CTAs for max_seqlen_q queries of every sequence, although few of these exist."""
    batch, heads = 2**16, 64
    q = torch.zeros(1, 1, 64, dtype=torch.float16).expand(2 * batch, heads, 64)
    cache = torch.zeros(4, 12, heads, 64, dtype=torch.float16)
    given = Call(
        q=q, k_cache=cache, v_cache=cache, cu_seqlens_q=torch.arange(0, 2 * batch + 1, 2).int(),
        cache_seqlens=torch.full((batch,), 12).int(), page_table=torch.zeros(batch, 1).int(), max_seqlen_q=2,
    )  # fmt: skip
    assert split_kv.choose_kernel(given, "sm90", 132)[1].how == ""
    sentence = rf"^max_seqlen_q is {2 * batch}, which makes {batch} sequences of 64 heads of \d+ blocks of \d+ queries"
    with pytest.raises(ValueError, match=sentence):
        split_kv.choose_kernel(given._replace(max_seqlen_q=2 * batch), "sm90", 132)


@pytest.mark.parametrize(
    ("keys", "kv_heads", "num_splits"),
    [(1024, 8, 8), (4096, 8, 16), (65536, 8, 16), (131072, 1, 128)],
)
def test_splits_of_one_sequence(keys, kv_heads, num_splits):
    """Splits fill 132 multiprocessors; short caches have fewer."""
    problem = Problem(Case((9,), heads=(32, kv_heads), dims=(128, 128)), dtype=torch.float16)
    problem.k = problem.v = torch.empty(1, keys, kv_heads, 128, dtype=torch.float16)
    _, split = split_kv.choose_kernel(params_of(problem), "sm90", 132)
    assert (split.how, split.num_splits) == ("fixed", num_splits)


@pytest.mark.parametrize(
    ("batch", "own", "visits", "how", "num_splits"),
    [
        (1, {}, True, "fixed", 128),
        (20, {}, True, "fixed", 19),
        (150, {}, True, "fixed", 7),
        (20, {"leftpad": (3,) * 20}, False, "fixed", 19),
        (20, {"dims": (320, 320)}, False, "fixed", 52),
    ],
)
def test_splits_of_listed_blocks(batch, own, visits, how, num_splits):
    """Whether or not lists say which blocks are visited."""
    case = Case((9,) * batch, **{"heads": (8, 1), "dims": (128, 128), "batch_idx": (0,) * batch} | own)
    problem = Problem(case, dtype=torch.float16)
    problem.k, problem.v = (torch.empty(1, 65536, 1, dim, dtype=torch.float16) for dim in case.dims)
    problem.blocks = block_mask_of(1, 1, 1, 65536, 128)
    kernel, split = split_kv.choose_kernel(params_of(problem), "sm90", 132)
    assert (kernel.epilogues.visits_lists, split.how, split.num_splits) == (visits, how, num_splits)


@pytest.mark.parametrize(("batch", "heads", "dim", "rows"), [(8, (8, 1), 256, 64), (80, (8, 1), 256, 128)])
def test_few_work_tiles_of_few_keys_have_64_rows(batch, heads, dim, rows):
    """64 queries of 8 heads on 375 keys: in small tiles they run at once, unless sequences are many."""
    case = Case((9,) * batch, queries=(64,) * batch, heads=heads, dims=(dim, dim))
    problem = Problem(case, dtype=torch.float16)
    problem.k = problem.v = torch.empty(batch, 375, heads[1], dim, dtype=torch.float16)
    kernel, split = split_kv.choose_kernel(params_of(problem), "sm90", 132)
    assert (kernel.tile.tile_m, kernel.tile.pack_heads, split.how) == (rows, 8, "")


@pytest.mark.parametrize(
    ("batch", "capacity", "lengths", "num_splits"),
    [(64, 4096, True, 1), (16, 8192, True, 1), (32, 16384, True, 4), (32, 16384, False, 1)],
)
def test_splits_of_sequences_of_unlike_lengths(batch, capacity, lengths, num_splits):
    """Long sequences have several splits where their lengths may differ, and where that costs little if they do not."""
    q, cache = (
        torch.empty(batch, 1, 32, 128).half(),
        torch.empty(batch, capacity, 8, 128, device="meta").half(),
    )
    own = torch.full((batch,), capacity).int() if lengths else None
    given = Call(q=q, k_cache=cache, v_cache=cache, cache_seqlens=own)
    assert split_kv.choose_kernel(given, "sm90", 132)[1].num_splits == num_splits
