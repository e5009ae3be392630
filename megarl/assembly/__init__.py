"""The composition root: builds a run from its configuration. Only commands import this package."""
