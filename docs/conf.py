"""The site that ``make docs`` builds: the pages of the repository, and the API and the commands from the code.

The source is the whole repository, so that links between README, benchmarks and pages lead to the same places on the site as
where the code is hosted.
"""

from autohete import __version__
from docs.building.systems import PAGES

project = "AutoHete"
version = release = __version__
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "docs/**.md",
    "docs/notebooks/*.py",
    *PAGES,
]
exclude_patterns = [".*", "build", "dist", "**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.building.commands",
    "docs.building.comments",
    "docs.building.navigation",
    "docs.building.notebooks",
    "docs.building.systems",
]
navigation_pages = [root_doc, "docs/reference/api"]

myst_heading_anchors = 4
smartquotes_action = "D"  # only dashes
autodoc_default_options = {"members": True}
autodoc_typehints = "description"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "AutoHete"
html_static_path = ["building/static"]
html_css_files = ["site.css"]
templates_path = ["building/templates"]
html_additional_pages = {"index": "redirect.html"}
html_show_copyright = html_copy_source = False
