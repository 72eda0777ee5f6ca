"""Chat templates: the hub's dialect, one sentence per error, and no way to blow up."""

import json

import pytest

from ropewalk.model.chat import template as chat
from ropewalk.model.chat.template import (
    ChatTemplate,
    ChatTemplateError,
    chat_template_from_directory,
    chat_template_from_gguf,
)
from ropewalk.model.tokenizers.base import TokenizerError

MESSAGES = [{"role": "user", "content": "Hi <b>é</b>"}, {"role": "assistant", "content": "Yo"}]

CHATML = """{% for message in messages %}
    {% if loop.first %}{{ bos_token }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """test_chat_process.py shows what a second one is for, and what the usual limits are."""
    monkeypatch.setattr(chat, "AT_ONCE", 1)
    monkeypatch.setattr(chat, "COMPILE_SECONDS", 0.5)
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)


def render(source, messages=MESSAGES, *, prompt=False):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages, add_generation_prompt=prompt
    )


def test_blocks_are_trimmed_and_tokens_known():
    rendered = render(CHATML, prompt=True)
    assert rendered == (
        "<s><|im_start|>user\nHi <b>é</b><|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render("{{ eos_token }}") == "</s>"


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% generation %} {{ m.content }}\n{% endgeneration %}{% endfor %}",
        "{% if tools %}tools{% endif %}{{ tools is none }}{{ missing is defined }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ messages[-1].content.strip() }}{{ messages[::-1] | length }}",
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(source, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    [expected], _ = render_jinja_template(
        [MESSAGES],
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(source, prompt=prompt) == expected


def test_a_date_can_be_asked_for():
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_a_template_s_own_refusal_is_passed_on():
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
        ("{{ messages[9].content.x }}", "failed on these messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "failed on these messages"),
        ("{{ messages.append(1) }}", "failed on these messages"),
        ("{{ ''.__class__.__mro__ }}", "failed on these messages"),
        ("{% include 'passwords' %}", "failed on these messages"),
        ("{{ 'x' * 10 ** 9 }}", "more than"),
        ("{{ 10 ** 9 * 'x' }}", "more than"),
        ("{{ [1] * 10 ** 9 }}", "more than"),
        ("{{ 'x' * 10 ** 7 }}{{ 'x' * 10 ** 7 }}", "more than"),
        ("{{ 9 ** 999999999 }}", "more than"),
        ("{{ '%999999999d' % 1 }}", "more than"),
        ("{{ '%*d' % (999999999, 1) }}", "more than"),
        ("{{ 'x'.ljust(10 ** 9) }}", "more than"),
        ("{% for i in range(10 ** 6) %}x{% endfor %}", "failed on these messages"),
    ],
)
def test_whatever_goes_wrong_is_one_error_of_one_sentence(source, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_ordinary_arithmetic_is_left_alone():
    assert render("{{ 2 * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%s-%03d' % ('a', 7) }}{{ '=' * 3 }}") == (
        "610243a-007==="
    )


def test_deep_messages_are_refused_and_not_a_crash():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="failed on these messages"):
        render("{{ messages | tojson }}", [{"role": "user", "content": deep}])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nothing %}", "{% generation %}"])
def test_a_broken_template_is_refused_at_load(source):
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate(source, {})


def directory(path, config=None, **files):
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return chat_template_from_directory(path)


def rendered(template):
    return template.render([], add_generation_prompt=False)


def test_where_a_directory_keeps_its_template(tmp_path):
    assert directory(tmp_path) is None
    assert directory(tmp_path, {"bos_token": "<s>"}) is None
    other = json.dumps({"chat_template": "c{{ bos_token }}"})
    assert rendered(directory(tmp_path, chat_template__json=other)) == "c<s>"
    config = {"chat_template": "b{{ bos_token }}{{ eos_token }}", "eos_token": {"content": "</s>"}}
    assert rendered(directory(tmp_path, config)) == "b</s>"
    assert rendered(directory(tmp_path, chat_template__jinja="a{{ eos_token }}")) == "a</s>"


def test_a_template_of_the_users_own_replaces_the_checkpoints(tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("own {{ bos_token }}é", encoding="utf-8")
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"chat_template": "b", "bos_token": "<s>"}
    directory(folder, config, chat_template__jinja="a")
    assert rendered(chat_template_from_directory(folder, own)) == "own <s>é"
    fields = {
        "tokenizer.chat_template": "b",
        "tokenizer.ggml.tokens": ["<s>"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    for metadata in (fields, {**fields, "tokenizer.chat_template": None}):
        assert rendered(chat_template_from_gguf(metadata, own)) == "own <s>é"
    own.write_text("{% if")
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        chat_template_from_directory(folder, own)
    own.write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"own\.jinja is not valid UTF-8"):
        chat_template_from_gguf(fields, own)


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(directory(tmp_path, {"chat_template": named})) == "d"
    with pytest.raises(ChatTemplateError, match=r"None of.*'tool_use'.* is named default"):
        directory(tmp_path, {"chat_template": named[:1]})
    with pytest.raises(ChatTemplateError, match="must be a text"):
        directory(tmp_path, {"chat_template": 3})


def test_a_template_for_tools_lies_in_a_folder_of_its_own(tmp_path):
    """As transformers writes the two."""
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools[0] }}")
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("{% if")
    template = directory(tmp_path)
    assert rendered(template) == "d"
    tools = {"tools": ["t"]}
    assert template.render([], add_generation_prompt=False, variables=tools) == "t"


@pytest.mark.parametrize(
    "source", ["X\n", "\n\nX\n\n", "X\r\n", "X\n  ", "  {{ 'X' }}\n", "{% if 1 %}\nX\n"]
)
def test_either_of_two_templates_writes_what_it_writes_alone(tmp_path, source):
    """White space beside tags is dropped, so that it matters what stands before and after."""
    source += "{% endif %}\n" if "if" in source else ""
    alone = rendered(directory(tmp_path, {"chat_template": source}))
    named = [{"name": "default", "template": source}, {"name": "tool_use", "template": source}]
    template = directory(tmp_path, {"chat_template": named})
    for tools in ([], ["t"]):
        said = template.render([], add_generation_prompt=False, variables={"tools": tools})
        assert said == alone


def test_a_gguf_file_has_a_template_for_tools_beside_the_plain_one():
    fields = {
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.chat_template": "d",
        "tokenizer.chat_template.tool_use": "{{ tools[0] }}",
    }
    template = chat_template_from_gguf(fields)
    assert rendered(template) == "d"
    assert template.render([], add_generation_prompt=False, variables={"tools": ["t"]}) == "t"


def test_a_template_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja is not valid UTF-8"):
        directory(tmp_path)


VARIABLES = (
    "[{% for t in [pad_token, unk_token, sep_token, bos_token, cls_token, mask_token] %}"
    "{{ t if t is defined else '-' }}|{% endfor %}]"
)


def test_every_declared_special_token_has_its_name(tmp_path):
    declared = {
        "bos_token": "<s>",
        "unk_token": {"content": "<unk>", "lstrip": False},
        "pad_token": "<pad>",
        "sep_token": None,
        "add_bos_token": True,
        "chat_template": VARIABLES,
    }
    assert rendered(directory(tmp_path, declared)) == "[<pad>|<unk>|-|<s>|-|-|]"
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"sep_token": {"content": "<sep>"}, "pad_token": "<other>", "cls_token": None})
    )
    assert rendered(directory(tmp_path)) == "[<other>|<unk>|<sep>|<s>|-|-|]"


def test_special_tokens_of_a_model_s_own(tmp_path):
    source = "{{ image_token }}{{ additional_special_tokens | join }}{{ add_bos_token }}"
    declared = {
        "image_token": "<img>",
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "add_bos_token": True,
        "chat_template": source,
    }
    assert rendered(directory(tmp_path, declared)) == "<img><a><b>"
    newer = {"extra_special_tokens": {"image_token": "<image>"}, "chat_template": source}
    assert rendered(directory(tmp_path, newer)) == "<image>"
    newer = {"extra_special_tokens": ["<c>"], "chat_template": "{{ extra_special_tokens[0] }}"}
    assert rendered(directory(tmp_path, newer)) == "<c>"


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "unk_token"])
def test_an_undeclared_token_is_undefined_and_not_empty(name):
    template = ChatTemplate(f"{{{{ {name} is defined }}}}[{{{{ {name} }}}}]", {})
    assert template.render([], add_generation_prompt=False) == "False[]"


def test_special_tokens_do_not_hide_the_messages():
    template = ChatTemplate("{{ messages | length }}", {"messages": "<m>"})
    assert template.render(MESSAGES, add_generation_prompt=False) == "2"


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", ["<a>", [3], 7])
def test_lists_of_special_tokens_that_are_none(tmp_path, key, value):
    with pytest.raises(TokenizerError, match=f"{key} must be a list of tokens' texts"):
        directory(tmp_path, {key: value, "chat_template": "x"})


def test_gguf_template_has_every_declared_special_token():
    fields = {
        "tokenizer.chat_template": VARIABLES,
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "<pad>", "<sep>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.mask_token_id": 2**32 - 1,  # as converters write "none"
    }
    assert rendered(chat_template_from_gguf(fields)) == "[<pad>|<unk>|<sep>|<s>|-|-|]"


def test_gguf_template():
    assert chat_template_from_gguf({}) is None
    fields = {
        "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}",
        "tokenizer.ggml.tokens": ["a", "<s>"],
        "tokenizer.ggml.bos_token_id": 1,
    }
    assert rendered(chat_template_from_gguf(fields)) == "<s>|"
