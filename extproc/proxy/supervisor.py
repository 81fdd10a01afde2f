"""``extproc serve --workers N``: starts the worker processes, and again those that die."""

import asyncio
import logging
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from random import Random

from extproc.config import Config
from extproc.ground.clock import Clock, monotonic
from extproc.ground.runtime import Backoff

logger = logging.getLogger(__name__)

READY = "ready"
"""What a worker tells when it serves; anything else is why it does not."""

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 10.0
_STEADY_S = 10.0
"""A worker that has lived that long did not die again at once."""
_AFTER_DRAINING_S = 5.0
"""A worker that still runs so many seconds after its draining hangs."""


async def supervise(config: Config) -> None:
    """Runs the workers until SIGTERM or SIGINT, then lets their open streams end.

    Raises:
        OSError: a worker cannot be started; none is left running.
    """
    workers = [Worker(number, config) for number in range(config.serve.workers)]
    running = asyncio.ensure_future(_run(workers))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await running
    finally:
        logger.info("stopping the workers", extra={"workers": len(workers)})
        await asyncio.gather(*(worker.stop() for worker in workers))


async def _run(workers: list["Worker"]) -> None:
    reasons = await asyncio.gather(*(worker.start() for worker in workers))
    for worker, reason in zip(workers, reasons, strict=True):
        if reason:
            raise OSError(f"worker {worker.number}: {reason}")
    logger.info("workers ready", extra={"workers": len(workers)})
    await asyncio.gather(*(keep_running(worker, monotonic, Random()) for worker in workers))


async def keep_running(worker: "Worker", clock: Clock, random: Random) -> None:
    """Starts the worker again whenever it ends; waits longer where it ends again soon."""
    backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S, random)
    while True:
        since = clock()
        reason = await worker.ended()
        if clock() - since >= _STEADY_S:
            backoff.reset()
        while reason:
            wait_s = backoff.next()
            extra = {"worker": worker.number, "reason": reason, "again_in_s": round(wait_s, 2)}
            logger.error("a worker ended and is started again", extra=extra)
            await asyncio.sleep(wait_s)
            reason = await worker.start()


class Worker:
    """One worker process, which ends when this process does, however that ends."""

    def __init__(self, number: int, config: Config) -> None:
        """A worker that does not run yet; ``config`` is the configuration of them all."""
        self.number = number
        self._config = config.of_worker(number)
        self._process: Process | None = None

    async def start(self) -> str:
        """Start it and wait until it serves; the reason where it does not, else empty."""
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "extproc.proxy.worker", str(self.number)),
                stdin=PIPE,
                stdout=PIPE,
                # It finds the modules that this process found.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                # Ctrl-C is for this process alone, which then stops the workers.
                start_new_session=True,
            )
        except OSError as error:  # no memory, or too many processes: for now
            return f"no process can be started: {error.strerror}"
        assert process.stdin
        assert process.stdout
        process.stdin.write(pickle.dumps(self._config))  # and stays open: see worker.py
        with suppress(ConnectionError):
            await process.stdin.drain()
        told = (await process.stdout.readline()).decode().strip()
        return "" if told == READY else told or await self.ended()

    async def ended(self) -> str:
        """Wait for its end; how it ended."""
        assert self._process
        status = await self._process.wait()
        if status < 0:
            names = {int(number): number.name for number in signal.Signals}
            return f"ended by {names.get(-status, f'signal {-status}')}"
        return f"ended with status {status}"

    async def stop(self) -> None:
        """End it with SIGTERM and, where that does not end it after its draining, SIGKILL."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(self._config.serve.drain_s + _AFTER_DRAINING_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("a worker hangs and is killed", extra={"worker": self.number})
            self._process.kill()
            await self._process.wait()
