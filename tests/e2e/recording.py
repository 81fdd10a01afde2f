"""``python -m tests.e2e.recording``: ``extproc``, whose simulated replicas record requests."""

import sys
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from extproc.cli import main
from extproc.lab.simulator.server import ReplicaServer

_plain = ReplicaServer.app


def recording(server: ReplicaServer) -> web.Application:
    """The replica's application, with ``GET /recorded``: headers and body of each POST."""
    app, recorded = _plain(server), dict[str, dict[str, Any]]()

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            headers = {name.lower(): value for name, value in request.headers.items()}
            body = (await request.read()).decode("latin-1")
            recorded[headers.get("x-request-id", "")] = {"headers": headers, "body": body}
        return await handler(request)

    async def show(_: web.Request) -> web.Response:
        return web.json_response(recorded)

    app.middlewares.insert(0, record)
    app.router.add_get("/recorded", show)
    return app


if __name__ == "__main__":
    ReplicaServer.app = recording  # type: ignore[method-assign,assignment]
    sys.exit(main(sys.argv[1:]))
