"""What the site adds to Sphinx: formulas as MathML, a search of Chinese words, and the languages of a page."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from scripts.website import theme
from scripts.website.sources import LANGUAGES
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.search import SearchLanguage
from sphinx.util.nodes import make_refnode

BIGRAMS = """
var splitQuery = function (query) {
  var found = [];
  for (var word of query.match(/[\\u4e00-\\u9fff]+|[^\\s\\u4e00-\\u9fff.,;:!?，。；：！？、（）()`"']+/g) || []) {
    if (!/[\\u4e00-\\u9fff]/.test(word) || word.length === 1) found.push(word);
    else for (var i = 0; i + 2 <= word.length; i++) found.push(word.slice(i, i + 2));
  }
  return found;
};
"""


class ChineseBigrams(SearchLanguage):
    """Chinese text as pairs of neighbouring characters, in pages and in queries: no dictionary of words is needed."""

    lang = "zh"
    language_name = "Chinese"
    js_splitter_code = BIGRAMS
    _words = re.compile(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+")

    def split(self, input: str) -> list[str]:
        """Words of letters, and pairs of Chinese characters."""
        return [piece for word in self._words.findall(input) for piece in pairs(word)]

    def stem(self, word: str) -> str:
        return word.lower()


def pairs(word: str) -> list[str]:
    """A word of letters itself; of Chinese characters, each with its neighbour."""
    if len(word) == 1 or not "\u4e00" <= word[0] <= "\u9fff":
        return [word]
    return [word[i : i + 2] for i in range(len(word) - 1)]


SIZED = re.compile(r"\\[Bb]igg?[lrm]?(?![a-zA-Z])")
"""Commands that size a bracket: MathML does so itself."""


SHORT_FRACTION = re.compile(r"\\([td]?frac)\s*(\d)\s*(\d)")
r"""``\frac12``, of which docutils takes 12 for the numerator."""


def mathml(formula: str, *, displayed: bool) -> str:
    """LaTeX as MathML, which browsers draw by themselves, offline and without a script."""
    return tex2mathml(SHORT_FRACTION.sub(r"\\\1{\2}{\3}", SIZED.sub("", formula)), as_block=displayed)


def visit_math(translator: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    translator.body.append(mathml(node.astext(), displayed=False))
    raise nodes.SkipNode


def visit_displayed_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), displayed=True)}</div>')
    raise nodes.SkipNode


SPLIT = re.compile(r"^:returns: (\*?)(.+?)\1 -- ")
"""The first line of what is returned: napoleon takes for a type what stands before a colon."""


def keep_words(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Gives back ``[B, H, Q]: what it is``, of which napoleon makes a type; drops Python's on fields of tuples."""
    del app, name, obj, options
    if what in ("property", "attribute") and lines and lines[-1].startswith(":type: "):
        shape = lines.pop().removeprefix(":type: ")
        lines[0] = f"{shape}: {lines[0]}"
    lines[:] = [SPLIT.sub(r":returns: \2: ", line) for line in lines]
    if lines and lines[0].startswith("Alias for field number "):
        lines.clear()


def find_by_last_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element) -> Any:
    """Resolves a short name in a docstring: attemper's own name, or the only thing that is documented so."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    end = "." + node["reftarget"]
    found = [name for name, entry in domain.objects.items() if name.endswith(end) and not entry.aliased]
    found = [name for name in found if name == f"attemper{end}"] or found
    if len(found) != 1:
        return None
    entry = domain.objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, [text], found[0])


def add_languages(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Gives templates the same page in the other languages: [(language, its name, url)]."""
    del templatename, doctree
    up = "../" * pagename.count("/")
    here = "en" if app.config.language == "en" else "zh-CN"
    base = up if here == "en" else f"{up}../"
    context["in_language"] = str if here == "en" else theme.in_chinese
    context["other_languages"] = [
        (language, name, f"{base}{'' if language == 'en' else language + '/'}{pagename}.html")
        for language, name in LANGUAGES.items() if language != here
    ]  # fmt: skip


def add_words(app: Sphinx) -> None:
    """Adds the theme's words to those that Sphinx has in the language of the site."""
    if app.config.language != "en":
        app.translator.add_fallback(theme.Chinese())


def name_arguments(app: Sphinx, doctree: nodes.document) -> None:
    """``temperature: above 0``, as in the docstring, where Sphinx writes ``temperature -- above 0``."""
    del app
    for field in doctree.findall(nodes.field_body):
        for dash in [one for one in field.findall(nodes.Text) if one == " -- "]:
            dash.parent.replace(dash, nodes.Text(": "))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displayed_math, None))
    app.add_search_language(ChineseBigrams)
    app.connect("autodoc-process-docstring", keep_words, priority=900)
    app.connect("missing-reference", find_by_last_name)
    app.connect("html-page-context", add_languages)
    app.connect("builder-inited", add_words)
    app.connect("doctree-read", name_arguments)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
