"""What clients get of recordings, and what they cannot get or do."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import pytest

from gateway.recording import archive
from gateway.recording.journal import Journal
from shared.errors import RecordingInUse
from tests.gateway.recording.conftest import ID


async def test_meta_and_recording_are_the_files(client):
    async with client() as http:
        meta = await http.get(f"/api/sessions/{ID}")
        body = await http.get(f"/api/sessions/{ID}/recording")

    assert meta.json()["title"] == "2026-03-01 10:00"
    assert meta.headers["content-type"] == "application/json"
    assert body.json() == {"chunks": []}


async def test_a_recording_that_is_not_finished_is_a_404(client, folder):
    (folder / "recording.json").unlink()
    async with client() as http:
        response = await http.get(f"/api/sessions/{ID}/recording")

    assert response.status_code == 404
    assert response.json()["slug"] == "not_found"


@pytest.mark.parametrize("path", ["", "/recording", "/comment", "/download", "/assets/meta.json"])
@pytest.mark.parametrize(
    "other",
    ["unknown", ID.swapcase(), ID.lower(), ID + ";", "x.y", "..", "%2e%2e", "a b", "x" * 300],
)
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

    async def test_one_that_is_not_finished_is_a_409(self, client, folder):
        """It was an almost empty file that looked like all there is."""
        (folder / "recording.json").unlink()
        Journal(folder).close()
        async with client() as http:
            early = await http.get(f"/api/sessions/{ID}/download")
            (folder / "recording.json").write_text("{}")
            finished = await http.get(f"/api/sessions/{ID}/download")

        assert (early.status_code, early.json()["slug"]) == (409, "recording_unfinished")
        assert "content-disposition" not in early.headers
        assert finished.status_code == 200

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

    async def test_a_link_leads_nowhere(self, client, folder, tmp_path):
        (tmp_path / "secret").write_text('{"secret": 1}')
        (folder / "user_audio/001.wav").symlink_to(tmp_path / "secret")
        (folder / "user_images").symlink_to(tmp_path)
        for name in ("recording.json", "comment.txt"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(tmp_path / "secret")
        async with client() as http:
            archived = await http.get(f"/api/sessions/{ID}/download")
            others = [
                await http.get(f"/api/sessions/{ID}/{name}")
                for name in ("recording", "comment", "assets/user_images/secret")
            ]

        assert b"secret" not in b"".join(response.content for response in others)
        with zipfile.ZipFile(io.BytesIO(archived.content)) as archive:
            assert sorted(archive.namelist()) == [f"{ID}/meta.json", f"{ID}/user_audio/000.wav"]

    async def test_a_recording_is_not_removed_while_it_is_sent(self, store, folder):
        sending = archive.pieces(folder)
        first = next(sending)
        with pytest.raises(RecordingInUse):
            store.delete(ID)
        rest = b"".join(sending)

        with zipfile.ZipFile(io.BytesIO(first + rest)) as archive_:
            assert len(archive_.namelist()) == 3
        assert store.delete(ID)

    async def test_a_reader_who_leaves_keeps_nothing(self, store, folder):
        sending = archive.pieces(folder)
        next(sending)
        sending.close()

        assert store.delete(ID)


async def test_a_recording_that_the_disk_keeps_is_a_507(client, folder, monkeypatch):
    def refuse(_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("gateway.recording.store.shutil.rmtree", refuse)
    async with client() as http:
        response = await http.delete(f"/api/recordings/{ID}")

    assert (response.status_code, response.json()["slug"]) == (507, "no_storage")


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

    @pytest.mark.parametrize("text", ["\\ud800", "a\\udfff b", "\\udc00\\ud800"])
    async def test_half_a_character_is_refused_and_the_earlier_one_stays(
        self, client, folder, text
    ):
        """It became a question mark that nobody had written."""
        url = f"/api/sessions/{ID}/comment"
        (folder / "comment.txt").write_text("earlier")
        headers = {"content-type": "application/json"}
        async with client() as http:
            body = f'{{"comment": "{text}"}}'
            response = await http.post(url, content=body, headers=headers)
            kept = await http.get(url)

        assert (response.status_code, response.json()["slug"]) == (422, "bad_message")
        assert kept.json() == {"comment": "earlier"}

    @pytest.mark.parametrize("character", ["\0", "\x1b", "\x7f", "\x85", "\x1f"])
    @pytest.mark.parametrize("text", ["a{}b", "a{}"])
    async def test_a_control_character_is_refused_and_the_earlier_one_stays(
        self, client, folder, text, character
    ):
        """An administrator's terminal would do what it says."""
        url = f"/api/sessions/{ID}/comment"
        (folder / "comment.txt").write_text("earlier")
        async with client() as http:
            response = await http.post(url, json={"comment": text.format(character)})
            kept = await http.get(url)

        assert (response.status_code, response.json()["slug"]) == (422, "bad_message")
        assert f"U+{ord(character):04X}" in response.json()["detail"]
        assert kept.json() == {"comment": "earlier"}

    async def test_lines_tabs_and_marks_of_direction_may_be_in_it(self, client):
        url = f"/api/sessions/{ID}/comment"
        text = "a\r\n\tb \u200fשלום\u202c"
        async with client() as http:
            posted = await http.post(url, json={"comment": text})
            kept = await http.get(url)

        assert posted.status_code == 200
        assert kept.json() == {"comment": text}

    async def test_a_character_of_two_halves_is_one(self, client, folder):
        url = f"/api/sessions/{ID}/comment"
        headers = {"content-type": "application/json"}
        async with client() as http:
            await http.post(url, content=b'{"comment": "\\ud83d\\ude00"}', headers=headers)
            kept = await http.get(url)

        assert kept.json() == {"comment": "\N{GRINNING FACE}"}


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
            "title": "2026-03-01 10:00",
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
            await http.post(f"/api/sessions/{ID}/upload-recording"),
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
    assert [r.status_code for r in as_user] == [200, 403, 403]
    assert as_boss.status_code == 200
    assert folder.exists()
