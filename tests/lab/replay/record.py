"""Records of a small simulated fleet."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from msgspec.structs import replace

from extproc.lab.replay.play import play
from extproc.lab.replay.recorded import Recorded
from extproc.lab.replay.scene import scene_of
from extproc.observe.record import FORMAT, Line, ReplicaLine, RequestLine, StartLine, text_of
from extproc.predict.step import PROFILES
from extproc.replica_state import ReplicaState

MODEL = "llama"
BEGAN = 1_790_000_000.0
A10 = "llama-8b-a10"


def address(number: int) -> str:
    return f"10.0.0.{number}:8000"


def start(policy: str = "lmetric") -> StartLine:
    config = {"route": {"policy": policy}, "hold": {"longest_s": 0.0}, "serve": {}, "poll": {}}
    return StartLine(BEGAN, FORMAT, "default", config)


def replica(number: int, profile: str = A10, at: float = BEGAN, **state: object) -> ReplicaLine:
    """Line of a replica; number 1 is called ``a``."""
    known = ReplicaState(
        id=address(number),
        name="abcdef"[number - 1],
        profile=profile,
        models=(MODEL,),
        measured=True,
        kv_tokens=PROFILES[profile].kv_tokens,
    )
    known = replace(known, **state)
    return ReplicaLine(at, address(number), known, 2048.0, 256.0)


def requests(rate: float, seconds: float, shared: int = 0) -> Iterator[RequestLine]:
    """Yield requests whose prompts begin with the same ``shared`` keys."""
    random, at = Random(1), BEGAN
    beginning = [random.getrandbits(64) for _ in range(shared)]
    while (at := at + random.expovariate(rate)) < BEGAN + seconds:
        prompt = random.randrange(64 * shared + 100, 64 * shared + 1500)
        keys = [*beginning, *(random.getrandbits(64) for _ in range(prompt // 64 - shared))]
        yield RequestLine(
            at=at,
            endpoint="/v1/chat/completions",
            model=MODEL,
            replica=address(1),
            seconds=1.0,
            prompt_tokens=prompt,
            estimated_tokens=prompt,
            complete=True,
            stream=True,
            output_tokens=float(random.randrange(20, 200)),
            keys=text_of(np.array(keys, np.uint64)),
            unit=64.0,
        )


def lines(
    profiles: Sequence[str],
    began: StartLine,
    arriving: Sequence[RequestLine],
    more: Sequence[Line] = (),
) -> list[Line]:
    """Simulate requests on replicas with these profiles; returns the lines of their record."""
    fleet = [replica(number, profile) for number, profile in enumerate(profiles, start=1)]
    scene = scene_of(Recorded(began, list(arriving), {line.id: [line] for line in fleet}))
    played = play(scene, 0)
    served = [
        replace(line, replica=name, ttft_s=ttft_s, seconds=seconds)
        for line, name, ttft_s, seconds in zip(
            arriving,
            played.replicas,
            played.ttft_s.tolist(),
            played.completion_s.tolist(),
            strict=True,
        )
    ]
    return [began, *fleet, *served, *more]


def write(folder: Path, every: Sequence[Line], name: str = "default-50051") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, every)) + b"\n")
    return folder
