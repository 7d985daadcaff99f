"""Recordings that pages have made themselves: what is kept of them, and what is refused."""

from __future__ import annotations

import asyncio
import threading

import av
import pytest
from starlette.requests import ClientDisconnect

from gateway.recording import upload
from gateway.uploads import Uploads
from shared.errors import BadMessage
from tests.gateway.recording.conftest import ID

UPLOAD = f"/api/sessions/{ID}/upload-recording"


def container(path, fmt, codec="libopus"):
    """The bytes of a fifth of a second of sound in a container."""
    with av.open(str(path), "w", format=fmt) as file:
        stream = file.add_stream(codec, rate=48_000, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=9600)
        frame.planes[0].update(bytes(19_200))
        frame.sample_rate = 48_000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path.read_bytes()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What pages record, by the ending it gets."""
    folder = tmp_path_factory.mktemp("recorded")
    return {
        "webm": container(folder / "a.webm", "webm"),
        "mp4": container(folder / "a.mp4", "mp4", "aac"),
        "wav": container(folder / "a.wav", "wav", "pcm_s16le"),
    }


WEBM = bytes.fromhex("1a45dfa39f4286810142f7810142f2810442f381084282847765626d4287810442858102")
"""The first bytes of every WebM file, and nothing else."""


def form(data=b"video", kind="video/webm", field="file", name="x.webm"):
    return {"files": {field: (name, data, kind)}}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("video/webm;codecs=vp9,opus", "frontend_replay.webm"),
        ("video/mp4", "frontend_replay.mp4"),
        ("audio/wav", "frontend_replay.wav"),
        ("audio/webm", "frontend_replay.webm"),
        ("audio/mp4", "frontend_replay.mp4"),
    ],
)
async def test_every_type_that_pages_record_is_taken(client, folder, recorded, kind, name):
    data = recorded[name.rpartition(".")[2]]
    async with client() as http:
        response = await http.post(UPLOAD, **form(data, kind))

    assert response.json() == {"status": "ok", "path": name, "size_bytes": len(data)}
    assert (folder / name).read_bytes() == data
    assert [path.name for path in folder.glob(".*")] == []


@pytest.mark.parametrize("kind", ["video/webm", "video/mp4", "audio/wav", "audio/mp4"])
@pytest.mark.parametrize("what", ["junk", "text", "half", "header", "playlist", "other"])
async def test_what_is_not_of_its_type_is_refused_and_keeps_the_earlier_one(
    client, folder, recorded, kind, what
):
    """Junk took the place of a recording that could be played."""
    extension = upload.TYPES[kind]
    data = {
        "junk": bytes(range(256)) * 20_000,
        "text": b"<html>no film</html>",
        "half": recorded[extension][:20],
        "header": WEBM,
        "playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        "other": recorded["wav" if extension != "wav" else "mp4"],
    }[what]
    earlier = folder / f"frontend_replay.{extension}"
    earlier.write_bytes(b"earlier")
    async with client() as http:
        response = await http.post(UPLOAD, **form(data, kind))

    assert (response.status_code, response.json()["slug"]) == (400, "bad_recording_file")
    assert earlier.read_bytes() == b"earlier"
    assert [path.name for path in folder.glob(".*")] == []


def film(path, n_pictures):
    """The bytes of a WebM file of pictures, 25 in a second, and no sound."""
    with av.open(str(path), "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=25, width=32, height=32)
        for i in range(n_pictures):
            frame = av.VideoFrame(32, 32, "yuv420p")
            frame.pts = i
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path.read_bytes()


async def test_a_sound_that_ends_at_once_is_refused_and_keeps_the_earlier_one(
    client, folder, recorded
):
    """A file that was cut behind its header took the place of a good one."""
    whole = recorded["wav"]
    (folder / "frontend_replay.wav").write_bytes(whole)
    n_samples = 9600
    cut = {n: whole[: len(whole) - 2 * (n_samples - n)] for n in (0, 8, 4799)}
    async with client() as http:
        answers = {n: await http.post(UPLOAD, **form(cut[n], "audio/wav")) for n in cut}
        enough = await http.post(UPLOAD, **form(whole[: len(whole) - 9600], "audio/wav"))

    told = {n: (a.status_code, a.json()["slug"]) for n, a in answers.items()}
    assert told == dict.fromkeys(cut, (400, "bad_recording_file"))
    assert "0.2 ms" in answers[8].json()["detail"]
    assert "100 ms" in answers[8].json()["detail"]
    assert enough.status_code == 200


async def test_pictures_without_sound_are_taken_by_their_length(client, folder, tmp_path):
    async with client() as http:
        short = await http.post(UPLOAD, **form(film(tmp_path / "a.webm", 1)))
        long = await http.post(UPLOAD, **form(film(tmp_path / "b.webm", 5)))

    assert (short.status_code, short.json()["slug"]) == (400, "bad_recording_file")
    assert long.status_code == 200


async def test_a_file_is_looked_into_only_so_far(client, folder, recorded, monkeypatch):
    """Millions of packets without any length would keep a processor for minutes."""
    monkeypatch.setattr(upload, "MAX_PACKETS", 1)
    async with client() as http:
        response = await http.post(UPLOAD, **form(recorded["webm"]))

    assert (response.status_code, response.json()["slug"]) == (400, "bad_recording_file")


async def test_the_file_is_looked_at_off_the_event_loop(client, folder, recorded, monkeypatch):
    threads = []
    look_at = upload._look_at
    monkeypatch.setattr(
        upload,
        "_look_at",
        lambda *args: threads.append(threading.current_thread()) or look_at(*args),
    )
    async with client() as http:
        response = await http.post(UPLOAD, **form(recorded["webm"]))

    assert response.status_code == 200
    assert threads != [threading.main_thread()]


async def test_a_recording_that_vanishes_meanwhile_cannot_until_it_is_over(
    client, folder, store, recorded
):
    is_there, may_go_on = asyncio.Event(), asyncio.Event()

    async def body():
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
        yield b"Content-Type: video/webm\r\n\r\n"
        is_there.set()
        await may_go_on.wait()
        yield recorded["webm"] + b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with client() as http:
        uploading = asyncio.create_task(http.post(UPLOAD, content=body(), headers=headers))
        await is_there.wait()
        busy = await http.delete(f"/api/recordings/{ID}")
        may_go_on.set()
        done = await uploading
        gone = await http.delete(f"/api/recordings/{ID}")

    assert (busy.status_code, busy.json()["slug"]) == (409, "recording_in_use")
    assert (done.status_code, gone.status_code) == (200, 200)


async def test_another_type_is_refused(client, folder):
    async with client() as http:
        response = await http.post(UPLOAD, **form(kind="text/html"))

    assert response.status_code == 400
    assert response.json()["detail"] == "Unsupported file type: text/html"
    assert {p.name for p in folder.iterdir()} == {"meta.json", "recording.json", "user_audio"}


async def test_what_is_too_large_is_refused_while_it_arrives_and_keeps_the_earlier_one(
    client, folder, monkeypatch
):
    monkeypatch.setattr(upload, "MAX_UPLOAD_BYTES", 3_000_000)
    monkeypatch.setattr(upload, "WRITE_BYTES", 100_000)
    (folder / "frontend_replay.webm").write_bytes(b"earlier")
    n_sent = 0

    async def body():
        nonlocal n_sent
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
        yield b"Content-Type: video/webm\r\n\r\n"
        for _ in range(100):
            n_sent += 1
            yield bytes(100_000)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with client() as http:
        response = await http.post(UPLOAD, content=body(), headers=headers)

    assert (response.status_code, response.json()["slug"]) == (413, "payload_too_large")
    assert (folder / "frontend_replay.webm").read_bytes() == b"earlier"
    assert [path.name for path in folder.glob(".*")] == []


@pytest.mark.parametrize(
    "request_",
    [
        form(field="other"),
        form(data=b""),
        {"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"x\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"x", "headers": {"content-type": "video/webm"}},
        {},
    ],
)
async def test_no_file_is_a_422(client, folder, request_):
    async with client() as http:
        response = await http.post(UPLOAD, **request_)

    assert (response.status_code, response.json()["slug"]) == (422, "bad_message")
    assert {p.name for p in folder.iterdir()} == {"meta.json", "recording.json", "user_audio"}


async def test_few_are_received_at_the_same_time(client, folder, recorded):
    is_first_there, may_go_on = asyncio.Event(), asyncio.Event()

    async def body():
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
        yield b"Content-Type: video/webm\r\n\r\n" + recorded["webm"]
        is_first_there.set()
        await may_go_on.wait()
        yield b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with client() as http:
        http._transport.app.state.gateway.recordings.uploads = Uploads(1)
        first = asyncio.create_task(http.post(UPLOAD, content=body(), headers=headers))
        await is_first_there.wait()
        second = await http.post(UPLOAD, **form())
        may_go_on.set()
        done = await first
        third = await http.post(UPLOAD, **form(recorded["webm"]))

    assert (second.status_code, second.json()["slug"]) == (503, "too_many_connections")
    assert (done.status_code, third.status_code) == (200, 200)


async def test_a_full_disk_is_told(client, folder, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(upload, "_append", refuse)
    async with client() as http:
        response = await http.post(UPLOAD, **form())

    assert (response.status_code, response.json()["slug"]) == (507, "no_storage")


async def test_a_disk_that_cannot_be_written_to_is_told(client, folder, monkeypatch):
    """It does not let go of what was half written either, and that was an internal error."""

    def refuse(*_, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(upload, "_append", refuse)
    monkeypatch.setattr(upload.Path, "unlink", refuse)
    async with client() as http:
        response = await http.post(UPLOAD, **form())

    assert (response.status_code, response.json()["slug"]) == (507, "no_storage")


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(folder):
    async def body():
        yield b'--b\r\nContent-Disposition: form-data; name="file"\r\n'
        yield b"Content-Type: video/webm\r\n\r\nhalf"
        raise ClientDisconnect

    with pytest.raises(BadMessage, match="broken off"):
        await upload.receive(folder, "multipart/form-data; boundary=b", body(), Uploads(1))

    assert {p.name for p in folder.iterdir()} == {"meta.json", "recording.json", "user_audio"}


async def test_an_unknown_recording_takes_none(client):
    async with client() as http:
        response = await http.post("/api/sessions/unknown/upload-recording", **form())

    assert response.status_code == 404
