"""Settings of property tests: no deadline, and the same examples in every run."""

from hypothesis import settings

settings.register_profile("megarl", deadline=None, derandomize=True)
settings.load_profile("megarl")
