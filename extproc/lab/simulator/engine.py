"""Scheduler of vLLM V1 without a model: the sequences of each step, and the step's duration."""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from extproc.lab.simulator.blocks import BlockPool
from extproc.lab.simulator.features import COLD, LoadedAdapters, Speculation
from extproc.lab.simulator.kv_events import BlockEvents
from extproc.lab.simulator.steps import (
    Counters,
    DecodeSteps,
    FinishReason,
    Gauges,
    Sequence,
    Step,
    StepOutcome,
)
from extproc.predict.step import HardwareProfile


class Engine:
    """Schedules sequences as vLLM V1 does; the caller's time is the only clock.

    A step first serves the running sequences in the order of their admission: each decoding
    sequence gets a token, and the unfinished prefill gets a chunk. The step then admits waiting
    sequences in order, until the token budget or the number of sequences is used up, or until a
    sequence does not fit into the free KV blocks. If blocks run out, the sequences admitted last
    are preempted: they wait at the head of the queue. With prefix caching they later find their
    leading full blocks again, up to the first that another sequence has taken; without, they
    compute everything anew. A step that preempts admits no sequence. Scheduling by priority sorts
    the queue, and preempts the sequences that rank last; waiting sequences never preempt running
    ones. If the adapter of a waiting sequence finds no slot, the sequences behind it may be
    admitted before it.

    If no block is left for a draft, the draft is shortened; vLLM would preempt.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        block_size: int = 16,
        kv_tokens: int | None = None,
        max_num_seqs: int | None = None,
        prefix_caching: bool = True,
        speculation: Speculation | None = None,
        adapters: LoadedAdapters | None = None,
        events: BlockEvents | None = None,
        by_priority: bool = False,
        cold_steps: int = 0,
        old_counters: bool = False,
    ) -> None:
        """Create an idle engine. ``kv_tokens`` and ``max_num_seqs`` default to the profile.

        Args:
            cold_steps: number of first steps that take :data:`COLD` times as long, because kernels
                are compiled.
            old_counters: count cached prompt tokens as vLLM up to 0.15 does: only as hits of the
                prefix cache, and again at each attempt to admit their sequence.

        Raises:
            ValueError: the token budget is below ``max_num_seqs`` × (1 + drafted tokens), or
                the KV cache is smaller than a block.
        """
        self.profile = profile
        self.max_num_seqs = max_num_seqs or profile.max_num_seqs
        self.token_budget = profile.token_budget
        self.speculation = speculation
        self._drafted = speculation.tokens if speculation else 0  # for a sequence in a step
        if self.token_budget < self.max_num_seqs * (1 + self._drafted):
            drafts = f", each with {self._drafted} drafts" if self._drafted else ""
            raise ValueError(
                f"token budget {self.token_budget} is less than max_num_seqs {self.max_num_seqs}"
                f"{drafts}: raise the budget or lower max_num_seqs"
            )
        blocks = (kv_tokens or profile.kv_tokens) // block_size
        if blocks < 1:
            raise ValueError(f"{kv_tokens} KV tokens do not fill a block of {block_size}")
        self.pool = BlockPool(blocks, block_size)
        self.events = events
        if events:
            self.pool.evicted = events.removed
        self.prefix_caching = prefix_caching
        self.by_priority = by_priority
        self.old_counters = old_counters
        self.adapters = adapters  # None: no LoRA adapters
        self.counters = Counters()
        self.steps = 0  # completed steps, including those that vLLM does not count
        self.step: Step | None = None  # step in progress
        self.gauges = Gauges()
        self._prefix_queries = self._prefix_hits = 0  # copied to the counters after a step
        self.freezing_gauges = False  # as vLLM up to 0.10.1: steps without a token set no gauges
        self.sleep_level: int | None = None  # None: awake
        self.step_model = profile.step  # as :meth:`slow_down` left it
        self._cold_steps = cold_steps
        self._now = 0.0
        self._decode_steps: DecodeSteps | None = None
        self._waiting: deque[Sequence] = deque()
        self._deferred = 0  # waiting sequences whose adapter found no slot in the last step
        self._prefilling: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks in use, 0…1; idle blocks count as free."""
        return 1 - self.pool.free / self.pool.blocks

    @property
    def capacity(self) -> int:
        """Tokens that fit into the KV cache; no sequence may be longer."""
        return self.pool.blocks * self.pool.block_size

    @property
    def decoding(self) -> Collection[Sequence]:
        """Sequences whose prompt is computed, in the order of their admission."""
        return self._decoding.values()

    @property
    def queued(self) -> Iterator[Sequence]:
        """Sequences whose prompt is not computed yet: first those in prefill, then those that
        wait."""
        return chain(self._prefilling.values(), self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence for the next step. The caller must first advance the engine to ``now``.

        Raises:
            ValueError: the sequence never fits into the KV cache.
        """
        tokens = sequence.prompt_tokens + max(sequence.output_tokens - 1, 0)
        if tokens > self.capacity:
            raise ValueError(
                f"sequence {sequence.id} grows to {tokens} tokens; the KV cache holds "
                f"{self.capacity}"
            )
        if self.step is None and not self.running and not self._waiting:
            self._now = max(self._now, now)
        sequence.arrived = now
        if not self.prefix_caching:
            sequence.hashes = ()
        if self.by_priority:
            insort(self._waiting, sequence, key=_rank)
        else:
            self._waiting.append(sequence)

    def abort(self, sequence: Sequence, now: float) -> None:
        """End an unfinished sequence; it gets no token from the step in progress."""
        if sequence.id in self._decoding or sequence.id in self._prefilling:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.reason = FinishReason.ABORT
        sequence.finished = now
        if self.step is None and not self.freezing_gauges:
            self._show(self.waiting)

    def sleep(self, level: int) -> None:
        """Begin no further step until :attr:`sleep_level` is None. Levels 1 and 2 clear the prefix
        cache."""
        self.sleep_level = level
        if level:
            self.pool.clear()
            if self.events:
                self.events.cleared()

    def slow_down(self, factor: float) -> None:
        """Let steps take ``factor`` times as long as in the profile, from the next step on."""
        self.step_model = self.profile.step.slowed(factor)
        self._decode_steps = None

    def schedule(self, now: float) -> Step | None:
        """Begin a step at ``now``; return None if no sequence can run. Call :meth:`complete` before
        the next step."""
        self._now = now
        if self.sleep_level is not None:
            return None
        preempted = False
        while (new_blocks := self._decode_blocks()) + self._chunk_blocks() > self.pool.free:
            self._preempt()
            preempted = True
        self.pool.take(new_blocks)
        chunks = [(sequence, self._chunk(sequence)) for sequence in self._prefilling.values()]
        for sequence, chunk in chunks:
            self._extend(sequence, chunk)
        if not preempted:
            self._admit_waiting(chunks)
        if chunks:
            self._decode_steps = None
            load_s = 0.0
            if self.adapters and any(sequence.adapter for sequence, _ in chunks):
                load_s = self.adapters.use(self._in_batch())
            ends_at = now + load_s + self._step_time(chunks)
        elif self._decoding:
            ends_at = self._end_of_decode_step()
        else:
            return None
        self.step = Step(now, ends_at, self.waiting, chunks)
        return self.step

    def complete(self) -> StepOutcome:
        """End the step in progress: count its tokens, free the blocks of finished sequences."""
        step = self.step
        assert step is not None, "no step is in progress"
        self.step = None
        self._now = now = step.ends_at
        self.steps += 1
        decoded = list(self._decoding.values())
        for sequence in decoded:
            sequence.computed += 1
            sequence.generated += 1
        accepted = self._accept(decoded, self.speculation) if self.speculation else {}
        chunks = [each for each in step.chunks if each[0].id in self._prefilling]  # not aborted
        for sequence, chunk in chunks:
            sequence.computed += chunk
        prefilled = [sequence for sequence, _ in chunks if sequence.computed == sequence.context]
        first = [sequence for sequence in prefilled if sequence.first_token is None]
        for sequence in first:
            sequence.first_token = now
        for sequence in prefilled:
            sequence.generated += sequence.output_tokens > 0
            self._decoding[sequence.id] = self._prefilling.pop(sequence.id)
        finished = [each for each in (*decoded, *prefilled) if each.generated == each.output_tokens]
        for sequence in finished:
            self._stop(sequence)
            sequence.finished = now
        outcome = StepOutcome(now, decoded, accepted, prefilled, first, finished)
        self._count(outcome)
        if decoded or prefilled or not self.freezing_gauges:
            self._show(min(step.waiting, self.waiting))
        return outcome

    def advance(self, until: float) -> list[StepOutcome]:
        """Run every step that ends by ``until``. A step that ends after ``until`` stays in
        progress; sequences added now wait for its end."""
        outcomes: list[StepOutcome] = []
        while (step := self.step or self.schedule(self._now)) and step.ends_at <= until:
            outcomes.append(self.complete())
        return outcomes

    def _decode_blocks(self) -> int:
        """Blocks for the next token of each decoding sequence."""
        size = self.pool.block_size
        return sum(sequence.computed % size == 0 for sequence in self._decoding.values())

    def _chunk_blocks(self) -> int:
        sequences = self._prefilling.values()
        return sum(self._blocks_missing(sequence, self._chunk(sequence)) for sequence in sequences)

    def _chunk(self, sequence: Sequence) -> int:
        return min(sequence.context - sequence.computed, self._budget_left())

    def _preempt(self) -> None:
        """Move the sequence admitted last back to the head of the queue. Scheduling by priority
        moves the sequence that ranks last back to its place in the queue."""
        if self.by_priority:
            last = max(chain(self._decoding.values(), self._prefilling.values()), key=_rank)
        else:
            last = next(reversed((self._prefilling or self._decoding).values()))
        if self.prefix_caching:
            self._name_blocks(last)
        self._stop(last)
        last.preemptions += 1
        self.counters.preemptions += 1
        if self.by_priority:
            insort(self._waiting, last, key=_rank)
        else:
            self._waiting.appendleft(last)

    def _name_blocks(self, sequence: Sequence) -> None:
        """Give each full block without a hash a hash of its own. After its preemption, the sequence
        finds those blocks again that no other sequence has taken."""
        known, size = len(sequence.hashes), self.pool.block_size
        own = [~(sequence.id << 32 | block) for block in range(known, sequence.computed // size)]
        sequence.hashes = [*sequence.hashes, *own]
        self._publish(sequence, known * size, sequence.computed)

    def _admit_waiting(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Admit waiting sequences in order, within token budget, max_num_seqs and free blocks."""
        budget = self._budget_left() - sum(chunk for _, chunk in chunks)
        deferred: list[Sequence] = []
        while self._waiting and budget > 0 and self.running < self.max_num_seqs:
            sequence, adapters = self._waiting[0], self.adapters
            if (
                adapters
                and sequence.adapter
                and not adapters.admits(sequence.adapter, self._in_batch())
            ):
                deferred.append(self._waiting.popleft())
                continue
            if not self._take_prefix(sequence):
                break
            self._waiting.popleft()
            self._prefilling[sequence.id] = sequence
            if sequence.admitted is None:
                sequence.admitted = self._now
            chunk = min(sequence.context - sequence.computed, budget)
            self._extend(sequence, chunk)
            chunks.append((sequence, chunk))
            budget -= chunk
        self._waiting.extendleft(reversed(deferred))
        self._deferred = len(deferred)

    def _in_batch(self) -> list[str]:
        return _adapters_of(chain(self._decoding.values(), self._prefilling.values()))

    def _budget_left(self) -> int:
        return self.token_budget - len(self._decoding) * (1 + self._drafted)

    def _take_prefix(self, sequence: Sequence) -> bool:
        """Let the sequence use the blocks of its longest cached prefix; return False if the
        sequence does not fit.

        A hit covers whole blocks and leaves at least a token to compute.
        """
        limit = (sequence.context - 1) // self.pool.block_size
        hits = self.pool.cached(sequence.hashes, limit)
        shared = sequence.hashes[:hits]
        needed = self.pool.blocks_for(sequence.context) - hits + self.pool.idle(shared)
        fits = needed <= self.pool.free
        if self.prefix_caching and not sequence.preemptions and (fits or self.old_counters):
            self._prefix_queries += sequence.prompt_tokens
            self._prefix_hits += hits * self.pool.block_size
        if not fits:
            return False
        self.pool.share(shared)
        sequence.held = list(shared)
        sequence.blocks = hits
        sequence.computed = hits * self.pool.block_size
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
        return True

    def _blocks_missing(self, sequence: Sequence, chunk: int) -> int:
        return self.pool.blocks_for(sequence.computed + chunk) - sequence.blocks

    def _extend(self, sequence: Sequence, chunk: int) -> None:
        """Take the blocks of a chunk; later prompts can share the full blocks."""
        missing = self._blocks_missing(sequence, chunk)
        self.pool.take(missing)
        sequence.blocks += missing
        self._publish(sequence, sequence.computed, sequence.computed + chunk)

    def _publish(self, sequence: Sequence, begin: int, end: int) -> None:
        first, last = begin // self.pool.block_size, end // self.pool.block_size
        new = self.pool.publish(sequence.hashes[first:last])
        sequence.held += new
        if self.events and new:
            self.events.stored(sequence, first, new)

    def _step_time(self, chunks: list[tuple[Sequence, int]]) -> float:
        """Seconds of a step that prefills ``chunks`` and decodes the other sequences. A drafted
        token costs as much as a prefilled token."""
        prefill = sum(chunk for _, chunk in chunks) + self._drafted * len(self._decoding)
        decoded = sum(sequence.computed for sequence in self._decoding.values())
        context = sum(sequence.computed for sequence, _ in chunks)
        # Each token of a chunk attends to the computed tokens and, on average, half the chunk.
        attention = sum(chunk * (sequence.computed + chunk / 2) for sequence, chunk in chunks)
        attention += self._drafted * decoded
        time = self.step_model.step_time(prefill, self.running, decoded + context, attention)
        return time * COLD if self.steps < self._cold_steps else time

    def _end_of_decode_step(self) -> float:
        """Time at which a step that only decodes ends."""
        planned = self._decode_steps
        warmed_up = self.steps <= self._cold_steps
        if planned is None or warmed_up or planned.end(self.steps - 1) != self._now:
            growth = self.step_model.c_kv * len(self._decoding)
            planned = DecodeSteps(self._now, self.steps, self._step_time([]), growth)
            self._decode_steps = planned
        return planned.end(self.steps)

    def _accept(self, decoded: list[Sequence], speculation: Speculation) -> dict[int, int]:
        """Give decoding sequences the drafted tokens that are accepted; return the number of these
        tokens by sequence id."""
        counters, gained, pool = self.counters, {}, self.pool
        counters.drafts += len(decoded)
        counters.draft_tokens += len(decoded) * speculation.tokens
        for sequence in decoded:
            blocks = pool.blocks_for(sequence.computed)
            room = (blocks + pool.free) * pool.block_size - sequence.computed
            accepted = min(speculation.accepted(), room)
            counters.accepted_tokens += accepted
            if tokens := min(accepted, sequence.output_tokens - sequence.generated):
                sequence.computed += tokens
                sequence.generated += tokens
                pool.take(pool.blocks_for(sequence.computed) - blocks)
                gained[sequence.id] = tokens
                self._decode_steps = None
        return gained

    def _stop(self, sequence: Sequence) -> None:
        if self._prefilling.pop(sequence.id, None) is None:
            del self._decoding[sequence.id]
            self._decode_steps = None
            # The step in progress has taken the block of the sequence's next token, if needed.
            sequence.blocks = self.pool.blocks_for(sequence.computed + (self.step is not None))
            self._publish(sequence, sequence.prompt_tokens, sequence.computed)
        if self.adapters and sequence.adapter:
            self.adapters.use([sequence.adapter])
        self.pool.release(sequence.blocks - len(sequence.held), sequence.held)
        sequence.held = []
        sequence.blocks = sequence.computed = 0

    def _count(self, outcome: StepOutcome) -> None:
        counters, first = self.counters, outcome.first
        counters.prefix_queries, counters.prefix_hits = self._prefix_queries, self._prefix_hits
        if not outcome.decoded and not outcome.prefilled:
            return
        prompt_tokens = sum(sequence.prompt_tokens for sequence in first)
        cached = sum(sequence.cached_tokens for sequence in first)
        tokens = len(outcome.decoded) + sum(outcome.accepted.values())
        tokens += sum(sequence.output_tokens > 0 for sequence in outcome.prefilled)
        counters.finished.update(sequence.reason for sequence in outcome.finished)
        counters.first_tokens += len(first)
        counters.prompt_tokens += prompt_tokens
        counters.cached_tokens += cached
        counters.generated_tokens += tokens
        counters.iteration_tokens.observe(tokens + prompt_tokens - cached)

    def _show(self, waiting: int) -> None:
        used = _adapters_of(self._decoding.values()) if self.adapters else ()
        deferred = min(self._deferred, waiting)
        self.gauges = Gauges(self.running, waiting, self.kv_usage, deferred, used)


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    """Sort key if the engine schedules by priority; the lowest rank is admitted first."""
    return sequence.priority, sequence.arrived or 0.0, sequence.id


def _adapters_of(sequences: Iterable[Sequence]) -> list[str]:
    return list(dict.fromkeys(sequence.adapter for sequence in sequences if sequence.adapter))
