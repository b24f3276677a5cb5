"""The site of `make docs` has every guide. The build itself checks every link (`strict`)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_guide_is_in_the_navigation() -> None:
    named = set(re.findall(r": (guides/\S+\.md)$", SITE, re.MULTILINE))
    assert named == {f"guides/{path.name}" for path in (ROOT / "docs" / "guides").glob("*.md")}


def test_the_readme_links_every_guide() -> None:
    linked = set(re.findall(r"\(docs/guides/([\w-]+\.md)[)#]", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in (ROOT / "docs" / "guides").glob("*.md")}


def test_a_broken_link_fails_the_build() -> None:
    assert "\nstrict: true\n" in SITE
    assert "not_found: warn" in SITE
    assert "anchors: warn" in SITE
    recipe = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recipe == ["mkdocs build --strict"]  # --quiet hides warnings from --strict


def test_the_site_works_from_disk_and_without_a_network() -> None:
    assert "\nuse_directory_urls: false\n" in SITE
    assert "\n  font: false\n" in SITE
    assert "- offline" in SITE
    assert "://" not in SITE
