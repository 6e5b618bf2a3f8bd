"""Who waits, and who is being prefilled: by class, in the order of arrival."""

from __future__ import annotations

from bisect import insort

from firstlight.scheduling.progress import Phase, Progress
from firstlight.scheduling.sampling import ServiceClass


def _order(progress: Progress) -> int:
    return progress.order


class Queues:
    """waiting, prefilling: each class's requests, oldest first. A preempted request comes back to its old place."""

    def __init__(self) -> None:
        self.waiting: dict[ServiceClass, list[Progress]] = {service: [] for service in ServiceClass}
        self.prefilling: dict[ServiceClass, list[Progress]] = {service: [] for service in ServiceClass}

    def wait(self, progress: Progress) -> None:
        """The request waits, at its place."""
        progress.phase = Phase.WAITING
        insort(self.waiting[progress.request.service], progress, key=_order)

    def stop_waiting(self, progress: Progress) -> None:
        """It waits no longer."""
        self.waiting[progress.request.service].remove(progress)

    def prefill(self, progress: Progress) -> None:
        """Its prefill begins."""
        insort(self.prefilling[progress.request.service], progress, key=_order)

    def stop_prefill(self, progress: Progress) -> None:
        """Its prefill is planned to the end, or given up."""
        self.prefilling[progress.request.service].remove(progress)
