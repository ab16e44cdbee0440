"""Functions of scores under names: on score tiles, in calls and kernels' keys, and wrong ones."""

import pytest
import torch

from cute_attn import attention, check_epilogue, mask_mod, score_mod
from cute_attn.compiler import registry
from cute_attn.compiler.compiled import key_of, user_modules
from cute_attn.epilogues.base import user_epilogue
from cute_attn.traits import Traits


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


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", ["relative_by_function", "document_by_function", "even_by_function"])
def test_device_code_is_the_function(name):
    found = check_epilogue(name)
    assert found.passed and found.differentiable and len(found.comparisons) == 4


@pytest.mark.parametrize(("length", "strength"), [(33, 0.25), (7, 2), (257, -1.0)])
def test_a_call_is_that_of_the_function_with_its_arguments(length, strength):
    """Sizes and numbers are the call's own, not the example's."""
    q, k, v, table = randn(2, 40, 4, 64), randn(2, 50, 2, 64), randn(2, 51, 2, 64)[:, 1:], randn(4, length)
    table.requires_grad_()
    found = attention(q, k, v, epilogues={"relative_by_function": (table, strength)})
    wanted = attention(q, k, v, score_mod=lambda *scores: relative(*scores, table, strength))
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), table)[0] for out in (found, wanted)]
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_a_mask_hides_keys():
    q, k, v = randn(2, 40, 2, 64), randn(2, 50, 2, 64), randn(2, 51, 2, 64)[:, 1:]
    document = torch.arange(50).repeat(2, 1) // 20
    found = attention(q, k, v, epilogues={"document_by_function": document, "even_by_function": ()})
    seen = (document[:, None, :40, None] == document[:, None, None]) & (torch.arange(50) % 2 == 0)
    own = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*own, attn_mask=seen)
    torch.testing.assert_close(found.transpose(1, 2), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "is given 0 arguments; accepted: table, strength"),
        ((0.5, 0.5), "argument table .* is a float; accepted: a tensor of float32 with 2 dimensions"),
        ((torch.zeros(4), 0.5), "is a tensor of float32 with 1 dimensions; accepted: .* with 2 dimensions"),
        ((torch.zeros(4, 9).half(), 0.5), "is a tensor of float16 with 2 dimensions; accepted: .* float32"),
        ((torch.zeros(9, 4).T, 0.5), "with 2 dimensions, its last stride not 1; accepted"),
        ((torch.zeros(4, 9), torch.zeros(())), "argument strength .* 0 dimensions; accepted: a float"),
    ],
)
def test_other_arguments_are_refused(given, message):
    q = randn(1, 40, 4, 64)
    with pytest.raises(TypeError, match=message):
        attention(q, q, q, epilogues={"relative_by_function": given})


LOOSE = torch.ones(4)


@pytest.mark.parametrize(
    ("function", "example", "message"),
    [
        (lambda s, b, h, q, k: s + LOOSE[h], None, "refers to a tensor that is none of its arguments"),
        (
            lambda s, b, h, q, k, x: s,
            None,
            "example of score_mod 'wrong' returns 0 arguments; accepted: a tup",
        ),
        (lambda s, b, h, q, k: s, LOOSE, "returns tensor.*; accepted: none"),
        (lambda s, b, h, q, k, x: s + (2 * x)[h], (LOOSE,), "a tensor of shape .4,. as a whole"),
        (lambda s, b, h, q, k, x: s + x.sum(), (LOOSE,), "uses sum of a whole tensor; accepted: its elem"),
        (lambda s, b, h, q, k, x: s if x.shape[0] else -s, (LOOSE,), "asks for the number of a traced value"),
        (
            lambda s, b, h: s,
            None,
            r"takes \(s, b, h\); accepted: \(score, batch, head, query, key\) and then",
        ),
        (lambda *all: all[0], None, r"takes \(\*all\); accepted"),
        ("f", None, "score_mod is a str"),
    ],
)
def test_wrong_functions_are_refused(function, example, message):
    made = None if example is None else lambda *sizes: example
    with pytest.raises(TypeError, match=message):
        score_mod("wrong", example=made)(function)


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
    assert user_epilogue("scaled_by_function").lowered.slope.is_const(0.25)
