"""How many tokens an audio file is, from its size."""

from math import ceil

_BYTES_PER_S = 16_000
"""MP3 at 128 kbit/s; WAV of 16 kHz has 32,000, speech in Opus or AAC 3,000 to 8,000."""
_TOKENS_PER_S = 25
"""Qwen2-Audio and Qwen2.5-Omni; Whisper's encoder makes 50, Voxtral 12.5, Ultravox 6.25."""
_CLIP_S = 30
"""vLLM transcribes clips of that length, each a prompt of its own (``max_audio_clip_s``)."""

CLIP_TOKENS = _CLIP_S * _TOKENS_PER_S
"""Of audio of which not even the size is known."""


def audio_tokens(size: int) -> int:
    """Tokens of so many bytes of audio."""
    return ceil(size * _TOKENS_PER_S / _BYTES_PER_S)


def audio_clips(size: int) -> int:
    """Clips that so many bytes of audio are transcribed in."""
    return max(ceil(size / (_BYTES_PER_S * _CLIP_S)), 1)
