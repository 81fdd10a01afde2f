"""Profile of a request: its properties that its completion is predicted from."""

from dataclasses import dataclass

from extproc.request.endpoint import Endpoint
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.prefix import NO_PREFIX, Prefix


@dataclass(slots=True)  # not frozen: to make one would take ten times as long
class RequestProfile:
    """A request as the predictor sees it."""

    endpoint: Endpoint
    model: str  # empty where neither the request nor the fleet says which
    prompt_tokens: int  # estimated tokens of all its prompts together
    prompt_bytes: int
    """Bytes of text the estimate was made from; 0 where the tokens were counted. Divided by the
    prompt tokens a replica reports, it teaches the ratio of bytes to tokens of the model."""
    output_bound: int | None  # most tokens of a sequence; None: what the context leaves
    sequences: int = 1  # decoded side by side: n × number of prompts; 0: nothing is
    stream: bool = False
    least_output: int = 0  # fewest tokens of a sequence; with ``ignore_eos`` as many as the bound
    tenant: str = ""  # on whose behalf it is made, where a header says so
    prompts: int = 1
    longest_share: float = 1.0  # of the prompt tokens, the share of the longest prompt, 0…1
    images: int = 0  # whose tokens the replica's report will tell; 0: it tells nothing
    image_tokens: int = 0  # of the prompt tokens, those that the images were taken for
    previous_response: str = ""  # id of the stored response that it goes on from
    stored: bool = False  # the replica keeps the response, for requests that name it
    claims_priority: bool = False  # the body has a priority of its own, or may have
    requested_model: str = ""  # the model's name in its body, perhaps none that replicas serve
    session: str = ""  # key of the session that it belongs to
    objective: Objective = NO_OBJECTIVE
    in_background: bool = False  # the answer comes at once and the work is done later
    prefix: Prefix = NO_PREFIX  # the part of its only prompt that may be in a prefix cache

    @property
    def priority(self) -> int:
        """The objective's priority: the higher goes first."""
        return self.objective.priority if self.endpoint.takes_priority else 0

    @property
    def fetches(self) -> bool:
        """The replica fetches and encodes images or audio first, for however long."""
        return self.image_tokens > 0 or self.endpoint.takes_audio

    @property
    def parts(self) -> int:
        """Sequences as an engine counts them: a prompt that is only prefilled is one."""
        return max(self.sequences, self.prompts)

    @property
    def longest_prompt(self) -> float:
        """Tokens of the longest of its prompts."""
        return self.prompt_tokens * self.longest_share

    def most_output(self, context: float) -> float:
        """Most tokens one sequence may generate where prompt and output share ``context`` tokens.

        vLLM refuses a prompt that leaves room for none, so one is the least.
        """
        left = max(context - self.longest_prompt, 1.0)
        return left if self.output_bound is None else min(self.output_bound, left)


NO_WORK = RequestProfile(Endpoint.EMBEDDINGS, "", 0, 0, 0, sequences=0)
"""A request that makes a replica compute nothing, such as one for its models."""
