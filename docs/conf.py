"""The documentation's settings: `sphinx-build -W docs docs/_build` (pip install -e '.[docs,jax,torch]')."""

import inspect
import os.path
import re
from importlib import import_module
from pathlib import Path

import linattn_np
from linattn_np.command.palette import STYLE

project, author, release = "linattn_np", "linattn_np developers", linattn_np.__version__
project_copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery"]
html_theme = "furo"
smartquotes = False  # options of commands begin with two hyphens
html_title = "linattn_np"
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["math"]  # GitHub's form of an equation, for MathJax here
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_param = False
napoleon_use_rtype = False


def in_our_colours(config, script):
    """matplotlib as the pictures of other pages have it."""
    import matplotlib

    matplotlib.rcParams.update(STYLE)


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "pages",
    # Those that need torch, or that take times, have pictures of docs/pictures/draw_gallery.py.
    "filename_pattern": r"plot_(?!torch|decoding|speed)",
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1e6,
    "reset_modules": ("matplotlib", in_our_colours),
}

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # pages that stand elsewhere in the repository
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "kernels": "kernels_cu/README.md",
    "kernels_measured": "kernels_cu/MEASURED.md",
    "kernels_waiting": "kernels_cu/WAITING.md",
}
GALLERY = "gallery/README.txt", "pages/index"
LINK = re.compile(r"(\]\(|^\[\w+\]: )(?!http|#)([^)#\s]+)", re.MULTILINE)
LISTED = re.compile(r"\]\(([\w/.]+)\)")
OBJECT = re.compile(
    r"^- \[`(linattn_np\.[\w.]+)`\]\([^)]+\).*\n(?:  .*\n)*", re.MULTILINE
)
SECTION = re.compile(
    r"^(Parameters|Returns|Raises|Example|Attributes|Yields)\n-+$", re.MULTILINE
)


def as_literal(app, what, name, obj, options, lines):
    """Equations stand in docstrings as indented lines: what comes before the first section is shown as it is
    written.
    """
    text = "\n".join(lines)
    first = SECTION.search(text)
    head, rest = (text[: first.start()], text[first.start() :]) if first else (text, "")
    lines[:] = (re.sub(r"(?<=\n)\n(?=    \S)", "\n::\n\n", head) + rest).splitlines()


def as_pages(app, name, source):
    """Pages are Markdown that reads on any host. Here a link to an object of the package becomes its documentation, and
    the links of the first page become the tree of pages.
    """
    text = (
        moved(ELSEWHERE[name])
        if name in ELSEWHERE
        else source[0].replace(f"]({GALLERY[0]})", f"]({GALLERY[1]}.rst)")
    )
    if name == "index":
        trees = [
            (section.splitlines()[0], LISTED.findall(section))
            for section in text.split("\n## ")[1:]
        ]
        text += "".join(map(tree, trees))
    source[0] = OBJECT.sub(described, text)


def moved(path) -> str:
    """A file of the repository as a page of this folder."""
    pages = {file: f"{page}.md" for page, file in ELSEWHERE.items()}

    def here(link):
        target = os.path.normpath(Path(path).parent / link[2])
        return link[1] + (pages.get(target) or os.path.relpath(target, "docs"))

    return LINK.sub(here, (ROOT / path).read_text())


def tree(section) -> str:
    caption, pages = section
    if not pages:
        return ""
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
    )


def object_of(path):
    """The object of the package, or the module, that a dotted name says."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ModuleNotFoundError):
        return import_module(path)


def described(match) -> str:
    """What autodoc makes of an object of the package."""
    try:
        found = object_of(match[1])
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        return f"`{match[1]}`\n"
    kind = (
        "module"
        if inspect.ismodule(found)
        else "class"
        if inspect.isclass(found)
        else "function"
    )
    members = "   :members:\n   :inherited-members:\n" if kind == "class" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {match[1]}\n{members}```\n"


def setup(app):
    app.connect("source-read", as_pages)
    app.connect("autodoc-process-docstring", as_literal, priority=100)
