"""Make a site of the pages in docs/: `python -m docs.site.build [folder]`, one HTML file per page, without JavaScript.

The pages stay plain Markdown that reads well in a repository; here they get an order, a menu and coloured code. Other files
of the repository that a page links to come along, sources as pages of their own.
"""

import html
import itertools
import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).parent / "page.html"
STYLE = Path(__file__).parent / "style.css"

ORDER = {
    "Begin": ["start", "concepts"],
    "Your run": ["data", "rewards", "models", "configuring", "configuration", "python", "extending"],
    "Why it is right": ["exactness"],
    "Coming from elsewhere": ["from_trl", "from_verl"],
    "While it trains": ["training", "checkpoints", "loggers", "metrics", "losses"],
    "Larger and longer": [
        "scale_out",
        "ranks",
        "elastic",
        "accelerators",
        "vllm",
        "faults",
        "serving",
        "kernels",
        "tree",
    ],
}
"""From top to bottom. A page that is not written yet is left out."""
BESIDE = ("*.md", "benchmarks/*.md", "examples/*.md")
"""Pages outside docs/, for who follows a link to them."""
SOURCES = (".py", ".toml", ".c", ".h", ".json", ".txt", ".yml", ".ipynb", ".jsonl")

HREF = re.compile(r"(?:\w+:|//)")


def reading_order() -> list[str]:
    """The pages of the menu as paths in the repository."""
    paths = [f"docs/{name}.md" for names in ORDER.values() for name in names]
    return [path for path in paths if (ROOT / path).exists()]


def parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"highlight": _coloured}).enable(["table", "strikethrough"])


def anchors(tokens: list[Token]) -> list[tuple[int, str, str]]:
    """Level, anchor and title of every heading; anchors are made as GitHub makes them."""
    found, seen = [], dict[str, int]()
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            title = "".join(child.content for child in inline.children or [] if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
            number = seen[slug] = seen.get(slug, -1) + 1
            anchor = f"{slug}-{number}" if number else slug
            opening.attrSet("id", anchor)
            found.append((int(opening.tag[1]), anchor, title))
    return found


def links(tokens: list[Token]) -> list[Token]:
    """Every link and picture of a page."""
    inner = [child for token in tokens for child in token.children or []]
    return [token for token in inner if token.type in ("link_open", "image")]


def target_of(page: str, href: str) -> tuple[str, str]:
    """The file in the repository that a link of a page means, and the anchor in it; no file for other sites."""
    if HREF.match(href):
        return "", ""
    path, _, anchor = unquote(href).partition("#")
    file = os.path.normpath(PurePosixPath(page).parent / path) if path else page
    return file, anchor


class Site:
    """Writes pages, and whatever they link to, into a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.menu = reading_order()
        self._titles = {page: self._title(page) for page in self.menu}

    def build(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        colours = HtmlFormatter(style="friendly").get_style_defs("pre")
        dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
        colours += f"\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
        (self.folder / "style.css").write_text(colours + STYLE.read_text())
        beside = (path for pattern in BESIDE for path in sorted(ROOT.glob(pattern)))
        for page in [*self.menu, *(path.relative_to(ROOT).as_posix() for path in beside)]:
            self._write_page(page)
        shutil.copy(self.folder / _file_name(self.menu[0]), self.folder / "index.html")

    def _write_page(self, page: str) -> None:
        markdown = parser()
        tokens = markdown.parse((ROOT / page).read_text())
        headings = anchors(tokens)
        for token in links(tokens):
            self._lead_into_site(page, token)
        self._write(page, markdown.renderer.render(tokens, markdown.options, {}), headings)

    def _write(self, page: str, body: str, headings: list[tuple[int, str, str]]) -> None:
        title = headings[0][2] if headings else PurePosixPath(page).name
        parts = {
            "title": html.escape(title), "menu": self._menu(page, headings), "body": body, "around": self._around(page)
        }  # fmt: skip
        text = TEMPLATE.read_text()
        for name, part in parts.items():
            text = text.replace(f"{{{{ {name} }}}}", part)
        (self.folder / _file_name(page)).write_text(text)

    def _lead_into_site(self, page: str, token: Token) -> None:
        """Point a link at the file that the site has for its target, and bring the target along if it is none of its pages."""
        attribute = "src" if token.type == "image" else "href"
        target, anchor = target_of(page, str(token.attrs[attribute]))
        if not target:
            return
        if (ROOT / target).is_dir():
            token.attrSet(attribute, f"{_file_name('README.md')}#{PurePosixPath(target).name}")
            return
        if target.endswith(SOURCES):
            self._write_source(target)
        elif not target.endswith(".md"):
            shutil.copy(ROOT / target, self.folder / _file_name(target))
        token.attrSet(attribute, _file_name(target) + (f"#{anchor}" if anchor else ""))

    def _write_source(self, path: str) -> None:
        code = _coloured((ROOT / path).read_text(), PurePosixPath(path).suffix[1:], "")
        self._write(path, f"<h1>{html.escape(path)}</h1>\n<pre>{code}</pre>", [(1, "", path)])

    def _menu(self, page: str, headings: list[tuple[int, str, str]]) -> str:
        lines = []
        for section, names in ORDER.items():
            pages = [path for name in names if (path := f"docs/{name}.md") in self._titles]
            lines.append(f"<h2>{section}</h2>\n<ul>" if pages else "")
            for path in pages:
                here = ' class="here"' if path == page else ""
                lines.append(f'<li{here}><a href="{_file_name(path)}">{html.escape(self._titles[path])}</a></li>')
                if path == page:
                    inner = (f'<li><a href="#{a}">{html.escape(t)}</a></li>' for level, a, t in headings if level == 2)
                    lines.append(f'<li><ul class="inner">{"".join(inner)}</ul></li>')
            lines.append("</ul>" if pages else "")
        return "\n".join(lines)

    def _around(self, page: str) -> str:
        """Links to the page before and the page after."""
        if page not in self.menu:
            return ""
        position = self.menu.index(page)
        before = f'<a href="{_file_name(self.menu[position - 1])}">← {self._titles[self.menu[position - 1]]}</a>'
        after = self.menu[position + 1 : position + 2]
        following = f'<a href="{_file_name(after[0])}">{self._titles[after[0]]} →</a>' if after else ""
        return f"<span>{before if position else ''}</span><span>{following}</span>"

    def _title(self, page: str) -> str:
        return anchors(parser().parse((ROOT / page).read_text()))[0][2]


def _file_name(path: str) -> str:
    """Pages of docs/ by their name; everything else by its whole path, so that no two meet."""
    name = path.removeprefix("docs/").replace("/", "-")
    if name.endswith(SOURCES):
        return f"{name}.html"
    return re.sub(r"\.md$", ".html", name)


def _coloured(code: str, language: str, _: str) -> str:
    try:
        lexer = get_lexer_by_name({"": "text", "jsonl": "json", "ipynb": "json"}.get(language, language))
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


if __name__ == "__main__":
    destination = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    Site(destination).build()
    print(f"the docs are in {destination}/index.html")
