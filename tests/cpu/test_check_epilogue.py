"""check_epilogue, and the functions that call users' epilogues by name: a right one passes, each mistake is found."""

import cutlass
import pytest
import torch
from cutlass import Float32, cute

from cute_attn import Epilogue, attention, check_epilogue, register_epilogue
from cute_attn.cli import main as commands
from cute_attn.traits import Traits
from tests import refusals
from tests.cpu.test_examples import load


class Scaled(Epilogue):
    """score * (1 + 1/8): derivative 1 + 1/8."""

    FACTOR, GRADIENT = 1.125, 1.125

    def fake_args(self):
        return (Float32(0.0),)

    def host_args(self, inputs):
        return inputs.extra[self.name]

    @cute.jit
    def forward(self, state, tile, loaded=()):
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] * (1.0 + self.FACTOR * state[0])

    @cute.jit
    def backward(self, state, tile, saved):
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] * (1.0 + self.GRADIENT * state[0])

    @classmethod
    def reference(cls, scores, coords, inputs):
        return scores * (1 + 1.125 * inputs.extra[cls.name][0])


@register_epilogue("scaled_right")
class Right(Scaled):
    @classmethod
    def example_args(cls, batch, nheads, seqlen_q, seqlen_k):
        return (0.5,)


@register_epilogue("scaled_forward_wrong")
class ForwardWrong(Scaled):
    FACTOR = 1.0


@register_epilogue("scaled_backward_wrong")
class BackwardWrong(Scaled):
    GRADIENT = 1.0


def test_a_right_one_passes_by_its_class_or_name():
    found = check_epilogue(Right)
    assert found.passed and found.differentiable, str(found)
    assert [one.what.split(",")[0] for one in found.comparisons] == ["forward"] * 2 + ["backward"] * 2
    assert check_epilogue("scaled_right", 0.25).passed


@pytest.mark.parametrize(
    ("name", "wrong"), [("scaled_forward_wrong", "forward"), ("scaled_backward_wrong", "backward")]
)
def test_a_wrong_formula_is_found(name, wrong):
    found = check_epilogue(name, 0.5)
    assert not found.passed
    failed = {one.what.split(",")[0] for one in found.comparisons if not one.passed}
    assert wrong in failed and (wrong == "forward" or failed == {"backward"})
    assert str(found).count("wrong\n") + str(found).endswith("wrong") >= 2


def test_a_function_that_changes_no_score_has_nothing_to_compare():
    def same(score, b, h, q_idx, kv_idx):
        return score

    assert str(check_epilogue(same)).splitlines() == [
        "epilogue 'same' against its reference",
        "  nothing to compare: it changes no score",
    ]


WRONG = """
ForwardWrong -> ValueError: epilogue 'scaled_forward_wrong' takes 1 arguments; accepted without them
"absent" -> ValueError: no feature or epilogue is named 'absent'
3 -> TypeError: epilogue is 3; accepted: a registered Epilogue or its name, or
int -> TypeError: epilogue is <class 'int'>; accepted: a registered Epilogue or its name, or
None -> TypeError: epilogue is None; accepted: a registered Epilogue or its name, or
"""


def test_a_class_without_a_reference_is_refused_on_the_cpu():
    q = torch.randn(1, 8, 1, 8)
    register_epilogue("bare")(type("Bare", (Epilogue,), {}))
    with pytest.raises(
        NotImplementedError, match="an epilogue's class has no reference; accepted on the CPU"
    ):
        attention(q, q, q, epilogues={"bare": ()})


@refusals.each(WRONG)
def test_a_wrong_call_is_one_sentence(call, sentence):
    refusals.check(f"check_epilogue({call})", sentence, globals())


def checked(name):
    return commands._check_epilogues(
        commands.options.make_console(), Traits.parse(f"forward-sm80-bf16-d64-{name}")
    )


def test_check_runs_it(capsys):
    load("custom_epilogue")
    problems = checked("relative_position")
    text = capsys.readouterr().out
    assert problems == [] and text.count("  ok\n") == 4 and "wrong" not in text
    problems = checked("scaled_forward_wrong")
    assert problems == [] and "not compared: epilogue" in capsys.readouterr().out
