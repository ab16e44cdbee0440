"""DTensors: in two processes, each case equals the call of whole tensors, and is divided where it can be."""

import itertools

import pytest

from tests import dtensors, processes

PAIRS = [
    *itertools.product(dtensors.CASES, ("heads", "sequences")),
    *(("grouped", placement) for placement in ("queries", "whole", "sum")),
    ("cache", "queries"),
    ("append", "queries"),
]
WHOLE = [
    ("function of heads", "heads"), ("function of sequences", "sequences"), ("packed", "sequences"),
    ("dropout", "heads"), ("dropout", "sequences"),
]  # fmt: skip
"""Calls that cannot be divided as their tensors are."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return dtensors.compare("cpu", tmp_path_factory.mktemp("dtensors"), PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_equals_the_call_of_whole_tensors(found, pair):
    case, placement = pair
    if pair == ("append", "queries"):
        assert "k_cache or v_cache is divided otherwise" in found[pair]
        return
    assert isinstance(found[pair], dict), found[pair]
    placements = dict(found[pair])
    out, lse = placements.pop("out"), placements.pop("lse")
    if placement not in ("heads", "sequences"):
        assert placement != "whole" or out == "R"
    elif pair in WHOLE:
        assert (out, lse) != (("S(2)", "S(1)") if placement == "heads" else ("S(0)", "S(0)"))
    elif placement == "sequences":
        shared = {"dsinks", "dtable", *(["dbias"] if case != "bias" else [])}
        assert out == lse == "S(0)"
        assert placements == {key: "P(sum)" if key in shared else "S(0)" for key in placements}
    else:
        own = {
            "dsinks": "S(0)",
            "dtable": "P(sum)",
            "max_scores": "S(1)",
            "dbias": "P(sum)" if case == "broadcast bias" else "S(1)",
        }
        shared = dict.fromkeys(("dk", "dv"), "P(sum)") if case == "one key head" else {}
        rows = "S(1)" if case == "packed" else "S(2)"
        assert (out, lse) == ((rows, "S(0)") if case == "packed" else (rows, "S(1)"))
        assert placements == {key: (own | shared).get(key, rows) for key in placements}


def test_calls_of_whole_tensors_do_not_import_dtensors():
    code = "import sys, torch, cute_attn; q = torch.randn(1, 4, 2, 8); cute_attn.attention(q, q, q)\n"
    done = processes.alone("-c", code + "assert 'torch.distributed.tensor' not in sys.modules")
    assert done.returncode == 0, done.stderr
