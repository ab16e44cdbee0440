"""The page of a result, and the commands of the laboratory that need no GPU."""

import functools
import html
import itertools
import re
import socket
from pathlib import Path

import pytest

from cute_attn.compiler import registry
from cute_attn.lab import report
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


def read(path):
    """A page's text. No network and no host: nothing is loaded, and addresses are XML's names of spaces."""
    page = path.read_text()
    assert path.stat().st_size < 2_000_000 and "<svg" in page
    assert not re.search(r"<(link|img|iframe|object|script)", page)
    assert all(address.startswith("#") for address in re.findall(r'(?:href|src)="([^"]*)"', page))
    rest = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/\d+/\w+"', "", page)
    assert "://" not in rest and "@import" not in rest and socket.gethostname() not in rest
    assert str(ROOT) not in page and str(Path.home()) + "/" not in page
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.fixture
def one_picture(monkeypatch):
    """Each layout takes a second to draw."""
    drawn = lambda *kernel: Pictures(NAME, dict(itertools.islice(pictures(*kernel).items(), 1)))  # noqa: E731
    monkeypatch.setattr("cute_attn.lab.report.pictures", drawn)


def test_a_study_is_a_page(tmp_path, one_picture):
    """Its steps are those of a default that test_defaults.py builds too, and of another tile."""
    report.of_study(study(), tmp_path / "page.html")
    text = read(tmp_path / "page.html")
    assert "+1.0%" in text and "+2.0%" in text and "0.970" in text and text.count("slower") > 1
    assert "<b>1 & 2</b> differ" in text, "texts are escaped"
    assert "12" in text and "need more shared memory than sm90 has" in text
    assert "1 candidates were not reached within the budget" in text
    assert "opcodes of a steady step" in text and text.count("HGMMA") > 8
    assert "without a GPU" in str(report.study_parts(study(gpu="")))
    assert f"--tile {CHANGE}" in str(report.study_parts(study(best=CHANGE)))


# ---- the commands ----


WRONG = {
    f"ab {NAME} --tile a --tile b --peer fa4": "B is given more than once; accepted: one of NAME2",
    f"ab {NAME} --peer fa5": "name is 'fa5'",
    f"ab {NAME} --workload large": "workload has 'large'; accepted: bBATCH",
    f"tune {NAME}": "there is no GPU; --static ranks without one",
    f"tune {NAME} tile_q=3": "space has 'tile_q'; accepted: fields of ForwardSm90Tile (tile_m, tile_n,",
    f"tune {NAME} num_stages=9|10": "all 2 tiles were declined: 2 need more shared memory than sm90 has",
}


def test_wrong_calls():
    done = processes.run_at_once([("-m", "cute_attn", *command.split()) for command in WRONG])
    for command, one in zip(WRONG, done, strict=True):
        assert one.returncode == 2 and one.stdout == "", command
        assert one.stderr.startswith("error: ") and one.stderr.count("\n") == 1, one.stderr
        assert WRONG[command] in one.stderr
