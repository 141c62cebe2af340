"""Self-contained HTML pages with plots: no network, no library.

``write_page("update.html", report)`` shows one update, and ``write_page("run.html", *reports)`` a run.
"""

from weightcast.page.updates import write_page

__all__ = ["write_page"]
