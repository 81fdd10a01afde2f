"""``least_kv``: the emptiest KV cache at the last poll."""

import random

from extproc.route.policy import Choice, Situation, lowest


class LeastKv:
    """Lowest fraction of the KV cache in use, as AIBrix's ``least-kv-cache``: at the last poll."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The replica with the most KV space, at random among equals."""
        usage = situation.view.polled_kv_usage
        return Choice(lowest(usage, random), usage)

    def why(self, situation: Situation, choice: Choice) -> str:
        """How full its KV cache is."""
        return f"{situation.view.polled_kv_usage[choice.first]:.0%} of its KV cache in use"
