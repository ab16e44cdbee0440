"""The benchmark of drop-ins without a GPU: its rows cover what is left to PyTorch for being slower here."""

import pytest

from bench.drop_ins import ROWS, Attention, all_served
from cute_attn.sdpa import slower
from cute_attn.sdpa.calls import Inputs, request_of, why_not


def calls():
    """Each row's call under cuDNN, which PyTorch prefers on Hopper, by name."""
    found = {}
    for name, row in ROWS.items():
        if isinstance(row, Attention):
            inputs, mask = row.tensors("cpu" if row.batch < 4 else "meta")
            bias = None if mask is None else mask.to(inputs[0].dtype)
            tensors = Inputs(*(x.transpose(1, 2) for x in inputs), bias)
            options = {"causal": row.causal, "dropout_p": row.dropout_p, "learns": row.train}
            call = request_of("cudnn", tensors, scale=None, **options)
            found[name] = call._replace(devices=frozenset([*call.devices][:1]), target="sm90")
    return found


@pytest.mark.parametrize("row", slower.ROWS, ids=lambda row: row.kind)
def test_each_rule_is_measured(row):
    decisions = {row.applies(call) for call in calls().values()}
    assert decisions == {True, False} and row.ours_ms > row.pytorch_ms


def test_all_are_served_without_the_rules():
    import torch

    cuda = frozenset([torch.device("cuda", 0)])
    of = {name: call._replace(devices=cuda) for name, call in calls().items()}
    declined = [name for name, call in of.items() if why_not(call) is not None]
    inference = [name for name in of if name.startswith("DiT") and "training" not in name]
    assert declined == [name for name in of if name in inference or "1 quer" in name]
    with pytest.raises(ZeroDivisionError), all_served():
        assert not [name for name, call in of.items() if why_not(call) is not None]
        raise ZeroDivisionError
    assert [name for name, call in of.items() if why_not(call) is not None] == declined
