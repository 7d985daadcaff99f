"""`WS /ws/duplex/{session_id}`: one full-duplex session in dialect G0."""

from __future__ import annotations

import logging
import re

from fastapi import APIRouter, WebSocket
from starlette.convertors import Convertor, register_url_convertor
from starlette.websockets import WebSocketDisconnect

from gateway.context import gateway_of
from gateway.dialects.g0 import G0
from gateway.relay import Relay
from shared.errors import BadSessionId, OmniError, ServerShutdown
from shared.limits import MAX_SESSION_ID_CHARS
from shared.logs import session_id_in_context
from shared.protocol import RequestType

log = logging.getLogger(__name__)
router = APIRouter()

AUDIO_PREFIX = "adx_"
VALID_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_SESSION_ID_CHARS}}}")


class AnyText(Convertor[str]):
    """The rest of a path as it is: `path` knows no line break, and would lose one at the end."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_text", AnyText())


@router.websocket("/ws/duplex/{session_id:any_text}")
async def duplex(socket: WebSocket, session_id: str) -> None:
    gateway = gateway_of(socket)
    dialect = G0()
    # Accepted before it is judged: a refused upgrade reaches browsers without any reason.
    await socket.accept()
    try:
        gateway.guard.check_origin(socket)
        gateway.guard.check_key(socket)
        check_session_id(session_id)
        if gateway.closing.is_set():
            raise ServerShutdown("The service is going down")
        session_id_in_context.set(session_id)
        with gateway.guard.count_session(socket), gateway.session():
            await Relay(gateway, socket, dialect, session_id, request_type(session_id)).run()
    except OmniError as error:
        fault = gateway.desk.translate(error, "/ws/duplex")
        log.info("session refused slug=%s", fault.slug)
        try:
            await socket.send_text(dialect.failure(fault.slug, fault.message))
            await socket.close(fault.ws_close or 1000, fault.close_reason)
        except WebSocketDisconnect:
            # Gone before it could be told.
            return


def check_session_id(session_id: str) -> None:
    """Raises BadSessionId unless the id is safe as a file name and in a log line."""
    if not VALID_ID.fullmatch(session_id):
        raise BadSessionId(
            f"The session id has to be 1 to {MAX_SESSION_ID_CHARS} letters, digits, '_' or '-'"
        )


def request_type(session_id: str) -> RequestType:
    return "audio_duplex" if session_id.startswith(AUDIO_PREFIX) else "omni_duplex"
