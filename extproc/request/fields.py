"""Fields of a request body as vLLM 0.32 reads them, and the bounds of the output's length."""

from pydantic_core import SchemaValidator, ValidationError, core_schema

from extproc.request.endpoint import Endpoint

MAX_TOKENS = 10_000_000  # limit of token counts: above every context length
MAX_SEQUENCES = 100_000  # limit of numbers of sequences

_COMPLETIONS_DEFAULT = 16  # ``max_tokens`` of completions if it is absent or null

_BOUND_FIELDS = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.GENERATE: ("max_tokens",),
}
_HAVE_N = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE})

_INTEGER = SchemaValidator(core_schema.int_schema())
_BOOLEAN = SchemaValidator(core_schema.bool_schema())


def positive_int(value: object) -> int | None:
    """Return ``value`` as a positive integer; None: vLLM does not read it as one.

    pydantic's lax mode takes ``"12"`` and ``12.0`` for 12, and 1 for true.
    """
    number = value if value is None or type(value) is int else _lax(_INTEGER, value)
    return number if isinstance(number, int) and number > 0 else None


def flag(value: object) -> bool:
    """Return ``value`` as a boolean; values that vLLM does not read as a boolean give False."""
    known = value is None or isinstance(value, bool)
    return (value if known else _lax(_BOOLEAN, value)) is True


def _lax(kind: SchemaValidator, value: object) -> object:
    try:
        return kind.validate_python(value)
    except ValidationError:
        return None


def sampling_of(endpoint: Endpoint, body: dict[str, object]) -> dict[str, object]:
    """Return the object whose fields bound the output: the body or, at ``/inference/v1/generate``,
    its ``sampling_params``."""
    fields = body.get("sampling_params") if endpoint is Endpoint.GENERATE else body
    return fields if isinstance(fields, dict) else {}


def output_bound(endpoint: Endpoint, sampling: dict[str, object]) -> int | None:
    """Return the most tokens that a sequence may generate; None: as many as the model's context
    allows."""
    if not endpoint.decodes:
        return 0
    for field in _BOUND_FIELDS[endpoint]:
        if (bound := positive_int(sampling.get(field))) is not None:
            return min(bound, MAX_TOKENS)
    if endpoint is not Endpoint.COMPLETIONS:
        return None
    only_echoes = flag(sampling.get("echo")) and sampling.get("max_tokens") == 0
    return 0 if only_echoes else _COMPLETIONS_DEFAULT


def least_output(sampling: dict[str, object], bound: int | None) -> int:
    """Return the fewest tokens that a sequence generates; with ``ignore_eos`` this is ``bound``."""
    most = MAX_TOKENS if bound is None else bound
    if flag(sampling.get("ignore_eos")):
        return most
    return min(positive_int(sampling.get("min_tokens")) or 0, most)


def sequences(
    endpoint: Endpoint, sampling: dict[str, object], bound: int | None, prompts: int
) -> int:
    """Return the number of sequences that decode at the same time. Each prompt has ``n`` of them;
    in beam search, ``n`` is the width of the beam."""
    if bound == 0:
        return 0
    n = positive_int(sampling.get("n")) if endpoint in _HAVE_N else None
    return min((n or 1) * prompts, MAX_SEQUENCES)
