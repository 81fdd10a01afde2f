"""Messages of later and of earlier versions, and garbage, in every form that Redis holds."""

import math
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from msgspec import Struct, msgpack, structs

from extproc.fleet.announcements import SentPrompt
from extproc.fleet.digest import Digest, DigestKind
from extproc.fleet.held_blocks import BlockUpdate
from extproc.predict.inputs import Floats
from extproc.replica_state import ReplicaState
from extproc.share.assignment import HEARTBEAT, Heartbeat
from extproc.share.blocks import BLOCKS, ReplicaBlockUpdate
from extproc.share.digests import DIGEST
from extproc.share.drains import DRAIN, Drain
from extproc.share.envelope import EnvelopeKind, Skips, sealed_list
from extproc.share.replicas import LISTS, PUT, REMOVED, Lists, Put, Removed
from extproc.share.streams import OWNER, PROMPTS, Owner, Prompts

STATE = ReplicaState(id="10.0.0.1:8000", running=3, models=("m",))
KEYS = np.arange(3, dtype=np.uint64)
FIGURES = np.arange(10.0).reshape(10, 1)
QUEUED = {STATE.id: {-1: 2.5}}
MESSAGES: list[tuple[EnvelopeKind[Any], Any]] = [
    (PUT, Put(STATE, "hash")),
    (REMOVED, Removed("10.0.0.1:8000")),
    (DIGEST, Digest("router", 7, 1.5, DigestKind.WHOLE, (STATE.id,), FIGURES, "", QUEUED)),
    (PROMPTS, Prompts("router", (SentPrompt("10.0.0.1:8000", KEYS, 64.0, 200.0, 5),))),
    (OWNER, Owner("resp_1", "10.0.0.1:8000")),
    (BLOCKS, ReplicaBlockUpdate("10.0.0.1:8000", BlockUpdate(2, 1, 16, KEYS, KEYS[:1]))),
    (DRAIN, Drain(True)),
    (HEARTBEAT, Heartbeat(("10.0.0.1:8000",))),
    (LISTS, Lists(("m", "lora"), ("lora",))),
]
KINDS = [kind for kind, _ in MESSAGES]


class Opened:
    """Reader of envelopes that counts what it skips."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.skips = Skips(lambda reason, number: self.counts.update({reason: number}))

    def open(self, data: bytes, *kinds: EnvelopeKind[Any]) -> Any:
        return self.skips.open("key", data, *kinds or KINDS)


def same(body: Any, other: Any) -> bool:
    """Compares two bodies by their sealed bytes, because arrays have no plain ``==``."""
    kind = next(kind for kind, message in MESSAGES if type(message) is type(body))
    return type(body) is type(other) and kind.seal(body) == kind.seal(other)


def from_the_future(data: bytes, *more: Any, tag: str | None = None) -> bytes:
    """Returns the envelope as of a later version, with more fields."""
    now_tag, version, body = msgpack.decode(data)
    return msgpack.encode([tag or now_tag, version + len(more), [*body, *more]])


def digest(figures: Floats, sent_at: float = 1.5) -> bytes:
    body = ["router", 7, sent_at, 1, [STATE.id], figures.astype("<f4").tobytes()]
    return msgpack.encode(["load", DIGEST.version, body])


def sent_prompt(keys: bytes, unit: float, tokens: float) -> bytes:
    body = ["router", [[STATE.id, keys, unit, tokens, 5]]]
    return msgpack.encode(["sent_prompts", PROMPTS.version, body])


def short_keys() -> bytes:
    """An update of blocks whose keys are no multiple of eight bytes."""
    tag, version, (replica, update) = msgpack.decode(BLOCKS.seal(MESSAGES[5][1]))
    return msgpack.encode([tag, version, [replica, [*update[:3], b"short", b""]]])


@pytest.mark.parametrize(("kind", "body"), MESSAGES, ids=[kind.tag for kind in KINDS])
@pytest.mark.parametrize(
    ("change", "opens", "counts"),
    [
        pytest.param(bytes, True, {}, id="same version"),
        pytest.param(
            lambda data: from_the_future(data, "colour", {"of": "something"}),
            True,
            {"unknown_field": 2},
            id="later fields",
        ),
        pytest.param(
            lambda data: from_the_future(data, tag="new"), False, {"unknown_tag": 1}, id="later tag"
        ),
        *(
            pytest.param(itemgetter(slice(cut)), False, {"garbage": 1}, id=f"cut at {cut}")
            for cut in (0, 1, 5, -1)
        ),
    ],
)
def test_message_is_opened_or_counted(
    kind: EnvelopeKind[Any],
    body: Any,
    change: Callable[[bytes], bytes],
    opens: bool,
    counts: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = Opened()
    found = opened.open(change(kind.seal(body)))
    assert same(found, body) if opens else found is None
    assert opened.counts == counts
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert bool(warnings) is ("garbage" in counts)


@pytest.mark.parametrize(
    "old",
    [
        STATE.id.encode(),
        b"\xff\xfe",
        b'{"put":[{"id":"10.0.0.1:8000"}]}',
        b"\x91" * 10_000,
        msgpack.encode([4, "router", 7, 1.5, 1, [], b"", b"", b""]),
        bytes(32),
        None,
        short_keys(),
        PUT.seal(Put(structs.replace(STATE, kv_usage=math.nan))),
        PUT.seal(Put(structs.replace(STATE, steps=math.inf))),
        PUT.seal(Put(structs.replace(STATE, running="many"))),
        digest(FIGURES * np.nan),
        digest(-FIGURES),
        digest(FIGURES[1:]),
        digest(FIGURES, sent_at=math.inf),
        DIGEST.seal(structs.replace(MESSAGES[2][1], admin="")).replace(b"\xa0", b"\xa3a/b"),
        sent_prompt(b"short", 64.0, 200.0),
        sent_prompt(bytes(8), 0.0, 200.0),
        sent_prompt(bytes(8), 64.0, math.nan),
    ],
)
def test_unreadable_message_is_garbage(old: Any) -> None:
    opened = Opened()
    assert opened.open(old) is None
    assert opened.counts == {"garbage": 1}


def test_digest_takes_40_bytes_per_replica() -> None:
    figures, names = FIGURES.repeat(100, axis=1), tuple("10.0.0.1:8000" for _ in range(100))
    sealed = DIGEST.seal(Digest("0123456789abcdef", 7, 1.5, DigestKind.WHOLE, names, figures))
    assert len(sealed) < 60 + 100 * (40 + 14)


def test_nested_fields_of_a_later_version_are_counted_and_skipped() -> None:
    state = msgpack.decode(msgpack.encode(STATE)) | {"colour": "blue", "size": 3}
    opened = Opened()
    put = opened.open(msgpack.encode(["replica state", PUT.version + 2, [state]]), PUT)
    assert put == Put(STATE)
    assert opened.counts == {"unknown_field": 2}


def test_field_of_a_later_version_is_skipped_in_each_sent_prompt() -> None:
    prompts = [[STATE.id, KEYS.tobytes(), 64.0, 200.0, 5, "colour"]] * 2
    opened = Opened()
    body = ["router", prompts]
    sent = opened.open(msgpack.encode(["sent_prompts", PROMPTS.version + 1, body]), PROMPTS)
    assert len(sent.prompts) == 2
    assert opened.counts == {"unknown_field": 1}


def test_sealed_list_keeps_readable_messages() -> None:
    opened = Opened()
    put, removed = PUT.seal(Put(STATE)), REMOVED.seal(Removed("a"))
    future = from_the_future(put, tag="new")
    listed = sealed_list(put, future, removed, msgpack.encode(["replica state", PUT.version, [7]]))
    assert opened.skips.open_all("channel", listed, PUT, REMOVED) == [Put(STATE), Removed("a")]
    assert opened.counts == {"unknown_tag": 1, "garbage": 1}
    assert opened.skips.open_all("channel", sealed_list(), PUT) == []
    assert opened.skips.open_all("channel", b"\x91" * 10_000, PUT) == []


def test_unexpected_tag_is_unknown() -> None:
    opened = Opened()
    assert opened.open(DRAIN.seal(Drain(True)), PUT, REMOVED) is None
    assert opened.counts == {"unknown_tag": 1}


def test_garbage_is_logged_once_per_source(caplog: pytest.LogCaptureFixture) -> None:
    skips = Skips()
    for source in ("one", "two", "one", "two"):
        skips.open(source, b"", PUT)
    assert [vars(line)["source"] for line in caplog.records] == ["one", "two"]


FIELDS = {
    Put: "state lists",
    Lists: "models adapters",
    Removed: "id",
    Digest: "router number sent_at kind replicas figures",
    Prompts: "router prompts",
    SentPrompt: "replica keys unit tokens whole",
    Owner: "thing replica",
    ReplicaBlockUpdate: "replica update",
    BlockUpdate: "number previous block_size stored removed",
    Drain: "drains",
    Heartbeat: "replicas problems stopped",
    ReplicaState: (
        "models max_loras adapters_in_use engines running waiting kv_usage kv_tokens "
        "block_size prefix_caching asleep started_at steps prompt_tokens cached_tokens "
        "generated_tokens first_tokens accepted_tokens preemptions id name "
        "profile learned measured listed adapters max_model_len takes_priority by_priority "
        "healthy problem draining unanswered_s kv_update scraped_at scrape_seconds life_s "
        "refuses most_running max_num_seqs tokens_per_step"
    ),
}
"""Fields of 0.1.0: without them, or with another meaning, a message needs a new tag."""


@pytest.mark.parametrize(("body", "names"), FIELDS.items())
def test_messages_keep_their_fields_and_added_ones_have_defaults(
    body: type[Struct], names: str
) -> None:
    fields, released = [field.name for field in structs.fields(body)], names.split()
    in_order = body.__struct_config__.array_like
    assert fields[: len(released)] == released if in_order else {*released} <= {*fields}
    assert not [f.name for f in structs.fields(body) if f.required and f.name not in released]
    assert FIELDS.keys() >= {type(body) for _, body in MESSAGES}


def test_added_field_makes_a_later_version() -> None:
    class Coloured(Removed, array_like=True, frozen=True):
        colour: str = "blue"

    opened = Opened()
    later = EnvelopeKind(REMOVED.tag, Coloured).seal(Coloured("10.0.0.1:8000"))
    assert opened.open(later) == Removed("10.0.0.1:8000")
    assert opened.counts == {"unknown_field": 1}


def test_newer_version_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    opened = Opened()
    for kind, body in MESSAGES:
        opened.open(kind.seal(body))
        assert not caplog.messages
    for kind, body in MESSAGES:
        opened.open(from_the_future(kind.seal(body), "colour"))
    [message] = caplog.messages
    assert message.startswith("redis has values of another version")
