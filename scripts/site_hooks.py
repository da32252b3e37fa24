"""Hooks of the documentation site: pages from the repository's root, and links that leave docs/."""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r'(src|srcset)="docs/')
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links for the page's place in the site; code stays as it is."""
    source = page.file.src_uri
    place = {uri: path for path, uri in ROOT_PAGES.items()}.get(source, f"docs/{source}")
    pieces = _CODE.split(markdown)
    for index in range(0, len(pieces), 2):
        text = _IMAGE.sub(r'\1="', pieces[index]) if not place.startswith("docs/") else pieces[index]
        pieces[index] = _LINK.sub(lambda link: _rewritten(link, place, source, config.repo_url), text)
    return "".join(pieces)


def _rewritten(link: re.Match[str], place: str, source: str, repository: str | None) -> str:
    """A link of a file of the repository, as the page of the site has it."""
    text, target, anchor = link[1], link[2], (link[3] or "").rstrip("-")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    if not (ROOT / path).exists():
        return link[0]  # mkdocs names it
    if path in ROOT_PAGES:
        uri = ROOT_PAGES[path]
    elif path.startswith("docs/"):
        uri = path.removeprefix("docs/") + ("/README.md" if (ROOT / path).is_dir() else "")
    elif repository:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{text}]({repository.rstrip('/')}/{kind}/main/{path})"
    else:
        return text  # the site does not know where the repository is
    return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(source) or '.')}{anchor})"
