"""What a replica will read: the text, token ids and media in a request body."""

from pydantic_core import to_json

from extproc.request.tokens import TokenCounter

TOKENS_PER_MESSAGE = 5
"""What a chat template wraps around a message: ``<|im_start|>``, role, newline, ``<|im_end|>``,
newline in ChatML (Qwen); ``<|start_header_id|>``, role, ``<|end_header_id|>``, blank line,
``<|eot_id|>`` in Llama 3."""

TOKENS_TO_REPLY = 4
"""The header of the answer that closes a chat prompt, in the same templates."""

_AS_IMAGES = {
    "image": 1,
    "image_embeds": 1,
    "image_pil": 1,
    "image_url": 1,
    "input_image": 1,
    # Qwen2-Audio makes 25 tokens a second: a clip of half a minute is an image.
    "audio_embeds": 1,
    "audio_url": 1,
    "input_audio": 1,
    # vLLM samples 32 frames of a video; Qwen2-VL encodes two of them together.
    "video_embeds": 16,
    "video_url": 16,
}

_TEXT_FIELDS = frozenset({"text", "name", "arguments", "refusal", "thinking"})
_CONTENT_FIELDS = frozenset(
    {"content", "tool_calls", "function", "function_call", "output", "summary"}
)


class Prompt:
    """Collects the pieces of a prompt. A piece of the wrong type is passed over."""

    __slots__ = ("images", "texts", "tokens")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0
        """Tokens that need no estimate: token ids, chat template."""
        self.images = 0
        """Images, and other media in images' worth."""

    def count(self, counter: TokenCounter, model: str) -> int:
        """Its tokens, for ``model``."""
        tokens = self.tokens + self.images * counter.image_tokens
        return tokens + counter.count(model, self.texts) if self.texts else tokens

    def add_inputs(self, value: object) -> int:
        """Add what completions and embeddings take: a text, token ids, or a list of these.

        Returns:
            The number of prompts.
        """
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, list) and value:
            if isinstance(value[0], (str, list)):
                for prompt in value:
                    self._add_input(prompt)
                return len(value)
            self._add_input(value)
        return 1

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
                if images := _images(item):
                    self.images += images
                else:
                    self._add_fields(item, pending)

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


def _images(part: dict[str, object]) -> int:
    """How many images a content part stands for; 0: it is not media."""
    kind = part.get("type")
    if isinstance(kind, str):
        return _AS_IMAGES.get(kind, 0)
    # vLLM takes media parts without a type, too.
    if _AS_IMAGES.keys().isdisjoint(part):
        return 0
    return max(_AS_IMAGES[key] for key in part if key in _AS_IMAGES)
