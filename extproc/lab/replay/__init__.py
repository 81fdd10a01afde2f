"""Replays of traffic under a virtual clock, by the production router and the simulator's
engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traced:
    """Request of a trace or a record."""

    at: float  # arrival, in seconds since the start
    prompt_tokens: int  # as an engine counts them
    output_tokens: int  # that each sequence will generate; policies must not see them
