"""The documentation site has every page and every public name, and its links lead somewhere."""

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import yaml

from tests import unhooked

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_in(nav):
    """The pages of a navigation, whose parts are titles with a page or with further parts."""
    parts = [value for part in nav for value in part.values()]
    return [page for value in parts for page in ([value] if isinstance(value, str) else pages_in(value))]


# In a process of its own that has loaded torch and the library already.
WRITE = """
import runpy, sys
script, out = sys.argv[1:]
sys.argv[1:] = ["--out", out]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built where nothing else is."""
    for package in ("zensical", "nbclient", "ipykernel"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs {package}")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "src", "benchmarks/results", "mkdocs.yml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    unhooked.run(WRITE, str(ROOT / "docs/site.py"), str(folder / "out/site/pages"))
    (folder / "mkdocs.yml").unlink()
    shutil.copy(ROOT / "mkdocs.yml", folder)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out/site/html"


def test_every_page_is_in_the_navigation():
    pages = pages_in(SETTINGS["nav"])
    assert len(pages) == len(set(pages))
    own = {page for page in pages if not page.startswith(("api/", "notebooks/"))}
    assert own == {path.name for path in (ROOT / "docs").glob("*.md")}
    notebooks = {page for page in pages if page.startswith("notebooks/")}
    assert notebooks == {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}


def test_every_public_package_has_a_page_of_the_api():
    site = load_site()
    names = {*site.PACKAGES, "integrations", "commands"}
    assert {page for page in pages_in(SETTINGS["nav"]) if page.startswith("api/")} == {
        f"api/{name}.md" for name in names
    }
    assert {"Compressor", "compress_", "EnergyTolerance"} <= set(site.public_names("compressm"))
    assert "DiagonalSystem" in site.public_names("compressm.control")


def load_site():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        link = attributes.get("href" if tag in ("a", "link") else "src")
        if link and not urlparse(link).scheme and not link.startswith("//"):
            self.links.append(link)


def test_links_of_the_site_lead_somewhere(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= 35
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlparse(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.exists() or (known and parts.fragment and unquote(parts.fragment) not in known.anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_every_public_name_is_described_once_and_led_to_from_its_packages(site):
    module = load_site()
    anchors, seen = {}, {}
    for package in module.PACKAGES:
        text = (site / "api" / f"{package}.html").read_text()
        page = Links(text)
        anchors |= dict.fromkeys(page.anchors, package)
        names = module.public_names(package)
        places = [module.place_of(package, name) for name in names]
        assert names
        assert [place for place in places if place not in anchors] == []
        led = {link.rpartition("#")[2] for link in page.links}
        assert [place for place in places if place not in led] == []
        for place in module.described(package).values():
            assert place not in seen, (package, seen[place])
            seen[place] = package
        assert not re.search(r"<p>::: ", text)


def test_everyday_names_are_in_one_group_each():
    module = load_site()
    grouped = [name for members in module.GROUPS.values() for name in members]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= set(module.public_names("compressm"))


def test_every_name_has_a_line_that_says_what_it_is():
    module = load_site()
    for package in module.PACKAGES:
        for name in module.public_names(package):
            assert len(module.first_line(package, name)) >= 5, (package, name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("`keep_` and A_r", "`keep_` and A\\_r"), ("|λ|\n  < 1", "\\|λ\\| \\< 1"), ("a [b](c)", "a \\[b\\](c)")],
)
def test_a_cell_of_a_table_shows_the_text_as_it_is(text, shown):
    assert load_site().cell(text) == shown


def test_cells_break_between_numbers_and_not_within_them():
    page = "It takes 3 ms.\n| 97.1 (97.0 ± 0.4 of 4 seeds) | 64 → 16 | 3.5 ms | a token of 32 | cut, τ = 0.02 |"
    whole = load_site().with_whole_numbers(page)
    assert whole.replace("\u00a0", "~").split("\n") == [
        "It takes 3 ms.",
        "| 97.1 (97.0~±~0.4 of 4~seeds) | 64~→~16 | 3.5~ms | a token of 32 | cut, τ~=~0.02 |",
    ]


def test_the_trainers_and_every_command_have_their_documentation(site):
    module = load_site()
    anchors = Links((site / "api" / "integrations.html").read_text()).anchors
    assert set(module.INTEGRATIONS.values()) <= anchors
    text = (site / "api" / "commands.html").read_text()
    assert all(f"compressm {name}" in text for name in ("train", "report", "compress", "bench step", "export"))
    assert "--tau" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert book.cells[0].source.startswith("# ")


SAID = {
    "first_cut": r"(\d\d\.\d)% of the test digits with \d+ states",
    "own_data": r"(\d\d\.\d)% of the test recordings, \[\d+\] states",
    "hugging_face": r"Beautiful is .*states: (4)",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shown_with_what_it_prints_and_draws(site, path):
    text = (site / "notebooks" / f"{path.stem}.html").read_text()
    words = re.sub(r"<[^>]+>", "", text)
    found = re.search(SAID[path.stem], words)
    assert found, words
    assert found[1] == "4" or float(found[1]) > 85
    assert "-&gt; " in words, "the cuts"
    pictures = [link for link in Links(text).links if link.endswith(".png") and path.stem in link]
    assert pictures
    assert all((site / "notebooks" / link).read_bytes().startswith(b"\x89PNG") for link in pictures)
    assert str(ROOT) not in text, "no paths of the machine that ran it"


def test_the_search_finds_names_and_words_of_pages(site):
    found = (site / "search.json").read_text()
    for words in ("CompressionCallback", "EnergyTolerance", "Hankel singular", "Deploying a model", "--round-to"):
        assert words in found
