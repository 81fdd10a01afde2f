"""A decision record with the fields that the demo reads."""

from extproc.observe.decision import DecisionRecord, Outcome


def decision_record(
    request_id: str, replica: str, second: str, predicted_s: float, why: str = ""
) -> DecisionRecord:
    return DecisionRecord(
        number=1,
        request_id=request_id,
        pool="default",
        decided_at=0.0,
        policy="completion",
        endpoint="/v1/completions",
        model="llama-8b",
        served_as="llama-8b",
        stream=False,
        objective="",
        prompt_tokens=12_345,
        output_bound=None,
        sequences=1,
        expected_output_tokens=100.0,
        p90_output_tokens=200.0,
        replica=replica,
        replica_name="",
        second=second,
        why=why,
        fallback="",
        others_age_s=None,
        expected_cached_tokens=0.0,
        predicted_ttft_s=0.1,
        predicted_completion_s=predicted_s,
        compared=0,
        candidates=[],
        excluded=[],
        outcome=Outcome(),
    )
