"""A router for vLLM behind Envoy: a request goes where it is predicted to finish soonest.

The way of a request: ``proxy/stream.py`` hears of it, ``request/inspect.py`` reads it,
``route/router.py`` chooses, by what ``fleet/fleet.py`` knows and ``predict/completion.py`` expects,
and ``proxy/in_flight.py`` follows it to its end. ``docs/architecture.md`` has the map.
"""

__version__ = "0.1.0"
