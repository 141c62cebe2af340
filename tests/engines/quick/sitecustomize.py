"""Python runs this at its start if this folder is on its path."""

import quick  # noqa: F401
