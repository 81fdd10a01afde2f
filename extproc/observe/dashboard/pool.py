"""What of a router is shown."""

from typing import Protocol

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock
from extproc.observe.accuracy import Accuracy
from extproc.observe.decisions import DecisionLog
from extproc.route.queue import Queue


class Pool(Protocol):
    """A pool of a router: of its services, those that are looked at."""

    @property
    def config(self) -> Config:
        """Of the pool."""

    @property
    def fleet(self) -> Fleet:
        """Its replicas."""

    @property
    def queue(self) -> Queue:
        """What waits for them."""

    @property
    def log(self) -> DecisionLog:
        """The last decisions, of all pools."""

    @property
    def accuracy(self) -> Accuracy:
        """The last requests that ended."""

    @property
    def clock(self) -> Clock:
        """Seconds, never back."""

    @property
    def wall(self) -> Clock:
        """Seconds since the epoch."""
