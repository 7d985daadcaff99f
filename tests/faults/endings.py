"""Every way in which a session can end, by mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from tests.faults import clients, turn_clients
from tests.faults.clients import Target

Ending = Callable[[Target], Coroutine[Any, Any, None]]

DUPLEX: Final[tuple[Ending, ...]] = (
    clients.stopped,
    clients.stopped_with_chunks_unanswered,
    clients.closed,
    clients.killed,
    clients.reset_in_mid_frame,
    clients.ended_in_mid_frame,
    clients.killed_while_the_gateway_connects,
    clients.killed_between_queue_done_and_prepare,
    clients.killed_while_the_worker_prefills,
    clients.closed_while_the_model_speaks,
    clients.killed_while_the_model_speaks,
    clients.killed_while_paused,
    clients.outstayed_its_pause,
    clients.sent_garbage_text,
    clients.sent_garbage_bytes,
    clients.sent_broken_frames,
    clients.sent_bad_messages_then_stopped,
    clients.sent_bad_images_then_stopped,
    clients.announced_an_over_long_message,
    clients.sent_no_http,
    clients.left_in_the_handshake,
    clients.was_refused,
    clients.cut_on_the_way,
)
HALF_DUPLEX: Final[tuple[Ending, ...]] = (
    turn_clients.turns_stopped,
    turn_clients.turns_stopped_in_mid_answer,
    turn_clients.turns_closed_in_mid_answer,
    turn_clients.turns_killed_in_mid_answer,
    turn_clients.turns_reset_in_mid_question,
    turn_clients.turns_interrupted_then_stopped,
    turn_clients.turns_killed_while_the_worker_prefills,
    turn_clients.turns_sent_garbage,
    turn_clients.turns_sent_bad_messages_then_stopped,
    turn_clients.turns_announced_an_over_long_message,
)
CHAT: Final[tuple[Ending, ...]] = (
    turn_clients.chat_answered,
    turn_clients.chat_closed_in_mid_answer,
    turn_clients.chat_killed_in_mid_answer,
    turn_clients.chat_killed_at_once,
    turn_clients.chat_killed_before_it_asks,
    turn_clients.chat_asked_twice,
    turn_clients.chat_sent_garbage,
    turn_clients.chat_sent_a_bad_request,
    turn_clients.chat_announced_an_over_long_message,
    turn_clients.chat_given_up_over_http,
)
ENDINGS: Final[tuple[Ending, ...]] = (*DUPLEX, *HALF_DUPLEX, *CHAT)
"""Those that take little time and at most one slot."""

WARM_UP: Final[tuple[Ending, ...]] = (
    clients.killed_while_the_model_speaks,
    turn_clients.turns_stopped,
    turn_clients.chat_answered,
)
"""One of each mode that is answered: afterwards everything that is made on first use is there."""

SLOW_ENDINGS: Final[tuple[Ending, ...]] = (clients.stopped_reading, clients.gone_silent)

DUPLEX_QUEUED: Final[tuple[Ending, ...]] = (
    clients.killed_while_queued,
    clients.closed_while_queued,
)
HALF_DUPLEX_QUEUED: Final[tuple[Ending, ...]] = (
    turn_clients.turns_killed_while_queued,
    turn_clients.turns_stopped_while_queued,
)
CHAT_QUEUED: Final[tuple[Ending, ...]] = (
    turn_clients.chat_killed_while_queued,
    turn_clients.chat_closed_while_queued,
)
NEEDS_ALL_SLOTS: Final[tuple[Ending, ...]] = (
    *DUPLEX_QUEUED,
    *HALF_DUPLEX_QUEUED,
    *CHAT_QUEUED,
)

_MODES: Final[Mapping[str, str]] = {
    **{ending.__name__: "half_duplex" for ending in (*HALF_DUPLEX, *HALF_DUPLEX_QUEUED)},
    **{ending.__name__: "chat" for ending in (*CHAT, *CHAT_QUEUED)},
}


def by_mode(ended: Mapping[str, int]) -> dict[str, int]:
    """Counts of endings, by their names, added up for each mode; those not listed are duplex."""
    counts: Counter[str] = Counter()
    for name, count in ended.items():
        counts[_MODES.get(name, "duplex")] += count
    return dict(counts)
