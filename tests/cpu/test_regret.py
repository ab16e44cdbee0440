"""The regret of choices, without a GPU: shapes, candidates, forced choices and the report."""

import json

import pytest

from bench import regret
from bench.decode_rows import Row
from bench.regret_shapes import OPS, Shape, shapes_of
from cute_attn.compiler import registry
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.tiles import ForwardSm90Tile
from tests import machine

GROUPED = Workload(2, 1000, 16, 128, nheads_kv=2, causal=True, op="backward")
SMALL = [
    Shape("forward", Workload(2, 300, 8, 64, nheads_kv=2)),
    Shape("forward", Workload(2, 304, 4, 64, bias="bf16")),
    Shape("forward", Workload(1, 20, 8, 64, nheads_kv=2, seqlen_k=9000)),  # whose keys are divided
    Shape("backward", GROUPED),
    Shape("backward", Workload(1, 1, 8, 256, lengths=(100, 300), op="backward", dtype="fp16")),
    Shape("deterministic", GROUPED),
    Shape("decode", Row(2, 4096)),
    Shape("decode", Row(1, 4096, page=16, causal=True, queries=64, head_dim=64, dtype="fp16")),
    Shape("decode", Row(40, 2000, causal=True, queries=64)),  # whose keys are not divided
    Shape("append", Row(2, 1024, append=2, queries=2, causal=True)),
    Shape("functions", Workload(1, 256, 4, 128, op="backward"), "capped"),
    Shape("masks", Workload(1, 400, 4, 128), "sliding"),
]


def ids(shape):
    return f"{shape.op}-{shape.name}"


@pytest.fixture
def launched(monkeypatch):
    """(kernel, named arguments) of every launch on a Hopper GPU where nothing is computed."""
    found = []

    def function(kernel, target):
        assert target == "sm90"
        return lambda given: found.append((kernel, given))

    machine.gpu(monkeypatch, function)
    return found


def found_candidates(shape):
    prepared = shape.prepared("cpu")
    return prepared, regret.candidates(shape, prepared)


@pytest.mark.parametrize("op", OPS)
def test_a_seed_determines_the_shapes(op):
    first = shapes_of(op, 3, 24)
    assert shapes_of(op, 3, 24) == first and shapes_of(op, 3, 30)[:24] == first
    assert not {shape.name for shape in first} & {shape.name for shape in shapes_of(op, 4, 24)}
    assert len({shape.name for shape in first}) == 24 and {shape.op for shape in first} == {op}
    assert {shape.of.dtype for shape in first} == {"bf16", "fp16"}


@pytest.mark.parametrize("shape", SMALL, ids=ids)
def test_what_is_chosen_comes_first_and_every_kernel_can_be_built(shape, launched):
    prepared, (chosen, *others) = found_candidates(shape)
    assert len({chosen, *others}) == len({one.name for one in (chosen, *others)}) == 1 + len(others)
    del launched[:]
    for one in (chosen, *others):
        with regret.forced(one, regret.new_plans()):
            prepared(*one.named)()
        ops = (shape.kernel_op, "kvcache")
        kernel = next(kernel for kernel, _ in reversed(launched) if kernel.traits.op in ops)
        assert registry.lookup(kernel.traits, kernel.tile, "sm90") == kernel
        assert not one.tile or kernel.tile.text == one.tile


def test_stored_timings_judge_todays_choices(capsys, monkeypatch, tmp_path):
    shapes = SMALL[:4]
    with regret.simulated():
        names = [regret.choice(shape, shape.prepared("cpu")).candidate.name for shape in shapes]

    def row(shape, **given):
        return {"op": shape.op, "workload": shape.name, "best_ms": 1.0, "best": "another", **given}

    rows = [
        row(shapes[0], chosen=names[0], ms=1.02, regret=0.02, times={names[0]: 1.1, "another": 1.0}),
        row(shapes[1], chosen="another", ms=1.0, regret=0.0, times={names[1]: 1.5, "another": 1.0}),
        row(shapes[2], chosen="another", ms=1.0, regret=0.0, times={"third": 1.5, "another": 1.0}),
        row(shapes[3], chosen=names[3], ms=1.0, regret=0.0, times={names[3]: 1.0}),  # there was no choice
    ]
    monkeypatch.setattr(regret, "shapes_of", lambda op, *_: [shape for shape in shapes if shape.op == op])
    found = list(regret.judged({"seed": 0, "rows": rows}, OPS, 24))
    assert [one.get("regret") for one in found] == [0.02, 0.5, None]
    assert found[2]["error"] == f"{names[2]} was not timed"
    assert regret.summary(found) == "forward          2 shapes, mean  26.0%, worst  50.0%"

    words = (
        names[0].replace(",", " ").split()
    )  # timed when tiles had fewer fields, or with another value of one
    field = next(x for x in words if x in ForwardSm90Tile.inert_fields())
    older, other = (",".join(filter(None, (new if x == field else x for x in words))) for new in ("", "x=1"))
    monkeypatch.setattr(regret, "shapes_of", lambda op, *_: [shapes[0]] if shapes[0].op == op else [])
    for name in (older, other):
        times = {name: 2.0, "another": 1.0}
        (one,) = regret.judged({"seed": 0, "rows": [row(shapes[0], chosen="another", times=times)]}, OPS, 24)
        assert one.get("regret") == (1.0 if name == older else None)

    path = tmp_path / "stored.json"
    path.write_text(json.dumps({"seed": 0, "rows": rows[:2]}))
    monkeypatch.setattr(regret, "shapes_of", lambda op, *_: [shape for shape in shapes if shape.op == op])
    monkeypatch.setattr("sys.argv", ["regret", "--op", "forward", "--judge", str(path)])
    regret.main()
    assert "regret  50.0%" in capsys.readouterr().out
