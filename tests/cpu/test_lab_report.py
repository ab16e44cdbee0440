"""The page of a result, and the commands of the laboratory that need no GPU."""

import functools
import html.parser
import itertools
import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_attn.compiler import registry
from cute_attn.lab import ledger, report
from cute_attn.lab.card import Contender
from cute_attn.lab.pictures import Pictures, pictures
from cute_attn.lab.race import ab
from cute_attn.lab.study import Candidate, Study
from cute_attn.traits import Traits
from tests import processes
from tests.simulated_card import SimulatedCard

ROOT = Path(__file__).parents[2]
NAME = "forward-sm90-bf16-d128-causal"
CHANGE = "speculative=false"


@functools.cache
def comparison():
    card = SimulatedCard(lambda contender, workload: 1.03 if contender.tile else 1.0)
    return ab((NAME, CHANGE), NAME, card=card)


def study(name=NAME, gpu="a GPU", best=""):
    workloads = tuple(one.workload for one in comparison().measured)
    gains = dict(zip(workloads, (1.01, 1.02), strict=True))
    candidates = (
        Candidate("t", CHANGE, "timed", gains=gains if gpu else {}, estimate=0.97),
        Candidate("t", "tile_n=96", "wrong", "<b>1 & 2</b> differ"),
        Candidate("t", "tile_n=32"),
    )
    declined = {"need more shared memory than sm90 has": 12}
    verdict = comparison() if gpu else None
    default = registry.lookup(Traits.parse(name)).tile.text
    notes, started = ("1 candidates were not reached within the budget",), "2026-01-01T00:00:00+00:00"
    return Study(
        name,
        "sm90",
        gpu,
        "580",
        workloads,
        default,
        candidates,
        declined,
        best,
        best,
        verdict,
        60.0,
        notes,
        started,
    )


class Reader(html.parser.HTMLParser):
    """Tables as lists of rows of text, other text, tags and addresses; raises where tags do not match."""

    VOID = ("meta", "link", "br", "path", "use", "rect")

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.text, self.tags, self.addresses = [], [], [], set(), []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data.strip())


def page(result, tmp_path, **options):
    path = report.write(result, tmp_path / "pages" / "page.html", **options)
    text = path.read_text()
    assert path.stat().st_size < report.MAX_BYTES
    read = Reader(text)
    # No network and no host: nothing is loaded, links stay within the page, and addresses are XML's names of spaces.
    assert not read.tags & {"link", "img", "iframe", "object"}
    assert all(address.startswith("#") for address in read.addresses)
    rest = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/\d+/\w+"', "", text)
    assert "://" not in rest and "@import" not in rest and socket.gethostname() not in rest
    assert str(ROOT) not in text and str(Path.home()) + "/" not in text
    return read


def test_a_comparison_is_a_page(tmp_path):
    read = page(comparison(), tmp_path, kernels=False)
    (table,) = read.tables
    assert table[0][:2] == ["workload", "a is"] and [row[1] for row in table[1:]] == ["slower", "slower"]
    assert [row[0] for row in table[1:]] == [one.workload for one in comparison().measured]
    assert comparison().sentence in read.text and "svg" in read.tags


def test_a_study_is_a_page(tmp_path):
    read = page(study(), tmp_path, kernels=False)
    measured, candidates, declined = read.tables
    assert len(measured) == 3 and [row[0] for row in candidates[1:]] == [CHANGE, "tile_n=96", "tile_n=32"]
    assert candidates[1][2:5] == ["+1.00", "+2.00", "0.970"]
    assert candidates[2][-1] == "<b>1 & 2</b> differ", "texts are escaped"
    assert declined[1] == ["12", "need more shared memory than sm90 has"]
    assert "1 candidates were not reached within the budget" in read.text
    chosen = page(study(best=CHANGE), tmp_path, kernels=False)
    assert f"--tile {CHANGE}" in chosen.text
    static = page(study(gpu=""), tmp_path, kernels=False)
    assert len(static.tables) == 2 and any("without a GPU" in text for text in static.text)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_benchmark_is_a_page(name, tmp_path):
    (path,) = sorted((ROOT / "bench" / "results").glob(f"*-{name}.json"))[-1:]
    read = page(report.read(path), tmp_path)
    assert len(read.tables[0]) == 1 + len(json.loads(path.read_text())["rows"])


def test_a_ledger_is_a_page(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger.predict("is it faster?", CHANGE, low=0.01, high=0.02, why="fewer steps", path=path)
    predictions, held = page(report.read(path), tmp_path).tables
    assert predictions[1][1:4] == ["is it faster?", "fewer steps", "+1..+2%"] and held[1][:5] == [
        "2%",
        "0",
        "0",
        "0",
        "1",
    ]


def test_both_steps_and_the_layouts_are_on_the_page(tmp_path, monkeypatch):
    """Of a default that test_defaults.py builds too, and of another tile; each layout takes a second to draw."""

    def one_picture(*kernel):
        return Pictures(NAME, dict(itertools.islice(pictures(*kernel).items(), 1)))

    monkeypatch.setattr("cute_attn.lab.pictures.pictures", one_picture)
    read = page(comparison(), tmp_path)
    _, opcodes, steps = read.tables
    assert opcodes[0] == ["opcode", "a", "b", "change"] and all(
        int(row[1]) != int(row[2]) for row in opcodes[1:]
    )
    assert any("HGMMA" in row[0] and "HGMMA" in row[1] for row in steps)
    assert any("smem-q" in text or "shared memory coloured by bank" in text for text in read.text)


def test_what_would_make_the_page_too_large_is_left_out_and_named(tmp_path, monkeypatch):
    text = f'<?xml version="1.0"?>\n<svg width="9pt"><g id="{"a" * 1000}"/></svg>'
    one = SimpleNamespace(_repr_svg_=lambda: text)
    drawn = Pictures("forward-sm80-bf16-d64", dict.fromkeys(("smem-q", "smem-k", "mma"), one))
    monkeypatch.setattr("cute_attn.lab.pictures.pictures", lambda *kernel: drawn)
    monkeypatch.setattr(report, "_FOR_PICTURES", 2500)
    shape = report.parse("s512", Traits.parse("forward-sm80-bf16-d64"))
    section = report._layouts(Contender("forward-sm80-bf16-d64"), shape, "sm80")
    assert [figure.count("<svg") for figure in section.figures] == [1, 1]
    assert 'id="smem-k-aaa' in section.figures[1] and "xml" not in section.figures[0]
    assert section.texts[1].endswith("too large: mma; cute-attn show draws them.")


def test_contenders_by_their_texts():
    for one in (Contender(NAME), Contender(NAME, "tile_n=64,num_stages=2"), Contender(peer="fa4")):
        assert report.contender(str(one)) == one


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json"])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=r"file.json does not hold a result; accepted: files of ab, tune"):
        report.read(tmp_path / "file.json")


# ---- the commands ----


def test_the_report_and_ledger_commands(tmp_path):
    book = tmp_path / "ledger.jsonl"
    entry = ledger.predict("is it faster?", CHANGE, low=0.01, high=0.02, why="fewer steps", path=book)
    result = tmp_path / "ab.json"
    result.write_text(json.dumps(comparison().to_json()))
    where = ("--ledger", str(book))
    commands = [
        ("ledger", *where, "--see", entry.id, "--words", "not yet"),
        ("ledger", *where, "--calibration"),
        ("ledger", *where, "--json"),
        ("report", str(result), "-o", str(tmp_path / "ab.html"), "--no-kernels"),
    ]
    wide = {"COLUMNS": "200"}  # words fold in a narrow terminal
    outs = [processes.run("-m", "cute_attn", *commands[0], environment=wide)]
    outs += processes.run_at_once([("-m", "cute_attn", *command) for command in commands[1:]])
    assert [done.returncode for done in outs] == [0] * 4, [done.stderr for done in outs]
    assert "is it faster?" in outs[0].stdout and "not yet" in outs[0].stdout
    assert "range up to" in outs[1].stdout and json.loads(outs[2].stdout)[0]["seen"] == "not yet"
    assert outs[3].stdout.strip() == str(tmp_path / "ab.html") and (tmp_path / "ab.html").is_file()


WRONG = {
    ("ab", NAME): "there is no GPU; timing a kernel needs one",
    ("ab", NAME, "--predict", "5%", "--why", "x"): "predict is '5%'; accepted: a range such as '+2..+5%'",
    ("ab", NAME, "--why", "x"): "--why is given without --predict; accepted: both",
    ("ab", NAME, "--tile", "a", "--tile", "b", "--peer", "fa4"): "--tile is given 2 times beside --peer",
    ("ab", NAME, "--peer", "fa5"): "name is 'fa5'",
    ("ab", NAME, "--workload", "large"): "workload has 'large'; accepted: bBATCH",
    ("tune", NAME): "there is no GPU; --static ranks without one",
    ("tune", NAME, "tile_q=3"): "space has 'tile_q'; accepted: fields of ForwardSm90Tile (tile_m, tile_n,",
    ("tune", NAME, "num_stages=9|10"): "all 2 tiles were declined: 2 need more shared memory than sm90 has",
    ("report", "absent.json"): "absent.json",
}


def test_wrong_calls():
    done = processes.run_at_once([("-m", "cute_attn", *arguments) for arguments in WRONG])
    for arguments, one in zip(WRONG, done, strict=True):
        assert one.returncode == 2 and one.stdout == "", arguments
        assert one.stderr.startswith("error: ") and one.stderr.count("\n") == 1, one.stderr
        assert WRONG[arguments] in one.stderr


def test_a_prediction_without_a_gpu_is_not_in_the_ledger(tmp_path):
    book = tmp_path / "ledger.jsonl"
    arguments = ("--predict", "+1..+2%", "--why", "x", "--ledger", str(book))
    done = processes.run("-m", "cute_attn", "ab", NAME, *arguments)
    assert done.returncode == 2 and "there is no GPU" in done.stderr and not book.exists()
