"""What a notebook shows: a run as it goes, and what it gave."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from errors import missing
from stratarec.progress import SilentProgress
from stratarec.reporting.progress import NotebookProgress, progress_of_notebook


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> NotebookProgress:
    """Its output is looked at here, and drawn in `test_notebooks`."""
    monkeypatch.setattr(NotebookProgress, "_draw", lambda self, now=False: None)
    return NotebookProgress()


def lines(html: str) -> dict[str, list[tuple[float, float]]]:
    """Colour -> the points of its line; the output must be well-formed."""
    root = ElementTree.fromstring(html.replace("&ensp;", " "))
    found = {}
    for each in root.iter("polyline"):
        pairs = [pair.split(",") for pair in each.attrib["points"].split()]
        found[each.attrib["stroke"]] = [(float(x), float(y)) for x, y in pairs]
    return found


def test_curves_grow_within_their_charts(progress: NotebookProgress) -> None:
    progress.start("train", 1000, "steps")
    for step in range(1, 1001):
        progress.advance(1, "loss <0.5>")
        progress.figures(step, {"train/loss": 1 / step, "train/samples_per_second": 5.0})
    progress.figures(500, {"valid/log_loss": 0.5, "valid/auc": 0.7})
    shown = progress.html
    assert not missing("train 1,000", shown)
    assert "loss &lt;0.5&gt;" in shown
    found = lines(shown)
    assert len(found) == 3
    for points in found.values():
        assert 2 <= len(points) <= 200
        assert all(0 <= x <= 360 and 0 <= y <= 130 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    loss = found["#3b82c4"]
    assert loss[0][1] < loss[-1][1], "a loss that falls is drawn downwards"
    assert not missing("step 1,000", shown)


def test_without_a_notebook_there_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert isinstance(progress_of_notebook(), SilentProgress)

    class Terminal:
        """IPython in a terminal, which has no kernel."""

        @staticmethod
        def get_ipython() -> object:
            return object()

    monkeypatch.setitem(sys.modules, "IPython", Terminal)
    assert isinstance(progress_of_notebook(), SilentProgress)
