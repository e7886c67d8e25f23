"""The code in README and docs runs as it stands, block after block, in one namespace a page."""

import gc
import re
from pathlib import Path

import pytest

from tests import unhooked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def code_of(page):
    """The page with all but its code blanked out: lines keep their numbers."""
    text, kept, end = page.read_text(), [], 0
    for block in BLOCK.finditer(text):
        kept += ["\n" * text[end : block.start(1)].count("\n"), block.group(1)]
        end = block.end(1)
    return "".join(kept)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_page_runs(page):
    code = code_of(page)
    if ".compile(" not in code:
        exec(compile(code, page.name, "exec"), {})
        gc.collect()  # what the page leaves open is said here, not in some later test
        return
    # The shape checker of the tests cannot be traced: a plain process.
    unhooked.run(code)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_there_is_code_to_run():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 8
