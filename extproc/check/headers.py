"""Whether Envoy tells the router the headers that its settings name."""

from collections.abc import Set

from extproc.check.envoy_file import EnvoyFile
from extproc.check.finding import Finding, Level
from extproc.check.rules import bodies_first
from extproc.server.messages import expression_of

_NAME = "named_headers_are_told"


def named_headers_are_told(file: EnvoyFile, headers: Set[str]) -> list[Finding]:
    """One finding for each filter that skips headers and does not tell all of those."""
    filters = bodies_first(file) if headers else []
    wanted = sorted(map(expression_of, headers))
    short = [
        Finding(
            _NAME,
            Level.ERROR,
            part.where,
            "request_header_mode is SKIP and request_attributes lacks headers that the router's "
            f"settings name, so that they have no effect. Add {', '.join(missing)}",
        )
        for part in filters
        if (missing := [one for one in wanted if one not in part.message.request_attributes])
    ]
    if short or not filters:
        return short
    return [Finding(_NAME, Level.OK, "", "The router hears the headers that its settings name.")]
