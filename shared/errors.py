"""Every failure that a client, a file or the network can cause, with the words all processes share.

A slug is the stable name of a kind of failure: clients see it beside the message, logs and
metrics use it as a label. `ws_close` is the WebSocket close code of a failure that ends its
session (None: the session goes on), `http_status` its status on the HTTP surface.
"""

from __future__ import annotations

from typing import ClassVar


class OmniError(Exception):
    """Base of all expected failures; its text may be shown to the client."""

    slug: ClassVar[str] = "internal"
    ws_close: ClassVar[int | None] = 1011
    http_status: ClassVar[int] = 500


class BadMessage(OmniError):
    """A message that is framed rightly but says something impossible; the session goes on."""

    slug = "bad_message"
    ws_close = None
    http_status = 422


class NotJson(OmniError):
    """A text frame that holds no JSON object: the framing itself is broken."""

    slug = "not_json"
    ws_close = 1007
    http_status = 400


class UnexpectedBinary(OmniError):
    """A binary frame where the dialect knows text frames only."""

    slug = "unexpected_binary"
    ws_close = 1003
    http_status = 415


class BadFrame(OmniError):
    """Bytes on a WebSocket that are no frames of a client."""

    slug = "bad_frame"
    ws_close = 1002
    http_status = 400


class BadAudio(BadMessage):
    """Audio bytes that are no audio: odd length, not finite, absurd range, too long."""

    slug = "bad_audio"


class BadImage(BadMessage):
    """An image that cannot be decoded or is larger than the limits."""

    slug = "bad_image"


class MediaFull(BadMessage):
    """What waits for the model fills its memory; the chunk is not used, the session goes on."""

    slug = "media_full"
    http_status = 503


class NotPrepared(BadMessage):
    """Input before `prepare`."""

    slug = "not_prepared"
    http_status = 409


class SessionPaused(BadMessage):
    """Input while the session is paused."""

    slug = "paused"
    http_status = 409


class FrameTooLarge(OmniError):
    """A WebSocket message above the frame limit; it has not been read."""

    slug = "frame_too_large"
    ws_close = 1009
    http_status = 413


class PayloadTooLarge(OmniError):
    """The body of an HTTP request is larger than its route accepts."""

    slug = "payload_too_large"
    ws_close = 1009
    http_status = 413


class BadRequest(OmniError):
    """Bytes that are no HTTP request."""

    slug = "bad_request"
    ws_close = 1002
    http_status = 400


class HeadTooLarge(OmniError):
    """The request line and headers of an HTTP request are too long."""

    slug = "head_too_large"
    ws_close = 1009
    http_status = 431


class TooManyConnections(OmniError):
    """The gateway holds as many requests or sessions as it can, of all clients together."""

    slug = "too_many_connections"
    ws_close = 1013
    http_status = 503


class Unauthorized(OmniError):
    """No API key, or one that is not in `security.api_keys`."""

    slug = "unauthorized"
    ws_close = 1008
    http_status = 401


class Forbidden(OmniError):
    """A key that is known, for something that only an administrator's may do."""

    slug = "forbidden"
    ws_close = 1008
    http_status = 403


class ForbiddenOrigin(OmniError):
    """A browser page of another origin tried to open a session or call a route."""

    slug = "forbidden_origin"
    ws_close = 1008
    http_status = 403


class AppDisabled(OmniError):
    """An administrator has switched this app off."""

    slug = "app_disabled"
    ws_close = 1008
    http_status = 403


class BadSessionId(OmniError):
    """A session id with characters or a length that no file name and no log should carry."""

    slug = "bad_session_id"
    ws_close = 1008
    http_status = 422


class TooManySessions(OmniError):
    """One client holds as many sessions as `security.max_sessions_per_client` allows."""

    slug = "too_many_sessions"
    ws_close = 1013
    http_status = 429


class QueueFull(OmniError):
    """As many clients wait as `service.max_queue_size` allows."""

    slug = "queue_full"
    ws_close = 1013
    http_status = 503


class Starting(OmniError):
    """No worker is ready yet, but at least one is loading."""

    slug = "starting"
    ws_close = 1013
    http_status = 503


class NoWorker(OmniError):
    """No worker is ready, loading or restarting."""

    slug = "no_worker"
    ws_close = 1013
    http_status = 503


class TicketCancelled(OmniError):
    """The place in the queue was taken back before a worker was free."""

    slug = "ticket_cancelled"
    ws_close = 1000
    http_status = 503


class NoFreeSlot(OmniError):
    """The worker has no free slot: the gateway's view was older than the worker's."""

    slug = "no_free_slot"
    ws_close = 1013
    http_status = 503


class WorkerLost(OmniError):
    """The worker's connection ended in the middle of a session."""

    slug = "worker_lost"
    ws_close = 1011
    http_status = 502


class SessionTimeout(OmniError):
    """A session outlived one of its limits (pause, idle, total length, time of an answer)."""

    slug = "session_timeout"
    ws_close = 1000
    http_status = 504


class ContextFull(OmniError):
    """A session without a sliding window has filled the model's context."""

    slug = "context_full"
    ws_close = 1000
    http_status = 413


class VoiceUnavailable(BadMessage):
    """A client brought a voice, and this back end cannot take one."""

    slug = "voice_unavailable"
    http_status = 409


class BadVoiceFile(BadMessage):
    """An uploaded voice that no decoder reads, that is too long, or that holds next to no sound."""

    slug = "bad_voice_file"
    http_status = 400


class VoiceUnreadable(OmniError):
    """A voice that the service keeps cannot be read any more."""

    slug = "voice_unreadable"
    ws_close = None


class NoStorage(OmniError):
    """The place for uploads is full, or the disk does not take them."""

    slug = "no_storage"
    ws_close = None
    http_status = 507


class BadRecordingFile(BadMessage):
    """An uploaded recording that is no container of its type, or holds next to nothing."""

    slug = "bad_recording_file"
    http_status = 400


class RecordingInUse(OmniError):
    """A recording whose session lives, or that is being finished or read, cannot be removed."""

    slug = "recording_in_use"
    ws_close = None
    http_status = 409


class RecordingUnfinished(OmniError):
    """A recording whose log has not been turned into its files yet cannot be downloaded."""

    slug = "recording_unfinished"
    ws_close = None
    http_status = 409


class ServerShutdown(OmniError):
    """The gateway is going down."""

    slug = "server_shutdown"
    ws_close = 1001
    http_status = 503


class SlowReader(OmniError):
    """The client reads its output too slowly for a live session."""

    slug = "slow_reader"
    ws_close = 1008
    http_status = 408


class ModelFault(OmniError):
    """One unit failed inside the model; neighbours and later units are untouched."""

    slug = "model_fault"
    ws_close = None
    http_status = 500


class EngineFault(OmniError):
    """The compute device is lost or stuck; the worker has to be restarted."""

    slug = "engine_fault"
    ws_close = 1011
    http_status = 503


class ConfigError(OmniError):
    """`config.json` or the command line cannot be used as given."""

    slug = "config_error"


class ModelLoadError(OmniError):
    """A checkpoint or an embedded weight file is missing, damaged or of the wrong kind."""

    slug = "model_load_error"


class CompileCacheError(OmniError):
    """The directory of the compile cache, or of a worker's copy of it, cannot be used."""

    slug = "compile_cache_error"


def http_statuses() -> dict[str, int]:
    """Return every slug there is with its status."""
    kinds, found = [OmniError], dict[str, int]()
    while kinds:
        kind = kinds.pop()
        # Kinds that only narrow another one share its slug; the slug's own kind counts.
        if "slug" in vars(kind):
            found[kind.slug] = kind.http_status
        kinds += kind.__subclasses__()
    return found


def slugs() -> frozenset[str]:
    """Return every slug there is: the bound on what a metric's label may say."""
    return frozenset(http_statuses())
