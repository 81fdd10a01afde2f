"""Profile of a request: the properties from which its completion time is predicted."""

from dataclasses import dataclass

from extproc.request.endpoint import Endpoint
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.prefix import NO_PREFIX, Prefix


@dataclass(slots=True)  # not frozen: construction would take ten times as long
class RequestProfile:
    """Properties of a request that predictions, limits and the queue need."""

    endpoint: Endpoint
    model: str  # empty: neither the request nor the fleet says which
    prompt_tokens: int  # of all prompts together, estimated
    prompt_bytes: int
    """Bytes of text from which ``prompt_tokens`` was estimated; 0: nothing to learn. Otherwise the
    router learns the model's bytes per token once the replica reports the prompt tokens."""
    output_bound: int | None  # most tokens of a sequence; None: as many as the context allows
    sequences: int = 1  # decoded side by side: n × number of prompts; 0: only prefill
    stream: bool = False
    least_output: int = 0  # fewest tokens of a sequence; the bound with ``ignore_eos``
    tenant: str = ""  # from a header
    prompts: int = 1
    longest_share: float = 1.0  # tokens of the longest prompt ÷ ``prompt_tokens``
    images: int = 0  # whose tokens the router learns from the replica's report; 0: nothing to learn
    image_tokens: int = 0  # part of ``prompt_tokens``, estimated for images
    fetches: bool = False
    """The replica has to fetch or encode images, audio or video before the prefill, which may take
    long."""
    previous_response: str = ""  # id of the stored response that the request continues
    stored: bool = False  # the replica stores the response, for requests that continue it
    claims_priority: bool = False  # the body has, or may have, a priority of its own
    requested_model: str = ""  # name in the body, even if no replica serves it
    session: str = ""  # from session_key()
    objective: Objective = NO_OBJECTIVE
    in_background: bool = False  # the replica answers at once and computes later
    prefix: Prefix = NO_PREFIX  # beginning of a single prompt that a prefix cache may hold

    @property
    def priority(self) -> int:
        """The objective's priority, higher first; 0 if the endpoint takes no priority."""
        return self.objective.priority if self.endpoint.takes_priority else 0

    @property
    def parts(self) -> int:
        """Sequences as an engine counts them: a prompt without output counts as one."""
        return max(self.sequences, self.prompts)

    @property
    def longest_prompt(self) -> float:
        return self.prompt_tokens * self.longest_share

    def computed_prompt(self, context: float) -> float:
        """Return the most prompt tokens that an engine with a context of ``context`` tokens
        prefills. The engine refuses longer prompts, and the estimate of a prompt may err."""
        longest = self.longest_prompt
        return self.prompt_tokens * (context / longest if longest > context else 1.0)

    def most_output(self, context: float) -> float:
        """Return the most tokens that a sequence can generate in a context of ``context`` tokens.

        The context is taken to leave at least 1 token, because vLLM refuses longer prompts.
        """
        left = max(context - self.longest_prompt, 1.0)
        return left if self.output_bound is None else min(self.output_bound, left)


NO_WORK = RequestProfile(Endpoint.EMBEDDINGS, "", 0, 0, 0, sequences=0)
"""Profile of a request that gives the engine no work, such as a request for the list of models."""
