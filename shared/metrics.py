"""What the metrics of gateway and worker have in common, so that they can be compared."""

from __future__ import annotations

from prometheus_client import disable_created_metrics

from shared.errors import slugs

# A creation time beside every counter doubles the answer and tells nobody anything.
disable_created_metrics()  # type: ignore[no-untyped-call]

OTHER = "other"
"""Label of what is in no list of ours: a peer of another version may say anything."""

# fmt: off
UNIT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0,
)
# fmt: on


def slug_labels() -> list[str]:
    """Return everything that a failure can be counted as."""
    return [*sorted(slugs()), OTHER]
