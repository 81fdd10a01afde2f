"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: forms with an audio file."""

from collections.abc import Sequence
from typing import Any

from extproc.lab.simulator.endpoints.base import GenerateBody, Output

_BYTES_PER_S = 16_000
_SAMPLED = 160  # every so-manieth byte is one of the prompt: 25 tokens a second
_CLIP_S = 30


class AudioBody(GenerateBody):
    """A file, taken for MP3 at 128 kbit/s."""

    bounds = ()
    file: bytes

    @property
    def prompts(self) -> list[bytes]:
        """A prompt for each clip of half a minute."""
        size = _CLIP_S * _BYTES_PER_S
        clips = [self.file[start : start + size] for start in range(0, len(self.file), size)]
        return [clip[::_SAMPLED] + bytes(-len(clip[::_SAMPLED]) % 4) for clip in clips]

    def reply(self, outputs: Sequence[Output]) -> dict[str, Any]:
        seconds = -(-len(self.file) // _BYTES_PER_S)
        text = "".join(output.text for output in outputs)
        return {"text": text, "usage": {"type": "duration", "seconds": seconds}}
