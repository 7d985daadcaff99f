"""The bounds on what a client may send, the same on both legs (client-gateway, gateway-worker)."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024

MAX_FRAME_BYTES: Final = 128 * MIB
"""Largest WebSocket frame; the reference's own clients rely on it."""

LARGE_FRAME_BYTES: Final = 4 * MIB
"""A frame above this counts as large: parsed off the event loop, few at a time per process."""

MAX_LARGE_FRAMES: Final = 4
"""Large frames being parsed at the same time in one process."""

MAX_BODY_BYTES: Final = MIB
"""Largest body of an HTTP request, but for the three kinds that carry media."""

MAX_CHAT_BODY_BYTES: Final = MAX_FRAME_BYTES
MAX_VOICE_BODY_BYTES: Final = 32 * MIB
MAX_RECORDING_BODY_BYTES: Final = 200 * MIB + MIB
"""Of an upload of 200 MiB in its multipart frame."""

REQUEST_HEAD_TIMEOUT_S: Final = 10.0
"""From the first moment of a connection, or the first byte of a later request, to its whole head;
a TLS handshake may take as long again."""

REQUEST_BODY_TIMEOUT_S: Final = 60.0
"""From the head of a request to the end of its body, and longer for one that is announced large:"""
MIN_BODY_BYTES_PER_S: Final = 256 * 1024
"""Such a body may come this slowly; 200 MiB in a quarter of an hour."""

MAX_REQUEST_HEAD_BYTES: Final = 64 * 1024

KEEP_ALIVE_S: Final = 5
"""A connection may stay open without a request for this long."""

MAX_IDLE_CONNECTIONS: Final = 512
"""Connections without a request; beyond it the client that has most of them loses its oldest."""

MAX_REQUESTS: Final = 1024
"""HTTP requests that are answered at the same time."""

MAX_SESSIONS: Final = 4096
"""Session sockets, waiting ones included, of one gateway."""

INPUT_SAMPLE_RATE_HZ: Final = 16_000
OUTPUT_SAMPLE_RATE_HZ: Final = 24_000

MAX_CHUNK_S: Final = 30.0
"""Longest audio chunk of one message."""

MAX_REFERENCE_VOICE_S: Final = 60.0
MAX_TURN_S: Final = 30.0
"""A user's turn of half duplex; what is longer is answered there."""

MAX_CLIP_S: Final = 300.0
MAX_VIDEO_S: Final = 60.0
"""A piece of sound and a film in a chat message."""

MAX_STACK_FRAMES: Final = 8
"""Pictures of each second of a film."""

MAX_CHAT_PARTS: Final = 2048
MAX_CHAT_CHARS: Final = 200_000
"""Messages and their parts of one chat request, and its text: what no context holds is refused
before it occupies a compute thread."""

MAX_IMAGE_PIXELS: Final = 50_000_000
MAX_IMAGES_PER_CHUNK: Final = 16

MAX_MEDIA_BYTES: Final = 1024 * MIB
"""Chunks and decoded pictures that wait for the model in one worker. A session below its even
share of it is never refused, so hostile neighbours can fill it at most twice."""

MAX_SESSION_MEDIA_BYTES: Final = MAX_FRAME_BYTES + 3 * MAX_IMAGE_PIXELS
"""Of these, those of one session: one largest chunk, as it came and decoded."""

MAX_SAMPLE_MAGNITUDE: Final = 64.0
"""Float samples are nominally in [-1, 1]; beyond this it is another encoding, not loud audio."""

MAX_PROMPT_CHARS: Final = 16_000
MAX_SESSION_ID_CHARS: Final = 128

IDLE_TIMEOUT_S: Final = 120.0
"""A session without valid input for this long is closed."""

DEAD_CLIENT_TIMEOUT_S: Final = 20.0
"""A client without any frame or pong for this long is gone."""

MAX_INBOX_UNITS: Final = 8
"""Units of one session that wait for the model; older input is dropped with a notice."""

MAX_OUTBOX_BYTES: Final = 8 * MIB
"""Output that waits for one client to read; beyond it the session ends as a slow reader."""

WS_PING_INTERVAL_S: Final = 20.0
WS_PING_TIMEOUT_S: Final = 60.0
"""Pongs are read by the event loop; 60 s lets a peer survive one long blocking step."""
