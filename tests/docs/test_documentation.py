"""The code in README and docs runs as it stands, block after block, in one namespace a page."""

import gc
import re
import sys
from io import StringIO
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


SAID = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)  # a comment after a print is what it prints
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def agrees(printed, comment):
    """Whether the text begins as the comment does: ... is anything, and numbers may be off by a last digit."""
    texts = [NUMBER.split(part.strip()) for part in comment.split("...")]
    spaced = [[r"\s+".join(map(re.escape, text.split(" "))) for text in part] for part in texts]
    pattern = r".*?\s*".join(f"({NUMBER.pattern})".join(part) for part in spaced)
    found = re.match(pattern, printed, re.DOTALL)
    if found is None:
        return False
    shown = NUMBER.findall(comment)
    return all(
        abs(float(one) - float(other)) <= 1.5 * _unit(other) for one, other in zip(found.groups(), shown, strict=True)
    )


def _unit(number):
    """Of its last digit."""
    digits, _, power = number.partition("e")
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_page_runs(page):
    """And prints what stands beside it: the first time, where it is printed again and again."""
    code = code_of(page)
    for package in sorted({"accelerate", "lightning"} & set(re.findall(r"\b(\w+) import", code))):
        pytest.importorskip(package)
    if ".compile(" in code:
        # The shape checker of the tests cannot be traced: a plain process.
        assert not SAID.search(code), "what a page that compiles prints is not compared"
        unhooked.run(code)
        return
    printed = {}

    def told(*values, **options):
        text = StringIO()
        print(*values, **options, file=text)
        printed.setdefault(sys._getframe(1).f_lineno, text.getvalue())

    exec(compile(code, page.name, "exec"), {"print": told})
    gc.collect()  # what the page leaves open is said here, not in some later test
    said = {code.count("\n", 0, match.start(1)) + 1: match[1] for match in SAID.finditer(code)}
    wrong = {line: (comment, printed.get(line)) for line, comment in said.items()}
    assert {line: pair for line, pair in wrong.items() if not agrees(pair[1] or "", pair[0])} == {}


@pytest.mark.parametrize(
    ("printed", "comment", "alike"),
    [
        ("a: 64 -> 47 states, error <= 31.2", "a: 64 -> 47 states, error <= 31", True),
        ("a: 64 -> 46 states", "a: 64 -> 47 states", True),
        ("a: 64 -> 44 states", "a: 64 -> 47 states", False),
        ("measured 0.25", "measured 0.28", False),
        ("measured 0.27", "measured 0.28", True),
        ("b: 64 states", "a: 64 states", False),
        ("/tmp/x/half.bin is not whole: 3 bytes", ".../half.bin is not whole: ...", True),
        ("2 (records), 1e-08", "2 (records), 1e-08", True),
        ("2 (records), 1e-06", "2 (records), 1e-08", False),
        ("module     states", "module states ...", True),
        ("", "finished", False),
    ],
)
def test_what_agrees(printed, comment, alike):
    assert agrees(printed, comment) == alike


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_there_is_code_to_run():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 8
