"""Random calls of every door, and of device code under the emulator: right, or refused in one sentence."""

import ast
import collections
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fuzz import emulated, grammar, oracle
from tests.fuzz.case import Case, Functions, draw_case
from tests.fuzz.doors import DOORS
from tests.fuzz.grammar import Choices
from tests.fuzz.judge import Fault, judge, shrunk

CHUNKS, CASES, EMULATED = 12, 100, 2


def test_the_oracle_imports_torch_alone():
    tree = ast.parse(Path(oracle.__file__).read_text())
    found = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    found |= {name.name for x in ast.walk(tree) if isinstance(x, ast.Import) for name in x.names}
    assert {name.partition(".")[0] for name in found} == {
        "collections",
        "contextlib",
        "dataclasses",
        "torch",
        "typing",
    }


def drawn(seed):
    return draw_case(Choices(random.Random(seed).randbytes(1200)), DOORS)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_calls(chunk):
    """``python -m tests.fuzz --case 'Case(...)'`` repeats one, and ``--seed`` finds and shrinks others."""
    outcomes = collections.Counter()
    for number in range(CASES):
        case = drawn(1000 * chunk + number)
        try:
            outcomes[judge(case).kind] += 1
        except Fault as fault:
            raise AssertionError(f"{fault}\n{case!r}") from None
    assert outcomes["right"] > CASES / 2, outcomes


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_device_code(chunk):
    having_functions = (case for case in map(drawn, range(1000 * chunk, 1000 * chunk + 200)) if case.score)
    for _ in range(EMULATED):
        case = next(having_functions)
        try:
            assert emulated.judge(case).kind in ("right", "refused", "invalid")
        except Fault as fault:
            raise AssertionError(f"{fault}\n{case!r}") from None


def each_rule():
    """The smallest case with each rule of the grammar."""
    for kind in "fim":
        for rule in (*grammar.LEAVES[kind], *grammar.RULES[kind]):
            text = grammar.Body(Choices(b""), "score", ()).filled(rule, 0)
            made = {
                "f": f"score + ({text}) * 0.1",
                "i": f"score + ({text}) * 0.1",
                "m": f"torch.where({text}, score, -1.5)",
            }
            yield Case(score=f"    return {made[kind]}", grads=("q", "k"))


def test_each_rule_of_the_grammar():
    """None is refused, nor left out because torch refuses it."""
    wrong = {}
    for case in each_rule():
        try:
            outcome = judge(case)
        except Fault as fault:
            outcome = fault
        if getattr(outcome, "kind", "") != "right":
            wrong[case.score] = outcome
    assert not wrong, "\n".join(f"{case}: {outcome}" for case, outcome in wrong.items())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_each_rule_as_device_code(part):
    for case in list(each_rule())[part::8]:
        assert emulated.judge(case).kind == "right", case


# ---- what was found ----

NEGATIVE = "    return score + table[h, -1 - q_idx % 9]"
FOUND = {
    "an alias changed in place": Case(score="    x = score\n    x += 1.0 + q_idx\n    return score * x"),
    "a traced value changed in place": Case(
        score="    x = score * 2\n    y = x\n    y *= slopes[h]\n    return x"
    ),
    "uint8 wraps": Case(score="    return score - unsigned[kv_idx % 8] * 3 * 0.01"),
    "uint8 shifts": Case(score="    return score - (unsigned[kv_idx % 8] << 1) * 0.01"),
    "a method of a row": Case(score="    return score + table[h].max()"),
    "no sequence": Case(door="create_block_mask", batch=0, mask="    return q_idx >= kv_idx"),
    "no key": Case(door="create_block_mask", seqlen_k=0, mask="    return q_idx >= kv_idx"),
    "a negative index": Case(score=NEGATIVE, grads=("q", "table")),
    "a number that changes": Case(score="    return score * cap.item()", change="cap"),
    "a branch that changes": Case(score="    return score * (1 if flag else 2)", change="flag", seed=2),
    "isinstance": Case(score="    return score if isinstance(score, torch.Tensor) else score * 2"),
    "hidden poles": Case(
        causal=True, seqlen_k=5, score="    return score / (q_idx - kv_idx + 1)", grads=("q", "k")
    ),
    "hidden logarithms": Case(
        causal=True,
        seqlen_k=5,
        score="    return score + slopes[h] * torch.log(q_idx - kv_idx + 1.0)",
        grads=("q", "slopes"),
    ),
    "no_grad": Case(
        score="    with torch.no_grad():\n        x = score * 2\n    return score + x", grads=("q",)
    ),
    "numbers of score's dtype": Case(score="    return score + torch.tanh(score.new_tensor(0.5))"),
    "a uint8 and a bool": Case(score="    return score - (-(unsigned[kv_idx % 8] + (q_idx > 2))) * 0.01"),
    "the dtype of a step on a number": Case(
        score="    return torch.sign(torch.tanh(torch.full_like(score, 0.5))) * q_idx * 0.1 + score"
    ),
    "the sign of a score": Case(score="    return table[h, 0] + torch.sign(score)"),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    assert judge(FOUND[name]).kind in ("right", "refused")


INTEGERS = {
    "large bytes": Case(score="    return score + large[kv_idx % 8] * 0.01"),
    "shifts to the right by any number": Case(
        score="    return score - ((q_idx - kv_idx) >> (1 - q_idx)) * 0.1", seqlen_q=9
    ),
    "shifts to the left by any number": Case(
        score="    return score - ((q_idx - kv_idx) << (62 + q_idx)).clamp(-3, 3) * 0.1", seqlen_q=9
    ),
    "bytes shifted by any number": Case(
        score="    return score - (unsigned[kv_idx % 8] >> (4 - signed[q_idx % 6])) * 0.1", seqlen_q=9
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_as_device_code(name):
    assert emulated.judge(INTEGERS[name]).kind == "right"


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    assert judge(INTEGERS[name]).kind == "right"


def test_a_backward_with_a_boolean_bias():
    assert judge(Case(door="attention_backward", bias="bool", grads=("q",))).kind == "right"


# ---- the judge itself ----

ATTENTION = DOORS["attention"].call


def off_by(factor, which="out"):
    def call(case, inputs, functions):
        found = ATTENTION(case, inputs, functions)
        return {**found, which: found[which] * factor}

    return call


def raising(error):
    def call(case, inputs, functions):
        raise error

    return call


def without_changes():
    """A door that keeps what its first call read."""
    first = []

    def call(case, inputs, functions):
        first.append(ATTENTION(case, inputs, functions))
        return first[0]

    return call


def adding_bits():
    calls = []

    def call(case, inputs, functions):
        found = ATTENTION(case, inputs, functions)
        calls.append(0)
        return {**found, "out": found["out"] * (1 + len(calls) * 2**-52)}

    return call


def with_another_gradient(case, inputs, functions):
    own = inputs.q.sum()
    return {"out": ATTENTION(case, inputs, functions)["out"] + 1e-6 * (own - own.detach())}


def overwriting(case, inputs, functions):
    inputs.v.mul_(1)
    return ATTENTION(case, inputs, functions)


CHANGED = {"score": "    return score * slopes[h]", "change": "slopes"}
WRONG = {
    "values": (off_by(1 + 1e-7), {}, "out: largest error"),
    "bf16 values": (off_by(1.05), {"dtype": "bf16"}, "out: largest error"),
    "lse": (off_by(1 + 1e-7, "lse"), {}, "lse: largest error"),
    "gradients": (with_another_gradient, {"grads": ("q",)}, "dq: largest error"),
    "NaN": (off_by(torch.nan), {}, "NaN"),
    "rows without keys": (off_by(-1.0, "lse"), {"causal": True, "seqlen_q": 9}, "lse"),
    "stale": (without_changes(), CHANGED, "largest error"),
    "other bits": (adding_bits(), {}, "other bits"),
    "an argument": (overwriting, {}, "an argument is changed"),
    "an assertion": (raising(AssertionError()), {}, "AssertionError"),
    "torch's words": (raising(TypeError("unsupported operand type(s) for +")), {}, "no sentence"),
    "two sentences": (raising(ValueError("q is 1; accepted: 2\nor 3")), {}, "no sentence"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_judge_finds(name, monkeypatch):
    call, options, message = WRONG[name]
    monkeypatch.setitem(DOORS, "attention", replace(DOORS["attention"], call=call))
    with pytest.raises(Fault, match=message):
        judge(Case(**options))


def test_a_failure_shrinks():
    """To the smallest case of the same kind: here, one with a window and sinks."""

    def fails(case):
        return case.window != (None, None) and bool(case.sinks)

    def draw(data):
        return draw_case(Choices(data), DOORS)

    tried = (random.Random(seed).randbytes(1200) for seed in range(1000))
    data = next(x for x in tried if fails(draw(x)))
    found = draw(shrunk(data, draw, fails))
    assert fails(found) and len(repr(found)) < len(repr(draw(data))) / 2
    assert repr(eval(repr(found))) == repr(found)


def test_a_change_is_one_of_values():
    """In place, or another object in its place, wherever a function has it."""
    for form in grammar.FORMS:
        for other in (False, True):
            case = Case(
                score="    return score * factor + slopes[h]", form=form, change="slopes", replace=other
            )
            functions = Functions.of(case)
            before = functions.values["slopes"]
            old = before.clone()
            functions.change()
            new = functions.values["slopes"]
            assert (new is before) != other and not torch.equal(new.float(), old)
            one = functions.score_mod(torch.zeros(()), 0, 1, 0, 0)
            torch.testing.assert_close(one.float(), new[1].float())
