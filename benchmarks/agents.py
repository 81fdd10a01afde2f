"""Makes a trace of agent sessions: prompts begin with a system prompt and grow with each turn.

    python -m benchmarks.agents agents.jsonl.gz

Sessions arrive as a Poisson process. The application of a session is drawn by Zipf's law; each
application has a system prompt. The prompt of a turn is the prompt of the turn before, its answer,
and new text. Pauses between turns are log-normal. As in the Mooncake traces, each full 512 prompt
tokens have a hash id.
"""

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil, exp, log, log2
from pathlib import Path
from random import Random

from benchmarks import arguments
from benchmarks.trace import ID_TOKENS, TracedRequest

_HOURS = 0.35
_SESSIONS_PER_S = 0.5
_APPLICATIONS = 6
_SYSTEM_PROMPT = (2000.0, 8000.0)  # tokens, log-uniform
_TURNS = 12.0  # mean
_NEW_TEXT = (100.0, 1500.0)  # tokens that a turn adds, log-uniform
_ANSWER = 120.0  # tokens, median
_SHORTEST_ANSWER, _LONGEST_ANSWER = 4, 2000
_TOKEN_S = 0.015  # seconds to generate a token of an answer
_GAP_S = 5.0  # between the end of an answer and the next turn, median
_CONTEXT = 32_000
_LARGEST_BOUND = 4096


@dataclass(slots=True)
class _Prompt:
    tokens: int
    ids: list[int] = field(default_factory=list)

    def fill(self, fresh: Iterator[int]) -> None:
        self.ids += [next(fresh) for _ in range(self.tokens // ID_TOKENS - len(self.ids))]


def sessions(random: Random) -> list[TracedRequest]:
    """Requests of the trace, sorted by time."""
    fresh, end = count(1), _HOURS * 3600
    systems = [_Prompt(_log_uniform(random, *_SYSTEM_PROMPT)) for _ in range(_APPLICATIONS)]
    for system in systems:
        system.fill(fresh)
    weights = [1 / (rank + 1) for rank in range(_APPLICATIONS)]
    requests: list[TracedRequest] = []
    at = random.expovariate(_SESSIONS_PER_S)
    while at < end:
        (system,) = random.choices(systems, weights)
        prompt = _Prompt(system.tokens, [*system.ids])
        requests += (turn for turn in _turns(at, prompt, fresh, random) if turn.at < end)
        at += random.expovariate(_SESSIONS_PER_S)
    return sorted(requests, key=_milliseconds)


def line(request: TracedRequest) -> str:
    at, ids = _milliseconds(request), request.hash_ids
    lengths = {"input_length": request.prompt_tokens, "output_length": request.output_tokens}
    bound = {} if request.max_tokens is None else {"max_tokens": request.max_tokens}
    return json.dumps({"timestamp": at, **lengths, "hash_ids": ids, **bound})


def _turns(
    at: float, prompt: _Prompt, fresh: Iterator[int], random: Random
) -> Iterator[TracedRequest]:
    for _ in range(max(1, round(random.expovariate(1 / _TURNS)))):
        prompt.tokens += _log_uniform(random, *_NEW_TEXT)
        if prompt.tokens > _CONTEXT - _LONGEST_ANSWER:
            return
        prompt.fill(fresh)
        drawn = int(random.lognormvariate(log(_ANSWER), 0.9))
        answer = max(_SHORTEST_ANSWER, min(_LONGEST_ANSWER, drawn))
        yield TracedRequest(at, prompt.tokens, answer, _bound(random, answer), tuple(prompt.ids))
        prompt.tokens += answer
        at += answer * _TOKEN_S + random.lognormvariate(log(_GAP_S), 0.8)


def _bound(random: Random, answer: int) -> int | None:
    """Output bound as callers might set it: none, a power of two well above the answer, or up to
    20% above the answer."""
    drawn = random.random()
    if drawn < 0.3:
        return None
    if drawn < 0.7:
        return int(min(_LARGEST_BOUND, 2 ** ceil(log2(answer) + 2 * random.random())))
    return int(answer * (1 + 0.2 * random.random())) + 1


def _log_uniform(random: Random, low: float, high: float) -> int:
    return int(exp(random.uniform(log(low), log(high))))


def _milliseconds(request: TracedRequest) -> int:
    return round(request.at * 1000)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("agents", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl.gz")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with gzip.open(args.out, "wt") as lines:
        lines.writelines(f"{line(request)}\n" for request in sessions(Random(args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
