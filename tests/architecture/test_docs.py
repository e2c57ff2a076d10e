"""What is written from the code is up to date (`make docs` writes it), and links in the docs lead somewhere."""

import re
from pathlib import Path

import pytest

from docs import write_models, write_tree

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
NAMED_FILE = re.compile(r"`((?:tests|benchmarks|configs|docs|polyrhythm)/[\w./]+)`")


def test_the_tree_in_the_readme_has_every_file():
    readme = write_tree.README.read_text()
    assert write_tree.written(readme) == readme, "run `make docs`"


def test_every_file_says_what_it_is_for():
    assert not [line for line in write_tree.tree().splitlines()[1:] if len(line.split()) < 2]


def test_the_list_of_models_is_that_of_the_code():
    assert write_models.TARGET.read_text() == write_models.page(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_lead_somewhere(page):
    text = page.read_text()
    links = {link for link in LINK.findall(text) if "://" not in link}
    broken = [link for link in links if not (page.parent / link).exists()]
    broken += [name for name in NAMED_FILE.findall(text) if not (ROOT / name).exists()]
    assert not broken
