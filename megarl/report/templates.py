"""The templates of the pages: texts are escaped as HTML, and their control characters are shown as escapes."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from megarl.platform.terminal import visible


@cache
def template(name: str) -> Template:
    """Return a compiled template. A run writes its report many times."""
    environment = Environment(
        loader=PackageLoader("megarl.report", "."),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(name)


def _shown(value: object) -> object:
    """Return a text with escapes for control characters; the template's own markup stays as it is."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
