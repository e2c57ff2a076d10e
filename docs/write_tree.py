"""Write the tree of the package: its rooms into README.md, every file into docs/tree.md, each with the first line of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "polyrhythm"
README, PAGE = ROOT / "README.md", ROOT / "docs/tree.md"
BEGIN, END = "<!-- tree: written by `make docs` -->\n```\n", "```\n<!-- end of tree -->"
NAME_WIDTH = 26
FIRST = ("loop.py", "types.py", "messages.py", "errors.py")
"""What to read first."""


def tree() -> str:
    """Folders with what they are for, and their files."""
    return "\n".join(["polyrhythm/", *_lines(PACKAGE, depth=1)]) + "\n"


def rooms() -> str:
    """What to read first, and the folders of the package."""
    files = [_line(name, _summary(PACKAGE / name), 1) for name in FIRST]
    folders = [_line(f"{path.name}/", _summary(path / "__init__.py"), 1) for path in _folders(PACKAGE)]
    return "\n".join(["polyrhythm/", *files, *folders]) + "\n"


def written(readme: str) -> str:
    """The README with its rooms renewed."""
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:start] + rooms() + readme[end:]


def page() -> str:
    return (
        "# The tree\n\nOne box of the diagram in the [README](../README.md) is one folder; a folder is a noun with its kinds. "
        "[CONTRIBUTING.md](../CONTRIBUTING.md) says how a group\nflows through it and where to add what. Written by `make docs`.\n\n"
        f"```\n{tree()}```\n"
    )


def _lines(folder: Path, depth: int) -> list[str]:
    files = sorted((p for p in folder.glob("*.py") if p.name != "__init__.py"), key=_reading_order)
    lines = [_line(path.name, _summary(path), depth) for path in files]
    for inner in _folders(folder):
        lines += [_line(f"{inner.name}/", _summary(inner / "__init__.py"), depth), *_lines(inner, depth + 1)]
    for sources in sorted(p for p in folder.iterdir() if p.is_dir() and any(p.glob("*.c"))):
        lines.append(_line(f"{sources.name}/", ", ".join(sorted(p.name for p in sources.iterdir())), depth))
    return lines


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / "__init__.py").exists())


def _reading_order(path: Path) -> tuple[bool, str]:
    """In the top folder what to read first comes first; everywhere else by name."""
    first = path.parent == PACKAGE and path.name in FIRST
    return not first, str(FIRST.index(path.name)) if first else path.name


def _line(name: str, summary: str, depth: int) -> str:
    indented = "  " * depth + name
    return f"{indented:<{NAME_WIDTH}}  {summary}".rstrip()


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).rstrip(".")


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
    PAGE.write_text(page())
