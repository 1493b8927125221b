"""docs/faults.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text()
FOLDER = ROOT / "tests" / "component" / "kv_transfer"


def test_every_test_of_the_page_exists() -> None:
    """By file, and by the beginning of its name where the page shortens it."""
    named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)(…|\.py)?`", PAGE)
    assert len(named) > 25
    last_file = ""
    for file, name, rest in named:
        if rest == ".py":
            assert any(ROOT.glob(f"tests/*/kv_transfer/{name}.py")), name
            continue
        last_file = file or last_file
        text = (FOLDER / last_file).read_text()
        assert re.search(rf"def {name}{'' if rest else r'[(]'}", text), (last_file, name)
