"""The session sockets of dialect G0: `/ws/duplex`, `/ws/half_duplex`, `/ws/chat`."""

from __future__ import annotations

import logging
import re
import secrets

from fastapi import APIRouter, WebSocket
from starlette.convertors import Convertor, register_url_convertor
from starlette.websockets import WebSocketDisconnect

from gateway.context import gateway_of
from gateway.dialects.contract import Dialect
from gateway.dialects.g0_chat import G0Chat
from gateway.dialects.g0_duplex import G0Duplex
from gateway.dialects.g0_half_duplex import G0HalfDuplex
from gateway.faults import Fault
from gateway.relay import Relay
from shared.errors import BadSessionId, OmniError, ServerShutdown
from shared.limits import MAX_SESSION_ID_CHARS
from shared.logs import session_id_in_context
from shared.protocol import Open

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
    if session_id.startswith(AUDIO_PREFIX):
        opening, app_id = Open(session_id, "duplex", "audio_duplex"), "audio_duplex"
    else:
        opening, app_id = Open(session_id, "duplex", "omni_duplex"), "omni"
    await _serve(socket, opening, G0Duplex(), app_id)


@router.websocket("/ws/half_duplex/{session_id:any_text}")
async def half_duplex(socket: WebSocket, session_id: str) -> None:
    opening = Open(session_id, "half_duplex", "half_duplex_audio")
    await _serve(socket, opening, G0HalfDuplex(session_id), "half_duplex_audio")


@router.websocket("/ws/chat")
async def chat(socket: WebSocket) -> None:
    await _serve(socket, chat_opening(), G0Chat(), "turnbased")


@router.websocket("/{path:any_text}")
async def no_socket(socket: WebSocket) -> None:
    """No route has taken it. The framework would answer with 403, as if a key were wrong."""
    fault = Fault("not_found", "There is no socket here", None, 404)
    await socket.send_denial_response(gateway_of(socket).desk.reply(fault, socket))


def chat_opening() -> Open:
    """A chat request has no id of its client's: return one of ours."""
    return Open(f"chat_{secrets.token_hex(6)}", "chat", "chat")


async def _serve(socket: WebSocket, opening: Open, dialect: Dialect, app_id: str) -> None:
    gateway = gateway_of(socket)
    # Accepted before it is judged: a refused upgrade reaches browsers without any reason.
    await socket.accept()
    try:
        gateway.guard.check_origin(socket)
        gateway.guard.check_key(socket)
        check_session_id(opening.session_id)
        gateway.apps.require(app_id)
        if gateway.closing.is_set():
            raise ServerShutdown("The service is going down")
        session_id_in_context.set(opening.session_id)
        with gateway.guard.count_session(socket), gateway.session():
            await Relay(gateway, socket, dialect, opening).run()
    except OmniError as error:
        fault = gateway.desk.translate(error, f"/ws/{opening.mode}")
        log.info("session refused slug=%s", fault.slug)
        try:
            frame = dialect.failure(fault.slug, fault.message, gateway.clock.wall())
            await socket.send_text(frame)
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
