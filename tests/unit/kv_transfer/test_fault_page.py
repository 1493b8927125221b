"""docs/faults.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text()
FOLDER = ROOT / "tests" / "component" / "kv_transfer"


def test_every_test_of_the_page_exists() -> None:
    """By file, in a folder where the page names one, and by a part of its name where it shortens it."""
    pattern = r"`(?:(tests/[\w/]+/)?(test_\w+\.py)(?:::)?)?(test_\w+)?(…)?`"
    named = [groups for groups in re.findall(pattern, PAGE) if any(groups)]
    assert len(named) > 30
    last = FOLDER
    for folder, file, name, rest in named:
        if file:
            last = ROOT / folder / file if folder else FOLDER / file
            if not folder and not name:  # a file that the page's head or a neighbour places
                assert any(ROOT.glob(f"tests/*/kv_transfer/{file}")), file
                continue
            assert last.is_file(), last
        if name:
            assert re.search(rf"def {name}{'' if rest else r'[(]'}", last.read_text()), (last, name)
