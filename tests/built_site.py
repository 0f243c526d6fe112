"""The end of `make docs`: the built pages work from disk, without a network, and their search finds things."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"
# What a browser loads by itself. Links that a reader clicks on are no matter.
LOADED = [
    re.compile(r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'> ]+"),
    re.compile(r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\"'> ]+"),
    re.compile(r"url\([\"']?(?:https?:)?//[^)]+\)"),
    re.compile(r"@import\s+[\"'](?:https?:)?//[^\"']+"),
]


def loaded_from_elsewhere(text: str) -> list[str]:
    """The references in a page or style sheet that a browser would fetch from another host."""
    return [found[0] for pattern in LOADED for found in pattern.finditer(text)]


SHOWN = ["index", "quick_start", "coming_from", "api/training", "architecture"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def faults_in_a_browser() -> list[str]:
    """What Chromium complains of on five pages that are opened from disk, and a search that finds nothing."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        for name in SHOWN:
            page.goto((SITE / f"{name}.html").as_uri())
            query, found = (
                page.locator("[data-md-component=search-query]").first,
                page.locator(".md-search-result__item"),
            )
            for _ in range(15):  # what is typed before the page listens is not searched for
                query.clear()
                query.press_sequentially("update_in_backward")
                page.wait_for_timeout(1000)
                if found.count():
                    break
            else:
                faults.append(f"the search of {name}.html finds nothing")
        browser.close()
    return faults


def main() -> int:
    """Exit code 0 if no page or style sheet loads anything from another host, and a browser shows them."""
    pages = [path for path in SITE.rglob("*") if path.suffix in {".html", ".css"}]
    if not pages:
        print(f"{SITE.name}/ has no pages: run mkdocs first")
        return 1
    found = {path.relative_to(SITE): each for path in pages for each in loaded_from_elsewhere(path.read_text())}
    for path, each in found.items():
        print(f"{path} loads {each}")
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        print("docs: no Chromium, or no playwright, on this machine: pages were not opened in a browser")
        return 1 if found else 0
    faults = faults_in_a_browser()
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if found or faults else 0


if __name__ == "__main__":
    sys.exit(main())
