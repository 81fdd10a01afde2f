"""``GET /v1/models``, answered here where names are configured that no replica knows of."""

from collections.abc import Iterable

from pydantic_core import to_json

from extproc.fleet.members import ModelNames
from extproc.replica_state import ReplicaState


def model_list(names: ModelNames, states: Iterable[ReplicaState], created: int) -> bytes:
    """What clients may ask for, in the form of OpenAI's API and vLLM's ``max_model_len``: tokens
    that prompt and answer may have, on the replica with the fewest.

    ``created``: seconds since the epoch; vLLM, too, gives the time of the answer.
    """
    kinds = {(state.models, state.max_model_len) for state in states}
    listed = names.askable(name for models, _ in kinds for name in models)
    return to_json(
        {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": created,
                    "owned_by": "vllm",
                    "max_model_len": min(_contexts(names, name, kinds), default=None),
                }
                for name in listed
            ],
        }
    )


def _contexts(
    names: ModelNames, asked: str, kinds: Iterable[tuple[tuple[str, ...], int | None]]
) -> list[int]:
    return [
        context
        for models, context in kinds
        if context and any(names.known(model, models) for model in names.models(asked))
    ]
