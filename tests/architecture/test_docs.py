"""What is written from the code is up to date (`make docs` writes it), links in the docs lead somewhere, and the site can be made."""

import re
from pathlib import Path

import pytest

from docs import draw_timeline, write_configuration, write_models, write_names, write_tree
from docs.site import build

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*.md")
    for page in ROOT.glob(pattern)
)
NAMED_FILE = re.compile(r"`((?:tests|benchmarks|configs|docs|examples|polyrhythm)/[\w./]+)`")


def test_the_tree_has_every_file_and_the_readme_every_room():
    readme = write_tree.README.read_text()
    assert write_tree.written(readme) == readme, "run `make docs`"
    assert write_tree.page() == write_tree.PAGE.read_text(), "run `make docs`"


def test_every_file_says_what_it_is_for():
    assert not [line for line in write_tree.tree().splitlines()[1:] if len(line.split()) < 2]


def test_the_list_of_models_is_that_of_the_code():
    assert write_models.TARGET.read_text() == write_models.page(), "run `make docs`"


def test_the_list_of_keys_is_that_of_the_schema():
    assert write_configuration.TARGET.read_text() == write_configuration.page(), "run `make docs`"


def test_the_picture_of_the_two_schedules_is_the_one_that_is_drawn():
    assert draw_timeline.TARGET.read_text() == draw_timeline.picture(), "run `make docs`"


@pytest.mark.parametrize("page", sorted(write_names.PAGES))
def test_names_of_other_frameworks_are_answered_as_the_code_answers_them(page):
    assert (write_names.FOLDER / page).read_text() == write_names.written(page), "run `make docs`"


@pytest.mark.parametrize("name", sorted(write_names.all_names()))
def test_every_name_of_another_framework_that_is_listed_has_an_answer(name):
    assert write_names.is_answered(name), f"say in config/other_names.py what {name} is called here"


def test_every_page_of_the_docs_is_in_the_reading_order():
    assert {page for page in PAGES if page.startswith("docs/")} == set(build.reading_order()), "see docs/site/build.py"


@pytest.mark.parametrize("page", PAGES)
def test_links_anchors_and_named_files_lead_somewhere(page):
    text = (ROOT / page).read_text()
    broken = [f"`{name}`" for name in NAMED_FILE.findall(text) if not (ROOT / name).exists()]
    for token in build.links(build.parser().parse(text)):
        href = str(token.attrs.get("href") or token.attrs.get("src"))
        target, anchor = build.target_of(page, href)
        is_there = not target or (ROOT / target).exists()
        if not is_there or (anchor and target.endswith(".md") and anchor not in anchors_of(target)):
            broken.append(href)
    assert not broken


def anchors_of(page: str) -> set[str]:
    return {anchor for _, anchor, _ in build.anchors(build.parser().parse((ROOT / page).read_text()))}


def test_the_site_has_every_page_and_no_link_that_leads_nowhere(tmp_path):
    build.Site(tmp_path).build()
    for page in tmp_path.glob("*.html"):
        html = page.read_text()
        files = {link.partition("#")[0] for link in re.findall(r'(?:href|src)="([^"]+)"', html) if "://" not in link}
        assert not [file for file in files - {""} if not (tmp_path / file).exists()], page.name
        assert "{{ " not in html.partition("<main>")[0], page.name
    assert (tmp_path / "index.html").read_text() == (tmp_path / "start.html").read_text()
