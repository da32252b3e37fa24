"""The URLs of a wheel: those of the repository whose CI builds it. A wheel built elsewhere has none."""

from __future__ import annotations

import os
from typing import Any


def dynamic_metadata(field: str, settings: dict[str, Any]) -> dict[str, str]:
    """The field `urls`, from what GitHub Actions and its like set."""
    if field != "urls" or settings:
        raise ValueError(f"{field} with {settings}: gives the field urls, without settings")
    server, repository = (os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    if not server or not repository:
        return {}
    home = f"{server.rstrip('/')}/{repository}"
    pages = {"Changelog": "CHANGELOG.md", "Documentation": "docs/usage.md"}
    return {"Repository": home, **{name: f"{home}/blob/main/{page}" for name, page in pages.items()}}
