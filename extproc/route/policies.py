"""The policies there are, by the name configuration and requests use."""

from collections.abc import Callable

from extproc.route.cache_aware import CacheAware
from extproc.route.completion import Completion
from extproc.route.least_kv import LeastKv
from extproc.route.least_request import LeastRequest
from extproc.route.lmetric import LMetric
from extproc.route.policy import Policy
from extproc.route.power_of_two import PowerOfTwo
from extproc.route.queue_kv import QueueKv
from extproc.route.random_choice import RandomChoice
from extproc.route.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "completion": Completion,
    "least_request": LeastRequest,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "least_kv": LeastKv,
    "queue_kv": QueueKv,
    "lmetric": LMetric,
    "cache_aware": CacheAware,
}
