"""Metadata of the wheel that depends on where the project is published: the README's links, and the project's URLs.

``WEIGHTCAST_REPOSITORY=https://HOST/OWNER/NAME`` at a build makes the README's links absolute, at the tag of the
version, and names the project's URLs.  Without it, links into the repository become plain text, since an index cannot
follow them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


class PublishedMetadata(MetadataHookInterface):
    """Hatchling's hook for the fields that ``pyproject.toml`` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets ``readme``, and ``urls`` if the repository is known."""
        repository = os.environ.get("WEIGHTCAST_REPOSITORY", "").rstrip("/")
        files = f"{repository}/blob/v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text()
        link = rf"[\1]({files}/\2)" if repository else r"\1"
        metadata["readme"] = {"content-type": "text/markdown", "text": _RELATIVE_LINK.sub(link, text)}
        if repository:
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{files}/docs",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
