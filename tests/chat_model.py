"""The tiny model with a chat template, in which it can be read what the template was given."""

from pathlib import Path

from tests.tiny_model import save_tiny_model

TEMPLATE = """
{%- if tools %}{tools:{% for tool in tools %}{{ tool.function.name }}{% endfor %}}{% endif -%}
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] %}{{ raise_exception("no role " ~ message.role) }}{% endif -%}
[{{ message.role }}]{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<think></think>{% endif %}{% endif -%}
"""


def save_chat_model(folder: Path) -> Path:
    save_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.strip("\n"), encoding="utf-8")
    return folder
