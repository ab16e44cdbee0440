"""The regret of choices without a GPU: which shapes and candidates there are, what is forced, and what is reported."""

import itertools
import json

import pytest
import torch

from bench import regret
from bench.decode_rows import Row
from bench.regret_shapes import FUNCTIONS, MASKS, MAX_CACHE, OPS, Shape, shapes_of
from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.lab.benchmark import results, timing
from cute_attn.lab.benchmark.workload import Workload
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
    Shape(
        "decode", Row(40, 2000, causal=True, queries=64)
    ),  # whose keys are not divided, by a tile that shares lack
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


# ---- shapes ----


@pytest.mark.parametrize("op", OPS)
def test_a_seed_determines_the_shapes(op):
    first = shapes_of(op, 3, 24)
    assert shapes_of(op, 3, 24) == first and shapes_of(op, 3, 30)[:24] == first
    assert not {shape.name for shape in first} & {shape.name for shape in shapes_of(op, 4, 24)}
    assert len({shape.name for shape in first}) == 24 and {shape.op for shape in first} == {op}
    assert {shape.of.dtype for shape in first} == {"bf16", "fp16"}


def test_every_feature_is_among_the_shapes():
    dense = [shape.of for op in ("forward", "backward") for shape in shapes_of(op, 0, 24)]
    for feature in ("lengths", "windowed", "softcap", "causal", "dropout", "bias"):
        assert any(getattr(w, feature) for w in dense), feature
    assert any(w.nheads > w.nheads_kv for w in dense)
    assert [s.of for s in shapes_of("deterministic", 0, 24)] == [s.of for s in shapes_of("backward", 0, 24)]
    for op, functions in (("functions", FUNCTIONS), ("masks", MASKS)):
        found = {(s.function, s.of.op) for s in shapes_of(op, 0, 24)}
        assert found == set(itertools.product(functions, ("forward", "backward")))
    for op in ("decode", "append"):
        rows = [shape.of for shape in shapes_of(op, 0, 24)]
        assert all((row.append > 0) == (op == "append") and row.append <= row.keys for row in rows)
        assert {bool(row.page) for row in rows} == {True, False} and len({row.queries for row in rows}) > 2
        assert all(row.batch * row.capacity * row.heads[1] * row.head_dim <= MAX_CACHE for row in rows)


# ---- candidates ----


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


def test_a_forward_of_few_queries_chooses_between_dividing_keys_and_a_tile(launched):
    _, (chosen, *others) = found_candidates(SMALL[2])
    assert chosen.split and not chosen.tile
    assert {bool(one.tile) for one in others} == {bool(one.split) for one in others} == {True, False}
    assert not any(one.tile and one.split for one in others)


def test_a_forward_of_many_keys_could_divide_them(launched):
    shape = Shape("forward", Workload(1, 500, 16, 64, seqlen_k=2000, causal=True))
    prepared, found = found_candidates(shape)
    (one,) = [one for one in found if one.split]
    del launched[:]
    with regret.forced(one, regret.new_plans()):
        prepared(*one.named)()
    assert [kernel.traits.op for kernel, _ in launched] == ["kvcache", "combine_shares"]
    assert not any(one.split for one in found_candidates(SMALL[0])[1])


def test_forced_splits_are_those_of_the_launch(launched):
    prepared, (chosen, *others) = found_candidates(SMALL[3])
    forced = {}
    for one in (chosen, *others):
        del launched[:]
        with regret.forced(one, regret.new_plans()):
            prepared(*one.named)()
        (given,) = [given for kernel, given in launched if kernel.traits.op == "backward"]
        forced[one.head_splits] = 2 * one.head_splits == given.mDK.shape[-2]
    assert {1, 2, 4, 8} <= set(forced) and all(forced.values())


def test_deterministic_calls_have_candidates_for_both_kinds_of_splits(launched):
    _, (chosen, *others) = found_candidates(SMALL[5])
    assert chosen.head_splits and chosen.key_splits
    assert {one.key_splits for one in others} >= {1, 4, 8} - {chosen.key_splits}
    assert {one.head_splits for one in others} >= {1, 4, 8} - {chosen.head_splits}
    assert not found_candidates(SMALL[3])[1][0].key_splits


def test_a_cache_is_divided_in_all_three_ways(launched):
    prepared, found = found_candidates(SMALL[6])
    kinds = set()
    for one in found:
        del launched[:]
        with regret.forced(one, regret.new_plans()):
            prepared(*one.named)()
        ops = [kernel.traits.op for kernel, _ in launched]
        combined = {"parts": "combine", "shares": "combine_shares", "": "kvcache"}[one.split.how]
        assert ops[-1] == combined
        kinds.add(one.split.how)
    assert kinds == {"", "parts", "shares"}


# ---- building ----


def test_parts_build_what_timing_launches_each_once(launched, monkeypatch):
    shapes = [SMALL[0], SMALL[5], SMALL[6]]
    wanted = regret.needed(shapes)
    del launched[:]
    for shape in shapes:
        prepared, found = found_candidates(shape)
        for one in found:
            with regret.forced(one, regret.new_plans()):
                prepared(*one.named)()
    assert {f"{kernel.traits} {kernel.tile} sm90" for kernel, _ in launched} == set(wanted)
    built = []
    monkeypatch.setattr(regret, "needed", lambda chosen: wanted)
    monkeypatch.setattr(
        compiler, "build", lambda kernel, target: built.append(f"{kernel.traits} {kernel.tile} {target}")
    )
    assert sum(regret.build(shapes, part, 3) for part in range(3)) == len(wanted)
    assert sorted(built) == sorted(wanted)


# ---- what is reported ----


def test_the_regret_is_of_times_that_were_taken_in_alternation(launched):
    """The first times of the fastest are too good; those that count are of the second round."""
    rounds = []

    def medians(runs, milliseconds, count, most):
        for call in runs.values():
            call()
        rounds.append((list(runs), count))
        slower = 1.0 if len(rounds) == 1 else 1.1
        return {name: slower * (3.0 - 0.01 * i) if i else 3.0 for i, name in enumerate(runs)}

    row, call = regret.regret(SMALL[3], medians, 10.0, device="cpu")
    (first, _), (again, count) = rounds
    assert again[0] == first[0] == row["chosen"] and again[1:] == first[:-4:-1] and count > 3
    assert row["regret"] == 0 and row["best"] == "the same" and min(row["times"].values()) < row["ms"]
    assert set(row["times"]) == set(first) and "declined" not in row
    call()


def test_a_chosen_one_that_is_best_has_no_regret(launched):
    row, _ = regret.regret(
        SMALL[0], lambda runs, *_: {name: 2.0 + i for i, name in enumerate(runs)}, 10.0, "cpu"
    )
    assert row["regret"] == 0 and row["best"] == "the same" and row["ms"] == row["best_ms"] == 2.0


def test_rows_and_summary_say_what_was_chosen_and_what_was_best(launched):
    def medians(runs, *_):
        return {name: 1.0 + i / 50 for i, name in enumerate(reversed(runs))}

    rows = [regret.regret(shape, medians, 10.0, "cpu")[0] for shape in SMALL[:2]]
    assert all(row["regret"] > 0 and row["best"] != "the same" for row in rows)
    assert rows[0]["best"] in regret.line(rows[0]) and f"{rows[0]['regret']:.1%}" in regret.line(rows[0])
    alone = rows[0] | {"times": {"the only one": 1.0}, "regret": 0.0}  # nothing was chosen
    failed = {"op": "decode", "workload": "b1", "error": "RuntimeError: lost"}
    assert "lost" in regret.line(failed)
    (text,) = regret.summary([*rows, alone, failed]).splitlines()
    worst = max(row["regret"] for row in rows)
    assert text.startswith("forward") and "2 shapes" in text and f"worst {worst:6.1%}" in text


def test_a_tile_that_a_call_cannot_have_is_reported(launched, monkeypatch):
    found = regret.candidates

    def with_another(shape, call, target="sm90"):
        first, *_ = found(shape, call, target)
        return [first, regret.replace(first, tile="tile_n=7")]

    monkeypatch.setattr(regret, "candidates", with_another)
    row, _ = regret.regret(SMALL[0], lambda runs, *_: dict.fromkeys(runs, 1.0), 10.0, "cpu")
    assert list(row["times"]) == [row["chosen"]] and "tile_n" in row["declined"]["tile_n=7"]


def test_a_run_is_written_row_by_row_and_goes_on_after_an_error(launched, tmp_path, monkeypatch, capsys):
    class Clock:
        def medians(self, runs, *_):
            return {name: 2.0 - i / 100 for i, name in enumerate(runs)}

    def prepared(shape, device, on=Shape.prepared):
        if shape is SMALL[6]:
            raise RuntimeError("out of memory")
        return on(shape, "cpu")

    monkeypatch.setattr(Shape, "prepared", prepared)
    monkeypatch.setattr(
        results, "machine", lambda: {"gpu": "NVIDIA H100", "date": "2026-11-25", "clock_mhz": None}
    )
    monkeypatch.setattr(timing, "Clock", Clock)
    monkeypatch.setattr(timing, "clock_under_load", lambda call, ms: call() or 1755)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(regret, "shapes_of", lambda op, *_: {"forward": SMALL[:2], "decode": SMALL[6:8]}[op])
    path = tmp_path / "x.json"
    monkeypatch.setattr("sys.argv", ["regret", "--op", "forward", "decode", "-o", str(path)])
    regret.main()
    result = json.loads(path.read_text())
    assert (
        result["clock_mhz"] == 1755
        and [row["op"] for row in result["rows"]] == ["forward"] * 2 + ["decode"] * 2
    )
    assert [row.get("error") for row in result["rows"]] == [None, None, "RuntimeError: out of memory", None]
    assert all(row["regret"] > 0 for row in result["rows"] if "regret" in row)
    assert "decode           1 shapes" in capsys.readouterr().out


def test_the_command_needs_a_gpu_to_time_and_none_to_list(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["regret", "--op", "decode", "append", "--rows", "2", "--list"])
    regret.main()
    assert len(capsys.readouterr().out.splitlines()) == 4
    monkeypatch.setattr("sys.argv", ["regret", "--op", "decode"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        regret.main()


def test_the_picture_shows_each_op():
    pytest.importorskip("matplotlib")
    times = {"chosen": 1.0, "another": 1.0}
    rows = [{"op": op, "regret": r, "times": times} for op in ("forward", "decode") for r in (0.0, 0.02, 0.2)]
    without = {"op": "append", "regret": 0.0, "times": {"the only one": 1.0}}
    figure = regret.picture({"rows": [*rows, without, {"op": "masks", "error": "lost"}]})
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["forward, mean 7.3%", "decode, mean 7.3%"]
