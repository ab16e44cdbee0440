"""The decode benchmark without a GPU: its rows, their inputs, what it says of peers, its table and picture."""

import itertools
import json
import math

import pytest
import torch

from bench import decode, decode_impls, decode_picture, run
from bench import table as bench_table
from bench.decode_rows import MIXED, Row, make_inputs, rows
from bench.read_only import ReadOnly, compiled
from cute_attn.lab.benchmark.peers import Declined

ROWS = list(rows())


# ---- rows ----


def test_names_are_distinct_and_found_by_patterns():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {"b1-k32768", "b16-k8192-page1", "b64-k32768-ragged", "mixed-2xq2048k4096-64xk8192"} <= set(names)
    assert sum(run.matches(name, ["b1-k*"]) for name in names) >= 7
    assert sum(run.matches(name, ["*page*"]) for name in names) == 3


def visible(row: Row, queries: int, keys: int) -> list[set[int]]:
    """Each query's keys."""
    found = []
    for i in range(queries):
        own = keys - queries + i
        last = own if row.causal else keys - 1
        first = own - row.window if row.window else 0
        found.append(set(range(max(first, 0), last + 1)))
    return found


SMALL = [
    Row(3, 50),
    Row(2, 40, heads=(6, 2), head_dim=64, queries=5, causal=True),
    Row(2, 40, window=7, causal=True),
    Row(2, 40, window=7, causal=True, queries=3, head_dim=16),
    Row(2, 40, heads=(4, 1), page=8, head_dim=16),
    Row(2, 37, heads=(4, 2), page=3, append=1, causal=True, head_dim=16),
    Row(5, 2000, heads=(2, 1), ragged=True, head_dim=16),
]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_bytes_and_operations_are_counted(row):
    seen = [visible(row, *lengths) for lengths in row.sequences]
    pairs = sum(len(keys) for one in seen for keys in one)
    assert row.flops == 4 * row.head_dim * row.heads[0] * pairs
    assert row.read_bytes == sum(4 * row.head_dim * row.heads[1] * len(set().union(*one)) for one in seen)
    assert row.copies >= 2 and row.copies <= 64


def test_rows_are_cold_and_fit():
    for row in ROWS:
        assert row.copies * row.read_bytes >= 200e6, row.name
        allocated = row.copies * len(row.sequences) * row.capacity * 4 * row.head_dim * row.heads[1]
        assert allocated < 40e9, row.name


def test_a_ragged_batch_is_the_same_in_every_run():
    row = next(row for row in ROWS if row.ragged)
    lengths = [keys for _, keys in row.sequences]
    assert row.sequences == row.sequences and len(set(lengths)) > 50
    assert min(lengths) >= 1024 and max(lengths) <= 32768


# ---- inputs and our call ----


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_our_call_is_attention_with_the_rows_keys(row):
    """Against plain torch over the keys that the row says, through the tables of pages."""
    x, other = make_inputs(row, "cpu", copies=2)
    assert x.q is other.q and not x.k_cache.equal(other.k_cache)
    out = decode_impls.ours("sm90")(row, x)[""](x).float()
    for b, (queries, keys) in enumerate(row.sequences):
        k, v = x.k_cache[b] if not row.page else x.k_cache, x.v_cache[b] if not row.page else x.v_cache
        if x.page_table is not None:
            k, v = (cache[x.page_table[b].long()].flatten(0, 1) for cache in (k, v))
        group = row.heads[0] // row.heads[1]
        k, v = (y[:keys].float().repeat_interleave(group, 1) for y in (k, v))
        q = x.q[b].float()
        if row.append:
            continue  # the queries are rotated: the cache has the new key
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(row.head_dim)
        for i, own in enumerate(visible(row, queries, keys)):
            hidden = [key for key in range(keys) if key not in own]
            scores[:, i, hidden] = -math.inf
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        torch.testing.assert_close(out[b], wanted, atol=2e-2, rtol=2e-2)


def test_an_append_fills_the_last_rows():
    row = next(row for row in SMALL if row.append)
    (x,) = make_inputs(row, "cpu", copies=1)
    assert x.cache_seqlens.tolist() == [36, 36] and x.rotary_cos.shape == (39, 8)
    decode_impls.ours("sm90")(row, x)[""](x)
    for b in range(2):
        page = x.page_table[b, 36 // 3]
        assert x.v_cache[page, 36 % 3].equal(x.v[b, 0])


def test_packed_queries_of_a_mixed_batch():
    row = next(row for row in ROWS if row.mixed)
    queries = [n for n, _ in MIXED]
    assert row.sequences == MIXED and row.packed and row.capacity == max(keys for _, keys in MIXED)
    assert sum(queries) == 2 * 2048 + 64
    pairs = sum(n * k - n * (n - 1) // 2 for n, k in MIXED)
    assert row.flops == 4 * 128 * 32 * pairs


# ---- peers ----


DECLINED = {
    "cudnn": ["b16-k8192-page1", "b64-k32768-ragged", "b8-k8192-q16-causal", "b16-k32768-window4096"],
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, some in DECLINED.items() for row in some])
def test_what_a_peer_cannot_compute_is_declined(name, row):
    one = next(r for r in ROWS if r.name == row)
    with pytest.raises(Declined):
        decode_impls.PEERS[name](one, None)


def test_a_call_that_fails_or_differs_is_an_error_of_its_implementation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = SMALL[0]
    inputs = make_inputs(row, "cpu", copies=1)
    right = decode_impls.ours("sm90")

    def declines(row, x):
        raise Declined("it has no caches")

    def raises(row, x):
        raise KeyError("a")

    def breaks(row, x):
        return {"a": lambda x: x.missing, "b": right(row, x)[""]}

    def differs(row, x):
        return {"": lambda x: right(row, x)[""](x) * 1.2}

    given = {"declines": declines, "raises": raises, "right": right, "breaks": breaks, "differs": differs}
    monkeypatch.setattr(decode_impls, "IMPLEMENTATIONS", given)
    stages = []
    calls, errors = decode.ready(row, tuple(given), inputs, stages.append)
    assert set(calls) == {("right", ""), ("breaks", "b")} and stages == [(name,) for name in given]
    assert errors["declines"] == "it has no caches" and set(errors) == {"declines", "raises", "differs"}
    assert errors["differs"].startswith("its output differs from right's by 0.2")


def test_the_ampere_kernel_is_timed_where_a_row_asks():
    one, other = Row(1, 64, ampere=True), Row(1, 64)
    assert decode_impls.names_of(one, "sm90")[-2:] == ("cute_attn/sm90", "cute_attn/sm80")
    assert decode_impls.names_of(other, "sm90")[-1] == "cute_attn/sm90"
    assert decode_impls.names_of(one, "sm80")[-1] == "cute_attn/sm80"
    names = [row.name for row in ROWS if row.ampere]
    assert names[:4] == ["b1-k32768", "b16-k8192", "b64-k4096", "b128-k2048"] and len(names) == 8


# ---- reading alone ----


def test_reading_alone_has_all_loads_in_flight(tmp_path):
    kernel = ReadOnly(unroll=4)
    ptx = compiled(kernel, "sm_90a", f"--keep-ptx --dump-dir {tmp_path}").__ptx__
    lines = [line.split()[0] for line in ptx.splitlines() if "ld.global" in line or "add.s32" in line]
    loads = [i for i, word in enumerate(lines) if word.startswith("ld.global")]
    assert len(loads) == 4 and all("v4" in lines[i] for i in loads)
    assert loads == list(range(loads[0], loads[0] + 4))  # before any of them is added up
    assert kernel.tile == 512 * 4 * 4


# ---- the command ----


def test_the_command_names_its_rows(capsys):
    decode.main(["--list", "--rows", "*page*"])
    assert capsys.readouterr().out.split() == ["b16-k8192-page64", "b16-k8192-page16", "b16-k8192-page1"]
    with pytest.raises(SystemExit, match="no row matches"):
        decode.main(["--rows", "b3-*"])
    with pytest.raises(SystemExit):
        decode.main(["--row-pattern", "x"])


def result():
    """Lines of two rows and one that a peer cannot compute."""
    lines = [{"workload": "read-only", "impl": "torch.sum", "ms": 0.5, "value": 4000.0, "unit": "GB/s"}]
    times = {"cute_attn/sm90": 0.04, "fa3": 0.05, "cudnn": 0.06}
    for row, (name, ms) in itertools.product(ROWS[:3], times.items()):
        value = round(row.read_bytes / ms / 1e6, 1)
        lines.append(
            {"workload": row.name, "impl": name, "ms": ms, "value": value, "unit": "GB/s", "how": ""}
        )
    lines.append({"workload": "b16-k8192-page1", "impl": "cudnn", "error": "cuDNN has no pages"})
    lines.append({"workload": "b16-k8192-page1", "impl": "cute_attn/sm90", "ms": 0.1, "value": 5368.7})
    return {"gpu": "A GPU", "clock_mhz": 1900, "rows": lines}


def test_the_table_has_times_parts_of_the_ceiling_and_ratios():
    head, *lines = decode_picture.table(result()).splitlines()
    assert "read-only 4000 GB/s" in head and [line.split()[0] for line in lines] == [
        *(row.name for row in ROWS[:3]),
        "b16-k8192-page1",
    ]
    _, us, speed, part, fa3, cudnn, ratio = lines[2].split()
    assert (us, fa3, cudnn, ratio) == ("40.0", "50.0", "60.0", "1.25")
    assert float(part) == pytest.approx(float(speed) / 4000, abs=0.01)
    assert lines[3].split()[-3:] == ["-", "-", "-"]


def test_a_result_is_shown_without_a_gpu(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result()))
    decode.main(["--result", str(path)])
    assert "b1-k1024" in capsys.readouterr().out
    picture = path.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_a_result_without_times_is_shown_too(tmp_path):
    lines = [{"workload": "b1-k1024", "impl": "fa3", "error": "FA3 is not installed"}]
    empty = {"gpu": "A GPU", "clock_mhz": None, "rows": lines}
    assert "b1-k1024" in decode_picture.table(empty)
    assert decode_picture.plot(empty, tmp_path / "x.png").stat().st_size > 5000


def test_the_readme_has_a_row_for_each_call():
    lines = bench_table.decode_table(result()).splitlines()
    calls = [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]
    assert calls == list(decode_picture.speeds(result()))
    cells = dict(zip(lines[0].strip("| ").split(" | "), lines[2].strip("| ").split(" | "), strict=True))
    by_impl = decode_picture.speeds(result())[calls[0]]
    ours = by_impl["cute_attn/sm90"]
    assert cells["**cute_attn**"] == f"{1e3 * ours['ms']:.1f}" and cells["GB/s"] == f"{ours['value']:.0f}"
    peers = [line["ms"] for name, line in by_impl.items() if not name.startswith("cute_attn/")]
    assert cells["best peer / best"] == f"{min(peers) / ours['ms']:.2f}"
    machine = {"driver": "1", "torch": "2", "cutlass_dsl": "3", "peers": {"fa3": "4"}}
    section = bench_table.section(result() | machine, "bench/results/x.json")
    assert section.startswith("<!-- decode table -->\nMicroseconds") and "reading alone takes" in section
