"""Fields as vLLM reads them: pydantic's lax mode takes ``"12"`` and ``12.0`` for 12, 1 for true."""

from pydantic_core import SchemaValidator, ValidationError, core_schema

_INTEGER = SchemaValidator(core_schema.int_schema())
_BOOLEAN = SchemaValidator(core_schema.bool_schema())


def positive_int(value: object) -> int | None:
    """``value`` as an integer; None where it is not one, or not above zero."""
    if value is None:
        return None
    if type(value) is int:  # as nearly always
        return value if value > 0 else None
    try:
        number: int = _INTEGER.validate_python(value)
    except ValidationError:
        return None
    return number if number > 0 else None


def flag(value: object) -> bool:
    """``value`` as a boolean; False where it is not one."""
    if value is None or isinstance(value, bool):
        return value is True
    try:
        return _BOOLEAN.validate_python(value) is True
    except ValidationError:
        return False
