"""Sphinx: `make docs` builds these pages, with every warning an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402

project = "StrataRec"
copyright = "the authors of StrataRec; Apache-2.0"
html_title = "StrataRec"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # excerpts are fetched, which a browser refuses for files
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]
myst_heading_anchors = 3
# `log.md` and the generated pages name files and fields that no page is of.
suppress_warnings = ["myst.xref_missing"]
napoleon_numpy_docstring, napoleon_google_docstring = True, False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
pygments_dark_style = "monokai"

generate.write(HERE / "reference")
