"""Sphinx: the documentation as a site, built by ``bash scripts/docs.sh`` from the sources of scripts/website."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import attemper  # noqa: E402

project = "attemper"
author = "the attemper authors"
copyright = "the attemper authors, Apache-2.0"
version = release = attemper.__version__
html_title = f"attemper {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "scripts.website.extension"]
exclude_patterns = ["files"]

autodoc_mock_imports = ["keras"]
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what torch or Lightning say of a method that we fill in
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "Source")]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = [str(ROOT / "docs" / "static")]
templates_path = [str(ROOT / "docs" / "templates")]
html_css_files = ["site.css"]
html_copy_source = True
html_show_sourcelink = False
# It would fetch each page that was found, which a browser refuses where the site is read from files.
html_show_search_summary = False
html_math_renderer = "mathml"
html_theme_options = {"top_of_page_buttons": []}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
pygments_style = "friendly"
pygments_dark_style = "native"

# Options begin with two hyphens, and code stands in tables.
smartquotes = False

nitpicky = True
# Types of other packages, names that are imported for annotations alone, and types that nobody outside needs.
nitpick_ignore_regex = [
    ("py:class", r"(torch|nn|abc|collections|os|pathlib|pandas|numpy|np|transformers|lightning|keras|rich)\..+"),
    (
        "py:class",
        r"(Tensor|Module|Path|ProcessGroup|DeviceMesh|RenderableType|ModuleType|Part|Target|Site|Side|Spans|Rows)",
    ),
    ("py:class", r"attemper\.(call|sites|monitor|statistics|store\.ranks|control\.query_key_weights)\..+"),
    ("py:class", r"attemper\.fingerprints\.(finding|pair|align|floor|levels)\..+"),
    ("py:class", r"attemper\.fingerprints\.explanation\.FirstDifference"),
    ("py:class", r"attemper\.(readings\.judge\.|readings\.comparison\.HasReading|integrations\.training\.).*"),
    ("py:class", r"attemper\.(store\.run\.StoredRun|.+\._\w+)"),
]
# The articles quote lines that are no Python. Two records are named Reading: the first on the page is meant.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
