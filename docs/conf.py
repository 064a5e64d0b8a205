"""Sphinx reads this. Built by `nox -s docs` with -W and -n: a warning is an error, and so is a reference to nothing."""

import sys
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import stageflow

project = "stageflow"
author = "the stageflow authors"
project_copyright = author
version = release = stageflow.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
maximum_signature_line_length = 100  # a parameter a line past that
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Other projects' names are not looked up: that would need the network for every build.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|trio|tricycle|transformers|cloudpickle|attrs?)\..+"),
    (r"py:.*", r"(collections|contextlib|multiprocessing|os|pathlib|types|typing)\..+"),
    (r"py:.*", r"nn\.Module"),  # torch, under the name that everybody gives it
]

html_theme = "furo"
html_title = f"stageflow {release}"

# The public classes say that they are from `stageflow`. The sentences under their fields are looked for there too, but stand
# where the classes are written: lay those side by side.
_public = ModuleAnalyzer.for_module("stageflow")
_public.analyze()
for _name in [name for name in sys.modules if name.startswith("stageflow.")]:
    _private = ModuleAnalyzer.for_module(_name)
    _private.analyze()
    _public.attr_docs.update(_private.attr_docs)
    _public.tagorder.update(_private.tagorder)  # for "bysource"


def _plain_sentence(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading the sentence under a field, where it has a colon, as "type: description"."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _plain_sentence, priority=400)  # napoleon's is 500
