"""Self-contained HTML pages with plots: no network, no library."""
