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

ROOT = Path(__file__).parents[2]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_in(nav):
    """The pages of a navigation, whose parts are titles with a page or with further parts."""
    parts = [value for part in nav for value in part.values()]
    return [page for value in parts for page in ([value] if isinstance(value, str) else pages_in(value))]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built where nothing else is."""
    if not importlib.util.find_spec("zensical"):
        pytest.skip("needs zensical")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "src", "benchmarks/results", "mkdocs.yml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, ROOT / "docs/site.py", "--out", folder / "out/site/pages"], check=True)
    (folder / "mkdocs.yml").unlink()
    shutil.copy(ROOT / "mkdocs.yml", folder)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out/site/html"


def test_every_page_is_in_the_navigation():
    pages = pages_in(SETTINGS["nav"])
    assert len(pages) == len(set(pages))
    own = {page for page in pages if not page.startswith("api/")}
    assert own == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_every_public_package_has_a_page_of_the_api():
    site = load_site()
    assert {page for page in pages_in(SETTINGS["nav"]) if page.startswith("api/")} == {
        f"api/{package}.md" for package in site.PACKAGES
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


def test_every_public_name_has_its_documentation_on_the_site(site):
    module = load_site()
    for package in module.PACKAGES:
        text = (site / "api" / f"{package}.html").read_text()
        anchors = Links(text).anchors
        names = module.public_names(package)
        assert names
        assert [name for name in names if module.place_of(package, name) not in anchors] == []
        assert not re.search(r"<p>::: ", text)
