"""What clients get of recordings, and what they cannot get or do."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import tracemalloc
import zipfile

import httpx
import pytest
from starlette.requests import ClientDisconnect

from gateway.app import create_app
from gateway.clock import Clock
from gateway.recording import archive, upload
from gateway.recording.journal import Journal
from gateway.recording.service import Recordings
from gateway.uploads import Uploads
from shared.config import Config, RecordingConfig, SecurityConfig, ServiceConfig
from shared.errors import BadMessage

ID = "20260301_100000_omni_1_AbC-_123"
UPLOAD = f"/api/sessions/{ID}/upload-recording"


@pytest.fixture
def folder(store):
    folder = store.create(
        ID,
        {
            "session_id": ID,
            "title": "对话 03-01 10:00",
            "app_type": "omni_duplex",
            "created_at": "2026-03-01T10:00:00+00:00",
            "duration_s": 4.5,
        },
    )
    (folder / "recording.json").write_text(json.dumps({"chunks": []}))
    (folder / "user_audio").mkdir()
    (folder / "user_audio/000.wav").write_bytes(bytes(range(100)))
    return folder


@functools.cache
def app_with(**keys):
    """Making an application takes longer than most tests."""
    return create_app(Config(security=SecurityConfig(**keys)), [])


@pytest.fixture
def client(tmp_path, folder, monkeypatch):
    config = Config(
        service=ServiceConfig(data_dir=str(tmp_path / "data")),
        recording=RecordingConfig(enabled=False),
    )

    def client(static=None, **keys):
        app = app_with(**keys)
        monkeypatch.setattr(app.state.gateway, "recordings", Recordings(config, Clock()))
        if static is not None:
            monkeypatch.setattr(app.state.gateway, "static_dir", static)
        transport = httpx.ASGITransport(app)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8006")

    return client


def form(data=b"video", kind="video/webm", field="file", name="x.webm"):
    return {"files": {field: (name, data, kind)}}


async def test_meta_and_recording_are_the_files(client):
    async with client() as http:
        meta = await http.get(f"/api/sessions/{ID}")
        body = await http.get(f"/api/sessions/{ID}/recording")

    assert meta.json()["title"] == "对话 03-01 10:00"
    assert meta.headers["content-type"] == "application/json"
    assert body.json() == {"chunks": []}


async def test_a_recording_that_is_not_finished_is_a_404(client, folder):
    (folder / "recording.json").unlink()
    async with client() as http:
        response = await http.get(f"/api/sessions/{ID}/recording")

    assert response.status_code == 404
    assert response.json()["slug"] == "not_found"


@pytest.mark.parametrize("path", ["", "/recording", "/comment", "/download", "/assets/meta.json"])
@pytest.mark.parametrize("other", ["unknown", ID + ";", "x.y", "..", "%2e%2e", "a b", "x" * 300])
async def test_another_id_is_a_404_and_never_another_recording(client, path, other):
    async with client() as http:
        response = await http.get(f"/api/sessions/{other}{path}")

    assert response.status_code == 404
    assert set(response.json()) == {"detail", "slug"}


class TestAssets:
    async def test_a_file_comes_with_its_type(self, client):
        async with client() as http:
            response = await http.get(f"/api/sessions/{ID}/assets/user_audio/000.wav")

        assert response.content == bytes(range(100))
        assert response.headers["content-type"] == "audio/wav"
        assert response.headers["x-content-type-options"] == "nosniff"

    async def test_a_part_of_it_and_its_head_can_be_had(self, client):
        url = f"/api/sessions/{ID}/assets/user_audio/000.wav"
        async with client() as http:
            part = await http.get(url, headers={"Range": "bytes=10-19"})
            head = await http.head(url)
            beyond = await http.get(url, headers={"Range": "bytes=1000-"})

        assert (part.status_code, part.content) == (206, bytes(range(10, 20)))
        assert part.headers["content-range"] == "bytes 10-19/100"
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "100", b"")
        assert beyond.status_code == 416

    @pytest.mark.parametrize(
        ("path", "status"),
        [
            ("%2e%2e/other/meta.json", 400),
            ("user_audio/%2e%2e/meta.json", 400),
            ("%2Fetc/passwd", 400),
            ("link", 400),
            ("missing.wav", 404),
            ("user_audio", 404),
            ("a%00b", 404),
            ("log.msgpack", 404),
            (".upload-1", 404),
        ],
    )
    async def test_nothing_else_can_be_had(self, client, folder, tmp_path, path, status):
        (folder / ".upload-1").write_bytes(b"half")
        Journal(folder).close()
        neighbour = tmp_path / "data/sessions" / f"{ID}2"
        neighbour.mkdir()
        (neighbour / "secret").write_bytes(b"x")
        (folder / "link").symlink_to(neighbour / "secret")
        async with client() as http:
            response = await http.get(f"/api/sessions/{ID}/assets/{path}")

        assert response.status_code == status
        assert set(response.json()) == {"detail", "slug"}


class TestDownload:
    async def test_the_zip_has_what_can_be_read(self, client, folder):
        (folder / ".upload-1").write_bytes(b"half")
        (folder / "merged_replay.mp4").write_bytes(bytes(500_000))
        Journal(folder).close()
        async with client() as http:
            response = await http.get(f"/api/sessions/{ID}/download")

        assert response.headers["content-type"] == "application/zip"
        assert response.headers["content-disposition"] == f"attachment; filename={ID}.zip"
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            assert archive.testzip() is None
            names = ["merged_replay.mp4", "meta.json", "recording.json", "user_audio/000.wav"]
            assert sorted(archive.namelist()) == [f"{ID}/{name}" for name in names]
            assert archive.read(f"{ID}/user_audio/000.wav") == bytes(range(100))

    def test_it_is_made_in_little_memory(self, folder):
        with (folder / "frontend_replay.webm").open("wb") as file:
            file.truncate(200 * 2**20)
        n_bytes = 0
        tracemalloc.start()
        try:
            for piece in archive.pieces(folder):
                n_bytes += len(piece)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert n_bytes > 200 * 2**20
        assert peak < 8 * 2**20


async def test_a_recording_that_the_disk_keeps_is_a_507(client, folder, monkeypatch):
    def refuse(_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("gateway.recording.store.shutil.rmtree", refuse)
    async with client() as http:
        response = await http.delete(f"/api/recordings/{ID}")

    assert (response.status_code, response.json()["slug"]) == (507, "no_storage")


class TestUpload:
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
    async def test_every_type_that_pages_record_is_taken(self, client, folder, kind, name):
        data = bytes(range(256)) * 20_000
        async with client() as http:
            response = await http.post(UPLOAD, **form(data, kind))

        assert response.json() == {"status": "ok", "path": name, "size_bytes": len(data)}
        assert (folder / name).read_bytes() == data
        assert [path.name for path in folder.glob(".*")] == []

    async def test_another_type_is_refused(self, client, folder):
        async with client() as http:
            response = await http.post(UPLOAD, **form(kind="text/html"))

        assert response.status_code == 400
        assert response.json()["detail"] == "Unsupported file type: text/html"
        assert {p.name for p in folder.iterdir()} == {"meta.json", "recording.json", "user_audio"}

    async def test_what_is_too_large_is_refused_while_it_arrives_and_keeps_the_earlier_one(
        self, client, folder, monkeypatch
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
    async def test_no_file_is_a_422(self, client, folder, request_):
        async with client() as http:
            response = await http.post(UPLOAD, **request_)

        assert (response.status_code, response.json()["slug"]) == (422, "bad_message")
        assert {p.name for p in folder.iterdir()} == {"meta.json", "recording.json", "user_audio"}

    async def test_few_are_received_at_the_same_time(self, client, folder):
        is_first_there, may_go_on = asyncio.Event(), asyncio.Event()

        async def body():
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
            yield b"Content-Type: video/webm\r\n\r\nvideo"
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
            third = await http.post(UPLOAD, **form())

        assert (second.status_code, second.json()["slug"]) == (503, "too_many_connections")
        assert (done.status_code, third.status_code) == (200, 200)

    async def test_a_full_disk_is_told(self, client, folder, monkeypatch):
        def refuse(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(upload, "_append", refuse)
        async with client() as http:
            response = await http.post(UPLOAD, **form())

        assert (response.status_code, response.json()["slug"]) == (507, "no_storage")

    async def test_a_client_that_leaves_in_the_middle_leaves_nothing(self, folder):
        async def body():
            yield b'--b\r\nContent-Disposition: form-data; name="file"\r\n'
            yield b"Content-Type: video/webm\r\n\r\nhalf"
            raise ClientDisconnect

        with pytest.raises(BadMessage, match="broken off"):
            await upload.receive(folder, "multipart/form-data; boundary=b", body())

        assert {p.name for p in folder.iterdir()} == {"meta.json", "recording.json", "user_audio"}

    async def test_an_unknown_recording_takes_none(self, client):
        async with client() as http:
            response = await http.post("/api/sessions/unknown/upload-recording", **form())

        assert response.status_code == 404


class TestComment:
    async def test_it_is_kept_trimmed_and_removed(self, client, folder):
        url = f"/api/sessions/{ID}/comment"
        async with client() as http:
            assert (await http.get(url)).json() == {"comment": ""}
            posted = await http.post(url, json={"comment": "  gut 好 "})
            assert posted.json() == {"status": "ok", "len": 5}
            assert (await http.get(url)).json() == {"comment": "gut 好"}
            assert (await http.post(url, json={"comment": None})).json()["len"] == 0
            assert (await http.get(url)).json() == {"comment": ""}
        assert not (folder / "comment.txt").exists()

    async def test_it_has_a_bound(self, client):
        url = f"/api/sessions/{ID}/comment"
        async with client() as http:
            ok = await http.post(url, json={"comment": "x" * 2000})
            too_long = await http.post(url, json={"comment": "x" * 2001})
            wrong = await http.post(url, json={"comment": 5})

        assert [r.status_code for r in (ok, too_long, wrong)] == [200, 413, 422]


class TestViewer:
    @pytest.mark.parametrize("name", ["session.html", "session-viewer.html"])
    async def test_the_page_of_either_tree_is_served(self, client, tmp_path, name):
        (tmp_path / name).write_text("<html>viewer</html>")
        async with client(static=tmp_path) as http:
            page = await http.get(f"/s/{ID}")
            unknown = await http.get("/s/unknown")

        assert page.text == "<html>viewer</html>"
        assert page.headers["content-type"].startswith("text/html")
        assert (unknown.status_code, unknown.json()["slug"]) == (404, "not_found")

    async def test_a_tree_without_one_says_so(self, client, tmp_path):
        async with client(static=tmp_path) as http:
            assert (await http.get(f"/s/{ID}")).status_code == 404


class TestList:
    async def test_the_newest_come_first(self, client, store):
        store.create("later", {"created_at": "2026-03-02T10:00:00+00:00", "app_type": "chat"})
        async with client() as http:
            later, first = (await http.get("/api/recordings")).json()
            limited = (await http.get("/api/recordings?limit=1")).json()
            wrong = await http.get("/api/recordings?limit=0")

        assert later["session_id"] == "later"
        n_bytes = first.pop("n_bytes")
        assert n_bytes > 100
        assert first == {
            "session_id": ID,
            "title": "对话 03-01 10:00",
            "app_type": "omni_duplex",
            "created_at": "2026-03-01T10:00:00+00:00",
            "duration_s": 4.5,
            "is_live": False,
        }
        assert limited == [later]
        assert wrong.status_code == 422

    async def test_one_can_be_removed_unless_it_is_in_use(self, client, folder):
        log = Journal(folder)
        async with client() as http:
            busy = await http.delete(f"/api/recordings/{ID}")
            log.close()
            gone = await http.delete(f"/api/recordings/{ID}")
            again = await http.delete(f"/api/recordings/{ID}")

        assert (busy.status_code, busy.json()["slug"]) == (409, "recording_in_use")
        assert (gone.status_code, gone.json()) == (200, {"success": True})
        assert again.status_code == 404
        assert not folder.exists()


async def test_keys_are_asked_for_where_there_are_any(client, folder):
    async with client(api_keys=("user",), admin_keys=("boss",)) as http:
        nobody = [
            await http.get(f"/api/sessions/{ID}"),
            await http.get(f"/s/{ID}"),
            await http.post(UPLOAD, **form()),
            await http.get("/api/recordings"),
        ]
        user = {"Authorization": "Bearer user"}
        as_user = [
            await http.get(f"/api/sessions/{ID}", headers=user),
            await http.get("/api/recordings", headers=user),
            await http.delete(f"/api/recordings/{ID}", headers=user),
        ]
        boss = {"Authorization": "Bearer boss"}
        as_boss = await http.get("/api/recordings", headers=boss)

    assert {r.status_code for r in nobody} == {401}
    assert [r.status_code for r in as_user] == [200, 401, 401]
    assert as_boss.status_code == 200
    assert folder.exists()
