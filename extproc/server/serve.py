"""``extproc serve``: one router, or a supervisor of several."""

from extproc.config import Config


async def serve(config: Config) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises:
        OSError: an address cannot be listened on, or a worker cannot be started.
        ValueError: the configuration names a policy or a tokenizer that does not exist.
    """
    if config.serve.workers == 1:
        from extproc.server.app import run_router

        await run_router(config)
    else:
        from extproc.server.supervisor import supervise  # needs neither gRPC nor numpy

        await supervise(config)
