"""``least_request``: the fewest requests in flight."""

import random

from extproc.route.policy import Choice, Situation, lowest


class LeastRequest:
    """Lowest number of requests in flight, live: the router's own and those the poll saw."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the fewest requests, at random among equals."""
        requests = situation.view.requests
        return Choice(lowest(requests, random), requests)

    def why(self, situation: Situation, choice: Choice) -> str:
        """How many it has."""
        return f"{situation.view.requests[choice.first]:.0f} requests in flight"
