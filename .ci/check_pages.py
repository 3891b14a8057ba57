"""Check all pages: lines that begin with | are rows of tables, and links lead somewhere.

A table that a wrapping has run into text, or a heading with another name, shows on the rendered
page alone.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

MARKDOWN = MarkdownIt("commonmark").enable("table")


@cache
def parse(page: Path):
    """Return the tokens of a page."""
    return MARKDOWN.parse(page.read_text())


def broken_rows(page: Path) -> list[str]:
    """Return the rows outside tables, and the lines of tables that do not begin as rows."""
    lines_of = {"table_open": set(), "fence": set()}
    for token in parse(page):
        if token.type in lines_of:
            lines_of[token.type].update(range(*token.map))
    broken = []
    for number, line in enumerate(page.read_text().split("\n")):
        in_table = number in lines_of["table_open"]
        is_row = line.lstrip().startswith("|")
        if is_row != in_table and number not in lines_of["fence"]:
            broken.append(f"line {number + 1} breaks a table: {line:.60}")
    return broken


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    found = set()
    for heading, content in zip(parse(page), parse(page)[1:]):
        if heading.type == "heading_open":
            text = "".join(child.content for child in content.children)
            found.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return found


def dead_links(page: Path) -> list[str]:
    """Return the links and pictures whose file, or heading of a page, is not there."""
    dead = []
    for token in parse(page):
        for child in token.children or []:
            target = child.attrs.get("href") or child.attrs.get("src") or "https:"
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            if ":" in target:  # on the web
                continue
            if not file.exists() or (anchor and anchor not in anchors(file)):
                dead.append(f"leads nowhere: {target}")
    return dead


def main() -> int:
    """Print the faults of all tracked pages. Returns the exit status."""
    names = subprocess.check_output(["git", "ls-files", "*.md"], text=True).splitlines()
    exit_code = 0
    for name in names:
        for fault in broken_rows(Path(name)) + dead_links(Path(name)):
            print(f"{name}: {fault}")
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
