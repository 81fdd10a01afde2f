"""A model's chat template, rendered as transformers and vLLM render it."""

import json
import time
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """Jinja template that renders a conversation as text, special tokens included.

    Args:
        folder: folder with a model's tokenizer and template.

    Raises:
        OSError, ValueError: the folder has no template, or the template cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise ValueError("neither chat_template.jinja nor a template in tokenizer_config.json")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=time.strftime)
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"not a Jinja template: {error}") from None
        self._special = {
            name: token for name in _SPECIAL if (token := _content(config.get(name))) is not None
        }
        # A template that loops over a content takes a list of parts; others print the content.
        self.takes_parts = any(_of_content(loop.iter) for loop in parsed.find_all(nodes.For))

    def render(self, variables: dict[str, Any]) -> str | None:
        """Return the text of a conversation, or None if the template rejects it."""
        try:
            return self._template.render(self._special | variables)
        except Exception:  # a template may fail in any way on a client's input
            return None


class _Generation(Extension):
    """Jinja tag ``{% generation %}`` around text of the model; prints the text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, **how: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _of_content(node: nodes.Node) -> bool:
    while isinstance(node, (nodes.Filter, nodes.Getitem)) and isinstance(node.node, nodes.Node):
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
