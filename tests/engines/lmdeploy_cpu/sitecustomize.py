"""Python runs this at its start if this folder is on its path."""

import cuda_on_host  # noqa: F401
