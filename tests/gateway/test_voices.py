"""The default voice and uploaded ones."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from fractions import Fraction

import av
import numpy as np
import pytest

from gateway import voice_files, voices
from gateway.app import ASSETS_DIR, DEFAULT_VOICE
from gateway.voice_files import decode_voice
from shared.audio import read_wav, write_wav
from shared.config import Config
from shared.errors import BadVoiceFile
from tests.fakes.front import open_front
from tests.fakes.patience import PATIENCE_S

PATH = "/api/assets/ref_audio"
RATE_HZ = 16_000


def tone(seconds: float, rate_hz: int = RATE_HZ) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(
        np.float32
    )


def encoded(container: str, codec: str, rate_hz: int, seconds: float = 1.0, layout="mono") -> bytes:
    """Return a file of a tone, as a client may have it."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate_hz, layout=layout)
        sound = np.repeat(tone(seconds, rate_hz)[None], stream.layout.nb_channels, axis=0)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), "fltp", layout)
        frame.sample_rate = rate_hz
        frame.time_base = Fraction(1, rate_hz)
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def wav(seconds: float = 1.0) -> bytes:
    return encoded("wav", "pcm_s16le", RATE_HZ, seconds)


def wav_cut_to(n_samples: int) -> bytes:
    """Return what a broken transfer leaves: the header speaks of a whole second."""
    whole = wav()
    return whole[: len(whole) - 2 * (RATE_HZ - n_samples)]


def body(file: bytes, name: str = "Ann") -> dict[str, str]:
    return {"name": name, "audio_base64": base64.b64encode(file).decode()}


def samples_of(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data), "<f4")


def flac_of_a_sample_per_second() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as output:
        stream = output.add_stream("flac", rate=1, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.int16), "s16", "mono")
        frame.sample_rate = 1
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def test_a_file_that_claims_a_sample_per_second_costs_no_memory(monkeypatch):
    class Resampler:
        def __init__(self, **_):
            pass

        def resample(self, frame):
            raise AssertionError(f"{frame.samples} s")

    file = flac_of_a_sample_per_second()
    monkeypatch.setattr(voice_files.av, "AudioResampler", Resampler)

    with pytest.raises(BadVoiceFile, match="longer than 60 s"):
        decode_voice(file)


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"service": {"data_dir": str(tmp_path)}})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "assets" / "ref_audio"


class TestDefaultVoice:
    async def test_the_shipped_voice_is_served(self):
        async with open_front() as front:
            answer = (await front.http.get("/api/default_ref_audio")).json()

        samples, rate_hz = read_wav(ASSETS_DIR / DEFAULT_VOICE)
        assert rate_hz == RATE_HZ
        assert samples.size <= 10 * RATE_HZ
        assert set(answer) == {"name", "duration", "sample_rate", "samples", "base64"}
        assert (answer["name"], answer["sample_rate"]) == ("default.wav", RATE_HZ)
        assert answer["samples"] == samples.size
        assert answer["duration"] == round(samples.size / RATE_HZ, 1)
        assert np.abs(samples_of(answer["base64"]) - samples).max() < 1e-4

    async def test_a_configured_voice_is_served_instead_and_decoded_once(self, tmp_path):
        path = tmp_path / "mine.wav"
        write_wav(path, tone(2.0), RATE_HZ)
        config = Config.model_validate({"audio": {"ref_audio_path": str(path)}})
        async with open_front(config) as front:
            first = (await front.http.get("/api/default_ref_audio")).json()
            path.unlink()
            again = (await front.http.get("/api/default_ref_audio")).json()

        assert (first["name"], first["duration"], first["samples"]) == ("mine.wav", 2.0, 32_000)
        assert again == first

    async def test_a_voice_that_is_not_there_or_damaged_is_told(self, tmp_path):
        path = tmp_path / "mine.wav"
        config = Config.model_validate({"audio": {"ref_audio_path": str(path)}})
        async with open_front(config) as front:
            missing = await front.http.get("/api/default_ref_audio")
            path.write_bytes(b"RIFF and nothing else")
            damaged = await front.http.get("/api/default_ref_audio")
            write_wav(path, tone(0.5), RATE_HZ)
            mended = await front.http.get("/api/default_ref_audio")

        assert (missing.status_code, missing.json()["slug"]) == (404, "not_found")
        assert (damaged.status_code, damaged.json()["slug"]) == (500, "voice_unreadable")
        assert str(tmp_path) not in damaged.text
        assert mended.status_code == 200


class TestUpload:
    async def test_a_voice_is_kept_listed_read_and_deleted(self, config, folder):
        async with open_front(config) as front:
            empty = (await front.http.get(PATH)).json()
            made = (await front.http.post(PATH, json=body(wav(1.5), " Ann "))).json()
            listed = (await front.http.get(PATH)).json()
            sound = (await front.http.get(f"{PATH}/{made['id']}/audio")).json()
            stored, rate_hz = read_wav(folder / f"{made['id']}.wav")
            deleted = (await front.http.delete(f"{PATH}/{made['id']}")).json()
            after = (await front.http.get(PATH)).json()

        assert empty == after == {"total": 0, "ref_audios": []}
        assert made == {
            "success": True,
            "id": made["id"],
            "name": "Ann",
            "message": "Uploaded successfully, duration=1500ms",
        }
        (row,) = listed["ref_audios"]
        assert listed["total"] == 1
        assert row.pop("created_at").startswith("20")
        assert row == {
            "id": made["id"],
            "name": "Ann",
            "filename": f"{made['id']}.wav",
            "source_type": "upload",
            "duration_ms": 1500,
            "sample_rate": RATE_HZ,
        }
        assert (rate_hz, stored.size) == (RATE_HZ, 24_000)
        assert (sound["name"], sound["duration"]) == ("Ann", 1.5)
        assert np.abs(samples_of(sound["data"]) - tone(1.5)).max() < 1e-3
        assert deleted == {"success": True, "id": made["id"], "name": None, "message": "Deleted"}
        assert [path.name for path in folder.iterdir()] == ["registry.json"]

    @pytest.mark.parametrize(
        ("container", "codec", "rate_hz", "layout"),
        [
            ("wav", "pcm_f32le", 48_000, "stereo"),
            ("flac", "flac", 44_100, "mono"),
            ("mp3", "libmp3lame", 44_100, "stereo"),
            ("ogg", "libopus", 48_000, "mono"),
            ("webm", "libopus", 48_000, "mono"),
            ("mp4", "aac", 44_100, "mono"),
        ],
    )
    def test_usual_formats_become_16_khz_mono(self, container, codec, rate_hz, layout):
        samples = decode_voice(encoded(container, codec, rate_hz, layout=layout))

        # Codecs add what their frames need.
        assert RATE_HZ <= samples.size <= 1.1 * RATE_HZ
        spectrum = np.abs(np.fft.rfft(samples[4000:12_000]))
        assert spectrum.argmax() * RATE_HZ / 8000 == pytest.approx(440, abs=2)

    async def test_what_is_no_voice_is_refused_and_leaves_nothing(self, config, folder, tmp_path):
        write_wav(tmp_path / "empty.wav", tone(0.0), RATE_HZ)
        not_finite = bytearray(encoded("wav", "pcm_f32le", RATE_HZ, 0.1))
        not_finite[-4:] = np.float32("nan").tobytes()
        files = {
            "text": b"this is no sound at all" * 100,
            "nothing": b"",
            "raw samples": tone(1.0).tobytes(),
            "no sound": (tmp_path / "empty.wav").read_bytes(),
            "cut off": wav()[:30],
            "cut to 3 samples": wav_cut_to(3),
            "almost": wav(0.099),
            "not finite": bytes(not_finite),
            "too long": encoded("flac", "flac", 8000, 60.1),
        }
        async with open_front(config) as front:
            answers = {
                what: await front.http.post(PATH, json=body(file)) for what, file in files.items()
            }
            listed = (await front.http.get(PATH)).json()

        told = {what: (a.status_code, a.json()["slug"]) for what, a in answers.items()}
        assert told == dict.fromkeys(files, (400, "bad_voice_file"))
        assert "60 s" in answers["too long"].json()["detail"]
        short = answers["cut to 3 samples"].json()["detail"]
        assert "0.2 ms" in short
        assert "100 ms" in short
        assert listed["total"] == 0
        assert not folder.exists()

    async def test_a_body_of_another_shape_is_refused(self, config):
        bodies = [
            b"",
            b"[]",
            b"{",
            b"\xff",
            b'{"name": "Ann"}',
            b'{"name": 3, "audio_base64": ""}',
            b'{"name": "Ann", "audio_base64": "?"}',
            json.dumps(body(wav(0.1), "")).encode(),
            json.dumps(body(wav(0.1), "  ")).encode(),
            json.dumps(body(wav(0.1), "x" * 101)).encode(),
            json.dumps(body(wav(0.1), "a\nb")).encode(),
        ]
        async with open_front(config) as front:
            answers = [await front.http.post(PATH, content=content) for content in bodies]

        assert [(a.status_code, a.json()["slug"]) for a in answers] == [(422, "bad_message")] * 11

    @pytest.mark.parametrize("voice_id", ["nothing", "..", "%2e%2e%2fregistry", "a" * 5000])
    async def test_an_unknown_voice_is_404(self, config, voice_id):
        async with open_front(config) as front:
            answers = [
                await front.http.get(f"{PATH}/{voice_id}/audio"),
                await front.http.delete(f"{PATH}/{voice_id}"),
            ]

        assert {answer.status_code for answer in answers} <= {404, 405}

    async def test_voices_outlive_the_gateway(self, config):
        async with open_front(config) as front:
            made = (await front.http.post(PATH, json=body(wav(0.2)))).json()
        async with open_front(config) as front:
            listed = (await front.http.get(PATH)).json()["ref_audios"]
            sound = await front.http.get(f"{PATH}/{made['id']}/audio")

        assert [row["id"] for row in listed] == [made["id"]]
        assert sound.status_code == 200

    async def test_a_registry_that_cannot_be_read_is_put_aside(self, config, folder, caplog):
        folder.mkdir(parents=True)
        (folder / "registry.json").write_text('{"ref_audios": [{"id": "../../x"}]}')
        async with open_front(config) as front:
            made = await front.http.post(PATH, json=body(wav(0.2)))
            total = (await front.http.get(PATH)).json()["total"]

        assert (made.status_code, total) == (200, 1)
        assert (folder / "registry.damaged.json").is_file()
        assert "registry of voices unreadable" in caplog.text

    async def test_a_voice_whose_file_is_gone_or_damaged_is_told(self, config, folder):
        async with open_front(config) as front:
            made = (await front.http.post(PATH, json=body(wav(0.2)))).json()
            (folder / f"{made['id']}.wav").write_bytes(b"no sound")
            damaged = await front.http.get(f"{PATH}/{made['id']}/audio")
            (folder / f"{made['id']}.wav").unlink()
            gone = await front.http.get(f"{PATH}/{made['id']}/audio")

        assert (damaged.status_code, damaged.json()["slug"]) == (500, "voice_unreadable")
        assert gone.status_code == 404

    async def test_only_so_many_voices_are_kept(self, config, monkeypatch):
        monkeypatch.setattr(voices, "MAX_VOICES", 2)
        async with open_front(config) as front:
            answers = [await front.http.post(PATH, json=body(wav(0.1))) for _ in range(3)]
            at_once = await asyncio.gather(
                front.http.delete(f"{PATH}/{answers[0].json()['id']}"),
                *(front.http.post(PATH, json=body(wav(0.1))) for _ in range(3)),
            )
            total = (await front.http.get(PATH)).json()["total"]

        assert [a.status_code for a in answers] == [200, 200, 507]
        assert answers[2].json()["slug"] == "no_storage"
        assert total <= 2
        assert at_once[0].status_code == 200

    async def test_a_disk_that_takes_nothing_costs_only_the_new_voice(
        self, config, folder, monkeypatch
    ):
        async with open_front(config) as front:
            kept = (await front.http.post(PATH, json=body(wav(0.1)))).json()
            before = sorted(path.name for path in folder.iterdir())

            def full(descriptor):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(voices.os, "fsync", full)
            refused = await front.http.post(PATH, json=body(wav(0.1)))
            undeleted = await front.http.delete(f"{PATH}/{kept['id']}")
            listed = (await front.http.get(PATH)).json()["ref_audios"]
            monkeypatch.undo()
            sound = await front.http.get(f"{PATH}/{kept['id']}/audio")

        assert (refused.status_code, refused.json()["slug"]) == (507, "no_storage")
        assert undeleted.status_code == 507
        assert [row["id"] for row in listed] == [kept["id"]]
        assert sound.status_code == 200
        after = {path.name for path in folder.iterdir()} - {"registry.json.partial"}
        assert sorted(after) == before

    async def test_few_uploads_are_held_at_the_same_time(self, config, monkeypatch):
        monkeypatch.setattr(voices, "MAX_UPLOADS", 1)
        is_decoding, may_go_on = threading.Event(), threading.Event()

        def slow(file):
            is_decoding.set()
            assert may_go_on.wait(PATIENCE_S)
            return decode_voice(file)

        monkeypatch.setattr(voices, "decode_voice", slow)
        async with open_front(config) as front:
            first = asyncio.create_task(front.http.post(PATH, json=body(wav(0.1))))
            await asyncio.to_thread(is_decoding.wait, PATIENCE_S)
            # The loop is free while a voice is decoded.
            second = await front.http.post(PATH, json=body(wav(0.1)))
            may_go_on.set()
            done = await first
            third = await front.http.post(PATH, json=body(wav(0.1)))

        assert (second.status_code, second.json()["slug"]) == (503, "too_many_connections")
        assert (done.status_code, third.status_code) == (200, 200)

    async def test_reading_is_free_and_changing_needs_a_key_where_there_are_any(self, tmp_path):
        config = Config.model_validate(
            {"service": {"data_dir": str(tmp_path)}, "security": {"api_keys": ["k1"]}}
        )
        async with open_front(config) as front:
            without = [
                await front.http.post(PATH, json=body(wav(0.1))),
                await front.http.delete(f"{PATH}/x"),
            ]
            key = {"Authorization": "Bearer k1"}
            with_key = await front.http.post(PATH, json=body(wav(0.1)), headers=key)

        assert [answer.status_code for answer in without] == [401, 401]
        assert with_key.status_code == 200


class TestHostileFiles:
    """FFmpeg follows what playlists name; a voice is one file and nothing else."""

    def test_no_file_of_this_machine_is_opened(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_wav(tmp_path / "secret.wav", tone(0.2), RATE_HZ)

        with pytest.raises(BadVoiceFile):
            decode_voice(b"ffconcat version 1.0\nfile secret.wav\n")

    def test_no_port_is_listened_to(self):
        """Of a session description FFmpeg waits for packets, ten seconds long."""
        began_at = time.monotonic()
        description = (
            "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
            "m=audio 5004 RTP/AVP 0\r\n"
        )
        with pytest.raises(BadVoiceFile):
            decode_voice(description.encode())

        assert time.monotonic() - began_at < 2
