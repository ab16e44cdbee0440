"""The page of a result, and the commands of the laboratory that need no GPU."""

import functools
import html.parser
import itertools
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_attn.compiler import registry
from cute_attn.lab import report
from cute_attn.lab.pictures import Pictures, pictures
from cute_attn.lab.race import ab
from cute_attn.lab.study import Candidate, Study
from cute_attn.lab.verdict import LINE_HEADS, Verdict
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


def read(path):
    text = path.read_text()
    assert path.stat().st_size < report.MAX_BYTES
    found = Reader(text)
    # No network and no host: nothing is loaded, links stay within the page, and addresses are XML's names of spaces.
    assert not found.tags & {"link", "img", "iframe", "object"}
    assert all(address.startswith("#") for address in found.addresses)
    rest = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/\d+/\w+"', "", text)
    assert "://" not in rest and "@import" not in rest and socket.gethostname() not in rest
    assert str(ROOT) not in text and str(Path.home()) + "/" not in text
    return found


@pytest.fixture
def one_picture(monkeypatch):
    """Each layout takes a second to draw."""
    drawn = lambda *kernel: Pictures(NAME, dict(itertools.islice(pictures(*kernel).items(), 1)))  # noqa: E731
    monkeypatch.setattr("cute_attn.lab.pictures.pictures", drawn)


def test_a_study_is_a_page(tmp_path, one_picture):
    """Its steps are those of a default that test_defaults.py builds too, and of another tile."""
    report.of_study(study(), tmp_path / "page.html")
    found = read(tmp_path / "page.html")
    measured, candidates, declined, opcodes, steps = found.tables
    assert [row[1] for row in measured[1:]] == ["slower", "slower"] and "svg" in found.tags
    assert [row[0] for row in candidates[1:]] == [CHANGE, "tile_n=96"]
    assert candidates[1][1:4] == ["+1.0%", "+2.0%", "0.970"]
    assert candidates[2][-1] == "wrong: <b>1 & 2</b> differ", "texts are escaped"
    assert declined[1] == ["12", "need more shared memory than sm90 has"]
    assert "1 candidates were not reached within the budget" in found.text
    assert opcodes[0] == ["opcode", "a", "b", "change"] and all(row[1] != row[2] for row in opcodes[1:])
    assert any("HGMMA" in row[0] and "HGMMA" in row[1] for row in steps)
    assert any("shared memory coloured by bank" in text for text in found.text)


def test_a_static_study_has_no_times():
    candidates, _ = report.study_sections(study(gpu=""))
    assert "without a GPU" in candidates.texts[0]
    assert report.study_sections(study(best=CHANGE))[1].texts == (f"--tile {CHANGE}",)


def test_the_command_writes_a_page(tmp_path):
    name, tiles = "forward-sm80-bf16-d32-causal", ("--tile", "num_stages=2", "--tile", "tile_n=2048")
    done = processes.run(
        "-m", "cute_attn", "verdict", name, *tiles, "--lines", "--html", str(tmp_path / "x.html")
    )
    assert done.returncode == 0, done.stderr
    costs, lines = read(tmp_path / "x.html").tables
    assert costs[0][0] == "" and "no: " in costs[1][2] and lines[0] == list(LINE_HEADS)


def test_what_would_make_the_page_too_large_is_left_out_and_named(monkeypatch):
    text = f'<?xml version="1.0"?>\n<svg width="9pt"><g id="{"a" * 1000}"/></svg>'
    one = SimpleNamespace(_repr_svg_=lambda: text)
    drawn = Pictures("forward-sm80-bf16-d64", dict.fromkeys(("smem-q", "smem-k", "mma"), one))
    monkeypatch.setattr("cute_attn.lab.pictures.pictures", lambda *kernel: drawn)
    monkeypatch.setattr(report, "_FOR_PICTURES", 2500)
    section = report._layouts(Verdict("forward-sm80-bf16-d64", "sm80", "tile_n=64"))
    assert [figure.count("<svg") for figure in section.figures] == [1, 1]
    assert 'id="smem-k-aaa' in section.figures[1] and "xml" not in section.figures[0]
    assert section.texts[1].endswith("too large: mma; cute-attn show draws them.")


# ---- the commands ----


WRONG = {
    ("ab", NAME): "there is no GPU; timing a kernel needs one",
    ("ab", NAME, "--tile", "a", "--tile", "b", "--peer", "fa4"): "--tile is given 2 times beside --peer",
    ("ab", NAME, "--peer", "fa5"): "name is 'fa5'",
    ("ab", NAME, "--workload", "large"): "workload has 'large'; accepted: bBATCH",
    ("tune", NAME): "there is no GPU; --static ranks without one",
    ("tune", NAME, "tile_q=3"): "space has 'tile_q'; accepted: fields of ForwardSm90Tile (tile_m, tile_n,",
    ("tune", NAME, "num_stages=9|10"): "all 2 tiles were declined: 2 need more shared memory than sm90 has",
}


def test_wrong_calls():
    done = processes.run_at_once([("-m", "cute_attn", *arguments) for arguments in WRONG])
    for arguments, one in zip(WRONG, done, strict=True):
        assert one.returncode == 2 and one.stdout == "", arguments
        assert one.stderr.startswith("error: ") and one.stderr.count("\n") == 1, one.stderr
        assert WRONG[arguments] in one.stderr
