"""Traits of the backward, its preprocess and its convert: names, dependences, refusals."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cute_attn.compiler import registry
from cute_attn.traits import ARCHS, BIAS_DTYPES, DROPOUTS, DTYPES, MASKS, PARTS, SINK_DTYPES, Traits
from tests import refusals

dims = st.integers(1, 32).map(lambda n: 8 * n)
flags = st.booleans()


def traits_of(op, **more):
    """Traits of an operation with any features."""
    named = {
        "arch": ARCHS,
        "dtype": DTYPES,
        "variant": ("", "wider"),
        "epilogues": ((), ("mine",), ("mine", "yours_2")),
    }
    named |= {"mask": ("", *MASKS), "bias": ("", *BIAS_DTYPES), "dropout": ("", *DROPOUTS)}
    fields = {name: st.sampled_from(values) for name, values in named.items()}
    fields |= dict.fromkeys(("softcap", "alibi", "varlen", "seqused_q", "seqused_k"), flags)
    return st.builds(Traits, op=st.just(op), head_dim=dims, head_dim_v=dims, **fields | more)


forwards = traits_of("forward", sinks=st.sampled_from(("", *SINK_DTYPES)))
backwards = st.builds(
    lambda x, flag: replace(x, bias_grad=flag and x.bias != ""), traits_of("backward"), flags
)


@given(forwards)
def test_a_name_parses_back(traits):
    assert Traits.parse(traits.name) == traits
    assert str(traits) == traits.name


@given(backwards, st.sampled_from(PARTS), flags)
def test_names_of_a_backward_and_its_parts_parse_back(traits, op, lse_grad):
    assert Traits.parse(traits.name) == traits
    part = traits.part(op, lse_grad=lse_grad and op == "backward_preprocess")
    assert Traits.parse(part.name) == part
    assert part.op == op


def test_names_read_as_documented():
    traits = Traits("backward", "sm90", "bf16", 128, mask="causal", bias="bf16", bias_grad=True)
    assert traits.name == "backward-sm90-bf16-d128-causal-bias_bf16-bias_grad"
    assert traits.part("backward_preprocess", lse_grad=True).name == (
        "backward_preprocess-sm90-bf16-d128-lse_grad"
    )


def test_traits_of_preprocess_and_convert():
    plain = Traits("backward", "sm80", "fp16", 64, 128, varlen=True, seqused_q=True)
    scores = {"mask": "window", "softcap": True, "alibi": True, "bias": "fp32", "bias_grad": True}
    rich = replace(plain, **scores, epilogues=("mine",), dropout="flash", seqused_k=True, variant="wider")
    for op in PARTS:
        part = rich.part(op)
        assert part == plain.part(op) == part.part(op)
        assert part == Traits(op, "sm80", "fp16", 64, 128, varlen=True, seqused_q=True)


BASE = ("sm80", "bf16", 64)


@refusals.each(
    """
Traits("backwards", *BASE)
    -> ValueError: op is 'backwards' (did you mean 'backward'?); accepted: 'forward', 'backward', 'backward_preprocess'
Traits("forward", *BASE, bias="bf16", bias_grad=True)
    -> ValueError: bias_grad is True with op 'forward'; accepted: with op 'backward'
Traits("forward", *BASE, alignment=2) -> ValueError: alignment is 2 with op 'forward'; accepted: with op 'kvcache' or
Traits("kvcache", *BASE, alignment=8) -> ValueError: alignment is 8; accepted: 0, 1, 2, 4
Traits("combine", "sm80", "fp32", 60, alignment=4) -> ValueError: alignment is 4 with dtype 'fp32'; accepted: 0 for 16
Traits("kvcache", "sm80", "bf16", 59, alignment=2) -> ValueError: head_dim is 59; accepted: multiples of 2 up to 576
Traits("backward", *BASE, bias_grad=True) -> ValueError: bias_grad is True without bias; accepted: with bias
Traits("jvp", *BASE, sinks_tangent=True) -> ValueError: sinks_tangent is True without sinks; accepted: with sinks
Traits("forward", *BASE, bias="bf16", bias_tangent=True) -> ValueError: bias_tangent is True with op 'forward'; accepted
Traits("backward", *BASE, lse_grad=True)
    -> ValueError: lse_grad is True with op 'backward'; accepted: with op 'backward_preprocess'
Traits("backward", *BASE).part("forward") -> ValueError: op is 'forward'; accepted: 'backward_preprocess',
Traits("backward", *BASE).part("backward_convert", lse_grad=True)
    -> ValueError: lse_grad is True with op 'backward_convert'; accepted: with op 'backward_preprocess'
Traits("backward", *BASE, epilogues=("bias_grad",)) -> ValueError: epilogues is ... not traits' own words
"""
)
def test_contradictory_traits_are_refused_in_one_sentence(call, sentence):
    refusals.check(call, sentence, globals())


def test_defaults_are_distinct_and_of_every_kernel():
    pairs = registry.defaults()
    assert len(set(pairs)) == len(pairs)
    assert {(traits.op, traits.arch) for traits, _ in pairs} == {
        (op, arch) for op, arch, variant in registry.KERNELS if not variant
    }
