"""Reads a transcript and plays its client's part against a running service.

A transcript is a YAML file: a title, and steps in the order of the wire.

    title: what the case shows, with its place in the protocol's description
    socket: /ws/duplex/omni_{run}        a WebSocket that all steps speak on; none for plain HTTP
    back_ends: [cascade]                 where it does not hold for both
    steps:
      - sends: {type: prepare}           an object as JSON; a string as it stands
      - sends_bytes: "..."               a binary frame
      - gets: {type: prepared, prompt_length: <int>}
      - gets_until: {type: turn_done}    any number of `between` may come before it
        between: [{type: chunk}]
      - closes: 1000                     the server closes with this code
      - leaves: true                     the client closes
      - http: GET /api/apps              with `body`, `status` (200 if not said), `answer`

A message may have more fields than the transcript names. In what is expected, `<int>`, `<number>`,
`<text>`, `<bool>`, `<any>` and `<sound>` (base64 of float32 samples, not empty) stand for any such
value, `<sound or null>` and the like for either. In what is sent, `{silence 1.0}` is base64 of so
many seconds of silence, `{speech NAME}` of a clip of tests/assets, `{jpeg}` of a small picture and
`{run}` a name that no other run has.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from PIL import Image, ImageDraw
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from client.media import read_clip
from shared.audio import samples_from_f32, samples_to_f32

FOLDER = Path(__file__).parent
ASSETS = FOLDER.parent / "assets"
PATIENCE_S = 60.0
WAITING = ("queued", "queue_update")
"""A free slot is not promised: whoever waits is told so first."""


class Mismatch(AssertionError):
    """The service said something else."""


@dataclass(frozen=True)
class Transcript:
    name: str
    title: str
    steps: list[dict[str, Any]]
    socket: str | None
    back_ends: tuple[str, ...]


def transcripts() -> list[Transcript]:
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def _read(path: Path) -> Transcript:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    back_ends = tuple(raw.get("back_ends", ("cascade", "minicpmo45")))
    return Transcript(path.stem, raw["title"], raw["steps"], raw.get("socket"), back_ends)


async def replay(transcript: Transcript, http_url: str) -> None:
    """Raises Mismatch with the step at which the service left the transcript."""
    player = _Player(http_url, {"run": uuid.uuid4().hex[:12]})
    async with httpx.AsyncClient(base_url=http_url, timeout=PATIENCE_S) as client:
        player.client = client
        if transcript.socket is None:
            await player.play(transcript)
            return
        url = http_url.replace("http", "ws", 1) + player.filled(transcript.socket)
        async with connect(url, max_size=None, proxy=None) as socket:
            player.socket = socket
            await player.play(transcript)


class _Player:
    client: httpx.AsyncClient
    socket: ClientConnection

    def __init__(self, http_url: str, names: Mapping[str, str]) -> None:
        self._http_url = http_url
        self._names = names

    async def play(self, transcript: Transcript) -> None:
        for number, step in enumerate(transcript.steps, 1):
            try:
                await self._step(step)
            except Mismatch as error:
                raise Mismatch(f"{transcript.name}, step {number} {step}: {error}") from error

    async def _step(self, step: dict[str, Any]) -> None:
        match step:
            case {"sends": str(text)}:
                await self.socket.send(self.filled(text))
            case {"sends": message}:
                await self.socket.send(json.dumps(self.filled(message)))
            case {"sends_bytes": text}:
                await self.socket.send(text.encode())
            case {"gets": expected}:
                compare(await self._next(), expected)
            case {"gets_until": expected}:
                await self._until(expected, step.get("between", []))
            case {"closes": code}:
                await self._closed(code)
            case {"leaves": _}:
                await self.socket.close()
            case {"http": request}:
                await self._request(request, step)
            case _:
                raise Mismatch("no such kind of step")

    async def _next(self) -> Any:
        while True:
            try:
                frame = await wait_for(self.socket.recv())
            except ConnectionClosed as error:
                raise Mismatch(f"the server closed instead: {error}") from error
            message = json.loads(frame)
            if message.get("type") not in WAITING:
                return message

    async def _until(self, expected: Any, between: list[Any]) -> None:
        while True:
            message = await self._next()
            if message.get("type") == expected["type"]:
                compare(message, expected)
                return
            fitting = [one for one in between if one["type"] == message.get("type")]
            if not fitting:
                raise Mismatch(f"unexpected {shown(message)}")
            compare(message, fitting[0])

    async def _closed(self, code: int) -> None:
        try:
            frame = await wait_for(self.socket.recv())
        except ConnectionClosed as error:
            got = error.rcvd.code if error.rcvd else 1006
            if got != code:
                raise Mismatch(f"closed with {got}") from error
            return
        raise Mismatch(f"another message: {shown(json.loads(frame))}")

    async def _request(self, request: str, step: dict[str, Any]) -> None:
        method, _, path = self.filled(request).partition(" ")
        body = step.get("body")
        content = None if body is None else json.dumps(self.filled(body)).encode()
        if isinstance(body, str):
            content = body.encode()
        answer = await self.client.request(
            method, path, content=content, headers={"content-type": "application/json"}
        )
        if answer.status_code != step.get("status", 200):
            raise Mismatch(f"status {answer.status_code}: {answer.text[:300]}")
        if "answer" in step:
            compare(answer.json(), step["answer"])

    def filled(self, value: Any) -> Any:
        """Return a value of the transcript with what its braces stand for."""
        if isinstance(value, dict):
            return {key: self.filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.filled(one) for one in value]
        if not isinstance(value, str):
            return value
        return re.sub(r"\{(\w+)(?: ([\w.]+))?\}", self._stands_for, value)

    def _stands_for(self, found: re.Match[str]) -> str:
        what, argument = found.groups()
        if what == "silence":
            return _base64(np.zeros(round(float(argument) * 16_000), np.float32))
        if what == "speech":
            return _base64(read_clip(ASSETS / argument).audio)
        if what == "jpeg":
            return base64.b64encode(_picture()).decode()
        return self._names[what]


async def wait_for(frame: Any) -> Any:
    try:
        return await asyncio.wait_for(frame, PATIENCE_S)
    except TimeoutError as error:
        raise Mismatch(f"nothing came for {PATIENCE_S:g} s") from error


def _base64(samples: Any) -> str:
    return base64.b64encode(samples_to_f32(samples)).decode()


def _picture() -> bytes:
    image = Image.new("RGB", (320, 120), "white")
    ImageDraw.Draw(image).text((20, 30), "HELLO 42", fill="black", font_size=48)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


# ---- comparing


def compare(found: Any, expected: Any, where: str = "message") -> None:
    """Raises Mismatch unless everything that is expected is there."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or not expected.keys() <= found.keys():
            raise Mismatch(f"{where} is {shown(found)}, expected the fields {sorted(expected)}")
        for key, value in expected.items():
            compare(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) < len(expected):
            raise Mismatch(f"{where} is {shown(found)}, expected {len(expected)} items")
        for index, value in enumerate(expected):
            compare(found[index], value, f"{where}.{index}")
    elif not _fits(found, expected):
        raise Mismatch(f"{where} is {shown(found)}, expected {expected!r}")


def _fits(found: Any, expected: Any) -> bool:
    kinds = re.fullmatch(r"<([\w ]+)>", expected) if isinstance(expected, str) else None
    if kinds is None:
        return bool(found == expected and type(found) is type(expected))
    return any(KINDS[kind](found) for kind in kinds[1].split(" or "))


def _is_sound(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    samples = samples_from_f32(base64.b64decode(value, validate=True))
    return samples.size > 0 and bool(np.isfinite(samples).all())


KINDS = {
    "any": lambda value: True,
    "null": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "words": lambda value: isinstance(value, str) and bool(value.strip()),
    "sound": _is_sound,
    "list": lambda value: isinstance(value, list),
}


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 400 else text[:400] + "…"
