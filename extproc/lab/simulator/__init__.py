"""Simulated replica: an engine that schedules as vLLM does, behind an OpenAI-compatible server.

A request that vLLM would refuse raises ``RequestError``.
"""

OUTPUT_TOKENS_HEADER = "x-simulate-output-tokens"  # output length of a request
SERVED_BY_HEADER = "x-served-by"  # in every response: `ip:port` of the replica
