"""Property tests are judged by their answers: no deadline, and the same examples on every run."""

from hypothesis import settings

settings.register_profile("megarl", deadline=None, derandomize=True)
settings.load_profile("megarl")
