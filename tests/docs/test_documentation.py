"""The code in README and docs runs as it stands, block after block, in one namespace a page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_page_runs(page):
    namespace: dict[str, object] = {}
    for block in BLOCK.finditer(page.read_text()):
        exec(
            compile(block.group(1), f"{page.name}:{page.read_text()[: block.start()].count(chr(10)) + 2}", "exec"),
            namespace,
        )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_there_is_code_to_run():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 8
