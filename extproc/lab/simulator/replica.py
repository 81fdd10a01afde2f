"""Simulated replica: a model on an engine, with the limits of vLLM."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from http import HTTPStatus
from random import Random
from typing import NoReturn
from zlib import crc32

from extproc.lab.simulator import tokens
from extproc.lab.simulator.blocks import chain_hashes
from extproc.lab.simulator.bodies import Body, GenerateBody, RequestError
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import ACCEPTANCE, LoadedAdapters, Speculation
from extproc.lab.simulator.kv_events import BlockEvents
from extproc.lab.simulator.live import GeneratedAnswer, Generation, LiveEngine
from extproc.lab.simulator.metrics import Metrics
from extproc.lab.simulator.pooling import PoolingBody
from extproc.lab.simulator.steps import FinishReason, Sequence
from extproc.predict.step import DEFAULT_PROFILE, hardware_profile


def output_length(median: int, seed: int, prompt: bytes, choice: int) -> int:
    """Draw the length of the ``choice``-th answer to an encoded prompt, at least 1.

    The length depends only on seed and prompt, so that runs with different routing are comparable.
    Lognormal with standard deviation 1 in log space: the mean is 1.65 times the median, as in
    Azure's conversation trace of 2023 (median 129 tokens, mean 211).
    """
    digest = blake2b(prompt, digest_size=8).hexdigest()
    rng = Random(f"{seed}/{digest}/{choice}")
    return max(1, round(median * rng.lognormvariate(0.0, 1.0)))


DEFAULT_MODEL_LEN = 32_768  # context length in tokens, unless the KV cache holds less


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Options of a simulated replica, mostly named as in vLLM."""

    model: str = "simulated"
    profile: str = DEFAULT_PROFILE
    speed: float = 1.0  # times as fast as the profile
    kv_tokens: int | None = None  # None: as in the hardware profile
    max_num_seqs: int | None = None  # None: as in the hardware profile
    max_model_len: int | None = None  # None: `DEFAULT_MODEL_LEN`, at most the KV cache
    max_num_queued_reqs: int | None = None  # most sequences that run or wait; None: no limit
    max_num_queued_tokens: int | None = None  # waiting prompt tokens at which requests get 503
    scheduling_policy: str = "fcfs"  # or `priority`
    block_size: int = 16
    output_median: int = 120  # median output length in tokens, before any bound
    seed: int = 0  # of output lengths and of the acceptance of drafts
    draft_tokens: int = 0  # drafts of a sequence in a step; 0: no speculative decoding
    acceptance: float = ACCEPTANCE  # probability that a drafted token is accepted
    prefix_caching: bool = True
    adapters: tuple[str, ...] = ()  # names of LoRA adapters
    max_loras: int = 1  # most adapters in a batch
    adapter_load_s: float = 0.1  # seconds to load an adapter, at the profile's speed
    enable_prompt_tokens_details: bool = False  # True: answers report cached prompt tokens
    cold_steps: int = 0  # number of steps at the start that take longer
    old_counters: bool = False  # True: counters of vLLM up to 0.15
    kv_events_ports: tuple[int, int] | None = None  # to publish and to replay; None: no events


class Replica:
    """Model on an engine; turns requests into sequences of the engine."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Create a replica; its engine runs with :meth:`LiveEngine.run`.

        Raises:
            KeyError: the hardware profile is unknown.
            ValueError: the settings contradict each other.
        """
        drafts, random = settings.draft_tokens, Random(settings.seed)
        speculation = Speculation(drafts, settings.acceptance, random) if drafts else None
        profile = hardware_profile(settings.profile)
        load_s = settings.adapter_load_s / settings.speed
        adapters = LoadedAdapters(settings.max_loras, load_s) if settings.adapters else None
        self.settings = settings
        self.engine = Engine(
            replace(profile, step=profile.step.slowed(1 / settings.speed)),
            settings.block_size,
            settings.kv_tokens,
            settings.max_num_seqs,
            settings.prefix_caching,
            speculation,
            adapters,
            BlockEvents(settings.block_size) if settings.kv_events_ports else None,
            by_priority=settings.scheduling_policy == "priority",
            cold_steps=settings.cold_steps,
            old_counters=settings.old_counters,
        )
        self.max_model_len = settings.max_model_len or min(DEFAULT_MODEL_LEN, self.engine.capacity)
        if self.max_model_len > self.engine.capacity:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the KV cache holds "
                f"({self.engine.capacity} tokens): raise kv_tokens or lower max_model_len"
            )
        self.metrics = Metrics(self.engine, settings.model)
        self.live = LiveEngine(self.engine, self.metrics)

    def check_model(self, model: str | None) -> None:
        if model and model != self.settings.model and model not in self.settings.adapters:
            message = f"The model `{model}` does not exist."
            raise RequestError(message, "model", HTTPStatus.NOT_FOUND)

    def generate(self, body: GenerateBody, output_tokens: int | None) -> Generation:
        """Queue a request that generates text; ``output_tokens`` replaces the drawn length."""
        bounds = [(prompt, self._bound(body, tokens.count(prompt))) for prompt in body.prompts()]
        answers = [
            self._answer(body, prompt, bound, choice, output_tokens)
            for prompt, bound in bounds
            for choice in range(body.choices)
        ]
        return self._submit(Generation(answers, body.choices, bool(body.stream)))

    def pool(self, body: PoolingBody) -> Generation:
        """Queue a request that only computes prompts."""
        prompts = body.prompts()
        for prompt in prompts:
            self._check_length(tokens.count(prompt), self.max_model_len)
        answers = [GeneratedAnswer(self._sequence(body, prompt, "", 0), 0, 0) for prompt in prompts]
        return self._submit(Generation(answers, 1, streamed=False))

    def _submit(self, generation: Generation) -> Generation:
        """Queues a request, or refuses it as vLLM's ``AsyncLLM.check_admission`` does."""
        most, most_tokens = self.settings.max_num_queued_reqs, self.settings.max_num_queued_tokens
        if most is not None and self.live.unfinished + len(generation.answers) > most:
            self._refuse("max_num_queued_reqs", "is currently busy and cannot accept new requests")
        if most_tokens is not None and self.live.queued_tokens >= most_tokens:
            self._refuse("max_num_queued_tokens", "has reached its prefill token backlog limit")
        self.live.submit(generation)
        return generation

    def _refuse(self, limit: str, why: str) -> NoReturn:
        self.metrics.rejections[limit] += 1
        message = f"The engine {why}. Please try again later or on a different instance."
        raise RequestError(message, status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _answer(
        self, body: GenerateBody, prompt: bytes, bound: int, choice: int, length: int | None
    ) -> GeneratedAnswer:
        if body.ignore_eos:
            length = bound
        elif length is None:
            length = output_length(self.settings.output_median, self.settings.seed, prompt, choice)
        length = min(max(length, body.min_tokens), bound)
        start = crc32(prompt) + choice
        sequence = self._sequence(body, prompt, tokens.generated_text(start, length), length)
        if length == bound:
            sequence.reason = FinishReason.LENGTH
        return GeneratedAnswer(sequence, bound, start)

    def _sequence(self, body: Body, prompt: bytes, text: str, output_tokens: int) -> Sequence:
        adapter = body.model if body.model in self.settings.adapters else ""
        block_bytes = self.settings.block_size * tokens.BYTES_PER_TOKEN
        content = prompt + tokens.encode(text)
        hashes = chain_hashes(content, block_bytes, adapter.encode())
        return Sequence(
            next(self.live.ids),
            tokens.count(prompt),
            output_tokens,
            hashes,
            adapter,
            content if self.engine.events else b"",
            body.priority,
        )

    def _bound(self, body: GenerateBody, prompt_tokens: int) -> int:
        """Largest number of tokens to generate, by vLLM's rules."""
        limit, requested = self.max_model_len, body.bound
        if requested is not None and requested > limit:
            message = f"max_tokens={requested} cannot be greater than max_model_len={limit}."
            raise RequestError(f"{message} Please request fewer output tokens.", "max_tokens")
        self._check_length(prompt_tokens, limit - 1)
        bound = min(limit - prompt_tokens, requested or limit)
        if body.min_tokens > bound:
            message = f"min_tokens must be less than or equal to max_tokens={bound}"
            raise RequestError(f"{message}, got {body.min_tokens}.", "min_tokens")
        return bound

    def _check_length(self, prompt_tokens: int, limit: int) -> None:
        if prompt_tokens < 1:
            raise RequestError("the prompt must not be empty", "prompt")
        if prompt_tokens > limit:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt contains {prompt_tokens} input tokens. Please reduce the length of "
                "the input prompt."
            )
            raise RequestError(message, "input_tokens")
