"""Counters of forward kernels by stream, without a GPU."""

import torch

from cute_attn.host import counters


class Numbers:
    """Counters of a stream; another one is added while they are read."""

    def __init__(self, of_streams):
        self.of_streams = of_streams

    def __getitem__(self, index):
        self.of_streams[len(self.of_streams)] = [0] * 4, None
        return 3


def test_replayed_tiles_are_added_up_while_streams_are_added(monkeypatch):
    of_streams = {}
    of_streams |= {name: (Numbers(of_streams), None) for name in ("first", "second")}
    monkeypatch.setattr(counters, "_of_streams", of_streams)
    assert counters.replayed_tiles() == 6


def test_each_stream_has_counters_of_its_own(monkeypatch):
    monkeypatch.setattr(counters, "_of_streams", {})
    monkeypatch.setattr(counters, "_is_capturing", lambda: False)
    monkeypatch.setattr(counters, "_allocate", lambda device: torch.zeros(4, dtype=torch.int32))
    monkeypatch.setattr(counters, "multiprocessors", lambda device: 132)
    found = []
    for stream in (5, 5, 6):
        monkeypatch.setattr(counters, "_current_stream", lambda device, own=stream: own)
        found.append(counters.schedule(0))
    first, again, other = found
    assert first is again and first[1] == 132
    assert torch.from_dlpack(first[0]).data_ptr() != torch.from_dlpack(other[0]).data_ptr()
