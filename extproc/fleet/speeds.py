"""Speed of each replica: learned by the pollers, or shown by this router's requests."""

from dataclasses import dataclass
from math import inf

from extproc.fleet.digest import DECODED, EXPECTED
from extproc.fleet.members import Members
from extproc.fleet.tables import Replicas
from extproc.ground.clock import Clock
from extproc.predict.correction import Corrections, FirstTokens
from extproc.predict.inputs import FleetView, least, usual_step
from extproc.predict.step import profile_or_default
from extproc.replica_state import ReplicaState

_SHORTEST_STEP = 1e-4  # seconds; no engine steps faster, whatever was learned
_PRIOR_S = 0.03  # δ: times to first token well below this change little
_MOST = 5.0  # bound of a provisional slowness and of its inverse
_STREAMS = 4  # streams of a replica that are read for their first tokens


@dataclass(slots=True)
class _ProvisionalSpeed:
    """Slowness of an unmeasured replica: actual ÷ predicted time to first token.

    Polls need a second to measure a replica. A fresh pool gets dozens of requests in that second,
    and slow replicas would get as many as fast ones. First tokens arrive sooner::

        slowness = (Σ actual + δ) / (Σ predicted + δ)
    """

    streams: int = 0  # read so far for their first tokens
    usual_steps: float = 0.0  # Σ predicted time to first token ÷ ``usual_step`` of the replica
    seconds: float = 0.0  # Σ actual time to first token

    def slowness(self, usual_step: float) -> float:
        """Returns the slowness against a step-time model with this usual step, in seconds."""
        slowness = (self.seconds + _PRIOR_S) / (self.usual_steps * usual_step + _PRIOR_S)
        return min(max(slowness, 1.0 / _MOST), _MOST)


class Speeds:
    """Step times and limits of the replicas, and the corrections of predicted decode times.

    Step times come from the polled state, or else from the replica's profile. First tokens correct
    them until a poll has measured the replica.
    """

    def __init__(self, replicas: Replicas, members: Members, clock: Clock) -> None:
        self._replicas = replicas
        self._members = members
        self._clock = clock
        self.corrections = Corrections(clock())
        self.first_tokens = FirstTokens()
        self._unmeasured: dict[int, _ProvisionalSpeed] = {}  # by row, until a poll measures it

    def joined(self, row: int) -> None:
        self.corrections.clear(row)
        self._unmeasured[row] = _ProvisionalSpeed()

    def left(self, row: int) -> None:
        self._unmeasured.pop(row, None)

    def polled(self, row: int, state: ReplicaState, restarted: bool) -> None:
        if state.measured:
            self._unmeasured.pop(row, None)
        elif restarted:
            self._unmeasured[row] = _ProvisionalSpeed()
        self._set_hardware(row, state)

    def learn_first_token(self, replica: str, usual_steps: float, seconds: float) -> None:
        """Learns the speed of a replica from a first token, unless a poll has measured the speed.

        ``usual_steps``: predicted time to the first token ÷ the replica's usual step time.
        ``seconds``: actual time to the first token.
        """
        row = self._members.rows.get(replica, -1)
        if (speed := self._unmeasured.get(row)) is not None:
            speed.usual_steps += usual_steps
            speed.seconds += seconds
            self._set_hardware(row, self._members.by_row[row])

    def learn_decode(
        self, replica: str, predicted: float, actual: float, step: float = 0.0
    ) -> None:
        """Learns the replica's ratio of ``actual`` to ``predicted`` decode time from one request:
        seconds from first to last token, predicted without correction. ``step``: seconds of a usual
        step when ``predicted`` was computed; 0: the same as now."""
        if (row := self._members.rows.get(replica)) is not None:
            slower = usual_step(self._replicas, row) / step if step else 1.0
            self.corrections.observe(row, predicted, actual, self._clock(), slower)

    def refresh(self, now: float) -> None:
        if self.corrections.due(now):
            decoded = self._replicas.peers[[DECODED, EXPECTED]]
            self._replicas.stretch[:] = self.corrections.ratios(now, decoded)

    def takes_stream(self, replica: str) -> bool:
        """Returns True if a stream is to be read for its first token: for the first streams of a
        replica that no poll has measured."""
        speed = self._unmeasured.get(self._members.rows.get(replica, -1))
        if speed is None:
            return False
        speed.streams += 1
        return speed.streams <= _STREAMS

    def untried(self, view: FleetView) -> list[int]:
        """Returns the indices of idle candidates whose speed no poll has measured."""
        if not self._unmeasured:
            return []
        idle = (view.requests == 0.0).nonzero()[0].tolist()
        return [at for at in idle if view.rows.item(at) in self._unmeasured]

    def favour_untried(self, view: FleetView) -> None:
        """Assumes that untried candidates are as fast, relative to their profiles, as the fastest
        candidate. Otherwise a wrong profile would keep all requests away from them, and they would
        never be measured."""
        if not (untried := self.untried(view)):
            return
        prefill = self._replicas.profile_prefill[view.rows]
        view.c_prefill[untried] = least(view.c_prefill / prefill) * prefill[untried]
        decode = self._replicas.decode_slowness[view.rows]
        for column in (view.decode_step, view.c0, view.c_batch, view.c_kv):
            column[untried] *= least(decode) / decode[untried]

    def _set_hardware(self, row: int, state: ReplicaState) -> None:
        """Sets a replica's step times, and its limits from its state or profile."""
        replicas, profile = self._replicas, profile_or_default(state.profile)
        before = usual_step(replicas, row)
        step = state.learned or profile.step
        if row in self._unmeasured:
            step = step.slowed(self._unmeasured[row].slowness(step.usual))
        c0 = max(step.c0, _SHORTEST_STEP)
        # A profile's limits are those of one engine, and a prompt has to fit into one engine.
        engines = max(state.engines, 1)
        capacity = float(state.kv_tokens or profile.kv_tokens * engines)
        replicas.write(
            row,
            c0=c0,
            c_prefill=step.c_prefill,
            c_batch=step.c_batch,
            c_kv=step.c_kv,
            profile_prefill=profile.step.c_prefill,
            decode_step=replicas.decode_step.item(row) or c0,  # 0: the replica just joined
            kv_capacity=capacity,
            block_size=state.block_size,
            by_priority=state.by_priority,
            token_budget=profile.token_budget * engines,
            longest_prompt=min(state.max_model_len or inf, capacity / engines),
            max_num_seqs=state.max_num_seqs or max(profile.max_num_seqs * engines, state.running),
            tokens_per_step=state.tokens_per_step,
        )
        usual = usual_step(replicas, row)
        replicas.decode_slowness[row] = usual / profile.step.usual
        if before and before != usual:
            self.corrections.slowed(row, usual / before)
