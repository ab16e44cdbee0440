"""The example that generates through a paged cache, on the CPU: its tokens are plain torch's."""

import pytest
import torch

from tests import programs

SMALL = "generate --device cpu --steps 6 --layers 2 --width 256 --longest 20 --batch 3"


@pytest.mark.parametrize("page", ["1", "7", "64"])
def test_every_token_is_plain_torchs(monkeypatch, capsys, page):
    programs.run(monkeypatch, SMALL, "--page", page, "--seed", page)
    assert "18 of 18 tokens are plain torch's most likely ones" in capsys.readouterr().out


BROKEN = {
    "position": lambda given: given | {"cache_seqlens": given["cache_seqlens"] + 1},
    "pairs": lambda given: given | {"rotary_interleaved": True},
    "mask": lambda given: given | {"causal": False},
    "table": lambda given: given | {"page_table": given["page_table"].flip(0)},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_call_is_detected(monkeypatch, name):
    example = programs.load("generate")
    right = example.attention_with_kvcache
    monkeypatch.setattr(
        example, "attention_with_kvcache", lambda *tensors, **given: right(*tensors, **BROKEN[name](given))
    )
    with pytest.raises(SystemExit, match="behind plain torch's"):
        programs.run(monkeypatch, SMALL)


def test_pages_are_handed_out_as_sequences_grow():
    example = programs.load("generate")
    model = example.Llama(1, 128, 1, 0)
    cache = example.PagedCache.make(model, 2, 20, 4, "cpu", torch.float32)
    cache.reserve([5, 0])
    assert cache.reserved == [8, 0] and len(cache.free) == 8
    cache.reserve([8, 1])
    assert cache.reserved == [8, 4] and len(set(cache.table[0, :2].tolist()) | {int(cache.table[1, 0])}) == 3
