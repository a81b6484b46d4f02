"""What a notebook shows: a run as it goes, and what it gave."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

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
