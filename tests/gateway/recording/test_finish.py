"""Logs become the files that a reader of recordings expects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from gateway.recording import finish as finishing
from gateway.recording import journal, replay
from gateway.recording.film import open_picture
from gateway.recording.finish import MAX_ATTEMPTS, UNREADABLE, finish
from gateway.recording.journal import Journal
from shared.protocol import (
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Delta,
    DuplexSettings,
    Failure,
    Generating,
    ImagePart,
    Input,
    Prefilled,
    Prepare,
    PrepareTurns,
    Result,
    Speaking,
    TextPart,
    Timings,
    TurnDone,
    VideoPart,
)
from tests.fakes.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def body_of(folder):
    return json.loads((folder / "recording.json").read_text())


def meta_of(folder):
    return json.loads((folder / "meta.json").read_text())


def wav_of(path):
    """Samples `[n, channels]` and the rate."""
    with wave.open(str(path)) as reader:
        raw = reader.readframes(reader.getnframes())
        return (
            np.frombuffer(raw, "<i2").reshape(-1, reader.getnchannels()) / 32767,
            reader.getframerate(),
        )


@pytest.fixture
def duplex(took, gave, tone, jpeg):
    """Two listening chunks, a turn of two, and one more; the camera is on."""

    def answer(seq, **fields):
        fields = {"is_listen": True, "unit_index": seq + 1, **fields}
        return gave(seq + 1.1, Result(seq, **fields))

    speech = tone(1, 24_000, 0.5)
    chunks = [took(i + 1.0, Input(i, tone(1), [jpeg])) for i in range(4)]
    return [
        took(0.1, Prepare("Be brief.", DuplexSettings(temperature=0.5))),
        chunks[0],
        answer(0, heard="what is this"),
        chunks[1],
        answer(
            1,
            is_listen=False,
            text="A red ",
            audio=speech,
            n_tokens=3,
            kv_tokens=90,
            timings=Timings(prefill_ms=10.0, decode_ms=20.0, vocode_ms=5.0, total_ms=40.0),
        ),
        chunks[2],
        answer(2, is_listen=False, text="wall.", audio=speech, end_of_turn=True),
        chunks[3],
        gave(4.1, Failure("bad_audio", "no audio", seq=3)),
    ]


def test_a_duplex_log_becomes_chunks_with_their_files(write_log, duplex):
    folder = write_log("omni", "omni_duplex", duplex)

    finish(folder)

    body = body_of(folder)
    assert (body["session_id"], body["mode"], body["worker_id"]) == ("omni", "duplex", 0)
    assert body["start_ts"] == "2026-03-01T10:00:00+00:00"
    assert body["config"] == {"x": 1}
    assert body["end_reason"] == "stopped"
    assert (body["merged_replay"], body["merged_replay_video"]) == (replay.WAV, replay.MP4)
    listening, speaking, last, failed = body["chunks"]
    assert listening["user_audio"] == "user_audio/000.wav"
    assert listening["user_frame"] == "user_frames/000.jpg"
    assert listening["receive_ts_ms"] == 1000.0
    assert listening["result"]["mode"] == "LISTEN"
    assert listening["result"]["heard"] == "what is this"
    assert "ai_audio" not in listening["result"]
    assert speaking["result"]["mode"] == "SPEAK"
    assert speaking["result"]["text"] == "A red "
    assert speaking["result"]["ai_audio"] == "ai_audio/turn_0_chunk_001.wav"
    assert speaking["result"]["ai_audio_duration_ms"] == 1000.0
    assert speaking["result"]["timing"] == {
        "prefill_ms": 10.0,
        "llm_ms": 30.0,
        "tts_prep_ms": 0.0,
        "tts_ms": 0.0,
        "token2wav_ms": 5.0,
        "all_ms": 40.0,
        "wall_clock_ms": 12.5,
        "n_tokens": 3,
        "n_tts_tokens": 0,
        "kv_cache_length": 90,
        "vision_slices": 0,
        "vision_tokens": 0,
    }
    assert last["result"]["end_of_turn"] is True
    assert (failed["error"], failed["result"]["mode"]) == ("bad_audio", "LISTEN")
    for chunk in body["chunks"]:
        samples, rate = wav_of(folder / chunk["user_audio"])
        assert (len(samples), rate) == (16_000, 16_000)
    samples, rate = wav_of(folder / speaking["result"]["ai_audio"])
    assert (len(samples), rate) == (24_000, 24_000)
    assert np.abs(samples - 0.5).max() < 0.001


def test_meta_tells_the_end_and_the_log_is_gone(write_log, duplex):
    folder = write_log("omni", "omni_duplex", duplex)

    finish(folder)

    meta = meta_of(folder)
    assert meta["duration_s"] == 4.1
    assert meta["ended_at"] == "2026-03-01T10:00:04.100000+00:00"
    assert meta["title"] == "2026-03-01 10:00"
    assert [path.name for path in folder.iterdir() if path.name.startswith((".", "log"))] == []


def test_the_replay_has_the_user_left_and_the_assistant_right(write_log, duplex):
    folder = write_log("omni", "audio_duplex", duplex)

    finish(folder)

    stereo, rate = wav_of(folder / replay.WAV)
    assert rate == 16_000
    assert len(stereo) == 4 * rate
    seconds = stereo.reshape(4, rate, 2)
    assert np.abs(seconds[:, :, 0] - 0.25).max() < 0.001
    loud = np.abs(seconds[:, :, 1]).mean(axis=1)
    assert loud[[0, 3]].max() < 0.01
    assert np.abs(loud[[1, 2]] - 0.5).max() < 0.01
    assert not (folder / replay.MP4).exists()
    assert [chunk["replay_ms"] for chunk in body_of(folder)["chunks"]] == [0, 1000, 2000, 3000]


def test_the_replay_has_no_seam_inside_a_turn(write_log, took, gave, tone):
    said = []
    for i in range(3):
        said += [took(i, Input(i, tone(1)))]
        result = Result(i, is_listen=False, unit_index=i, audio=tone(1, 24_000, 0.5))
        said += [gave(i + 0.1, result)]

    folder = write_log("seam", "audio_duplex", said)
    finish(folder)

    ai = wav_of(folder / replay.WAV)[0][:, 1]
    assert np.abs(ai[500:-500] - 0.5).max() < 0.02


def test_a_short_chunk_takes_a_second_and_speech_that_is_ahead_is_played_in_its_turn(
    write_log, took, gave, tone
):
    said = [
        took(0.0, Input(0, tone(0.2))),
        gave(0.1, Result(0, is_listen=False, unit_index=0, audio=tone(2.5, 24_000))),
        took(1.0, Input(1, tone(1.5))),
        gave(1.1, Result(1, is_listen=False, unit_index=1, end_of_turn=True)),
    ]
    folder = write_log("ahead", "audio_duplex", said)

    finish(folder)

    stereo, rate = wav_of(folder / replay.WAV)
    assert len(stereo) == 2.5 * rate
    assert np.abs(stereo[100:-100, 1] - 0.25).max() < 0.01
    assert np.abs(stereo[round(0.2 * rate) : rate, 0]).max() == 0
    assert np.abs(stereo[rate:, 0] - 0.25).max() < 0.001


def test_a_barge_in_cuts_off_what_has_not_been_played(write_log, took, gave, tone):
    said = [
        took(0.0, Input(0, tone(1))),
        gave(0.1, Result(0, is_listen=False, unit_index=0, audio=tone(3, 24_000))),
        took(1.0, Input(1, tone(1))),
        gave(1.1, Result(1, is_listen=True, unit_index=1, interrupted=True)),
    ]
    folder = write_log("barge", "audio_duplex", said)

    finish(folder)

    ai = wav_of(folder / replay.WAV)[0][:, 1]
    assert len(ai) == 32_000
    assert np.abs(ai[:16_000]).mean() > 0.2
    assert np.abs(ai[16_000:]).max() == 0


def test_the_film_has_pictures_sound_and_subtitles(write_log, duplex):
    folder = write_log("omni", "omni_duplex", duplex)

    finish(folder)

    with av.open(str(folder / replay.MP4)) as film:
        video, audio, words = film.streams
        assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
        assert (video.width, video.height) == (64, 48)
        assert film.duration == pytest.approx(4_000_000, abs=100_000)
        times = [packet.pts * packet.time_base for packet in film.demux(video) if packet.size]
        assert times == [0, 1, 2, 3]
    with av.open(str(folder / replay.MP4)) as film:
        shown = [bytes(p)[2:].decode() for p in film.demux(film.streams[2]) if p.size > 2]
        assert shown == ["» what is this", "A red", "A red wall."]


def test_a_picture_that_is_none_costs_only_itself(write_log, took, gave, tone, jpeg):
    frames = [b"\xff\xd8\xff no picture", jpeg]
    said = []
    for i, frame in enumerate(frames):
        said += [took(i, Input(i, tone(1), [frame]))]
        said += [gave(i + 0.1, Result(i, is_listen=True, unit_index=i))]
    folder = write_log("broken", "omni_duplex", said)

    finish(folder)

    assert body_of(folder)["merged_replay_video"] == replay.MP4
    assert "problem" not in body_of(folder)


@pytest.mark.parametrize("lengths_s", [[1, 1, 1, 1], [0.001] * 4, [4]])
def test_a_replay_has_a_longest_length(write_log, took, tone, jpeg, monkeypatch, lengths_s):
    monkeypatch.setattr(replay, "MAX_REPLAY_S", 3)
    said = [took(i, Input(i, tone(each), [jpeg])) for i, each in enumerate(lengths_s)]
    folder = write_log("long", "omni_duplex", said)

    finish(folder)

    body = body_of(folder)
    assert len(body["chunks"]) == len(lengths_s)
    assert body["problem"].startswith("merged replay: longer than")
    assert "merged_replay" not in body
    assert [p.name for p in folder.iterdir() if "replay" in p.name] == []


def test_a_picture_of_another_kind_is_not_opened(tmp_path, monkeypatch):
    # Pillow would give it to a PostScript interpreter.
    path = tmp_path / "000.bin"
    Image.new("RGB", (8, 8)).save(path, "EPS")
    opened = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: opened.append(1))

    assert open_picture(path) is None
    assert opened == []


def test_a_film_that_cannot_be_made_leaves_the_sound(write_log, duplex, monkeypatch):
    def refuse(*_):
        raise av.error.InvalidDataError(1, "no such encoder")

    monkeypatch.setattr(replay, "Film", refuse)
    folder = write_log("omni", "omni_duplex", duplex)

    finish(folder)

    body = body_of(folder)
    assert body["merged_replay"] == replay.WAV
    assert "merged_replay_video" not in body
    assert body["problem"] == "merged replay: InvalidDataError"


def test_sound_that_is_no_sound_becomes_silence_or_is_clipped(write_log, took, gave):
    raw = np.array([np.nan, np.inf, -np.inf, 0.5], "<f4").tobytes() + b"\x01"
    folder = write_log("odd", "audio_duplex", [took(0.0, Input(0, raw))])

    finish(folder)

    samples, _ = wav_of(folder / "user_audio/000.wav")
    assert samples[:, 0] == pytest.approx([0, 1, -32768 / 32767, 0.5], abs=0.001)


def test_a_half_duplex_log_becomes_turns(write_log, took, gave, tone):
    said = [took(0.0, PrepareTurns([TextPart("Be kind."), AudioPart(tone(1))]))]
    said += [took(i / 2, Input(i, tone(0.5, value=i / 10))) for i in range(1, 7)]
    said[3:3] = [gave(1.2, Speaking(is_speaking=True))]
    said += [
        gave(3.1, Speaking(is_speaking=False)),
        gave(3.2, Generating(1000.0)),
        took(3.5, Input(7, tone(0.5, value=0.9))),
        gave(3.6, Delta(0, "Hi ", tone(0.5, 24_000))),
        gave(3.9, Delta(1, "there.", tone(0.25, 24_000))),
        gave(4.2, TurnDone(1, "Hi there.", "hello", n_tokens=4)),
    ]
    folder = write_log("hdx", "half_duplex_audio", said)

    finish(folder)

    body = body_of(folder)
    assert body["mode"] == "half_duplex_audio"
    assert body["turns"] == [
        {
            "turn_index": 1,
            "request_ts_ms": 3200.0,
            "input": {
                "type": "audio",
                "audio": "user_audio/000.wav",
                "duration_ms": 1500.0,
                "text": "hello",
            },
            "output": {
                "text": "Hi there.",
                "audio": "ai_audio/turn_1.wav",
                "audio_duration_ms": 750.0,
            },
            "timing": {"speech_input_ms": 1000.0, "tokens": 4, "elapsed_ms": 1000.0},
        }
    ]
    heard, _ = wav_of(folder / "user_audio/000.wav")
    # The last second and a half before the end of the turn, nothing of what came later.
    assert [heard[i, 0] for i in (0, 8000, 16_000)] == pytest.approx([0.4, 0.5, 0.6], abs=0.001)


def test_a_turn_without_end_keeps_what_was_said(write_log, took, gave, tone):
    said = [
        took(0.0, Input(0, tone(0.5))),
        gave(0.6, Generating(500.0)),
        gave(0.9, Delta(0, "Well, ", tone(0.1, 24_000))),
    ]
    folder = write_log("cut", "half_duplex_audio", said, reason=None)

    finish(folder)

    (turn,) = body_of(folder)["turns"]
    assert turn["output"]["text"] == "Well, "
    assert turn["output"]["audio_duration_ms"] == 100.0
    assert body_of(folder)["end_reason"] == "interrupted"


@pytest.mark.parametrize("reason", [None, "client_gone", "worker_lost"])
def test_a_turn_that_the_user_has_not_ended_keeps_what_was_heard(
    write_log, took, gave, tone, reason
):
    """Of a session that ended while somebody spoke, nothing of that was left."""
    said = [took(0.0, PrepareTurns([]))]
    said += [took(i / 2, Input(i, tone(0.5, value=i / 10))) for i in range(1, 7)]
    said.insert(3, gave(1.2, Speaking(is_speaking=True)))
    folder = write_log("cut", "half_duplex_audio", said, reason=reason)

    finish(folder)

    (turn,) = body_of(folder)["turns"]
    assert turn["input"]["duration_ms"] == pytest.approx(2300.0)
    assert turn["output"] == {"text": ""}
    assert turn.get("error") == ("worker_lost" if reason == "worker_lost" else None)
    heard, _ = wav_of(folder / turn["input"]["audio"])
    assert heard[-1, 0] == pytest.approx(0.6, abs=0.001)


def test_what_was_too_short_for_a_turn_is_none(write_log, took, gave, tone):
    said = [
        took(0.5, Input(0, tone(0.5))),
        gave(0.6, Speaking(is_speaking=True)),
        gave(0.8, Speaking(is_speaking=False)),
        took(1.0, Input(1, tone(0.5))),
    ]
    folder = write_log("short", "half_duplex_audio", said)

    finish(folder)

    assert body_of(folder)["turns"] == []


def test_a_chat_log_becomes_one_turn_with_its_attachments(write_log, took, gave, tone, jpeg):
    ask = Ask(
        [
            ChatMessage("system", [TextPart("Be brief.")]),
            ChatMessage(
                "user",
                [
                    TextPart("What is it?"),
                    ImagePart(jpeg),
                    ImagePart(b"\x89PNG\r\n\x1a\n"),
                    AudioPart(tone(0.5)),
                    VideoPart(b"\x1aE\xdf\xa3"),
                ],
            ),
        ],
        speaks=True,
        voice=b"voice",
    )
    said = [
        took(0.1, ask),
        gave(0.2, Prefilled(20)),
        gave(0.5, Delta(0, "Red.", tone(0.5, 24_000))),
        gave(0.6, Answered("Red.", 20, 3)),
    ]
    folder = write_log("chat_x", "chat", said)

    finish(folder)

    body = body_of(folder)
    assert body["mode"] == "chat"
    assert body["turns"] == [
        {
            "turn_index": 0,
            "request_ts_ms": 100.0,
            "input": {
                "text": "What is it?",
                "audio": "user_audio/000.wav",
                "duration_ms": 500.0,
                "audios": ["user_audio/000.wav"],
                "images": ["user_images/img_0.jpg", "user_images/img_1.png"],
                "videos": ["user_videos/vid_0.webm"],
                "history": [{"role": "system", "text": "Be brief."}],
            },
            "output": {
                "text": "Red.",
                "audio": "ai_audio/turn_0.wav",
                "audio_duration_ms": 500.0,
            },
            "timing": {"tokens": 3, "input_tokens": 20, "elapsed_ms": 500.0},
        }
    ]
    assert (folder / "user_images/img_0.jpg").read_bytes() == jpeg


def test_an_answer_that_was_not_streamed_has_its_sound_too(write_log, took, gave, tone):
    said = [
        took(0.0, Ask([ChatMessage("user", [TextPart("Hi")])], is_streaming=False)),
        gave(0.6, Answered("Hello.", 20, 3, audio=tone(1, 24_000))),
    ]
    folder = write_log("chat_y", "chat", said)

    finish(folder)

    assert body_of(folder)["turns"][0]["output"]["audio_duration_ms"] == 1000.0


class TestAgain:
    def test_nothing_changes_when_it_is_finished_already(self, write_log, duplex):
        folder = write_log("omni", "omni_duplex", duplex)
        finish(folder)
        before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}

        finish(folder)

        assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before

    def test_a_log_beside_its_recording_is_only_removed(self, write_log, duplex):
        folder = write_log("omni", "omni_duplex", duplex)
        (folder / "recording.json").write_text("{}")

        finish(folder)

        assert body_of(folder) == {}
        assert not (folder / journal.NAME).exists()

    def test_a_live_log_is_left_alone(self, store):
        folder = store.create("live", {})
        log = Journal(folder)

        finish(folder)

        assert not (folder / "recording.json").exists()
        log.close()

    def test_a_full_disk_is_not_filled_with_what_cannot_be_finished(
        self, write_log, duplex, monkeypatch
    ):
        folder = write_log("omni", "omni_duplex", duplex)
        before = {path.name for path in folder.iterdir()}

        def refuse(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(finishing, "write_json", refuse)
        with pytest.raises(OSError, match="No space"):
            finish(folder)

        assert {path.name for path in folder.iterdir()} == before

    @pytest.mark.parametrize("name", ["write_json", "write_atomically"])
    def test_a_full_disk_keeps_the_log_for_a_later_attempt(
        self, write_log, duplex, monkeypatch, name
    ):
        folder = write_log("audio", "audio_duplex", duplex)

        def refuse(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(finishing, name, refuse)
            for _ in range(MAX_ATTEMPTS + 1):
                with pytest.raises(OSError, match="No space"):
                    finish(folder)
        finish(folder)

        assert len(body_of(folder)["chunks"]) == 4

    def test_a_log_that_ends_its_reader_again_and_again_is_given_up(
        self, write_log, duplex, monkeypatch
    ):
        folder = write_log("omni", "omni_duplex", duplex)

        def crash(*_):
            raise RuntimeError("like a crash of the process")

        monkeypatch.setattr(finishing, "_make", crash)
        for _ in range(MAX_ATTEMPTS):
            with pytest.raises(RuntimeError):
                finish(folder)
        finish(folder)

        body = body_of(folder)
        assert (body["mode"], body["chunks"]) == ("duplex", [])
        assert body["end_reason"] == "interrupted"
        assert "3 attempts" in body["problem"]
        assert (folder / UNREADABLE).exists()
        assert not (folder / journal.NAME).exists()
        assert meta_of(folder)["ended_at"] is not None


def test_the_program_finishes_its_folders_and_can_be_stopped_at_any_time(
    write_log, took, gave, tone, jpeg
):
    said = []
    for i in range(25):
        said += [took(i, Input(i, tone(1), [jpeg]))]
        said += [gave(i + 0.1, Result(i, is_listen=True, unit_index=i))]
    folders = [write_log(f"f{i}", "omni_duplex", said) for i in range(2)]
    argv = [sys.executable, "-m", "gateway.recording.finish", *map(str, folders)]
    # On a busy machine it may come to the second log before it is told to end: there it waits.
    second = folders[1] / journal.NAME
    aside = second.rename(folders[1] / "aside")
    os.mkfifo(second)
    # What is stopped in the middle of a file may grumble about it.
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (folders[0] / "user_audio/003.wav").exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == finishing.NICENESS

    process.send_signal(signal.SIGTERM)

    assert process.wait(PATIENCE_S) == finishing.EXIT_STOPPED
    assert [p.name for p in folders[0].glob(".*")] == []
    aside.replace(second)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    for folder in folders:
        assert len(body_of(folder)["chunks"]) == 25
