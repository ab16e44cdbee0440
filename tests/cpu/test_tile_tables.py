"""The tables of default tiles: each row has its evidence, which is on record or can be built again."""

import importlib
import re
from pathlib import Path

import pytest

from cute_attn.compiler import compile
from cute_attn.kernels.backward_sm80.heuristics import in_passes, keys
from cute_attn.tiles import Tile, first_that_fits
from cute_attn.tiles.base import REGISTERS_PER_THREAD
from cute_attn.tiles.table import Cell, Row, Table
from cute_attn.traits import Traits
from cute_attn.work.block_range import divides
from tests.cpu.test_examples import load

ROOT = Path(__file__).parents[2]
TABLES = {
    path.parent.name: importlib.import_module(f"cute_attn.kernels.{path.parent.name}.heuristics").TABLE
    for path in sorted((ROOT / "cute_attn/kernels").glob("*/tiles.csv"))
}
ROWS = [(kernel, row) for kernel, table in TABLES.items() for row in table.rows]
BUILT_ROWS = [(kernel, row) for kernel, row in ROWS if row.built]
MEASURED = re.compile(
    r"([\d.]+) (TFLOP/s|GB/s)(?: and causal ([\d.]+))? on (\S+); ([A-Z]\d+[\w ]*); ([0-9a-f]{7,12})"
)
BUILT = re.compile(r"(\S+) on (sm\d\d): (\d+) registers, (\d+) bytes, (\d+) spills")
SPILL = {"forward_sm80/fp32-16-rows": 108, "backward_sm80/large-16-keys": 8}
"""Rows -> bytes that they spill, which is known: of head dims that few programs have."""


def missing(kernel: str, row: Row, tables: dict[str, Table]) -> str:
    """What is missing in a row's evidence, or ""."""
    if row.measured:
        return "" if MEASURED.fullmatch(row.measured) else f"measured is {row.measured!r}"
    built = BUILT.fullmatch(row.built)
    if built is None:
        return f"neither measured nor built: {row.built!r}"
    if int(built[5]) != SPILL.get(f"{kernel}/{row.name}", 0):
        return f"built {row.built!r}, which spills"
    folder, _, name = row.like.rpartition("/")
    other = [one for one in tables[folder or kernel].rows if one.name == name]
    return "" if other and other[0].measured else f"like {row.like!r}, which names no measured row"


def named(one: tuple[str, Row]) -> str:
    return f"{one[0]}/{one[1].name}"


def test_there_is_a_table_for_each_kernel_with_products():
    kernels = {path.parent.name for path in (ROOT / "cute_attn/kernels").glob("*/kernel.py")}
    assert set(TABLES) == kernels and all(table.rows for table in TABLES.values())


def test_each_row_has_its_evidence():
    found = {named((kernel, row)): missing(kernel, row, TABLES) for kernel, row in ROWS}
    assert {name: what for name, what in found.items() if what} == {}


def test_names_of_rows_are_their_own():
    for kernel, table in TABLES.items():
        names = [row.name for row in table.rows]
        assert len(set(names)) == len(names), kernel


def test_measured_speeds_are_on_record():
    files = [*(ROOT / "bench/results").glob("*.json"), *(ROOT / "bench").glob("*.md")]
    texts = [path.read_text() for path in files]
    measured = [
        (f"{kernel}/{row.name}", MEASURED.fullmatch(row.measured)) for kernel, row in ROWS if row.measured
    ]
    assert len(measured) > 60
    for name, found in measured:
        numbers = [number for number in (found[1], found[3]) if number]
        patterns = [re.compile(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)") for number in numbers]
        assert any(found[6] in text and all(p.search(text) for p in patterns) for text in texts), name


def as_built(row: Row, traits: Traits, target: str) -> Tile:
    """A row's tile, of the Ampere backward in the fewest passes that fit."""
    tiles = in_passes(row.tile, traits) if hasattr(row.tile, "dq_passes") else [row.tile]
    return first_that_fits(tiles, traits, target)


def built_of(row: Row) -> tuple[Traits, str, int, int, int]:
    """Fields of a row's build: traits, target, registers, shared memory and spills."""
    name, target, *numbers = BUILT.fullmatch(row.built).groups()
    if "relative_position" in name:
        load("custom_epilogue")
    return Traits.parse(name), target, *map(int, numbers)


@pytest.mark.parametrize("built", BUILT_ROWS, ids=named)
def test_what_was_built_is_a_kernel_of_its_tile(built):
    _, row = built
    traits, target, registers, smem_bytes, _ = built_of(row)
    tile = as_built(row, traits, target)
    assert tile.reject(traits, target) is None
    assert smem_bytes <= tile.smem_bytes(traits) and registers <= REGISTERS_PER_THREAD


def pytest_generate_tests(metafunc):
    if "rebuilt" in metafunc.fixturenames:
        rows = sorted(BUILT_ROWS, key=lambda one: "relative_position" in one[1].built)
        if not metafunc.config.getoption("--every-default", default=False):
            rows = {kernel: (kernel, row) for kernel, row in reversed(rows)}.values()
        params = [
            pytest.param(one, marks=() if one[0] == "forward_sm80" else pytest.mark.slow, id=named(one))
            for one in rows
        ]
        metafunc.parametrize("rebuilt", params)


def test_a_built_row_has_its_registers(rebuilt):
    """The first of each kernel that has no user's function."""
    kernel, row = rebuilt
    traits, target, registers, smem_bytes, spills = built_of(row)
    used = compile(traits, as_built(row, traits, target), target).resources
    assert (used.registers, used.shared_memory_bytes) == (registers, smem_bytes)
    assert used.spill_store_bytes == spills == SPILL.get(f"{kernel}/{row.name}", 0)


def test_rows_for_listed_blocks_divide_them():
    for table in TABLES.values():
        columns = table.path.read_text().partition("\n")[0].split(",")
        if "blocks" in columns:
            place = columns.index("blocks") - 1
            assert not [row.name for row in table.rows if row.keys[place] != "all" and not divides(row.tile)]


def test_keys_match_words_and_ranges():
    keys = ("33-64 128", "", "listed all", "7-")
    row = Row("", keys, tuple(map(Cell.of, keys)), None, "", "", "")
    assert row.matches((33, "any", "all", 7)) and row.matches((128, 0, "listed", 99))
    for keys in ((32, "any", "all", 7), (65, "any", "all", 7), (64, "any", "half", 7), (64, "any", "all", 6)):
        assert not row.matches(keys)
    assert not row.matches(("none", "any", "all", 7))


def test_a_default_in_as_many_passes_as_it_takes_is_no_row_to_change():
    traits = Traits.parse("backward-sm80-bf16-d512")
    with pytest.raises(
        ValueError, match=r"the default tile of backward-sm80-bf16-d512 on sm90 is no row of .*tiles\.csv"
    ):
        TABLES["backward_sm80"].line(traits, "sm90", keys(traits, "sm90"), "tile_m=32", "")


def test_columns_that_are_no_tables_are_refused(tmp_path):
    (tmp_path / "tiles.csv").write_text("row,head_dim,tile,measured,built\n")
    with pytest.raises(
        ValueError, match=r"tiles\.csv begins with other columns than row, keys, tile, measured, built"
    ):
        _ = Table(str(tmp_path / "heuristics.py"), TABLES["forward_sm80"].tile).rows
