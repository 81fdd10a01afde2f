"""A decision record with the fields that the demo reads."""

from typing import Any

from extproc.observe.decision import DecisionRecord


def decision_record(
    request_id: str, replica: str, second: str, predicted_s: float, why: str = ""
) -> DecisionRecord:
    fields: dict[str, Any] = dict.fromkeys(DecisionRecord.__struct_fields__)
    fields |= {"number": 1, "request_id": request_id, "prompt_tokens": 12_345, "why": why}
    fields |= {"replica": replica, "second": second, "predicted_completion_s": predicted_s}
    return DecisionRecord(**fields)
