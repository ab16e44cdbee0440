"""Counters of forward kernels by stream, without a GPU."""

from cute_attn.host import counters


class Numbers:
    """Counters of a stream; another one is added while they are read."""

    def __init__(self, of_streams):
        self.of_streams = of_streams

    def __getitem__(self, index):
        self.of_streams[len(self.of_streams)] = [0] * 4
        return 3


def test_replayed_tiles_are_added_up_while_streams_are_added(monkeypatch):
    of_streams = {}
    of_streams["first"], of_streams["second"] = Numbers(of_streams), Numbers(of_streams)
    monkeypatch.setattr(counters, "_of_streams", of_streams)
    assert counters.replayed_tiles() == 6
