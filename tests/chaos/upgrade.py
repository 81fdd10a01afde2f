"""``python -m tests.chaos.upgrade --before PYTHON``: routers and pollers are upgraded under load.

PYTHON is an interpreter with another version of extproc. The system is a real Envoy with two
routers, two pollers, a Redis and four simulated replicas. All routers and pollers begin with the
other version, are replaced by this one, one at a time, and then by the other version again. The
command exits with 1 if a request failed or was routed by no router.
"""

import argparse
import asyncio
from functools import partial
from pathlib import Path

from extproc.lab.harness.stack import Stack
from tests.chaos.report import report
from tests.chaos.stack import REPLICAS
from tests.chaos.system import LoadedSystem

RATE = 20.0
_BETWEEN_S = 3.0


class MixedStack(Stack):
    """Stack whose routers and pollers may run another version."""

    def __init__(self, directory: Path, before: Path) -> None:
        super().__init__(directory, REPLICAS, routers=2, pollers=2)
        self.before = before
        self.upgraded = set[str]()

    def _service(self, name: str) -> list[str]:
        python, *command = super()._service(name)
        if name in self.upgraded:
            return [python, *command]
        # -P: the current folder, which may hold this version, is not searched for modules.
        return [str(self.before), "-P", *command]


async def run(before: Path, directory: Path) -> list[str]:
    """Upgrade and roll back; return the problems."""
    stack = MixedStack(directory, before)
    async with LoadedSystem.started(stack, RATE, answer_s=2.0) as system:
        async with system.load:
            await asyncio.sleep(_BETWEEN_S)
            for name in (*stack.pollers, *stack.routers):
                stack.upgraded.add(name)
                await _restart(stack, name)
            for name in (*stack.routers, *stack.pollers):
                stack.upgraded.remove(name)
                await _restart(stack, name)
        await system.settled()
        requests = system.accesses.values()
    failed = [
        f"{each.request_id}: {each.status} {each.flags}" for each in requests if each.status != 200
    ]
    unrouted = [f"{each.request_id}: not routed" for each in requests if not each.destination]
    print(f"{len(requests)} requests, {len(failed)} failed, {len(unrouted)} not routed")
    return failed + unrouted


async def _restart(stack: MixedStack, name: str) -> None:
    await stack.stop(name)
    await stack.start(name)
    await stack.wait_routing()
    print(f"{name}: {'this version' if name in stack.upgraded else 'the version before'}")
    await asyncio.sleep(_BETWEEN_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.upgrade")
    python = "interpreter of an environment with another version"
    parser.add_argument("--before", type=Path, required=True, metavar="PYTHON", help=python)
    args = parser.parse_args()
    return report(partial(run, args.before))


if __name__ == "__main__":
    raise SystemExit(main())
