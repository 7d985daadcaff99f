"""What the queue's waiting times are made of, to be read and changed while the gateway runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from gateway.context import Gateway, gateway_of, require_admin
from gateway.dialects.g0_values import MAX_SHOWN_CHARS
from shared.config import ExpectedSeconds
from shared.protocol import RequestType

router = APIRouter(prefix="/api/config")

WIRE_NAMES: dict[RequestType, str] = {
    "chat": "chat",
    "half_duplex_audio": "half_duplex",
    "audio_duplex": "audio_duplex",
    "omni_duplex": "omni_duplex",
}


class EtaChange(BaseModel):
    """Expected lengths in seconds and the weight of the newest sample; what is missing or null
    stays as it is. Names that are not known come too: the demo's page sends one of its own."""

    model_config = ConfigDict(extra="allow", strict=True)

    eta_chat_s: ExpectedSeconds | None = None
    eta_half_duplex_s: ExpectedSeconds | None = None
    eta_audio_duplex_s: ExpectedSeconds | None = None
    eta_omni_duplex_s: ExpectedSeconds | None = None
    ema_alpha: Annotated[float, Field(gt=0, le=1)] | None = None


@router.get("/eta")
async def show_eta(request: Request) -> dict[str, Any]:
    return _report(gateway_of(request))


@router.put("/eta", dependencies=[Depends(require_admin)])
async def change_eta(request: Request, change: EtaChange) -> dict[str, Any]:
    """Takes effect at once and lasts until the gateway ends; what was learned stays. The answer
    names in `ignored` what has no effect."""
    gateway = gateway_of(request)
    values = change.model_dump(exclude_none=True)
    durations = gateway.durations
    durations.alpha = values.get("ema_alpha", durations.alpha)
    for request_type, name in WIRE_NAMES.items():
        durations.base_s[request_type] = values.get(f"eta_{name}_s", durations.base_s[request_type])
    gateway.queue.estimate_anew()
    ignored = sorted(name[:MAX_SHOWN_CHARS] for name in change.model_extra or ())
    return {**_report(gateway), "ignored": ignored}


def _report(gateway: Gateway) -> dict[str, Any]:
    durations = gateway.durations
    learned = {name: durations.learned[kind] for kind, name in WIRE_NAMES.items()}
    return {
        "config": {
            **{f"eta_{name}_s": durations.base_s[kind] for kind, name in WIRE_NAMES.items()},
            "ema_alpha": durations.alpha,
        },
        "ema_alpha": durations.alpha,
        **{f"ema_{name}_s": one.mean_s for name, one in learned.items()},
        **{f"ema_{name}_samples": one.n_samples for name, one in learned.items()},
    }
