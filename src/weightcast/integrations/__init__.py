"""Classes for other frameworks' extension points, one module for each framework.

Nothing else in weightcast imports this package.  Each module imports its framework, so it is imported only where that
framework is installed.  ``docs/integrations/`` says how each is used and what was run.
"""
