"""One update of all targets: what every trainer rank runs, and what the head rank decides."""
