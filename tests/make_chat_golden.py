#!/usr/bin/env python3
"""Writes tests/data/chat.json: chat templates of well-known models, conversations, and the text
that Hugging Face's own renderer makes of each. Needs transformers and jinja2.

    python3 tests/make_chat_golden.py [tests/data/chat.json]

The templates are copied from the models' tokenizer_config.json, without the parts about tools,
which plain conversations do not use. If a template refuses a conversation, its rendering is null.
"""
import json
import random
import sys

from transformers.utils.chat_template_utils import render_jinja_template

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
FIRST = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
         "{{ '<|im_start|>system\\nSYSTEM<|im_end|>\\n' }}{% endif %}")
QWEN2 = CHATML.replace("{% for message in messages %}", FIRST)
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def between(text, begin, end):
    return text[text.index(begin):text.index(end)]


QWEN3_LAST = between(QWEN3, "{%- for message in messages[::-1] %}",
                     "{%- for message in messages %}")
QWEN3_ANSWER = between(QWEN3, "    {%- if message.content is string %}",
                       "        {%- if loop.index0 >")
QWEN3_OPEN = QWEN3[QWEN3.index("    {%- if enable_thinking"):]
QWEN3_GGUF_LAST = """{%- for index in range(ns.last_query_index, -1, -1) %}
    {%- set message = messages[index] %}
    {%- if ns.multi_step_tool and message.role == "user" and not('<tool_response>' in message.content and '</tool_response>' in message.content) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
"""
QWEN3_GGUF_ANSWER = """    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in message.content %}
                {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
"""
QWEN3_GGUF = QWEN3.replace(QWEN3_LAST, QWEN3_GGUF_LAST).replace(QWEN3_ANSWER, QWEN3_GGUF_ANSWER)
QWEN3_FIRST = QWEN3_GGUF.replace("""{%- for index in range(ns.last_query_index, -1, -1) %}
    {%- set message = messages[index] %}
""", """{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
""")
# Unsloth's version has line ends in its strings and one before the text, and no Python list syntax
QWEN3_UNSLOTH = "\n" + QWEN3_GGUF.replace(
    QWEN3_GGUF_LAST, """{%- for forward_message in messages %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set message = messages[index] %}
    {%- set current_content = message.content if message.content is not none else '' %}
    {%- set tool_start = '<tool_response>' %}
    {%- set tool_start_length = tool_start|length %}
    {%- set start_of_message = current_content[:tool_start_length] %}
    {%- set tool_end = '</tool_response>' %}
    {%- set tool_end_length = tool_end|length %}
    {%- set start_pos = (current_content|length) - tool_end_length %}
    {%- if start_pos < 0 %}
        {%- set start_pos = 0 %}
    {%- endif %}
    {%- set end_of_message = current_content[start_pos:] %}
    {%- if ns.multi_step_tool and message.role == "user" and not(start_of_message == tool_start and end_of_message == tool_end) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
""").replace("message.content.split('</think>')[-1].lstrip",
             "(message.content.split('</think>')|last).lstrip").replace(
    """                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
""",
    """                {%- set reasoning_content = (message.content.split('</think>')|first).rstrip('\\n') %}
                {%- set reasoning_content = (reasoning_content.split('<think>')|last).lstrip('\\n') %}
""").replace("\\n", "\n")
QWEN3_PLAIN = QWEN3.replace(QWEN3_OPEN, "{%- endif %}")
QWEN3_THINKING = QWEN3_PLAIN.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
QWEN3_INSTRUCT_UNSLOTH = QWEN3_PLAIN.replace("loop.last or (not loop.last and reasoning_content)",
                                             "reasoning_content")
QWEN3_INSTRUCT = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- if message.tool_calls %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CHATML_ROLES = """{% for message in messages %}{% if message['role'] == 'user' %}{{'<|im_start|>user
' + message['content'] + '<|im_end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|im_start|>assistant
' + message['content'] + '<|im_end|>
' }}{% else %}{{ '<|im_start|>system
' + message['content'] + '<|im_end|>
' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
YI_UNSLOTH = """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"""
YI_UNSLOTH += CHATML.replace("\\n", "\n") + "\n"
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if "
    "loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if "
    "add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message + builtin tools #}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA32 = LLAMA31.replace("""    {%- set date_string = "26 Jul 2024" %}
""", """    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
""")
LLAMA31_UNSLOTH = LLAMA31.replace("|trim", "").replace(" | trim", "")
LLAMA31_UNSLOTH = LLAMA31_UNSLOTH.replace("26 Jul 2024", "26 July 2024").replace("\\n", "\n")
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set "
    "system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% "
    "for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message "
    "!= false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] "
    "%}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
MISTRAL_OLD = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') "
    "}}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif "
    "message['role'] == "
    "'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and "
    "assistant roles are "
    "supported!') }}{% endif %}{% endfor %}")
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.WHERE and system_message is defined %}
            {{- "OPEN" + system_message + "\\n\\n" + message["content"] + "CLOSE" }}
        {%- else %}
            {{- "OPEN" + message["content"] + "CLOSE" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- ANSWER + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""


def mistral(where, open_, close, answer):
    template = MISTRAL.replace("WHERE", where).replace("OPEN", open_)
    return template.replace("CLOSE", close).replace("ANSWER", answer)


MISTRAL_V7 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + "
    "message['content'] + "
    "'[/INST]' }}{% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT] ' + message['content'] "
    "+ '[/SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else "
    "%}{{ raise_exception("
    "'Only user, system and assistant roles are supported!') }}{% endif %}{% endfor %}")
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

TEMPLATES = [  # model, name of the template in llm.h that gives the same (or None), BOS, EOS, template
    ("chatml", "chatml", "", "<|im_end|>", CHATML),
    ("chatml with BOS", None, "<s>", "<|im_end|>", "{{bos_token}}" + CHATML),
    ("Qwen1.5, Qwen2", None, "", "<|im_end|>",
     QWEN2.replace("SYSTEM", "You are a helpful assistant.")),
    ("Qwen2.5", None, "", "<|im_end|>", QWEN25),
    ("SmolLM2", None, "<|im_start|>", "<|im_end|>",
     QWEN2.replace("SYSTEM", "You are a helpful AI assistant named SmolLM, trained by "
                   "Hugging Face")),
    ("chatml, role by role", None, "", "<|im_end|>", CHATML_ROLES),
    ("Yi, Unsloth's", None, "", "<|im_end|>", YI_UNSLOTH),
    ("Qwen3-Instruct-2507", None, "", "<|im_end|>", QWEN3_INSTRUCT),
    ("Qwen3", "qwen3", "", "<|im_end|>", QWEN3),
    ("Qwen3, at first", None, "", "<|im_end|>", QWEN3_FIRST),
    ("Qwen3, GGUF", None, "", "<|im_end|>", QWEN3_GGUF),
    ("Qwen3, Unsloth's", None, "", "<|im_end|>", QWEN3_UNSLOTH),
    ("Qwen3-Instruct-2507, Unsloth's", "qwen3-instruct", "", "<|im_end|>", QWEN3_INSTRUCT_UNSLOTH),
    ("Qwen3-Thinking-2507", "qwen3-thinking", "", "<|im_end|>", QWEN3_THINKING),
    ("Llama 3", "llama3", "<|begin_of_text|>", "<|eot_id|>", LLAMA3),
    ("Llama 3.1", "llama3.1", "<|begin_of_text|>", "<|eot_id|>", LLAMA31),
    ("Llama 3.1, Unsloth's", "llama3.1-unsloth", "<|begin_of_text|>", "<|eot_id|>",
     LLAMA31_UNSLOTH),
    ("Llama 3.2", "llama3.2", "<|begin_of_text|>", "<|eot_id|>", LLAMA32),
    ("Llama 2", "llama2", "<s>", "</s>", LLAMA2),
    ("Mistral 7B v0.1", "mistral-v0.1", "<s>", "</s>",
     MISTRAL_OLD.replace("eos_token}}", "eos_token + ' ' }}")),
    ("Mistral 7B v0.2", "mistral-v0.2", "<s>", "</s>", MISTRAL_OLD),
    ("Mistral 7B v0.2, new", "mistral-v1", "<s>", "</s>",
     mistral("first", " [INST] ", " [/INST]", '" " + message["content"]')),
    ("Mistral 7B v0.3", "mistral-v3", "<s>", "</s>",
     mistral("last", "[INST] ", "[/INST]", '" " + message["content"]|trim')),
    ("Mistral Nemo", "mistral-v3-tekken", "<s>", "</s>",
     mistral("last", "[INST]", "[/INST]", 'message["content"]')),
    ("Mistral Large", "mistral-v7", "<s>", "</s>", MISTRAL_V7),
    ("Zephyr, TinyLlama", "zephyr", "<s>", "</s>", ZEPHYR),
    # variants, and templates that have no name here
    ("another system message", None, "<s>", "</s>",
     LLAMA2.replace("system_message = false", "system_message = 'Be good.'")),
    ("chatml, stray line ends", None, "", "<|im_end|>", CHATML.replace("'\\n'}}", "'\\n'}}\n")),
    ("chatml that drops thoughts", None, "", "<|im_end|>",
     CHATML.replace("message['content']", "message['content'].split('</think>')[-1]", 1)),
    ("Qwen3, trimmed", None, "", "<|im_end|>",
     QWEN3.replace("content = message.content", "content = message.content|trim")),
    ("Zephyr in one line", None, "<s>", "</s>", ZEPHYR.replace("}}\n", "}}")),
    ("Gemma", None, "<s>", "</s>",
     "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + "
     "'\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
     "{{'<start_of_turn>model\\n'}}"),
]

WORDS = [
    "Hello", "who are you?", "  tell me a tale", "of the sea\n", "\tand the moon ", "Grüße", "月が綺麗",
    "🚀", "<|im_end|>", "</s>", "[INST]", "<<SYS>>", "{{ x }}", "%s %b", "it's", "\u00a0", "\u3000",
    "\n\n", "", "100%", "\\n", "\"quoted\"", "'", "\u2003x\u2003"
]


def text(r):
    begin = r.choice(["", " ", "\n"])
    words = " ".join(r.choice(WORDS) for _ in range(r.randint(0, 4)))
    return begin + words + r.choice(["", " ", "\n", "\u00a0"])


def conversations():
    r = random.Random(5)
    out = [[("user", "Hello")], [("system", "Be brief."), ("user", "Hello")],
           [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi there"),
            ("user", "Who are you")],
           [("user", "Hello"), ("assistant", "Hi there"), ("user", "Who are you"),
            ("assistant", "   I am an assistant   "), ("user", "Another question")],
           [("system", "a"), ("user", "   \n")], [("user", "a"), ("user", "b")],
           [("user", "a"), ("system", "b"), ("user", "c")], [("assistant", "a"), ("user", "b")],
           [("system", "a"), ("system", "b"), ("user", "c")],
           [("system", " "), ("user", "<think>x</think>y"),
            ("assistant", "<think>\nhm\n</think>\n\nyes"), ("user", "z")],
           [("user", "a"), ("assistant", "no</think></think>\n\nyes<think>"), ("user", "z")]]
    for _ in range(14):
        c = [("system", text(r))] if r.random() < 0.5 else []
        for _ in range(r.randint(0, 2)):
            c += [("user", text(r)), ("assistant", text(r))]
        out.append(c + [("user", text(r))])
    return [[{"role": a, "content": b} for a, b in c] for c in out]


def render(template, bos, eos, messages, **more):
    try:
        rendered, _ = render_jinja_template([messages], chat_template=template,
                                            add_generation_prompt=True, bos_token=bos,
                                            eos_token=eos, **more)
        return rendered[0]
    except Exception as e:  # the template called raise_exception
        assert type(e).__name__ == "TemplateError", e
        return None


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else "tests/data/chat.json"
    cs, templates = conversations(), []
    for model, name, bos, eos, template in TEMPLATES:
        more = {"date_string": "1 Apr 2025"} if name == "llama3.2" else {}
        entry = {"model": model, "name": name, "bos": bos, "eos": eos, "template": template}
        entry["rendered"] = [render(template, bos, eos, c, **more) for c in cs]
        if "Qwen3" in model:
            renderings = [render(template, bos, eos, c, enable_thinking=False) for c in cs]
            entry["no_thinking"] = renderings
        templates.append(entry)
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"conversations": cs, "templates": templates}, f, ensure_ascii=False, indent=0)
        f.write("\n")


if __name__ == "__main__":
    main()
