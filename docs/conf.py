"""The documentation's settings: `sphinx-build -W docs docs/_build` (pip install -e '.[docs]')."""

import re

import linattn_np

project, author, release = "linattn_np", "linattn_np developers", linattn_np.__version__
project_copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/*.md"]
html_theme = "furo"
html_title = "linattn_np"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_param = False
napoleon_use_rtype = False
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "pages",
    "filename_pattern": r"plot_",
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1e6,
}

SECTION = re.compile(r"^(Parameters|Returns|Raises|Example|Attributes|Yields)\n-+$", re.MULTILINE)


def as_literal(app, what, name, obj, options, lines):
    """Equations stand in docstrings as indented lines: what comes before the first section is shown as it is
    written.
    """
    text = "\n".join(lines)
    first = SECTION.search(text)
    head, rest = (text[: first.start()], text[first.start() :]) if first else (text, "")
    lines[:] = (re.sub(r"(?<=\n)\n(?=    \S)", "\n::\n\n", head) + rest).splitlines()


def setup(app):
    app.connect("autodoc-process-docstring", as_literal, priority=100)
