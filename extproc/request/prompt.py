"""What a replica will read: the text, token ids and media in a request body."""

from collections.abc import Sequence

from pydantic_core import to_json

from extproc.request.audio import CLIP_TOKENS, audio_tokens
from extproc.request.tokens import TokenCounter

TOKENS_PER_MESSAGE = 5
"""What a chat template wraps around a message: ``<|im_start|>``, role, newline, ``<|im_end|>``,
newline in ChatML (Qwen); ``<|start_header_id|>``, role, ``<|end_header_id|>``, blank line,
``<|eot_id|>`` in Llama 3."""

TOKENS_TO_REPLY = 4
"""The header of the answer that closes a chat prompt, in the same templates."""

_IMAGES = frozenset({"image", "image_embeds", "image_pil", "image_url", "input_image"})
_AUDIO = frozenset({"audio_embeds", "audio_url", "input_audio"})
_VIDEO = frozenset({"video_embeds", "video_url"})
_MEDIA = _IMAGES | _AUDIO | _VIDEO

VIDEO_TOKENS = 32 * 256
"""vLLM samples 32 frames (``num_frames``), of which InternVL makes 256 tokens each, LLaVA-OneVision
196, Qwen2-VL up to 384."""

_SCHEME_WITHIN = 16
"""Characters within which an address has its ``://``; base64 has none."""

_TEXT_FIELDS = frozenset({"text", "name", "arguments", "refusal", "thinking"})
_CONTENT_FIELDS = frozenset(
    {"content", "tool_calls", "function", "function_call", "output", "summary"}
)


class Prompt:
    """Collects the pieces of a prompt. A piece of the wrong type is passed over."""

    __slots__ = ("images", "media", "texts", "tokens")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0
        """Tokens that need no estimate: token ids, chat template."""
        self.images = 0
        self.media = 0
        """Tokens of audio and video, by rough estimate."""

    def count(self, counter: TokenCounter, model: str) -> int:
        """Its tokens, for ``model``."""
        tokens = self.tokens + self.media + self.images * counter.image_tokens(model)
        return tokens + counter.count(model, self.texts) if self.texts else tokens

    def add_inputs(self, value: object) -> Sequence[int]:
        """Add what completions and embeddings take: a text, token ids, or a list of these.

        Returns:
            The length of each prompt, in characters or token ids.
        """
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, list) and value:
            if isinstance(value[0], (str, list)):
                for prompt in value:
                    self._add_input(prompt)
                return [len(prompt) if isinstance(prompt, (str, list)) else 0 for prompt in value]
            self._add_input(value)
        return (1,)

    def _add_input(self, prompt: object) -> None:
        if isinstance(prompt, str):
            self.texts.append(prompt)
        elif isinstance(prompt, list) and prompt:
            if isinstance(prompt[0], dict):
                self.add_messages(prompt)
            else:
                self.tokens += len(prompt)

    def add_messages(self, value: object) -> None:
        """Add a conversation: OpenAI or Anthropic messages, items of the Responses API, a text."""
        if isinstance(value, str):
            value = [{"content": value}]
        if isinstance(value, list):
            self.tokens += TOKENS_TO_REPLY
            for message in value:
                self.add_message(message)

    def add_message(self, message: object) -> None:
        """Add one message: its frame, its content, its calls of tools or their results."""
        if not isinstance(message, dict):
            return
        self.tokens += TOKENS_PER_MESSAGE
        content = message.get("content")
        if isinstance(content, str) and len(message) == 2:  # role and content, as most are
            self.texts.append(content)
        else:
            self.add_content(message)

    def add_content(self, value: object) -> None:
        """Add a text, a content part, or lists of them, however nested."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.texts.append(item)
            elif isinstance(item, list):
                pending.extend(item)
            elif isinstance(item, dict):
                if kind := _medium(item):
                    self._add_medium(kind, item)
                else:
                    self._add_fields(item, pending)

    def _add_medium(self, kind: str, part: dict[str, object]) -> None:
        if kind in _IMAGES:
            self.images += 1
        elif kind in _VIDEO:
            self.media += VIDEO_TOKENS
        else:
            size = _embedded_bytes(part.get(kind))
            self.media += audio_tokens(size) if size else CLIP_TOKENS

    def _add_fields(self, item: dict[str, object], pending: list[object]) -> None:
        """Add the texts of a part; what may hold further ones is left pending."""
        for field, value in item.items():
            if field in _TEXT_FIELDS:
                if isinstance(value, str):
                    self.texts.append(value)
            elif field in _CONTENT_FIELDS:
                pending.append(value)
            elif field == "input":  # of a tool that Anthropic's messages call
                self.add_json(value)

    def add_json(self, value: object) -> None:
        """Add a structure that chat templates print as JSON, such as the schemas of tools."""
        if value:
            self.texts.append(to_json(value).decode())


def _medium(part: dict[str, object]) -> str:
    """Which kind of medium a content part is; empty: none."""
    kind = part.get("type")
    if isinstance(kind, str):
        return kind if kind in _MEDIA else ""
    # vLLM takes media parts without a type, too.
    return next((key for key in part if key in _MEDIA), "")


def _embedded_bytes(value: object) -> int:
    """Bytes of what stands in the request itself, in base64; 0 where only an address does."""
    if isinstance(value, dict):
        value = value.get("data") or value.get("url")
    if not isinstance(value, str) or "://" in value[:_SCHEME_WITHIN]:
        return 0
    return len(value) * 3 // 4
