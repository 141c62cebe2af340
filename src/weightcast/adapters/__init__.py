"""One package for each kind of engine.  ``detect.py`` recognises it, ``adapter.py`` speaks its language."""
