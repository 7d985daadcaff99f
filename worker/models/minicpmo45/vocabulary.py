"""The vocabulary that needs no file: 256 bytes and the special tokens of MiniCPM-o 4.5.

Ids and strings as in the published `added_tokens.json`; the chat template's wording as published.
"""

from __future__ import annotations


def byte_table() -> dict[str, bytes]:
    """Return the byte each character of a byte-level vocabulary stands for, in the usual order.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from U+0100 on (the convention of GPT-2's encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


def added() -> dict[str, tuple[int, bool]]:
    """Return id of every added token, and whether decoding leaves it out."""
    qwen = [
        *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")),
        *(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ENDS),
        *(f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad")),
        *(f"<|{name}|>" for name in ("image_pad", "video_pad")),
        *pair("tool_call"),
        *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")),
        *(f"<|{name}|>" for name in ("repo_name", "file_sep")),
        *pair("tool_response"),
        *pair("think"),
    ]
    minicpm = [
        *(token for name in PAIRS for token in pair(name)),
        *(f"<|{name}|>" for name in ("audio_start", "audio", "audio_end")),
        *(f"<|{name}|>" for name in ("spk_bos", "spk", "spk_eos", "tts_bos", "tts_eos")),
    ]
    speech = [
        *(f"<|{name}|>" for name in ("listen", "speak", "interrupt")),
        *(f"<|{name}_{end}|>" for name in ("vad", "emotion", "speed", "pitch") for end in ENDS),
        *(f"<|{name}|>" for name in ("turn_bos", "turn_eos", "chunk_eos", "chunk_bos")),
        *(f"<|{name}|>" for name in ("chunk_tts_bos", "chunk_tts_eos", "tts_pad")),
        *(f"<|timbre_{index}|>" for index in range(7, 32)),
    ]
    runs = {151643: qwen, 151669: minicpm, 151705: speech, 128244: ["<unk>"]}
    return {
        token: (first + index, token not in VISIBLE_ADDED)
        for first, run in runs.items()
        for index, token in enumerate(run)
    }


def pair(name: str) -> tuple[str, str]:
    return f"<{name}>", f"</{name}>"


ENDS = ("start", "end")
PAIRS = (
    *("image", "ref", "box", "quad", "point", "slice", "image_id", "unit"),
    *("answer", "focus", "line", "perception", "source_image", "image_save_to"),
)
VISIBLE_ADDED = frozenset(
    [
        *(token for name in ("tool_call", "tool_response", "think") for token in pair(name)),
        *(f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")),
        *("<|repo_name|>", "<|file_sep|>"),
    ]
)
"""Added tokens that decoding shows, as Qwen3 marks them."""

BYTES = byte_table()
BUILT_IN_ADDED = added()
BUILT_IN_VOCABULARY = {
    **{character: index for index, character in enumerate(BYTES)},
    "</s>": 128247,
}

DEFAULT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- elif message.role in ['system', 'user'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('role ' + message.role + ' is unknown') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if use_tts_template is defined and use_tts_template is true %}
        {{- '<|tts_bos|>' }}
    {%- endif %}
{%- endif %}
"""
"""For checkpoints without one: the wording of Qwen3's, thoughts of earlier answers left out."""
