"""Router for vLLM behind Envoy: each request goes to the replica predicted to finish it first.

``proxy/stream.py`` receives a request, ``request/inspect.py`` profiles the request,
``route/router.py`` chooses a replica from the state in ``fleet/fleet.py`` and the predictions of
``predict/completion.py``, and ``proxy/in_flight.py`` follows the request to its end.
"""

__version__ = "0.1.0"
