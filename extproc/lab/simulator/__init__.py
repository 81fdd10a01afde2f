"""A replica that schedules as vLLM does: an engine and an OpenAI-compatible server around it.

A request that vLLM would refuse raises ``RequestError``.
"""
