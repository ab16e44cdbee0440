"""Counters of forward kernels by stream, without a GPU: threads that ask for them at the same time."""

import pytest

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


@pytest.fixture
def streams(monkeypatch):
    """CUDA streams without a GPU: ``streams.current`` is the current stream, and counters are plain numbers."""
    monkeypatch.setattr(counters, "_of_streams", {})
    monkeypatch.setattr(counters, "_free", {})
    monkeypatch.setattr(counters, "_is_capturing", lambda: False)
    monkeypatch.setattr(counters, "_current_stream", lambda device: next(asked))
    asked = iter(range(100))


def test_another_thread_may_take_the_last_counters(streams, monkeypatch):
    class Taken(list):
        """Another thread removes the last element between a check and the next step."""

        def __bool__(self):
            found = len(self) > 0
            self.clear()
            return found

    allocated = iter([["a", "b"], ["c", "d"]])
    monkeypatch.setattr(counters, "_allocate", lambda device: next(allocated))
    counters._free[0] = Taken(["last"])
    found = [counters.work_counters(0) for _ in range(3)]
    assert len(set(found)) == 3 and len(counters._of_streams) == 3
