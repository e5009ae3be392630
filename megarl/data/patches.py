"""The replacement of code of transformers."""

from megarl.platform.patching import declare, replace

STATISTICS = declare(
    "transformers.utils",
    "is_scipy_available",
    "is_sklearn_available",
    library="transformers",
    versions=">=5.19,<5.20",
    reason="5.19 imports scikit-learn, SciPy and pandas, for assisted generation and boxes in images; it takes seconds",
    upstream="transformers/generation/candidate_generator.py and loss/loss_for_object_detection.py, at their top",
    until="it imports them when it calls them",
)


def spare_statistics() -> None:
    """Let transformers work as if SciPy and scikit-learn were missing. Call it before it imports its models."""
    replace(STATISTICS, is_scipy_available=lambda: False, is_sklearn_available=lambda: False)
