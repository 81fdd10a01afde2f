"""Simulated replica: an engine that schedules as vLLM does, behind an OpenAI-compatible server.

A request that vLLM would refuse raises ``RequestError``.
"""
