"""The check that a page stands on its own."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]


def check_alone(html: str) -> None:
    """The page loads nothing, and a browser would refuse if it tried."""
    tags = Tags(html)
    policy = next(meta["content"] for meta in tags.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert [tag for tag, _ in tags.tags if tag in ("img", "link", "iframe", "object", "embed", "video", "base")] == []
    assert [script for script in tags.of("script") if script] == []  # inline, without a source
    for tag, attributes in tags.tags:
        assert not {"src", "srcset", "href", "action", "data", "style"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert "@import" not in html
    assert "url(" not in html
