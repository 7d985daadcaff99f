"""Presets: the shipped ones, and files of operators that may be wrong."""

from __future__ import annotations

import base64
import logging

import numpy as np
import pytest

from gateway.app import ASSETS_DIR, default_voice_file
from gateway.presets import MODES, Presets
from gateway.voice_files import VoiceFile
from shared.audio import write_wav
from tests.fakes.front import open_front

DUPLEX = ("audio_duplex", "omni")
TURNS = ("half_duplex_audio", "turnbased")
GOOD = "name: Good\nsystem_prompt: Be good.\n"


@pytest.fixture
def assets(tmp_path):
    """An assets folder with a default voice of one second and one of half a second."""
    write_wav(tmp_path / "default.wav", np.full(16_000, 0.25, np.float32), 16_000)
    (tmp_path / "voices").mkdir()
    write_wav(tmp_path / "voices" / "ann.wav", np.full(8000, 0.5, np.float32), 16_000)
    return tmp_path


@pytest.fixture
def load(assets):
    def load_presets(files):
        for name, text in files.items():
            path = assets / "presets" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Presets(assets, VoiceFile(assets / "default.wav", "default.wav"))

    return load_presets


async def test_every_mode_has_presets_in_both_languages():
    async with open_front() as front:
        answer = (await front.http.get("/api/presets")).json()

    assert list(answer) == list(MODES)
    for rows in answer.values():
        ids = {row["id"] for row in rows}
        assert len(ids) == len(rows) >= 6
        assert {row["language"] for row in rows} == {"en", "zh"}
        assert {row["id"].rpartition("_")[2] for row in rows} == {"en", "zh"}
        # Each in both languages.
        assert len({one.rpartition("_")[0] for one in ids}) * 2 == len(ids)
        assert [row["order"] for row in rows] == sorted(row["order"] for row in rows)
        assert all(row["name"] and row["description"] for row in rows)


async def test_shipped_presets_have_the_shapes_of_their_modes():
    async with open_front() as front:
        answer = (await front.http.get("/api/presets")).json()

    for mode in DUPLEX:
        for row in answer[mode]:
            assert set(row) == {
                *("id", "order", "name", "description", "language"),
                *("system_prompt", "ref_audio"),
            }
            voice = row["ref_audio"]
            assert voice == {
                "data": None,
                "path": "ref_audio/default.wav",
                "name": "default.wav",
                "duration": voice["duration"],
            }
            assert voice["duration"] > 1
    for mode in TURNS:
        for row in answer[mode]:
            assert set(row) == {
                *("id", "order", "name", "description", "language", "system_content")
            }
            for item in row["system_content"]:
                names = {"type", "text"}
                if item["type"] == "audio":
                    names = {"type", "data", "path", "name", "duration"}
                    assert item["data"] is None
                assert set(item) == names
    assert any(
        item["type"] == "audio" for row in answer["turnbased"] for item in row["system_content"]
    )


async def test_sound_of_a_preset_is_asked_for_separately():
    async with open_front() as front:
        duplex = (await front.http.get("/api/presets/omni/assistant_en/audio")).json()
        turns = (await front.http.get("/api/presets/turnbased/spoken_assistant_zh/audio")).json()
        silent = (await front.http.get("/api/presets/turnbased/assistant_en/audio")).json()
        default = (await front.http.get("/api/default_ref_audio")).json()

    voice = {"data": default["base64"], "name": "default.wav", "duration": default["duration"]}
    assert duplex == {"ref_audio": voice}
    assert turns == {"system_content_audio": [voice]}
    assert silent == {}


@pytest.mark.parametrize("path", ["omni/nothing", "nothing/assistant_en", "omni/..%2f..%2fx"])
async def test_an_unknown_preset_is_404(path):
    async with open_front() as front:
        answer = await front.http.get(f"/api/presets/{path}/audio")

    assert answer.status_code == 404


async def test_an_unknown_preset_is_named():
    async with open_front() as front:
        answer = (await front.http.get("/api/presets/omni/nothing/audio")).json()

    assert answer == {"detail": "Preset not found: omni/nothing", "slug": "not_found"}


async def test_voices_stand_in_the_order_of_their_items(load):
    content = (
        "name: Two voices\nsystem_content:\n"
        "  - {type: audio, path: voices/ann.wav, name: Ann}\n"
        "  - {type: text, text: first}\n"
        "  - {type: audio}\n"
        "  - {type: audio, path: voices/ann.wav}\n"
    )
    presets = load({"turnbased/two.yaml": content})
    preset = presets.find("turnbased", "two")
    row, sound = await preset.row(), await preset.audio()

    assert [item.get("name", item.get("text")) for item in row["system_content"]] == [
        *("Ann", "first", "default.wav", "ann.wav")
    ]
    assert [clip["duration"] for clip in sound["system_content_audio"]] == [0.5, 1.0, 0.5]
    first = np.frombuffer(base64.b64decode(sound["system_content_audio"][0]["data"]), "<f4")
    assert first.size == 8000
    assert np.allclose(first, 0.5, atol=1e-3)


async def test_a_voice_that_cannot_be_decoded_leaves_the_words(load, assets):
    (assets / "voices" / "bad.wav").write_bytes(b"no sound")
    text = f"{GOOD}ref_audio: {{path: voices/bad.wav}}\n"
    preset = load({"omni/one.yaml": text}).find("omni", "one")

    assert await preset.row() == {
        "id": "one",
        "order": 999,
        "name": "Good",
        "description": "",
        "system_prompt": "Be good.",
        "ref_audio": {"data": None, "path": "voices/bad.wav", "name": "bad.wav", "duration": 0.0},
    }
    assert await preset.audio() == {"ref_audio": {"data": None, "name": "bad.wav", "duration": 0.0}}


async def test_keys_nobody_knows_go_to_the_pages(load):
    text = f"{GOOD}icon: star\ntags: [a, 1]\nid: one\n"
    row = await load({"omni/one.yaml": text}).find("omni", "one").row()

    assert (row["icon"], row["tags"], row["id"]) == ("star", ["a", 1], "one")


def test_presets_stand_in_their_order_and_without_one_at_the_end(load):
    names = {"b": "order: 2\n", "a": "", "c": "order: 1\n", "d": "order: 2\n"}
    presets = load({f"omni/{name}.yaml": GOOD + order for name, order in names.items()})

    assert [preset.id for preset in presets.by_mode["omni"]] == ["c", "b", "d", "a"]


BAD = {
    "no yaml": "name: [",
    "no text": b"\xff\xfe\xff",
    "a list": "- name: x",
    "empty": "",
    "no name": "system_prompt: x",
    "no prompt": "name: x",
    "empty prompt": "name: x\nsystem_prompt: ''",
    "long prompt": f"name: x\nsystem_prompt: {'x' * 16_001}",
    "order in words": f"{GOOD}order: first",
    "another id": f"{GOOD}id: other",
    "unknown voice key": f"{GOOD}ref_audio: {{file: voices/ann.wav}}",
    "missing voice": f"{GOOD}ref_audio: {{path: voices/gone.wav}}",
    "voice outside": f"{GOOD}ref_audio: {{path: ../../../../etc/hostname}}",
    "absolute voice": f"{GOOD}ref_audio: {{path: /etc/hostname}}",
    "a date": f"{GOOD}since: 2020-01-01",
    "no number": f"{GOOD}weight: .nan",
    "python object": f"{GOOD}x: !!python/object/apply:os.getcwd []",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_wrong_file_is_named_in_one_line_and_the_others_are_served(load, caplog, text):
    caplog.set_level(logging.ERROR)
    presets = load({"omni/bad.yaml": text, "omni/good.yaml": GOOD})

    assert [preset.id for preset in presets.by_mode["omni"]] == ["good"]
    (record,) = caplog.records
    assert "omni/bad.yaml" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "content",
    ["[]", "[{type: video}]", "[{type: text}]", "[{type: text, text: x, more: y}]", "[text]"],
)
def test_wrong_system_content_is_named(load, caplog, content):
    presets = load({"turnbased/bad.yaml": f"name: x\nsystem_content: {content}"})

    assert presets.by_mode["turnbased"] == []
    assert "system_content" in caplog.text


def test_a_wrong_file_name_is_named(load, caplog):
    presets = load({"omni/my preset.yaml": GOOD})

    assert presets.by_mode["omni"] == []
    assert "my preset.yaml" in caplog.text


def test_a_folder_without_presets_has_none(tmp_path):
    presets = Presets(tmp_path, default_voice_file(None))

    assert presets.by_mode == {mode: [] for mode in MODES}


def test_shipped_files_are_all_right(caplog):
    presets = Presets(ASSETS_DIR, default_voice_file(None))
    n_files = len(list((ASSETS_DIR / "presets").rglob("*.yaml")))

    assert sum(len(rows) for rows in presets.by_mode.values()) == n_files
    assert caplog.records == []
