"""DTensors on two GPUs: each case equals the call of whole tensors."""

import itertools

import pytest
import torch

from tests import dtensors

CASES = ("grouped", "one key head", "broadcast bias", "sinks", "packed", "compiled", "append")
PAIRS = list(itertools.product(CASES, ("heads", "sequences")))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_equal_the_calls_of_whole_tensors(tmp_path):
    found = dtensors.compare("cuda", tmp_path, PAIRS)
    assert not [(pair, what) for pair, what in found.items() if isinstance(what, str)]
