"""The documented nginx configuration in front of a real gateway."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from scripts.machine import ensure_certificate
from shared.config import Config, SecurityConfig
from tests.fakes.gateway import Running, Talker, run_gateway, wait_until
from tests.fakes.ports import free_port
from tests.fakes.scripted_worker import ScriptedWorker

NGINX = which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(which("openssl") is None, reason="openssl is not installed"),
]

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"
NAME = "talk.example.org"
KEY = "a-long-random-string"
TRUSTING = ssl.create_default_context()
TRUSTING.check_hostname = False
TRUSTING.verify_mode = ssl.CERT_NONE


def documented(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def configuration(folder: Path, port: int, gateway_port: int, is_below: bool) -> str:
    """The documented site with this test's ports and files, and the frame that nginx wants."""
    certificate, key = ensure_certificate(folder / "certs")
    site, below = documented("nginx")
    if is_below:
        replaced = re.search(r"^ *location / \{\n *proxy_pass .*\n", site, re.MULTILINE)
        assert replaced is not None
        site = site.replace(replaced.group(), below)
    for found, put in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/letsencrypt/live/talk.example.org/fullchain.pem", str(certificate)),
        ("/etc/letsencrypt/live/talk.example.org/privkey.pem", str(key)),
        ("/var/log/nginx/omni.log", str(folder / "access.log")),
        ("http://127.0.0.1:8006", f"http://127.0.0.1:{gateway_port}"),
    ):
        assert found in site
        site = site.replace(found, put)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    return (
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ {paths}\n{site} }}\n"
    )


@contextmanager
def nginx(folder: Path, port: int, gateway_port: int, is_below: bool) -> Iterator[None]:
    assert NGINX is not None
    file = folder / "nginx.conf"
    file.write_text(configuration(folder, port, gateway_port, is_below))
    process = subprocess.Popen(
        [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 0, output.decode()


@dataclass
class Site:
    """`address` is what a browser has in its address bar."""

    port: int
    gateway: Running
    folder: Path
    path: str
    """Below which the gateway is served; "" = it has the site for itself."""

    @property
    def address(self) -> str:
        return f"https://{NAME}:{self.port}"

    def dial(self, origin: str, **options: Any) -> connect:
        return connect(
            f"wss://{NAME}:{self.port}{self.path}/ws/duplex/omni_proxied?api_key={KEY}",
            host="127.0.0.1",
            port=self.port,
            ssl=TRUSTING,
            origin=origin,
            proxy=None,
            **options,
        )

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Host": f"{NAME}:{self.port}", **options.pop("headers", {})}
        async with httpx.AsyncClient(verify=TRUSTING, trust_env=False) as client:
            url = f"https://127.0.0.1:{self.port}{self.path}{path}"
            return await client.request(method, url, headers=headers, **options)


@asynccontextmanager
async def proxied(folder: Path, path: str = "", **changes: Any) -> AsyncIterator[Site]:
    """A gateway behind nginx, with the documented settings but for `changes`."""
    port = free_port()
    security = json.loads(documented("json")[0])["security"]
    # Only a test's address has a port.
    security["allowed_origins"] = [f"{origin}:{port}" for origin in security["allowed_origins"]]
    config = Config(security=SecurityConfig(**{**security, "api_keys": [KEY], **changes}))
    async with ScriptedWorker() as worker, run_gateway([worker], config) as gateway:
        with nginx(folder, port, gateway.port, is_below=bool(path)):
            await wait_until(lambda: is_listening(port))
            yield Site(port, gateway, folder, path)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with proxied(tmp_path) as opened:
        yield opened


def is_listening(port: int) -> bool:
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


async def test_a_duplex_session_goes_through(site: Site) -> None:
    async with site.dial(site.address) as socket:
        talker = Talker(socket)
        await talker.prepare()
        await talker.chunk()
        result = await talker.hear_kind("result")

        await talker.say("stop")
        assert (await talker.hear_kind("stopped"))["type"] == "stopped"
        assert await talker.closed() == 1000
    assert result["current_time"] >= 0


async def test_pages_of_other_sites_are_refused(site: Site) -> None:
    async with site.dial("https://evil.example") as socket:
        refusal = await Talker(socket).hear()

    assert refusal["slug"] == "forbidden_origin"


async def test_the_page_and_its_files_are_served_and_the_cookie_is_secure(site: Site) -> None:
    page = await site.request("GET", f"/?api_key={KEY}")
    script = re.search(r'src="(static/[^"]+\.js)"', page.text)
    assert script is not None
    file = await site.request(
        "GET", f"/{script.group(1)}", headers={"Cookie": f"omni_api_key={KEY}"}
    )

    assert page.status_code == 200
    assert "; Secure" in page.headers["set-cookie"]
    assert (file.status_code, file.headers["content-type"].split(";")[0]) == (
        200,
        "text/javascript",
    )


async def test_the_log_of_the_proxy_does_not_hold_the_key(site: Site) -> None:
    await site.request("GET", f"/status?api_key={KEY}")
    log = site.folder / "access.log"
    await wait_until(lambda: "/status" in log.read_text())

    assert KEY not in log.read_text()


async def test_clients_are_told_apart_by_their_address_and_cannot_make_one_up(
    tmp_path: Path,
) -> None:
    """All come from this machine, whatever they write into the header; nginx may say otherwise."""
    made_up = {"X-Forwarded-For": "203.0.113.9"}
    keys = {"api_keys": [], "admin_keys": []}
    async with (
        proxied(tmp_path, **keys, max_sessions_per_client=1) as site,
        site.dial(site.address) as first,
    ):
        await Talker(first).prepare()

        async with site.dial(site.address, additional_headers=made_up) as again:
            assert (await Talker(again).hear())["slug"] == "too_many_sessions"
        async with site.gateway.dial(additional_headers=made_up) as another:
            assert (await Talker(another).hear())["type"] == "queued"


async def test_a_large_body_reaches_the_gateway(site: Site) -> None:
    """nginx's own limit is 1 MiB, and its refusal would be HTML."""
    reply = await site.request(
        "POST",
        "/api/assets/ref_audio",
        json={"name": "noise", "audio_base64": "A" * 3_000_000},
        headers={"Authorization": f"Bearer {KEY}"},
    )

    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["slug"] not in ("", "payload_too_large")


async def test_a_client_that_is_gone_is_noticed_through_the_proxy(site: Site) -> None:
    socket = await site.dial(site.address)
    await Talker(socket).prepare()
    await asyncio.to_thread(socket.transport.abort)

    await wait_until(lambda: not site.gateway.gateway.sessions)


async def test_below_a_path_pages_their_files_redirects_and_sessions_work(tmp_path: Path) -> None:
    async with proxied(tmp_path, "/talk") as site:
        page = await site.request("GET", f"/?api_key={KEY}")
        cookie = {"Cookie": f"omni_api_key={KEY}"}
        script = re.search(r'src="(static/[^"]+\.js)"', page.text)
        assert script is not None
        file = await site.request("GET", f"/{script.group(1)}", headers=cookie)
        leads = [
            (answer := await site.request("GET", path, headers=cookie)).url.join(
                answer.headers["location"]
            )
            for path in ("/mobile", "/mobile/", "/mobile-omni", "/omni/")
        ]
        async with site.dial(site.address) as socket:
            prepared = await Talker(socket).prepare()

    assert (page.status_code, file.status_code, prepared["type"]) == (200, 200, "prepared")
    assert "; Path=/talk/; Secure" in page.headers["set-cookie"]
    assert [lead.path for lead in leads] == [
        "/talk/mobile/",
        "/talk/",
        "/talk/mobile-omni/",
        "/talk/omni",
    ]
