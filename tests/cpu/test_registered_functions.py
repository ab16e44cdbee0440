"""Functions of scores under names: on score tiles, in calls and kernels' keys, and wrong ones."""

import functools
import sys
import types

import pytest
import torch

from cute_attn import attention, check_epilogue, mask_mod, register_epilogue, score_mod
from cute_attn.compiler import registry
from cute_attn.compiler.compiled import key_of, user_modules
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.checks import check
from cute_attn.host.epilogue_gradients import with_targets
from cute_attn.traits import Traits
from tests import refusals
from tests.cpu.test_ops import call


def _table(batch, nheads, *_):
    return (torch.randn(nheads, 257), 0.5)


@score_mod("relative_by_function", example=_table)
def relative(score, b, h, q_idx, kv_idx, table, strength):
    reach = table.shape[1] // 2
    return score + strength * table[h, (kv_idx - q_idx).clamp(-reach, reach) + reach] + 0 * table[h, -1]


@mask_mod(
    "document_by_function", example=lambda batch, _, *seqlens: (torch.ones(batch, max(seqlens)).long(),)
)
def same_document(b, h, q_idx, kv_idx, document):
    return document[b, q_idx] == document[b, kv_idx]


@mask_mod("even_by_function")
def even(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 0


@score_mod("number_with_long_elements", example=lambda batch, nheads, *_: (3, torch.arange(nheads)))
def number_with_long(score, b, h, q_idx, kv_idx, number, offsets):
    return score - (number - offsets[h]) * 0.1


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "name",
    ["relative_by_function", "document_by_function", "even_by_function", "number_with_long_elements"],
)
def test_device_code_is_the_function(name):
    found = check_epilogue(name)
    tables = ["gradient of tensor 0"] * (2 if name == "relative_by_function" else 0)
    whats = [one.what.split(",")[0] for one in found.comparisons]
    assert found.passed and found.differentiable
    assert sorted(whats) == ["backward"] * 2 + ["forward"] * 2 + tables


def apply(name, *given):
    q = randn(1, 40, 4, 64)
    return attention(q, q, q, epilogues={name: given})


OTHERS = """
apply("relative_by_function") -> TypeError: is given 0 arguments; accepted: table, strength
apply("relative_by_function", 0.5, 0.5)
    -> TypeError: argument table ... is a float; accepted: a 2-d tensor of float32
apply("relative_by_function", torch.zeros(4), 0.5)
    -> TypeError: is a 1-d tensor of float32; accepted: a 2-d
apply("relative_by_function", torch.zeros(4, 9).half(), 0.5)
    -> TypeError: is a 2-d tensor of float16; accepted: ... float32
apply("relative_by_function", torch.zeros(9, 4).T, 0.5)
    -> TypeError: of float32, its last stride not 1; accepted
apply("relative_by_function", torch.zeros(4, 9), torch.zeros(()))
    -> TypeError: argument strength ... 0-d tensor of float32; accepted: a float
apply("blocks_of_keys", 2**30, LOOSE) -> ValueError: is 1073741824; accepted: ints from -536870912 to 536870912
apply("blocks_of_keys", 3.0, LOOSE) -> TypeError: argument size ... is a float; accepted: an int
apply("blocks_of_keys", 3, torch.ones(0)) -> ValueError: argument weights ... has shape (0,); accepted: elements
"""


@refusals.each(OTHERS)
def test_other_arguments_are_refused(call, sentence):
    refusals.check(call, sentence, globals())


def test_one_tensor_may_be_two_arguments_of_the_example():
    x = torch.ones(4)

    @score_mod("scaled_and_biased", example=lambda *_: (x, x))
    def scaled_and_biased(score, b, h, q_idx, kv_idx, scale, bias):
        return score * scale[h] + bias[kv_idx % bias.shape[0]]

    q, scale, bias = randn(1, 40, 4, 64), randn(4), randn(7)
    found = attention(q, q, q, epilogues={"scaled_and_biased": (scale, bias)})
    wanted = attention(q, q, q, score_mod=lambda *scores: scaled_and_biased(*scores, scale, bias))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(TypeError, match="refers to a tensor that is none of its arguments"):
        score_mod("scaled_and_loose", example=lambda *_: (x,))(lambda s, b, h, q, k, y: s * x[h] + y[h])


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.factor


def test_objects_and_partial_functions_are_functions():
    functions = {"by_an_object": Scaled(2.0), "partial_one": functools.partial(Scaled.__call__, Scaled(2.0))}
    for name, function in functions.items():
        assert score_mod(name)(function) is function
        assert user_epilogue(name).written.__module__ == __name__
        assert user_epilogue(name).lowered.slope.node.is_const(2.0)


@pytest.mark.parametrize("name", ["causal", "my-bias", "d64", "", "Bias", 3])
def test_names_that_no_kernel_can_have_are_refused(name):
    with pytest.raises(ValueError, match=r"an epilogue's name is .*; accepted: a lower-case word such"):
        score_mod(name)
    with pytest.raises(
        ValueError,
        match=r"^relative is given in place of a name; accepted: a call such as @score_mod\('my_bias'\)",
    ):
        score_mod(relative)
    for register in (mask_mod, register_epilogue):
        with pytest.raises(
            ValueError, match=rf"Scaled is given .* such as @{register.__name__}\('my_bias'\)"
        ):
            register(Scaled)


@pytest.mark.parametrize("what", [3, relative, type("Empty", (), {})])
def test_only_a_class_of_an_epilogue_is_registered(what):
    with pytest.raises(TypeError, match=r"epilogue 'no_class' is .*; accepted: a class that extends"):
        register_epilogue("no_class")(what)


def test_an_example_leaves_random_numbers_alone():
    state = torch.get_rng_state()
    score_mod("random_example", example=lambda *_: (torch.randn(3),))(lambda s, b, h, q, k, x: s + x[h])
    assert torch.equal(torch.get_rng_state(), state)


@mask_mod("blocks_of_keys", example=lambda *_: (3, torch.ones(4)))
def blocks_of_keys(b, h, q_idx, kv_idx, size, weights):
    return (kv_idx // size % 2 == 0) | (weights[h] > 2)


def test_arguments_are_checked_before_a_kernel_is_built():
    q, table = randn(1, 8, 4, 16), randn(4, 9)
    given = call(q, q, q)._replace(
        epilogues=("relative_by_function:tf",), epilogue_tensors=(table,), epilogue_numbers=(0.5,)
    )
    check(given)
    check(with_targets(given, (True,))[0])
    with pytest.raises(TypeError, match=r"argument table .* is a 2-d tensor of float16"):
        check(given._replace(epilogue_tensors=(table.half(),)))


LOOSE = torch.ones(4)


def wrong(function, *example):
    """Registers it; an example of these values, of none without."""
    score_mod("wrong", example=(lambda *sizes: example) if example else None)(function)


WRONG = """
wrong(lambda s, b, h, q, k: s + LOOSE[h]) -> refers to a tensor that is none of its arguments
wrong(lambda s, b, h, q, k, x: s)
    -> example of score_mod 'wrong' is None; accepted for arguments (x): a function of (batch, nheads,
wrong(lambda s, b, h, q, k: s, LOOSE) -> returns 1 arguments; accepted: none
wrong(lambda s, b, h, q, k, x: s, True) -> returns True for x; accepted: floats, ints from -536870912 to
wrong(lambda s, b, h, q, k, x: s, 2**31) -> returns 2147483648 for x; accepted
wrong(lambda s, b, h, q, k, x: s, LOOSE.cfloat()) -> a tensor of torch.complex64, ... for x; accepted
wrong(lambda s, b, h, q, k, x: s + (2 * x)[h], LOOSE) -> a tensor of shape (4,) as a whole
wrong(lambda s, b, h, q, k, x: s + x.sum(), LOOSE) -> uses sum of a whole tensor; accepted: its elem
wrong(lambda s, b, h, q, k, x: s if x.shape[0] else -s, LOOSE) -> tests a traced value, as if
wrong(lambda s, b, h: s) -> takes (s, b, h); accepted: (score, batch, head, query, key) and then
wrong(lambda *all: all[0]) -> takes (*all); accepted
wrong("f") -> score_mod is a str
score_mod("wrong", example=lambda *sizes: LOOSE)(lambda s, b, h, q, k: s) -> returns tensor...; accepted: none
score_mod("wrong", example=3)(lambda s, b, h, q, k, x: s)
    -> example of score_mod 'wrong' is 3; accepted: a function of
"""


@refusals.each(WRONG)
def test_wrong_functions_are_refused(call, sentence):
    refusals.check(call, f"TypeError: {sentence}", globals())


def test_a_name_belongs_to_one_function():
    with pytest.raises(ValueError, match=r"'even_by_function' is taken by .*even"):
        mask_mod("even_by_function")(lambda b, h, q, k: q >= k)


def test_kernels_are_kept_by_what_the_function_does():
    traits = Traits.parse("forward-sm80-bf16-d64-scaled_by_function")

    def registered(factor):
        @score_mod("scaled_by_function")
        def scaled(score, b, h, q_idx, kv_idx):
            return score * factor

        return key_of(registry.lookup(traits), "sm80"), user_modules((traits, None, None))

    key, modules = registered(0.5)
    assert registered(0.5)[0] == key != registered(0.25)[0]
    assert set(modules) == {__name__}, "processes that build load its file"
    assert user_epilogue("scaled_by_function").lowered.slope.node.is_const(0.25)


def test_a_name_belongs_to_one_file(tmp_path, monkeypatch):
    """Another file's function of that name is another one; the same file may be loaded again."""
    text = "import cute_attn\n\n@cute_attn.mask_mod('first_by_file')\ndef first(b, h, q, k):\n    return k < {}\n"

    def load(name, number):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
        exec(text.format(number), vars(module))

    load("one", 1)
    load("one", 2)
    with pytest.raises(ValueError, match=r"'first_by_file' is taken by one\.first"):
        load("two", 1)
