"""The tokenizer: published encodings, special tokens by name, the chat template, damaged files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadMessage, ModelLoadError
from worker.models.minicpmo45.tokenizer import STRINGS, SpecialTokens, Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
CHECKPOINT = GOLDEN / "checkpoint"
FILES = ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(CHECKPOINT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(CHECKPOINT / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: item for key, item in value.items() if item is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def golden_texts() -> list[dict[str, Any]]:
    fields = json.loads((GOLDEN / "traces" / "chat.json").read_text(encoding="utf-8"))
    return list(fields["tokenizer"])


@pytest.mark.parametrize("case", golden_texts(), ids=lambda case: repr(case["text"]))
def test_texts_become_the_published_ids_and_back(tokenizer: Tokenizer, case: dict) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["decoded_skip"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


def test_special_tokens_have_the_ids_of_the_checkpoint(tokenizer: Tokenizer) -> None:
    added = json.loads((CHECKPOINT / "added_tokens.json").read_text(encoding="utf-8"))

    assert tokenizer.ids.listen == added["<|listen|>"]
    assert tokenizer.ids.chunk_eos == added["<|chunk_eos|>"]
    assert tokenizer.ids.image_id_end == added["</image_id>"]
    assert tokenizer.ids.eos_alt == tokenizer.token_id("</s>")
    assert tokenizer.ids.unk == tokenizer.token_id("<unk>")
    assert tokenizer.bad_ids == {7, 8, 160, 172, 198}
    assert tokenizer.token_id("no such entry") is None
    assert tokenizer.n_ids == 414


def test_a_special_token_keeps_its_name_wherever_it_stands(folder: Path) -> None:
    """Another checkpoint has another order, with gaps."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    moved = {str(2000 - 3 * int(k)): v for k, v in config["added_tokens_decoder"].items()}
    ids = {entry["content"]: int(index) for index, entry in moved.items()}
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    n = len(vocabulary)
    turned = {token: n - 1 - index for token, index in vocabulary.items()} | {"<unk>": 1079}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=moved)
    (folder / "vocab.json").write_text(json.dumps(turned), encoding="utf-8")
    (folder / "added_tokens.json").unlink()

    tokenizer = Tokenizer.read(folder)

    assert tokenizer.ids.turn_eos == ids["<|turn_eos|>"]
    assert tokenizer.ids.unk == ids["<unk>"] == 1079
    assert tokenizer.encode("a<|listen|>b<unk>") == [
        turned["a"],
        ids["<|listen|>"],
        turned["b"],
        1079,
    ]
    assert tokenizer.decode([turned["a"], ids["<|listen|>"], 1999, turned["b"]]) == "ab"


def test_half_a_character_decodes_to_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你")

    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode([*ids[:2], *tokenizer.encode("a")]) == "\ufffda"
    assert tokenizer.decode([tokenizer.ids.speak, *ids]) == "你"


@pytest.mark.parametrize("skip", [False, True])
def test_bytes_of_single_tokens_add_up_to_the_text(tokenizer: Tokenizer, skip: bool) -> None:
    for case in golden_texts():
        data = b"".join(tokenizer.token_bytes(index, skip) for index in case["ids"])
        assert data.decode() == tokenizer.decode(case["ids"], skip)
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.is_special(tokenizer.ids.listen)
    assert not tokenizer.is_special(tokenizer.encode("a")[0])


def test_thoughts_are_shown_and_marks_are_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>x</think><|tts_eos|><|im_end|>")

    assert tokenizer.decode(ids) == "<think>x</think>"
    assert tokenizer.ids.think_start not in tokenizer.special_ids


def test_added_tokens_without_a_decoder_entry_are_special(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", added_tokens_decoder=None)

    tokenizer = Tokenizer.read(folder)

    assert tokenizer.decode(tokenizer.encode("<|speak|><think>x")) == "<think>x"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_entry_of_the_vocabulary_with_a_role_is_a_special_token(
    folder: Path, place: str
) -> None:
    """As in the published files, where `<unk>` is no added token."""
    edit(folder / "tokenizer_config.json", added_tokens_decoder=None, unk_token=None)
    if not (folder / place).exists():
        (folder / place).write_text("{}", encoding="utf-8")
    edit(folder / place, unk_token="<unk>", additional_special_tokens=[{"content": "</s>"}])

    tokenizer = Tokenizer.read(folder)

    ids = [tokenizer.ids.unk, tokenizer.ids.eos_alt]
    assert tokenizer.encode("<unk></s>") == ids
    assert tokenizer.decode(ids) == ""


def test_one_file_form_gives_the_same(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer._bpe.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()

    again = Tokenizer.read(folder)

    assert again.ids == tokenizer.ids
    for case in golden_texts():
        assert again.encode(case["text"]) == case["ids"]


def test_transformers_agrees(tokenizer: Tokenizer) -> None:
    """The published tokenizer class is Qwen2's."""
    theirs = pytest.importorskip("transformers").Qwen2Tokenizer.from_pretrained(CHECKPOINT)

    for text in (
        "I'll  walk\r\n\r\n  12 34!?\n x",
        "naïve e\u0301t\u00e9\t…",
        "a<|audio|> </s>\n\n\n",
    ):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


# ---- chat template

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def test_chat_is_rendered_by_the_template_of_the_checkpoint(tokenizer: Tokenizer) -> None:
    shown = tokenizer.render_chat(MESSAGES, add_generation_prompt=True, use_tts_template=True)

    assert shown == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<|tts_bos|>"
    )
    assert tokenizer.render_chat(MESSAGES[1:]) == "<|im_start|>user\nU<|im_end|>\n"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("spoken", [False, True])
def test_built_in_template_says_the_same(
    tokenizer: Tokenizer, folder: Path, thinking: bool, spoken: bool
) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    built_in = Tokenizer.read(folder)
    messages = [*MESSAGES, {"role": "assistant", "content": " A\n"}, MESSAGES[1]]

    for opened in (False, True):
        assert built_in.render_chat(messages, opened, thinking, spoken) == tokenizer.render_chat(
            messages, opened, thinking, spoken
        )


def test_built_in_template_leaves_out_old_thoughts_and_wraps_tools(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    messages = [
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"},
        {"role": "tool", "content": "T"},
    ]

    assert Tokenizer.read(folder).render_chat(messages) == (
        "<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n"
    )


def test_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages|length }} new", encoding="utf-8")

    assert Tokenizer.read(folder).render_chat(MESSAGES) == "2 new"


def test_a_template_may_name_tokens_by_their_role(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="{{ bos_token + eos_token }}")

    assert Tokenizer.read(folder).render_chat(MESSAGES) == "<|im_start|><|im_end|>"


def test_template_named_default_is_taken_from_several(folder: Path) -> None:
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=several)

    assert Tokenizer.read(folder).render_chat(MESSAGES) == "d"


def test_messages_that_the_template_refuses_are_the_clients_mistake(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)

    with pytest.raises(BadMessage, match="role judge is unknown"):
        Tokenizer.read(folder).render_chat([{"role": "judge", "content": ""}])


def test_template_cannot_reach_the_interpreter(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}")

    with pytest.raises(BadMessage, match="unsafe"):
        Tokenizer.read(folder).render_chat(MESSAGES)


# ---- built in


def test_built_in_tokenizer_has_the_published_ids() -> None:
    built_in = Tokenizer.built_in()
    ids = built_in.ids

    assert (ids.endoftext, ids.im_start, ids.im_end) == (151643, 151644, 151645)
    assert (ids.think_start, ids.think_end, ids.image_start, ids.image_end) == (
        151667,
        151668,
        151669,
        151670,
    )
    assert (ids.slice_start, ids.image_id_start, ids.unit_start, ids.unit_end) == (
        151679,
        151681,
        151683,
        151684,
    )
    assert (ids.audio_start, ids.audio, ids.audio_end, ids.spk_bos) == (
        151697,
        151698,
        151699,
        151700,
    )
    assert (ids.tts_bos, ids.tts_eos, ids.listen, ids.speak, ids.interrupt) == (
        151703,
        151704,
        151705,
        151706,
        151707,
    )
    assert (ids.vad_start, ids.turn_bos, ids.turn_eos, ids.chunk_eos, ids.chunk_bos) == (
        151708,
        151716,
        151717,
        151718,
        151719,
    )
    assert (ids.chunk_tts_bos, ids.chunk_tts_eos, ids.tts_pad) == (151720, 151721, 151722)
    assert (ids.unk, ids.eos_alt) == (128244, 128247)
    assert built_in.token_id("<focus>") == 151687
    assert built_in.token_id("</perception>") == 151692
    assert built_in.token_id("<|timbre_31|>") == 151747
    assert built_in.n_ids == 151748


def test_built_in_tokenizer_knows_every_special_token_of_the_published_one() -> None:
    published = json.loads((CHECKPOINT / "added_tokens.json").read_text(encoding="utf-8"))
    built_in = Tokenizer.built_in()

    assert [token for token in published if built_in.token_id(token) is None] == []


def test_built_in_tokenizer_spells_bytes_and_ignores_unknown_ids() -> None:
    built_in = Tokenizer.built_in()
    text = "naïve 你好 😀\n"

    assert len(built_in.encode(text)) == len(text.encode())
    assert built_in.decode(built_in.encode(text)) == text
    assert built_in.decode([5000, 151_000, 10**6, built_in.ids.speak]) == ""
    assert built_in.encode("\n") == [198]  # as in the published vocabulary


# ---- damaged


def test_missing_special_tokens_are_all_named(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    gone = {"<|listen|>", "<unit>"}
    kept = {k: v for k, v in config["added_tokens_decoder"].items() if v["content"] not in gone}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=kept)
    edit(folder / "added_tokens.json", **dict.fromkeys(gone))

    with pytest.raises(ModelLoadError, match=r"has no <unit>, <\|listen\|>"):
        Tokenizer.read(folder)


def test_a_vocabulary_without_the_other_eos_ends_with_im_end(folder: Path) -> None:
    edit(folder / "vocab.json", **{"</s>": None})

    tokenizer = Tokenizer.read(folder)

    assert tokenizer.ids.eos_alt == tokenizer.ids.im_end


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("vocab.json", '{"a": 1', "damaged"),
        ("vocab.json", '{"a": 1}', "255 of the 256 single bytes"),
        ("vocab.json", '{"a": "b"}', "every entry"),
        ("merges.txt", "q zz\n", "does not fit"),
        ("merges.txt", "qzz\n", "does not fit"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("tokenizer_config.json", '{"bad_token_ids": ["x"]}', "bad_token_ids"),
        ("tokenizer_config.json", '{"bad_token_ids": [9999]}', "bad_token_ids must be ids from 0"),
        ("tokenizer_config.json", '{"chat_template": "{% for"}', "no Jinja"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("added_tokens.json", '{"<think>": "x"}', "added_tokens.json"),
        ("added_tokens.json", "\udcff", "UTF-8"),
        ("tokenizer.json", "{}", "no tokenizer"),
    ],
)
def test_a_damaged_file_is_one_sentence(folder: Path, name: str, content: str, says: str) -> None:
    if name == "tokenizer.json":
        (folder / "vocab.json").unlink()
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(ModelLoadError, match=says) as caught:
        Tokenizer.read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ModelLoadError, match=f"{name} does not exist"):
        Tokenizer.read(folder)


def test_names_of_special_tokens_are_fields() -> None:
    assert set(STRINGS) <= set(SpecialTokens.__dataclass_fields__)
