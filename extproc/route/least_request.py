"""``least_request``: the fewest requests in flight."""

import random

from extproc.route.policy import Choice, Situation, lowest


class LeastRequest:
    """Lowest number of requests in flight, live: the router's own and those the poll saw."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the fewest requests, at random among equals."""
        requests = situation.view.requests
        first = lowest(requests, random)
        return Choice(first, requests, f"{requests[first]:.0f} requests in flight")
