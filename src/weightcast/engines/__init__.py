"""One package for each kind of engine; the language in its adapter, machinery beside it."""
